"""The remediator under load: webhook calls at a constant rate and in a burst, and many hosts that fail at once.

What open episodes that wait for a person cost the executor, and how long a new hang waits behind them.

`gpuwarden remediator serve` stores every alert as a row. Debian's `webhook`, which runs a script per call and stores
nothing, is measured in the same run for comparison.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from bench.figures import BenchError, Figure, Place, figure, progress, time_calls_ms, wait_until
from bench.remediator import peer, storm, waiting
from bench.remediator.openloop import Answered, at_rate, flat_out, request
from bench.webhook import ALERT
from deploy.standalone.stack import Chain, Plan
from remediator.ledger.ledger import Ledger
from testbed.postgres import Postgres, postgres

HOST: Final = "bench"
SYNCS: Final = 200


@dataclass(frozen=True, kw_only=True)
class Load:
    """Rounds, calls per second, durations, alerts per call, connections, hosts, episodes that wait, new hangs."""

    rounds: int = 3
    rate: float = 200.0
    steady_s: float = 10.0
    flat_out: int = 1500
    connections: int = 8
    burst_rate: float = 40.0
    burst_s: float = 30.0
    burst_alerts: int = 50
    hosts: int = 1500
    waiting: int = 1000
    waiting_s: float = 20.0
    hangs: int = 10


@dataclass(frozen=True, kw_only=True)
class Server:
    """A webhook, its expected HTTP status, and for ours the processes with the ledger."""

    name: str
    port: int
    path: str
    token: str
    wanted: int
    chain: Chain | None = None

    def requests(self, count: int, *, alerts: int = 1) -> list[bytes]:
        """Make calls with distinct alerts."""
        make = partial(request, self.port, self.path, token=self.token)
        return [make(body=_body(each * alerts, alerts)) for each in range(count)]


def measure(places: list[Place], load: Load = Load()) -> Iterator[Figure]:
    """Measure SQLite and PostgreSQL on disk, Debian's webhook in turns, then the executor."""
    disk = places[0]
    yield figure("remediator", f"the disk's own sync of 4 KiB, {disk.name}", "ms", _sync_times(disk.folder))
    with ExitStack() as stack:
        servers = [stack.enter_context(_ours(disk.folder / "sqlite", "SQLite", None))]
        found = stack.enter_context(postgres(disk.folder / "server"))
        if isinstance(found, Postgres):
            found.create("ledger")
            servers.append(stack.enter_context(_ours(disk.folder / "pg", "PostgreSQL", found.url("ledger"))))
        else:
            progress(f"PostgreSQL skipped: {found.reason}")
        ours = list(servers)
        theirs = stack.enter_context(peer.running(disk.folder))
        if isinstance(theirs, int):
            servers.append(Server(name="webhook", port=theirs, path=peer.PATH, token="", wanted=200))
        else:
            progress(f"Debian's webhook skipped: {theirs}")
        yield from _measure_rates(servers, load)
        for each in ours:
            yield from _measure_burst(each, load)
        if isinstance(found, Postgres):
            found.create("storm")
            with _ours(disk.folder / "storm", "PostgreSQL", found.url("storm")) as server:
                yield from storm.measure(_chain(server), partial(_send, server), hosts=load.hosts)
        databases: dict[str, str | None] = {"SQLite": None}
        if isinstance(found, Postgres):
            found.create("waiting")
            databases["PostgreSQL"] = found.url("waiting")
        for name, database in databases.items():
            work = disk.folder / f"waiting-{name}"
            yield from waiting.measure(
                work, name, database, waiting=load.waiting, hangs=load.hangs, for_s=load.waiting_s
            )


