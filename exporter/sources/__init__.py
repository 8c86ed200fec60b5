"""Raw readings."""
