"""Write the JSON that Grafana loads.

    python -m dashboards.render [--check]

With `--check` nothing is written. The exit status is 1 if the JSON differs from the rendered code.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.overview import overview

OVERVIEW_JSON: Final = Path(__file__).with_name("overview.json")


def render() -> str:
    """The overview as JSON, the same text for the same code."""
    return JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False).encode(overview().build()) + "\n"


def main(arguments: Sequence[str] | None = None, *, path: Path = OVERVIEW_JSON) -> int:
    """Render or compare. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.render", description="Render the dashboards to JSON.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the JSON is out of date")
    check = parser.parse_args(arguments).check
    rendered = render()
    if not check:
        path.write_text(rendered, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == rendered:
        return 0
    print(f"{path} is out of date: run python -m dashboards.render", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
