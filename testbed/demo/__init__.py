"""`make demo`: the main function with real programs."""
