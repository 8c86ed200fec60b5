"""The process of the simulated hosts."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

from bench.figures import BenchError
from bench.gateway.hosts import Host, Seen
from bench.gateway.rows import HostRow
from gpuwarden.files import raise_file_limit

ANSWER_S: Final = 60.0
END_S: Final = 10.0


class Fleet:
    """The running process. `pid` is its id."""

    def __init__(self, pid: int, line: "Connection[Any, Any]") -> None:
        self.pid = pid
        self._line = line

    def seen(self) -> Seen:
        """What the hosts have seen since the last call.

        Raises:
            BenchError: a host failed.
        """
        try:
            self._line.send(True)
            if not self._line.poll(ANSWER_S):
                raise BenchError(f"the simulated hosts did not answer in {ANSWER_S:.0f} s")
            found: Seen = self._line.recv()
        except (EOFError, ConnectionError):
            raise BenchError("the simulated hosts failed, see their error above") from None
        if found.errors:
            raise BenchError(f"{len(found.errors)} requests of hosts failed, the first one: {found.errors[0]}")
        return found


@contextmanager
def fleet(hosts: list[HostRow], ways: Sequence[int | str], *, spread_s: float) -> Iterator[Fleet]:
    """Run hosts, shared out to the ways: ports of central gateways, or the URL of a database.

    They begin one after the other within `spread_s`, so that their requests are spread as those of real ones.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(hosts, ways, spread_s, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Fleet(process.pid or 0, ours)
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(END_S)
        if process.is_alive():
            process.kill()


def _run(hosts: list[HostRow], ways: Sequence[int | str], spread_s: float, line: "Connection[Any, Any]") -> None:
    raise_file_limit()
    gc.disable()  # of 1,250 hosts in one process, one collection takes 0.5 s
    asyncio.run(_serve(hosts, ways, spread_s, line))


async def _serve(rows: list[HostRow], ways: Sequence[int | str], spread_s: float, line: "Connection[Any, Any]") -> None:
    seen = Seen()
    hosts = [Host(row, ways[number % len(ways)], seen) for number, row in enumerate(rows)]
    for number, host in enumerate(hosts):
        host.start(after_s=spread_s * number / len(hosts))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, line.recv):
        line.send(seen.take())
    for host in hosts:
        await host.stop()
