"""The executor: the only loop that acts. Open episodes, facts, decide, record, act, record; again on a timer.

One per host, in a process of its own, under a lock beside the ledger. It holds nothing in memory that matters: killed
anywhere, the next one reads the ledger and the world, and goes on.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import structlog
from sqlalchemy import make_url

from gpuwarden.database import DatabaseError
from gpuwarden.errors import GpuwardenError
from gpuwarden.facts import WorkerFacts
from gpuwarden.job import State
from remediator import plan
from remediator.actuators import Actuator
from remediator.ledger import Ledger
from remediator.plan import ContainerState, Episode, Facts, Intent, JobFacts, Kind, Limits, Outcome, Stage
from remediator.queues import Queue
from remediator.remedies import REMEDIES
from remediator.witness import Witness, WorkerUnseenError

log: Final = structlog.get_logger("executor")

POLL_S: Final = 0.1
"""How often the loop looks whether the ledger has changed, seconds."""

AT_ONCE: Final = 8
"""Episodes worked on at the same time."""

STEPS_MAX: Final = 20
"""Steps of one episode before the others get their turn."""


class AlreadyExecutingError(GpuwardenError):
    """Another executor holds this ledger's lock."""


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the executor works with."""

    witness: Witness
    queue: Queue
    actuators: Mapping[str, Actuator]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How it goes about it; seconds."""

    armed: bool
    limits: Limits
    look_again_s: float
    tend_s: float
    stop_grace_s: float


