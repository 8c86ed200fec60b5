"""Stacks, logs and curves of a target, taken before it is stopped."""
