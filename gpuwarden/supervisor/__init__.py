"""`gpuwarden run`: a supervisor of a command, which ends and restarts it. `run` needs the standard library only."""
