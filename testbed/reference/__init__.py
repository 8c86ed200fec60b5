"""The reference pages that need all programs: commands, alerts, the HTTP API and the gateway's metrics."""
