"""A worker as the queue sees one: the calls of `gpuwarden.worker.worker`, made to the real queue, a turn at a time.

It registers, claims, renews and watches its claim, and ends at once where it no longer owns it. A call that fails is
asked again at its next turn; a program killed in a call leaves its files behind.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from gpuwarden.db.engine import DatabaseError
from gpuwarden.job import HEARTBEAT_S
from gpuwarden.queue import JobStore, ReplacedError
from tests.races.judge import Judge
from tests.races.points import Killed, Points, Trouble
from tests.races.world import Does, Process, World

QUEUE: Final = "gpu"

Result = Literal["complete", "fail", "release"]
RESULTS: Final[tuple[Result, ...]] = ("complete", "fail", "release")


class Workers:
    """Gives processes their turns."""

    def __init__(self, world: World, store: JobStore, judge: Judge, points: Points) -> None:
        self._world = world
        self._store = store
        self._judge = judge
        self._points = points

    def turn(self, process: Process, trouble: Trouble | None = None) -> None:
        """What its loop, or its keeper, does next."""
        match process.does:
            case Does.BEGINS:
                self._as(process, trouble, lambda: self._register(process))
            case Does.IDLES:
                self._as(process, trouble, lambda: self._claim(process))
            case Does.WORKS | Does.BUSY | Does.WEDGED:
                self._as(process, trouble, lambda: self._keep(process))
            case Does.FROZEN | Does.ENDED:
                pass

    def finish(self, process: Process, result: Result, trouble: Trouble | None = None) -> None:
        """A job's end, as its body or a stop of its worker brings it."""
        if process.does in (Does.WORKS, Does.BUSY) and process.job is not None:
            self._as(process, trouble, lambda: self._settle(process, result))

    def _as(self, process: Process, trouble: Trouble | None, act: Callable[[], None]) -> None:
        with self._points.program(process, trouble), self._world.clocks.of(process.slot.host):
            try:
                with suppress(DatabaseError):  # the queue does not answer: asked again
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
            self._judge.heard(process, "claim", newest=newest, accepted=False)
            self._world.end(process, cleanly=True)
            return
        if job is not None and process.lives:
            process.job = (job.job_id, job.attempt)
            process.next_renewal_s = self._world.clocks.steady_s
            if process.does is Does.IDLES:
                process.turns(Does.WORKS, self._world.clocks.steady_s)

    def _heartbeat(self, process: Process, *, model: str | None) -> bool:
        slot, newest = process.slot, self._judge.is_newest(process)
        heard = self._store.claims.heartbeat(
            host=slot.host, worker=slot.worker, queue=QUEUE, incarnation=process.incarnation, model=model,
            now=self._store.now(),
        )  # fmt: skip
        self._judge.heard(process, "heartbeat", newest=newest, accepted=heard)
        if not heard:
            self._world.end(process, cleanly=model is None)
        return heard

    def _keep(self, process: Process) -> None:
        if process.job is None:
            return
        (job_id, attempt), held, now_s = process.job, self._judge.holds(process), self._world.clocks.steady_s
        if now_s >= process.next_renewal_s:
            process.next_renewal_s = now_s + HEARTBEAT_S
            owned = self._store.claims.renew(
                job_id, attempt=attempt, incarnation=process.incarnation, now=self._store.now()
            )
            self._judge.answered(process, "renew", held=held, accepted=owned)
            owned = owned and self._heartbeat(process, model="m")
        else:
            owned = self._store.claims.owns(job_id, attempt=attempt, incarnation=process.incarnation)
            self._judge.answered(process, "owns", held=held, accepted=owned)
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
                job_id, attempt=attempt, incarnation=mine, because="body", now=now
            )
        else:
            accepted = self._store.claims.release(job_id, attempt=attempt, incarnation=mine, now=now)
        self._judge.answered(process, result, held=held, accepted=accepted)
        if not process.lives:
            return
        if not accepted:
            self._world.end(process, cleanly=False)
        elif result == "release":
            self._world.end(process, cleanly=True)
        else:
            process.job = None
            process.turns(Does.IDLES, self._world.clocks.steady_s)
