"""The items of a run, who failed them, and how many."""
