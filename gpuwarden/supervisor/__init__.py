"""`gpuwarden run`: a supervisor of a command, which ends and restarts it. Standard library only."""
