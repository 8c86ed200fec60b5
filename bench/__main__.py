"""`python -m bench`: every measurement of one run, in one table."""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx

from bench import chain, corpus, exporter, gateway, queue, remediator, rules, run, scrape, step, webhook
from bench.chaos import measure as chaos
from bench.exporter import soak, turns
from bench.figures import BenchError, Figure, Place, print_text, progress, table
from bench.gateway import memory as gateway_memory
from deploy.standalone.debian_packages import PartMissing
from deploy.standalone.stack import CHECKOUT, ChainError
from gpuwarden import logs
from gpuwarden.errors import GpuwardenError

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - `mkdtemp` makes a private folder in it
EPILOG: Final = """\
host   The exporter on 8 GPUs, 64 containers and 256 processes. Needs root for cgroups.
peers  The same host, also with nvitop-exporter, node-exporter and process-exporter. 16 minutes.
soak   The same host while containers come and go: does anything grow in --scrapes scrapes?
chaos  The queue while workers, sweeper, connections and PostgreSQL die at random. Two minutes.
"""


def main(argv: list[str] | None = None) -> int:
    """Measure and print. A part that fails does not stop the others, but the exit code is 1."""
    # The corpus first: it runs without root and on a busy machine.
    parts: Mapping[str, Callable[[list[Place]], Iterable[Figure]]] = {
        "corpus": lambda _: corpus.measure(),
        "step": step.measure,
        "run": lambda places: run.measure(places[0]),
        "exporter": lambda places: scrape.measure(places[0]),
        "host": lambda places: exporter.measure(places[0]),
        "peers": lambda places: turns.measure(places[0]),
        "webhook": webhook.measure,
        "remediator": remediator.measure,
        "queue": queue.measure,
        "gateway": lambda places: gateway.measure(places[0]),
        "gateway-memory": lambda places: gateway_memory.measure(places[0]),
        "rules": lambda places: rules.measure(places[0]),
        "chain": lambda places: chain.measure(places[0], rounds=arguments.rounds),
        "constants": lambda places: chain.measure_delivered(places[0]),
        "chaos": lambda places: chaos.measure(places[0]),
        "soak": lambda places: soak.measure(places[0], scrapes=arguments.scrapes),
    }
    default = ",".join(name for name in parts if name not in ("chaos", "soak"))
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", default=default, help="any of %(default)s; and chaos, soak")
    parser.add_argument("--rounds", type=int, default=20, help="stalls to play in `chain` (default: %(default)s)")
    parser.add_argument("--scrapes", type=int, default=soak.SCRAPES, help="scrapes of `soak` (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"invalid part {unknown[0]!r}: choose from {', '.join(parts)}")
    if arguments.rounds < 1:
        parser.error(f"invalid --rounds {arguments.rounds}: use 1 or more")
    if arguments.scrapes < 1:
        parser.error(f"invalid --scrapes {arguments.scrapes}: use 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs.configure(level="error")
    conditions = _conditions()
    places = _places()
    figures: list[Figure] = []
    failed: list[str] = []
    try:
        for name in chosen:
            try:
                for each in parts[name](places):
                    figures.append(each)  # noqa: PERF402 - one by one, to keep those before a failure
            except (BenchError, ChainError, PartMissing, GpuwardenError, httpx.HTTPError) as error:
                progress(f"{name} failed: {error}")
                failed.append(name)
    except KeyboardInterrupt:
        return 130
    finally:
        for place in places:
            shutil.rmtree(place.folder, ignore_errors=True)
        if figures:
            print_text(", ".join(f"{name}: {value}" for name, value in conditions.items()))
            print_text(table(figures))
    if arguments.json is not None:
        found = {"conditions": conditions, "figures": [asdict(each) for each in figures]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if failed:
        progress(f"incomplete: {', '.join(failed)}")
    return int(bool(failed))


def _places() -> list[Place]:
    """The disk of this checkout, then memory if mounted."""
    disk = CHECKOUT / ".work"
    disk.mkdir(exist_ok=True)
    places = [Place(name="disk", folder=Path(tempfile.mkdtemp(prefix="bench-", dir=disk)))]
    if MEMORY.is_dir():
        places.append(Place(name="tmpfs", folder=Path(tempfile.mkdtemp(prefix="gpuwarden-bench-", dir=MEMORY))))
    return places


def _conditions() -> dict[str, str]:
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "CPU": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    """Model of the first CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
