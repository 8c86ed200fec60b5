"""The exporter: publishes the state of a host's workers, containers and GPUs. Read-only."""
