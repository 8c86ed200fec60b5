"""An executor starts a tenant on demand, with a real ledger and queue."""

import time
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.evidence import OnDemandFacts
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.reasons import Reason
from tests.remediator.builders import HOST, alert, on_demand
from tests.remediator.executor.builders import PACE, executor, turn
from tests.remediator.world import Box, World

LABELS: dict[str, Any] = {
    "alertname": "GpuwardenOnDemandUp", "remedy": "scale_tenant", "condition": "demand_up", "tenant": "c1",
    **dict.fromkeys(("worker", "container", "incarnation", "job_id", "attempt")),
}  # fmt: skip


class RoomyWorld(World):
    """A host with one tenant on demand, whose GPU has room."""

    def on_demand_evidence(self, tenant: str, *, host: str) -> OnDemandFacts:
        box = self.boxes[tenant]
        return replace(on_demand(on=box.running, handle=box.handle), host=host)


@pytest.mark.parametrize("quarantined", [False, True])
def test_tenant_is_started_unless_its_gpu_is_in_quarantine(ledger: Ledger, store: JobStore, quarantined: bool) -> None:
    box = Box(worker="c1", running=False)
    works = executor(ledger, store, RoomyWorld(box))
    if quarantined:
        store.gpu_quarantine.quarantine(["GPU-0"], host=HOST, worker=None, reason="lost", now=time.time())
    ledger.inbox.accept([alert(**LABELS)], [], now=time.time())
    turn(works, ledger)

    assert box.running is not quarantined
    assert [each.reason for each in ledger.reports.list_held()] == [Reason.GPU_QUARANTINED] * quarantined


class CrashingWorld(RoomyWorld):
    """Its tenant ends as soon as it is started, so that no list of the exporter shows it."""

    def start(self, handle: str) -> None:
        super().start(handle)
        self._box(handle).running = False


def test_tenant_that_ends_at_once_is_not_started_again_and_again(ledger: Ledger, store: JobStore) -> None:
    box = Box(worker="c1", running=False)
    works = executor(ledger, store, CrashingWorld(box))
    ledger.inbox.accept([alert(**LABELS)], [], now=time.time())
    for _ in range(3):
        turn(works, ledger)

    assert box.starts == 1
    assert [each.reason for each in ledger.reports.list_held()] == [Reason.SCALE_FAILED]


def test_next_tenant_waits_until_the_exporter_has_seen_the_first(ledger: Ledger, store: JobStore) -> None:
    """Also without a cool-down, and after the first one's episode."""
    first, second = Box(worker="c1", running=False), Box(worker="c2", running=False)
    settings = replace(PACE, safety_limits=replace(PACE.safety_limits, vram_cooldown_s=0))
    works = executor(ledger, store, RoomyWorld(first, second), settings=settings)
    ledger.inbox.accept([alert(**LABELS)], [], now=time.time())
    for _ in range(2):
        turn(works, ledger)
    assert ledger.episodes.list_open(HOST) == []
    ledger.inbox.accept([alert("f2", **LABELS | {"tenant": "c2"})], [], now=time.time())
    turn(works, ledger)

    assert (first.running, second.running) == (True, False)
    assert [each.reason for each in ledger.reports.list_held()] == [Reason.GPU_COOLDOWN]
