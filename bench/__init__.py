"""Measure what gpuwarden costs and how fast it acts: medians and ratios of one run on one machine.

A slow result is not a failure. A ratio compares two figures of the same run.
"""
