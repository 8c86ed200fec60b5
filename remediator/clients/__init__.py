"""Clients of the exporter, Prometheus, Alertmanager and the job queue."""
