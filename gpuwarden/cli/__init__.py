"""`gpuwarden COMMAND`: the entry point and the queue's commands."""
