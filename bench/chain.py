"""How long a wedge lasts once it may be called one: real Prometheus, Alertmanager, exporter, remediator and workers.

The clock starts when the condition becomes true: the last beat in the job's file plus the silence it is allowed. It is
read at the ledger's own times. The private engine, or none, is the demonstration's; so is the job.

`measure` plays many wedges with everything faster; `measure_delivered` plays one with every constant as `gpuwarden up`
has it, and counts from the last beat.
"""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.figures import BenchError, Figure, Place, figure, progress, until
from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Plan
from gpuwarden import state_file
from gpuwarden.job import HEARTBEAT_S, STALL_TIMEOUT_S, State
from remediator.plan import Outcome
from remediator.settings.settings import ExecuteSettings
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine, NoEngine, docker_engine
from testbed.gpu_simulator import Slot
from testbed.stage import FAST, Stage, stage
from testbed.workers import WorkerOptions

SAMPLE_S: Final = 1.0  # the exporter's default
SILENCE_S: Final = 3.0
GRACE_S: Final = 2.0
ROUND_S: Final = 60.0
ACT_S: Final = 1.0
"""What may lie between an alert that was accepted and the first act on its account, what is captured included."""

ROUNDS_A_STAGE: Final = 5
"""Prometheus scrapes and evaluates at fixed offsets: a new stage draws new ones, so that no lucky pair decides."""

WORKER: Final = "gpuwarden-bench-a"
SLOTS: Final = (Slot(worker=WORKER, gpus=("GPU-sim-a",)),)
# Steps over a second apart: every beat is written, and the last one in the file is the last there was.
SCRIPT: Final = Script(picture="bench", load_s=0.5, steps=3, step_s=1.1, wedge_attempts=1, wedge_after_step=2)
ACCEPTED: Final = "webhook accepted"
FENCED: Final = "job fenced"
STOPPED: Final = "{where} stopped"
COMPLETED: Final = "job completed by its second attempt"
ENTRIES: Final = {
    "confirmed on the host, intents written": "decided begin",
    FENCED: "did fence",
    STOPPED: "did stop",
    "seen dead": "saw free: dead",
    "job requeued": "did requeue",
    "{where} started again": "did start",
}


_Wedge = dict[str, float]
"""One job that wedged and was mended: seconds from its last beat to each link."""


def measure(place: Place, *, rounds: int) -> Iterator[Figure]:
    """One job a round, one at a time."""
    found: list[_Wedge] = []
    with docker_engine(place.folder) as engine:
        where = _where(engine)
        while len(found) < rounds:
            work = place.folder / f"stage-{len(found)}"
            found += _play(work, engine, begun=len(found), rounds=rounds)
            shutil.rmtree(work)
    base_s = SAMPLE_S + FAST.scrape_s + FAST.evaluate_s
    against = f"{SAMPLE_S:g} s sample + {FAST.scrape_s} s scrape + {FAST.evaluate_s} s evaluation"
    for name in found[0]:
        measured, what = [each[name] - SILENCE_S for each in found], f"wedged to {name.format(where=where)}"
        yield figure("chain", what, "s", measured, base=base_s, against=against)
    acts = [each[FENCED] - each[ACCEPTED] for each in found]
    yield figure(
        "chain", "accepted to the first act (job fenced)", "s", acts, base=ACT_S, against=f"{ACT_S:g} s wanted"
    )
    waits = [each[STOPPED] - each[ACCEPTED] for each in found]
    yield figure("chain", f"accepted to {where} stopped", "s", waits, base=GRACE_S, against=f"{GRACE_S:g} s stop grace")


_FAST_IN_STAGE: Final = ("stop_grace_s", "cooldown_s", "breaker_targets", "breaker_restarts")
"""Settings of the executor that a stage scales."""


