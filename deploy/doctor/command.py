"""`gpuwarden doctor`: read all parts, check each link, print one line for each and how to repair a broken one.

Exit codes: 0 every link works, perhaps with warnings; 1 a link is broken or unknown; 2 usage error.
"""

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from deploy.doctor.finding import Finding, Verdict
from deploy.doctor.links import diagnose
from deploy.doctor.read import read
from deploy.doctor.sources.addresses import ENV_FILE, environment_of_process, find
from gpuwarden.cli.columns import wrapped
from gpuwarden.format import Parser, count_of, printable, show, show_json
from remediator.commands.addresses import ADDRESSES

_INDENT: Final = 24
"""Width of the columns before the text."""


def command(argv: list[str]) -> int:
    """`gpuwarden doctor`."""
    wanted = _parser().parse_args(argv)
    found = diagnose(read(find(wanted, environment_of_process())))
    healthy = not any(each.verdict in (Verdict.FAILED, Verdict.UNKNOWN) for each in found.values())
    if wanted.json:
        checks = [{"link": link, **asdict(finding)} for link, finding in found.items()]
        show_json({"ok": healthy, "at": time.time(), "checks": checks})
    else:
        show(*page(found, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0 if healthy else 1


def page(found: Mapping[str, Finding], *, width: int | None) -> Iterator[str]:
    """Format the findings as lines, wrapped at `width` columns if given."""
    for link, finding in found.items():
        yield from wrapped(f"{finding.verdict:10}{link:14}{printable(finding.says)}", width, _INDENT)
        if finding.fix:
            yield from wrapped(f"{' ' * _INDENT}fix: {printable(finding.fix)}", width, _INDENT)
    counts = Counter(each.verdict for each in found.values())
    yield ""
    if counts[Verdict.OK] == len(found):
        yield f"all {count_of(len(found), 'link')} work"
        return
    said = [
        count_of(counts[each], each) if each is Verdict.WARNING else f"{counts[each]} {each}"
        for each in Verdict
        if counts[each]
    ]
    yield ", ".join(said)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden doctor",
        description="Check every link of the chain in order: settings, databases, exporter, Prometheus, Alertmanager, "
        "webhook, executor and contacts. Each broken link comes with its repair. Nothing is changed.",
        epilog="exit codes: 0 every link works, perhaps with warnings; 1 a link is broken or unknown; 2 usage error",
    )
    parser.add_argument("--ledger", help="database URL of the ledger, or 'none' to skip it; default: as the services")
    parser.add_argument("--queue-db", help="database URL of the queue, or 'none' to skip it; default: as the services")
    parser.add_argument(
        "--env-file",
        type=Path,
        help=f"environment file of the services; default {ENV_FILE}, if no `gpuwarden up` of this user runs",
    )
    for name, (default, title) in ADDRESSES.items():
        parser.add_argument(
            f"--{name}",
            metavar="URL",
            help=f"{title}, or 'none' to skip it; default: as the services, else {default}",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
