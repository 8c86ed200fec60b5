"""The pages of docs/ in a checkout or a wheel."""

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
_CHECKOUT: Final = _HERE.parent
FOLDER: Final = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else _HERE) / "docs"
"""Folder of the pages."""

RUNBOOKS: Final = "docs/runbooks/"
"""URL path of the runbooks."""


def pages() -> dict[str, Path]:
    """The pages by path. FileNotFoundError if the installation is incomplete."""
    found = {str(path.relative_to(FOLDER)): path for path in FOLDER.rglob("*.md")}
    if not found:
        raise FileNotFoundError(f"no *.md in {FOLDER}: the installation is incomplete; reinstall gpuwarden")
    return dict(sorted(found.items()))


def unit_of(series: str, meaning: str) -> str:
    """The unit of a series."""
    word = series.removesuffix("_total").rpartition("_")[2]
    if word in _UNITS:
        return _UNITS[word]
    if "always 1" in meaning or meaning.startswith("1 for "):
        return "1"
    return "1 or 0" if meaning.startswith("1 ") else "count"


_UNITS: Final = {"second": "a second", "seconds": "seconds", "bytes": "bytes", "ratio": "ratio, 0 to 1",
                 "celsius": "degrees Celsius", "watts": "watts", "hertz": "hertz"}  # fmt: skip
