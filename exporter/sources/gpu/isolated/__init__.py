"""GPU drivers in a child process that can be killed when a call hangs."""
