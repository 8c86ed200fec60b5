"""One scene per acting alert: the series of a fault, for `test_rules_in_general`.

A new acting rule needs an entry here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

LIMIT_S: Final = 130
"""Every timeout, seconds. Only with a scrape interval of 1 s a scrape hits it."""
FIXED_S: Final = 247
END_S: Final = 300

SLOT: Final = 'instance="a:9", host="a", worker="w", container="c"'
TENANT: Final = 'instance="a:9", host="a", container="c"'
ON_DEMAND: Final = 'instance="a:9", host="a", tenant="t"'
OF_HOST: Final = 'instance="a:9", host="a"'
JOB: Final = ("gpuwarden_job_overdue_id", SLOT + ', attempt="1", incarnation="i"', 7.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An alert on durations: series that grow until the end of the fault, and constant series with values."""

    grow: tuple[tuple[str, str], ...]
    stay: tuple[tuple[str, str, float], ...] = field(default=())


FAULTS: Final[Mapping[str, Fault]] = {
    "GpuwardenJobOverBudget": Fault(
        grow=(("gpuwarden_job_elapsed_seconds", SLOT),), stay=(JOB, ("gpuwarden_job_budget_seconds", SLOT, LIMIT_S))
    ),
    "GpuwardenJobStalled": Fault(
        grow=(
            ("gpuwarden_job_step_beat_age_seconds", SLOT),
            ("gpuwarden_job_inactive_seconds", SLOT),
        ),
        stay=(JOB, ("gpuwarden_job_stall_timeout_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenSharedJobStalled": Fault(
        grow=(
            ("gpuwarden_job_step_beat_age_seconds", SLOT),
            ("gpuwarden_job_inactive_in_shared_container_seconds", SLOT),
        ),
        stay=(JOB, ("gpuwarden_job_stall_timeout_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenJobUnhealthy": Fault(
        grow=(
            ("gpuwarden_job_elapsed_seconds", SLOT),
            ("gpuwarden_job_inactive_seconds", SLOT),
        ),
        stay=(
            JOB,
            ("gpuwarden_job_health_window_seconds", SLOT, LIMIT_S),
            ("gpuwarden_job_health_grace_seconds", SLOT, 0),
        ),
    ),
    "GpuwardenJobStuck": Fault(
        grow=(
            ("gpuwarden_job_step_beat_age_seconds", SLOT),
            ("gpuwarden_container_no_progress_seconds", TENANT),
        ),
        stay=(
            JOB,
            ("gpuwarden_job_stuck_after_seconds", SLOT, LIMIT_S),
            ("gpuwarden_job_stuck_idle_seconds", SLOT, LIMIT_S),
        ),
    ),
    "GpuwardenGangStuck": Fault(
        grow=(("gpuwarden_gang_rank_spinning_seconds", SLOT),),
        stay=(
            (
                "gpuwarden_gang_rank_overdue_attempt",
                SLOT + ', gang="7", rank="0", job_id="7", attempt="1", incarnation="i"',
                1,
            ),
            ("gpuwarden_gang_rank_attempt", SLOT + ', gang="7", rank="0"', 1),
            ("gpuwarden_gang_overdue_ranks", SLOT + ', gang="7"', 1),
            ("gpuwarden_gang_rank_stuck_after_seconds", SLOT, LIMIT_S),
        ),
    ),
    "GpuwardenJobGpuLost": Fault(
        grow=(("gpuwarden_job_inactive_gpu_lost_seconds", SLOT),),
        stay=(JOB, ("gpuwarden_job_health_window_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenWorkerDead": Fault(
        grow=(("gpuwarden_worker_heartbeat_age_seconds", SLOT), ("gpuwarden_worker_cpu_idle_seconds", SLOT)),
        stay=(JOB, ("gpuwarden_worker_dead_after_seconds", SLOT, LIMIT_S), ("gpuwarden_worker_alive", SLOT, 1)),
    ),
    "GpuwardenWorkerGone": Fault(
        grow=(("gpuwarden_worker_dead_seconds", SLOT), ("gpuwarden_worker_heartbeat_age_seconds", SLOT)),
        stay=(JOB, ("gpuwarden_worker_dead_after_seconds", SLOT, LIMIT_S), ("gpuwarden_worker_alive", SLOT, 0)),
    ),
    "GpuwardenServerHung": Fault(
        grow=(
            ("gpuwarden_server_probe_failing_seconds", TENANT),
            ("gpuwarden_container_gpu_idle_seconds", TENANT),
            ("gpuwarden_container_ram_idle_seconds", TENANT),
            ("gpuwarden_container_io_idle_seconds", TENANT),
            ("gpuwarden_server_page_fault_idle_seconds", TENANT),
        ),
        stay=(
            ("gpuwarden_server_info", TENANT + ', incarnation="i"', 1),
            ("gpuwarden_server_answered", TENANT, 1),
            ("gpuwarden_server_restart_after_seconds", TENANT, LIMIT_S),
        ),
    ),
    "GpuwardenOnDemandUp": Fault(
        grow=(("gpuwarden_on_demand_room_seconds", ON_DEMAND),),
        stay=(
            ("gpuwarden_on_demand_on", ON_DEMAND, 0),
            ("gpuwarden_on_demand_state_seconds", ON_DEMAND, 600),
            ("gpuwarden_demand_gate_after_threshold_seconds", OF_HOST, LIMIT_S),
            ("gpuwarden_demand_gate_min_threshold_seconds", OF_HOST, 600),
        ),
    ),
    "GpuwardenOnDemandDown": Fault(
        grow=(("gpuwarden_on_demand_short_seconds", ON_DEMAND), ("gpuwarden_on_demand_idle_seconds", ON_DEMAND)),
        stay=(
            ("gpuwarden_on_demand_on", ON_DEMAND, 1),
            ("gpuwarden_on_demand_state_seconds", ON_DEMAND, 600),
            ("gpuwarden_demand_gate_after_threshold_seconds", OF_HOST, LIMIT_S),
            ("gpuwarden_demand_gate_min_threshold_seconds", OF_HOST, 600),
            ("gpuwarden_demand_gate_idle_threshold_seconds", OF_HOST, LIMIT_S),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An alert on other series, each with a value per second; `None` is a missing sample.

    `seen` lists, for a scrape interval, seconds and the value of label `by` that fires then.
    """

    by: str
    series: tuple[tuple[str, str, Callable[[int], float | None]], ...]
    seen: Callable[[int], tuple[tuple[int, str | None], ...]]
    lasts_s: int = END_S


def step(before: float, after: float, moment: int = LIMIT_S) -> Callable[[int], float]:
    """One value before a moment, and another from it on."""
    return lambda at: before if at < moment else after


def first_scrape(moment: int, scrape_s: int) -> int:
    """Second of the first scrape at or after a moment."""
    return math.ceil(moment / scrape_s) * scrape_s


GPU: Final = 'host="a", gpu="G"'


def tenant(
    name: str, over: Callable[[int], float | None]
) -> tuple[tuple[str, str, Callable[[int], float | None]], ...]:
    """Series of a recyclable container and its excess over the budget; `None` if it has none."""
    its = f'host="a", container="{name}"'
    return (
        ("gpuwarden_container_gpu_memory_over_budget_bytes", f'{its}, gpu="G"', over),
        ("gpuwarden_container_recyclable", its, lambda _: 1),
        ("gpuwarden_container_info", f'{its}, incarnation="{name}@1"', lambda _: 1),
    )


def until_fixed(over: Callable[[int], float]) -> Callable[[int], float | None]:
    """Values from the limit until the fault is fixed."""
    return lambda at: over(at) if LIMIT_S <= at < FIXED_S else None


def found_until_fixed(scrape_s: int, target: str) -> tuple[tuple[int, str | None], ...]:
    """Fire from the first scrape with the fault to the last."""
    found_s, fixed_s = first_scrape(LIMIT_S, scrape_s), first_scrape(FIXED_S, scrape_s)
    return (found_s - 1, None), (found_s, target), (fixed_s - 1, target), (fixed_s, None)


FELL_SILENT_S: Final = 395
HEARD_AGAIN_S: Final = 660
LOST_AFTER_S: Final = 180
EXPORTER: Final = 'instance=":9", job="gpuwarden-exporter"'


def host_lost(scrape_s: int) -> tuple[tuple[int, str | None], ...]:
    """Without a gateway: fire once the range has no scrape that succeeded, and until the next one."""
    due_s = first_scrape(FELL_SILENT_S, scrape_s) - scrape_s + LOST_AFTER_S + 1
    return (due_s - 1, None), (due_s, "b"), (HEARD_AGAIN_S - 1, "b"), (HEARD_AGAIN_S, None)


SCENES: Final[Mapping[str, Scene]] = {
    "GpuwardenVramRecycleDue": Scene(
        by="container",
        series=(
            ("gpuwarden_gpu_memory_free_bytes", GPU, lambda _: 100),
            ("gpuwarden_gpu_memory_floor_bytes", GPU, lambda _: 1500),
            ("gpuwarden_gpu_memory_reclaiming_bytes", GPU, lambda _: 0),
            *tenant("over", until_fixed(lambda _: 2010)),
        ),
        seen=lambda scrape_s: found_until_fixed(scrape_s, "over"),
    ),
    "GpuwardenGpuFaulty": Scene(
        by="gpu",
        series=(
            ("gpuwarden_gpu_lost_seconds", GPU, lambda at: LIMIT_S if LIMIT_S <= at < FIXED_S else 0),
            ("gpuwarden_gpu_lost_threshold_seconds", 'host="a"', lambda _: LIMIT_S),
            ("gpuwarden_node_gpu_memory_advertised_bytes", 'host="a"', lambda _: 0),
        ),
        seen=lambda scrape_s: found_until_fixed(scrape_s, "G"),
    ),
    "GpuwardenItemsFailing": Scene(
        by="worker",
        series=(
            ("gpuwarden_queue_run_items_failed", 'host="a", run="r", worker_host="a", worker="w"', step(5, 6)),
            ("gpuwarden_queue_run_items_done", 'host="a", run="r", worker_host="a", worker="w"', step(0, 1, FIXED_S)),
            ("gpuwarden_remediator_wrangle_activation_items", 'host="a"', lambda _: 5),
        ),
        seen=lambda scrape_s: found_until_fixed(scrape_s, "w"),
    ),
    "GpuwardenHostLost": Scene(
        by="host",
        series=(
            ("up", f'host="a", {EXPORTER}', lambda _: 1),
            ("up", f'host="b", {EXPORTER}', lambda at: 0 if FELL_SILENT_S <= at < HEARD_AGAIN_S else 1),
        ),
        seen=host_lost,
        lasts_s=720,
    ),
}


def firing_series(alert: str) -> list[tuple[str, str, float]]:
    """Series of an alert's scene while it fires, with labels and values."""
    if alert in FAULTS:
        fault = FAULTS[alert]
        return [*((name, labels, float(4 * LIMIT_S)) for name, labels in fault.grow), *fault.stay]
    series = ((name, labels, value_at(LIMIT_S)) for name, labels, value_at in SCENES[alert].series)
    return [(name, labels, value) for name, labels, value in series if value is not None]
