"""Watched hosts, GPUs and workers, as Prometheus has them. Pure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuwarden.format import count_of, format_duration, printable
from gpuwarden.job import JobClass

NAMES: Final = (
    *("gpu_info", "worker_info", "worker_alive", "job_id", "job_info", "job_phase", "job_step_beat_age_seconds"),
    *("job_steps", "job_steps_planned"),
)
"""Series that list GPUs and workers, without `gpuwarden_`."""

QUERY: Final = f'{{__name__=~"gpuwarden_({"|".join(NAMES)})"}}'

LISTED_MAX: Final = 50
"""Most workers that a page lists."""


@dataclass(frozen=True, kw_only=True)
class WatchedWorker:
    """One worker. `state` is idle, running, dead or unknown. Before the first step beat its age is `None`."""

    worker: str
    container: str
    state: str
    job: int | None = None
    phase: str | None = None
    step_beat_age_s: float | None = None
    job_class: str | None = None
    steps: int | None = None
    steps_planned: int | None = None


@dataclass(frozen=True, kw_only=True)
class WatchedHost:
    """One host with its number of GPUs, and its workers by name."""

    host: str
    gpus: int
    workers: Sequence[WatchedWorker]


def read_watched(hosts: Collection[str], result: Sequence[Mapping[str, Any]]) -> list[WatchedHost]:
    """Read `data.result` of `QUERY` for these hosts."""
    gpus: dict[str, set[str]] = {}
    workers: dict[tuple[str, str, str], dict[str, tuple[Mapping[str, str], float]]] = {}
    for each in result:
        labels, value = each["metric"], float(each["value"][1])
        name, host = labels.get("__name__", ""), labels.get("host", "")
        if name == "gpuwarden_gpu_info":
            gpus.setdefault(host, set()).add(labels["gpu"])
        elif "worker" in labels:
            slot = host, labels["worker"], labels.get("container", "")
            workers.setdefault(slot, {})[name] = labels, value
    return [
        WatchedHost(
            host=host,
            gpus=len(gpus.get(host, ())),
            workers=[_worker(slot, workers[slot]) for slot in sorted(workers) if slot[0] == host],
        )
        for host in sorted(hosts)
    ]


def list_watched(hosts: Sequence[WatchedHost]) -> Iterator[str]:
    """One line for each host and worker."""
    left = LISTED_MAX
    for each in hosts:
        counts = f"{count_of(each.gpus, 'GPU')}, {count_of(len(each.workers), 'worker')}"
        yield f"{'watched':10}{printable(each.host)}: {counts}"
        for worker in each.workers[:left]:
            yield f"  {_describe(worker)}"
        if len(each.workers) > left:
            yield f"  {count_of(len(each.workers) - left, 'more worker')}: see --json"
        left = max(0, left - len(each.workers))


def _worker(slot: tuple[str, str, str], series: Mapping[str, tuple[Mapping[str, str], float]]) -> WatchedWorker:
    _, worker, container = slot
    alive, job = series.get("gpuwarden_worker_alive"), series.get("gpuwarden_job_id")
    info = series.get("gpuwarden_job_info")
    phase, age = series.get("gpuwarden_job_phase"), series.get("gpuwarden_job_step_beat_age_seconds")
    if alive is None:
        state = "unknown"
    elif alive[1] == 0:
        state = "dead"
    else:
        state = "idle" if job is None else "running"
    return WatchedWorker(
        worker=worker,
        container=container,
        state=state,
        job=None if job is None else int(job[1]),
        phase=None if phase is None else phase[0].get("phase"),
        step_beat_age_s=None if age is None or math.isnan(age[1]) else age[1],
        job_class=None if info is None else info[0].get("job_class"),
        steps=_count(series.get("gpuwarden_job_steps")),
        steps_planned=_count(series.get("gpuwarden_job_steps_planned")),
    )


def _count(sample: tuple[Mapping[str, str], float] | None) -> int | None:
    return None if sample is None or math.isnan(sample[1]) else int(sample[1])


def _describe(worker: WatchedWorker) -> str:
    said = [f"{printable(worker.worker)} {worker.state}"]
    if worker.job is not None:
        said += [f"job {worker.job}", f"phase {printable(worker.phase or 'unknown')}"]
        age_s = worker.step_beat_age_s
        said.append("no step beat yet" if age_s is None else f"last step beat {format_duration(age_s)} ago")
        if worker.job_class == JobClass.CPU:
            said.append("no GPU used: only its budget ends it")
    return ", ".join(said)
