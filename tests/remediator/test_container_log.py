"""The last lines of a container that are kept, as real engines keep them: lines of any length among them.

Podman keeps a line in pieces that was written in pieces, or that is long. Asked for the last lines, Podman 4.3 tells
such a piece behind the line before its own, those of one line in reverse, and leaves out the first of all: so its own
file is read. An unbuffered print() writes a line and its end in two goes, and whether Podman sees one piece or two
differs from run to run: so the programs here write each piece by itself.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from deploy.engine import Engine
from remediator import bystander
from remediator.capture import Captor
from tests.remediator import builders as build
from tests.remediator.test_docker_actuator import engine, run

__all__ = ["engine", "run"]  # fixtures

LONG = 6 * 2**20
PROGRAM = """
import os, time

def say(text, where=1):
    os.write(where, text.encode())
    time.sleep(0.05)  # until the engine has read it

{}
time.sleep(600)
"""
IN_PIECES = """
say('fir'); say('st'); say('\\n'); say('second\\n')
say('of stdout'); say('of std', 2); say('\\n'); say('err\\n', 2)
say('a' * 1000); say('\\n'); say('not', 2); say(' yet', 2); say('ready\\n')
"""


def last_lines(engine: Engine, container: str) -> tuple[list[list[str]], list[str]]:
    captor = Captor(for_s=30.0, max_bytes=2**18, engines={engine.kind: engine.base_url})
    target = build.container(kind=engine.kind, handle=container, pids=frozenset())
    document = captor.capture(build.episode(), target, None, armed=False, now=build.NOW).document
    return [log["lines"] for log in document["logs"]], [each for each in document["notes"] if "last" in each]


def test_a_line_that_is_longer_than_what_is_read_hides_none_that_comes_after_it(
    engine: Engine, run: Callable[..., str]
) -> None:
    container = run(program=PROGRAM.format(f"say('a' * {LONG} + '\\n'); say('rea'); say('dy\\n')"))

    assert last_lines(engine, container) == ([["ready"]], [])


def test_of_a_last_line_that_is_longer_than_what_is_kept_there_is_the_end(
    engine: Engine, run: Callable[..., str]
) -> None:
    logs, notes = last_lines(engine, run(program=PROGRAM.format(f"say('a' * {LONG}); say('ready\\n')")))

    assert [len(line) for line in logs[0]] == [bystander.LOG_MAX_BYTES - 1]
    assert logs[0][0].endswith("aaaready")
    assert notes == ["the last line of the container's log is longer than 16384 bytes: its end is kept"]


def test_of_lines_that_were_written_in_pieces_none_is_missing(engine: Engine, run: Callable[..., str]) -> None:
    container = run(program=PROGRAM.format(IN_PIECES))

    unended = {"docker": [], "podman": ["not yet"]}[engine.kind]  # Docker tells a line when it has ended
    lines = ["first", "second", "of stdout", "of stderr", "a" * 1000, "ready", *unended]
    assert last_lines(engine, container) == ([lines], [])


def test_of_a_hundred_lines_and_more_there_are_the_last_hundred(engine: Engine, run: Callable[..., str]) -> None:
    container = run(
        program=PROGRAM.format("say(''.join(f'{n} ' + 'a' * 9 + '\\n' for n in range(50000)) + 'ready\\n')")
    )

    assert last_lines(engine, container) == ([[*(f"{n} aaaaaaaaa" for n in range(49901, 50000)), "ready"]], [])


@pytest.mark.parametrize("answer", [b"[]", b"{", b"{}", b'{"LogPath": 5}', b'{"LogPath": "/a\\u0000b"}'])
def test_an_answer_of_podmans_that_makes_no_sense_ends_no_look(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystander, "_engine_says", lambda *_: answer)
    out = bystander._Out()

    assert not bystander._podman_file_log("unix:///nowhere", "c1", out)


def test_where_podmans_file_cannot_be_read_the_engine_is_asked_and_it_is_said(
    engine: Engine, run: Callable[..., str]
) -> None:
    container = run(program=PROGRAM.format("say('first\\n'); say('ready\\n')"))
    with contextlib.closing(docker.DockerClient(base_url=engine.base_url)) as client:
        kept = Path(client.api.inspect_container(container)["LogPath"])
    kept.rename(kept.with_suffix(".moved"))
    kept.symlink_to(kept.with_suffix(".moved"))

    logs, notes = last_lines(engine, container)

    told = f"the container's last lines may be out of order, as Podman 4.3 tells them: {kept} cannot be read: "
    assert logs == [["first", "ready"]]
    assert notes == {"docker": [], "podman": [f"{told}Too many levels of symbolic links"]}[engine.kind]
