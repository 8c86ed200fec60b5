"""What the exporter keeps in `--state-dir` across restarts."""
