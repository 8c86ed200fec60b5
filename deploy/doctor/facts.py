"""What `gpuwarden doctor` has read. Each part is its content, or why it could not be read. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from deploy.doctor.finding import Unread
from remediator.ledger.chain import ExecutorHeartbeat
from remediator.ledger.notices import Unsent


class Runs(StrEnum):
    """How gpuwarden runs here."""

    UP = "up"
    SERVICES = "services"
    OPTIONS = "options"
    """The user named the ledger."""
    NOT = "not"


UNITS: Final = {
    "exporter": "gpuwarden-exporter",
    "serve": "gpuwarden-remediator",
    "execute": "gpuwarden-executor",
    "prometheus": "prometheus",
    "alertmanager": "prometheus-alertmanager",
}
"""systemd service of each part."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """How gpuwarden runs here, with the folder of `up` and the environment file of the services."""

    runs: Runs
    data: Path | None = None
    env_file: Path | None = None

    def restart(self, part: str) -> str:
        """How to find out why a part does not work."""
        if self.runs is Runs.UP:
            return f"read {self.data}/log/{part}.log; `gpuwarden up` starts a part that exits"
        if self.runs is Runs.SERVICES:
            return f"systemctl restart {UNITS[part]}; journalctl -u {UNITS[part]}"
        if self.runs is Runs.OPTIONS:
            return "check its address; start it, or read its log"
        return "start `gpuwarden up`, or name the environment file of the services by --env-file"

    def notify(self) -> str:
        """How to name administrators. The environment is read at the start only."""
        write = "write `administrators` to a notify file (docs/how-to/notifications.md)"
        if self.runs is Runs.UP:
            return f"{write}, and restart `gpuwarden up` with it in $GPUWARDEN_REMEDIATOR_NOTIFY_FILE"
        name = (
            f"{write}, name it as GPUWARDEN_REMEDIATOR_NOTIFY_FILE in {self.env_file or 'the environment of `serve`'}"
        )
        restart = self.restart("serve") if self.runs is Runs.SERVICES else "restart `gpuwarden remediator serve`"
        return f"{name}; {restart}"

    def settings(self, variable: str) -> str:
        """Where to change a setting."""
        return f"correct {variable} in {self.env_file}" if self.env_file else f"correct ${variable}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Page:
    """An exporter or a webhook: why it is not ready, or nothing, and its metrics."""

    url: str
    not_ready: str
    samples: Sequence[Sample]

    def of(self, name: str) -> Iterator[Sample]:
        """The samples of one metric."""
        return (each for each in self.samples if each.name == name)

    def value(self, name: str) -> float | None:
        """The first sample's value of one metric."""
        return next((each.value for each in self.of(name)), None)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One alerting rule. `query` is as Prometheus formats it."""

    group: str
    name: str
    query: str
    for_s: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    error: str = ""
    """Why Prometheus cannot evaluate it."""

    @property
    def acts(self) -> bool:
        """Whether the remediator acts on it."""
        return "remedy" in self.labels


@dataclass(frozen=True, kw_only=True)
class Offset:
    """How far another clock is ahead of this host's, and the uncertainty, seconds."""

    of: str
    ahead_s: float
    uncertain_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target of Prometheus that cannot be scraped, and why."""

    job: str
    host: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """What a Prometheus server has."""

    url: str
    exporters: Sequence[Mapping[str, str]]
    """Labels of `gpuwarden_exporter_info`."""
    down: Sequence[Target]
    """Targets that cannot be scraped."""
    alertmanagers: Sequence[str]
    loaded: Sequence[Rule]
    shipped: Sequence[Rule]
    """This version's rules, with queries formatted by this server."""
    offset: Offset


@dataclass(frozen=True, kw_only=True)
class Alertmanager:
    """What an Alertmanager has."""

    url: str
    config: Mapping[str, Any]
    started_at: float | None = None
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """What the webhook answered to Alertmanager's own credentials."""

    status: int
    says: str
    file: Path | None

    @property
    def accepted(self) -> bool:
        """Whether the webhook took it."""
        return 200 <= self.status < 300


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The ledger: its clock at the time of reading, and its executors."""

    now_s: float
    executors: Sequence[ExecutorHeartbeat]
    unsent: Unsent
    offset: Offset | None = None
    """Of the database server; `None` for an SQLite file."""


@dataclass(frozen=True, kw_only=True)
class Readable:
    """A database that can be read and written."""


@dataclass(frozen=True, kw_only=True)
class File:
    """A file, a folder or a socket.

    Args:
        path: where it is.
        what: its content.
        secret: other users may not read it.
        others: mode bits of other users who can enter all folders above it; `None` if unknown.
        missing: a socket that does not exist.
        sticky: a folder in which users delete only their own files.
    """

    path: Path
    what: str
    secret: bool = False
    others: int | None = 0
    missing: bool = False
    sticky: bool = False


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Free space of a folder's file system."""

    path: Path
    free_bytes: int
    size_bytes: int
    free_files: int | None
    """`None` if the file system has no limit."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that were checked. A problem has a message and its repair."""

    checked: Sequence[str]
    problems: Sequence[tuple[str, str]] = ()
    unreadable: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Host:
    """Settings, files and disks of this host."""

    place: Place
    settings: Settings
    key: str | Unread
    files: Sequence[File] | Unread
    disks: Sequence[Disk] | Unread
    now_s: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was read."""

    host: Host
    exporter: Page | Unread
    prometheus: Prometheus | Unread
    alertmanager: Alertmanager | Unread
    webhook: Page | Unread
    token: TokenAnswer | Unread
    ledger: Ledger | Unread
    queue: Readable | Unread
    offsets: Sequence[Offset]
