"""How long a stall lasts with a real Prometheus, Alertmanager, exporter, remediator and worker.

The clock starts at the last step beat plus the stall timeout, and is read at the times in the ledger. Job and private
Docker engine are those of the demo. `measure` plays many stalls with short intervals. `measure_delivered` plays one
with the intervals of `gpuwarden up`, and counts from the last step beat.
"""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.figures import BenchError, Figure, Place, figure, progress, wait_until
from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Plan
from gpuwarden import state_file
from gpuwarden.job import HEARTBEAT_S, STALL_TIMEOUT_S, State
from remediator.plan import Outcome
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine, NoEngine, docker_engine
from testbed.gpu_simulator import Slot
from testbed.stage import DELIVERED, FAST, Stage, stage
from testbed.workers import WorkerOptions

SAMPLE_S: Final = 1.0  # the exporter's default
SILENCE_S: Final = 3.0
GRACE_S: Final = 2.0
ROUND_S: Final = 60.0
ACT_S: Final = 1.0
"""Target from an accepted alert to the first action, with the capture."""

ROUNDS_A_STAGE: Final = 5
"""Prometheus scrapes and evaluates at fixed offsets. A new stage draws new ones."""

WORKER: Final = "gpuwarden-bench-a"
SLOTS: Final = (Slot(worker=WORKER, gpus=("GPU-sim-a",)),)
# Steps of more than 1 s: every step beat is written.
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


_Stall = dict[str, float]
"""One stalled and fixed job: seconds from its last step beat to each event."""


def measure(place: Place, *, rounds: int) -> Iterator[Figure]:
    """Play one job per round, one at a time."""
    found: list[_Stall] = []
    with docker_engine(place.folder) as engine:
        where = _where(engine)
        while len(found) < rounds:
            work = place.folder / f"stage-{len(found)}"
            found += _play_stage(work, engine, begun=len(found), rounds=rounds)
            shutil.rmtree(work)
    base_s = SAMPLE_S + FAST.scrape_s + FAST.evaluate_s
    against = f"{SAMPLE_S:g} s sample + {FAST.scrape_s} s scrape + {FAST.evaluate_s} s evaluation"
    for name in found[0]:
        measured, what = [each[name] - SILENCE_S for each in found], f"stalled to {name.format(where=where)}"
        yield figure("chain", what, "s", measured, base=base_s, against=against)
    acts = [each[FENCED] - each[ACCEPTED] for each in found]
    yield figure(
        "chain", "accepted to the first act (job fenced)", "s", acts, base=ACT_S, against=f"{ACT_S:g} s wanted"
    )
    waits = [each[STOPPED] - each[ACCEPTED] for each in found]
    yield figure("chain", f"accepted to {where} stopped", "s", waits, base=GRACE_S, against=f"{GRACE_S:g} s stop grace")


def measure_delivered(place: Place) -> Iterator[Figure]:
    """Play one stall with every default."""
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
            **DELIVERED,
        )
        with scene as playing:
            playing.start_workers()
            progress(f"constants, one stall with a timeout of {STALL_TIMEOUT_S:g} s")
            found = play_stall(playing, timeout_s=STALL_TIMEOUT_S)
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


def _play_stage(work: Path, engine: Engine | NoEngine, *, begun: int, rounds: int) -> Iterator[_Stall]:
    with stage(work, engine, SLOTS, armed=True, stop_grace_s=GRACE_S) as scene:
        scene.start_workers()
        for number in range(begun, min(rounds, begun + ROUNDS_A_STAGE)):
            progress(f"chain, stall {number + 1} of {rounds}")
            yield play_stall(scene, timeout_s=SILENCE_S)


def play_stall(scene: Stage, *, timeout_s: float) -> _Stall:
    """Play one job that stalls in its first attempt."""
    job_id = scene.submit(SCRIPT, now=time.time(), stall_timeout_s=timeout_s)
    path = scene.chain.directory / WORKER / f"{WORKER}{state_file.JOB_SUFFIX}"
    last_beat_at = 0.0

    def is_fixed() -> bool:
        nonlocal last_beat_at
        scene.chain.check()
        last_beat_at = max(last_beat_at, _beat_at(path, job_id))
        is_open = any(each.job_id == job_id for each in scene.ledger.episodes.list_open())
        return scene.store.job(job_id).state is State.COMPLETED and not is_open

    wait_until(is_fixed, within_s=timeout_s + ROUND_S, what=f"job {job_id} is fixed and complete")
    episode = next((each for each in scene.ledger.reports.newest() if each.job_id == job_id), None)
    report = scene.ledger.reports.get(episode.episode_id) if episode else None
    if report is None or report.outcome != Outcome.FIXED or not last_beat_at:
        raise BenchError(f"job {job_id} is complete but was not fixed:\n{scene.chain.log_tail('execute')}")
    first = {f"{entry.act} {entry.what}": entry.at for entry in reversed(report.entries)}
    progress(f"  {next(entry.message for entry in report.entries if entry.step == 'begin')}")
    accepted = "SELECT min(received_at) FROM alerts WHERE episode_id = ?"
    times = {ACCEPTED: _time(scene.chain.ledger_url, accepted, report.episode_id)}
    times.update({name: first[each] for name, each in ENTRIES.items()})
    times[COMPLETED] = _time(scene.chain.queue_url, "SELECT ended_at FROM jobs WHERE job_id = ?", job_id)
    return {name: at - last_beat_at for name, at in times.items()}


def _beat_at(path: Path, job_id: int) -> float:
    """Time of the last step beat of the job's first attempt, Unix time; 0 without one."""
    try:
        found = state_file.parse_job(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0.0
    return found.step_beat.unix_s if (found.job_id, found.attempt) == (job_id, 1) and found.step_beat else 0.0


def _time(url: str, query: str, number: int) -> float:
    """A time that the journal does not have."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        return float(database.execute(query, (number,)).fetchone()[0])
