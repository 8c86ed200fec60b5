"""An executor taints its node for a faulty GPU, with a real ledger and queue."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gpuwarden.kube import api as kube_api
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.clients.exporter import GpuHealth
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.clients.nodes import TAINT, Nodes
from remediator.executor.executor import Clients, Executor
from remediator.ledger.ledger import Ledger
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from remediator.seats import RESOURCE
from tests.remediator.builders import HOST, gpu_alert
from tests.remediator.executor.builders import BOUNDLESS, LIMITS, PACE, arm, history, journal, turn
from tests.remediator.kubernetes_api import Api, Failure, kubernetes_api
from tests.remediator.world import World

QUICK = replace(
    PACE,
    limits=replace(LIMITS, gpu_lost_s=0.05),
    safety_limits=replace(BOUNDLESS, breaker_targets=3),
)
FOREIGN = {"key": "team", "value": "a", "effect": "NoExecute"}
WORKS = GpuHealth(listed=True, lost_s=0.0, xids=(), sample_age_s=0.5)


class GpuWorld(World):
    """An exporter with one GPU."""

    health = WORKS

    def gpu_health(self, gpu: str) -> GpuHealth:
        assert gpu in ("GPU-0", "GPU-1")
        return self.health


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with kubernetes_api(tmp_path / "config") as api:
        api.taints = [FOREIGN]
        yield api


@pytest.fixture
def world() -> GpuWorld:
    return GpuWorld()


@pytest.fixture
def works(ledger: Ledger, store: JobStore, world: GpuWorld, api: Api, tmp_path: Path) -> Executor:
    nodes = Nodes(kube_api.connect(tmp_path / "config"), RESOURCE)
    clients = Clients(exporter=world, queue=BuiltinQueue(store), actuators={}, node=(nodes, api.name))  # type: ignore[arg-type]
    return Executor(ledger, host=HOST, clients=clients, settings=QUICK)


def quarantine(store: JobStore, *, host: str = HOST) -> None:
    store.gpu_quarantine.quarantine(["GPU-0"], host=host, worker=None, reason="lost", now=time.time())


def alerted(ledger: Ledger, *, firing: bool = True) -> None:
    ledger.inbox.accept([gpu_alert(firing=firing)], [], now=time.time())


def beat(ledger: Ledger, host: str, *, now: float | None = None) -> None:
    at = time.time() if now is None else now
    ledger.executors.beat(host=host, pid=1, armed=True, started_at=at, errors=0, now=at)


def taint_elsewhere(ledger: Ledger, host: str) -> None:
    ledger.inbox.accept([gpu_alert(host, host=host)], [], now=time.time())
    ledger.inbox.take_new(host, now=time.time())
    (episode,) = ledger.episodes.list_open(host)
    ledger.journal.record(episode.episode_id, "decided", "taint", "", now=time.time())


def wait_reason(ledger: Ledger) -> str | None:
    (held,) = ledger.reports.list_held()
    return held.reason


def test_quarantined_gpu_taints_the_node_until_it_is_released(
    ledger: Ledger, store: JobStore, works: Executor, api: Api
) -> None:
    quarantine(store)
    alerted(ledger)
    turn(works, ledger)
    assert (api.taints, wait_reason(ledger)) == ([FOREIGN], Reason.DRY_RUN)
    assert journal(ledger)[-2:] == ["would act", "decided wait: dry_run"]

    arm(ledger)
    turn(works, ledger)
    turn(works, ledger)
    assert (api.taints, wait_reason(ledger)) == ([FOREIGN, TAINT], Reason.NODE_TAINTED)

    assert store.gpu_quarantine.release_gpu("GPU-0")
    turn(works, ledger)
    time.sleep(QUICK.limits.gpu_lost_s)
    turn(works, ledger)
    assert api.taints == [FOREIGN]
    assert history(ledger).outcome == plan.Outcome.FIXED
    assert [each for each in journal(ledger) if "taint" in each and "wait" not in each] == [
        "decided taint", "did taint", "decided untaint", "did untaint",
    ]  # fmt: skip


def test_taint_that_a_person_removed_is_not_set_again_while_the_alert_fires(
    ledger: Ledger, works: Executor, world: GpuWorld, api: Api
) -> None:
    world.health = replace(WORKS, listed=False, lost_s=1.0)
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)
    assert TAINT in api.taints

    api.taints = []
    for _ in range(3):
        turn(works, ledger)
    alerted(ledger)
    turn(works, ledger)
    assert (api.taints, wait_reason(ledger)) == ([], Reason.TAINT_REMOVED)

    alerted(ledger, firing=False)  # as after a failed scrape
    turn(works, ledger)
    assert wait_reason(ledger) == Reason.TAINT_REMOVED

    world.health = replace(WORKS, listed=False)
    turn(works, ledger)
    assert history(ledger).outcome == plan.Outcome.FIXED


def test_taint_of_an_executor_that_ended_before_its_record_is_removed(
    ledger: Ledger, store: JobStore, works: Executor, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    set_taint = Nodes.set_taint

    def end(nodes: Nodes, name: str, *, tainted: bool) -> bool:
        set_taint(nodes, name, tainted=tainted)
        raise SystemExit

    monkeypatch.setattr(Nodes, "set_taint", end)
    with pytest.raises(SystemExit):
        turn(works, ledger)
    monkeypatch.setattr(Nodes, "set_taint", set_taint)
    assert TAINT in api.taints

    store.gpu_quarantine.release_gpu("GPU-0")
    alerted(ledger, firing=False)
    turn(works, ledger)
    time.sleep(QUICK.limits.gpu_lost_s)
    turn(works, ledger)
    assert api.taints == [FOREIGN]
    assert history(ledger).outcome == plan.Outcome.FIXED


def test_last_of_two_gpus_that_work_again_removes_the_taint(
    ledger: Ledger, works: Executor, world: GpuWorld, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.health = replace(WORKS, listed=False, lost_s=1.0)
    ledger.inbox.accept([gpu_alert("g1"), gpu_alert("g2", gpu="GPU-1")], [], now=time.time())
    arm(ledger)
    turn(works, ledger)
    world.health = WORKS
    turn(works, ledger)
    time.sleep(QUICK.limits.gpu_lost_s)

    both, is_tainted = threading.Barrier(2), Nodes.is_tainted

    def together(nodes: Nodes, name: str) -> bool:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return is_tainted(nodes, name)

    monkeypatch.setattr(Nodes, "is_tainted", together)
    threads = [threading.Thread(target=works.process_episode, args=(each,)) for each in ledger.episodes.list_open(HOST)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert ledger.episodes.list_open(HOST) == []
    assert api.taints == [FOREIGN]


def test_hosts_that_decide_at_the_same_time_count_each_other(
    ledger: Ledger, store: JobStore, works: Executor, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    others = [f"other{number}" for number in range(QUICK.safety_limits.breaker_targets)]
    for each in others:
        beat(ledger, each)
    is_tainted = Nodes.is_tainted

    def meanwhile(nodes: Nodes, name: str) -> bool:
        for host in others:
            taint_elsewhere(ledger, host)
        others.clear()
        return is_tainted(nodes, name)

    monkeypatch.setattr(Nodes, "is_tainted", meanwhile)
    turn(works, ledger)

    assert api.taints == [FOREIGN]
    (reason,) = {each.reason for each in ledger.reports.list_held() if each.host == HOST}
    assert reason == Reason.MANY_TAINTED


def test_replaced_nodes_do_not_count(ledger: Ledger, store: JobStore, works: Executor, api: Api) -> None:
    for number in range(QUICK.safety_limits.breaker_targets):
        beat(ledger, f"gone{number}", now=time.time() - 3600)
        taint_elsewhere(ledger, f"gone{number}")
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)

    assert TAINT in api.taints


def test_taint_stays_during_a_pause(ledger: Ledger, works: Executor, world: GpuWorld, api: Api) -> None:
    world.health = replace(WORKS, listed=False, lost_s=1.0)
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)
    pause = Order(act=Act.PAUSE, at=time.time(), who="a test", reason="new cables", host=HOST)
    ledger.orders.give(pause)
    world.health = WORKS
    for _ in range(2):
        turn(works, ledger)
        time.sleep(QUICK.limits.gpu_lost_s)
    assert (TAINT in api.taints, wait_reason(ledger)) == (True, Reason.PAUSED)

    ledger.orders.give(Order(act=Act.RESUME, at=time.time(), who="a test", reason="", host=HOST))
    turn(works, ledger)
    assert api.taints == [FOREIGN]


def test_stale_sample_is_no_evidence(ledger: Ledger, works: Executor, world: GpuWorld, api: Api) -> None:
    world.health = replace(WORKS, listed=False, lost_s=1.0)
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)
    assert TAINT in api.taints

    world.health = replace(WORKS, sample_age_s=60.0)
    for _ in range(2):
        turn(works, ledger)
        time.sleep(QUICK.limits.gpu_lost_s)
    assert (TAINT in api.taints, wait_reason(ledger)) == (True, Reason.NODE_UNKNOWN)


def test_fatal_xid_counts_until_the_host_boots(
    ledger: Ledger, works: Executor, world: GpuWorld, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.health = replace(WORKS, xids=("79",))
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)
    assert TAINT in api.taints

    world.health = WORKS  # the exporter restarted
    for _ in range(2):
        turn(works, ledger)
        time.sleep(QUICK.limits.gpu_lost_s)
    assert TAINT in api.taints
    assert wait_reason(ledger) == Reason.NODE_TAINTED

    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: 0.01)
    turn(works, ledger)
    time.sleep(QUICK.limits.gpu_lost_s)
    turn(works, ledger)
    assert api.taints == [FOREIGN]


def test_refusal_of_the_api_is_recorded_once_and_retried(
    ledger: Ledger, store: JobStore, works: Executor, api: Api
) -> None:
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    api.failures["patch"] = [Failure(status=403), Failure(status=403), Failure(status=409)]
    for _ in range(4):
        turn(works, ledger)

    assert TAINT in api.taints
    tries = [each for each in journal(ledger) if each.endswith(" taint")]
    assert tries == ["decided taint", "failed taint", "did taint"]


@pytest.mark.parametrize("taints", [[], [TAINT]], ids=["untainted", "tainted by someone else"])
def test_nothing_is_done_about_a_gpu_that_works(
    ledger: Ledger, works: Executor, api: Api, taints: list[object]
) -> None:
    api.taints = list(taints)  # type: ignore[arg-type]
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)

    assert (api.taints, wait_reason(ledger)) == (taints, Reason.UNCONFIRMED)
    assert "patch" not in api.requests


def test_taint_of_someone_else_stays(ledger: Ledger, store: JobStore, works: Executor, api: Api) -> None:
    api.taints = [TAINT]
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)
    assert wait_reason(ledger) == Reason.TAINTED_ALREADY

    store.gpu_quarantine.release_gpu("GPU-0")
    alerted(ledger, firing=False)
    turn(works, ledger)
    assert api.taints == [TAINT]
    assert history(ledger).outcome == plan.Outcome.UNCONFIRMED


def test_quarantine_of_the_same_gpu_on_another_host_does_not_count(
    ledger: Ledger, store: JobStore, works: Executor, api: Api
) -> None:
    quarantine(store, host="box2")
    alerted(ledger)
    arm(ledger)
    turn(works, ledger)

    assert (api.taints, wait_reason(ledger)) == ([FOREIGN], Reason.UNCONFIRMED)


def test_without_an_answer_nothing_is_done(ledger: Ledger, store: JobStore, works: Executor, api: Api) -> None:
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    api.failures["read"] = [Failure()]
    turn(works, ledger)

    assert (api.taints, wait_reason(ledger)) == ([FOREIGN], Reason.NODE_UNKNOWN)


def test_executor_outside_of_kubernetes_taints_nothing(ledger: Ledger, store: JobStore, world: GpuWorld) -> None:
    clients = Clients(exporter=world, queue=BuiltinQueue(store), actuators={})  # type: ignore[arg-type]
    quarantine(store)
    alerted(ledger)
    arm(ledger)
    turn(Executor(ledger, host=HOST, clients=clients, settings=QUICK), ledger)

    assert wait_reason(ledger) == Reason.NODE_UNKNOWN
