"""The pages of docs/ in a checkout or a wheel."""

import re
from collections.abc import Iterable, Mapping
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


def by_heading(names: Iterable[str], headings: Mapping[str, str]) -> dict[str, list[str]]:
    """Sort names under the first heading whose pattern matches.

    Raises:
        ValueError: a name matches none.
    """
    found: dict[str, list[str]] = {heading: [] for heading in headings}
    for name in names:
        heading = next((each for each, pattern in headings.items() if re.search(pattern, name)), None)
        if heading is None:
            raise ValueError(f"{name} is under no heading of the reference: add one")
        found[heading].append(name)
    return {heading: of_it for heading, of_it in found.items() if of_it}


def marked(text: str) -> str:
    """A help text as Markdown: options and variables as code, pages of docs/ as links relative to docs/reference/."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [_PAGE.sub(r"[\2](../\1\2.md)", _CODE.sub(r"`\g<0>`", part)) for part in parts[::2]]
    return "`".join(parts)


_CODE: Final = re.compile(
    r"(?<![\w-])--[a-z][a-z-]*|\$[A-Z_]{2,}|(?<![\w`])(?:unix://)?/(?:var|run|etc|home)/[\w./-]*\w"
)
_PAGE: Final = re.compile(r"docs/([a-z-]+/)([a-z-]+)\.md")


def unit_of(series: str, meaning: str) -> str:
    """The unit of a series."""
    word = series.removesuffix("_total").rpartition("_")[2]
    if word in _UNITS:
        return _UNITS[word]
    if "always 1" in meaning or (meaning.startswith("1 for ") and not re.search(r"\b0\b", meaning)):
        return "1"
    return "1 or 0" if meaning.startswith("1 ") else "count"


_UNITS: Final = {"second": "a second", "seconds": "seconds", "bytes": "bytes", "ratio": "ratio, 0 to 1",
                 "celsius": "degrees Celsius", "watts": "watts", "hertz": "hertz"}  # fmt: skip
