"""Conclusions from readings over time. Pure."""
