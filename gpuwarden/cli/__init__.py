"""`gpuwarden COMMAND`: the entry point, and one file for each command of the queue."""
