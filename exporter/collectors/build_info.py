"""Version, commit and Python of this gpuwarden.

The commit is $GPUWARDEN_REVISION, else what pip recorded for a Git install (PEP 610, `direct_url.json`).
"""

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from gpuwarden import __version__

_REVISION = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, kw_only=True)
class Build:
    """`revision` is empty if it is unknown."""

    version: str
    revision: str
    python: str


@cache
def here() -> Build:
    """The running build."""
    return Build(version=__version__, revision=revision(os.environ, _direct_url()), python=platform.python_version())


def revision(environ: Mapping[str, str], direct_url: str | None) -> str:
    """The commit; empty if unknown."""
    commit = environ.get("GPUWARDEN_REVISION", "")
    if not commit and direct_url is not None:
        try:
            commit = json.loads(direct_url)["vcs_info"]["commit_id"]
        except (ValueError, KeyError, TypeError):
            commit = ""
    return commit if isinstance(commit, str) and _REVISION.fullmatch(commit) else ""


def _direct_url() -> str | None:
    try:
        return metadata.distribution("gpuwarden").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
