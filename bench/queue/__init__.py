"""The queue: jobs per second, claims from a deep queue, wake-up of an idle worker.

On PostgreSQL, procrastinate and pgqueuer are measured too, each with the driver and calls of its worker.
All use one server that syncs every commit.
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
    """Measure SQLite in every place, then PostgreSQL in the first."""
    for place in places:
        yield from sqlite.measure(place)
    disk = places[0]
    yield from depth.measure_sqlite(disk.folder, disk.name)
    yield from wake.measure({Ours: f"sqlite:///{disk.folder}/wake.db"}, f"SQLite, {disk.name}")
    with postgres(disk.folder) as server:
        if isinstance(server, NoPostgres):
            progress(f"queue on PostgreSQL skipped: {server.reason}")
            return
        workers: list[type[Worker]] = [Ours, *_import_peers()]
        databases = {worker: _create_database(server, worker) for worker in workers}
        yield from rates.measure(databases)
        yield from depth.measure(databases)
        for worker, url in databases.items():
            worker.refill(url, 1)
        yield from wake.measure(databases, "PostgreSQL")


def _import_peers() -> Iterator[type[Worker]]:
    for name, worker in PEERS.items():
        try:
            module = importlib.import_module(f"bench.queue.peer_{name}")
        except ModuleNotFoundError as missing:
            progress(f"{name} skipped, {missing.name} is not installed: pip install -e '.[bench]'")
        else:
            yield getattr(module, worker)


def _create_database(server: Postgres, worker: type[Worker]) -> str:
    """Create a database with the tables of a queue; return its URL."""
    name = worker.__name__.lower()
    server.create(name)
    url = server.url(name)
    with psycopg.connect(libpq(url)) as connection:
        for setting in DURABLE:
            row = connection.execute("SELECT current_setting(%s)", (setting,)).fetchone()
            if row != ("on",):
                raise BenchError(f"PostgreSQL has {setting} {row}: set it to on, so that commits are synced")
    worker.install(url)
    return url
