"""All programs on this host as child processes: exporter, Prometheus, Alertmanager, remediator and executor.

Each listens on loopback, logs to its file in the work folder and ends with its parent, even after SIGKILL. Work folder:

- `run/`: $GPUWARDEN_RUNTIME_DIR unless the plan sets another. `queue/`, `ledger/`: the databases.
- `prometheus/`, `alertmanager/`: their data; `prometheus.yml`, `alertmanager.yml`: their configuration.
- `rules/`: the plan's rules, with the remediator's address in the runbook links and an evaluation interval.
- `parts.json`: boot id, and pid with start time per part.
- `token` (0600): bearer token of Alertmanager. `remediator-web.yml` names it. `notify-N` (0600): its other secrets.
- `notify.toml` (0600): URLs that the remediator notifies.
- `log/<part>.log`: logs.

`deploy.standalone.supervisor` restarts parts that exit.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from deploy.standalone import debian_packages, package_data, ports, receivers
from deploy.standalone.config_files import Intervals, alertmanager_config, prometheus_config, web_config
from deploy.standalone.worker_pools import WorkerPool
from gpuwarden import clock
from gpuwarden.db import running_up
from gpuwarden.docs_pages import RUNBOOKS
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.settings import services
from remediator.commands.notify import FILE_ENV as NOTIFY_FILE_ENV
from remediator.settings.notify_file import NotifySettings
from remediator.settings.notify_file import read as read_notify_file

CHECKOUT: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 30.0
IMPORT_TIMEOUT_S: Final = 300.0
"""Time for a worker to import its module, seconds."""
STOP_TIMEOUT_S: Final = 10.0
STOP_GRACE_S: Final = 10.0
"""Default of the executor, seconds."""
EXECUTOR_MARGIN_S: Final = 20.0
"""Time beyond a container's stop grace for the executor to finish its step, seconds."""
RESEND_S: Final = 10
"""Resend interval of Prometheus, seconds: an Alertmanager that restarts gets firing alerts again."""

INTERVAL_MAX_S: Final = 60
"""Maximum of `--evaluation-interval-s`: the scrape interval that every rule allows, seconds."""

PORTS: Final[Mapping[str, int]] = {"exporter": 29835, "remediator": 9836, "alertmanager": 9093, "prometheus": 9090}
"""Default port of each listener."""

PARTS: Final = ("prometheus", "alertmanager", "execute", "serve", "exporter")
"""All parts, in stop order: each stops before the parts it needs."""


_SERVICES: Final = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}
"""systemd services that Debian's packages start."""


class ChainError(Exception):
    """A part did not start or has exited. The message ends with the end of its log."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Configuration of a chain. Times are in seconds.

    Args:
        ports: by listener; a missing one means a free port.
        database: PostgreSQL URL of queue and ledger, with one role; `None` for SQLite files.
        directory: $GPUWARDEN_RUNTIME_DIR.
        execute: executor settings that differ from the defaults.
        watchdog_url: receives the watchdog alert too.
        notify: URLs of operators, for `receivers.parse`.
        parts_dir: programs that are not installed; `fetch` unpacks missing ones there.
        workers: workers that run with the chain.
    """

    work: Path
    host: str
    docker: str | None
    podman: str | None = None
    simulate_gpu: Path | None
    systemd_units: tuple[str, ...] = ()
    watchdog_url: str | None = None
    notify: Sequence[str] = ()
    armed: bool = False
    intervals: Intervals = field(default_factory=Intervals)
    ram_idle_mib: int = 5120
    dead_after_s: float = 30.0
    execute: Mapping[str, float] = field(default_factory=dict)
    host_lost_after_s: float = 180.0
    database: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    rules: Sequence[Path] = field(default_factory=package_data.rules)
    directory: Path | None = None
    metrics_days: int = 15
    metrics_bytes: int = 2 * 2**30
    parts_dir: Path = debian_packages.PARTS_DIR
    fetch: bool = True
    workers: Sequence[WorkerPool] = ()

    @property
    def parts(self) -> list[str]:
        """All parts, in stop order."""
        return [*(pool.part for pool in self.workers), *PARTS]


def add_systemd_units(parser: argparse.ArgumentParser) -> None:
    """Add the option `--systemd-unit`, a list of patterns."""
    parser.add_argument(
        "--systemd-unit",
        type=_units,
        action="extend",
        default=[],
        help="systemd services of workers, for example 'gpu-worker@*.service'; comma-separated or repeated; other "
        "services are never touched (default: none)",
    )


def add_watchdog(parser: argparse.ArgumentParser) -> None:
    """Add the option `--watchdog-url`."""
    parser.add_argument(
        "--watchdog-url",
        type=web_address,
        help="also send the watchdog alert to this URL about once a minute: a service that calls an operator when it "
        "stops (default: none)",
    )


