"""`gpuwarden up`: the whole chain on this host, for real use: one command, one data directory, everything on loopback.

Exporter, Prometheus, Alertmanager and the remediator's two processes run as our children. One that ends by itself is
started again; one that keeps ending stops all of it. Ctrl-C or SIGTERM stops them in order; a second start goes on
where the first one stopped, also after a kill. GPUs come from the NVIDIA driver or a simulation file; with neither they
are unknown, and nothing is ever confirmed. Workers are the user's own: docs/running.md says what one needs.

Exit codes: 0 told to stop; 1 it could not start, or a part kept ending, and why was said; 2 it was called wrongly.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

from deploy.standalone import data_dir, debian_packages, package_data
from deploy.standalone.docker_socket import Engine, NoEngine, reachable_engine
from deploy.standalone.log_rotation import rotate
from deploy.standalone.stack import PARTS, PORTS, Chain, ChainError, Plan, add_units, add_watchdog
from deploy.standalone.supervisor import Supervisor
from gpuwarden.errors import GpuwardenError

CHECK_S: Final = 0.5
"""Time between two looks at the parts, seconds."""
FREE_BOUND_S: Final = 120.0
SETTLE_BOUND_S: Final = 60.0
"""The executor's own defaults, seconds: no free is given up before its job may be settled."""
FREE_BOUND_MAX_S: Final = 86400
"""The longest `--free-bound-s` that the executor takes, seconds."""
HOUSEKEEPING_S: Final = 5.0
"""Time between two looks at the logs' sizes and, where there was none, for a Docker engine, seconds."""

_DESCRIPTION: Final = """\
Run the whole chain on this host: exporter, Prometheus, Alertmanager and remediator, on loopback, in one data directory.

It is a dry run until it is armed: everything is recorded, nothing is done. Ctrl-C or SIGTERM stops all of it; the
next start goes on where this one stopped. A part that ends by itself is started again.
"""
_EPILOG: Final = """\
Prometheus and Alertmanager must be installed (Debian: apt-get install prometheus prometheus-alertmanager), or
--fetch-parts gives leave to unpack them below the data directory. Debian's packages also start services of their own on
the same ports: systemctl disable --now prometheus prometheus-alertmanager.

in the data directory:
  ledger/ queue/ prometheus/ alertmanager/   what is remembered; copy these for a backup, while it is stopped
  log/PART.log, .1 to .3                     what each part says, as JSON lines; 10 MiB each
  token (0600)                               what Alertmanager shows the remediator

then, in another terminal: `gpuwarden ledger list`, `gpuwarden job list`, with the addresses that `up` prints.
To run the parts under systemd instead, beside a Prometheus of your own: gpuwarden init --help
"""


class _Stopped(BaseException):
    """A signal came while the parts were being started."""


class _Stop:
    """What SIGTERM and SIGINT do: end the wait, or break off the start."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.starting = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._obey)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was told to stop, after `timeout_s` at most."""
        return self._event.wait(timeout_s)

    def _obey(self, _number: int, _frame: FrameType | None) -> None:
        first = not self._event.is_set()
        self._event.set()
        if first and self.starting:
            raise _Stopped


class _Voice:
    """Says what happens, to whoever started us and, with the time, in `log/up.log`; on a full disk it is not heard."""

    def __init__(self, data: Path) -> None:
        self.log = data / "log" / "up.log"

    def __call__(self, text: str) -> None:
        with suppress(OSError):
            print(f"up: {text}", flush=True)
        self.keep(text)

    def keep(self, text: str) -> None:
        """Write it down only."""
        entry = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": text}
        with suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def command(argv: list[str] | None = None) -> int:
    """`gpuwarden up`."""
    arguments = _parser().parse_args(argv)
    stop = _Stop()
    voice = _Voice(arguments.data)
    try:
        with data_dir.taken(arguments.data, say=voice):
            try:
                _run(arguments, stop, voice)
            except (debian_packages.PartMissing, ChainError, GpuwardenError, OSError) as error:
                voice.keep(str(error))
                raise
    except (debian_packages.PartMissing, ChainError, GpuwardenError, OSError) as error:
        print(f"up: {error}", file=sys.stderr)
        return 1
    except _Stopped:
        voice("stopped before it was ready")
    return 0


def _run(arguments: argparse.Namespace, stop: _Stop, voice: _Voice) -> None:
    engine = reachable_engine(os.environ) if arguments.docker == "auto" else _told(arguments.docker)
    plan = _plan(arguments, engine)
    _find_parts(plan)
    with Chain(plan) as chain:
        stop.starting = False
        _announce(chain, engine, voice)
        _watch(chain, stop, voice, look_for_docker=arguments.docker == "auto")
        voice("stopping")


def _watch(chain: Chain, stop: _Stop, voice: _Voice, *, look_for_docker: bool) -> None:
    """Keep the parts running until told to stop."""
    supervisor = Supervisor(chain, say=voice)
    housekeeping_s = time.monotonic()
    while not stop.wait(CHECK_S):
        now_s = time.monotonic()
        supervisor.look(now_s)
        if now_s - housekeeping_s < HOUSEKEEPING_S:
            continue
        housekeeping_s = now_s
        for log in (voice.log, *map(chain.log_file, PARTS)):
            with suppress(OSError):  # no room for a copy: there may be some next time
                rotate(log)
        if look_for_docker and chain.plan.docker is None:
            _take_up_docker(chain, voice)


def _take_up_docker(chain: Chain, voice: _Voice) -> None:
    """Have the parts that use Docker use an engine that was started after us."""
    engine = reachable_engine(os.environ)
    if isinstance(engine, Engine):
        voice(f"Docker {engine.version} answers now: exporter and execute are started again to use it")
        chain.plan = replace(chain.plan, docker=engine.base_url)
        for name in ("execute", "exporter"):
            chain.stop(name)
        for name in ("exporter", "execute"):
            chain.start(name)


