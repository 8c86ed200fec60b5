"""Template databases: tables take longer to create than most tests run."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Files:
    """Two SQLite files to copy."""

    ledger: Path
    queue: Path


def empty_file(kind: type[JobStore] | type[Ledger], file: Path) -> Path:
    """Create the tables of one kind in a file, and close it."""
    kind.open(f"sqlite:///{file}").close()
    return file


def copied(template: Path, file: Path) -> str:
    """Copy a file; return the URL of the copy."""
    shutil.copyfile(template, file)
    return f"sqlite:///{file}"
