"""What a GPU job imports, and what the exporter and the remediator share: state files, job states and the queue."""

__version__ = "0.1.0"
