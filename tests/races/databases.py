"""Real databases of the ledger and the queue, created once and emptied for each example."""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg
from sqlalchemy import Engine, event

from gpuwarden.db.migrate import Schema, open_database
from gpuwarden.queue.schema import QUEUE
from remediator.ledger.schema import LEDGER
from testbed.postgres import Postgres

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - tempfile creates the folder in it


@dataclass(frozen=True, kw_only=True)
class Databases:
    """Two databases, and for each a connection of the judge, which commits nothing."""

    ledger: Engine
    queue: Engine
    see_ledger: Any
    see_queue: Any

    def empty(self) -> None:
        """Delete every row."""
        for schema, see in ((LEDGER, self.see_ledger), (QUEUE, self.see_queue)):
            for table in reversed(schema.tables.sorted_tables):
                see.execute(f"DELETE FROM {table.name}")  # noqa: S608 - names of the schema


@contextmanager
def sqlite() -> Iterator[Databases]:
    """Two SQLite files, in memory if the system has `/dev/shm`. They are not synced."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with ExitStack() as stack:
            engines: list[Engine] = []
            sees: list[Any] = []
            for schema in (LEDGER, QUEUE):
                file = folder / f"{schema.name}.db"
                engine = _open(f"sqlite:///{file}", schema, stack)
                event.listen(engine, "connect", _disable_sync)
                engine.dispose()  # older connections lack the listener
                engines.append(engine)
                # The judge checks commits in the thread that makes them, and a webhook has its own thread.
                see = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
                sees.append(stack.enter_context(closing(see)))
            yield Databases(ledger=engines[0], queue=engines[1], see_ledger=sees[0], see_queue=sees[1])
    finally:
        shutil.rmtree(folder)


@contextmanager
def postgresql(server: Postgres) -> Iterator[Databases]:
    """Two databases of a PostgreSQL server, which are dropped afterwards."""
    with ExitStack() as stack:
        engines: list[Engine] = []
        sees: list[Any] = []
        for schema in (LEDGER, QUEUE):
            server.create(name := f"{schema.name}_{uuid4().hex}")
            stack.callback(server.drop, name)
            engines.append(_open(url := server.url(name), schema, stack))
            bare = url.replace("postgresql+psycopg:", "postgresql:")
            sees.append(stack.enter_context(psycopg.connect(bare, autocommit=True)))
        yield Databases(ledger=engines[0], queue=engines[1], see_ledger=sees[0], see_queue=sees[1])


def _open(url: str, schema: Schema, stack: ExitStack) -> Engine:
    engine = open_database(url, schema)
    stack.callback(engine.dispose)
    return engine


def _disable_sync(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")
