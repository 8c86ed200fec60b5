"""`gpuwarden init DIR`: write files for hosts with their own Prometheus, Alertmanager and systemd.

`.written.json` in DIR holds the SHA-256 of each written file, to detect files that an operator changed. Token, host
key, `.watchdog-url` and `.notify-urls` (0600, secrets), `.runbooks-url` and `.options` (one option per line, such as
`--podman=none`) are kept for the next run.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final, NoReturn

from deploy.standalone import data_dir, docker_socket, package_data, receivers
from deploy.standalone.config_files import CENTRAL, Intervals, alertmanager_config, prometheus_config, web_config
from deploy.standalone.stack import (
    PORTS,
    add_evaluation_interval,
    add_systemd_units,
    add_watchdog,
    keep_token,
    web_address,
)
from gpuwarden.docs_pages import RUNBOOKS, pages
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.format import Parser, show
from gpuwarden.gateway import CENTRAL_PORT, HOST_PORT
from gpuwarden.state_file import check_name
from remediator.settings.notify_file import NotifySettings

UNITS: Final = ("gpuwarden-exporter", "gpuwarden-remediator", "gpuwarden-executor")
HOST_GATEWAY: Final = "gpuwarden-gateway-host"
GATEWAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (), "host": (HOST_GATEWAY,), "central": (CENTRAL,), "both": (HOST_GATEWAY, CENTRAL)
}  # fmt: skip
"""Units of gateways by `--gateway`."""
TOKEN: Final = "gpuwarden/token"  # noqa: S105 - a path
HOST: Final = "gpuwarden/host"
WATCHDOG_URL: Final = ".watchdog-url"
NOTIFY_URLS: Final = ".notify-urls"
KEPT_RUNBOOKS_URL: Final = ".runbooks-url"
KEPT_OPTIONS: Final = ".options"
_PORTS: Final = {**PORTS, "gateway_host": HOST_PORT, "gateway_central": CENTRAL_PORT}
_OPTIONS: Final = (
    "command", "config_dir", "data_dir", "runtime_dir", "podman", "docker", "systemd_unit",
    "evaluation_interval_s",
    "gateway",
    *(f"{part}_port" for part in _PORTS),
)  # fmt: skip
OTHER_RULES_S: Final = 15
"""Evaluation interval of rules without a remedy, seconds."""

_PRIVATE: Final = re.compile(r"alertmanager\.yml|gpuwarden/notify(-\d+|\.toml)")
"""Files with mode 0600: the watchdog URL, passwords."""
_RECORD: Final = ".written.json"
_PLAIN: Final = re.compile(r"/[A-Za-z0-9._/@+-]*")
"""Paths that need no quoting in a unit, a tmpfiles line, a URL or YAML."""
_PLAIN_ADDRESS: Final = re.compile(r"[A-Za-z0-9:/._~%@+=&\[\]-]+")
_PLAIN_UNITS: Final = re.compile(r"[A-Za-z0-9:_.@*?\[!\],-]+")

_DESCRIPTION: Final = """\
Write files into DIR to run gpuwarden with your own Prometheus, Alertmanager and systemd. These are scrape jobs, alert
rules, runbooks, Alertmanager routes, hardened units, tmpfiles.d, sysusers.d, settings, host key and token. README.md
says how to install them. The command installs nothing and changes nothing outside DIR.
"""


class InitError(GpuwardenError):
    """The files cannot be written. The message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Paths and ports that are filled into the files."""

    host: str
    command: str
    config_dir: str
    data_dir: str
    runtime_dir: str
    docker: str
    podman: str
    systemd_unit: str
    exporter_port: int
    remediator_port: int
    prometheus_port: int
    alertmanager_port: int
    evaluation_interval_s: int
    """Of rules with a remedy."""
    gateway: str = "none"
    """Which gateways run here: a key of `GATEWAYS`."""
    gateway_host_port: int = HOST_PORT
    gateway_central_port: int = CENTRAL_PORT
    watchdog_url: str | None = None
    notify: Sequence[str] = ()
    """URLs of operators."""
    runbooks_url: str | None = None
    """Base URL of the runbooks, if not the remediator's on loopback."""
    watched_docker: str | None = None
    """The exporter's Docker socket, if it differs from the remediator's."""


