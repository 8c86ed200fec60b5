"""`gpuwarden init DIR`: the files for people who run their own Prometheus, Alertmanager and systemd.

`files` says what is written, `Folder` writes it. `.written.json` in DIR holds the SHA-256 of each file as it was
written, so that a later run tells a file of its own from one that a person changed. Token, host key and the address in
`.watchdog-url` (0600, for whoever knows it can answer in our place) are kept; without that file there is none. Likewise
`.runbooks-url`, where the alerts link their runbooks, and `.options`, all others that were given, one a line as
`--podman=none`: what a later run is not told anew is as it was.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final, NoReturn

from deploy.standalone import data_dir, docker_socket, package_data
from deploy.standalone.config_files import Pace, alertmanager_config, prometheus_config, web_config
from deploy.standalone.stack import PORTS, add_units, add_watchdog, keep_token, web_address
from gpuwarden.docs_pages import RUNBOOKS, pages
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.state_file import check_name

UNITS: Final = ("gpuwarden-exporter", "gpuwarden-remediator", "gpuwarden-executor")
TOKEN: Final = "gpuwarden/token"  # noqa: S105 - a path
HOST: Final = "gpuwarden/host"
WATCHDOG_URL: Final = ".watchdog-url"
KEPT_RUNBOOKS_URL: Final = ".runbooks-url"
KEPT_OPTIONS: Final = ".options"
_OPTIONS: Final = (
    "command", "etc", "state", "run", "podman", "docker", "systemd_unit", *(f"{part}_port" for part in PORTS)
)  # fmt: skip
_PRIVATE: Final = frozenset({"alertmanager.yml"})
"""What is for its owner's eyes alone: it may hold that address."""
_RECORD: Final = ".written.json"
_PLAIN: Final = re.compile(r"/[A-Za-z0-9._/@+-]*")
"""Paths that mean the same in a unit, a tmpfiles line, a URL and YAML."""
_PLAIN_ADDRESS: Final = re.compile(r"[A-Za-z0-9:/._~%@+=&\[\]-]+")
_PLAIN_UNITS: Final = re.compile(r"[A-Za-z0-9:_.@*?\[!\],-]+")

_DESCRIPTION: Final = """\
Write into DIR the files for running gpuwarden beside a Prometheus, an Alertmanager and a systemd of your own: scrape
jobs, rules and their runbooks, a route and a receiver, three hardened units, tmpfiles.d and sysusers.d, settings, host
key, token, and a README.md that says what is copied where, in which order. Nothing is installed; nothing outside DIR is
touched.
"""


class InitError(GpuwardenError):
    """The files cannot be written. The message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the files are about: where everything will lie, and who listens where."""

    host: str
    command: str
    etc: str
    state: str
    run: str
    docker: str
    podman: str
    systemd_unit: str
    exporter_port: int
    remediator_port: int
    prometheus_port: int
    alertmanager_port: int
    watchdog_url: str | None = None
    runbooks_url: str | None = None
    """Below which address the alerts link their runbooks, where that is not the remediator's on loopback."""
    watched_docker: str | None = None
    """What the exporter asks, where that is another than `docker`, which the remediator does."""


