"""What the queue costs: transactions and connections of PostgreSQL, CPU time and memory of processes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Final

import psycopg

from bench.cost import cpu_s, resident_mib
from bench.queue.worker import libpq
from gpuwarden import procfs

SAMPLE_S: Final = 1.0


@dataclass(kw_only=True)
class Usage:
    """Use during a measurement. CPU by name of the processes."""

    took_s: float = 0.0
    transactions: int = 0
    connections: list[int] = field(default_factory=list)
    """One count per second."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    resident_mib: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Transactions a second."""
        return self.transactions / self.took_s

    def cpu_percent(self, name: str) -> float:
        """CPU of processes, % of a core."""
        return 100 * self.cpu_s[name] / self.took_s


class Meter:
    """Measures one database.

    Args:
        url: of the database.
        maintenance: another database of the server: a look must not count.
        pids: of the processes, by name.
    """

    def __init__(self, url: str, maintenance: str, pids: Mapping[str, list[int]]) -> None:
        self._name = url.rpartition("/")[2]
        self._connection = psycopg.connect(libpq(maintenance), autocommit=True)
        self._postmaster = int(procfs.stat(self._connection.info.backend_pid)[1])
        self._pids = dict(pids)

    @contextmanager
    def measuring(self) -> Iterator[Usage]:
        """Fills in a `Usage` at its end."""
        found, ended = Usage(), Event()
        sampling = Thread(target=self._sample, args=(found, ended))
        before, used_s, began_s = self._transactions(), self._cpu_s(), time.monotonic()
        sampling.start()
        try:
            yield found
        finally:
            ended.set()
            sampling.join()
        found.took_s = time.monotonic() - began_s
        found.cpu_s = {name: spent - used_s[name] for name, spent in self._cpu_s().items()}
        found.transactions = self._transactions() - before
        for name, pids in self._pids.items():
            found.resident_mib[name] = sum(resident_mib(pid) for pid in pids)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _sample(self, found: Usage, ended: Event) -> None:
        while True:
            row = self._connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", (self._name,)
            ).fetchone()
            found.connections.append(0 if row is None else row[0])
            if ended.wait(SAMPLE_S):
                return

    def _transactions(self) -> int:
        counted = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
        row = self._connection.execute(counted, (self._name,)).fetchone()
        return 0 if row is None else int(row[0])

    def _cpu_s(self) -> dict[str, float]:
        found = {name: sum(map(_used_s, pids)) for name, pids in self._pids.items()}
        server = [self._postmaster, *(each.pid for each in procfs.descendants(self._postmaster))]
        return found | {"PostgreSQL": sum(map(_used_s, server)) + _waited_cpu_s(self._postmaster)}


def _used_s(pid: int) -> float:
    """CPU time, or 0 of a process that has ended."""
    with suppress(OSError):
        return cpu_s(pid)
    return 0.0


def _waited_cpu_s(pid: int) -> float:
    """CPU of ended children."""
    fields = procfs.stat(pid)
    return (int(fields[13]) + int(fields[14])) / procfs.TICKS_PER_S
