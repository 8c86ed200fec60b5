"""The panels of the overview by subject, one file each: `PANELS` in reading order."""
