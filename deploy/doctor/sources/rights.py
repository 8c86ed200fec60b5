"""Whether this user may read a file."""

import os
from pathlib import Path


def is_denied(path: Path, mode: int = os.R_OK) -> bool:
    """Whether the path may exist, but not for this user. A missing one is not denied."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, mode)
