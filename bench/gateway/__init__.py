"""The gateway with 10,000 workers: 1,250 simulated hosts, two central gateways and PostgreSQL on this machine.

Half of the workers are idle, half run a job. Workers with direct access are measured in the same run.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psycopg

from bench.figures import BenchError, Figure, Place, figure, progress, wait_until
from bench.gateway.fleet import Fleet, fleet
from bench.gateway.program import READY_S, gateway
from bench.gateway.rows import IDLE_QUEUE, HostRow, fill
from bench.gateway.usage import Meter, Usage
from bench.queue.ours import COLUMNS
from bench.queue.worker import libpq
from deploy.standalone import ports
from gpuwarden.job import Condition
from gpuwarden.queue import JobStore
from gpuwarden.queue.schema import QUEUE
from testbed.postgres import NoPostgres, Postgres, postgres

SETTLE_S: Final = 12.0
"""Longer than an interval of heartbeats, seconds."""

WAITING_SHARE: Final = 0.95
"""Share of the hosts that wait for jobs before the measurement. The others repeat their request in this moment."""

PAUSE_S: Final = 4.0
"""Time for all that a change causes, seconds."""

LOST_EVERY_S: Final = 0.2

LATE_S: Final = 120.0
"""Longest time until jobs that came too fast are claimed, seconds."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Workers of a fleet. Times are seconds, rates per second. `hosts` have `workers` each."""

    hosts: int
    workers: int
    gateways: int
    """Central gateways. Without any, each worker has its own connections to the database."""
    spread_s: float = 60.0
    """Time in which the hosts begin."""
    rest_s: float = 60.0
    wakes: int = 20
    """Single submissions."""
    lost: int = 50
    """Jobs that are taken from their workers."""
    rates: tuple[float, ...] = (10.0, 30.0, 100.0)
    claims_s: float = 60.0
    """Time at each rate."""

    @property
    def title(self) -> str:
        """For the figures."""
        way = "" if self.gateways else ", direct access"
        return f"{self.hosts * self.workers:,} workers{way}"


FLEET: Final = Load(hosts=1250, workers=8, gateways=2)

DIRECT: Final = Load(hosts=5, workers=8, gateways=0, rates=(5.0,), lost=20)
"""As many workers as a PostgreSQL with its default settings takes. Jobs take `HOLD_S`, so they take few."""


def measure(place: Place, loads: Sequence[Load] = (FLEET, DIRECT)) -> Iterator[Figure]:
    """Measure the fleet behind gateways, then workers with direct access.

    Raises:
        BenchError: a job was not claimed once, or a request failed.
    """
    folder = place.folder / "gateway"
    folder.mkdir()
    with postgres(folder / "server") as server:
        if isinstance(server, NoPostgres):
            progress(f"gateway skipped: {server.reason}")
            return
        for load in loads:
            yield from _measure(server, folder, load)


def _measure(server: Postgres, folder: Path, load: Load) -> Iterator[Figure]:
    database = f"fleet_{load.gateways}"
    server.create(database)
    url = server.url(database)
    progress(f"gateway, {load.title}")
    rows = fill(url, hosts=load.hosts, workers=load.workers)
    with ExitStack() as stack:
        gateways = [stack.enter_context(_gateway(url, folder / f"central-{each}")) for each in range(load.gateways)]
        crowd = stack.enter_context(fleet(rows, [port for _, port in gateways] or [url], spread_s=load.spread_s))
        pids = {"gateways": [pid for pid, _ in gateways]} if gateways else {}
        pids |= {"simulated hosts": [crowd.pid], "submissions": [os.getpid()]}
        meter = Meter(url, server.url("postgres"), pids)
        stack.callback(meter.close)
        store = JobStore.open(url)
        stack.callback(store.close)
        submitter = stack.enter_context(psycopg.connect(libpq(url), autocommit=True))
        time.sleep(load.spread_s + SETTLE_S)
        wait_until(
            lambda: _waiting(gateways) >= (WAITING_SHARE * load.hosts if gateways else 0),
            within_s=READY_S,
            what="the hosts wait for jobs",
        )
        yield from _measure_rest(meter, crowd, load)
        yield from _measure_wakes(crowd, submitter, load)
        yield from _measure_lost(crowd, store, rows, load)
        for rate in load.rates:
            yield from _measure_claims(meter, crowd, submitter, load, rate)


def _measure_rest(meter: Meter, crowd: Fleet, load: Load) -> Iterator[Figure]:
    progress(f"gateway, {load.title} at rest, {load.rest_s:.0f} s")
    crowd.seen()
    with meter.measuring() as used:
        time.sleep(load.rest_s)
    seen, what = crowd.seen(), f"{load.title} at rest"
    yield from _usage(what, used)
    yield figure("gateway", f"{what}: heartbeats of workers", "a second", [seen.heartbeats / used.took_s])
    yield figure("gateway", f"{what}: repeated requests", "", [float(seen.repeated)])


def _measure_wakes(crowd: Fleet, submitter: psycopg.Connection, load: Load) -> Iterator[Figure]:
    progress(f"gateway, {load.wakes} single submissions")
    woken: list[float] = []
    started_ms: list[float] = []
    for _ in range(load.wakes):
        _submit(submitter)
        time.sleep(PAUSE_S)
        seen = crowd.seen()
        woken.append(float(seen.woken))
        started_ms += seen.started_ms
    yield figure("gateway", f"{load.title}: woken by one submission", "", woken)
    yield figure("gateway", f"{load.title}: from one submission to its claim", "ms", started_ms)