class Executor:
    """Works the ledger's open episodes on one host."""

    def __init__(self, ledger: Ledger, *, host: str, hands: Hands, pace: Pace) -> None:
        self._ledger = ledger
        self._host = host
        self._hands = hands
        self._pace = pace
        self._waits: dict[int, str] = {}
        self._looking_since: dict[int, float] = {}
        self._at_work: dict[int, Future[None]] = {}
        self._errors = 0
        self._started_at = time.time()
        self._closing = threading.Event()

    def close(self) -> None:
        """End the loop after the step at hand."""
        self._closing.set()

    def run(self) -> None:
        """Go on until `close`."""
        changes = self._ledger.changes()
        next_look_s = next_tend_s = 0.0
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="episode") as pool:
            while not self._closing.is_set():
                try:
                    now_s = time.monotonic()
                    if changes.any() or now_s >= next_look_s:
                        next_look_s = now_s + self._pace.look_again_s
                        self._beat()
                        changes.any()  # our own beat is no news; whatever came before it is read now
                        self.look(pool)
                    if now_s >= next_tend_s:
                        next_tend_s = now_s + self._pace.tend_s
                        self._tend()
                except DatabaseError as error:
                    log.warning("the ledger does not answer; nothing is done until it does", because=str(error))
                    self._closing.wait(self._pace.look_again_s)
                except Exception:  # the loop outlives a defect in one round; it is counted, and published
                    self._errors += 1
                    log.exception("unexpected error")
                    self._closing.wait(self._pace.look_again_s)
                self._closing.wait(POLL_S)
        changes.close()

    def look(self, pool: ThreadPoolExecutor) -> None:
        """Take the new alerts, and give every open episode that is not at work its turn.

        A container that is slow to stop holds up its own episode only.
        """
        self._collect()
        while self._ledger.take_new(now=time.time()):
            pass
        episodes = [episode for episode in self._ledger.open_episodes() if episode.host == self._host]
        for closed in set(self._waits).difference(each.episode_id for each in episodes):
            del self._waits[closed]
            self._looking_since.pop(closed, None)
        for episode in episodes:
            if episode.episode_id not in self._at_work:
                self._at_work[episode.episode_id] = pool.submit(self._work, episode)

    def _collect(self) -> None:
        """Let go of what has finished, before the ledger is read: an episode read earlier may be out of date."""
        for episode_id, work in list(self._at_work.items()):
            if work.done():
                del self._at_work[episode_id]
                if (error := work.exception()) is not None:
                    self._errors += 1
                    log.error("unexpected error", episode=episode_id, exc_info=error)

    def _beat(self) -> None:
        self._ledger.beat(
            host=self._host,
            pid=os.getpid(),
            armed=self._pace.armed,
            started_at=self._started_at,
            errors=self._errors,
            now=time.time(),
        )

    def _tend(self) -> None:
        try:
            self._hands.queue.tend(now=time.time())
        except GpuwardenError as error:
            log.warning("the queue does not answer", because=str(error))

    def _work(self, episode: Episode | None) -> None:
        """Step one episode until it waits, closes, or has had its share.

        An act that is decided twice in a row did not take: it is tried again at the loop's pace, not at once.
        """
        acted: type[plan.Step] | None = None
        try:
            for _ in range(STEPS_MAX):
                if episode is None or self._closing.is_set():
                    return
                step = REMEDIES[episode.remedy].decide(self._facts(episode))
                if isinstance(step, plan.Wait):
                    self._wait(episode, step)
                    return
                self._waits[episode.episode_id] = ""
                if not isinstance(step, plan.Advance):
                    if acted is type(step):
                        self._closing.wait(self._pace.look_again_s)
                        return
                    acted = type(step)
                self._perform(episode, step)
                episode = self._ledger.episode(episode.episode_id)
        except GpuwardenError as error:
            log.warning("step failed; looking again", episode=episode and episode.episode_id, because=str(error))

    def _wait(self, episode: Episode, step: plan.Wait) -> None:
        """Waiting is told once for each reason, not once a second."""
        if self._waits.get(episode.episode_id) != step.reason:
            self._waits[episode.episode_id] = step.reason
            log.info("waiting", episode=episode.episode_id, worker=episode.worker, because=step.because)
            self._ledger.record(episode.episode_id, "decided", f"wait: {step.reason}", step.because, now=time.time())

    # --- facts

    def _facts(self, episode: Episode) -> Facts:
        unknown: list[str] = []
        evidence, worker_ended = self._evidence(episode, unknown)
        container, container_known = self._container(episode, evidence, unknown)
        job, job_known = self._job(episode, unknown)
        now = time.time()
        if len(unknown) > worker_ended:  # somebody was silent: a worker that is not seen is an answer
            self._looking_since.pop(episode.episode_id, None)
        return Facts(
            now=now,
            armed=self._pace.armed,
            limits=self._pace.limits,
            episode=episode,
            evidence=evidence,
            container=container,
            container_known=container_known,
            job=job,
            job_known=job_known,
            worker_ended=worker_ended,
            executing_since=self._started_at,
            looking_since=self._looking_since.setdefault(episode.episode_id, now),
            unknown="; ".join(unknown),
        )

    def _evidence(self, episode: Episode, unknown: list[str]) -> tuple[WorkerFacts | None, bool]:
        try:
            return self._hands.witness.about(episode.worker, host=self._host), False
        except WorkerUnseenError as error:
            unknown.append(str(error))
            return None, True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _container(
        self, episode: Episode, evidence: WorkerFacts | None, unknown: list[str]
    ) -> tuple[ContainerState | None, bool]:
        """The container promised to, once an intent names it; before that the one the evidence points at."""
        if episode.free is not None:
            kind, handle = episode.free.data["kind"], episode.free.data["handle"]
            group = episode.free.data.get("cgroup")
        elif evidence is not None and evidence.container_kind and evidence.container_id and evidence.container:
            kind, group = evidence.container_kind, None
            handle = evidence.container if kind == "process" else evidence.container_id
        else:
            return None, False
        actuator = self._hands.actuators.get(kind)
        if actuator is None:
            unknown.append(f"this remediator has no hands for containers of kind {kind}")
            return None, False
        try:
            return actuator.look(handle, cgroup=group), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _job(self, episode: Episode, unknown: list[str]) -> tuple[JobFacts | None, bool]:
        if episode.job_id is None:
            return None, True
        try:
            return self._hands.queue.job(episode.job_id), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    # --- acts

    def _perform(self, episode: Episode, step: plan.Step) -> None:
        """Do one step. No policy here: what to do was decided, and facts are read anew after it."""
        name = type(step).__name__.lower()
        log.info("step", episode=episode.episode_id, worker=episode.worker, step=name, because=step.because)
        match step:
            case plan.Close(outcome=outcome, because=because):
                self._ledger.close_episode(episode.episode_id, outcome, because, now=time.time())
            case plan.WouldAct(because=because):
                self._ledger.would_act(episode.episode_id, because, now=time.time())
            case plan.Begin():
                if not self._ledger.begin(episode, step, now=time.time()):
                    because = "that incarnation of the container was freed already"
                    self._ledger.close_episode(episode.episode_id, Outcome.SUPERSEDED, because, now=time.time())
            case plan.Withdraw(because=because):
                self._ledger.withdraw(episode.episode_id, because, now=time.time())
            case plan.Advance(kind=kind, stage=stage, because=because):
                intent = episode.free if kind is Kind.FREE else episode.settle
                if intent is not None:
                    self._advance(episode, intent, stage, f"{kind}: {stage}", because, act="saw")
            case plan.Fence() | plan.Requeue() | plan.Fail():
                self._settle(episode, step)
            case plan.Stop() | plan.Start():
                self._free(episode, step)
            case plan.Wait():
                raise AssertionError("a wait is not performed")

    def _settle(self, episode: Episode, step: plan.Fence | plan.Requeue | plan.Fail) -> None:
        intent, job_id, attempt = episode.settle, episode.job_id, episode.attempt
        if intent is None or job_id is None or attempt is None:
            raise AssertionError("a settle without a job was decided")
        queue, now = self._hands.queue, time.time()
        if isinstance(step, plan.Fence):
            holder: str = intent.data["incarnation"]
            if not queue.fence(job_id, attempt=attempt, incarnation=holder, trip=episode.trip, now=now):
                job = queue.job(job_id)
                if job is None or job.state is not State.FENCING or job.attempt != attempt:
                    return  # the job moved meanwhile; the next look decides anew
            self._advance(episode, intent, Stage.FENCED, "fence", step.because)
        elif isinstance(step, plan.Requeue):
            if queue.requeue(job_id, attempt=attempt, trip=episode.trip):
                self._advance(episode, intent, Stage.DONE, "requeue", step.because)
        elif queue.fail(job_id, attempt=attempt, because=step.because, now=now):
            self._advance(episode, intent, Stage.DONE, "fail", step.because)
            queue.tend(now=now)

    def _free(self, episode: Episode, step: plan.Stop | plan.Start) -> None:
        intent = episode.free
        if intent is None:
            raise AssertionError("a free without an intent was decided")
        actuator = self._hands.actuators[intent.data["kind"]]
        handle: str = intent.data["handle"]
        stage = Stage.STARTING if isinstance(step, plan.Start) else Stage.STOPPING
        tries = 1 + (int(intent.data.get("tries", 0)) if intent.stage is stage else 0)
        if isinstance(step, plan.Start):
            if self._advance(episode, intent, stage, "start", step.because, act="decided", data={"tries": tries}):
                self._try(episode, "start", lambda: actuator.start(handle))
            return
        before = actuator.look(handle)
        if before is None or before.incarnation != intent.key:
            return  # it ended or was restarted since the facts were read: that incarnation is over
        # What it had at the first try counts too: a process may leave its cgroup before the driver lets go of it.
        had = intent.data.get("pids", [])
        data = {
            "pids": sorted(before.pids.union(had)),
            "cgroup": before.cgroup or intent.data.get("cgroup"),
            "tries": tries,
        }
        if self._advance(episode, intent, stage, "stop", step.because, act="decided", data=data):
            # Nothing that can take its time stands between the look and the stop: the container could be another then.
            self._try(episode, "stop", lambda: actuator.stop(handle, grace_s=self._pace.stop_grace_s))
            self._clear_ghost(episode)

    def _advance(
        self,
        episode: Episode,
        intent: Intent,
        stage: Stage,
        step: str,
        because: str,
        *,
        act: str = "did",
        data: Mapping[str, object] | None = None,
    ) -> bool:
        return self._ledger.advance(
            intent,
            stage,
            episode_id=episode.episode_id,
            act=act,
            step=step,
            because=because,
            now=time.time(),
            data=data,
        )

    def _try(self, episode: Episode, step: str, act: Callable[[], None]) -> None:
        """Act after the decision is on record, and record how it went."""
        started_s = time.monotonic()
        try:
            act()
        except GpuwardenError as error:
            self._ledger.record(episode.episode_id, "failed", step, str(error), now=time.time())
            log.warning("act failed", episode=episode.episode_id, step=step, because=str(error))
            self._closing.wait(self._pace.look_again_s)
            return
        took_s = time.monotonic() - started_s
        self._ledger.record(episode.episode_id, "did", step, f"took {took_s:.1f} s", now=time.time())

    def _clear_ghost(self, episode: Episode) -> None:
        """Best effort: it never holds up the stop."""
        if episode.incarnation is None:
            return
        try:
            self._hands.queue.clear_busy_ghost(
                host=self._host, worker=episode.worker, incarnation=episode.incarnation, now=time.time()
            )
        except GpuwardenError as error:
            log.warning("the worker's row could not be aged", worker=episode.worker, because=str(error))


def take_lock(ledger_url: str) -> IO[str]:
    """Be the one executor of a SQLite ledger, for as long as the returned file is open.

    Raises:
        AlreadyExecutingError: another one is; the message says which process.
        GpuwardenError: the lock file cannot be opened.
    """
    ledger = Path(make_url(ledger_url).database or "").resolve()  # one file, one lock, however the URL spells it
    path = ledger.with_name(ledger.name + ".executor.lock")
    try:
        file = path.open("a+", encoding="ascii")
    except OSError as error:
        raise GpuwardenError(f"the executor's lock {path} cannot be opened ({error}): let this user write it") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise AlreadyExecutingError(
            f"another executor (pid {holder}) works this ledger and holds {path}: one acts, the other must not"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
