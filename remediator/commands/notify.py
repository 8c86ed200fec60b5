"""`gpuwarden notify test`: send a test message to the administrators of the notify file, or to one address.

Exit codes: 0 the server accepted each message; 1 one failed; 2 wrong usage.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from gpuwarden.db.running_up import environment
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, show
from gpuwarden.notify.address import from_argument, shown
from gpuwarden.notify.sender import Message, Sender
from remediator.notify.messages import describe
from remediator.settings.notify_file import NotifySettings, read

FILE_ENV: Final = "GPUWARDEN_REMEDIATOR_NOTIFY_FILE"


def command(argv: list[str]) -> int:
    """`gpuwarden notify`."""
    wanted = _parser().parse_args(argv)
    file: Path | None = wanted.notify_file
    settings = NotifySettings() if file is None else read(file)
    addresses = settings.administrators if wanted.address is None else [wanted.address]
    if not addresses:
        raise GpuwardenError(
            f"no address to notify: give an address, or `administrators` in the file of --notify-file or ${FILE_ENV}"
        )
    send, code = Sender(), 0
    title, body = describe("test")
    for address in addresses:
        error = send(settings.url(address), Message(title=f"[gpuwarden] {title}", body=body))
        if error is None:
            show(f"{shown(address)}: accepted by the server")
        else:
            show(f"gpuwarden notify: {shown(address)}: {error}", file=sys.stderr)
            code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="gpuwarden notify", description="Test notifications. See docs/how-to/notifications.md.")
    acts = parser.add_subparsers(required=True)
    about = "send a test message to the administrators, or to one address"
    test = acts.add_parser("test", help=about, description=f"{about[0].upper()}{about[1:]}.")
    about = "a mail address or an Apprise URL"
    test.add_argument("address", metavar="ADDRESS", nargs="?", type=from_argument, help=about)
    file = environment().get(FILE_ENV)
    test.add_argument(
        "--notify-file",
        type=Path,
        metavar="FILE",
        default=None if file is None else Path(file),
        help=f"notify file of `gpuwarden remediator serve`; default ${FILE_ENV}",
    )
    return parser
