"""The answers of `/evidence` for a literal snapshot."""

from dataclasses import replace
from typing import Any

import pytest

from exporter.evidence.container_history import stopped_container_evidence
from exporter.http import evidence
from exporter.model.container import GpuShare
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import PhaseTimeouts
from exporter.model.unknown import Unknown
from exporter.model.worker import DeadProcess, WorkerReadings
from gpuwarden.job import Phase
from gpuwarden.state_file import LongStep
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

OTHER_BOOT = "99999999-2222-3333-4444-555555555555"


def test_worker_evidence_has_container_job_and_durations() -> None:
    seen = build.sighting()

    found = evidence.worker_evidence(seen.worker.worker, build.snapshot(seen), now=build.ago(-1))

    assert found is not None
    assert (found.host, found.worker, found.container, found.sample_age_s) == ("box-1", "w0", "worker-0", 1.0)
    assert (found.job_id, found.cpu_idle_s, found.gpu_idle_s) == (build.job_file().job_id, 1.0, 500.0)
    assert found.gpu_pids == {build.gpu(0).uuid: []}


@pytest.mark.parametrize(
    ("changes", "silence_s", "window_s", "grace_s"),
    [
        pytest.param({"phase": Phase.LOAD}, 300.0, 300.0, 360.0, id="load"),
        pytest.param({}, 120.0, 300.0, 60.0, id="step"),
        pytest.param({"step": 0}, 120.0, 300.0, 360.0, id="first step"),
        pytest.param({"phase": Phase.EVAL}, 320.0, 320.0, 40.0, id="eval"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 900.0}, 900.0, 900.0, 0.0, id="timeout of the phase"),
        pytest.param({"phase": Phase.IDLE}, 0.0, None, 360.0, id="idle"),
    ],
)
def test_job_limits_depend_on_the_phase(
    changes: dict[str, Any], silence_s: float, window_s: float | None, grace_s: float
) -> None:
    seen = build.sighting(job=build.job_file(**changes))

    found = evidence.worker_evidence(
        "w0", build.snapshot(seen, thresholds=Thresholds(timeouts=PhaseTimeouts(eval_s=320.0))), now=build.ago(0)
    )

    assert found is not None
    assert (found.stall_timeout_s, found.health_window_s, found.health_grace_s) == (silence_s, window_s, grace_s)


@pytest.mark.parametrize(("job", "acts"), [({}, True), ({"health_acts": False}, False), (None, None)])
def test_job_says_whether_an_idle_gpu_ends_it(job: dict[str, Any] | None, acts: bool | None) -> None:
    seen = build.sighting(job=None if job is None else build.job_file(**job))

    found = evidence.worker_evidence("w0", build.snapshot(seen), now=build.ago(0))

    assert found is not None
    assert found.health_acts is acts


def test_job_with_steps_has_stuck_limits_and_gpu_durations() -> None:
    seen = build.sighting(job=build.job_file(step=100))
    place = build.evidence(gpu_saturated_s=7.0, gpu_last_busy_age_s=8.0)

    found = evidence.worker_evidence("w0", build.snapshot(seen, containers=(place,)), now=build.ago(0))

    assert found is not None
    assert (found.stuck_after_s, found.stuck_idle_s) == (600.0, 580.0)
    assert (found.gpu_saturated_s, found.gpu_last_busy_age_s) == (7.0, 8.0)
    assert (found.gang_stuck_after_s, found.gang_stuck_idle_s) == (None, None)


def test_rank_has_only_gang_limits() -> None:
    seen = build.sighting(job=build.job_file(step=100, ranks=2, gang="7/night"))

    found = evidence.worker_evidence("w0", build.snapshot(seen), now=build.ago(0))

    assert found is not None
    assert (found.gang_stuck_after_s, found.gang_stuck_idle_s) == (600.0, 580.0)
    assert (found.stuck_after_s, found.stuck_idle_s) == (None, None)


def test_pauses_do_not_count_in_stuck_limits() -> None:
    longest = (LongStep(took_s=305.0, began_s=9000.0), LongStep(took_s=5.0, began_s=9310.0))
    seen = build.sighting(job=build.job_file(step=100, step_max_s=305.0, longest=longest))
    places = [build.evidence(pauses=pauses) for pauses in ((), ((9001.0, 9301.0),))]

    found = [
        evidence.worker_evidence("w0", build.snapshot(seen, containers=(each,)), now=build.ago(0)) for each in places
    ]

    assert [each and (each.stuck_after_s, each.stuck_idle_s) for each in found] == [(6100.0, 6080.0), (600.0, 580.0)]


def test_container_of_a_silent_engine_has_no_name() -> None:
    seen = build.sighting()
    places = [build.evidence(container=build.container(listed=listed), gpu_idle_s=900.0) for listed in (True, False)]

    found = [
        evidence.worker_evidence("w0", build.snapshot(seen, containers=(each,)), now=build.ago(0)) for each in places
    ]

    assert [(each.container, each.gpu_idle_s, each.container_workers) for each in found if each] == [
        ("worker-0", 900.0, 1),
        (None, None, None),
    ]


