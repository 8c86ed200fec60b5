"""The base of this package's errors."""


class GpuwardenError(Exception):
    """Base of gpuwarden's errors."""
