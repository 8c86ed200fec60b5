"""The tests; a name is the sentence that the test proves."""
