"""Programs for those who work on gpuwarden. Nothing here ships."""
