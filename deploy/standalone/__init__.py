"""`gpuwarden up` and `gpuwarden init`: the whole chain on one host, as child processes or as systemd units."""
