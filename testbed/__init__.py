"""What the demo, the tests and the benchmarks stand on: real engines, PostgreSQL, a worker image. Not shipped."""
