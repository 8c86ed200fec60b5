"""Revisions of the tables. One that was released never changes."""
