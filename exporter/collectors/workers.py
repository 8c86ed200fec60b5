"""Workers: identity, liveness and heartbeat."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge, or_nan
from exporter.model.snapshot import Snapshot

_SLOT = ("worker", "container")


_UNKNOWN_AGE: Final = "its time is from before the last reboot"
_NO_WORKERS: Final = "`$GPUWARDEN_RUNTIME_DIR` cannot be read"
_NOT_SHARED: Final = "no other live worker is in its container"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by worker slot and container; only the info series has the identity."""
    readings = snapshot.workers
    if readings is None:
        return
    rows = [(reading, snapshot.container_of(reading)) for reading in readings.workers]
    keyed = [((reading.worker.worker, place.container.name if place else ""), reading) for reading, place in rows]
    yield gauge(
        "gpuwarden_worker_info",
        "A worker's identity; always 1.",
        (*_SLOT, "queue", "incarnation", "container_id", "container_incarnation"),
        (
            (
                (
                    reading.worker.worker,
                    place.container.name if place else "",
                    reading.worker.queue,
                    reading.worker.incarnation,
                    place.container.id if place else "",
                    place.container.incarnation if place else "",
                ),
                1.0,
            )
            for reading, place in rows
        ),
        source="worker file; the cgroup of its lock holder, and the engine of that container",
        absent="the worker ended cleanly, or its file is invalid",
    )
    yield gauge(
        "gpuwarden_worker_alive",
        "1 while the worker's process holds its lock; 0 if it died and left its files.",
        _SLOT,
        ((key, None if reading.alive is None else float(reading.alive)) for key, reading in keyed),
        source="the kernel's lock on the worker's lock file (`F_GETLK`)",
        absent="the lock cannot be tested",
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_age_seconds",
        "Time since the worker's process last refreshed its file, by CLOCK_BOOTTIME.",
        _SLOT,
        ((key, reading.worker.heartbeat.age_s(snapshot.taken)) for key, reading in keyed),
        source="worker file, against CLOCK_BOOTTIME at the sample",
        absent=_UNKNOWN_AGE,
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_other_boot",
        "1 if the worker's heartbeat is from before the last reboot and has no age, else 0.",
        _SLOT,
        ((key, float(reading.worker.heartbeat.age_s(snapshot.taken) is None)) for key, reading in keyed),
        source="boot id in the worker file, against `/proc/sys/kernel/random/boot_id`",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_heartbeat_timestamp_seconds",
        "When the worker's process last refreshed its file, Unix time.",
        _SLOT,
        ((key, reading.worker.heartbeat.unix_s) for key, reading in keyed),
        source="worker file",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_cpu_idle_seconds",
        "Time for which the worker's process has used no CPU time in any thread.",
        _SLOT,
        ((key, or_nan(snapshot.cpu_still_of(reading))) for key, reading in keyed),
        source="`/proc/PID/stat`, compared at each sample; restarts in state D",
        absent=(
            "as `gpuwarden_worker_info`; NaN while its lock is not held, its process cannot be read, or it is paused"
        ),
    )
    for name, help_text, value, source, absent in (
        (
            "gpu_idle_seconds",
            "Time for which a worker in a shared container has left every GPU of it idle.",
            "gpu_idle_s",
            "as `gpuwarden_container_gpu_idle_seconds`, for its own processes by `/proc/PID/stat`",
            f"{_NOT_SHARED}; NaN while one of the GPUs is unknown",
        ),
        (
            "ram_idle_seconds",
            "Time for which RAM of a worker in a shared container, less page cache, has stayed within the threshold.",
            "ram_idle_s",
            "`/proc/PID/statm` of its processes, compared at each sample with `--ram-idle-mib`",
            f"{_NOT_SHARED}; NaN while its processes cannot be read",
        ),
        (
            "io_idle_seconds",
            "Time for which I/O of a worker in a shared container has been at most the threshold.",
            "io_idle_s",
            "`/proc/PID/io` of its processes, compared at each sample with `--io-idle-kib-per-s`",
            f"{_NOT_SHARED}; NaN while the kernel does not report it",
        ),
        (
            "work_idle_seconds",
            "Time without I/O, page faults and CPU time of a worker in a shared container.",
            "work_idle_s",
            "`/proc/PID/io` and `/proc/PID/stat` of its processes, as `gpuwarden_container_work_idle_seconds`",
            f"{_NOT_SHARED}; NaN while one of the three is unknown",
        ),
    ):
        yield gauge(
            f"gpuwarden_worker_{name}",
            help_text,
            _SLOT,
            (
                (key, or_nan(getattr(own, value)))
                for key, reading in keyed
                if (own := snapshot.worker_evidence.get(reading.worker.worker)) is not None
            ),
            source=source,
            absent=absent,
        )
    yield gauge(
        "gpuwarden_worker_dead_seconds",
        "Time for which its lock has been free without a heartbeat, in one incarnation of its container.",
        _SLOT,
        ((key, snapshot.dead_s.get(reading.worker.worker)) for key, reading in keyed),
        source="lock and worker file, compared at each sample",
        absent="its lock is held, or cannot be tested, or its container is paused",
    )
    yield gauge(
        "gpuwarden_worker_dead_after_seconds",
        "A worker with a job is dead after this time without heartbeat and CPU time, or without its process.",
        _SLOT,
        ((key, snapshot.thresholds.dead_after_s) for key, _ in keyed),
        source="`--dead-after-s`",
        absent="as `gpuwarden_worker_info`",
    )
    yield gauge(
        "gpuwarden_worker_loop_age_seconds",
        "Time since the worker's main loop was last outside of a job's handler.",
        _SLOT,
        ((key, reading.worker.loop.age_s(snapshot.taken)) for key, reading in keyed),
        source="worker file, against CLOCK_BOOTTIME at the sample",
        absent=_UNKNOWN_AGE,
    )
    yield gauge(
        "gpuwarden_statefiles_invalid",
        "Invalid state files, by reason. Each affects only its own worker's series.",
        ("reason",),
        (((reason,), float(count)) for reason, count in sorted(readings.errors.items())),
        source="files in `$GPUWARDEN_RUNTIME_DIR`",
        absent="all files are valid",
    )
    yield gauge(
        "gpuwarden_workers_duplicate",
        "Worker files ignored because another has the same name.",
        (),
        (((), float(readings.duplicates)),),
        source="files in `$GPUWARDEN_RUNTIME_DIR`",
        absent=_NO_WORKERS,
    )
