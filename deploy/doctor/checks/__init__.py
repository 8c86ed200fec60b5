"""Checks of single links: pure functions of `Facts`. A check returns `None` for a part that the user excluded."""
