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
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from bench import chain, corpus, exporter, queue, remediator, rules, scrape, step, webhook
from bench.chaos import measure as chaos
from bench.exporter import soak, turns
from bench.figures import BenchError, Figure, Place, progress, say, table
from deploy.standalone.debian_packages import PartMissing
from deploy.standalone.stack import CHECKOUT, ChainError
from gpuwarden import logs
from gpuwarden.errors import GpuwardenError

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
EPILOG: Final = """\
host   the exporter on 8 GPUs, 64 containers and 256 processes (root makes their cgroups)
peers  the same host: the exporter in turns with nvitop-exporter, node-exporter and process-exporter, 16 minutes
soak   the same host while containers come and go: does anything grow in --scrapes scrapes?
chaos  workers, sweeper, connections and PostgreSQL that die at random, two minutes
"""


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when something did not work at all, and never because it was slow.

    What does not work ends its own part, and the others go on.
    """
    # What the rules are worth stands first: it needs no root and no machine at rest, and nothing before it can end it.
    parts: Mapping[str, Callable[[list[Place]], Iterable[Figure]]] = {
        "corpus": lambda _: corpus.measure(),
        "step": step.measure,
        "exporter": lambda places: scrape.measure(places[0]),
        "host": lambda places: exporter.measure(places[0]),
        "peers": lambda places: turns.measure(places[0]),
        "webhook": webhook.measure,
        "remediator": remediator.measure,
        "queue": queue.measure,
        "rules": lambda places: rules.measure(places[0]),
        "chain": lambda places: chain.measure(places[0], rounds=arguments.rounds),
        "constants": lambda places: chain.measure_delivered(places[0]),
        "chaos": lambda places: chaos.measure(places[0]),
        "soak": lambda places: soak.measure(places[0], scrapes=arguments.scrapes),
    }
    unless_asked = ",".join(name for name in parts if name not in ("chaos", "soak"))
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PARTS", default=unless_asked, help="of %(default)s; and chaos, soak")
    parser.add_argument("--rounds", type=int, default=20, help="wedges played through the chain (default: %(default)s)")
    parser.add_argument("--scrapes", type=int, default=soak.SCRAPES, help="scrapes of the soak (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"no part is called {unknown[0]!r}: there are {', '.join(parts)}")
    if arguments.rounds < 1:
        parser.error(f"{arguments.rounds} rounds will not do: 1 or more")
    if arguments.scrapes < 1:
        parser.error(f"{arguments.scrapes} scrapes will not do: 1 or more")
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
                    figures.append(each)  # noqa: PERF402 - by itself: what a part measured before it fails is told, too
            except (BenchError, ChainError, PartMissing, GpuwardenError, httpx.HTTPError) as error:
                progress(f"{name}: cannot go on: {error}")
                failed.append(name)
    except KeyboardInterrupt:
        return 130
    finally:
        for place in places:
            shutil.rmtree(place.folder, ignore_errors=True)
        if figures:
            say(", ".join(f"{name}: {value}" for name, value in conditions.items()))
            say(table(figures))
    if arguments.json is not None:
        found = {"conditions": conditions, "figures": [asdict(each) for each in figures]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if failed:
        progress(f"not measured to its end: {', '.join(failed)}")
    return int(bool(failed))


def _places() -> list[Place]:
    """The disk of this checkout first, then memory where there is such a folder."""
    disk = CHECKOUT / ".work"
    disk.mkdir(exist_ok=True)
    places = [Place(name="disk", folder=Path(tempfile.mkdtemp(prefix="bench-", dir=disk)))]
    if MEMORY.is_dir():
        places.append(Place(name="tmpfs", folder=Path(tempfile.mkdtemp(prefix="gpuwarden-bench-", dir=MEMORY))))
    return places


def _conditions() -> dict[str, str]:
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
