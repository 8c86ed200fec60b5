"""What the exporter knows at one moment: GPUs, containers, workers and one snapshot of all. Pure."""
