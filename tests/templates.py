"""Databases with their tables already made: to make them takes longer than most tests."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Files:
    """Two SQLite files, to be copied."""

    ledger: Path
    queue: Path


def empty_file(kind: type[JobStore] | type[Ledger], file: Path) -> Path:
    """Make the tables of one kind in a file that nobody has open afterwards."""
    kind.open(f"sqlite:///{file}").close()
    return file


def copied(template: Path, file: Path) -> str:
    """Copy it there; the copy's URL."""
    shutil.copyfile(template, file)
    return f"sqlite:///{file}"
