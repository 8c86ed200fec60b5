"""The items of a run and their outcomes."""
