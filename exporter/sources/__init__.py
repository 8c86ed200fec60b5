"""Raw readings, one file a source. A source reads; what its readings mean is decided elsewhere."""
