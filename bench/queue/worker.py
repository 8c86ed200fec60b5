"""A worker of any queue, with the calls that its own worker makes.

The other queues need coroutines; ours never awaits.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, ClassVar, Final, Self

import psycopg

QUEUE_NAME: Final = "bench"


class Chore(StrEnum):
    """Work that a worker repeats while it is timed."""

    COMPLETE = "claims and completes"
    GIVE_BACK = "given back and claimed again"
    FENCE = "fenced, requeued and claimed again"
    NEXT = "completes with its row and the next claim"
    COMPLETE_TEN = "claims and completes, 10 at a time"


class Worker(ABC):
    """One worker with persistent connections. `held` is its job between two chores."""

    title: ClassVar[str]
    chores: ClassVar[tuple[Chore, ...]] = (Chore.COMPLETE, Chore.GIVE_BACK)

    def __init__(self) -> None:
        self.held: Any = None

    @staticmethod
    def run(main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine like the program of the library."""
        asyncio.run(main)

    @classmethod
    @abstractmethod
    def install(cls, url: str) -> None:
        """Create the tables in an empty database."""

    @classmethod
    @abstractmethod
    def refill(cls, url: str, count: int) -> None:
        """Replace all jobs by `count` new ones, then ANALYZE."""

    @classmethod
    @abstractmethod
    async def open(cls, url: str, name: str) -> Self:
        """Connect, and register if the queue does so."""

    @abstractmethod
    async def submit(self) -> None:
        """Submit and commit one job."""

    @abstractmethod
    async def claim(self) -> Any:
        """Claim the next job; `None` if the queue is empty."""

    @abstractmethod
    async def complete(self, job: Any) -> None:
        """Complete a job."""

    @abstractmethod
    async def give_back(self, job: Any) -> None:
        """Requeue a claimed job without delay."""

    @abstractmethod
    async def listen(self) -> None:
        """Subscribe to changes."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait for a change."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection."""

    async def do(self, chore: Chore) -> int:
        """Do a chore once; return the number of jobs, 0 if the queue is empty."""
        if chore is Chore.COMPLETE:
            job = await self.claim()
            if job is None:
                return 0
            await self.complete(job)
            return 1
        if chore is Chore.GIVE_BACK:
            if self.held is not None:
                await self.give_back(self.held)
            self.held = await self.claim()
            return 0 if self.held is None else 1
        raise NotImplementedError(chore)


def libpq(url: str) -> str:
    """Convert an SQLAlchemy URL for libpq."""
    return url.replace("postgresql+psycopg:", "postgresql:", 1)


def execute(url: str, *statements: str) -> None:
    """Run each statement in its own transaction on PostgreSQL, without triggers."""
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        for statement in statements:
            connection.execute(statement)
