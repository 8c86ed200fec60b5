"""Hosts: their tokens and reports, and which are lost."""
