"""The reference pages that need all programs: commands, alerts and the HTTP API."""
