"""The root of every error this package raises on purpose. A message says what was found, wanted, and to do."""


class GpuwardenError(Exception):
    """Base of gpuwarden's own errors; anything else that escapes is a defect."""
