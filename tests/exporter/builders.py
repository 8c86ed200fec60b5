"""Values with defaults, so that a test names only what matters to it."""

from typing import Any

from exporter.model.container import Container, ContainerEvidence, HealthCheck, Probe, RamUse, Server, ServerEvidence
from exporter.model.gpu import Gpu, GpuProcess, GpuReadings
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import TaskReading, WorkerReading, WorkerReadings
from gpuwarden.evidence import OnDemandFacts, OnDemandGpuFacts
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import JobFile, Stamp, TaskFile, WorkerFile

BOOT = "11111111-2222-3333-4444-555555555555"
NOW_S = 10_000.0
UNIX_AT_BOOT_S = 1_700_000_000.0
DOCKER_ID = "ab" * 32
MIB = 2**20


RAM = RamUse(usage_bytes=2048 * MIB, anon_bytes=1024 * MIB, working_set_bytes=1536 * MIB)


def ago(seconds: float, *, boot_id: str = BOOT, now_s: float = NOW_S) -> Stamp:
    """A stamp so many seconds before the fixed present."""
    at_s = now_s - seconds
    return Stamp(boottime_s=at_s, boot_id=boot_id, unix_s=UNIX_AT_BOOT_S + at_s)


def worker_file(**changes: Any) -> WorkerFile:
    given: dict[str, Any] = {
        "worker": "w0",
        "incarnation": "inc-w0",
        "queue": "gpu",
        "pid": 41,
        "started": ago(900),
        "heartbeat": ago(2),
        "loop": ago(300),
    }
    return WorkerFile(**(given | changes))


def job_file(**changes: Any) -> JobFile:
    given: dict[str, Any] = {
        "job_id": 7,
        "attempt": 1,
        "worker": "w0",
        "incarnation": "inc-w0",
        "job_class": JobClass.GPU,
        "model": "sdxl",
        "budget_s": 8100.0,
        "stall_timeout_s": 120.0,
        "started": ago(300),
        "phase": Phase.STEP,
        "phase_started": ago(200),
        "step_beat": ago(3),
        "step": 12,
        "steps_total": 30,
        "step_mean_s": 4.5,
        "step_max_s": 6.25,
        "items_done": 0,
        "items_failed": 0,
    }
    return JobFile(**(given | changes))


def sighting(**changes: Any) -> WorkerReading:
    given: dict[str, Any] = {
        "worker": worker_file(),
        "job": job_file(),
        "alive": True,
        "pid": 4001,
        "container_id": DOCKER_ID,
    }
    return WorkerReading(**(given | changes))


def task(**changes: Any) -> TaskReading:
    given: dict[str, Any] = {
        "task": TaskFile(task_id=123, pid=4567, pgid=4560, started_unix_s=UNIX_AT_BOOT_S + NOW_S - 60),
        "alive": True,
    }
    return TaskReading(**(given | changes))


def container(**changes: Any) -> Container:
    given: dict[str, Any] = {
        "kind": "docker",
        "id": DOCKER_ID,
        "name": "worker-0",
        "incarnation": f"{DOCKER_ID}@2024-05-01T10:00:00.000000001Z",
        "pid": 4001,
        "gpu_request": ("all",),
        "image": "worker:1",
    }
    return Container(**(given | changes))


def process(pid: int = 4001, utilization_ratio: float | None = 0.0, memory_bytes: int | None = 0) -> GpuProcess:
    return GpuProcess(pid=pid, utilization_ratio=utilization_ratio, memory_bytes=memory_bytes)


def gpu(index: int = 0, *processes: GpuProcess, **changes: Any) -> Gpu:
    """A GPU without unattributed use by default."""
    given: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "index": index,
        "name": "Test GPU",
        "utilization_ratio": sum(each.utilization_ratio or 0.0 for each in processes),
        "memory_used_bytes": sum(each.memory_bytes or 0 for each in processes),
        "memory_size_bytes": 16384 * MIB,
        "processes": processes,
    }
    return Gpu(**(given | changes))


def gpus(*found: Gpu) -> GpuReadings:
    return GpuReadings(source="test", gpus=found)


def evidence(**changes: Any) -> ContainerEvidence:
    given: dict[str, Any] = {
        "container": container(),
        "shares": (),
        "gpus": ("GPU-0",),
        "gpu_idle_s": 500.0,
        "gpu_unknown": None,
        "busy_s": {},
        "ram": RAM,
        "ram_idle_s": 500.0,
        "ram_unknown": None,
        "io_idle_s": 400.0,
        "page_fault_idle_s": 300.0,
        "cpu_idle_s": 200.0,
        "heavy_work_idle_s": 900.0,
        "heavy_page_fault_idle_s": 900.0,
    }
    return ContainerEvidence(**(given | changes))


def on_demand_gpu(**changes: Any) -> OnDemandGpuFacts:
    """A GPU with 6000 MiB free, which are all room."""
    given: dict[str, Any] = {
        "gpu": "GPU-0",
        "free_bytes": 6000 * MIB,
        "reclaiming_bytes": 0,
        "reserved_bytes": 0,
        "floor_bytes": 1536 * MIB,
    }
    return OnDemandGpuFacts(**(given | changes))


def on_demand(**changes: Any) -> OnDemandFacts:
    """A tenant that is off, and has had room for long enough."""
    given: dict[str, Any] = {
        "host": "box-1",
        "sample_age_s": 0.5,
        "tenant": "painter",
        "kind": "docker",
        "handle": DOCKER_ID,
        "on": False,
        "needed_bytes": 3000 * MIB,
        "invalid": None,
        "state_s": 900.0,
        "room_s": 75.0,
        "short_s": 0.0,
        "idle_s": None,
        "cards": [on_demand_gpu()],
        "after_s": 60.0,
        "idle_after_s": 300.0,
        "min_s": 600.0,
    }
    return OnDemandFacts(**(given | changes))


def probe(**changes: Any) -> Probe:
    given: dict[str, Any] = {"kind": "http", "restart_after_s": 120.0, "port": 8000, "target": "/health"}
    return Probe(**(given | changes))


def health(**changes: Any) -> HealthCheck:
    given: dict[str, Any] = {"status": "healthy", "failing_streak": 0, "newest": "1", "passed": True, "fresh_s": 130.0}
    return HealthCheck(**(given | changes))


def server(**changes: Any) -> Server:
    given: dict[str, Any] = {"probe": probe(), "address": "127.0.0.1"}
    return Server(**(given | changes))


def server_evidence(**changes: Any) -> ServerEvidence:
    given: dict[str, Any] = {
        "container": container(server=server()),
        "probe": probe(),
        "workers": 0,
        "answered": True,
        "probe_failing_s": 0.0,
    }
    return ServerEvidence(**(given | changes))


def snapshot(*sightings: WorkerReading, **changes: Any) -> Snapshot:
    """By default no GPU memory is on its way back."""
    given: dict[str, Any] = {
        "host": "box-1",
        "taken": ago(0),
        "gpus": gpus(gpu(0)),
        "workers": WorkerReadings(workers=sightings),
        "containers": (evidence(),),
        "sources": (),
        "thresholds": Thresholds(),
        "cpu_idle_s": {4001: 1.0},
        "servers": (),
    }
    given |= changes
    found = given["gpus"]
    nothing = {} if found is None else {each.uuid: 0 for each in found.gpus}
    return Snapshot(**({"reclaiming_bytes": nothing} | given))


NO_WORKERS = WorkerReadings(workers=())
