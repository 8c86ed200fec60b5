"""Measurements of what watching costs and how long mending takes: medians and ratios of one run, and never a verdict.

Nothing here fails because something was slow. A figure stands beside another one of the same run, on the same machine.
"""
