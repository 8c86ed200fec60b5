"""GPUs, containers, workers, and one snapshot of them. Pure."""
