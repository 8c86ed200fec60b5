"""What a GPU job imports, and what the exporter and the remediator share."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwarden.tasks import Queue, current

__version__ = "0.1.0"

__all__ = ["Queue", "__version__", "current"]


def __getattr__(name: str) -> Any:
    """Import `Queue` and `current` on first use."""
    if name not in ("Queue", "current"):
        raise AttributeError(f"module 'gpuwarden' has no attribute {name!r}")
    try:
        tasks = importlib.import_module("gpuwarden.tasks")
    except ModuleNotFoundError as error:
        raise ImportError(f"gpuwarden.{name} needs {error.name!r}: in a checkout, pip install '.[jobs]'") from error
    return getattr(tasks, name)
