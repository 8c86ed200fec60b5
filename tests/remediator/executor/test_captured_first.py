"""Captures: once, before the first action that ends anything, without delay of the stop.

The ledger, the queue and the captured process are real. The container and the exporter are fakes: see `world`.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.queue import JobStore
from remediator.capture import probe
from remediator.capture.capture import CaptureRunner
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor
from remediator.ledger.captures import Capture
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome
from remediator.reasons import Reason
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import (
    PACE,
    after_begin,
    arm,
    journal,
    silent_server,
    stalled_job,
    to_the_end,
    turn,
)
from tests.remediator.world import Box, World

LOOK = (sys.executable, "-IS", probe.__file__)
JOURNAL = [
    "saw alert: firing",
    "decided begin",
    "saw capture",
    "did fence",
    "decided stop",
    "did stop",
    "saw free: dead",
    "did requeue",
    "decided start",
    "did start",
    "saw free: done",
    "decided close: fixed",
]


@pytest.fixture
def target() -> Iterator[int]:
    """A process of the container."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def capture_runner(**changed: Any) -> CaptureRunner:
    return CaptureRunner(**{"for_s": 10.0, "max_bytes": 2**18, **changed})


def executor(
    ledger: Ledger, store: JobStore, world: World, by: CaptureRunner | None, *, armed: bool = True
) -> Executor:
    arm(ledger, armed=armed)
    clients = Clients(exporter=world, queue=BuiltinQueue(store), actuators={"docker": world}, capture_runner=by)  # type: ignore[arg-type]
    return Executor(ledger, host=HOST, clients=clients, settings=PACE)


def stalled_worker(ledger: Ledger, store: JobStore, target: int) -> tuple[World, Box]:
    world = stalled_job(ledger, store)
    box = world.boxes["w1"]
    box.processes = frozenset({target})
    return world, box


def counted(folder: Path) -> tuple[str, ...]:
    """A probe that writes a mark at each run."""
    return ("sh", "-c", f'echo x >>{folder}/looks; exec "$@"', "sh", *LOOK)


def looks(folder: Path) -> int:
    marks = folder / "looks"
    return len(marks.read_text(encoding="ascii").split()) if marks.exists() else 0


def test_capture_is_saved_before_the_fence_and_the_stop(ledger: Ledger, store: JobStore, target: int) -> None:
    world, box = stalled_worker(ledger, store, target)
    kept: list[int] = []
    world.before_stop = lambda _: kept.append(len(ledger.captures.of_episode(1)))

    to_the_end(executor(ledger, store, world, capture_runner()), ledger)

    assert journal(ledger) == JOURNAL
    assert (kept, box.calls) == ([1], ["stop", "start"])
    (capture,) = ledger.captures.of_episode(1)
    assert [(each["pid"], each["name"]) for each in capture.document["processes"]] == [(target, "sleep")]
    assert (capture.document["armed"], capture.host, capture.document["facts"]["worker"]) == (True, HOST, "w1")
    assert abs(capture.at - time.time()) < 60


def test_server_is_captured_before_its_stop(ledger: Ledger, store: JobStore, target: int) -> None:
    world = silent_server(ledger, processes=frozenset({target}))

    to_the_end(executor(ledger, store, world, capture_runner()), ledger)

    assert journal(ledger)[1:5] == ["decided begin", "saw capture", "decided stop", "did stop"]
    assert ledger.captures.of_episode(1)[0].document["facts"]["probe_failing_s"] == 130.0


def test_no_capture_if_switched_off(ledger: Ledger, store: JobStore, target: int) -> None:
    world, _ = stalled_worker(ledger, store, target)

    to_the_end(executor(ledger, store, world, None), ledger)

    assert journal(ledger) == [line for line in JOURNAL if line != "saw capture"]
    assert ledger.captures.of_episode(1) == []


def test_saved_capture_is_not_repeated(ledger: Ledger, store: JobStore, target: int, tmp_path: Path) -> None:
    world, box = stalled_worker(ledger, store, target)
    advance = ledger.intents.advance

    def crash(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    ledger.intents.advance = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):  # after the capture is saved, before the fence is recorded
        turn(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)
    assert journal(ledger)[-1] == "saw capture"
    ledger.intents.advance = advance  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)

    assert (journal(ledger), box.calls) == (JOURNAL, ["stop", "start"])
    assert (looks(tmp_path), len(ledger.captures.of_episode(1))) == (1, 1)


def test_lost_capture_is_repeated(ledger: Ledger, store: JobStore, target: int, tmp_path: Path) -> None:
    world, _ = stalled_worker(ledger, store, target)
    keep = ledger.captures.save

    def crash(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    ledger.captures.save = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        turn(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)
    ledger.captures.save = keep  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)

    assert journal(ledger) == JOURNAL
    assert (looks(tmp_path), len(ledger.captures.of_episode(1))) == (2, 1)


