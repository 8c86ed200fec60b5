"""Simulated workers, which make the calls of `gpuwarden.worker.worker` to the real queue, one turn at a time.

A worker registers, claims, renews and checks its claim, and exits at once after it lost the claim. A failed call is
repeated in the next turn. A worker that is killed in a call leaves its files.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import HEARTBEAT_S
from gpuwarden.queue import JobStore, ReplacedError
from tests.races.judge import Judge
from tests.races.points import Killed, Points, Trouble
from tests.races.world import Does, Process, World

QUEUE: Final = "gpu"

Result = Literal["complete", "fail", "release"]
RESULTS: Final[tuple[Result, ...]] = ("complete", "fail", "release")


class Workers:
    """Runs the turns of the worker processes."""

    def __init__(self, world: World, store: JobStore, judge: Judge, points: Points) -> None:
        self._world = world
        self._store = store
        self._judge = judge
        self._points = points

    def turn(self, process: Process, trouble: Trouble | None = None) -> None:
        """Do the next call of the worker's loop, or of its lease thread."""
        match process.does:
            case Does.BEGINS:
                self._run_as(process, trouble, lambda: self._register(process))
            case Does.IDLES:
                self._run_as(process, trouble, lambda: self._claim(process))
            case Does.WORKS | Does.BUSY | Does.STALLED:
                self._run_as(process, trouble, lambda: self._keep(process))
            case Does.FROZEN | Does.ENDED:
                pass

    def finish(self, process: Process, result: Result, trouble: Trouble | None = None) -> None:
        """End a job, by its body or because the worker stops."""
        if process.does in (Does.WORKS, Does.BUSY) and process.job is not None:
            self._run_as(process, trouble, lambda: self._settle(process, result))

    def _run_as(self, process: Process, trouble: Trouble | None, act: Callable[[], None]) -> None:
        with self._points.program(process, trouble), self._world.clocks.of(process.slot.host):
            try:
                with suppress(DatabaseError):  # no answer: the next turn tries again
                    act()
            except Killed:
                self._world.end(process, cleanly=False)

    def _register(self, process: Process) -> None:
        slot = process.slot
        self._store.claims.register(
            QUEUE, host=slot.host, worker=slot.worker, incarnation=process.incarnation, now=self._store.now(),
            gpus=slot.gpus,
        )  # fmt: skip
        if process.does is Does.BEGINS:
            process.turns(Does.IDLES, self._world.clocks.steady_s)

    def _claim(self, process: Process) -> None:
        slot, newest = process.slot, self._judge.is_newest(process)
        try:
            if not self._heartbeat(process, model=None):
                return
            job = self._store.claims.claim(
                QUEUE, host=slot.host, worker=slot.worker, incarnation=process.incarnation, now=self._store.now()
            )
        except ReplacedError:
            self._judge.check_incarnation_answer(process, "claim", newest=newest, accepted=False)
            self._world.end(process, cleanly=True)
            return
        if job is not None and process.lives:
            process.job = (job.job_id, job.attempt)
            process.next_renewal_s = self._world.clocks.steady_s
            if process.does is Does.IDLES:
                process.turns(Does.WORKS, self._world.clocks.steady_s)

    def _heartbeat(self, process: Process, *, model: str | None) -> bool:
        slot, newest = process.slot, self._judge.is_newest(process)
        is_accepted = self._store.claims.heartbeat(
            host=slot.host, worker=slot.worker, queue=QUEUE, incarnation=process.incarnation, model=model,
            now=self._store.now(),
        )  # fmt: skip
        self._judge.check_incarnation_answer(process, "heartbeat", newest=newest, accepted=is_accepted)
        if not is_accepted:
            self._world.end(process, cleanly=model is None)
        return is_accepted

    def _keep(self, process: Process) -> None:
        if process.job is None:
            return
        (job_id, attempt), held, now_s = process.job, self._judge.holds(process), self._world.clocks.steady_s
        if now_s >= process.next_renewal_s:
            process.next_renewal_s = now_s + HEARTBEAT_S
            owned = self._store.claims.renew(
                job_id, attempt=attempt, incarnation=process.incarnation, now=self._store.now()
            )
            self._judge.check_attempt_answer(process, "renew", held=held, accepted=owned)
            owned = owned and self._heartbeat(process, model="m")
        else:
            owned = self._store.claims.owns(job_id, attempt=attempt, incarnation=process.incarnation)
            self._judge.check_attempt_answer(process, "owns", held=held, accepted=owned)
        if not owned and process.lives:
            self._world.end(process, cleanly=False)

    def _settle(self, process: Process, result: Result) -> None:
        if process.job is None:
            return
        (job_id, attempt), held, mine = process.job, self._judge.holds(process), process.incarnation
        now = self._store.now()
        if result == "complete":
            accepted = self._store.claims.complete(job_id, attempt=attempt, incarnation=mine, now=now)
        elif result == "fail":
            accepted = self._store.claims.fail_by_worker(
                job_id, attempt=attempt, incarnation=mine, reason="body", now=now
            )
        else:
            accepted = self._store.claims.release(job_id, attempt=attempt, incarnation=mine, now=now)
        self._judge.check_attempt_answer(process, result, held=held, accepted=accepted)
        if not process.lives:
            return
        if not accepted:
            self._world.end(process, cleanly=False)
        elif result == "release":
            self._world.end(process, cleanly=True)
        else:
            process.job = None
            process.turns(Does.IDLES, self._world.clocks.steady_s)
