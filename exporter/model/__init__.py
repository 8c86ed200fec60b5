"""GPUs, containers, workers, snapshots. Pure."""