def add_evaluation_interval(parser: argparse.ArgumentParser) -> None:
    """Add the option `--evaluation-interval-s`."""
    parser.add_argument(
        "--evaluation-interval-s",
        type=_interval_s,
        default=Intervals.evaluate_s,
        help="seconds between evaluations of the rules with a remedy, 1 to 60 (default: %(default)s)",
    )


def _interval_s(given: str) -> int:
    if given.isascii() and given.isdecimal() and 1 <= int(given) <= INTERVAL_MAX_S:
        return int(given)
    raise argparse.ArgumentTypeError(f"invalid interval {given!r}: expected 1 to {INTERVAL_MAX_S} seconds")


def web_address(given: str) -> str:
    """Parse an http or https URL. Raises argparse.ArgumentTypeError."""
    try:
        url = urlsplit(given)  # raises for an invalid IPv6 address, and so does `.port`
        opens = bool(url.hostname) and url.port != 0
    except ValueError:
        opens = False
    if opens and re.fullmatch(r"https?://[^\s/]+(/\S*)?", given):
        return given
    raise argparse.ArgumentTypeError(f"invalid URL {given!r}: expected for example https://example.com/ping/1")


def _units(given: str) -> list[str]:
    try:
        return list(services(given))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Chain:
    """The running programs; a context manager."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.directory = plan.directory or plan.work / "run"
        self.queue_url = plan.database or f"sqlite:///{plan.work / 'queue' / 'queue.db'}"
        self._shared_role = ["--allow-shared-role"] if plan.database else []
        self.ledger_url = plan.database or f"sqlite:///{plan.work / 'ledger' / 'ledger.db'}"
        self.token_file = plan.work / "token"
        for part, port in plan.ports.items():
            _check_port(part, port)
        chosen = {**dict(zip(PORTS, ports.free_ports(len(PORTS)), strict=True)), **plan.ports}
        self.exporter_url, self.remediator_url, self.alertmanager_url, self.prometheus_url = (
            f"http://127.0.0.1:{chosen[part]}" for part in PORTS
        )
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._record: dict[str, str] = {}
        # Loopback without TLS: loading certificates would take 25 ms.
        self.http = httpx.Client(timeout=5.0, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        for folder in (self.directory, plan.work / "queue", plan.work / "ledger", plan.work / "log"):
            folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.directory / "host", plan.host + "\n", mode=0o644, sync=True)
        keep_token(self.token_file)
        self.notify_file = plan.work / receivers.NOTIFY_FILE if receivers.relayed(plan.notify) else None
        if self.notify_file is not None:
            given = os.environ.get(NOTIFY_FILE_ENV)
            base = read_notify_file(Path(given)) if given else NotifySettings()
            atomic_write(self.notify_file, receivers.notify_file(plan.notify, base), mode=0o600, sync=True)
        self.web_config_file = plan.work / "remediator-web.yml"
        atomic_write(self.web_config_file, web_config(self.token_file.name), mode=0o644, sync=True)

    def __enter__(self) -> Self:
        """Start all parts and wait until they answer."""
        try:
            self.start_exporter()
            self.start_serve()
            self.start_executor()
            self._start_alertmanager()
            self._start_prometheus()
            self._await("exporter", self._answers(f"{self.exporter_url}/-/ready"))
            self._await("serve", self._answers(f"{self.remediator_url}/-/ready"))
            self._await("execute", self._executor_beats)
            self._await("alertmanager", self._answers(f"{self.alertmanager_url}/-/ready"))
            self._await("prometheus", self._answers(f"{self.prometheus_url}/-/ready"))
            for pool in self.plan.workers:
                self.start(pool.part)
                started = partial(pool.is_started, self.directory, self.pid(pool.part))
                self._await(pool.part, started, timeout_s=IMPORT_TIMEOUT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop all parts."""
        for name in self.plan.parts:
            self.stop(name)
        self.http.close()

    def start(self, name: str) -> None:
        """Start one part."""
        starts: Mapping[str, Callable[[], None]] = {
            "exporter": self.start_exporter,
            "serve": self.start_serve,
            "execute": self.start_executor,
            "alertmanager": self._start_alertmanager,
            "prometheus": self._start_prometheus,
            **{
                pool.part: partial(
                    self._start,
                    pool.part,
                    _gpuwarden(*pool.arguments),
                    folder=Path.cwd(),
                    environment=pool.environment(queue_url=self.queue_url, directory=self.directory),
                )
                for pool in self.plan.workers
            },
        }
        starts[name]()

    def start_exporter(self) -> None:
        """Start the exporter."""
        plan = self.plan
        simulated = ["--simulate-gpu", str(plan.simulate_gpu)] if plan.simulate_gpu else []
        self._start(
            "exporter",
            [
                *_gpuwarden("exporter"),
                *("--runtime-dir", str(self.directory), "--listen", "127.0.0.1", "--port", _port(self.exporter_url)),
                *("--docker", plan.docker or "none", "--podman", plan.podman or "none"),
                *(f"--systemd-unit={unit}" for unit in plan.systemd_units),
                *("--ram-idle-mib", str(plan.ram_idle_mib)),
                *("--dead-after-s", str(plan.dead_after_s)),
                *("--state-dir", str(plan.work / "exporter")),
                *simulated,
            ],
        )

    def start_serve(self) -> None:
        """Start the webhook."""
        notify = [] if self.notify_file is None else ["--notify-file", str(self.notify_file)]
        self._start(
            "serve",
            [
                *_gpuwarden("remediator", "serve", "--runtime-dir", str(self.directory), "--ledger", self.ledger_url),
                *("--web-config-file", str(self.web_config_file), "--queue-db", self.queue_url),
                *("--listen", "127.0.0.1", "--port", _port(self.remediator_url)),
                *notify,
                *self._shared_role,
            ],
        )

    def start_executor(self, *, armed: bool | None = None) -> None:
        """Start the executor, with another `armed` if given."""
        self._start("execute", self.executor_command(armed=armed))

    def executor_command(self, *, armed: bool | None = None) -> list[str]:
        """Command line of the executor."""
        plan = self.plan
        armed = plan.armed if armed is None else armed
        return [
            *_gpuwarden("remediator", "execute", "--runtime-dir", str(self.directory), "--ledger", self.ledger_url),
            *("--queue-db", self.queue_url, "--exporter", self.exporter_url),
            *("--docker", plan.docker or "none", "--podman", plan.podman or "none"),
            *(f"--{name.replace('_', '-')}={value:g}" for name, value in plan.execute.items()),
            *("--host-lost-after-s", str(plan.host_lost_after_s)),
            *("--alertmanager", self.alertmanager_url, "--prometheus", self.prometheus_url),
            "--armed" if armed else "--no-armed",
            *self._shared_role,
            *(f"--systemd-unit={unit}" for unit in plan.systemd_units),
        ]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one part, for example SIGSTOP."""
        self._running[name].send_signal(number)

    def pid(self, name: str) -> int:
        """Pid of one part."""
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """End one part by SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """End one part by SIGTERM, then by SIGKILL."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
        try:
            # An executor killed between stop and start would leave a container down.
            grace_s = self.plan.execute.get("stop_grace_s", STOP_GRACE_S)
            process.wait(grace_s + EXECUTOR_MARGIN_S if name == "execute" else STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ended(self) -> dict[str, int]:
        """Exit codes of parts that exited on their own. Workers that were drained are none."""
        polled = {name: process.poll() for name, process in self._running.items()}
        for pool in self.plan.workers:
            if polled.get(pool.part) == 0:
                del polled[pool.part]
        return {name: code for name, code in polled.items() if code is not None}

    def check(self) -> None:
        """Raise ChainError if a part has exited."""
        for name, code in self.ended().items():
            raise ChainError(f"{name} exited with code {code}:\n{self.log_tail(name)}")

    def log_file(self, name: str) -> Path:
        """Log file of one part."""
        return self.plan.work / "log" / f"{name}.log"

    def log(self, name: str) -> str:
        """Log of one part."""
        path = self.log_file(name)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Last lines of the log of one part."""
        return "\n".join(self.log(name).splitlines()[-lines:])

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Query Prometheus for the current value of an expression."""
        answer = self.http.get(f"{self.prometheus_url}/api/v1/query", params={"query": expression})
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def _start_alertmanager(self) -> None:
        config = self.plan.work / "alertmanager.yml"
        text = alertmanager_config(
            webhook=f"{self.remediator_url}/api/v1/alerts",
            token_file=self.token_file,
            intervals=self.plan.intervals,
            outside=self.plan.watchdog_url,
            people=receivers.configs(self.plan.notify, self.plan.work),
            relay=f"{self.remediator_url}{receivers.RELAY_PATH}" if self.notify_file else None,
        )
        for name, secret in receivers.secrets(self.plan.notify).items():
            atomic_write(self.plan.work / name, secret, mode=0o600, sync=True)
        atomic_write(config, text, mode=0o600, sync=True)  # it may hold the watchdog URL, a secret
        self._start(
            "alertmanager",
            [
                str(self._program("alertmanager")),
                f"--config.file={config}",
                f"--storage.path={self.plan.work / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{_port(self.alertmanager_url)}",
                "--cluster.listen-address=",
                "--log.format=json",
            ],
        )

    def _start_prometheus(self) -> None:
        config = self.plan.work / "prometheus.yml"
        (rules := self.plan.work / "rules").mkdir(exist_ok=True)
        for file in self.plan.rules:
            text = package_data.rule_file(
                file,
                runbooks_url=f"{self.remediator_url}/{RUNBOOKS}",
                evaluation_interval_s=self.plan.intervals.evaluate_s,
            )
            atomic_write(rules / file.name, text, mode=0o644, sync=True)
        text = prometheus_config(
            host=self.plan.host,
            exporter=self.exporter_url.removeprefix("http://"),
            remediator=self.remediator_url.removeprefix("http://"),
            alertmanager=self.alertmanager_url.removeprefix("http://"),
            prometheus=self.prometheus_url.removeprefix("http://"),
            rules=[rules / file.name for file in self.plan.rules],
            intervals=self.plan.intervals,
        )
        atomic_write(config, text, mode=0o644, sync=True)
        self._start(
            "prometheus",
            [
                str(self._program("prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={self.plan.work / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{_port(self.prometheus_url)}",
                f"--storage.tsdb.retention.time={self.plan.metrics_days}d",
                f"--storage.tsdb.retention.size={self.plan.metrics_bytes}B",
                f"--rules.alert.resend-delay={RESEND_S}s",
                "--log.format=json",
            ],
        )

    def _start(
        self,
        name: str,
        argv: list[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with self.log_file(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*_end_with_parent(), *argv],
                env=environment or debian_packages.env_for_parts(parts_dir=self.plan.parts_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder or self.plan.work,
                # Ctrl-C reaches only the parent, which stops the parts in order.
                start_new_session=True,
            )
        with suppress(OSError):  # already ended
            self._record[name] = str(ProcessId.of(self._running[name].pid))
        record = json.dumps({"boot_id": clock.boot_id(), **self._record})
        atomic_write(self.plan.work / "parts.json", record, mode=0o600, sync=True)

    def _program(self, name: str) -> Path:
        return debian_packages.find(name, parts_dir=self.plan.parts_dir, fetch=self.plan.fetch)

    def _await(self, name: str, ready: Callable[[], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                raise ChainError(f"{name} did not answer within {timeout_s:.0f} s:\n{self.log_tail(name)}")
            time.sleep(0.05)

    def _answers(self, url: str) -> Callable[[], bool]:
        def ready() -> bool:
            with suppress(httpx.HTTPError):
                return self.http.get(url).status_code == httpx.codes.OK
            return False

        return ready

    def _executor_beats(self) -> bool:
        with suppress(httpx.HTTPError):
            return "gpuwarden_remediator_armed" in self.http.get(f"{self.remediator_url}/metrics").text
        return False


def _gpuwarden(*arguments: str) -> list[str]:
    # -P: do not import from the working directory.
    return [sys.executable, "-P", "-m", "gpuwarden", *arguments]


def _end_with_parent() -> Sequence[str]:
    """Command prefix that ends a child with its parent; empty without setpriv (util-linux).

    The kernel sends the signal only to a child that already registered for it. A child whose parent died before that
    sees another parent and exits.
    """
    setpriv = shutil.which("setpriv")
    begin = f'[ "$PPID" = {os.getpid()} ] && exec "$@"'
    return (setpriv, "--pdeathsig", "TERM", "--", "/bin/sh", "-c", begin, "sh") if setpriv else ()


def keep_token(path: Path) -> None:
    """Create a bearer token file (0600), or keep the existing one."""
    if path.exists() and path.stat().st_size > 0:
        path.chmod(0o600)
    else:
        atomic_write(path, secrets.token_hex(24), mode=0o600, sync=True)


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def _check_port(part: str, wanted: int) -> None:
    try:
        ports.check(wanted)
    except OSError as error:
        if _is_of_up(wanted):
            raise ChainError(
                f"port {wanted} of {part} is in use by another `gpuwarden up`. One guards all workers of a host: see "
                "`gpuwarden status`, or end it first"
            ) from None
        service = _SERVICES.get(part)
        disable = f" (Debian's service: systemctl disable --now {service})" if service else ""
        raise ChainError(
            f"port {wanted} of {part} cannot be used ({error.strerror}): stop its listener{disable}, perhaps a "
            f"`gpuwarden up` of another user, or set another --{part}-port"
        ) from None


def _is_of_up(port: int) -> bool:
    """Whether this user's running `gpuwarden up` has the port."""
    return any(str(port) == value.rpartition(":")[2] for value in running_up.of_up(os.environ).values())
