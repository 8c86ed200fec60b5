"""Panels of the overview, one file per subject: `PANELS` in reading order."""
