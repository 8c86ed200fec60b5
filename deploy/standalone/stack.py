"""The whole chain on this host: exporter, Prometheus, Alertmanager, remediator and executor, as processes of ours.

Every one of them listens on loopback, logs to a file of its own in the work folder, and ends with us, even when we are
killed. Layout of the work folder:

- `run/` is $GPUWARDEN_DIR, unless the plan names another one; `queue/` holds the job queue, `ledger/` the ledger;
- `prometheus/` and `alertmanager/` are theirs, as configured by `prometheus.yml` and `alertmanager.yml`;
- `rules/` are the plan's, with the address of our remediator in what they link;
- `parts.json` says which processes were started last: the boot they belong to, and by part the pid with its start time;
- `token` (0600) is what Alertmanager shows the remediator, which `remediator-web.yml` names;
- `log/<part>.log` is what each part says.

`Chain` starts and stops; what becomes of a part that ends by itself is for its caller (`deploy.standalone.supervisor`).
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from deploy.standalone import debian_packages, package_data
from deploy.standalone.config_files import Pace, alertmanager_config, prometheus_config, web_config
from gpuwarden import clock
from gpuwarden.docs_pages import RUNBOOKS
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.settings import services

CHECKOUT: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
STOP_GRACE_S: Final = 10.0
"""The executor's own default, seconds."""
EXECUTOR_MARGIN_S: Final = 20.0
"""How much longer than a container's grace the executor has to finish the step at hand, seconds."""
RESEND_S: Final = 10
"""How often Prometheus tells of an alert that goes on, seconds: an Alertmanager that was away hears of it then."""


PORTS: Final[Mapping[str, int]] = {"exporter": 29835, "remediator": 9836, "alertmanager": 9093, "prometheus": 9090}
"""Where each part listens that does, unless told otherwise; `Plan.ports` calls them so."""

PARTS: Final = ("prometheus", "alertmanager", "execute", "serve", "exporter")
"""Every part, in the order in which they are stopped, so that nothing misses what it needs."""


_SERVICES: Final = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}
"""What systemd calls the parts that Debian's packages start by themselves."""


class ChainError(Exception):
    """A part of the chain did not start, or ended by itself; the message ends with what it last logged."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What chain to run. A listener without a port in `ports` takes a free one; units stand in the names.

    Queue and ledger are in the PostgreSQL `database`, a URL, where hosts share one; else in SQLite files of their own.
    `directory` is $GPUWARDEN_DIR. Prometheus forgets what is older than `metrics_days` or over `metrics_bytes`.
    Programs that are not installed come from `parts_dir`, into which `fetch` unpacks them. `execute` holds settings of
    the executor that differ from its defaults. The alert that always fires goes to `watchdog_url`, too.
    """

    work: Path
    host: str
    docker: str | None
    podman: str | None = None
    simulate_gpu: Path | None
    processes: Path | None = None
    systemd_units: tuple[str, ...] = ()
    watchdog_url: str | None = None
    armed: bool = False
    pace: Pace = field(default_factory=Pace)
    ram_delta_mib: int = 5120
    dead_after_s: float = 30.0
    execute: Mapping[str, float] = field(default_factory=dict)
    node_lost_after_s: float = 180.0
    database: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    rules: Sequence[Path] = field(default_factory=package_data.rules)
    directory: Path | None = None
    metrics_days: int = 15
    metrics_bytes: int = 2 * 2**30
    parts_dir: Path = debian_packages.PARTS_DIR
    fetch: bool = True


def add_units(parser: argparse.ArgumentParser) -> None:
    """Have a command take `--systemd-unit`, a list of patterns."""
    parser.add_argument(
        "--systemd-unit",
        type=_units,
        action="extend",
        default=[],
        help="names of the systemd services that workers run in, such as 'gpu-worker@*.service', separated by commas "
        "or each with an option of its own; no other is ever touched (default: none)",
    )


def add_watchdog(parser: argparse.ArgumentParser) -> None:
    """Have a command take `--watchdog-url`."""
    parser.add_argument(
        "--watchdog-url",
        type=web_address,
        help="the alert that always fires is sent there, too, about once a minute: a service that calls somebody when "
        "it stays away (default: nowhere)",
    )


