"""`make up`: the whole chain on this host from a checkout, on loopback, in dry run unless told to act, until Ctrl-C.

Everything it keeps lies in one data folder, so that a second start goes on where the first one stopped. Workers are the
user's own: see docs/running.md for what a container needs. GPUs come from the NVIDIA driver or a simulation file;
with neither they are unknown, and nothing is ever confirmed.
"""

import argparse
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from deploy import parts
from deploy.chain import CHECKOUT, LISTENERS, Chain, ChainError, Plan
from deploy.config import Pace
from deploy.engine import Engine, reachable_engine
from gpuwarden.errors import GpuwardenError
from gpuwarden.statefile import check_name

PORTS: Final = {"exporter": 9835, "remediator": 9836, "alertmanager": 9093, "prometheus": 9090}
CHECK_S: Final = 1.0


def main(argv: list[str] | None = None) -> int:
    """Run the chain; 0 when told to stop, 1 when it could not start or a part ended by itself."""
    arguments = _parser().parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _run(arguments, stop)
    except (parts.PartMissing, ChainError, GpuwardenError, OSError) as error:
        print(f"up: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace, stop: threading.Event) -> int:
    engine = reachable_engine(os.environ)
    plan = Plan(
        work=arguments.data.resolve(),
        host=_host(arguments),
        docker=engine.base_url if isinstance(engine, Engine) else None,
        simulate_gpu=arguments.simulate_gpu,
        armed=arguments.armed,
        pace=Pace(),
        ports={part: getattr(arguments, f"{part}_port") for part in LISTENERS},
    )
    with Chain(plan) as chain:
        where = f"Docker {engine.version}" if isinstance(engine, Engine) else f"no Docker engine: {engine.because}"
        print(
            f"up: host {plan.host}, {where}; {'ARMED' if plan.armed else 'dry run: nothing is done, all is recorded'}"
        )
        if plan.simulate_gpu is None:
            print("up: GPUs           the NVIDIA driver's; without its library none, and nothing can be confirmed")
        for part, address in (
            ("prometheus", chain.prometheus_url),
            ("alertmanager", chain.alertmanager_url),
            ("exporter", f"{chain.exporter_url}/metrics"),
            ("remediator", f"{chain.remediator_url}/metrics"),
        ):
            print(f"up: {part:13} {address}")
        print(f"up: workers       GPUWARDEN_DIR={chain.directory} GPUWARDEN_STORE={chain.queue_url}")
        print(f"up: ledger        gpuwarden ledger --ledger {chain.ledger_url} list")
        print("up: ready; Ctrl-C stops all of it", flush=True)
        while not stop.wait(CHECK_S):
            chain.check()
        print("up: stopping", flush=True)
    return 0


def _host(arguments: argparse.Namespace) -> str:
    """The key given, else the one from last time, else one made from this machine's name."""
    kept = arguments.data / "run" / "host"
    if arguments.host is None and kept.exists():
        return check_name(kept.read_text(encoding="utf-8").strip(), what="host")
    return check_name(arguments.host or socket.gethostname(), what="host")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make up", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=CHECKOUT / ".work" / "up", help="where everything is kept (default: %(default)s)"
    )
    parser.add_argument("--host", help="this host's key (default: the one from last time, else this machine's name)")
    parser.add_argument("--armed", action="store_true", help="act; without it everything is a dry run")
    parser.add_argument("--simulate-gpu", type=Path, help="read GPUs from this file (docs/simulated-gpu.md)")
    for part, port in PORTS.items():
        parser.add_argument(f"--{part}-port", type=int, default=port, help=f"{part}'s port (default: {port})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
