"""What is measured side by side: one worker of a queue, ours or a peer's, driven by the calls its own worker makes.

Everything is a coroutine, because the peers are; ours never awaits, and pays nothing for it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, ClassVar, Final, Self

import psycopg

QUEUE_NAME: Final = "bench"


class Chore(StrEnum):
    """What a worker does over and over while it is timed."""

    COMPLETE = "claims and completes"
    GIVE_BACK = "given back and claimed again"
    FENCE = "fenced, requeued and claimed again"
    COMPLETE_AND_SEE = "claims, completes and worker rows"
    COMPLETE_TEN = "claims and completes, 10 at a time"


class Worker(ABC):
    """One worker, with connections of its own that it keeps. `held` is the job it has between two chores."""

    title: ClassVar[str]
    chores: ClassVar[tuple[Chore, ...]] = (Chore.COMPLETE, Chore.GIVE_BACK)

    def __init__(self) -> None:
        self.held: Any = None

    @staticmethod
    def run(main: Coroutine[Any, Any, None]) -> None:
        """Run a worker's coroutine as its library's own program does."""
        asyncio.run(main)

    @classmethod
    @abstractmethod
    def install(cls, url: str) -> None:
        """Make the queue's tables in an empty database."""

    @classmethod
    @abstractmethod
    def refill(cls, url: str, count: int) -> None:
        """Empty the queue and fill it with so many jobs at once, in the tables' own shape; then ANALYZE."""

    @classmethod
    @abstractmethod
    async def open(cls, url: str, name: str) -> Self:
        """Connect, and register where a worker of this queue does."""

    @abstractmethod
    async def submit(self) -> None:
        """Queue one job more; it is committed on return."""

    @abstractmethod
    async def claim(self) -> Any:
        """Take the next job; `None` when there is none."""

    @abstractmethod
    async def complete(self, job: Any) -> None:
        """Write that a job is done."""

    @abstractmethod
    async def give_back(self, job: Any) -> None:
        """Queue a job again that was claimed, to be claimed at once."""

    @abstractmethod
    async def listen(self) -> None:
        """Begin to be told of changes."""

    @abstractmethod
    async def wait(self) -> None:
        """Return once a change was told."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every connection."""

    async def do(self, chore: Chore) -> int:
        """Do a chore once; how many jobs that were, 0 when there was none to be had."""
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
    """SQLAlchemy's URL as everything else takes it."""
    return url.replace("postgresql+psycopg:", "postgresql:", 1)


def execute(url: str, *statements: str) -> None:
    """Run statements on PostgreSQL, each a transaction of its own.

    Without triggers: what they would do to bulk rows is done in bulk as well, and nobody listens.
    """
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        for statement in statements:
            connection.execute(statement)
