"""`gpuwarden up` and `gpuwarden init`: all programs on one host."""
