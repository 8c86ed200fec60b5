"""Sources of containers."""