def test_lost_time_only_of_gpus_with_a_uuid() -> None:
    lost_s = {"GPU-0": 0.0, "GPU-1": 42.0, "unidentified-2": 7.0}
    snapshot = build.snapshot(build.sighting(), gpu_lost_s=lost_s, lost_gpus=("GPU-1",))

    found = evidence.worker_evidence("w0", snapshot, now=build.ago(0))

    assert found is not None
    assert found.lost_gpus_s == {"GPU-1": 42.0}


@pytest.mark.parametrize(
    ("process", "ended", "workers"),
    [
        pytest.param(DeadProcess(ended=True, live_workers=2), True, 2, id="ended, and leads two live workers"),
        pytest.param(DeadProcess(ended=None, live_workers=None), None, None, id="unreadable"),
        pytest.param(None, None, None, id="unknown"),
    ],
)
def test_evidence_of_a_dead_worker_in_no_container_has_its_process(
    process: DeadProcess | None, ended: bool | None, workers: int | None
) -> None:
    bare = build.container(kind="process", id="process:9:1", pid=0)
    seen = build.sighting(alive=False, pid=None, container_id=bare.id, uid=1000)
    taken = replace(
        build.snapshot(seen),
        ended=(stopped_container_evidence(bare),),
        dead_processes={} if process is None else {"w0": process},
    )

    found = evidence.worker_evidence("w0", taken, now=build.ago(0))

    assert found is not None
    assert (found.container_id, found.worker_uid) == ("process:9:1", 1000)
    assert (found.process_ended, found.container_workers) == (ended, workers)


@pytest.mark.parametrize(
    "snapshot",
    [
        pytest.param(build.snapshot(workers=None), id="workers unread"),
        pytest.param(build.snapshot(), id="unknown worker"),
        pytest.param(
            build.snapshot(build.sighting(), taken=build.ago(0, boot_id=OTHER_BOOT)), id="sample from before a reboot"
        ),
    ],
)
def test_unknown_worker_has_no_evidence(snapshot: Snapshot) -> None:
    assert evidence.worker_evidence(build.worker_file().worker, snapshot, now=build.ago(0)) is None


def test_tenant_on_demand_has_the_age_of_the_sample() -> None:
    known = build.on_demand()
    snapshot = build.snapshot(build.sighting(), on_demand=(known,))

    found = evidence.on_demand_evidence(known.tenant, snapshot, now=build.ago(-1))

    assert found == replace(known, sample_age_s=1.0)
    assert evidence.on_demand_evidence("another", snapshot, now=build.ago(-1)) is None
    rebooted = replace(snapshot, taken=build.ago(0, boot_id=OTHER_BOOT))
    assert evidence.on_demand_evidence(known.tenant, rebooted, now=build.ago(0)) is None


def test_server_evidence_has_probe_and_unanswered_time() -> None:
    silent = build.server_evidence(answered=False, probe_failing_s=130.0)

    found = evidence.server_evidence("worker-0", build.snapshot(servers=(silent,)), now=build.ago(0))

    assert found is not None
    assert (found.container, found.probe, found.workers) == ("worker-0", "http", 0)
    assert (found.answered, found.probe_failing_s, found.restart_after_s) == (False, 130.0, 120.0)
    assert found.probe_unknown is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"probe": Unknown(reason="labels", message="a typing error")},
            "a typing error",
            id="invalid labels",
        ),
        pytest.param(
            {"answered": None, "unknown": Unknown(reason="address", message="no address")},
            "no address",
            id="not probed now",
        ),
    ],
)
def test_reason_for_a_missing_probe_is_published(given: dict[str, Unknown], message: str) -> None:
    snapshot = build.snapshot(servers=(build.server_evidence(**given),))

    found = evidence.server_evidence("worker-0", snapshot, now=build.ago(0))

    assert found is not None
    assert found.probe_unknown == message


def test_removed_container_has_only_host_evidence() -> None:
    found = evidence.server_evidence("gone", build.snapshot(), now=build.ago(0))

    assert found is not None
    assert (found.host, found.container, found.container_id, found.answered, found.probe) == (
        ("box-1", "gone", None, None, None)
    )
    assert evidence.server_evidence("worker-0", build.snapshot(servers=None), now=build.ago(0)) is None


def test_no_gpu_pids_without_gpu_readings() -> None:
    found = evidence.worker_evidence("w0", build.snapshot(build.sighting(), gpus=None), now=build.ago(0))

    assert found is not None
    assert (found.gpu_pids, found.gpu_simulated) == (None, None)


def test_container_without_a_probe_has_gpu_memory_and_worker_count() -> None:
    share = GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=5)
    place = build.evidence(container=build.container(folders=("w0",)), shares=(share,))

    empty = evidence.server_evidence("worker-0", build.snapshot(containers=(place,)), now=build.ago(0))
    taken = evidence.server_evidence(
        "worker-0", build.snapshot(build.sighting(), containers=(place,)), now=build.ago(0)
    )
    unread = build.snapshot(containers=(place,), workers=WorkerReadings(workers=(), unread=frozenset({"w0"})))
    doubtful = evidence.server_evidence("worker-0", unread, now=build.ago(0))
    blind = evidence.server_evidence("worker-0", build.snapshot(containers=(place,), workers=None), now=build.ago(0))

    counts = [None if found is None else found.workers for found in (empty, taken, doubtful, blind)]
    assert counts == [0, 1, None, None]
    assert empty is not None
    assert [[tenant.used_bytes for tenant in card.tenants] for card in empty.cards or ()] == [[5]]
