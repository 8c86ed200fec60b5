"""URLs of the parts, and options for them. The defaults are those of the services."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuwarden.db.running_up import environment
from remediator.commands.open_ledger import add_ledger, queue_url

NONE: Final = "none"

ADDRESSES: Final = {
    "remediator": ("http://127.0.0.1:9836", "the webhook of `gpuwarden remediator serve`"),
    "exporter": ("http://127.0.0.1:29835", "this host's exporter"),
    "prometheus": ("http://127.0.0.1:9090", "Prometheus"),
    "alertmanager": ("http://127.0.0.1:9093", "Alertmanager"),
}


ACCESS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "ca_file": ("PEM file of the authorities for the exporter's certificate", Path),
    "server_name": ("name in the exporter's certificate, if it differs from the URL", str),
    "cert_file": ("PEM client certificate, if the exporter requires one", Path),
    "key_file": ("PEM key of the client certificate", Path),
    "basic_auth_file": ("file with one line `user:password`", Path),
}
"""Options for `ExporterAuth`, as for `gpuwarden remediator execute`."""


def add_addresses(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add options for the URLs of these parts. The defaults are those of the services."""
    known = environment()
    for name in names:
        default, title = ADDRESSES[name]
        env = "GPUWARDEN_REMEDIATOR_" + ("PORT" if name == "remediator" else name.upper())
        url = next(filter(None, map(str.strip, known.get(env, "").split(","))), default)
        if url.isdecimal():
            url = f"http://127.0.0.1:{url}"
        help_text = f"{title}, by ${env} of the services; 'none' to skip (default: %(default)s)"
        parser.add_argument(f"--{name}", metavar="URL", default=url, help=help_text)


def add_sources(parser: argparse.ArgumentParser, *, ledger_required: bool = True) -> None:
    """Add the options that name the ledger, the queue and the parts."""
    add_ledger(parser, required=ledger_required)
    known = environment()
    parser.add_argument("--host", help="only this host; default: every host of the ledger")
    parser.add_argument(
        "--queue-db",
        default=queue_url(known),
        help="database URL of the queue, for quarantined GPUs; 'none' to skip; default $GPUWARDEN_QUEUE_DB, else the "
        "queue of `gpuwarden up`",
    )
    add_addresses(parser, ADDRESSES)
    for name, (title, of) in ACCESS.items():
        env = f"GPUWARDEN_REMEDIATOR_EXPORTER_{name.upper()}"
        option = f"--exporter-{name.replace('_', '-')}"
        parser.add_argument(option, type=of, default=known.get(env), help=f"{title}, or ${env}")