def _measure_rates(servers: list[Server], load: Load) -> Iterator[Figure]:
    """One alert per call, at a constant rate and as fast as possible."""
    steady: dict[str, list[Answered]] = {each.name: [] for each in servers}
    fast: dict[str, list[Answered]] = {each.name: [] for each in servers}
    for number in range(load.rounds):
        for each in servers[number % len(servers) :] + servers[: number % len(servers)]:
            progress(f"remediator, {each.name}, round {number + 1} of {load.rounds}")
            calls = each.requests(round(load.rate * load.steady_s))
            steady[each.name].append(at_rate(each.port, calls, rate=load.rate, wanted=each.wanted))
            calls = each.requests(load.flat_out)
            fast[each.name].append(flat_out(each.port, calls, connections=load.connections, wanted=each.wanted))
    last = servers[-1].name
    for each in servers:
        its, base = steady[each.name], None if each.name == last else _median_of(steady[last])
        what = f"1 alert, {load.rate:g} calls a second, {each.name}"
        yield figure("remediator", what, "ms", _latencies(its), base=base, against=last)
        p99s = [p99 for answered in its if (p99 := figure("", "", "", answered.latencies_ms).p99) is not None]
        if p99s:
            yield figure("remediator", f"{what}: p99 of each round", "ms", p99s)
        yield figure("remediator", f"{what}: calls sent late", "", [float(sum(a.late for a in its))])
    for each in servers:
        rates = [answered.rate for answered in fast[each.name]]
        base = None if each.name == last else statistics.median(answered.rate for answered in fast[last])
        what = f"1 alert, {load.connections} at a time, {each.name}"
        yield figure("remediator", what, "calls/s", rates, base=base, against=last)
        base = None if each.name == last else _median_of(fast[last])
        yield figure("remediator", f"{what}: latency", "ms", _latencies(fast[each.name]), base=base, against=last)


def _measure_burst(server: Server, load: Load) -> Iterator[Figure]:
    """Many alerts per call; none may be lost."""
    chain, count = _chain(server), round(load.burst_rate * load.burst_s)
    what = f"burst of {load.burst_rate * load.burst_alerts:g} alerts a second, {load.burst_alerts} a call"
    progress(f"remediator, {server.name}, {what}")
    before = _accepted(chain)
    calls = server.requests(count, alerts=load.burst_alerts)
    answered = at_rate(server.port, calls, rate=load.burst_rate, wanted=server.wanted)
    lost = count * load.burst_alerts - (_accepted(chain) - before)
    yield figure("remediator", f"{what}, {server.name}", "ms", answered.latencies_ms)
    yield figure("remediator", f"{what}, {server.name}: calls sent late", "", [float(answered.late)])
    yield figure("remediator", f"{what}, {server.name}: alerts lost of {count * load.burst_alerts}", "", [float(lost)])
    peak = storm.peak_mib(chain.pid("serve"))
    yield figure("remediator", f"{what}, {server.name}: peak memory of serve", "MiB", [peak])


def _latencies(found: Sequence[Answered]) -> list[float]:
    return [each for answered in found for each in answered.latencies_ms]


def _median_of(found: Sequence[Answered]) -> float:
    return statistics.median(_latencies(found))


@contextmanager
def _ours(work: Path, name: str, database: str | None) -> Iterator[Server]:
    chain = Chain(Plan(work=work, host=HOST, docker=None, simulate_gpu=None, database=database))
    try:
        chain.start_serve()
        wait_until(lambda: _is_ready(chain), within_s=30, what=f"the webhook answers, {name}")
        port, token = urlsplit(chain.remediator_url).port, chain.token_file.read_text(encoding="ascii")
        yield Server(name=f"ours, {name}", port=port or 0, path="/api/v1/alerts", token=token, wanted=202, chain=chain)
    finally:
        chain.stop("serve")
        chain.http.close()


def _chain(server: Server) -> Chain:
    if server.chain is None:
        raise BenchError(f"{server.name} has no ledger")
    return server.chain


def _send(server: Server, bodies: Sequence[bytes]) -> Answered:
    calls = [request(server.port, server.path, body, token=server.token) for body in bodies]
    return flat_out(server.port, calls, connections=4, wanted=server.wanted)


def _accepted(chain: Chain) -> int:
    with closing(Ledger.open(chain.ledger_url, host=HOST)) as ledger:
        return ledger.reports.totals(HOST).alerts.get(("accepted", ""), 0)


def _is_ready(chain: Chain) -> bool:
    chain.check()
    with suppress(httpx.HTTPError):
        return chain.http.get(f"{chain.remediator_url}/-/ready").is_success
    return False


def _body(first: int, count: int) -> bytes:
    alerts = ",".join(ALERT % {"n": each} for each in range(first, first + count))
    return f'{{"version": "4", "status": "firing", "alerts": [{alerts}]}}'.encode()


def _sync_times(folder: Path) -> list[float]:
    """Append and sync, as a commit does."""
    with (folder / "syncs").open("wb", buffering=0) as file:

        def sync() -> None:
            file.write(bytes(4096))
            os.fdatasync(file.fileno())

        return time_calls_ms(sync, count=SYNCS)
