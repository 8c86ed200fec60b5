"""Writes docs/settings-remediator.md from the settings.

`python -m remediator.reference` writes it; `--check` writes nothing and exits 1 when the page lags behind the code.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings

from remediator.settings import ExecuteSettings, ServeSettings

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare it; 1 when it lags."""
    parser = argparse.ArgumentParser(
        prog="python -m remediator.reference", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page lags behind the code")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the page (default: %(default)s)")
    chosen = parser.parse_args(argv)
    path: Path = chosen.docs / "settings-remediator.md"
    page = settings_page()
    if path.exists() and path.read_text(encoding="utf-8") == page:
        return 0
    if chosen.check:
        print(f"{path} lags behind the code: python -m remediator.reference", file=sys.stderr)
        return 1
    path.write_text(page, encoding="utf-8")
    return 0


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
    yield "| option | environment variable | default | meaning |"
    yield "|---|---|---|---|"
    prefix = settings.model_config.get("env_prefix", "")
    for name, field in settings.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|")
        yield f"| `--{name.replace('_', '-')}` | `{prefix}{name.upper()}` | {_default(settings, name)} | {meaning} |"
    yield ""


def _default(settings: type[BaseSettings], name: str) -> str:
    field = settings.model_fields[name]
    if field.is_required():
        return "required"
    if field.default_factory:
        return "`/run/gpuwarden`"
    return "none" if field.default is None else f"`{field.default}`"


if __name__ == "__main__":
    sys.exit(main())