def files(site: Site) -> dict[str, str]:
    """Return the text of each file by its path in DIR, without host key and token.

    Raises:
        InitError: a path would need quoting.
        OSError: the installation is incomplete.
    """
    for what, path in (
        ("config-dir", site.config_dir),
        ("data-dir", site.data_dir),
        ("runtime-dir", site.runtime_dir),
        ("command", site.command),
    ):
        if not _PLAIN.fullmatch(path):
            raise InitError(f"invalid {what} {path!r}: use an absolute path of letters, digits and ._/@+-")
    if site.systemd_unit and not _PLAIN_UNITS.fullmatch(site.systemd_unit):
        raise InitError(f"invalid systemd-unit {site.systemd_unit!r}: use letters, digits and :_.@*?[!]-")
    etc, gateways = Path(site.config_dir), GATEWAYS[site.gateway]
    ports = {HOST_GATEWAY: site.gateway_host_port, CENTRAL: site.gateway_central_port}
    prometheus = prometheus_config(
        host=site.host,
        exporter=f"127.0.0.1:{site.exporter_port}",
        remediator=f"127.0.0.1:{site.remediator_port}",
        alertmanager=f"127.0.0.1:{site.alertmanager_port}",
        prometheus=f"127.0.0.1:{site.prometheus_port}",
        gateways={name: f"127.0.0.1:{port}" for name, port in ports.items() if name in gateways},
        rules=[etc / "rules" / "*.rules.yaml"],
        intervals=Intervals(evaluate_s=OTHER_RULES_S),
    )
    webhook = f"http://127.0.0.1:{site.remediator_port}/api/v1/alerts"
    runbooks = site.runbooks_url or f"http://127.0.0.1:{site.remediator_port}/{RUNBOOKS}"
    units, secrets = (*UNITS, *gateways), receivers.secrets(site.notify)
    relayed, notify_file = receivers.relayed(site.notify), etc / receivers.NOTIFY_FILE
    fill = {
        **vars(site),
        "watched_docker": site.watched_docker or site.docker,
        "runbooks": runbooks.rstrip("/"),
        "services": " ".join(units),
        "secrets": " ".join(["gpuwarden/token", *(f"gpuwarden/{name}" for name in secrets)]),
        "notify_setting": f"GPUWARDEN_REMEDIATOR_NOTIFY_FILE={notify_file}\n" if relayed else "",
        "install_notify": f"install -m 0640 -g gpuwarden gpuwarden/{notify_file.name} {etc}/\n" if relayed else "",
    }
    return {
        "README.md": _fill_template("README.md", fill),
        "prometheus.yml": prometheus,
        "alertmanager.yml": alertmanager_config(
            webhook=webhook,
            token_file=etc / "token",
            intervals=Intervals(),
            outside=site.watchdog_url,
            people=receivers.configs(site.notify, etc),
            relay=f"http://127.0.0.1:{site.remediator_port}{receivers.RELAY_PATH}" if relayed else None,
        ),
        "gpuwarden/remediator-web.yml": web_config("token"),
        **{f"gpuwarden/{name}": secret for name, secret in secrets.items()},
        **({f"gpuwarden/{notify_file.name}": receivers.notify_file(site.notify, NotifySettings())} if relayed else {}),
        "gpuwarden/gpuwarden.env": _fill_template("gpuwarden.env", fill),
        **{
            f"gpuwarden/rules/{path.name}": package_data.rule_file(
                path, runbooks_url=runbooks, evaluation_interval_s=site.evaluation_interval_s
            )
            for path in package_data.rules()
        },
        **{f"gpuwarden/dashboards/{path.name}": path.read_text(encoding="utf-8") for path in package_data.dashboards()},
        **{f"gpuwarden/docs/{name}": path.read_text(encoding="utf-8") for name, path in pages().items()},
        **{f"systemd/{unit}.service": _fill_template(f"{unit}.service", fill) for unit in units},
        "sysusers.d/gpuwarden.conf": _fill_template("sysusers.conf", fill),
        "tmpfiles.d/gpuwarden.conf": _fill_template("tmpfiles.conf", fill),
    }


