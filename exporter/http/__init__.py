"""The exporter's pages: `/metrics` and `/evidence`."""
