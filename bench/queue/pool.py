"""A pool of worker processes, each with one connection, that start a command at the same moment."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from bench.figures import BenchError
from bench.queue.worker import Worker

ANSWER_S: Final = 120.0
END_S: Final = 10.0

Command = Callable[[Worker, Callable[[], None]], Awaitable[Any]]
"""Work of a process. It calls its second argument once, to wait for all others."""

# The fork server has imported everything, so 32 processes start fast.
_CONTEXT: Final = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.queue.rates", "bench.queue.peer_procrastinate", "bench.queue.peer_pgqueuer"])


class Pool:
    """Worker processes that wait for commands."""

    def __init__(self, lines: list["Connection[Any, Any]"]) -> None:
        self._lines = lines

    def run(self, *commands: Command) -> list[Any]:
        """Run one command in all processes, or one in each; return their answers.

        Raises:
            BenchError: a process ended or did not answer in time.
        """
        each = commands * len(self._lines) if len(commands) == 1 else commands
        try:
            for line, command in zip(self._lines, each, strict=True):
                line.send(command)
            return [_receive(line) for line in self._lines]
        except (EOFError, ConnectionError):
            raise BenchError("a worker process failed, see its error above") from None


@contextmanager
def pool(worker: type[Worker], url: str, count: int) -> Iterator[Pool]:
    """Run `count` processes, each with an open worker."""
    barrier = _CONTEXT.Barrier(count)
    lines: list[Connection[Any, Any]] = []
    members = []
    for number in range(count):
        ours, theirs = _CONTEXT.Pipe()
        member = _CONTEXT.Process(target=_member, args=(worker, url, f"worker-{number}", barrier, theirs), daemon=True)
        member.start()
        theirs.close()
        lines.append(ours)
        members.append(member)
    try:
        yield Pool(lines)
    finally:
        for line in lines:
            with suppress(OSError):
                line.send(None)
        for member in members:
            member.join(END_S)
            if member.is_alive():
                member.kill()


def _receive(line: "Connection[Any, Any]") -> Any:
    if not line.poll(ANSWER_S):
        raise BenchError(f"a worker process did not answer in {ANSWER_S:.0f} s")
    return line.recv()


def _member(worker: type[Worker], url: str, name: str, barrier: Barrier, line: "Connection[Any, Any]") -> None:
    worker.run(_serve(worker, url, name, barrier, line))


async def _serve(worker: type[Worker], url: str, name: str, barrier: Barrier, line: "Connection[Any, Any]") -> None:
    opened = await worker.open(url, name)
    command: Command | None

    def ready() -> None:
        barrier.wait(ANSWER_S)

    while (command := line.recv()) is not None:
        line.send(await command(opened, ready))
    await opened.close()