class Folder:
    """DIR, and what an earlier run wrote there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = path / _RECORD
        try:
            self._written: dict[str, str] = json.loads(self._record.read_text(encoding="ascii"))
        except (OSError, ValueError):
            self._written = {}

    def changed(self, wanted: Mapping[str, str]) -> list[str]:
        """Files of `wanted` that an operator changed since the last run."""
        there = {name: self.path / name for name in wanted if (self.path / name).is_file()}
        found = {name: _digest(path.read_bytes()) for name, path in there.items()}
        return [
            name
            for name, digest in found.items()
            if digest not in {_digest(wanted[name].encode()), self._written.get(name)}
        ]

    def write(self, wanted: Mapping[str, str]) -> list[str]:
        """Write the files atomically. Returns removed files: unchanged ones of an earlier version."""
        gone = []
        for name in sorted(self._written.keys() - wanted.keys()):
            old = self.path / name
            if old.is_file() and _digest(old.read_bytes()) == self._written[name]:
                old.unlink()
                gone.append(name)
            del self._written[name]
        for name, text in wanted.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / name, text, mode=0o600 if _PRIVATE.fullmatch(name) else 0o644, sync=True)
        self._written |= {name: _digest(text.encode()) for name, text in wanted.items()}
        # Digests of short passwords could be reversed.
        atomic_write(self._record, json.dumps(self._written, indent=1) + "\n", mode=0o600, sync=True)
        return gone


def command(argv: list[str]) -> int:
    """Run `gpuwarden init`."""
    parser = _parser(Parser)
    arguments = parser.parse_args(argv, _empty_namespace())
    folder = Folder(arguments.folder)
    kept, kept_url, kept_runbooks, kept_options = (
        folder.path / name for name in (HOST, WATCHDOG_URL, KEPT_RUNBOOKS_URL, KEPT_OPTIONS)
    )
    were, given = _stored_options(kept_options), _given_options(arguments)
    for name in _OPTIONS:
        setattr(arguments, name, {**were, **given}.get(name, parser.get_default(name)))
    docker = arguments.docker or _docker_socket()
    away = arguments.docker is None and docker == "none"
    site = Site(
        host=check_name(arguments.host or (_read(kept) if kept.is_file() else socket.gethostname()), what="host"),
        command=arguments.command or _own_command(),
        **{name: getattr(arguments, name) for name in ("config_dir", "data_dir", "runtime_dir", "podman")},
        docker=docker,
        watched_docker="auto" if away else None,  # it may be down now
        systemd_unit=",".join(arguments.systemd_unit),
        evaluation_interval_s=arguments.evaluation_interval_s,
        watchdog_url=arguments.watchdog_url or _stored_url(kept_url, web_address),
        notify=arguments.notify or _stored_notify(folder.path / NOTIFY_URLS),
        runbooks_url=arguments.runbooks_url or _stored_url(kept_runbooks, _pages_url),
        gateway=arguments.gateway,
        **{f"{part}_port": getattr(arguments, f"{part}_port") for part in _PORTS},
    )
    wanted = _render(site)
    if (changed := folder.changed(wanted)) and not arguments.force:
        listed = "\n  ".join(changed)
        raise InitError(
            f"nothing was written: these files in {folder.path} were changed by hand:\n  {listed}\n"
            "move them away, or use --force to overwrite them"
        )
    try:
        gone = folder.write(wanted)
        keep_token(folder.path / TOKEN)
        _store(folder.path, site, {**were, **given})
    except OSError as error:
        raise InitError(
            f"{error.filename or folder.path} cannot be written ({error.strerror}): use another DIR or user"
        ) from error
    _print_options(were, given, kept_options)
    for name in changed:
        show(f"init: overwritten: {name}")
    for name in gone:
        show(f"init: removed obsolete file: {name}; remove the installed copy too")
    if site.watchdog_url is not None:
        show(f"init: the watchdog alert also goes to the URL in {kept_url}; remove that file to stop this")
    _print_notify(site, folder.path / NOTIFY_URLS)
    if site.runbooks_url is None:
        show("init: runbook links open only on this host; use --runbooks-url to change this")
    else:
        show(
            f"init: runbook links begin with {site.runbooks_url}, kept in {kept_runbooks}; remove that file to link "
            "the remediator on loopback"
        )
    if away:
        show(
            f"init: {docker_socket.SYSTEM_SOCKET} not found: the exporter will use Docker when it appears, the "
            "remediator will not; use --docker to set a socket"
        )
    if (closed := _closed_folder(Path(site.command))) is not None:
        show(
            f"init: {site.command} is below {closed}, which the units' user gpuwarden cannot enter: install it in a "
            "folder open to all users, such as /opt/gpuwarden, or use --command",
            file=sys.stderr,
        )
    show(f"init: {len(wanted) + 2} files for host {site.host} in {folder.path}; next: read {folder.path / 'README.md'}")
    return 0


def _render(site: Site) -> dict[str, str]:
    try:
        return files(site)
    except OSError as error:
        raise InitError(f"nothing was written: {error}") from None


def _store(folder: Path, site: Site, options: Mapping[str, object]) -> None:
    atomic_write(folder / HOST, site.host + "\n", mode=0o644, sync=True)
    if site.watchdog_url is not None:
        atomic_write(folder / WATCHDOG_URL, site.watchdog_url + "\n", mode=0o600, sync=True)
    if site.notify:
        atomic_write(folder / NOTIFY_URLS, "".join(f"{url}\n" for url in site.notify), mode=0o600, sync=True)
    if site.runbooks_url is not None:
        atomic_write(folder / KEPT_RUNBOOKS_URL, site.runbooks_url + "\n", mode=0o644, sync=True)
    if options:
        lines = [f"{_option(name, value)}\n" for name, value in options.items()]
        atomic_write(folder / KEPT_OPTIONS, "".join(lines), mode=0o644, sync=True)


def _print_options(were: Mapping[str, object], given: Mapping[str, object], file: Path) -> None:
    for name, value in were.items():
        if name not in given:
            show(f"init: {_option(name, value)} kept from the last run, in {file}")
        elif given[name] != value:
            show(f"init: {_option(name, given[name])}, before: {_format(value)}")


class _StoredOptionsParser(Parser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _stored_options(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        return _given_options(
            _parser(_StoredOptionsParser).parse_args([*_read(file).splitlines(), "."], _empty_namespace())
        )
    except argparse.ArgumentTypeError as error:
        raise InitError(f"{file}: {error}; correct the file, or remove it and give the options again") from None


def _empty_namespace() -> argparse.Namespace:
    """Namespace without defaults, to see which options were given."""
    return argparse.Namespace(**dict.fromkeys(_OPTIONS))


def _given_options(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}


def _option(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')}={_format(value)}"


def _format(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _parser(kind: type[Parser]) -> argparse.ArgumentParser:
    parser = kind(prog="gpuwarden init", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder for the files; created if missing")
    parser.add_argument("--force", action="store_true", help="overwrite changed files; the token is kept")
    parser.add_argument("--host", help="host key (default: the one in DIR, otherwise the machine's name)")
    parser.add_argument("--command", help="absolute path of gpuwarden in the units (default: this installation's)")
    for name, default, what in (
        ("config-dir", "/etc/gpuwarden", "folder for settings, rules and token"),
        ("data-dir", str(data_dir.SYSTEM_DATA), "folder for ledger and queue"),
        ("runtime-dir", str(data_dir.SYSTEM_DIRECTORY), "$GPUWARDEN_RUNTIME_DIR, the state folder of workers"),
        ("podman", "none", "Podman socket, for example unix:///run/podman/podman.sock, or 'none'"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--docker",
        help=f"Docker socket, or 'none' (default: unix://{docker_socket.SYSTEM_SOCKET} if it exists, otherwise none "
        "for the remediator and auto for the exporter)",
    )
    add_systemd_units(parser)
    receivers.add_notify(parser)
    add_watchdog(parser)
    add_evaluation_interval(parser)
    parser.add_argument(
        "--runbooks-url",
        type=_pages_url,
        help="base URL of the runbook links in alerts: the remediator's /docs/runbooks as operators reach it, or "
        "another web server; kept in DIR (default: the remediator on loopback)",
    )
    parser.add_argument(
        "--gateway",
        choices=GATEWAYS,
        default="none",
        help="gateways that this host runs: that of its workers, the central one, or both (default: %(default)s)",
    )
    for part, port in _PORTS.items():
        option, what = part.replace("_", "-"), " ".join(reversed(part.split("_")))
        parser.add_argument(f"--{option}-port", type=int, default=port, help=f"{what}'s port (default: %(default)s)")
    return parser


def _docker_socket() -> str:
    """The system's engine if its socket exists."""
    return f"unix://{docker_socket.SYSTEM_SOCKET}" if docker_socket.SYSTEM_SOCKET.is_socket() else "none"


