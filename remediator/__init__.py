"""The remediator: receives alerts, confirms them with the exporter, and acts."""
