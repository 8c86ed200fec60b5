"""Find the parts: options first, then the environment, the running `gpuwarden up`, and the services' file."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.doctor.facts import Place, Runs
from gpuwarden.db.running_up import LEDGER_ENV, QUEUE_ENV, RUNTIME_DIR_ENV, of_up, started_with
from gpuwarden.errors import GpuwardenError
from gpuwarden.reporter import DEFAULT_DIR
from remediator.commands.addresses import ACCESS, ADDRESSES
from remediator.commands.open_ledger import ledger_url, queue_url

ENV_FILE: Final = Path("/etc/gpuwarden/gpuwarden.env")
"""Environment file of the services, as `gpuwarden init` installs it."""

FILE_MAX_BYTES: Final = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the parts are. `none` excludes one.

    Args:
        place: how gpuwarden runs here.
        variables: of this process, `gpuwarden up`, the shell that started it, and the file, in this order of priority.
        file: variables of the environment file only.
        urls: of the exporter, the remediator, Prometheus and Alertmanager.
        ledger: URL of the ledger's database, if known.
        queue: URL of the queue's database, if known.
        runtime_dir: folder of state files.
        access: files for the exporter's TLS and password, by name.
    """

    place: Place
    variables: Mapping[str, str]
    file: Mapping[str, str]
    urls: Mapping[str, str]
    ledger: str | None
    queue: str | None
    runtime_dir: Path
    access: Mapping[str, Path | str | None]


def find(wanted: argparse.Namespace, environment: Mapping[str, str]) -> Addresses:
    """Find the parts.

    Raises:
        GpuwardenError: the environment file that the user named cannot be read.
    """
    up = of_up(environment)
    file = {} if up else _read(wanted.env_file)
    given = {name: value for name, value in environment.items() if value}
    parts = {name: value for name, value in started_with(environment).items() if name.startswith("GPUWARDEN_")}
    variables = {**file, **parts, **up, **given}
    urls = {name: getattr(wanted, name) or _url(name, variables) for name in ADDRESSES}
    access = {name: variables.get(f"GPUWARDEN_REMEDIATOR_EXPORTER_{name.upper()}") for name in ACCESS}
    return Addresses(
        place=_place(up, file, given, wanted),
        variables=variables,
        file=file,
        urls={name: url.rstrip("/") for name, url in urls.items()},
        ledger=wanted.ledger or variables.get(LEDGER_ENV) or ledger_url(variables),
        queue=wanted.queue_db or variables.get(QUEUE_ENV) or queue_url(variables),
        runtime_dir=Path(variables.get(RUNTIME_DIR_ENV, DEFAULT_DIR)),
        access={name: ACCESS[name][1](value) if value else None for name, value in access.items()},
    )


def _place(
    up: Mapping[str, str], file: Mapping[str, str], given: Mapping[str, str], wanted: argparse.Namespace
) -> Place:
    if up:
        ledger = up.get(LEDGER_ENV, "").removeprefix("sqlite:///")
        return Place(runs=Runs.UP, data=Path(ledger).parent.parent if ledger.startswith("/") else None)
    if file:
        return Place(runs=Runs.SERVICES, env_file=wanted.env_file or ENV_FILE)
    if LEDGER_ENV in given:
        return Place(runs=Runs.SERVICES)
    return Place(runs=Runs.OPTIONS if wanted.ledger else Runs.NOT)


def _url(name: str, variables: Mapping[str, str]) -> str:
    variable = "GPUWARDEN_REMEDIATOR_" + ("PORT" if name == "remediator" else name.upper())
    url = next(filter(None, map(str.strip, variables.get(variable, "").split(","))), ADDRESSES[name][0])
    return f"http://127.0.0.1:{url}" if url.isdecimal() else url


def _read(named: Path | None) -> dict[str, str]:
    try:
        with (named or ENV_FILE).open(encoding="utf-8") as file:
            return parse(file.read(FILE_MAX_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        if named is None:
            return {}
        raise GpuwardenError(f"{named} cannot be read: {error}; check --env-file") from None


def parse(text: str) -> dict[str, str]:
    """Parse an environment file of systemd: NAME=VALUE, comments, and quotes around a value."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#;")
    return {name.strip(): _unquoted(value.strip()) for name, sign, value in pairs if sign}


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def environment_of_process() -> Mapping[str, str]:
    """This process's variables."""
    return dict(os.environ)