def _pages_url(given: str) -> str:
    """Parse a URL that needs no quoting in YAML and in Prometheus templates."""
    if _PLAIN_ADDRESS.fullmatch(given):
        return web_address(given)
    raise argparse.ArgumentTypeError(f"invalid URL {given!r}: use letters, digits and :/._~%@+=&[]-")


def _stored_url(file: Path, address: Callable[[str], str]) -> str | None:
    if not file.is_file():
        return None
    try:
        return address(_read(file))
    except argparse.ArgumentTypeError as error:
        raise InitError(f"{file}: {error}; correct the file, or remove it") from None


def _stored_notify(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        return receivers.given(f"@{file}")
    except argparse.ArgumentTypeError as error:
        raise InitError(f"{file}: {error}; correct the file, or remove it") from None


def _print_notify(site: Site, file: Path) -> None:
    if site.notify:
        show(f"init: alerts for operators go to the URLs in {file}; remove that file to stop this")
    for text in receivers.warnings(site.notify):
        show(f"init: {text}")


def _own_command() -> str:
    """The `gpuwarden` next to this interpreter, otherwise the one on PATH."""
    beside = Path(sys.executable).with_name("gpuwarden")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("gpuwarden") or "/usr/local/bin/gpuwarden"


def _closed_folder(command: Path) -> Path | None:
    """The first parent folder of a command that other users may not enter, or `None`."""
    above = [folder for folder in reversed(command.parents) if folder.is_dir()]
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


def _fill_template(name: str, fill: Mapping[str, object]) -> str:
    return Template((package_data.TEMPLATES / name).read_text(encoding="utf-8")).substitute(fill)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise InitError(f"{path} is not UTF-8: correct the file, or remove it") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
