"""The golden scrape: one literal snapshot and its page.

`python -m tests.exporter.golden` rewrites golden.prom. Read the difference before you commit it.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from exporter.collectors import registry as scrape
from exporter.collectors.build_info import Build
from exporter.collectors.registry import SnapshotCollector
from exporter.evidence.container_history import stopped_container_evidence
from exporter.http.exposition import render
from exporter.model.container import GpuShare, RamUse, VramBudget
from exporter.model.gpu import GpuFigures, GpuTotals, MigInstance
from exporter.model.snapshot import DriverHealth, Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import TaskReadings, WorkerReadings
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import Stamp, TaskFile
from tests.exporter import builders as build

PATH = Path(__file__).with_name("golden.prom")
OTHER_ID = "cd" * 32
ENDED_ID = "ef" * 32
SPINNING_ID = "0d" * 32
BUILD = Build(version="0.0.0", revision="0123abc", python="3.11.0")

FIGURES = GpuFigures(
    temperature_celsius=61.0,
    power_watts=310.25,
    power_limit_watts=700.0,
    sm_clock_hertz=1.98e9,
    memory_clock_hertz=2.619e9,
    throttled=("sw_power_cap",),
    ecc_corrected=3,
    ecc_uncorrected=0,
    ecc_lifetime_corrected=12,
    ecc_lifetime_uncorrected=1,
    remapped_rows_corrected=2,
    remapped_rows_uncorrected=1,
    row_remap_pending=True,
    row_remap_failed=False,
    pcie_replays=9,
    pcie_errors={"correctable": 5, "nonfatal": 0, "fatal": 0},
)


def with_all_figures(use: RamUse) -> RamUse:
    """Give each field without a value one, so that a new metric has a sample at once."""
    missing: dict[str, Any] = {name: 7 for name in use._fields if name != "unknown" and getattr(use, name) is None}
    return use._replace(**missing)


SNAPSHOT = build.snapshot(
    gpus=build.gpus(
        build.gpu(0, build.process(4001, 0.0, 2048 * build.MIB), utilization_ratio=0.03,
                  memory_free_bytes=14000 * build.MIB, figures=FIGURES, xids_watched=True),
        build.gpu(1, processes=None, utilization_ratio=None, memory_used_bytes=None, unknown="GPU is lost",
                  lost=True),
        build.gpu(2, uuid="MIG-2", utilization_ratio=None, memory_used_bytes=512 * build.MIB, attribution="none",
                  mig=MigInstance(parent="GPU-2", number=0, gpu_instance=1, compute_instance=0)),
        # Its processes are known, their use is not.
        build.gpu(0, build.process(4002, None, 3 * build.MIB), uuid="GPU-amd", name="navi31", utilization_ratio=0.9,
                  source="amdgpu", node="renderD128", attribution="device"),
    ),
    workers=WorkerReadings(
        workers=(
            # Silent with a measured idle time of 0 s: not stalled, with a reason.
            build.sighting(job=build.job_file(step_beat=build.ago(130), step=24, items_done=2, items_failed=1)),
            # A video job without a step beat, without stall checks, on a lost GPU.
            build.sighting(
                worker=build.worker_file(worker="w1", incarnation="inc-w1"),
                job=build.job_file(
                    job_id=8, worker="w1", incarnation="inc-w1", job_class=JobClass.GPU_VIDEO, model=None,
                    budget_s=1800.0, stall_timeout_s=0.0, phase=Phase.LOAD, step_beat=None, step=0, steps_total=None,
                    step_mean_s=None, step_max_s=None,
                ),
                pid=4002,
                container_id=OTHER_ID,
            ),
            # A rank of a gang in its steps.
            build.sighting(
                worker=build.worker_file(worker="w4", incarnation="inc-w4"),
                job=build.job_file(
                    job_id=12, worker="w4", incarnation="inc-w4", step=24, ranks=2, gang="11/gang-0a1b", rank=1
                ),
                pid=4004,
            ),
            # Rank 0 of another gang: it spins.
            build.sighting(
                worker=build.worker_file(worker="w5", incarnation="inc-w5"),
                job=build.job_file(
                    job_id=13, attempt=2, worker="w5", incarnation="inc-w5", started=build.ago(2000),
                    phase_started=build.ago(1900), step_beat=build.ago(700), step=24,
                    ranks=2, gang="13/gang-0a1b", rank=0,
                ),
                pid=4005,
                container_id=SPINNING_ID,
            ),
            # Died with its job and its container.
            build.sighting(
                worker=build.worker_file(worker="w2", incarnation="inc-w2"),
                job=build.job_file(job_id=9, worker="w2", incarnation="inc-w2"),
                alive=False,
                pid=None,
                container_id=ENDED_ID,
            ),
            # No container and no job, last seen before a reboot; its lock cannot be tested.
            build.sighting(
                worker=build.worker_file(
                    worker="w3", incarnation="inc-w3", queue='odd "queue"\\', heartbeat=build.ago(5, boot_id="before")
                ),
                job=None,
                alive=None,
                pid=4003,
                container_id=None,
            ),
        ),
        errors={"not_json": 1},
        duplicates=1,
    ),
    containers=(
        build.evidence(
            container=build.container(
                managed=True, vram_budget=VramBudget(budget_bytes=1800 * build.MIB, recyclable=True)
            ),
            ram=with_all_figures(build.RAM._replace(oom_kills=1)),
            shares=(
                # It decodes and runs no kernel.
                GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=2048 * build.MIB, attributed=True,
                         busiest_ratio=0.4),
            ),
            gpu_idle_s=0.0,
            gpu_saturated_s=0.0,
            gpu_last_busy_age_s=0.0,
            busy_s={"GPU-0": 61.5},
            peak_bytes={"GPU-0": 2060 * build.MIB},
        ),
        build.evidence(
            # Its budget label is invalid.
            container=build.container(id=OTHER_ID, name="worker-1", managed=False,
                                      incarnation=f"{OTHER_ID}@2024-05-01T11:00:00Z",
                                      vram_budget=VramBudget(invalid=Unknown(reason="bad_budget", message="3 GB"))),
            shares=(
                GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0),
                GpuShare(gpu="GPU-1", utilization_ratio=None, memory_bytes=None),
                GpuShare(gpu="GPU-amd", utilization_ratio=None, memory_bytes=3 * build.MIB, attributed=False),
            ),
            gpu_idle_s=None,
            gpu_last_busy_age_s=90.0,
            gpu_unknown=Unknown(reason="not_listed", message="GPU-1: GPU is lost"),
            lost_gpus=("GPU-1",),
            gpu_lost_s=42.0,
            busy_s={"GPU-0": 0.0},
            ram_idle_s=0.0,
        ),
        build.evidence(
            # A pod with a shared GPU and no other values.
            container=build.container(
                kind="kubernetes", id="12" * 32, name="ml/llm-0/server", incarnation=f"uid@{'12' * 32}@3",
                namespace="ml", pod="llm-0", image="llm:1", vram_budget=VramBudget(budget_bytes=3000 * build.MIB),
            ),
            shares=(GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0),),
            ram=build.RAM._replace(oom_kills=0),
        ),
        build.evidence(
            container=build.container(
                id=SPINNING_ID, name="worker-3", incarnation=f"{SPINNING_ID}@2024-05-01T11:30:00Z"
            ),
            shares=(GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0),),
            gpu_idle_s=0.0, gpu_saturated_s=690.0, ram_idle_s=695.0, io_idle_s=695.0, page_fault_idle_s=695.0,
            cpu_idle_s=0.0,
        ),
        build.evidence(
            container=build.container(
                kind="process", id="process:4003:77", name="w3", incarnation="process:4003:77@boot", pid=4003,
                gpu_request=None, image=None,
            ),
            gpus=(),
            gpu_idle_s=None,
            ram=RamUse(usage_bytes=None),
            ram_idle_s=None,
            ram_unknown=Unknown(reason="unreadable", message="gone"),
            io_idle_s=None,
            work_unknown=Unknown(reason="io_unreadable", message="not reported"),
        ),
    ),
    ended=(
        stopped_container_evidence(
            build.container(id=ENDED_ID, name="worker-2", incarnation=f"{ENDED_ID}@2024-05-01T12:00:00Z", pid=0)
        ),
    ),
    dead_s={"w2": 12.5},
    servers=(
        # Armed and without an answer.
        build.server_evidence(container=build.container(name="llm"), probe_failing_s=130.5),
        # Paused, never answered.
        build.server_evidence(
            container=build.container(id=OTHER_ID, name="asr", incarnation=f"{OTHER_ID}@2024-05-01T11:00:00Z"),
            probe=build.probe(kind="docker", restart_after_s=60.0),
            answered=False,
            probe_failing_s=None,
            unknown=Unknown(reason="paused", message="the container is paused"),
        ),
        build.server_evidence(
            container=build.container(id=ENDED_ID, name="tts"),
            probe=Unknown(reason="other_host", message="no other place is called"),
            answered=None,
            probe_failing_s=None,
        ),
    ),
    sources=(
        SourceHealth(source="workers", success=True, duration_s=0.002, succeeded_unix_s=1_700_010_000.0),
        SourceHealth(source="gpu", success=True, duration_s=0.001, succeeded_unix_s=1_700_010_000.0),
        # Answered 15 minutes ago.
        SourceHealth(source="docker", success=False, duration_s=5.0, succeeded_unix_s=1_700_009_100.0),
    ),
    tasks=TaskReadings(
        tasks=(
            build.task(),
            build.task(task=TaskFile(task_id=124, pid=4568, pgid=4568, started_unix_s=1_700_000_000.5), alive=False),
            # Unknown whether its process lives.
            build.task(task=TaskFile(task_id=125, pid=4569, pgid=4569, started_unix_s=1_700_000_001.0), alive=None),
        ),
        errors={"not_json": 1},
    ),
    drivers={
        "gpu": DriverHealth(killed=2, abandoned=1, xids={("GPU-0", 31): 2, ("GPU-1", 79): 1, ("GPU-0", 154): 1}),
        "drm": DriverHealth(),
    },
    gpu_lost_s={"GPU-0": 0.0, "GPU-1": 60.0, "GPU-amd": 0.0},
    lost_gpus=("GPU-1",),
    gpu_totals={
        "GPU-0": GpuTotals(busy_s=73.5, unknown={("power_watts", "timeout"): 2}),
        "GPU-1": GpuTotals(),
    },
    unplaced=(
        GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0),
        # A process in no container, with unknown GPU use.
        GpuShare(gpu="GPU-amd", utilization_ratio=None, memory_bytes=4096),
    ),
    reclaiming_bytes={"GPU-0": 3 * 2**30, "GPU-amd": 0},
    cpu_idle_s={4001: 44.5, 4002: 0.0},
    worker_evidence={
        "w0": build.evidence(gpu_idle_s=130.5, ram_idle_s=140.0, io_idle_s=120.0),
        # Its GPU and I/O are unknown.
        "w1": build.evidence(gpu_idle_s=None, ram_idle_s=0.0, io_idle_s=None),
    },
    unknown={("worker-1", "gpu", "not_listed"): 12, ("w3", "ram", "unreadable"): 3},
    advertised_bytes=14000 * build.MIB,
    declared_bytes=3000 * build.MIB,
    on_demand=(
        build.on_demand(),
        # It runs, and its GPU is busy and has not enough free memory.
        build.on_demand(
            tenant="tenants/sketcher", kind="deployment", handle="tenants/sketcher", on=True, state_s=700.0, room_s=0.0,
            short_s=61.0, idle_s=0.0, cards=[build.on_demand_gpu(free_bytes=1000 * build.MIB)],
        ),
        build.on_demand(
            tenant="broken", needed_bytes=None, invalid="bad", room_s=None, short_s=None,
            cards=[build.on_demand_gpu(free_bytes=None)],
        ),
    ),
    took_s=0.0125,
)  # fmt: skip


def scraped(snapshot: Snapshot | None, *, now: Stamp | None = None) -> str:
    """The page of one scrape at `now`, by default half a second after the snapshot."""
    frozen = now or build.ago(-0.5)
    registry = CollectorRegistry()
    with (
        patch.object(scrape, "time", SimpleNamespace(monotonic=lambda: 0.0)),
        patch.object(scrape, "__version__", "0.0.0"),
        patch.object(scrape, "build_info", SimpleNamespace(here=lambda: BUILD)),
    ):
        registry.register(
            SnapshotCollector(lambda: snapshot, host="box-1", thresholds=Thresholds(), now=lambda: frozen)
        )
        return render(registry.collect()).decode()


def main() -> int:
    """Write golden.prom."""
    PATH.write_text(scraped(SNAPSHOT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
