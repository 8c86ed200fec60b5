"""`gpuwarden remediator serve` and `execute`."""

import sys

from pydantic import ValidationError

from gpuwarden.format import Parser, show
from gpuwarden.settings import complaints, read_settings
from remediator.settings.settings import ExecuteSettings, ServeSettings


def command(argv: list[str]) -> int:
    """`gpuwarden remediator`."""
    parser = Parser(
        prog="gpuwarden remediator",
        description="Receive alerts (serve) and act on them (execute): two processes that share one ledger.",
        epilog="See `gpuwarden remediator serve --help` and `… execute --help`.",
    )
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("serve", add_help=False, help="receive alerts; see `serve --help`")
    roles.add_parser("execute", add_help=False, help="act on them; see `execute --help`")
    role = parser.parse_args(argv[:1]).role
    try:
        wanted: ServeSettings | ExecuteSettings = (
            read_settings(ServeSettings, argv[1:]) if role == "serve" else read_settings(ExecuteSettings, argv[1:])
        )
    except ValidationError as error:
        for line in complaints(error, ServeSettings if role == "serve" else ExecuteSettings):
            show(f"gpuwarden remediator {role}: error: {line}", file=sys.stderr)
        return 2
    # Imported late: loading the web framework doubles the executor's start time.
    if isinstance(wanted, ServeSettings):
        from remediator.webhook.serve import serve  # noqa: PLC0415

        serve(wanted)
    else:
        from remediator.executor.main import execute  # noqa: PLC0415

        execute(wanted)
    return 0
