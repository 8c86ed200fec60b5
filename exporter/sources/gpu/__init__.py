"""Sources of GPU readings."""
