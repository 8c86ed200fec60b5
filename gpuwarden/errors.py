"""The base of this package's errors, and the stop of a worker."""


class GpuwardenError(Exception):
    """Base of gpuwarden's errors."""


class WorkerStopping(BaseException):
    """SIGTERM or SIGINT: release the job and end."""