def web_address(given: str) -> str:
    """An address of the web, as it was given. Raises argparse.ArgumentTypeError."""
    try:
        debian_packages = urlsplit(given)
        opens = (
            bool(debian_packages.hostname) and debian_packages.port != 0
        )  # it raises, as urlsplit does for half an IPv6 address
    except ValueError:
        opens = False
    if opens and re.fullmatch(r"https?://[^\s/]+(/\S*)?", given):
        return given
    raise argparse.ArgumentTypeError(f"{given!r} is no address such as https://example.com/ping/1")


def _units(given: str) -> list[str]:
    try:
        return list(services(given))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Chain:
    """The running chain; use it as a context manager."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.directory = plan.directory or plan.work / "run"
        self.queue_url = plan.database or f"sqlite:///{plan.work / 'queue' / 'queue.db'}"
        self.ledger_url = plan.database or f"sqlite:///{plan.work / 'ledger' / 'ledger.db'}"
        self.token_file = plan.work / "token"
        self.exporter_url, self.remediator_url, self.alertmanager_url, self.prometheus_url = (
            f"http://127.0.0.1:{_port_for(part, plan.ports.get(part))}" for part in PORTS
        )
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._record: dict[str, str] = {}
        # All of it listens on loopback without TLS: nobody's certificates are read (25 ms), and nobody's believed.
        self.http = httpx.Client(timeout=5.0, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        for folder in (self.directory, plan.work / "queue", plan.work / "ledger", plan.work / "log"):
            folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.directory / "host", plan.host + "\n", mode=0o644, sync=True)
        keep_token(self.token_file)
        self.web_config_file = plan.work / "remediator-web.yml"
        atomic_write(self.web_config_file, web_config(self.token_file.name), mode=0o644, sync=True)

    def __enter__(self) -> Self:
        """Start everything, and wait until all of it answers."""
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
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        for name in PARTS:
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
                *("--dir", str(self.directory), "--listen", "127.0.0.1", "--port", _port(self.exporter_url)),
                *("--docker", plan.docker or "none", "--podman", plan.podman or "none"),
                *(f"--systemd-unit={unit}" for unit in plan.systemd_units),
                *("--ram-delta-mib", str(plan.ram_delta_mib)),
                *("--dead-after-s", str(plan.dead_after_s)),
                *("--state-dir", str(plan.work / "exporter")),
                *simulated,
            ],
        )

    def start_serve(self) -> None:
        """Start the webhook."""
        self._start(
            "serve",
            [
                *_gpuwarden("remediator", "serve", "--dir", str(self.directory), "--ledger", self.ledger_url),
                *("--web-config-file", str(self.web_config_file), "--queue", self.queue_url),
                *("--listen", "127.0.0.1", "--port", _port(self.remediator_url)),
                *("--node-lost-after-s", str(self.plan.node_lost_after_s)),
            ],
        )

    def start_executor(self, *, armed: bool | None = None) -> None:
        """Start the executor, as planned or, on a second start, otherwise armed."""
        self._start("execute", self.executor_command(armed=armed))

    def executor_command(self, *, armed: bool | None = None) -> list[str]:
        """What starts the executor."""
        plan = self.plan
        armed = plan.armed if armed is None else armed
        processes = ["--processes", str(plan.processes)] if plan.processes else []
        return [
            *_gpuwarden("remediator", "execute", "--dir", str(self.directory), "--ledger", self.ledger_url),
            *("--queue", self.queue_url, "--exporter", self.exporter_url),
            *("--docker", plan.docker or "none", "--podman", plan.podman or "none"),
            *(f"--{name.replace('_', '-')}={value:g}" for name, value in plan.execute.items()),
            *("--node-lost-after-s", str(plan.node_lost_after_s)),
            *("--alertmanager", self.alertmanager_url, "--prometheus", self.prometheus_url),
            "--armed" if armed else "--no-armed",
            *(f"--systemd-unit={unit}" for unit in plan.systemd_units),
            *processes,
        ]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send one part a signal, SIGSTOP and SIGCONT for example."""
        self._running[name].send_signal(number)

    def pid(self, name: str) -> int:
        """The process of one part."""
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """End one part by SIGKILL, as a crash would."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """End one part: SIGTERM, and SIGKILL to what does not heed it."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        process.send_signal(signal.SIGCONT)  # one that is suspended would not hear of it
        try:
            # An executor that is killed between a stop and a start leaves somebody's container down.
            grace_s = self.plan.execute.get("stop_grace_s", STOP_GRACE_S)
            process.wait(grace_s + EXECUTOR_MARGIN_S if name == "execute" else STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ended(self) -> dict[str, int]:
        """The parts that have ended by themselves since they were last started, with their exit codes."""
        polled = {name: process.poll() for name, process in self._running.items()}
        return {name: code for name, code in polled.items() if code is not None}

    def check(self) -> None:
        """Raise ChainError when a part has ended by itself."""
        for name, code in self.ended().items():
            raise ChainError(f"{name} ended with {code}:\n{self.log_tail(name)}")

    def log_file(self, name: str) -> Path:
        """Where one part logs to."""
        return self.plan.work / "log" / f"{name}.log"

    def log(self, name: str) -> str:
        """What one part has logged."""
        path = self.log_file(name)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The end of what one part has logged."""
        return "\n".join(self.log(name).splitlines()[-lines:])

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask Prometheus for an expression's value now."""
        answer = self.http.get(f"{self.prometheus_url}/api/v1/query", params={"query": expression})
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def _start_alertmanager(self) -> None:
        config = self.plan.work / "alertmanager.yml"
        text = alertmanager_config(
            webhook=f"{self.remediator_url}/api/v1/alerts",
            token_file=self.token_file,
            pace=self.plan.pace,
            outside=self.plan.watchdog_url,
        )
        atomic_write(config, text, mode=0o600, sync=True)  # it may hold the address outside, which is a secret
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
            text = package_data.linked(file, f"{self.remediator_url}/{RUNBOOKS}")
            atomic_write(rules / file.name, text, mode=0o644, sync=True)
        text = prometheus_config(
            host=self.plan.host,
            exporter=self.exporter_url.removeprefix("http://"),
            remediator=self.remediator_url.removeprefix("http://"),
            alertmanager=self.alertmanager_url.removeprefix("http://"),
            prometheus=self.prometheus_url.removeprefix("http://"),
            rules=[rules / file.name for file in self.plan.rules],
            pace=self.plan.pace,
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

    def _start(self, name: str, argv: list[str]) -> None:
        with self.log_file(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*_tether(), *argv],
                env=debian_packages.env_for_parts(parts_dir=self.plan.parts_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.plan.work,
                # Ctrl-C at a terminal reaches us alone, who then stop the parts in order.
                start_new_session=True,
            )
        with suppress(OSError):  # it ended at once
            self._record[name] = str(ProcessId.of(self._running[name].pid))
        record = json.dumps({"boot_id": clock.boot_id(), **self._record})
        atomic_write(self.plan.work / "parts.json", record, mode=0o600, sync=True)

    def _program(self, name: str) -> Path:
        return debian_packages.find(name, parts_dir=self.plan.parts_dir, fetch=self.plan.fetch)

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                raise ChainError(f"{name} does not answer after {START_TIMEOUT_S:.0f} s:\n{self.log_tail(name)}")
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
    # -P: what lies in the data directory, where they run, is no code of ours.
    return [sys.executable, "-P", "-m", "gpuwarden", *arguments]


def _tether() -> Sequence[str]:
    """What makes a child end when we do, however we end; nothing where util-linux has no setpriv.

    The kernel tells a child of its parent's death only from when the child has asked for it. If we were killed before
    that, the child finds that it has another parent by now, and begins nothing.
    """
    setpriv = shutil.which("setpriv")
    begin = f'[ "$PPID" = {os.getpid()} ] && exec "$@"'
    return (setpriv, "--pdeathsig", "TERM", "--", "/bin/sh", "-c", begin, "sh") if setpriv else ()


def keep_token(path: Path) -> None:
    """Have a bearer token in the file: the one that is there, else a new one; for its owner's eyes alone."""
    if path.exists() and path.stat().st_size > 0:
        path.chmod(0o600)
    else:
        atomic_write(path, secrets.token_hex(24), mode=0o600, sync=True)


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def _port_for(part: str, wanted: int | None) -> int:
    """The wanted port, which must be free, or a free one."""
    with closing(socket.socket()) as probe:
        # As the listeners do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            service = _SERVICES.get(part)
            stop = (
                f"stop what listens there (Debian's own: systemctl disable --now {service})"
                if service
                else ("stop what listens there")
            )
            raise ChainError(
                f"port {wanted}, wanted for {part}, cannot be used ({error.strerror}): {stop}, "
                f"or give another --{part}-port"
            ) from None
        port: int = probe.getsockname()[1]
        return port
