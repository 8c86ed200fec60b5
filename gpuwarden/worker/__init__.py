"""`gpuwarden worker`: claim a job, run it, renew its lease."""
