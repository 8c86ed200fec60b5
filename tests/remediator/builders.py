"""Alerts, evidence, containers, intents and facts with defaults.

The default is a stalled job: worker w1 in container c1 on box1, attempt 1 of job 7, inactive for 130 s of 120.
"""

from dataclasses import replace
from typing import Any, Final

from gpuwarden.evidence import GpuMemoryFacts, OnDemandFacts, OnDemandGpuFacts, ServerFacts, VramShareFacts, WorkerFacts
from gpuwarden.job import Condition, State
from gpuwarden.queue.items.tally import RunTally
from remediator.alert import Alert
from remediator.plan import (
    ContainerState,
    Episode,
    Facts,
    HeldJob,
    HostFacts,
    Intent,
    JobFacts,
    Kind,
    Limits,
    NodeFacts,
    RunFacts,
    Stage,
    Subject,
)
from remediator.remedies.guards import ProposedAction

HOST = "box1"
NOW = 1_800_000_000.0
HANDLE = "c" * 64
MIB = 2**20
KEY = f"{HANDLE}@2026-01-01T00:00:00Z"
REBORN = f"{HANDLE}@2026-01-01T00:05:00Z"
PIDS = frozenset({4001, 4002})
LIMITS = Limits(
    evidence_fresh_s=5.0, settle_timeout_s=60.0, restart_timeout_s=120.0, retries_max=3, requeue_avoid_gpu_s=600.0
)

LABELS = {
    "alertname": "GpuwardenJobStalled",
    "host": HOST,
    "worker": "w1",
    "container": "c1",
    "job_id": "7",
    "attempt": "1",
    "incarnation": "i1",
    "severity": "critical",
    "remedy": "restart_worker",
    "condition": "stall",
}


def alert(fingerprint: str = "f1", *, firing: bool = True, summary: str = "stalled", **labels: str | None) -> Alert:
    """An alert as the webhook parses it. A label of `None` is left out."""
    merged = {**LABELS, **labels}
    return Alert(
        fingerprint=fingerprint,
        firing=firing,
        labels={name: value for name, value in merged.items() if value is not None},
        annotations={"summary": summary},
        starts_at="2026-01-01T00:02:10Z",
    )