def measure_delivered(place: Place) -> Iterator[Figure]:
    """One wedge, nothing scaled: the silence that a job is allowed by default, and the plan of `gpuwarden up`."""
    intervals = Intervals()
    with docker_engine(place.folder) as engine:
        scene = stage(
            place.folder / "stage-delivered",
            engine,
            SLOTS,
            armed=True,
            intervals=intervals,
            dead_after_s=Plan.dead_after_s,
            ram_idle_mib=Plan.ram_idle_mib,
            options=WorkerOptions(heartbeat_s=HEARTBEAT_S),
            **{name: ExecuteSettings.model_fields[name].default for name in _FAST_IN_STAGE},
        )
        with scene as playing:
            playing.start_workers()
            progress(f"constants, one wedge with {STALL_TIMEOUT_S:g} s of silence")
            found = _wedge(playing, silence_s=STALL_TIMEOUT_S)
        where = _where(engine)
    base_s = STALL_TIMEOUT_S + SAMPLE_S + intervals.scrape_s + intervals.evaluate_s
    against = (
        f"{STALL_TIMEOUT_S:g} s silence + {SAMPLE_S:g} s sample + {intervals.scrape_s} s scrape + "
        f"{intervals.evaluate_s} s evaluation"
    )
    for name, after_s in found.items():
        what = f"last beat to {name.format(where=where)}"
        yield figure("constants", what, "s", [after_s], base=base_s, against=against)


def _where(engine: Engine | NoEngine) -> str:
    return "container" if isinstance(engine, Engine) else "process"


def _play(work: Path, engine: Engine | NoEngine, *, begun: int, rounds: int) -> Iterator[_Wedge]:
    with stage(work, engine, SLOTS, armed=True, stop_grace_s=GRACE_S) as scene:
        scene.start_workers()
        for number in range(begun, min(rounds, begun + ROUNDS_A_STAGE)):
            progress(f"chain, wedge {number + 1} of {rounds}")
            yield _wedge(scene, silence_s=SILENCE_S)


def _wedge(scene: Stage, *, silence_s: float) -> _Wedge:
    job_id = scene.submit(SCRIPT, now=time.time(), stall_timeout_s=silence_s)
    path = scene.chain.directory / WORKER / f"{WORKER}{state_file.JOB_SUFFIX}"
    last_beat_at = 0.0

    def mended() -> bool:
        nonlocal last_beat_at
        scene.chain.check()
        last_beat_at = max(last_beat_at, _beat_at(path, job_id))
        return scene.store.job(job_id).state is State.COMPLETED and not scene.ledger.episodes.list_open()

    until(mended, within_s=silence_s + ROUND_S, what=f"job {job_id} is mended and done")
    story = next((each for each in scene.ledger.reports.newest() if each.job_id == job_id), None)
    whole = scene.ledger.reports.get(story.episode_id) if story else None
    if whole is None or whole.outcome != Outcome.FIXED or not last_beat_at:
        raise BenchError(f"job {job_id} was done without being mended:\n{scene.chain.log_tail('execute')}")
    first = {f"{entry.act} {entry.what}": entry.at for entry in reversed(whole.entries)}
    progress(f"  {next(entry.message for entry in whole.entries if entry.step == 'begin')}")
    accepted = "SELECT min(received_at) FROM alerts WHERE episode_id = ?"
    times = {ACCEPTED: _time(scene.chain.ledger_url, accepted, whole.episode_id)}
    times.update({name: first[each] for name, each in ENTRIES.items()})
    times[COMPLETED] = _time(scene.chain.queue_url, "SELECT ended_at FROM jobs WHERE job_id = ?", job_id)
    return {name: at - last_beat_at for name, at in times.items()}


def _beat_at(path: Path, job_id: int) -> float:
    """When the job's first attempt last beat, Unix time; 0 before it did, and for what is not its file."""
    try:
        found = state_file.parse_job(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0.0
    return found.beat.unix_s if (found.job_id, found.attempt) == (job_id, 1) and found.beat else 0.0


def _time(url: str, query: str, number: int) -> float:
    """A time that is in ledger or queue and in no account: when an alert was made durable, when a job ended."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        return float(database.execute(query, (number,)).fetchone()[0])