def files(site: Site) -> dict[str, str]:
    """The text of each file, by its path in DIR; host key and token are not among them.

    Raises:
        InitError: a path holds what systemd or a URL would read otherwise.
        OSError: the installation is not whole.
    """
    for what, path in (("etc", site.etc), ("state", site.state), ("run", site.run), ("command", site.command)):
        if not _PLAIN.fullmatch(path):
            raise InitError(
                f"{what} {path!r} will not do: an absolute path of letters, digits and ._/@+- is wanted, which means "
                "the same in a unit, a URL and YAML"
            )
    if site.systemd_unit and not _PLAIN_UNITS.fullmatch(site.systemd_unit):
        raise InitError(
            f"systemd-unit {site.systemd_unit!r} will not do: letters, digits and :_.@*?[!]- are wanted, which mean "
            "the same in a file of settings"
        )
    etc = Path(site.etc)
    prometheus = prometheus_config(
        host=site.host,
        exporter=f"127.0.0.1:{site.exporter_port}",
        remediator=f"127.0.0.1:{site.remediator_port}",
        alertmanager=f"127.0.0.1:{site.alertmanager_port}",
        prometheus=f"127.0.0.1:{site.prometheus_port}",
        rules=[etc / "rules" / "*.rules.yaml"],
        pace=Pace(),
    )
    webhook = f"http://127.0.0.1:{site.remediator_port}/api/v1/alerts"
    runbooks = site.runbooks_url or f"http://127.0.0.1:{site.remediator_port}/{RUNBOOKS}"
    fill = {**vars(site), "watched_docker": site.watched_docker or site.docker, "runbooks": runbooks.rstrip("/")}
    return {
        "README.md": _filled("README.md", fill),
        "prometheus.yml": prometheus,
        "alertmanager.yml": alertmanager_config(
            webhook=webhook, token_file=etc / "token", pace=Pace(), outside=site.watchdog_url
        ),
        "gpuwarden/remediator-web.yml": web_config("token"),
        "gpuwarden/gpuwarden.env": _filled("gpuwarden.env", fill),
        **{f"gpuwarden/rules/{path.name}": package_data.linked(path, runbooks) for path in package_data.rules()},
        **{f"gpuwarden/dashboards/{path.name}": path.read_text(encoding="utf-8") for path in package_data.dashboards()},
        **{f"gpuwarden/docs/{name}": path.read_text(encoding="utf-8") for name, path in pages().items()},
        **{f"systemd/{unit}.service": _filled(f"{unit}.service", fill) for unit in UNITS},
        "sysusers.d/gpuwarden.conf": _filled("sysusers.conf", fill),
        "tmpfiles.d/gpuwarden.conf": _filled("tmpfiles.conf", fill),
    }


