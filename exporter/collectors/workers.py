"""Workers: who they are, whether they live, when they last beat."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge, or_nan
from exporter.model.snapshot import Snapshot

_SLOT = ("worker", "container")


_UNKNOWN_AGE: Final = "it was stamped before the last reboot"
_NO_WORKERS: Final = "`$GPUWARDEN_RUNTIME_DIR` cannot be read"
_NOT_SHARED: Final = "no other live worker is in its container"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by worker slot and container; identity on the info series alone."""
    readings = snapshot.workers
    if readings is None:
        return
    rows = [(sighting, snapshot.container_of(sighting)) for sighting in readings.workers]
    keyed = [((sighting.worker.worker, place.container.name if place else ""), sighting) for sighting, place in rows]
    yield gauge(
        "gpuwarden_worker_info",
        "A worker's identity; always 1.",
        (*_SLOT, "queue", "incarnation", "container_id", "container_incarnation"),
        (
            (
                (
                    sighting.worker.worker,
                    place.container.name if place else "",
                    sighting.worker.queue,
                    sighting.worker.incarnation,
                    place.container.id if place else "",
                    place.container.incarnation if place else "",
                ),
                1.0,
            )
            for sighting, place in rows
        ),
        source="worker file; the cgroup of its lock's holder, and who lists that container",
        absent="the worker ended cleanly, or its file cannot be trusted",
    )
    yield gauge(
        "gpuwarden_worker_alive",
        "1 while the worker's process holds its kernel lock; 0 when it died without removing its files.",
        _SLOT,
        ((key, None if sighting.alive is None else float(sighting.alive)) for key, sighting in keyed),
        source="the kernel's lock on the worker's lock file (`F_GETLK`)",
        absent="the lock cannot be tested",
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_age_seconds",
        "Time since the worker's process last refreshed its file, by CLOCK_BOOTTIME.",
        _SLOT,
        ((key, sighting.worker.heartbeat.age_s(snapshot.taken)) for key, sighting in keyed),
        source="worker file, against CLOCK_BOOTTIME at the look",
        absent=_UNKNOWN_AGE,
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_other_boot",
        "1 where the worker's heartbeat was stamped before the last reboot, and so has no age; else 0.",
        _SLOT,
        ((key, float(sighting.worker.heartbeat.age_s(snapshot.taken) is None)) for key, sighting in keyed),
        source="boot id in the worker file, against `/proc/sys/kernel/random/boot_id`",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_timestamp_seconds",
        "When the worker's process last refreshed its file, Unix time.",
        _SLOT,
        ((key, sighting.worker.heartbeat.unix_s) for key, sighting in keyed),
        source="worker file",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_cpu_idle_seconds",
        "For how long the worker's process has been seen to use no CPU time, all its threads together.",
        _SLOT,
        ((key, or_nan(snapshot.cpu_still_of(sighting))) for key, sighting in keyed),
        source="`/proc/PID/stat`, compared at each look; anew while it is in state D in `load`, `save` or `checkpoint`",
        absent=(
            "as `gpuwarden_worker_info`; NaN while its lock is not held, its process cannot be read, or it is paused"
        ),
    )
    for name, help_text, value, source, absent in (
        (
            "gpu_idle_seconds",
            "For how long a worker that shares its container has itself left every GPU of it idle.",
            "gpu_idle_s",
            "as `gpuwarden_container_gpu_idle_seconds`, of what `/proc/PID/stat` tells to be its processes",
            f"{_NOT_SHARED}; NaN while any GPU of that is unknown",
        ),
        (
            "ram_idle_seconds",
            "For how long the RAM of a worker that shares its container, less page cache, has kept within the delta.",
            "ram_idle_s",
            "`/proc/PID/statm` of its processes, compared at each look with `--ram-idle-mib`",
            f"{_NOT_SHARED}; NaN while its processes cannot be read",
        ),
        (
            "io_idle_seconds",
            "For how long a worker that shares its container has read and written no more than the threshold.",
            "io_idle_s",
            "`/proc/PID/io` of its processes, compared at each look with `--io-idle-kib-per-s`",
            f"{_NOT_SHARED}; NaN while the kernel does not tell",
        ),
        (
            "work_idle_seconds",
            "For how long I/O, page faults and CPU time of a worker that shares its container have all been still.",
            "work_idle_s",
            "`/proc/PID/io` and `/proc/PID/stat` of its processes, as `gpuwarden_container_work_idle_seconds`",
            f"{_NOT_SHARED}; NaN while any of the three is unknown",
        ),
    ):
        yield gauge(
            f"gpuwarden_worker_{name}",
            help_text,
            _SLOT,
            (
                (key, or_nan(getattr(own, value)))
                for key, sighting in keyed
                if (own := snapshot.worker_evidence.get(sighting.worker.worker)) is not None
            ),
            source=source,
            absent=absent,
        )
    yield gauge(
        "gpuwarden_worker_dead_seconds",
        "For how long its lock has been seen free and its heartbeat unmoved, in one incarnation of its container.",
        _SLOT,
        ((key, snapshot.dead_s.get(sighting.worker.worker)) for key, sighting in keyed),
        source="lock and worker file, compared at each look",
        absent="its lock is held, or cannot be tested, or its container is paused",
    )
    yield gauge(
        "gpuwarden_worker_dead_after_seconds",
        "A worker that owns a job is dead after this long without heartbeat and CPU time, or without its process.",
        _SLOT,
        ((key, snapshot.thresholds.dead_after_s) for key, _ in keyed),
        source="`--dead-after-s`",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_loop_age_seconds",
        "Time since the worker's main loop was last seen outside a job body.",
        _SLOT,
        ((key, sighting.worker.loop.age_s(snapshot.taken)) for key, sighting in keyed),
        source="worker file, against CLOCK_BOOTTIME at the look",
        absent=_UNKNOWN_AGE,
    )
    yield gauge(
        "gpuwarden_statefiles_invalid",
        "State files that cannot be trusted now, by reason; each costs its own worker's series only.",
        ("reason",),
        (((reason,), float(count)) for reason, count in sorted(readings.errors.items())),
        source="files in `$GPUWARDEN_RUNTIME_DIR`",
        absent="nothing is wrong with any file",
    )
    yield gauge(
        "gpuwarden_workers_duplicate",
        "Worker files left out because another claims the same name.",
        (),
        (((), float(readings.duplicates)),),
        source="files in `$GPUWARDEN_RUNTIME_DIR`",
        absent=_NO_WORKERS,
    )
