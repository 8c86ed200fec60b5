"""Engines, PostgreSQL and workers for demo, tests and benchmarks."""
