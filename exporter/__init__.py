"""Publishes, per host, what its workers, containers and GPUs are seen to do. It only observes."""
