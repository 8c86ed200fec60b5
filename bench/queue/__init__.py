"""The queue: jobs a second, claims from a deep queue, an idle worker woken; on SQLite, on PostgreSQL beside its peers.

Beside ours stand the two queues on PostgreSQL that ours has learned from, each by its own library and driver, with the
calls that its own worker makes for a job. All are on one server, whose commits are synced to disk for everyone.
"""

import importlib
from collections.abc import Iterator
from typing import Final

import psycopg

from bench.figures import BenchError, Figure, Place, progress
from bench.queue import depth, rates, sqlite, wake
from bench.queue.ours import Ours
from bench.queue.worker import Worker, libpq
from testbed.postgres import NoPostgres, Postgres, postgres

PEERS: Final = {"procrastinate": "Procrastinate", "pgqueuer": "Pgqueuer"}
DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")


def measure(places: list[Place]) -> Iterator[Figure]:
    """SQLite in every place, then PostgreSQL in the first."""
    for place in places:
        yield from sqlite.measure(place)
    disk = places[0]
    yield from depth.measure_sqlite(disk.folder, disk.name)
    yield from wake.measure({Ours: f"sqlite:///{disk.folder}/wake.db"}, f"SQLite, {disk.name}")
    with postgres(disk.folder) as server:
        if isinstance(server, NoPostgres):
            progress(f"queue on PostgreSQL is left out: {server.because}")
            return
        workers: list[type[Worker]] = [Ours, *_peers()]
        databases = {worker: _database(server, worker) for worker in workers}
        yield from rates.measure(databases)
        yield from depth.measure(databases)
        for worker, url in databases.items():
            worker.refill(url, 1)
        yield from wake.measure(databases, "PostgreSQL")


def _peers() -> Iterator[type[Worker]]:
    for name, worker in PEERS.items():
        try:
            module = importlib.import_module(f"bench.queue.peer_{name}")
        except ModuleNotFoundError as missing:
            progress(f"{name} is left out, for there is no {missing.name}: pip install -e '.[bench]'")
        else:
            yield getattr(module, worker)


def _database(server: Postgres, worker: type[Worker]) -> str:
    """A database with a queue's tables, in which every commit is synced; its URL."""
    name = worker.__name__.lower()
    server.create(name)
    url = server.url(name)
    with psycopg.connect(libpq(url)) as connection:
        for setting in DURABLE:
            row = connection.execute("SELECT current_setting(%s)", (setting,)).fetchone()
            if row != ("on",):
                raise BenchError(f"PostgreSQL's {setting} is {row}: queues are compared with every commit synced")
    worker.install(url)
    return url
