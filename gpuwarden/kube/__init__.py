"""Access to Kubernetes, for all programs."""
