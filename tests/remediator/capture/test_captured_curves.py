"""Curves are read while the processes are probed, and delay the stop at most by the timeout.

The ledger, the queue and the process are real. Prometheus is down, hangs or answers on request. `test_real_curves`
has a real one.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from gpuwarden.queue import JobStore
from remediator.clients.prometheus_range import Curves
from remediator.ledger.ledger import Ledger
from tests.remediator.executor.builders import journal, to_the_end
from tests.remediator.executor.test_captured_first import (
    JOURNAL,
    LOOK,
    capture_runner,
    executor,
    stalled_worker,
    target,
)
from tests.remediator.prometheus import Answering
from tests.waiting import eventually

__all__ = ["target"]  # a fixture

CLOSED_PORT = "http://127.0.0.1:9"
NAMES = "beat age, heartbeat age, GPU use, GPU memory, RAM"


@pytest.fixture
def client_of() -> Iterator[Callable[[str], Curves]]:
    """Make a client of the Prometheus at an address."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(closing(Curves([url], around_s=900.0)))


def test_stopped_prometheus_costs_only_its_curves(
    ledger: Ledger, store: JobStore, target: int, client_of: Callable[[str], Curves]
) -> None:
    world, box = stalled_worker(ledger, store, target)
    by = capture_runner(py_spy=None, curves=client_of(CLOSED_PORT))

    to_the_end(executor(ledger, store, world, by), ledger)

    assert (journal(ledger), box.calls) == (JOURNAL, ["stop", "start"])
    document = ledger.captures.of_episode(1)[0].document
    why = f"{CLOSED_PORT} failed: All connection attempts failed"
    assert (document["curves"], curve_note(document)) == ([], f"no curve of {NAMES}: {why}")
    assert document["processes"][0]["pid"] == target


def curve_note(document: Mapping[str, Any]) -> str:
    """The note about missing curves."""
    (note,) = (each for each in document["notes"] if "curve" in each)
    return str(note)


class FakePrometheus(Answering):
    """Answers with a range of each metric after `waits` returns."""

    def __init__(self, waits: Callable[[], object]) -> None:
        super().__init__()
        self._waits = waits

    def answer(self, _: str) -> tuple[int, bytes]:
        self._waits()
        end = int(parse_qs(self.asked[-1])["end"][0])
        names = ("job_step_beat_age_seconds", "worker_heartbeat_age_seconds", "container_memory_bytes")
        lines = [{"metric": {"__name__": f"gpuwarden_{name}"}, "values": [[end, "130"]]} for name in names]
        return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": lines}}).encode()


def test_hung_prometheus_delays_the_stop_at_most_by_the_timeout(
    ledger: Ledger, store: JobStore, target: int, client_of: Callable[[str], Curves]
) -> None:
    world, box = stalled_worker(ledger, store, target)
    ends = threading.Event()
    with FakePrometheus(lambda: ends.wait(30)) as hangs:
        to_the_end(executor(ledger, store, world, capture_runner(for_s=2.0, curves=client_of(hangs.url))), ledger)
        ends.set()

    assert box.calls == ["stop", "start"]
    document = ledger.captures.of_episode(1)[0].document
    assert curve_note(document) == f"no curve of {NAMES}: {hangs.url} failed: no answer within 1.8 s"
    assert 1.8 <= document["took_s"] < 4.0
    assert document["processes"][0]["pid"] == target


def test_hung_client_delays_the_stop_at_most_by_the_timeout(
    ledger: Ledger, store: JobStore, target: int, client_of: Callable[[str], Curves]
) -> None:
    world, box = stalled_worker(ledger, store, target)
    client, ends = client_of(CLOSED_PORT), threading.Event()

    async def hang() -> None:
        ends.wait(30)

    client._loop.start(hang())
    to_the_end(executor(ledger, store, world, capture_runner(for_s=2.0, curves=client)), ledger)
    ends.set()
    client._loop.run(asyncio.sleep(0.05))  # the pending request ends

    assert box.calls == ["stop", "start"]
    document = ledger.captures.of_episode(1)[0].document
    assert curve_note(document) == "no curves: no time left"
    assert 2.0 <= document["took_s"] < 4.0


def test_prometheus_is_read_while_the_processes_are_probed(
    ledger: Ledger, store: JobStore, target: int, tmp_path: Path, client_of: Callable[[str], Curves]
) -> None:
    """Each waits for the other to begin, so a sequential run would time out."""
    world, _ = stalled_worker(ledger, store, target)
    looks = f'touch {tmp_path}/looks; until [ -e {tmp_path}/asked ]; do sleep 0.02; done; exec "$@"'

    def both() -> None:
        (tmp_path / "asked").touch()
        eventually((tmp_path / "looks").exists, "the probe has begun")

    with FakePrometheus(both) as stand:
        by = capture_runner(look=("sh", "-c", looks, "sh", *LOOK), curves=client_of(stand.url))
        to_the_end(executor(ledger, store, world, by), ledger)

    document = ledger.captures.of_episode(1)[0].document
    assert document["cut_short"] is None
    assert [each["metric"] for each in document["curves"]] == [
        "gpuwarden_job_step_beat_age_seconds",
        "gpuwarden_worker_heartbeat_age_seconds",
        "gpuwarden_container_memory_bytes",
    ]
    assert document["curves"][0]["values"][-1] == 130.0
    assert curve_note(document) == f"no curve of GPU use, GPU memory: {stand.url} has no samples"


def test_curves_over_the_size_limit_are_counted_as_left_out(
    ledger: Ledger, store: JobStore, target: int, client_of: Callable[[str], Curves]
) -> None:
    world, _ = stalled_worker(ledger, store, target)
    with FakePrometheus(lambda: None) as stand:
        by = capture_runner(max_bytes=1000, curves=client_of(stand.url))
        to_the_end(executor(ledger, store, world, by), ledger)

    document = ledger.captures.of_episode(1)[0].document
    assert document["curves"] == []
    assert document["left_out_bytes"] > 1000
