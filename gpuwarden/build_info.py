"""Which gpuwarden this is: its version, the commit it was made of where that is known, and the Python that runs it.

The commit is $GPUWARDEN_REVISION, which the image sets; else what pip wrote down as it installed from a Git repository
(PEP 610, `direct_url.json`).
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
    """`revision` is empty where it is unknown."""

    version: str
    revision: str
    python: str


@cache
def here() -> Build:
    """The one that runs."""
    return Build(version=__version__, revision=revision(os.environ, _direct_url()), python=platform.python_version())


def revision(environ: Mapping[str, str], direct_url: str | None) -> str:
    """The commit, from the environment and from what pip wrote down; empty where neither tells one."""
    told = environ.get("GPUWARDEN_REVISION", "")
    if not told and direct_url is not None:
        try:
            told = json.loads(direct_url)["vcs_info"]["commit_id"]
        except (ValueError, KeyError, TypeError):
            told = ""
    return told if isinstance(told, str) and _REVISION.fullmatch(told) else ""


def _direct_url() -> str | None:
    try:
        return metadata.distribution("gpuwarden").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