class Folder:
    """DIR, and what was written there before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = path / _RECORD
        try:
            self._written: dict[str, str] = json.loads(self._record.read_text(encoding="ascii"))
        except (OSError, ValueError):
            self._written = {}

    def changed(self, wanted: Mapping[str, str]) -> list[str]:
        """The files of `wanted` that are there, are otherwise, and were not left so by an earlier run."""
        there = {name: self.path / name for name in wanted if (self.path / name).is_file()}
        found = {name: _digest(path.read_bytes()) for name, path in there.items()}
        return [
            name
            for name, digest in found.items()
            if digest not in {_digest(wanted[name].encode()), self._written.get(name)}
        ]

    def write(self, wanted: Mapping[str, str]) -> list[str]:
        """Write the files, each whole, and remember them; those of an earlier version that are no more, which go.

        One of those that was changed since is left where it is.
        """
        gone = []
        for name in sorted(self._written.keys() - wanted.keys()):
            old = self.path / name
            if old.is_file() and _digest(old.read_bytes()) == self._written[name]:
                old.unlink()
                gone.append(name)
            del self._written[name]
        for name, text in wanted.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / name, text, mode=0o600 if name in _PRIVATE else 0o644, sync=True)
        self._written |= {name: _digest(text.encode()) for name, text in wanted.items()}
        atomic_write(self._record, json.dumps(self._written, indent=1) + "\n", mode=0o644, sync=True)
        return gone


def command(argv: list[str]) -> int:
    """`gpuwarden init`."""
    parser = _parser(argparse.ArgumentParser)
    arguments = parser.parse_args(argv, _none_given())
    folder = Folder(arguments.folder)
    kept, kept_url, kept_runbooks, kept_options = (
        folder.path / name for name in (HOST, WATCHDOG_URL, KEPT_RUNBOOKS_URL, KEPT_OPTIONS)
    )
    were, given = _kept(kept_options), _given(arguments)
    for name in _OPTIONS:
        setattr(arguments, name, {**were, **given}.get(name, parser.get_default(name)))
    docker = arguments.docker or _docker()
    away = arguments.docker is None and docker == "none"
    site = Site(
        host=check_name(arguments.host or (_read(kept) if kept.is_file() else socket.gethostname()), what="host"),
        command=arguments.command or _own_command(),
        **{name: getattr(arguments, name) for name in ("etc", "state", "run", "podman")},
        docker=docker,
        watched_docker="auto" if away else None,  # it may be down just now
        systemd_unit=",".join(arguments.systemd_unit),
        watchdog_url=arguments.watchdog_url or _kept_address(kept_url, web_address),
        runbooks_url=arguments.runbooks_url or _kept_address(kept_runbooks, _pages_address),
        **{f"{part}_port": getattr(arguments, f"{part}_port") for part in PORTS},
    )
    wanted = _wanted(site)
    if (changed := folder.changed(wanted)) and not arguments.force:
        listed = "\n  ".join(changed)
        raise InitError(
            f"nothing was written, for these files in {folder.path} were changed since they were:\n  {listed}\n"
            "move them away, or give --force to overwrite them"
        )
    try:
        gone = folder.write(wanted)
        keep_token(folder.path / TOKEN)
        _keep(folder.path, site, {**were, **given})
    except OSError as error:
        raise InitError(f"{error.filename or folder.path} cannot be written ({error.strerror})") from error
    _tell_options(were, given, kept_options)
    for name in changed:
        print(f"init: overwritten: {name}")
    for name in gone:
        print(f"init: removed, as this version has it no more: {name}; remove it where you installed it too")
    if site.watchdog_url is not None:
        print(f"init: the alert that always fires goes to the address in {kept_url}, too; remove that file to end it")
    if site.runbooks_url is None:
        print("init: the alerts link their runbooks on this host alone; --runbooks-url says where else they open")
    else:
        print(
            f"init: the alerts link their runbooks below {site.runbooks_url}, kept in {kept_runbooks}; remove that "
            "file to link the remediator's on loopback"
        )
    if away:
        print(
            f"init: there is no {docker_socket.SYSTEM_SOCKET}: the exporter asks Docker once it is there, and "
            "the remediator does not ask Docker; give --docker where there is one"
        )
    if (shut := _shut(Path(site.command))) is not None:
        print(
            f"init: {site.command} lies below {shut}, which the user gpuwarden of the units cannot enter: install it "
            "where everybody can, in /opt/gpuwarden say, or give --command",
            file=sys.stderr,
        )
    print(
        f"init: {len(wanted) + 2} files for host {site.host} in {folder.path}; "
        f"{folder.path / 'README.md'} says what next"
    )
    return 0


def _wanted(site: Site) -> dict[str, str]:
    try:
        return files(site)
    except OSError as error:
        raise InitError(f"nothing was written: {error}") from None


def _keep(folder: Path, site: Site, options: Mapping[str, object]) -> None:
    """Have a later run know what this one was told."""
    atomic_write(folder / HOST, site.host + "\n", mode=0o644, sync=True)
    if site.watchdog_url is not None:
        atomic_write(folder / WATCHDOG_URL, site.watchdog_url + "\n", mode=0o600, sync=True)
    if site.runbooks_url is not None:
        atomic_write(folder / KEPT_RUNBOOKS_URL, site.runbooks_url + "\n", mode=0o644, sync=True)
    if options:
        lines = [f"{_option(name, value)}\n" for name, value in options.items()]
        atomic_write(folder / KEPT_OPTIONS, "".join(lines), mode=0o644, sync=True)


def _tell_options(were: Mapping[str, object], given: Mapping[str, object], file: Path) -> None:
    for name, value in were.items():
        if name not in given:
            print(f"init: {_option(name, value)}, as in an earlier run: {file} keeps it")
        elif given[name] != value:
            print(f"init: {_option(name, given[name])}, where it was {_plain(value)}")


class _Kept(argparse.ArgumentParser):
    """What reads options that were kept, not typed."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _kept(file: Path) -> dict[str, object]:
    """The options of an earlier run, as they were given."""
    if not file.is_file():
        return {}
    try:
        return _given(_parser(_Kept).parse_args([*_read(file).splitlines(), "."], _none_given()))
    except argparse.ArgumentTypeError as error:
        raise InitError(f"{file}: {error}; mend it, or remove it to give its options anew") from None


