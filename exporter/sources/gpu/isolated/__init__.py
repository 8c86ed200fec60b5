"""GPU drivers in child processes."""
