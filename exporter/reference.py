"""Writes docs/metrics.md and docs/settings-exporter.md from the collectors and the settings.

`python -m exporter.reference` writes them; `--check` writes nothing and exits 1 when a page lags behind the code.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors import COLLECTORS
from exporter.collectors.family import Family
from exporter.collectors.registry import SNAPSHOT_FRESH_S, SnapshotCollector
from exporter.collectors.thresholds import GAUGES
from exporter.model.gpu import GpuReadings
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import STAYS_MIN, STEPS_MIN
from exporter.model.worker import WorkerReadings
from exporter.settings import Settings
from gpuwarden import clock
from gpuwarden.docs_pages import unit_of
from gpuwarden.settings import table, write_pages

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"

NO_JOB: Final = "the worker runs no job"
NO_RANK: Final = f"{NO_JOB}, or no rank of a gang, is dead, or is older than the exporter"
UNKNOWN_AGE: Final = "it was stamped before the last reboot"
NO_WORKERS: Final = "`$GPUWARDEN_DIR` cannot be read"
NO_GPUS: Final = "there is no GPU source, or it failed"
NO_DRIVER: Final = "no driver of the source's is asked"
IT_IS_DOWN: Final = "the container does not run"
NO_WORK_READ: Final = f"{IT_IS_DOWN}; NaN while it is paused, its processes cannot be listed or read"
NOT_SHARED: Final = "no other live worker is in its container"
DEAD: Final = "its worker is dead"
NOT_ASKED: Final = "the container asks for no probe, or for one that cannot be"
NOT_MEASURED: Final = "the driver does not say"
NO_BUDGET: Final = "the container has no label with a VRAM budget, or one that cannot be read"
NO_TASKS: Final = "no `--task-dir` is given or can be read"
NO_PARTS: Final = "the GPU, or a process on its list, is not measured"

ABSENT: Final[Mapping[str, str]] = {
    "gpuwarden_worker_info": "the worker ended cleanly, or its file cannot be trusted",
    "gpuwarden_worker_alive": "the lock cannot be tested",
    "gpuwarden_worker_heartbeat_age_seconds": UNKNOWN_AGE,
    "gpuwarden_worker_heartbeat_other_boot": "as `gpuwarden_worker_info`",
    "gpuwarden_worker_heartbeat_timestamp_seconds": "as `gpuwarden_worker_info`",
    "gpuwarden_worker_cpu_still_seconds": "as `gpuwarden_worker_info`; NaN while its lock is not held, its "
    "process cannot be read, or it is paused",
    "gpuwarden_worker_gpu_idle_seconds": f"{NOT_SHARED}; NaN while any GPU of that is unknown",
    "gpuwarden_worker_ram_still_seconds": f"{NOT_SHARED}; NaN while its processes cannot be read",
    "gpuwarden_worker_io_still_seconds": f"{NOT_SHARED}; NaN while the kernel does not tell",
    "gpuwarden_worker_work_still_seconds": f"{NOT_SHARED}; NaN while any of the three is unknown",
    "gpuwarden_worker_dead_seconds": "its lock is held, or cannot be tested, or its container is paused",
    "gpuwarden_worker_dead_after_seconds": "as `gpuwarden_worker_info`",
    "gpuwarden_worker_loop_age_seconds": UNKNOWN_AGE,
    "gpuwarden_statefiles_invalid": "nothing is wrong with any file",
    "gpuwarden_workers_duplicate": NO_WORKERS,
    "gpuwarden_job_id": NO_JOB,
    "gpuwarden_job_overdue_id": f"{NO_JOB}, or nothing of it has lasted as long as it may",
    "gpuwarden_job_info": NO_JOB,
    "gpuwarden_job_elapsed_seconds": f"{NO_JOB}, or {UNKNOWN_AGE}",
    "gpuwarden_job_budget_seconds": "as `gpuwarden_worker_info`; NaN where the worker runs no job, or one without a "
    f"budget, or {DEAD}",
    "gpuwarden_job_phase": NO_JOB,
    "gpuwarden_job_phase_age_seconds": f"{NO_JOB}, or {UNKNOWN_AGE}",
    "gpuwarden_job_steps": NO_JOB,
    "gpuwarden_job_steps_planned": f"{NO_JOB}, or the job does not say",
    "gpuwarden_job_step_mean_seconds": f"{NO_JOB}, or it has done fewer than two steps",
    "gpuwarden_job_step_max_seconds": f"{NO_JOB}, or it has done fewer than two steps",
    "gpuwarden_job_items": NO_JOB,
    "gpuwarden_job_beat_age_seconds": f"{NO_JOB}; NaN while it is not armed yet, or {UNKNOWN_AGE}",
    "gpuwarden_job_beat_timestamp_seconds": f"{NO_JOB}, or it is not armed yet",
    "gpuwarden_job_stall_timeout_seconds": f"as `gpuwarden_worker_info`; NaN where the worker runs no job, while the "
    f"stall condition does not police it, or {DEAD}",
    "gpuwarden_job_stuck_after_seconds": "as `gpuwarden_worker_info`; NaN while "
    "`gpuwarden_job_stall_timeout_seconds` is, it is one rank of a gang, `--stuck-steps` is 0, it has done fewer than "
    f"{STEPS_MIN} steps, or, in another phase than `step` for which it asked no patience, has been there fewer than "
    f"{STAYS_MIN} times before, however many steps it has done",
    "gpuwarden_job_stuck_still_seconds": "absent, or NaN, as `gpuwarden_job_stuck_after_seconds`",
    "gpuwarden_gang_rank_attempt": NO_RANK,
    "gpuwarden_gang_rank_overdue_attempt": f"{NO_RANK}, or it has not been spinning for so long",
    "gpuwarden_gang_overdue_ranks": "as `gpuwarden_gang_rank_overdue_attempt`",
    "gpuwarden_gang_rank_spinning_seconds": f"{NO_RANK}; NaN while it is not armed yet, or its GPU, RAM, I/O or faults "
    "are unknown",
    "gpuwarden_gang_rank_stuck_after_seconds": f"{NO_RANK}; NaN as `gpuwarden_job_stuck_after_seconds`",
    "gpuwarden_job_stall_suspected": f"{NO_JOB}, the stall condition does not police it, or {DEAD}",
    "gpuwarden_job_quiet_seconds": "as `gpuwarden_worker_info`; NaN where the worker runs no job, while any of these "
    f"is unknown that counts, or {DEAD}",
    "gpuwarden_job_quiet_gpu_lost_seconds": f"{NO_JOB}, its class uses no GPU, or every GPU of its container is "
    f"measured; NaN while none of them is lost, any of these is unknown that counts, or {DEAD}",
    "gpuwarden_job_quiet_apart_seconds": f"{NOT_SHARED}; NaN as `gpuwarden_job_quiet_seconds`",
    "gpuwarden_job_health_window_seconds": "as `gpuwarden_worker_info`; NaN where the worker runs no job, "
    f"while its class uses no GPU or it says that it is idle, or {DEAD}",
    "gpuwarden_job_health_grace_seconds": f"{NO_JOB}, its class uses no GPU, or {DEAD}",
    "gpuwarden_task_info": f"its file is gone, or cannot be trusted, or {NO_TASKS}",
    "gpuwarden_task_alive": "as `gpuwarden_task_info`, or its process cannot be looked at",
    "gpuwarden_task_start_timestamp_seconds": "as `gpuwarden_task_info`",
    "gpuwarden_taskfiles_invalid": f"nothing is wrong with any file, or {NO_TASKS}",
    "gpuwarden_container_info": IT_IS_DOWN,
    "gpuwarden_container_managed": "kind is neither docker nor podman, whose containers alone have the label",
    "gpuwarden_container_memory_bytes": "no memory controller accounts for it, or it cannot be read",
    "gpuwarden_container_memory_anon_bytes": "as `gpuwarden_container_memory_bytes`; always for kind `process`",
    "gpuwarden_container_memory_working_set_bytes": "as `gpuwarden_container_memory_bytes`; always for kind `process`",
    "gpuwarden_container_ram_still_seconds": f"{IT_IS_DOWN}; NaN while `gpuwarden_container_memory_bytes` is absent, "
    "or it is paused",
    "gpuwarden_container_io_still_seconds": f"{NO_WORK_READ}, or the kernel does not tell their I/O",
    "gpuwarden_container_fault_still_seconds": NO_WORK_READ,
    "gpuwarden_container_cpu_still_seconds": NO_WORK_READ,
    "gpuwarden_container_work_still_seconds": f"{IT_IS_DOWN}; NaN while any of the three is",
    "gpuwarden_container_unmoved_seconds": f"{IT_IS_DOWN}; NaN while RAM, I/O or faults are unknown, or its GPU is, "
    "with its CPU time, or nobody has been able to look at that for less than 20 minutes",
    "gpuwarden_container_gpu_pegged_seconds": "it has no GPU but lost ones, another of its is unknown or used by no "
    "listed process, or it is paused",
    "gpuwarden_container_gpu_not_seen_busy_seconds": f"{IT_IS_DOWN}; NaN while it has no GPU and may be on one that "
    "does not tell, is paused, or one of its GPUs hangs or its source does not answer, for less than 20 minutes",
    "gpuwarden_container_gpu_lost_seconds": "it has no GPU, or each is measured; NaN while one is unknown and none is "
    "lost, or while beside a lost one another is unknown, or it is paused",
    "gpuwarden_container_gpu_idle_seconds": "it has no GPU; NaN while any of its GPUs is unknown or used by no listed "
    "process, or it is paused",
    "gpuwarden_container_gpu_utilization_ratio": "it has no GPU, or a process of it on this GPU is not measured; where "
    "it would be 0, also while `gpuwarden_container_gpu_attribution_missing` is 1",
    "gpuwarden_container_gpu_busiest_engine_ratio": "no engine did more for it than its utilisation there says, or "
    "that is unknown; always on AMD's and Intel's, whose utilisation is the busiest engine's already",
    "gpuwarden_container_gpu_attribution_missing": "it is on no GPU, or nobody tells just now how busy the GPU is",
    "gpuwarden_container_gpu_memory_bytes": "it is on no GPU; NaN while its processes, or what one of them holds "
    "there, are unknown, or the GPU is missing; where it would be 0, also while the GPU does more than the processes "
    "on its list, by more than the idle ratio, and more of its memory than `--vram-tie-mib` is in use beyond them, or "
    "an unknown amount",
    "gpuwarden_container_gpu_memory_peak_bytes": "its memory on this GPU was never measured",
    "gpuwarden_container_gpu_memory_budget_bytes": NO_BUDGET,
    "gpuwarden_container_gpu_memory_over_budget_bytes": "it holds no more than its budget, has none, or what it holds "
    "is unknown",
    "gpuwarden_container_recyclable": NO_BUDGET,
    "gpuwarden_container_gpu_memory_budget_invalid": "its budget can be read, or it has none",
    "gpuwarden_container_gpu_busy_seconds_total": "its share of this GPU was never measured",
    "gpuwarden_container_oom_kills_total": "no memory controller accounts for it, or the kernel does not count them",
    "gpuwarden_unknown_samples_total": "nothing of the container was unknown so far",
    "gpuwarden_server_info": NOT_ASKED,
    "gpuwarden_server_answered": f"{NOT_ASKED}; NaN while that is unknown",
    "gpuwarden_server_unanswered_seconds": f"{NOT_ASKED}; NaN while it was not asked lately, or is paused",
    "gpuwarden_server_silence_allowed_seconds": "as `gpuwarden_server_info`",
    "gpuwarden_server_invalid": "what the container asks for can be done, or it asks for nothing",
    "gpuwarden_driver_processes_killed_total": NO_DRIVER,
    "gpuwarden_driver_processes_abandoned": NO_DRIVER,
    "gpuwarden_gpu_xid_errors_total": "its reports are not waited for, and none came before; rare numbers: none so far",
    "gpuwarden_gpu_info": NO_GPUS,
    "gpuwarden_gpu_lost_seconds": "its driver does not answer, or says nothing of it for another reason",
    "gpuwarden_gpu_mig_info": "it is a whole GPU",
    "gpuwarden_gpu_utilization_ratio": NOT_MEASURED,
    "gpuwarden_gpu_memory_used_bytes": NOT_MEASURED,
    "gpuwarden_gpu_memory_size_bytes": NOT_MEASURED,
    "gpuwarden_gpu_memory_free_bytes": f"{NO_GPUS}; NaN while the driver does not say",
    "gpuwarden_gpu_memory_floor_bytes": f"{NO_GPUS}, or the GPU has no more memory than that in all",
    "gpuwarden_gpu_unattributed_utilization_ratio": NO_PARTS,
    "gpuwarden_gpu_unattributed_memory_bytes": NO_PARTS,
    "gpuwarden_gpu_memory_returning_bytes": f"{NO_GPUS}; NaN while the GPU's processes are not listed, or what is in "
    "use is unknown; for `--vram-return-s` after the first look, or one after so long a gap, and after one of "
    "unknown size has left",
    "gpuwarden_gpu_unplaced_utilization_ratio": "the GPU's processes are not listed, or such a one is not measured; or "
    "containers or workers cannot be listed, one of them has a name twice or cannot be inspected, or its processes are "
    "unknown",
    "gpuwarden_gpu_unplaced_memory_bytes": "as `gpuwarden_gpu_unplaced_utilization_ratio`",
    "gpuwarden_gpu_busy_seconds_total": "its utilisation was never measured",
    "gpuwarden_gpu_unknown_samples_total": "none of them was unknown so far",
    "gpuwarden_gpu_temperature_celsius": NOT_MEASURED,
    "gpuwarden_gpu_power_watts": NOT_MEASURED,
    "gpuwarden_gpu_power_limit_watts": NOT_MEASURED,
    "gpuwarden_gpu_sm_clock_hertz": NOT_MEASURED,
    "gpuwarden_gpu_memory_clock_hertz": NOT_MEASURED,
    "gpuwarden_gpu_throttled": NOT_MEASURED,
    "gpuwarden_gpu_ecc_errors_total": f"{NOT_MEASURED}, or ECC is off",
    "gpuwarden_gpu_ecc_lifetime_errors_total": f"{NOT_MEASURED}, or ECC is off",
    "gpuwarden_gpu_remapped_rows_total": f"{NOT_MEASURED}, or the GPU replaces no rows",
    "gpuwarden_gpu_row_remap_pending": "as `gpuwarden_gpu_remapped_rows_total`",
    "gpuwarden_gpu_row_remap_failed": "as `gpuwarden_gpu_remapped_rows_total`",
    "gpuwarden_gpu_pcie_replays_total": NOT_MEASURED,
    "gpuwarden_gpu_pcie_errors_total": f"{NOT_MEASURED}, of that kind",
    "gpuwarden_exporter_info": "never",
    "gpuwarden_build_info": "never",
    "gpuwarden_collector_success": "the source is not configured, or the newest look is stale (but for `sampler`)",
    "gpuwarden_collector_duration_seconds": "as `gpuwarden_collector_success`; for `sampler` before the first look",
    "gpuwarden_collector_last_success_timestamp_seconds": "as `gpuwarden_collector_success`, or it never did its work",
    "gpuwarden_sample_age_seconds": "before the first look",
    **dict.fromkeys((row.name for row in GAUGES), "never"),
    "gpuwarden_gpu_xid_fatal_info": "of numbers that are not named there",
}
"""When a series does not exist, or is NaN, by its name. One without its line here fails `--check` and the tests."""

_OTHER: Final = {
    "gpuwarden_job_id": "an id",
    "gpuwarden_job_overdue_id": "an id",
    "gpuwarden_container_gpu_utilization_ratio": "ratio, 0 or more",
    "gpuwarden_gpu_unplaced_utilization_ratio": "ratio, 0 or more",
    "gpuwarden_gpu_unattributed_utilization_ratio": "ratio, 1 or less",
    "gpuwarden_server_silent_threshold_ratio": "ratio, 1 or more",
    "gpuwarden_job_slowed_threshold_ratio": "ratio, more than 1",
}
"""Units that no name tells. Ratios: sums of what a driver tells of processes, and what those leave of the GPU."""


def main(argv: list[str] | None = None) -> int:
    """Write both pages, or with `--check` compare them; 1 when one lags."""
    pages = {"metrics.md": metrics_page, "settings-exporter.md": settings_page}
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="exporter.reference", about=about, docs=DOCS, argv=argv)


def metrics_page() -> str:
    """docs/metrics.md.

    Raises:
        KeyError: a series has no line in `ABSENT`.
        TypeError: a family is not made as all others are.
        ValueError: one does not say where its figures come from.
    """
    own = SnapshotCollector(lambda: None, host="", thresholds=Thresholds())
    rows = [
        *(row for families in COLLECTORS.values() for row in _rows(families(_empty_snapshot()))),
        *_rows(own.collect()),
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            "<!-- Written by `python -m exporter.reference`; change the collectors, not this page. -->",
            "",
            "What `/metrics` of the exporter publishes, for each host. Unknown is an absent series, never a zero; a",
            "measured nothing is a 0. What a rule compares that acts is NaN while it is unknown, where the last",
            "column says so: [why](rules.md#after-prometheus-was-down). What only a failed source or collector tells",
            "is absent meanwhile, which `gpuwarden_collector_success` tells; all but the exporter's own last rows are",
            f"absent while the newest look at the host is older than {SNAPSHOT_FRESH_S:g} s. Label `host` is not among",
            "these: the scrape configuration sets it.",
            "",
            "Of several sources each has GPUs or containers of its own; with `--simulate-gpu` all figures",
            "of GPUs are from its file. Beside these there are `process_*`, `python_gc_*` and `python_info` of the",
            "exporter's own process, as every Python program with Prometheus's client library has them.",
            "",
            "| series | type | labels | unit | meaning | source | absent when, or NaN |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def settings_page() -> str:
    """docs/settings-exporter.md."""
    return "\n".join(
        [
            "# Settings of the exporter",
            "",
            "<!-- Written by `python -m exporter.reference`; change exporter/settings.py, not this page. -->",
            "",
            "`gpuwarden exporter` takes each as an option or from the environment; an option wins.",
            "",
            *table(Settings),
            "",
        ]
    )


def _rows(families: Iterable[Metric]) -> Iterator[str]:
    for family in families:
        if not isinstance(family, Family):
            raise TypeError(f"{family.name} is made by neither gauge() nor counter() of exporter/collectors/family.py")
        name = family.sample_name
        if not family.source.strip():
            raise ValueError(f"{name} does not say where its figures come from: give it a source")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        unit = _OTHER.get(name) or unit_of(name, family.documentation)
        texts = _cell(family.documentation), _cell(family.source), ABSENT[name]
        yield f"| `{name}` | {family.type} | {labels} | {unit} | {' | '.join(texts)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _empty_snapshot() -> Snapshot:
    """A host where every source answers and nothing runs: each family is there, without samples."""
    return Snapshot(
        host="",
        taken=clock.stamp(),
        gpus=GpuReadings(source="", gpus=()),
        workers=WorkerReadings(workers=()),
        containers=(),
        sources=(),
        thresholds=Thresholds(),
    )


if __name__ == "__main__":
    sys.exit(main())
