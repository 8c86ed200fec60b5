"""Worker processes: one connection each, which stays, and commands that all of them begin at the same moment."""

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
"""What a process does with its worker; it calls its second argument once, to wait until all are ready."""

# Forked from a process that has imported everything already, and nothing else: 32 are there in a moment.
_CONTEXT: Final = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.queue.rates", "bench.queue.peer_procrastinate", "bench.queue.peer_pgqueuer"])


class Crew:
    """So many worker processes, which wait for commands."""

    def __init__(self, lines: list["Connection[Any, Any]"]) -> None:
        self._lines = lines

    def run(self, *commands: Command) -> list[Any]:
        """Have one command done by everyone, or one by each; their answers.

        Raises:
            BenchError: a process ended or did not answer in time.
        """
        each = commands * len(self._lines) if len(commands) == 1 else commands
        try:
            for line, command in zip(self._lines, each, strict=True):
                line.send(command)
            return [_answer(line) for line in self._lines]
        except (EOFError, ConnectionError):
            raise BenchError("a worker process failed; it told why above") from None


@contextmanager
def crew(worker: type[Worker], url: str, count: int) -> Iterator[Crew]:
    """`count` processes, each with an open worker of that kind."""
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
        yield Crew(lines)
    finally:
        for line in lines:
            with suppress(OSError):
                line.send(None)
        for member in members:
            member.join(END_S)
            if member.is_alive():
                member.kill()


def _answer(line: "Connection[Any, Any]") -> Any:
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
