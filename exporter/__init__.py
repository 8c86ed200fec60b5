"""Publishes, per host, what its workers, containers and GPUs are seen to do. It observes; it decides and acts on nothing."""
