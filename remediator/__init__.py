"""Receives alerts, confirms them from its host's own exporter, and mends: the one program here that acts."""