def _measure_lost(crowd: Fleet, store: JobStore, rows: Sequence[HostRow], load: Load) -> Iterator[Figure]:
    progress(f"gateway, {load.lost} jobs are taken from their workers")
    running = [slot for host in rows for slot in host.slots if slot.job_id is not None]
    taken_at: dict[int, float] = {}
    for slot in random.Random(0).sample(running, load.lost):  # noqa: S311 - no secret
        job_id = slot.job_id or 0
        if not store.fencing.fence(
            job_id, attempt=1, incarnation=slot.incarnation, condition=Condition.STALL, now=store.now()
        ):
            raise BenchError(f"{slot.worker} does not run job {job_id}")
        taken_at[job_id] = time.time()
        time.sleep(LOST_EVERY_S)
    time.sleep(PAUSE_S)
    lost_at = crowd.seen().lost_at
    if missed := taken_at.keys() - lost_at:
        raise BenchError(f"workers of {len(missed)} jobs did not learn in {PAUSE_S:.0f} s that they are lost")
    found = [(lost_at[job_id] - at) * 1000 for job_id, at in taken_at.items()]
    yield figure("gateway", f"{load.title}: until a worker knows that its job is lost", "ms", found)


def _measure_claims(
    meter: Meter, crowd: Fleet, submitter: psycopg.Connection, load: Load, rate: float
) -> Iterator[Figure]:
    what, jobs = f"{load.title}, {rate:g} jobs a second", round(rate * load.claims_s)
    progress(f"gateway, {what}, {load.claims_s:.0f} s")
    crowd.seen()
    with meter.measuring() as used:
        _submit_at_rate(submitter, rate, jobs)
    seen = crowd.seen()
    claims_ms, started_ms, repeated = [*seen.claims_ms], [*seen.started_ms], seen.repeated
    yield figure("gateway", f"{what}: submitted", "jobs/s", [jobs / used.took_s])
    yield figure("gateway", f"{what}: claimed meanwhile", "jobs/s", [len(claims_ms) / used.took_s])
    late_s = time.monotonic() + LATE_S
    while len(claims_ms) < jobs and time.monotonic() < late_s:
        time.sleep(PAUSE_S)
        seen = crowd.seen()
        claims_ms, started_ms, repeated = (
            claims_ms + seen.claims_ms,
            started_ms + seen.started_ms,
            repeated + seen.repeated,
        )
    yield figure("gateway", f"{what}: a claim", "ms", claims_ms)
    yield figure("gateway", f"{what}: from the submission to the claim", "ms", started_ms)
    yield figure("gateway", f"{what}: repeated requests", "", [float(repeated)])
    yield from _usage(what, used)
    if len(claims_ms) != jobs:
        raise BenchError(f"{len(claims_ms)} of {jobs} jobs were claimed")


def _usage(what: str, used: Usage) -> Iterator[Figure]:
    yield figure("gateway", f"{what}: connections to PostgreSQL", "", list(map(float, used.connections)))
    yield figure("gateway", f"{what}: transactions", "a second", [used.rate])
    for name in used.cpu_s:
        yield figure("gateway", f"{what}: CPU of {name}", "% of a core", [used.cpu_percent(name)])
    for name, resident in used.resident_mib.items():
        yield figure("gateway", f"{what}: memory (RSS) of {name}", "MiB", [resident])


def _submit_at_rate(submitter: psycopg.Connection, rate: float, jobs: int) -> None:
    """Submit jobs one by one; all that are due at once, where that is too slow."""
    began_s, submitted = time.monotonic(), 0
    while submitted < jobs:
        time.sleep(max(0.0, began_s + submitted / rate - time.monotonic()))
        due = min(jobs, int((time.monotonic() - began_s) * rate) + 1) - submitted
        _submit(submitter, max(1, due))
        submitted += max(1, due)


def _submit(submitter: psycopg.Connection, jobs: int = 1) -> None:
    """Copy the first job, and notify, as a submission does. It is cheap: the submitter is on another host."""
    values = COLUMNS.replace("queued_at", "extract(epoch FROM clock_timestamp())").replace(
        ", queue,", f", '{IDLE_QUEUE}',"
    )
    copy = f"INSERT INTO jobs ({COLUMNS}) SELECT {values} FROM jobs, generate_series(1, %s) WHERE job_id = 1"  # noqa: S608 - our own names
    submitter.execute(copy, (jobs,), prepare=True)
    submitter.execute("SELECT pg_notify(%s, '')", (QUEUE.channel,), prepare=True)


@contextmanager
def _gateway(url: str, log: Path) -> Iterator[tuple[int, int]]:
    """Run a central gateway; yields its pid and port."""
    (port,) = ports.free_ports(1)
    with gateway(["central", "--queue-db", url], log, port) as pid:
        yield pid, port


def _waiting(gateways: list[tuple[int, int]]) -> float:
    """How many waits the gateways hold."""
    found = 0.0
    for _, port in gateways:
        for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=READY_S).text.splitlines():
            if line.startswith("gpuwarden_gateway_waiting_workers "):
                found += float(line.split()[1])
    return found
