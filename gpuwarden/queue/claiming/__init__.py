"""Statements of a claim."""