def _none_given() -> argparse.Namespace:
    """What argparse fills in: it puts a default, also one that is as if given, only where nothing is."""
    return argparse.Namespace(**dict.fromkeys(_OPTIONS))


def _given(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}


def _option(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')}={_plain(value)}"


def _plain(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kind(prog="gpuwarden init", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the files are written; made if it is not there")
    parser.add_argument("--force", action="store_true", help="overwrite files that were changed; the token is kept")
    parser.add_argument("--host", help="this host's key (default: the one in DIR, else this machine's name)")
    parser.add_argument("--command", help="absolute path of the command gpuwarden in the units (default: this one's)")
    for name, default, what in (
        ("etc", "/etc/gpuwarden", "where settings, rules and token will lie"),
        ("state", str(data_dir.SYSTEM_DATA), "where ledger and queue will lie"),
        ("run", str(data_dir.SYSTEM_DIRECTORY), "$GPUWARDEN_DIR, where workers write their state"),
        ("podman", "none", "Podman's socket, such as unix:///run/podman/podman.sock, or 'none'"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--docker",
        help=f"the Docker engine's socket, or 'none' (default: unix://{docker_socket.SYSTEM_SOCKET} where that is "
        "there, else none for the remediator, and auto for the exporter)",
    )
    add_units(parser)
    add_watchdog(parser)
    parser.add_argument(
        "--runbooks-url",
        type=_pages_address,
        help="below which address the alerts link their runbooks, for whoever is called to open: the remediator's "
        "/docs/runbooks, as others reach it, or a web server's with a copy of gpuwarden/docs; it is kept in DIR "
        "(default: the remediator's on loopback)",
    )
    for part, port in PORTS.items():
        parser.add_argument(f"--{part}-port", type=int, default=port, help=f"{part}'s port (default: %(default)s)")
    return parser


def _docker() -> str:
    """The system's engine where its socket is there; whether it answers us is not asked, for the units run as root."""
    return f"unix://{docker_socket.SYSTEM_SOCKET}" if docker_socket.SYSTEM_SOCKET.is_socket() else "none"


def _pages_address(given: str) -> str:
    """An address of the web that means the same in YAML and in Prometheus's templates, and that a page's name ends."""
    if _PLAIN_ADDRESS.fullmatch(given):
        return web_address(given)
    raise argparse.ArgumentTypeError(f"{given!r} will not do: letters, digits and :/._~%@+=&[]- are wanted")


def _kept_address(file: Path, address: Callable[[str], str]) -> str | None:
    if not file.is_file():
        return None
    try:
        return address(_read(file))
    except argparse.ArgumentTypeError as error:
        raise InitError(f"{file}: {error}; mend it, or remove it to do without") from None


def _own_command() -> str:
    """The `gpuwarden` beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).with_name("gpuwarden")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("gpuwarden") or "/usr/local/bin/gpuwarden"


def _shut(command: Path) -> Path | None:
    """The first folder above a command that not everybody may enter; `None` for none, or where none is there yet."""
    above = [folder for folder in reversed(command.parents) if folder.is_dir()]
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


def _filled(name: str, fill: Mapping[str, object]) -> str:
    return Template((package_data.TEMPLATES / name).read_text(encoding="utf-8")).substitute(fill)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise InitError(f"{path}: it is not UTF-8; mend it, or remove it to do without") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
