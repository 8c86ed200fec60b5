"""Templates for a host, and `standalone`: the whole chain on one host."""
