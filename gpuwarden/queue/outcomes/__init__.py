"""What jobs return and raise."""
