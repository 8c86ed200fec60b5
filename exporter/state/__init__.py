"""Files that outlive the exporter."""
