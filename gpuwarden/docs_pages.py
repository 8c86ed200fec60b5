"""The pages of docs/ that ship beside the code: a runbook an alert, and what those link to.

They go by their paths below docs/, such as `runbooks/GpuwardenJobStalled.md`, in a checkout and in an installed
package, whose wheel holds them below this one. Markdown, UTF-8.
"""

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
_CHECKOUT: Final = _HERE.parent
FOLDER: Final = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else _HERE) / "docs"
"""Where the pages lie."""

RUNBOOKS: Final = "docs/runbooks/"
"""Below which path they are served, and below which the annotation `runbook_url` of an alert looks for them."""


def pages() -> dict[str, Path]:
    """The file of each page, by its path below docs/. FileNotFoundError where the installation is not whole."""
    found = {
        str(path.relative_to(FOLDER)): path for pattern in ("*.md", "runbooks/*.md") for path in FOLDER.glob(pattern)
    }
    if not found:
        raise FileNotFoundError(f"no *.md in {FOLDER}: the installation is not whole; install gpuwarden anew")
    return dict(sorted(found.items()))


def unit_of(series: str, meaning: str) -> str:
    """The unit of a series, as its name and its help tell it."""
    word = series.removesuffix("_total").rpartition("_")[2]
    if word in _UNITS:
        return _UNITS[word]
    if "always 1" in meaning or meaning.startswith("1 for "):
        return "1"
    return "1 or 0" if meaning.startswith("1 ") else "count"


_UNITS: Final = {"second": "a second", "seconds": "seconds", "bytes": "bytes", "ratio": "ratio, 0 to 1",
                 "celsius": "degrees Celsius", "watts": "watts", "hertz": "hertz"}  # fmt: skip