def server_alert(fingerprint: str = "s1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about the server in container c1."""
    of_server: dict[str, Any] = {
        "alertname": "GpuwardenServerHung", "remedy": "restart_container", "condition": "server", "incarnation": KEY,
        "worker": None, "job_id": None, "attempt": None,
    }  # fmt: skip
    return alert(fingerprint, firing=firing, **{**of_server, **labels})


def host_alert(fingerprint: str = "h1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about host box1, which is silent."""
    of_host: dict[str, Any] = {
        "alertname": "GpuwardenHostLost", "remedy": "hold_lost_host", "condition": "host_lost",
        "worker": None, "container": None, "incarnation": None, "job_id": None, "attempt": None,
    }  # fmt: skip
    return alert(fingerprint, firing=firing, **{**of_host, **labels})


def tenant_alert(fingerprint: str = "t1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about container c1, which is over its VRAM budget on GPU-0."""
    of_tenant: dict[str, Any] = {
        "alertname": "GpuwardenVramRecycleDue", "remedy": "recycle_container", "condition": "vram", "gpu": "GPU-0",
    }  # fmt: skip
    return server_alert(fingerprint, firing=firing, **{**of_tenant, **labels})


def gpu_alert(fingerprint: str = "g1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about GPU-0, which is faulty."""
    of_gpu: dict[str, Any] = {
        "alertname": "GpuwardenGpuFaulty", "remedy": "taint_node", "condition": "gpu_faulty", "gpu": "GPU-0",
        "worker": None, "container": None, "incarnation": None, "job_id": None, "attempt": None,
    }  # fmt: skip
    return alert(fingerprint, firing=firing, **{**of_gpu, **labels})


def demand_alert(fingerprint: str = "d1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about tenant c1, which has room to start."""
    of_tenant: dict[str, Any] = {
        "alertname": "GpuwardenOnDemandUp", "remedy": "scale_tenant", "condition": "demand_up", "tenant": "c1",
        "worker": None, "container": None, "incarnation": None, "job_id": None, "attempt": None,
    }  # fmt: skip
    return alert(fingerprint, firing=firing, **{**of_tenant, **labels})


def run_alert(fingerprint: str = "r1", *, firing: bool = True, **labels: str | None) -> Alert:
    """An alert about run r1, whose items fail on worker w1."""
    of_run: dict[str, Any] = {
        "alertname": "GpuwardenItemsFailing", "remedy": "wrangle", "condition": "items", "run": "r1",
        "container": None, "incarnation": None, "job_id": None, "attempt": None,
    }  # fmt: skip
    return alert(fingerprint, firing=firing, **{**of_run, **labels})


def sent(fingerprint: str = "f1", *, status: str = "firing", **labels: str) -> dict[str, Any]:
    """One alert as Alertmanager 0.25 sends it."""
    return {
        "status": status,
        "labels": {**LABELS, **labels},
        "annotations": {"summary": "stalled", "description": "d", "runbook": "r"},
        "startsAt": "2026-01-01T00:02:10.123Z",
        "endsAt": "0001-01-01T00:00:00Z" if status == "firing" else "2026-01-01T00:03:00Z",
        "generatorURL": "http://prometheus/graph?g0.expr=up",
        "fingerprint": fingerprint,
    }


def payload(*alerts: Any, **changed: Any) -> dict[str, Any]:
    """A webhook body as Alertmanager 0.25 sends it."""
    return {
        "receiver": "gpuwarden",
        "status": "firing",
        "alerts": list(alerts),
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager",
        "version": "4",
        "groupKey": "{}:{}",
        "truncatedAlerts": 0,
        **changed,
    }


def evidence(**changed: Any) -> WorkerFacts:
    """Evidence of w1: by default a stalled job in a sample that is 0.3 s old."""
    default = WorkerFacts(
        host=HOST, worker="w1", sample_age_s=0.3, alive=True, worker_incarnation="i1", heartbeat_age_s=1.0,
        cpu_idle_s=0.0, dead_s=None, dead_after_s=30.0,
        container_kind="docker", container="c1", container_id=HANDLE, container_incarnation=KEY,
        container_workers=1, job_id=7, attempt=1, phase="step", phase_age_s=290.0, step=5,
        elapsed_s=300.0, budget_s=8100.0, stall_timeout_s=120.0, busy_timeout_s=900.0,
        step_beat_age_s=130.0, health_window_s=300.0, health_grace_s=360.0, gpus=["GPU-0"], gpu_simulated=False,
        gpu_idle_s=130.0, gpu_unknown=None,
        ram_bytes=2**30, ram_idle_s=130.0, ram_unknown=None,
        io_idle_s=130.0, page_fault_idle_s=130.0, container_cpu_idle_s=130.0,
        heavy_work_idle_s=9000.0, work_unknown=None,
        gpu_pids={"GPU-0": sorted(PIDS)},
    )  # fmt: skip
    return replace(default, **changed)


def server(**changed: Any) -> ServerFacts:
    """Evidence of the server in c1: by default without an answer for 130 s of 120, in a sample that is 0.3 s old."""
    default = ServerFacts(
        host=HOST, sample_age_s=0.3, container_kind="docker", container="c1", container_id=HANDLE,
        container_incarnation=KEY, probe="http", workers=0, answered=True, probe_failing_s=130.0, restart_after_s=120.0,
        server_fault_idle_s=130.0,
        probe_unknown=None, gpus=["GPU-0"], gpu_simulated=False, gpu_idle_s=130.0, gpu_unknown=None,
        ram_bytes=2**30, ram_idle_s=130.0, ram_unknown=None,
        io_idle_s=130.0, page_fault_idle_s=130.0, container_cpu_idle_s=130.0,
        heavy_work_idle_s=9000.0, work_unknown=None,
        gpu_pids={"GPU-0": sorted(PIDS)}, cards=None, unseen=[], nameless_gpus=[],
    )  # fmt: skip
    return replace(default, **changed)


def tenant(
    name: str = "c1", used_mib: int | None = 10_957, budget_mib: int | None = 2048, **changed: Any
) -> VramShareFacts:
    """The GPU memory of a container: by default c1, which holds 8909 MiB more than its budget."""
    incarnation = KEY if name == "c1" else f"{name}@1"
    default = VramShareFacts(
        container=name, incarnation=incarnation, recyclable=True,
        used_bytes=None if used_mib is None else used_mib * MIB,
        budget_bytes=None if budget_mib is None else budget_mib * MIB,
    )  # fmt: skip
    return replace(default, **changed)


def card(
    *tenants: VramShareFacts, free_mib: int | None = 400, returning_mib: int | None = 0, gpu: str = "GPU-0"
) -> GpuMemoryFacts:
    """The memory of a GPU: by default 400 MiB are free of a floor of 1536. Two containers within 256 MiB tie."""
    return GpuMemoryFacts(
        gpu=gpu, size_bytes=16_384 * MIB, free_bytes=None if free_mib is None else free_mib * MIB,
        floor_bytes=1536 * MIB, tie_bytes=256 * MIB, tenants=list(tenants),
        reclaiming_bytes=None if returning_mib is None else returning_mib * MIB,
    )  # fmt: skip


def tenant_facts(free: Intent | None = None, **changed: Any) -> Facts:
    """As `server_facts`, for container c1, which is confirmed to be most over its VRAM budget."""
    own = episode(
        free,
        remedy="recycle_container",
        condition=Condition.VRAM,
        conditions=frozenset({Condition.VRAM}),
        subject=Subject.TENANT,
        worker="c1",
        incarnation=KEY,
        job_id=None,
        attempt=None,
    )
    seen = server(probe=None, answered=None, probe_failing_s=None, restart_after_s=None, cards=[card(tenant())])
    return replace(server_facts(), **{"episode": own, "server": seen, **changed})


def on_demand(**changed: Any) -> OnDemandFacts:
    """Tenant c1 as the exporter returns it: it is off, and has had room for 75 s of 60 s."""
    default = OnDemandFacts(
        host=HOST, sample_age_s=0.5, tenant="c1", kind="docker", handle=HANDLE, on=False, needed_bytes=3000 * MIB,
        invalid=None, state_s=900.0, room_s=75.0, short_s=0.0, idle_s=None, cards=[on_demand_gpu()], after_s=60.0,
        idle_after_s=300.0, min_s=600.0,
    )  # fmt: skip
    return replace(default, **changed)


def on_demand_gpu(**changed: Any) -> OnDemandGpuFacts:
    """A GPU with 6000 MiB free."""
    default = OnDemandGpuFacts(
        gpu="GPU-0", free_bytes=6000 * MIB, reclaiming_bytes=0, reserved_bytes=0, floor_bytes=1536 * MIB
    )
    return replace(default, **changed)


def idle_on_demand(**changed: Any) -> OnDemandFacts:
    """Tenant c1 that is on and idle, on a GPU that has been under its floor for 75 s of 60 s."""
    cards = [on_demand_gpu(free_bytes=400 * MIB)]
    return on_demand(**{"on": True, "room_s": 0.0, "short_s": 75.0, "idle_s": 301.0, "cards": cards, **changed})


def on_demand_facts(*, on: bool = False, firing: bool = True, dry_run_recorded: bool = False, **changed: Any) -> Facts:
    """As `facts`, for tenant on demand c1, which is to be started; with `on`, which is to be stopped."""
    condition = Condition.DEMAND_DOWN if on else Condition.DEMAND_UP
    about = episode(
        remedy="scale_tenant",
        condition=condition,
        conditions=frozenset({condition}) if firing else frozenset(),
        subject=Subject.ON_DEMAND,
        worker="c1",
        incarnation=None,
        job_id=None,
        attempt=None,
        firing=firing,
        dry_run_recorded=dry_run_recorded,
    )
    default = facts(
        episode=about,
        evidence=None,
        container=container() if on else stopped(),
        job=None,
        on_demand=idle_on_demand() if on else on_demand(),
    )
    return replace(default, **changed)


def wish(**changed: Any) -> ProposedAction:
    """The proposed restart of container c1."""
    default = ProposedAction(
        episode_id=1, host=HOST, remedy="restart_worker", handle=HANDLE, key=KEY, message="silent for 130 s"
    )
    return replace(default, **changed)


def container(**changed: Any) -> ContainerState:
    """Container c1 as its engine reports it: by default it runs."""
    default = ContainerState(
        kind="docker",
        handle=HANDLE,
        name="c1",
        incarnation=KEY,
        running=True,
        managed=True,
        pids=PIDS,
        cgroup="/sys/fs/cgroup/docker/c1",
    )
    return replace(default, **changed)


def stopped(**changed: Any) -> ContainerState:
    """The container after its stop."""
    return container(**{"running": False, "pids": frozenset(), **changed})


def job(**changed: Any) -> JobFacts:
    """Job 7 as its queue returns it: by default its first attempt runs."""
    default = JobFacts(
        job_id=7, attempt=1, state=State.RUNNING, claimed_by="i1", attempts_max=20, watchdog_retries=0, retried=True
    )
    return replace(default, **changed)


FENCED_JOB: Final = job(state=State.FENCING)


def free(stage: Stage, **data: Any) -> Intent:
    """The intent to restart container c1, at `stage`."""
    known: dict[str, Any] = {
        "kind": "docker", "handle": HANDLE, "name": "c1", "gpus": ["GPU-0"], "pids": sorted(PIDS),
        "cgroup": "/sys/fs/cgroup/docker/c1",
    }  # fmt: skip
    return Intent(
        intent_id=1, kind=Kind.FREE, key=KEY, stage=stage, created_at=NOW, entered_at=NOW, data={**known, **data}
    )


def settle(stage: Stage) -> Intent:
    """The intent to settle attempt 1 of job 7, at `stage`."""
    return Intent(
        intent_id=2, kind=Kind.SETTLE, key="7/1", stage=stage, created_at=NOW, entered_at=NOW,
        data={"incarnation": "i1"},
    )  # fmt: skip


def episode(free: Intent | None = None, settle: Intent | None = None, **changed: Any) -> Episode:
    """The episode of the stalled job on w1: by default without an intent, and its alert fires."""
    default = Episode(
        episode_id=1,
        remedy="restart_worker",
        condition=Condition.STALL,
        host=HOST,
        worker="w1",
        opened_at=NOW,
        firing=True,
        conditions=frozenset({Condition.STALL}),
        incarnation="i1",
        job_id=7,
        attempt=1,
        free=free,
        settle=settle,
        dry_run_recorded=False,
    )
    return replace(default, **changed)


def server_episode(free: Intent | None = None, **changed: Any) -> Episode:
    """The episode of the server in c1: by default without an intent, and its alert fires."""
    default = episode(
        free,
        remedy="restart_container",
        condition=Condition.SERVER,
        conditions=frozenset({Condition.SERVER}),
        subject=Subject.SERVER,
        worker="c1",
        incarnation=KEY,
        job_id=None,
        attempt=None,
    )
    return replace(default, **changed)


def server_facts(free: Intent | None = None, **changed: Any) -> Facts:
    """As `facts`, for a server that is confirmed to hang."""
    default = facts(episode=server_episode(free), evidence=None, server=server(), job=None)
    return replace(default, **changed)


def held_job(**changed: Any) -> HeldJob:
    """Job 7 of box1 as its queue returns it: by default it runs, and its last heartbeat is 200 s old."""
    return replace(HeldJob(job_id=7, attempt=1, state=State.RUNNING, heard_s_ago=200.0), **changed)


def host(*jobs: HeldJob, **changed: Any) -> HostFacts:
    """Facts of box1: by default it has been silent for 200 s of 180, and one other host is alive."""
    default = HostFacts(jobs=jobs, shows_life=False, silent_for_s=200.0, accused=1, alive=1, taken=False)
    return replace(default, **changed)


def host_facts(*jobs: HeldJob, firing: bool = True, dry_run_recorded: bool = False, **changed: Any) -> Facts:
    """As `facts`, for a silent host. Other keywords change its `HostFacts`."""
    general = {name: changed.pop(name) for name in ("armed", "host", "unknown") if name in changed}
    about = episode(
        remedy="hold_lost_host",
        condition=Condition.HOST_LOST,
        conditions=frozenset({Condition.HOST_LOST}),
        subject=Subject.HOST,
        worker=HOST,
        incarnation=None,
        job_id=None,
        attempt=None,
        firing=firing,
        dry_run_recorded=dry_run_recorded,
    )
    default = facts(
        episode=about, evidence=None, container=None, container_known=False, job=None, host=host(*jobs, **changed)
    )
    return replace(default, **general)


def run_facts(tally: RunTally | None, *, firing: bool = True, dry_run_recorded: bool = False, **changed: Any) -> Facts:
    """As `facts`, for run r1 on box1. Other keywords change its `RunFacts`."""
    general = {name: changed.pop(name) for name in ("armed", "limits", "run", "unknown") if name in changed}
    about = episode(
        remedy="wrangle",
        condition=Condition.ITEMS,
        conditions=frozenset({Condition.ITEMS}),
        subject=Subject.RUN,
        worker="r1",
        incarnation=None,
        job_id=None,
        attempt=None,
        firing=firing,
        dry_run_recorded=dry_run_recorded,
    )
    found = replace(RunFacts(tally=tally, decided=False, done=False), **changed)
    default = facts(episode=about, evidence=None, container=None, container_known=False, job=None, run=found)
    return replace(default, **general)


def gpu_facts(*, firing: bool = True, dry_run_recorded: bool = False, armed: bool = True, **changed: Any) -> Facts:
    """As `facts`, for GPU-0 of box1, which is lost. Other keywords change its `NodeFacts`."""
    about = episode(
        remedy="taint_node",
        condition=Condition.GPU_FAULTY,
        conditions=frozenset({Condition.GPU_FAULTY}),
        subject=Subject.GPU,
        worker="GPU-0",
        incarnation=None,
        job_id=None,
        attempt=None,
        firing=firing,
        dry_run_recorded=dry_run_recorded,
    )
    node = NodeFacts(**{"fault": "GPU-0: lost for 61 s", "doubt": "the driver does not list GPU-0", **changed})
    return facts(episode=about, evidence=None, container=None, container_known=False, job=None, node=node, armed=armed)


def facts(free: Intent | None = None, settle: Intent | None = None, **changed: Any) -> Facts:
    """All facts that a remedy reads: by default of an armed remediator and a confirmed stall.

    By default the remediator and the container have run for an hour, and the intents have just reached their stages.
    """
    default = Facts(
        armed=True, limits=LIMITS, episode=episode(free, settle), evidence=evidence(), container=container(),
        container_known=True, job=job(), job_known=True, quiet_for_s=3600.0, runs_for_s=3600.0,
    )  # fmt: skip
    return replace(default, **changed)


def missing(text: str, *words: str) -> list[str]:
    """Words that a text lacks. A test of a message names its figures, names and commands, no sentence."""
    return [each for each in words if each not in text]
