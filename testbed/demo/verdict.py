"""Check afterwards what each program recorded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpuwarden.job import State
from remediator.ledger.reports import EpisodeHistory
from testbed.demo import job_body
from testbed.demo.narration import ALERT
from testbed.stage import Stage, with_action

WINDOW = "10m"
RESTART_STEPS: Final = (
    ("decided begin", "confirmed by the exporter"),
    ("did fence", "fenced"),
    ("did stop", "stopped"),
    ("saw free: dead", "process ended"),
    ("did requeue", "requeued"),
    ("did start", "started again"),
)
"""Steps of a restart in order: ledger entry and name."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One check and its result."""

    job: str
    link: str
    ok: bool
    shown: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job of the demo and its expected end."""

    job_id: int
    title: str
    script: job_body.Script
    restarted: bool
    stall_timeout_s: float


def check_links(stage: Stage, cases: list[Case], before: dict[str, str]) -> Iterator[Link]:
    """Check every job. `before` holds each worker's incarnation at the start."""
    for case in cases:
        episodes = [episode for episode in stage.ledger.reports.newest() if episode.job_id == case.job_id]
        yield from (
            _check_restarted(stage, case, with_action(episodes), before)
            if case.restarted
            else _check_ignored(stage, case, episodes, before)
        )
        yield _check_finished(stage, case)
        yield _check_output(stage, case)


def _check_restarted(
    stage: Stage, case: Case, episodes: list[EpisodeHistory], before: dict[str, str]
) -> Iterator[Link]:
    episode = stage.ledger.reports.get(episodes[0].episode_id) if episodes else None
    worker = episode.worker if episode else "none"
    for series, name in (
        ("gpuwarden_job_step_beat_age_seconds", "exporter: no step beat"),
        ("gpuwarden_container_gpu_idle_seconds", "exporter: GPU idle"),
        ("gpuwarden_container_ram_idle_seconds", "exporter: RAM idle"),
    ):
        label = "worker" if "job" in series else "container"
        reached_s = _value(stage, f'max_over_time({series}{{{label}="{worker}"}}[{WINDOW}])')
        ok = reached_s is not None and reached_s >= case.stall_timeout_s
        yield _link(case, name, ok, f"up to {reached_s or 0:.1f} s, limit {case.stall_timeout_s:.0f} s")
    fired = _value(
        stage, f'count_over_time(ALERTS{{alertname="{ALERT}",job_id="{case.job_id}",attempt="1"}}[{WINDOW}])'
    )
    yield _link(case, "Prometheus: alert fired", bool(fired), f"{fired or 0:.0f} evaluations")
    entries = episode.entries if episode else ()
    times = {f"{entry.act} {entry.what}": entry.at for entry in reversed(entries)}
    yield _link(
        case, "Alertmanager: webhook called", "saw alert: firing" in times, _at(episode, times, "saw alert: firing")
    )
    earlier = "saw alert: firing"
    for step, name in RESTART_STEPS:
        if step == "did stop" and exited_after_fence(case.script, times):
            yield _link(case, name, ok=True, shown="not needed: exited after the fence")
            continue
        ok = step in times and earlier in times and times[step] >= times[earlier]
        yield _link(case, name, ok, _at(episode, times, step))
        earlier = step
    after = stage.fleet.incarnation(worker) if episode else ""
    changed = bool(after) and after != before.get(worker)
    yield _link(case, "same container restarted", changed, f"{worker}: new incarnation" if changed else "unchanged")
    outcome = episode.outcome if episode else "no episode"
    ok = len(episodes) == 1 and outcome == "fixed"
    yield _link(case, "one episode, fixed", ok, f"episodes: {len(episodes)}, {outcome}")


def exited_after_fence(script: job_body.Script, times: Mapping[str, float]) -> bool:
    """Whether the worker exited before it was stopped.

    Its other threads see the fence at the next heartbeat and exit. `times` is the time of each entry.
    """
    seen = times.get("saw free: dead")
    fenced_before = seen is not None and times.get("did fence", seen + 1) <= seen
    return not script.wedge_with_gil and "did stop" not in times and fenced_before


def _check_ignored(stage: Stage, case: Case, episodes: list[EpisodeHistory], before: dict[str, str]) -> Iterator[Link]:
    touched = {episode.worker for episode in stage.ledger.reports.newest()}
    alone = [worker for worker in before if worker not in touched]
    suspected = {worker: _value(stage, f'max_over_time(gpuwarden_job_stall_suspected{{worker="{worker}"}}[{WINDOW}])')
                 for worker in alone}  # fmt: skip
    seen = [worker for worker, value in suspected.items() if value]
    yield _link(case, "exporter: suspected", bool(seen), ", ".join(seen) or "no worker")
    fired = _value(stage, f'count_over_time(ALERTS{{alertname="{ALERT}",job_id="{case.job_id}"}}[{WINDOW}])')
    yield _link(case, "no alert", not fired, f"{fired or 0:.0f} evaluations")
    yield _link(case, "no episode", not episodes, f"episodes: {len(episodes)}")
    same = [worker for worker in alone if stage.fleet.incarnation(worker) == before[worker]]
    yield _link(case, "container not restarted", bool(same) and same == alone, ", ".join(same))


def _check_finished(stage: Stage, case: Case) -> Link:
    job = stage.store.job(case.job_id)
    attempts = 2 if case.restarted else 1
    ok = job.state is State.COMPLETED and job.attempt == attempts and job.watchdog_retries == attempts - 1
    return _link(
        case,
        f"attempt {attempts} finished",
        ok,
        f"{job.state}, attempt {job.attempt}, {job.watchdog_retries} retries",
    )


def _check_output(stage: Stage, case: Case) -> Link:
    """Compare the picture with the expected one."""
    expected = job_body.read_picture(stage.data / f"{case.script.picture}.pgm")
    noisy = job_body.noise(expected)
    for _ in range(case.script.steps):
        expected = job_body.smooth(expected)
    path = stage.data / f"{case.script.picture}.clean.pgm"
    found = job_body.read_picture(path) if path.exists() else []
    ok = found == [[float(round(value)) for value in row] for row in expected]
    shown = f"noise {noisy:.0f} before, {job_body.noise(found):.2f} after" if found else "no output"
    return _link(case, "output correct", ok, shown)


def _link(case: Case, name: str, ok: bool, shown: str) -> Link:
    return Link(job=f"job {case.job_id} ({case.title})", link=name, ok=ok, shown=shown)


def _at(episode: EpisodeHistory | None, times: dict[str, float], step: str) -> str:
    return f"{times[step] - episode.opened_at:+.1f} s" if episode and step in times else "never"


def _value(stage: Stage, expression: str) -> float | None:
    found = stage.chain.query(f"max({expression})")
    return float(found[0]["value"][1]) if found else None
