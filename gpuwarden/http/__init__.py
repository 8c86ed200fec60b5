"""HTTP for both programs."""
