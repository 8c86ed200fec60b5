"""Dashboards as code. The JSON that Grafana loads is rendered from this package."""
