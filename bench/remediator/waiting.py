"""What open episodes that wait for a person cost the executor, and how long a new hang waits behind them.

The real `gpuwarden remediator execute` runs in dry run. Its exporter is a stand-in, whose workers have all stalled.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sqlalchemy import func, select

from bench.cost import cpu_s
from bench.figures import BenchError, Figure, figure, progress, wait_until
from bench.webhook import ALERT
from deploy.standalone.stack import Chain, Plan
from gpuwarden.db.transactions import reading
from remediator import payload as payloads
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import EPISODES, JOURNAL

HOST: Final = "bench"
BATCH: Final = 100
SETTLE_S: Final = 600.0
DECIDED_S: Final = 120.0
# One process is all workers: it holds the lock of each.
_HOLDER: Final = """
import fcntl, pathlib, resource, signal, sys
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
hard = max(count + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, hard))
folder.mkdir()
files = [(folder / f"worker-{each:04}.lock").open("w") for each in range(count)]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
signal.pause()
"""


def measure(work: Path, name: str, database: str | None, *, waiting: int, hangs: int, for_s: float) -> Iterator[Figure]:
    """Measure `waiting` open episodes, then `hangs` new ones, one at a time."""
    progress(f"remediator, {waiting} episodes wait for a person, {name}")
    with _running(work, database, count=waiting + hangs) as chain, closing(Ledger.open(chain.ledger_url)) as ledger:
        for first in range(0, waiting, BATCH):
            _accept(ledger, range(first, min(first + BATCH, waiting)))
        wait_until(lambda: _count_waiting(ledger) == waiting, within_s=SETTLE_S, what=f"{waiting} episodes wait")
        pid, what = chain.pid("execute"), f"{waiting} episodes wait for a person, {name}"
        before_s, began_s = cpu_s(pid), time.monotonic()
        time.sleep(for_s)
        used = (cpu_s(pid) - before_s) / (time.monotonic() - began_s)
        yield figure("remediator", f"{what}: CPU of execute", "% of a core", [100 * used])
        took_s = [_decide(ledger, number) for number in range(waiting, waiting + hangs)]
        yield figure("remediator", f"{what}: a new hang is decided", "s", took_s)


@contextmanager
def _running(work: Path, database: str | None, *, count: int) -> Iterator[Chain]:
    work.mkdir(parents=True)
    with ExitStack() as stack:
        chain = Chain(Plan(work=work, host=HOST, docker=None, simulate_gpu=None, database=database))
        stack.callback(chain.http.close)
        locks = [sys.executable, "-c", _HOLDER, str(chain.directory / "all"), str(count)]
        body = stack.enter_context(_process(locks))
        if not (body.stdout and body.stdout.readline()):
            raise BenchError("the process of the workers did not start")
        port = urlsplit(chain.exporter_url).port
        command = [sys.executable, "-m", "bench.remediator.stand_in", str(port), str(body.pid), str(count)]
        exporter = stack.enter_context(_process(command))
        if not (exporter.stdout and exporter.stdout.readline()):
            raise BenchError("the stand-in of the exporter did not start")
        chain.start_executor()
        stack.callback(chain.stop, "execute")
        wait_until(lambda: _beats(chain), within_s=30, what="the executor writes its heartbeat")
        yield chain


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _beats(chain: Chain) -> bool:
    chain.check()
    with closing(Ledger.open(chain.ledger_url)) as ledger:
        return bool(ledger.executors.list_all())


def _accept(ledger: Ledger, numbers: range) -> None:
    found, _ = payloads.parse({"alerts": [json.loads(ALERT % {"n": each}) for each in numbers]})
    ledger.inbox.accept(found, [], now=ledger.now())


def _count_waiting(ledger: Ledger) -> int:
    with reading(ledger._engine) as connection:  # noqa: SLF001 - a cheap count
        return connection.scalar(select(func.count()).where(EPISODES.c.wait_reason == "dry_run")) or 0


def _decide(ledger: Ledger, number: int) -> float:
    """Accept the alert of one more hang. Returns the seconds until the executor has recorded its decision."""
    began = ledger.now()
    _accept(ledger, range(number, number + 1))
    at = select(JOURNAL.c.at).join(EPISODES, EPISODES.c.episode_id == JOURNAL.c.episode_id)
    at = at.where(EPISODES.c.worker == f"worker-{number:04}", JOURNAL.c.act == "would")
    decided: list[float] = []

    def is_decided() -> bool:
        with reading(ledger._engine) as connection:  # noqa: SLF001 - a cheap look
            decided.extend(connection.scalars(at))
        return bool(decided)

    wait_until(is_decided, within_s=DECIDED_S, what=f"the hang of worker {number} is decided")
    time.sleep(1)  # let the executor rest
    return decided[0] - began
