"""Dashboards as code: what they show is written here, and the JSON that Grafana loads is rendered from it."""
