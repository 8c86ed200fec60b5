"""`gpuwarden up`: run all programs on this host, with one data directory.

A part that exits is restarted; a part that keeps exiting stops all of them. GPUs come from the drivers or a simulation
file. Without either they are unknown, and nothing is confirmed.

Exit codes: 0 stopped by a signal; 1 failed to start, or a part kept exiting; 2 invalid arguments.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

from deploy.standalone import data_dir, debian_packages, package_data, receivers
from deploy.standalone.config_files import Intervals
from deploy.standalone.docker_socket import Engine, NoEngine, reachable_engine
from deploy.standalone.episode_lines import EpisodeLines
from deploy.standalone.log_rotation import rotate
from deploy.standalone.stack import (
    PORTS,
    Chain,
    ChainError,
    Plan,
    add_evaluation_interval,
    add_systemd_units,
    add_watchdog,
)
from deploy.standalone.supervisor import Supervisor
from deploy.standalone.worker_pools import add_workers, with_gpus
from gpuwarden.db import running_up
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, printable, show
from remediator.commands.notify import FILE_ENV as NOTIFY_FILE_ENV

CHECK_S: Final = 0.5
"""Interval of the supervisor, seconds."""
FREE_BOUND_S: Final = 120.0
SETTLE_BOUND_S: Final = 60.0
"""Defaults of the executor, seconds. The settle comes first."""
FREE_BOUND_MAX_S: Final = 86400
"""Maximum of `--restart-timeout-s`, seconds."""
HOUSEKEEPING_S: Final = 5.0
"""Interval of log rotation and of the search for a Docker engine, seconds."""

_DESCRIPTION: Final = """\
Run exporter, Prometheus, Alertmanager and remediator on this host: on loopback, with one data directory.

Without `--armed` or `gpuwarden arm` this is a dry run: decisions are recorded, nothing is changed. Ctrl-C or SIGTERM
stops all parts; the next start continues. A part that exits is restarted.
"""
_EPILOG: Final = """\
Install Prometheus and Alertmanager first (Debian: apt-get install prometheus prometheus-alertmanager), or use
--fetch-parts to unpack them below the data directory. Debian's packages start services on the same ports. Stop them:
systemctl disable --now prometheus prometheus-alertmanager.

Data directory:
  ledger/ queue/ prometheus/ alertmanager/   databases; stop `up` before you copy them for a backup
  log/PART.log, .1 to .3                     logs, JSON lines; 10 MiB each
  token (0600)                               credentials that Alertmanager sends

Commands of the same user find this `up`: `gpuwarden doctor`, `gpuwarden status`, `gpuwarden ledger list`,
`gpuwarden job list`. To use systemd and your own Prometheus instead: gpuwarden init --help
"""


class _StopRequested(BaseException):
    """A signal arrived during the start."""


class _StopSignal:
    """Handler of SIGTERM and SIGINT: ends the wait, or aborts the start."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.starting = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Returns whether a signal arrived."""
        return self._event.wait(timeout_s)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        first = not self._event.is_set()
        self._event.set()
        if first and self.starting:
            raise _StopRequested