def test_failed_save_of_a_capture_does_not_delay_the_stop(
    ledger: Ledger, store: JobStore, target: int, tmp_path: Path
) -> None:
    world, box = stalled_worker(ledger, store, target)

    def refuse(*_: Any, **__: Any) -> bool:
        raise DatabaseError("too large")

    ledger.captures.save = refuse  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)

    assert box.calls == ["stop", "start"]
    assert looks(tmp_path) == 1


def test_dry_run_and_restart_have_a_capture_each(ledger: Ledger, store: JobStore, target: int, tmp_path: Path) -> None:
    world, box = stalled_worker(ledger, store, target)
    for _ in range(3):
        turn(executor(ledger, store, world, capture_runner(look=counted(tmp_path)), armed=False), ledger)

    assert journal(ledger) == ["saw alert: firing", "saw capture", "would act", *["decided wait: dry_run"] * 3]
    assert (looks(tmp_path), box.calls) == (1, [])
    to_the_end(executor(ledger, store, world, capture_runner(look=counted(tmp_path))), ledger)

    assert [each.document["armed"] for each in ledger.captures.of_episode(1)] == [False, True]
    assert (looks(tmp_path), box.calls) == (2, ["stop", "start"])


def test_facts_are_read_again_after_a_capture_of_a_worker(ledger: Ledger, store: JobStore, target: int) -> None:
    world, box = stalled_worker(ledger, store, target)

    class Slow(CaptureRunner):
        def capture(self, *about: Any, **how: Any) -> Capture:
            captured = super().capture(*about, **how)
            box.hung = False
            return captured

    works = executor(ledger, store, world, Slow(for_s=10.0, max_bytes=2**18))
    turn(works, ledger)
    assert journal(ledger)[1:] == ["decided begin", "saw capture", "decided wait: unconfirmed"]
    box.hung = True

    to_the_end(works, ledger)

    assert journal(ledger)[3:6] == ["decided wait: unconfirmed", "did fence", "decided stop"]
    assert len(ledger.captures.of_episode(1)) == 1


def test_stopped_container_is_not_captured(ledger: Ledger, store: JobStore, target: int) -> None:
    world, box = stalled_worker(ledger, store, target)
    works = executor(ledger, store, world, capture_runner())
    after_begin(ledger, lambda: setattr(box, "running", False))

    to_the_end(works, ledger)

    assert "did fence" in journal(ledger)
    assert ledger.captures.of_episode(1) == []


def test_restart_has_only_one_capture(ledger: Ledger, store: JobStore, target: int) -> None:
    world, box = stalled_worker(ledger, store, target)
    box.unkillable = True
    turn(executor(ledger, store, world, None), ledger)
    (episode,) = ledger.episodes.list_open(HOST)
    assert episode.free is not None
    nothing: dict[str, Any] = {"processes": [], "cut_short": None, "curves": []}
    first, second = (Capture(armed=True, took_s=0.0, document={**nothing, "n": n}) for n in (1, 2))

    assert ledger.captures.save(episode, first, now=time.time())
    assert not ledger.captures.save(episode, second, now=time.time())
    assert [each.document["n"] for each in ledger.captures.of_episode(1)] == [1]


def test_characters_that_a_database_refuses_are_replaced(
    ledger: Ledger, store: JobStore, target: int, tmp_path: Path
) -> None:
    (tmp_path / "job-1-attempt-1.log").write_bytes(b"a\0b\xed\xa0\x80c\n")
    world, _ = stalled_worker(ledger, store, target)

    to_the_end(executor(ledger, store, world, capture_runner(job_logs=tmp_path)), ledger)

    assert ledger.captures.of_episode(1)[0].document["logs"][0]["lines"] == ["a\\x00b\\xed\\xa0\\x80c"]


def test_captures_over_the_limit_are_deleted_except_of_open_episodes(
    ledger: Ledger, store: JobStore, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.ledger.captures.CAPTURES_MAX", 0)
    world, box = stalled_worker(ledger, store, target)
    box.unkillable = True
    turn(executor(ledger, store, world, None), ledger)
    (episode,) = ledger.episodes.list_open(HOST)
    captured = Capture(armed=True, took_s=0.0, document={"processes": [], "cut_short": None, "curves": []})

    ledger.captures.save(episode, captured, now=time.time())
    assert len(ledger.captures.of_episode(1)) == 1

    ledger.episodes.close(1, Outcome.UNCONFIRMED, Reason.DONE, "given up", now=time.time())
    ledger.captures.save(replace(episode, free=None), captured, now=time.time())
    assert ledger.captures.of_episode(1) == []
