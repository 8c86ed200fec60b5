"""The last lines of a container that are kept, as real engines tell them: lines of any length among them.

Podman 4.3 keeps a long line in pieces; which of them it tells, and where it ends lines, differs from run to run: of it
only what was said last is asked for here.
"""

from collections.abc import Callable

from deploy.engine import Engine
from remediator import bystander
from remediator.capture import Captor
from tests.remediator import builders as build
from tests.remediator.test_docker_actuator import engine, run

__all__ = ["engine", "run"]  # fixtures

LONG = 6 * 2**20
PROGRAM = "import functools, time; say = functools.partial(print, flush=True); {}; time.sleep(600)"


def last_lines(engine: Engine, container: str) -> tuple[list[list[str]], list[str]]:
    captor = Captor(for_s=30.0, max_bytes=2**18, engines={engine.kind: engine.base_url})
    target = build.container(kind=engine.kind, handle=container, pids=frozenset())
    document = captor.capture(build.episode(), target, None, armed=False).document
    return [log["lines"] for log in document["logs"]], [each for each in document["notes"] if "last" in each]


def test_a_line_that_is_longer_than_what_is_read_hides_none_that_comes_after_it(
    engine: Engine, run: Callable[..., str]
) -> None:
    logs, notes = last_lines(engine, run(program=PROGRAM.format(f"say('a' * {LONG}); say('ready')")))

    if engine.kind == "docker":  # it tells no line longer than 16 KiB: it cuts them
        assert (logs, notes) == ([["ready"]], [])
    else:
        assert notes or "ready" in "".join(logs[0])


def test_of_a_last_line_that_is_longer_than_what_is_kept_there_is_the_end(
    engine: Engine, run: Callable[..., str]
) -> None:
    logs, notes = last_lines(engine, run(program=PROGRAM.format(f"say('a' * {LONG} + 'ready')")))

    if engine.kind == "docker":
        assert [len(line) for line in logs[0]] == [bystander.LOG_MAX_BYTES - 1]
        assert logs[0][0].endswith("aaaready")
        assert notes == ["the last line of the container's log is longer than 16384 bytes: its end is kept"]
    else:
        assert notes or "ready" in "".join(logs[0])


def test_of_lines_that_are_all_short_none_is_missing(engine: Engine, run: Callable[..., str]) -> None:
    program = PROGRAM.format("say('first'); time.sleep(0.1); say('a' * 1000); time.sleep(0.1); say('ready')")

    logs, notes = last_lines(engine, run(program=program))

    assert notes == []
    if engine.kind == "docker":
        assert logs == [["first", "a" * 1000, "ready"]]
    else:
        assert "".join(logs[0]).endswith("a" * 1000 + "ready")
