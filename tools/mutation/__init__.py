"""Mutation tests of alert rules and product: plant one fault at a time, and check that a test fails."""