def _plan(arguments: argparse.Namespace, engine: Engine | NoEngine) -> Plan:
    data: Path = arguments.data.resolve()
    directory: Path = (arguments.dir or data_dir.default_directory(arguments.data)).resolve()
    return Plan(
        work=data,
        directory=directory,
        host=data_dir.host_of(data, directory, arguments.host),
        docker=engine.base_url if isinstance(engine, Engine) else None,
        simulate_gpu=arguments.simulate_gpu and arguments.simulate_gpu.resolve(),
        podman=None if arguments.podman == "none" else arguments.podman,
        processes=arguments.processes and arguments.processes.resolve(),
        systemd_units=tuple(arguments.systemd_unit),
        watchdog_url=arguments.watchdog_url,
        execute={"free_bound_s": arguments.free_bound_s},
        armed=arguments.armed,
        metrics_days=arguments.metrics_days,
        parts_dir=data / "parts" if package_data.CHECKOUT is None else debian_packages.PARTS_DIR,
        fetch=arguments.fetch_parts,
        ports={part: getattr(arguments, f"{part}_port") for part in PORTS},
    )


def _find_parts(plan: Plan) -> None:
    """Raise PartMissing, with all that is missing at once, where a program cannot be had."""
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
            else f"\n  or start with --fetch-parts: they are unpacked from Debian's packages into {plan.parts_dir}; "
            "nothing is installed"
        )
        raise debian_packages.PartMissing("\n  ".join(missing) + advice)


def _announce(chain: Chain, engine: Engine | NoEngine, voice: _Voice) -> None:
    plan = chain.plan
    where = f"Docker {engine.version}" if isinstance(engine, Engine) else f"no Docker engine: {engine.because}"
    voice(f"host {plan.host}, {where}; {_mode(plan)}")
    if isinstance(engine, Engine) and os.geteuid() != 0:
        voice("not root: the I/O of other users' containers is unknown, and their loads are never judged")
    if plan.podman is not None:
        voice(f"Podman        {plan.podman}")
    if plan.systemd_units:
        voice(f"services      {', '.join(plan.systemd_units)}")
    if plan.simulate_gpu is None:
        voice(
            "GPUs          the NVIDIA driver's, AMD's and Intel's from the kernel; with none, nothing can be confirmed"
        )
    for name, text in (
        ("prometheus", chain.prometheus_url),
        ("alertmanager", chain.alertmanager_url),
        ("exporter", f"{chain.exporter_url}/metrics"),
        ("remediator", f"{chain.remediator_url}/metrics"),
        ("workers", f"GPUWARDEN_DIR={chain.directory} GPUWARDEN_STORE={chain.queue_url}"),
        ("ledger", f"gpuwarden ledger --ledger {chain.ledger_url} list"),
        ("data, logs", f"{plan.work}, {plan.work / 'log'}"),
    ):
        voice(f"{name:13} {text}")
    voice("ready; Ctrl-C stops all of it")


def _mode(plan: Plan) -> str:
    if plan.armed:
        return "armed, unless somebody disarmed it"
    return "a dry run, unless somebody armed it: nothing is done, all is recorded"


def _told(docker: str) -> Engine | NoEngine:
    if docker == "none":
        return NoEngine(because="--docker none")
    return Engine(base_url=docker, private=False, version=f"at {docker}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden up",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = data_dir.default_data(os.environ, euid=os.geteuid())
    parser.add_argument("--data", type=Path, default=data, help="where everything is kept (default: %(default)s)")
    parser.add_argument(
        "--dir",
        type=Path,
        help=f"$GPUWARDEN_DIR, where workers write their state (default: {data_dir.SYSTEM_DIRECTORY} with the data "
        f"directory {data_dir.SYSTEM_DATA}, else DATA/run)",
    )
    parser.add_argument("--host", help="this host's key (default: the one from last time, else this machine's name)")
    parser.add_argument(
        "--armed", action="store_true", help="passed to `gpuwarden remediator execute`, whose help says more"
    )
    parser.add_argument(
        "--docker",
        default="auto",
        help="the Docker engine's socket, unix:///path; 'none'; 'auto': $DOCKER_HOST or the system's, also one that is "
        "started later (default: %(default)s)",
    )
    parser.add_argument(
        "--podman",
        default="none",
        help="Podman's socket, such as unix:///run/podman/podman.sock, or 'none' (default: %(default)s)",
    )
    add_units(parser)
    add_watchdog(parser)
    parser.add_argument(
        "--free-bound-s",
        type=_free_bound_s,
        default=FREE_BOUND_S,
        help="after this long without progress a free is given up and a person told, seconds; more for a service that "
        "takes longer to come up (default: %(default)g)",
    )
    parser.add_argument("--processes", type=Path, help="TOML file of supervised workers that run in no container")
    parser.add_argument("--simulate-gpu", type=Path, help="read GPUs from this file (docs/simulated-gpu.md)")
    parser.add_argument(
        "--fetch-parts",
        action="store_true",
        default=package_data.CHECKOUT is not None,
        help="unpack Debian's packages of what is not installed; nothing is installed (always so from a checkout)",
    )
    parser.add_argument(
        "--metrics-days",
        type=int,
        default=15,
        help="Prometheus keeps this many days, 2 GiB at most (default: %(default)s)",
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
        f"{given!r} is no such time: wanted are {SETTLE_BOUND_S:g} to {FREE_BOUND_MAX_S} seconds"
    )


if __name__ == "__main__":
    sys.exit(command())
