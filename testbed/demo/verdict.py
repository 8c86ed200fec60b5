"""Whether every link of the chain really happened: each is looked up afterwards in the part that must know."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpuwarden.job import State
from remediator.ledger.reports import EpisodeHistory
from testbed.demo import job_body
from testbed.demo.narration import ALERT
from testbed.stage import Stage, of_consequence

WINDOW = "10m"
MENDED: Final = (
    ("decided begin", "confirmed from the host's exporter"),
    ("did fence", "fenced"),
    ("did stop", "stopped"),
    ("saw free: dead", "seen dead"),
    ("did requeue", "requeued"),
    ("did start", "started again"),
)
"""What a mend is made of, in its order: the ledger's entry, and the link that it is."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link: what should have happened, whether it did, and what the part said."""

    job: str
    link: str
    ok: bool
    shown: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job of the demonstration and what must become of it."""

    job_id: int
    title: str
    script: job_body.Script
    mended: bool
    stall_timeout_s: float


def links(stage: Stage, cases: list[Case], before: dict[str, str]) -> Iterator[Link]:
    """Every link of every case. `before` holds each worker's container incarnation at the start."""
    for case in cases:
        stories = [story for story in stage.ledger.reports.newest() if story.job_id == case.job_id]
        yield from (
            _mended(stage, case, of_consequence(stories), before)
            if case.mended
            else _left_alone(stage, case, stories, before)
        )
        yield _finished(stage, case)
        yield _output(stage, case)


def _mended(stage: Stage, case: Case, stories: list[EpisodeHistory], before: dict[str, str]) -> Iterator[Link]:
    story = stage.ledger.reports.get(stories[0].episode_id) if stories else None
    worker = story.worker if story else "none"
    for series, name in (
        ("gpuwarden_job_beat_age_seconds", "exporter showed the silence"),
        ("gpuwarden_container_gpu_idle_seconds", "exporter showed the GPU idle"),
        ("gpuwarden_container_ram_still_seconds", "exporter showed the RAM still"),
    ):
        label = "worker" if "job" in series else "container"
        reached_s = _value(stage, f'max_over_time({series}{{{label}="{worker}"}}[{WINDOW}])')
        ok = reached_s is not None and reached_s >= case.stall_timeout_s
        yield _link(case, name, ok, f"up to {reached_s or 0:.1f} s, {case.stall_timeout_s:.0f} s allowed")
    fired = _value(
        stage, f'count_over_time(ALERTS{{alertname="{ALERT}",job_id="{case.job_id}",attempt="1"}}[{WINDOW}])'
    )
    yield _link(case, "Prometheus fired the rule", bool(fired), f"{fired or 0:.0f} evaluations")
    entries = story.entries if story else ()
    times = {f"{entry.act} {entry.what}": entry.at for entry in reversed(entries)}
    yield _link(
        case, "Alertmanager called the remediator", "saw alert: firing" in times, _at(story, times, "saw alert: firing")
    )
    earlier = "saw alert: firing"
    for step, name in MENDED:
        if step == "did stop" and ended_by_itself(case.script, times):
            yield _link(case, name, ok=True, shown="not needed: the fence had ended it")
            continue
        ok = step in times and earlier in times and times[step] >= times[earlier]
        yield _link(case, name, ok, _at(story, times, step))
        earlier = step
    after = stage.fleet.incarnation(worker) if story else ""
    changed = bool(after) and after != before.get(worker)
    yield _link(
        case, "the same container runs anew", changed, f"{worker}: another incarnation" if changed else "unchanged"
    )
    outcome = story.outcome if story else "no episode"
    ok = len(stories) == 1 and outcome == "mended"
    yield _link(case, "one episode, mended", ok, f"{len(stories)} episode(s), {outcome}")


def ended_by_itself(script: job_body.Script, times: Mapping[str, float]) -> bool:
    """Whether its worker was gone before it was to be stopped, which only one can be whose other threads run on.

    It sees the fence at its next heartbeat, and ends. `times` says when each entry was made, by act and step.
    """
    seen = times.get("saw free: dead")
    fenced_before = seen is not None and times.get("did fence", seen + 1) <= seen
    return not script.wedge_with_gil and "did stop" not in times and fenced_before


def _left_alone(stage: Stage, case: Case, stories: list[EpisodeHistory], before: dict[str, str]) -> Iterator[Link]:
    touched = {story.worker for story in stage.ledger.reports.newest()}
    alone = [worker for worker in before if worker not in touched]
    suspected = {worker: _value(stage, f'max_over_time(gpuwarden_job_stall_suspected{{worker="{worker}"}}[{WINDOW}])')
                 for worker in alone}  # fmt: skip
    seen = [worker for worker, value in suspected.items() if value]
    yield _link(case, "it was suspected, and could be seen to be", bool(seen), ", ".join(seen) or "by nobody")
    fired = _value(stage, f'count_over_time(ALERTS{{alertname="{ALERT}",job_id="{case.job_id}"}}[{WINDOW}])')
    yield _link(case, "no alert", not fired, f"{fired or 0:.0f} evaluations")
    yield _link(case, "no episode", not stories, f"{len(stories)} episode(s)")
    same = [worker for worker in alone if stage.fleet.incarnation(worker) == before[worker]]
    yield _link(case, "its container was not touched", bool(same) and same == alone, ", ".join(same))


def _finished(stage: Stage, case: Case) -> Link:
    job = stage.store.job(case.job_id)
    attempts = 2 if case.mended else 1
    ok = job.state is State.COMPLETED and job.attempt == attempts and job.watchdog_retries == attempts - 1
    return _link(
        case,
        f"attempt {attempts} finished",
        ok,
        f"{job.state}, attempt {job.attempt}, {job.watchdog_retries} retries",
    )


def _output(stage: Stage, case: Case) -> Link:
    """The picture is what an undisturbed run gives."""
    expected = job_body.read_picture(stage.data / f"{case.script.picture}.pgm")
    noisy = job_body.noise(expected)
    for _ in range(case.script.steps):
        expected = job_body.smooth(expected)
    path = stage.data / f"{case.script.picture}.clean.pgm"
    found = job_body.read_picture(path) if path.exists() else []
    ok = found == [[float(round(value)) for value in row] for row in expected]
    shown = f"noise {noisy:.0f} before, {job_body.noise(found):.2f} after" if found else "no output"
    return _link(case, "its output is right", ok, shown)


def _link(case: Case, name: str, ok: bool, shown: str) -> Link:
    return Link(job=f"job {case.job_id} ({case.title})", link=name, ok=ok, shown=shown)


def _at(story: EpisodeHistory | None, times: dict[str, float], step: str) -> str:
    return f"{times[step] - story.opened_at:+.1f} s" if story and step in times else "never"


def _value(stage: Stage, expression: str) -> float | None:
    found = stage.chain.query(f"max({expression})")
    return float(found[0]["value"][1]) if found else None
