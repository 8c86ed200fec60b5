"""HTTP probes of inference servers."""
