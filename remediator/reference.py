"""Writes docs/settings-remediator.md from the settings.

`python -m remediator.reference` writes it; `--check` writes nothing and exits 1 when the page lags behind the code.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings

from gpuwarden.settings import table, write_pages
from remediator.settings import ExecuteSettings, ServeSettings

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare it; 1 when it lags."""
    pages = {"settings-remediator.md": settings_page}
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="remediator.reference", about=about, docs=DOCS, argv=argv)


def settings_page() -> str:
    """docs/settings-remediator.md."""
    return "\n".join(
        [
            "# Settings of the remediator",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/settings.py, not this page. -->",
            "",
            "Two processes share one ledger: `gpuwarden remediator serve` receives alerts, and",
            "`gpuwarden remediator execute` acts on them. Each takes its settings as options or from the environment;",
            "an option wins.",
            "",
            *_section("serve", ServeSettings),
            *_section("execute", ExecuteSettings),
        ]
    )


def _section(role: str, settings: type[BaseSettings]) -> Iterator[str]:
    yield f"## `gpuwarden remediator {role}`"
    yield ""
    yield (settings.__doc__ or "").strip()
    yield ""
    yield from table(settings)
    yield ""


if __name__ == "__main__":
    sys.exit(main())
