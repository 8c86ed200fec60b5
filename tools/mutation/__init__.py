"""Mutation tests: plant one fault at a time, in the alert rules and in the product, and see whether the tests fail."""