class _Output:
    """Prints messages, and appends them with a timestamp to `log/up.log`. A full disk is ignored."""

    def __init__(self, data: Path) -> None:
        self.log = data / "log" / "up.log"

    def __call__(self, text: str) -> None:
        with suppress(OSError):
            show(*f"up: {text}".split("\n"), flush=True)
        self.record(text)

    def cut(self, text: str) -> None:
        """Print a message on one line of the terminal, and append all of it to the log."""
        line = printable(f"up: {text}")
        if sys.stdout.isatty() and len(line) > (width := shutil.get_terminal_size().columns):
            line = f"{line[: width - 1]}…"
        with suppress(OSError):
            show(line, flush=True)
        self.record(text)

    def record(self, text: str) -> None:
        """Append a message to the log only."""
        entry = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": text}
        with suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def command(argv: list[str] | None = None) -> int:
    """Run `gpuwarden up`."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.worker = with_gpus(arguments.worker, arguments.gpus)
    except ValueError as error:
        parser.error(str(error))
    stop = _StopSignal()
    output = _Output(arguments.data_dir)
    try:
        with data_dir.lock_data_dir(arguments.data_dir, say=output):
            try:
                _run(arguments, stop, output)
            except (debian_packages.PartMissing, ChainError, GpuwardenError, OSError) as error:
                output.record(str(error))
                raise
    except (debian_packages.PartMissing, ChainError, GpuwardenError, OSError) as error:
        show(*f"up: {error}".split("\n"), file=sys.stderr)
        return 1
    except _StopRequested:
        output("stopped during the start")
    return 0


def _run(arguments: argparse.Namespace, stop: _StopSignal, output: _Output) -> None:
    engine = reachable_engine(os.environ) if arguments.docker == "auto" else _given_engine(arguments.docker)
    plan = _plan(arguments, engine)
    _find_parts(plan)
    chain = Chain(plan)
    with ExitStack() as stack:
        try:
            stack.enter_context(running_up.published(_variables(chain), os.environ))
        except (OSError, RuntimeError) as error:
            output(f"commands do not find these addresses: up.json cannot be written ({error}); give them as options")
        stack.enter_context(chain)
        stop.starting = False
        _announce(chain, engine, output)
        with closing(EpisodeLines(chain.ledger_url, say=output.cut)) as episodes:
            _watch(chain, stop, output, episodes, look_for_docker=arguments.docker == "auto")
        output("stopping")


def _watch(chain: Chain, stop: _StopSignal, output: _Output, episodes: EpisodeLines, *, look_for_docker: bool) -> None:
    supervisor, housekeeping_s = Supervisor(chain, say=output), time.monotonic()
    while not stop.wait(CHECK_S):
        now_s = time.monotonic()
        supervisor.tick(now_s)
        episodes.tick(now_s)
        if now_s - housekeeping_s < HOUSEKEEPING_S:
            continue
        housekeeping_s = now_s
        for log in (output.log, *map(chain.log_file, chain.plan.parts)):
            with suppress(OSError):  # no space for a copy: retry later
                rotate(log)
        if look_for_docker and chain.plan.docker is None:
            _use_docker(chain, output)


def _use_docker(chain: Chain, output: _Output) -> None:
    """Restart exporter and executor with an engine that started later."""
    engine = reachable_engine(os.environ)
    if isinstance(engine, Engine):
        output(f"Docker {engine.version} found: restarting exporter and execute")
        chain.plan = replace(chain.plan, docker=engine.base_url)
        for name in ("execute", "exporter"):
            chain.stop(name)
        for name in ("exporter", "execute"):
            chain.start(name)


def _plan(arguments: argparse.Namespace, engine: Engine | NoEngine) -> Plan:
    data: Path = arguments.data_dir.resolve()
    directory: Path = (arguments.runtime_dir or data_dir.default_directory(arguments.data_dir)).resolve()
    return Plan(
        work=data,
        directory=directory,
        host=data_dir.host_key(data, directory, arguments.host),
        docker=engine.base_url if isinstance(engine, Engine) else None,
        simulate_gpu=arguments.simulate_gpu and arguments.simulate_gpu.resolve(),
        podman=None if arguments.podman == "none" else arguments.podman,
        systemd_units=tuple(arguments.systemd_unit),
        watchdog_url=arguments.watchdog_url,
        notify=arguments.notify or (),
        execute={"restart_timeout_s": arguments.restart_timeout_s},
        armed=arguments.armed,
        metrics_days=arguments.metrics_days,
        intervals=Intervals(evaluate_s=arguments.evaluation_interval_s),
        parts_dir=data / "parts" if package_data.CHECKOUT is None else debian_packages.PARTS_DIR,
        fetch=arguments.fetch_parts,
        workers=arguments.worker,
        ports={part: getattr(arguments, f"{part}_port") for part in PORTS},
    )


def _find_parts(plan: Plan) -> None:
    """Raise PartMissing with all missing programs."""
    missing = []
    for name in ("prometheus", "alertmanager"):
        try:
            debian_packages.find(name, parts_dir=plan.parts_dir, fetch=plan.fetch)
        except debian_packages.PartMissing as problem:
            missing.append(str(problem))
    if missing:
        advice = (
            ""
            if plan.fetch
            else f"\n  or use --fetch-parts: unpacks Debian packages into {plan.parts_dir} without installing them"
        )
        raise debian_packages.PartMissing("\n  ".join(missing) + advice)


def _variables(chain: Chain) -> dict[str, str]:
    """What commands of the same user read of this `up`."""
    return {
        running_up.QUEUE_ENV: chain.queue_url,
        running_up.LEDGER_ENV: chain.ledger_url,
        running_up.RUNTIME_DIR_ENV: str(chain.directory),
        "GPUWARDEN_REMEDIATOR_PORT": chain.remediator_url.rpartition(":")[2],
        "GPUWARDEN_REMEDIATOR_EXPORTER": chain.exporter_url,
        "GPUWARDEN_REMEDIATOR_ALERTMANAGER": chain.alertmanager_url,
        "GPUWARDEN_REMEDIATOR_PROMETHEUS": chain.prometheus_url,
        **({} if chain.notify_file is None else {NOTIFY_FILE_ENV: str(chain.notify_file)}),
    }


def _announce(chain: Chain, engine: Engine | NoEngine, output: _Output) -> None:
    plan = chain.plan
    where = f"Docker {engine.version}" if isinstance(engine, Engine) else f"no Docker engine: {engine.reason}"
    output(f"host {plan.host}, {where}; {_mode(plan)}")
    if isinstance(engine, Engine) and os.geteuid() != 0:
        output("not root: I/O of other users' containers is unknown; jobs that load there are not checked")
    if plan.podman is not None:
        output(f"Podman        {plan.podman}")
    if plan.systemd_units:
        output(f"services      {', '.join(plan.systemd_units)}")
    for text in receivers.warnings(plan.notify):
        output(text)
    if plan.simulate_gpu is None:
        output("GPUs          from the NVIDIA driver and the kernel (AMD, Intel); without one, nothing is confirmed")
    for name, text in (
        ("prometheus", chain.prometheus_url),
        ("alertmanager", chain.alertmanager_url),
        ("exporter", f"{chain.exporter_url}/metrics"),
        ("remediator", f"{chain.remediator_url}/metrics"),
        ("workers", f"GPUWARDEN_RUNTIME_DIR={chain.directory} GPUWARDEN_QUEUE_DB={chain.queue_url}"),
        ("ledger", f"gpuwarden ledger --ledger {chain.ledger_url} list"),
        ("data, logs", f"{plan.work}, {plan.work / 'log'}"),
    ):
        output(f"{name:13} {text}")
    for pool in plan.workers:
        output(f"{'running':13} {count_of(pool.count, 'worker')} of {pool.handler}, log {chain.log_file(pool.part)}")
    output("ready; Ctrl-C stops all parts")


def _mode(plan: Plan) -> str:
    if plan.armed:
        return "armed unless disarmed by `gpuwarden disarm`"
    return "dry run unless armed by `gpuwarden arm`: decisions are recorded, nothing is changed"


def _given_engine(docker: str) -> Engine | NoEngine:
    if docker == "none":
        return NoEngine(reason="--docker none")
    return Engine(base_url=docker, private=False, version=f"at {docker}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden up",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = data_dir.default_data(os.environ, euid=os.geteuid())
    parser.add_argument("--data-dir", type=Path, default=data, help="data directory (default: %(default)s)")
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        help=f"$GPUWARDEN_RUNTIME_DIR, the state folder of workers (default: {data_dir.SYSTEM_DIRECTORY} for "
        f"--data-dir {data_dir.SYSTEM_DATA}, otherwise DATA_DIR/run)",
    )
    parser.add_argument("--host", help="host key (default: the last one, otherwise the machine's name)")
    parser.add_argument(
        "--armed",
        action="store_true",
        help="let remedies restart containers; see `gpuwarden remediator execute --help`",
    )
    parser.add_argument(
        "--docker",
        default="auto",
        help="Docker socket, unix:///path; 'none'; or 'auto': $DOCKER_HOST or the system's, even if it starts later "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--podman",
        default="none",
        help="Podman socket, for example unix:///run/podman/podman.sock, or 'none' (default: %(default)s)",
    )
    add_workers(parser)
    add_systemd_units(parser)
    receivers.add_notify(parser)
    add_watchdog(parser)
    add_evaluation_interval(parser)
    parser.add_argument(
        "--restart-timeout-s",
        type=_free_bound_s,
        default=FREE_BOUND_S,
        help="seconds without progress until a restart is given up and an operator is alerted; raise it for services "
        "that start slowly (default: %(default)g)",
    )
    parser.add_argument(
        "--simulate-gpu", type=Path, help="read simulated GPUs from this file (docs/how-to/simulate-gpus.md)"
    )
    parser.add_argument(
        "--fetch-parts",
        action="store_true",
        default=package_data.CHECKOUT is not None,
        help="unpack Debian packages of missing programs without installing them (default in a checkout)",
    )
    parser.add_argument(
        "--metrics-days",
        type=int,
        default=15,
        help="days of metrics to keep, at most 2 GiB (default: %(default)s)",
    )
    for part, port in PORTS.items():
        parser.add_argument(f"--{part}-port", type=int, default=port, help=f"{part}'s port (default: {port})")
    return parser


def _free_bound_s(given: str) -> float:
    try:
        if SETTLE_BOUND_S <= (bound_s := float(given)) <= FREE_BOUND_MAX_S:
            return bound_s
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"invalid time {given!r}: expected {SETTLE_BOUND_S:g} to {FREE_BOUND_MAX_S} seconds"
    )


if __name__ == "__main__":
    sys.exit(command())
