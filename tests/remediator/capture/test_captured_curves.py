"""The curves around a trip, asked for while the processes are looked at: they never hold up the stop beyond its bound.

The ledger, the queue and the process are real. What a real Prometheus has is in `test_real_curves` and in the e2e
tests; here are those that are stopped or hang, and one that answers when it is told to.
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
from tests.remediator.executor.builders import to_the_end, told
from tests.remediator.executor.test_captured_first import ACCOUNT, LOOK, capture_runner, executor, target, wedge
from tests.remediator.prometheus import Answering
from tests.waiting import eventually

__all__ = ["target"]  # a fixture

NOBODY = "http://127.0.0.1:9"
NAMES = "beat age, heartbeat age, GPU use, GPU memory, RAM"


@pytest.fixture
def asking() -> Iterator[Callable[[str], Curves]]:
    """Clients of a Prometheus at an address, to the end of the test."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(closing(Curves([url], around_s=900.0)))


def test_a_prometheus_that_is_stopped_costs_its_curves_alone_and_the_stop_comes(
    ledger: Ledger, store: JobStore, target: int, asking: Callable[[str], Curves]
) -> None:
    world, box = wedge(ledger, store, target)
    by = capture_runner(py_spy=None, curves=asking(NOBODY))

    to_the_end(executor(ledger, store, world, by), ledger)

    assert (told(ledger), box.calls) == (ACCOUNT, ["stop", "start"])
    document = ledger.captures.of_episode(1)[0].document
    why = f"{NOBODY} failed: All connection attempts failed"
    assert (document["curves"], noted(document)) == ([], f"no curve of {NAMES}: {why}")
    assert document["processes"][0]["pid"] == target


def noted(document: Mapping[str, Any]) -> str:
    """What it says of curves that there are none of."""
    (note,) = (each for each in document["notes"] if "curve" in each)
    return str(note)


class Stand(Answering):
    """What a range of each figure is, once this is over."""

    def __init__(self, waits: Callable[[], object]) -> None:
        super().__init__()
        self._waits = waits

    def answer(self, _: str) -> tuple[int, bytes]:
        self._waits()
        end = int(parse_qs(self.asked[-1])["end"][0])
        names = ("job_step_beat_age_seconds", "worker_heartbeat_age_seconds", "container_memory_bytes")
        lines = [{"metric": {"__name__": f"gpuwarden_{name}"}, "values": [[end, "130"]]} for name in names]
        return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": lines}}).encode()


def test_a_prometheus_that_hangs_delays_the_stop_to_the_bound_and_no_longer(
    ledger: Ledger, store: JobStore, target: int, asking: Callable[[str], Curves]
) -> None:
    world, box = wedge(ledger, store, target)
    ends = threading.Event()
    with Stand(lambda: ends.wait(30)) as hangs:
        to_the_end(executor(ledger, store, world, capture_runner(for_s=2.0, curves=asking(hangs.url))), ledger)
        ends.set()

    assert box.calls == ["stop", "start"]
    document = ledger.captures.of_episode(1)[0].document
    assert noted(document) == f"no curve of {NAMES}: {hangs.url} failed: no answer within 1.8 s"
    assert 1.8 <= document["took_s"] < 4.0
    assert document["processes"][0]["pid"] == target


def test_a_client_that_hangs_itself_is_not_waited_for_beyond_the_bound(
    ledger: Ledger, store: JobStore, target: int, asking: Callable[[str], Curves]
) -> None:
    world, box = wedge(ledger, store, target)
    client, ends = asking(NOBODY), threading.Event()

    async def hang() -> None:
        ends.wait(30)

    client._loop.start(hang())
    to_the_end(executor(ledger, store, world, capture_runner(for_s=2.0, curves=client)), ledger)
    ends.set()
    client._loop.run(asyncio.sleep(0.05))  # what was asked in vain comes to its end

    assert box.calls == ["stop", "start"]
    document = ledger.captures.of_episode(1)[0].document
    assert noted(document) == "no curves: no time left"
    assert 2.0 <= document["took_s"] < 4.0


def test_prometheus_answers_while_the_processes_are_looked_at(
    ledger: Ledger, store: JobStore, target: int, tmp_path: Path, asking: Callable[[str], Curves]
) -> None:
    """Each waits for the other to have begun, so that one after the other would see nothing."""
    world, _ = wedge(ledger, store, target)
    looks = f'touch {tmp_path}/looks; until [ -e {tmp_path}/asked ]; do sleep 0.02; done; exec "$@"'

    def both() -> None:
        (tmp_path / "asked").touch()
        eventually((tmp_path / "looks").exists, "the look has begun")

    with Stand(both) as stand:
        by = capture_runner(look=("sh", "-c", looks, "sh", *LOOK), curves=asking(stand.url))
        to_the_end(executor(ledger, store, world, by), ledger)

    document = ledger.captures.of_episode(1)[0].document
    assert document["cut_short"] is None
    assert [each["metric"] for each in document["curves"]] == [
        "gpuwarden_job_step_beat_age_seconds",
        "gpuwarden_worker_heartbeat_age_seconds",
        "gpuwarden_container_memory_bytes",
    ]
    assert document["curves"][0]["values"][-1] == 130.0
    assert noted(document) == f"no curve of GPU use, GPU memory: {stand.url} has no samples"


def test_curves_that_are_more_than_may_be_kept_are_counted_with_what_was_left_out(
    ledger: Ledger, store: JobStore, target: int, asking: Callable[[str], Curves]
) -> None:
    world, _ = wedge(ledger, store, target)
    with Stand(lambda: None) as stand:
        by = capture_runner(max_bytes=1000, curves=asking(stand.url))
        to_the_end(executor(ledger, store, world, by), ledger)

    document = ledger.captures.of_episode(1)[0].document
    assert document["curves"] == []
    assert document["left_out_bytes"] > 1000
