"""A model of the queue in plain Python: the answer of each call, and each job, run and event after it.

It has no SQL and no locks. Its parts and methods have the names and arguments of the store.
"""
# ruff: noqa: ARG002 - the model ignores some arguments

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Final

from gpuwarden.job import (
    AFFINITY_S,
    AVOID_S,
    FENCE_S,
    FINAL,
    FRESH_S,
    LEASE_S,
    QUEUE_CLASSES,
    RECLAIMS_MAX,
    REQUEUE_PRIORITY,
    RETRY_WAIT_MAX_S,
    Condition,
    JobClass,
    JobId,
    Kind,
    Move,
    State,
    after,
    retry_wait_s,
)
from gpuwarden.queue import DrainedError, QueueSettings, ReplacedError, Slot, Submission
from gpuwarden.queue.claims import FATAL_JOBS_MAX, FATAL_WINDOW_S
from gpuwarden.queue.ranks import BEGUN
from gpuwarden.queue.sql import GHOST_AGE_S

Place = tuple[str, str]
"""Host and worker name of a slot."""

HELD: Final = frozenset({State.RUNNING, State.HOST_LOST})


@dataclass(kw_only=True)
class Task:
    """A job."""

    job_id: JobId
    queue: str
    job_class: JobClass
    model: str | None
    run_id: str | None
    priority: int
    attempts_max: int
    retries_max: int
    needs: frozenset[JobId]
    submitted_budget_s: float | None
    budget_s: float
    state: State
    queued_at: float | None
    attempt: int = 0
    holder: str | None = None
    place: Place | None = None
    lease: float | None = None
    retries: int = 0
    own_retries: int = 0
    retry_at: float = 0.0
    reclaims: int = 0
    claimed_at: float | None = None
    result: Any = None
    gang: JobId | None = None
    requeued_with_ranks: bool = False
    avoided: dict[tuple[str, str, str], float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Row:
    """A worker."""

    queue: str
    incarnation: str
    last_seen_at: float
    retired_incarnation: str | None = None
    draining_incarnation: str | None = None
    locked: bool = False
    unlocked_at: float = 0.0
    fatal: dict[JobId, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VisibleEvent:
    """An event for consumers; times only of completed or failed jobs."""

    kind: Kind
    job_id: JobId
    attempt: int
    run_id: str | None
    waited_s: float | None
    ran_s: float | None


class Records:
    """Jobs, runs, workers and events, and the common parts of moves.

    `happened` counts what the machine must reach.
    """

    def __init__(self, happened: Counter[str]) -> None:
        self.happened = happened
        self.jobs: dict[JobId, Task] = {}
        self.runs: dict[str, str] = {}
        self.workers: dict[Place, Row] = {}
        self.gpus: dict[Place, frozenset[str]] = {}
        self.quarantined: set[tuple[str, str, str]] = set()
        self.queues: dict[str, QueueSettings] = {}
        self.events: list[VisibleEvent] = []
        self.unheeded: list[VisibleEvent] = []
        self.positions: dict[str, int] = {}

    def ranks_of(self, job: Task) -> list[Task]:
        """All ranks of a job's gang, or the job alone."""
        return [each for each in self.jobs.values() if each is job or (job.gang and each.gang == job.gang)]

    def budget_s(self, queue: str, job_class: JobClass, asked_s: float | None) -> float | None:
        """The budget of an attempt, if set."""
        known = self.queues.get(queue)
        budgets = (asked_s, known.budget_s if known else None, job_class.budget_s)
        return next((each for each in budgets if each is not None), None)

    def pending(self, job: Task) -> int:
        """Number of needed jobs that are not completed."""
        return sum(self.jobs[each].state is not State.COMPLETED for each in job.needs)

    def has_gone_on(self, job_id: JobId, attempt: int) -> bool:
        """Whether a later attempt of the job runs."""
        return self.jobs[job_id].state in HELD and self.jobs[job_id].attempt > attempt

    def move(self, job: Task, move: Move) -> None:
        """Move a job, if its state allows it."""
        job.state = after(job.state, move)
        self.happened[f"move: {move}"] += 1

    def mine(self, job_id: JobId, attempt: int, incarnation: str) -> Task | None:
        """The job, if this attempt of this incarnation holds it."""
        job = self.jobs[job_id]
        return job if job.state in HELD and (job.attempt, job.holder) == (attempt, incarnation) else None

    def fenced(self, job_id: JobId, attempt: int) -> Task | None:
        """The job, if this attempt is fenced."""
        job = self.jobs[job_id]
        return job if job.state is State.FENCING and job.attempt == attempt else None

    def held_by(self, place: Place) -> list[Task]:
        """The jobs of a worker, lost ones too."""
        return [job for job in self.jobs.values() if job.state in HELD and job.place == place]

    def comes_back(self, job: Task, by: str) -> None:
        """The worker of a lost job reports again."""
        if job.state is State.HOST_LOST:
            self.move(job, Move.RETURN)
            self.happened[f"back by a {by}"] += 1

    def unclaimed(self, job: Task) -> None:
        """The job has no holder now."""
        job.holder = job.place = job.lease = None

    def given_away(self, job: Task, move: Move, now: float) -> None:
        """Take a job from its worker, or fail it at a cap."""
        lost = move is not Move.RELEASE
        if job.attempt >= job.attempts_max or (lost and job.reclaims + 1 >= RECLAIMS_MAX):
            self.over_as(job, Move.EXHAUST, now)
            return
        self.move(job, move)
        self.unclaimed(job)
        job.queued_at = now
        if lost:
            job.reclaims, job.priority = job.reclaims + 1, min(job.priority, REQUEUE_PRIORITY)

    def recall(self, queued: Iterable[Task], now: float, *, retries: int = 0) -> None:
        """Requeue the other ranks of requeued jobs. Fenced ones follow when they are settled."""
        back = [job for job in queued if job.gang is not None and job.state is State.QUEUED]
        gangs = {job.gang for job in back if not job.requeued_with_ranks}
        for job in back:
            job.requeued_with_ranks = False
        for job in [each for each in self.jobs.values() if each.gang in gangs]:
            if job.state is State.FENCING:
                job.requeued_with_ranks = True
                self.happened["recalled while it is fenced"] += 1
            elif job.state is State.QUEUED:
                job.priority = self._again(job)
            elif job.state in HELD | {State.FINISHED}:
                if job.attempt >= job.attempts_max:
                    self.over_as(job, Move.EXHAUST, now)
                    continue
                self.move(job, Move.RECALL)
                self.unclaimed(job)
                job.retries, job.queued_at, job.result = job.retries + retries, now, None
                job.priority = self._again(job)

    def _again(self, job: Task) -> int:
        return REQUEUE_PRIORITY if job.priority == BEGUN else min(job.priority, REQUEUE_PRIORITY)

    def over_as(self, job: Task, move: Move, now: float) -> None:
        """End a job by this move."""
        self.move(job, move)
        self.unclaimed(job)
        kind = Kind(job.state)
        claimed_at, queued_at = job.claimed_at or 0.0, job.queued_at
        waited_s = None if queued_at is None else claimed_at - queued_at
        self.write_event(kind, job, waited_s, now - claimed_at)
        if kind is Kind.FAILED:
            self.unheeded.append(self.events[-1])

    def cancel(self, which: Iterable[Task]) -> list[JobId]:
        """Cancel unfinished jobs; returns their ids."""
        its = sorted((job for job in which if job.state not in FINAL), key=lambda job: job.job_id)
        for job in its:
            self.move(job, Move.CANCEL)
            self.unclaimed(job)
            self.write_event(Kind.CANCELLED, job)
        return [job.job_id for job in its]

    def needing(self, job: Task) -> list[Task]:
        """The jobs that need this one."""
        return [each for each in self.jobs.values() if job.job_id in each.needs]

    def close(self, run_id: str, job: Task) -> None:
        """End a run if all its jobs have ended."""
        states = {each.state for each in self.jobs.values() if each.run_id == run_id}
        if states <= {State.COMPLETED, State.CANCELLED}:
            kind = Kind.RUN_CANCELLED if State.CANCELLED in states else Kind.RUN_COMPLETED
            self.end(run_id, kind, job.job_id)

    def end(self, run_id: str, kind: Kind, job_id: JobId) -> None:
        """End a running run, for this job."""
        if self.runs[run_id] == "running":
            self.runs[run_id] = kind.removeprefix("run_")
            self.write_event(kind, self.jobs[job_id])

    def write_event(self, kind: Kind, job: Task, waited_s: float | None = None, ran_s: float | None = None) -> None:
        """Append an event."""
        self.happened[f"event: {kind}"] += 1
        event = VisibleEvent(
            kind=kind, job_id=job.job_id, attempt=job.attempt, run_id=job.run_id, waited_s=waited_s, ran_s=ran_s
        )
        self.events.append(event)


class _Part:
    """One part of the queue."""

    def __init__(self, state: Records) -> None:
        self._state = state


class Submissions(_Part):
    """Submission of jobs and runs."""

    def refusal(self, submission: Submission, run_id: str | None, needs: Iterable[JobId]) -> str | None:
        """Why a submission is refused, if it is."""
        job_class = self._class_of(submission)
        needed = [self._state.jobs[each] for each in self._with_their_ranks(needs)]
        if run_id is not None and self._state.runs.get(run_id, "running") in ("failed", "cancelled"):
            return "its run is over"
        if self._state.budget_s(submission.queue, job_class, submission.budget_s) is None:
            return "no budget is set"
        if job_class.ingests and run_id is not None:
            return "an ingest job has no run"
        if needed and any(each.run_id != run_id or run_id is None for each in needed):
            return "a needed job is in another run"
        if any(each.state in (State.FAILED, State.CANCELLED) for each in needed):
            return "a needed job cannot complete"
        return None

    def submitted(
        self, job_id: JobId, submission: Submission, run_id: str | None, needs: Iterable[JobId], now: float
    ) -> None:
        """Accept a job with this id; further ranks have the next ids."""
        job_class, needs = self._class_of(submission), frozenset(self._with_their_ranks(needs))
        if run_id is not None:
            if self._state.runs.get(run_id) == "completed":
                self._state.happened["run opened again"] += 1
            self._state.runs[run_id] = "running"
        waits = any(self._state.jobs[each].state is not State.COMPLETED for each in needs)
        for rank in range(submission.ranks):
            its = JobId(job_id + rank)
            self._state.jobs[its] = Task(
                job_id=its,
                queue=submission.queue,
                job_class=job_class,
                model=submission.model,
                run_id=run_id,
                priority=submission.priority,
                attempts_max=submission.attempts_max,
                retries_max=submission.retries_max,
                needs=needs,
                submitted_budget_s=submission.budget_s,
                budget_s=self._state.budget_s(submission.queue, job_class, submission.budget_s) or 0.0,
                state=State.WAITING if waits else State.QUEUED,
                queued_at=None if waits else now,
                gang=job_id if submission.ranks > 1 else None,
            )

    def _with_their_ranks(self, needs: Iterable[JobId]) -> list[JobId]:
        return sorted({each.job_id for needed in needs for each in self._state.ranks_of(self._state.jobs[needed])})

    def refusal_of_run(self, run_id: str, submissions: Mapping[str, Submission]) -> bool:
        """Whether a run is refused."""
        return any(self.refusal(each, run_id, ()) is not None for each in submissions.values())

    def submitted_run(
        self,
        ids: Mapping[str, JobId],
        run_id: str,
        submissions: Mapping[str, Submission],
        needs: Mapping[str, Iterable[str]],
        now: float,
    ) -> None:
        """Accept a run with these job ids."""
        for name in TopologicalSorter({each: set(needs.get(each, ())) for each in submissions}).static_order():
            self.submitted(ids[name], submissions[name], run_id, [ids[each] for each in needs.get(name, ())], now)

    def _class_of(self, submission: Submission) -> JobClass:
        known = self._state.queues.get(submission.queue)
        of_queue = known.job_class if known else None
        return submission.job_class or of_queue or QUEUE_CLASSES.get(submission.queue, JobClass.GPU)


class Settings(_Part):
    """Settings of queues."""

    def set_queue(self, settings: QueueSettings) -> None:
        self._state.queues[settings.queue] = settings

    def unset_queue(self, queue: str) -> bool:
        return self._state.queues.pop(queue, None) is not None


class Claims(_Part):
    """Moves by workers, and the choice of jobs."""

    def register(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, gpus: Iterable[str] = ()
    ) -> list[JobId]:
        place = host, worker
        row = self._state.workers.setdefault(place, Row(queue=queue, incarnation=incarnation, last_seen_at=now))
        row.queue, row.incarnation, row.last_seen_at = queue, incarnation, now
        self._state.gpus[place] = frozenset(gpus)
        held = [job for job in self._state.held_by(place) if job.holder != incarnation]
        for job in held:
            self._state.given_away(job, Move.SUPERSEDE, now)
        self._state.recall(held, now)
        return [job.job_id for job in held]

    def claim(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, loaded: str | None = None
    ) -> tuple[JobId, int] | None:
        place = host, worker
        row = self._state.workers.get(place)
        if row is not None and self._over(row, incarnation):
            self._state.happened["refused: replaced"] += 1
            raise ReplacedError
        mine = [job for job in self._state.held_by(place) if job.holder == incarnation]
        if row is not None and row.draining_incarnation == incarnation and not mine:
            self._state.happened["refused: drained"] += 1
            raise DrainedError
        if mine:
            (job,) = mine
            self._state.happened["claimed again"] += 1
            self._state.comes_back(job, "claim")
        else:
            found = self.next_for(queue, place, now, loaded)
            if found is None:
                return None
            job = found
            self._state.move(job, Move.CLAIM)
            job.attempt, job.holder, job.place, job.claimed_at = job.attempt + 1, incarnation, place, now
            job.budget_s = self._state.budget_s(queue, job.job_class, job.submitted_budget_s) or job.budget_s
            self._state.happened["claimed"] += 1
            if job.needs:
                self._state.happened["claimed with needs"] += 1
            if len(job.needs) > 1:
                self._state.happened["claimed with several needs"] += 1
            if job.submitted_budget_s is None and job.budget_s != job.job_class.budget_s:
                self._state.happened["budget of the queue"] += 1
        job.lease = now + LEASE_S
        for each in self._state.ranks_of(job):
            if each.state is State.QUEUED:
                each.priority = BEGUN
        self._touch(place, queue, incarnation, now)
        return job.job_id, job.attempt

    def next_for(self, queue: str, place: Place, now: float, loaded: str | None) -> Task | None:
        """The next job for a worker."""
        queued = [job for job in self._state.jobs.values() if job.queue == queue and job.state is State.QUEUED]
        waiting = [job for job in queued if not now < job.retry_at <= now + RETRY_WAIT_MAX_S]
        if len(waiting) < len(queued):
            self._state.happened["nothing: its retry is not due"] += 1
        for reason, keeps in (
            ("locked", (row := self._state.workers.get(place)) is not None and row.locked),
            ("in quarantine", self._in_quarantine(place)),
            ("a lost host's GPU", self._held_by_lost(place)),
        ):
            if keeps:
                if waiting:
                    self._state.happened[f"nothing: {reason}"] += 1
                return None
        its = sorted(
            (job for job in waiting if not self._better_elsewhere(job, place, now)),
            key=lambda job: (job.priority, job.job_id),
        )
        if len(its) < len(waiting):
            self._state.happened["left to another worker"] += 1
        if not its:
            return None
        head = its[0]
        alike = [job for job in its if job.model == loaded and job.priority == head.priority]
        if loaded is not None and alike and alike[0] is not head:
            if head.queued_at is not None and head.queued_at > now - AFFINITY_S:
                self._state.happened["claimed by model"] += 1
                return alike[0]
            self._state.happened["overtaken long enough"] += 1
        return head

    def heartbeat(self, *, host: str, worker: str, queue: str, incarnation: str, model: str | None, now: float) -> bool:
        row = self._state.workers.get((host, worker))
        if row is not None and self._over(row, incarnation):
            return False
        self._touch((host, worker), queue, incarnation, now)
        return True

    def renew(self, job_id: JobId, *, attempt: int, incarnation: str, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "renewal")
        job.lease = now + LEASE_S
        return True

    def owns(self, job_id: JobId, *, attempt: int, incarnation: str) -> bool:
        return self._state.mine(job_id, attempt, incarnation) is not None

    def complete(self, job_id: JobId, *, attempt: int, incarnation: str, now: float, result: Any = None) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "result")
        job.result = result
        if job.gang is None:
            self._state.over_as(job, Move.COMPLETE, now)
            self._go_on(job, now)
            return True
        self._state.move(job, Move.FINISH)
        self._state.unclaimed(job)
        ranks = self._state.ranks_of(job)
        if all(each.state is State.FINISHED for each in ranks):
            for each in ranks:
                self._state.over_as(each, Move.CLOSE, now)
            for each in ranks:
                self._go_on(each, now)
        return True

    def _go_on(self, job: Task, now: float) -> None:
        if job.run_id is None:
            return
        for each in self._state.needing(job):
            if each.state in FINAL or self._state.pending(each) > 0:
                continue
            each.queued_at = now
            if each.state is State.WAITING:
                self._state.move(each, Move.READY)
                self._state.happened["ready"] += 1
            elif each.state is State.BLOCKED:
                self._state.happened["ready while blocked"] += 1
        self._state.close(job.run_id, job)

    def fail_by_worker(self, job_id: JobId, *, attempt: int, incarnation: str, reason: str, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "result")
        self._state.over_as(job, Move.FAIL_BY_WORKER, now)
        return True

    def retry(self, job_id: JobId, *, attempt: int, incarnation: str, reason: str, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "result")
        if job.own_retries >= job.retries_max or attempt >= job.attempts_max:
            self._state.happened["refused: no retry is left"] += 1
            return False
        self._state.move(job, Move.RETRY)
        self._state.unclaimed(job)
        job.queued_at, job.retry_at = now, now + retry_wait_s(job.own_retries)
        job.own_retries += 1
        return True

    def release(self, job_id: JobId, *, attempt: int, incarnation: str, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "release")
        self._state.given_away(job, Move.RELEASE, now)
        self._state.recall([job], now)
        return True

    def give_back(self, job_id: JobId, *, attempt: int, incarnation: str, slot: Slot, reason: str, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None:
            return False
        self._state.comes_back(job, "release")
        self._state.given_away(job, Move.GIVE_BACK, now)
        self._state.recall([job], now)
        if job.gang is None:
            job.avoided |= {(slot.host, slot.worker, gpu): now + AVOID_S for gpu in {"", *slot.gpus}}
        row = self._state.workers[slot.host, slot.worker]
        row.fatal[job_id] = now
        counted = [at for at in row.fatal.values() if at > max(row.unlocked_at, now - FATAL_WINDOW_S)]
        if len(counted) >= FATAL_JOBS_MAX:
            row.locked = True
            self._state.happened["locked after fatal errors"] += 1
        return True

    def _over(self, row: Row, incarnation: str) -> bool:
        return row.incarnation != incarnation or row.retired_incarnation == incarnation

    def _touch(self, place: Place, queue: str, incarnation: str, now: float) -> None:
        row = self._state.workers.setdefault(place, Row(queue=queue, incarnation=incarnation, last_seen_at=now))
        row.queue, row.last_seen_at = queue, now

    def _in_quarantine(self, place: Place) -> bool:
        its = self._state.gpus.get(place, frozenset())
        return any((host, worker) == place or gpu in its for gpu, host, worker in self._state.quarantined)

    def _held_by_lost(self, place: Place) -> bool:
        its = self._state.gpus.get(place, frozenset())
        lost = [
            job.place for job in self._state.jobs.values() if job.state is State.HOST_LOST and job.place is not None
        ]
        return any(its & self._state.gpus.get(each, frozenset()) for each in lost)

    def _avoids(self, job: Task, place: Place, now: float) -> bool:
        its = self._state.gpus.get(place, frozenset())
        return any(
            until > now and ((host, worker) == place or gpu in its)
            for (host, worker, gpu), until in job.avoided.items()
        )

    def _better_elsewhere(self, job: Task, place: Place, now: float) -> bool:
        return self._avoids(job, place, now) and any(
            row.queue == job.queue
            and row.last_seen_at > now - FRESH_S
            and row.incarnation not in (row.retired_incarnation, row.draining_incarnation)
            and not row.locked
            and not self._avoids(job, other, now)
            and not self._in_quarantine(other)
            and not self._held_by_lost(other)
            for other, row in self._state.workers.items()
        )


class Fencing(_Part):
    """Moves after a condition."""

    def fence(self, job_id: JobId, *, attempt: int, incarnation: str, condition: Condition, now: float) -> bool:
        job = self._state.mine(job_id, attempt, incarnation)
        if job is None or job.place is None:
            return False
        self._state.move(job, Move.FENCE)
        job.lease = now + FENCE_S
        row = self._state.workers.get(job.place)
        if row is not None and row.incarnation == incarnation:
            row.retired_incarnation, row.last_seen_at = incarnation, now - GHOST_AGE_S
        return True

    def hold_fence(self, job_id: JobId, *, attempt: int, now: float) -> bool:
        job = self._state.fenced(job_id, attempt)
        if job is None:
            return False
        job.lease = now + FENCE_S
        return True

    def requeue(
        self,
        job_id: JobId,
        *,
        attempt: int,
        condition: Condition,
        now: float,
        avoid: Slot | None = None,
        avoid_s: float = 0.0,
    ) -> bool:
        job = self._state.fenced(job_id, attempt)
        if job is None or job.attempt >= job.attempts_max:
            return False
        self._state.move(job, Move.REQUEUE)
        self._state.unclaimed(job)
        job.retries, job.priority, job.queued_at = job.retries + 1, min(job.priority, REQUEUE_PRIORITY), now
        if avoid is not None and avoid_s > 0 and job.gang is None:
            job.avoided |= {(avoid.host, avoid.worker, gpu): now + avoid_s for gpu in {"", *avoid.gpus}}
        self._state.recall([job], now, retries=1)
        return True

    def fail(self, job_id: JobId, *, attempt: int, reason: str, now: float) -> bool:
        job = self._state.fenced(job_id, attempt)
        if job is None:
            return False
        self._state.over_as(job, Move.FAIL, now)
        return True


class Sweeps(_Part):
    """Moves by timers."""

    def expired(self, *, now: float) -> frozenset[tuple[JobId, int]]:
        return frozenset((job.job_id, job.attempt) for job in self._expired(now))

    def reclaim_expired(
        self, *, now: float, among: Iterable[JobId] | None = None, ingest: bool | None = None
    ) -> list[JobId]:
        touched: list[JobId] = []
        for kind in (False, True) if ingest is None else (ingest,):
            given: list[Task] = []
            for job in self._expired(now):
                if job.job_class.ingests is kind and (among is None or job.job_id in set(among)):
                    if job.state is State.HOST_LOST:
                        self._state.happened["lost: given away at last"] += 1
                    if kind:
                        self._state.happened["ingest reclaimed"] += 1
                    self._state.given_away(job, Move.RECLAIM, now)
                    given.append(job)
            self._state.recall(given, now)
            touched += [job.job_id for job in given]
        return sorted(touched)

    def consume_events(self, *, now: float) -> int:
        events, self._state.unheeded = self._state.unheeded, []
        for event in events:
            if event.run_id is not None:
                self._state.end(event.run_id, Kind.RUN_FAILED, event.job_id)
                self._state.cancel(job for job in self._state.jobs.values() if job.run_id == event.run_id)
        return len(events)

    def _expired(self, now: float) -> list[Task]:
        may = HELD | {State.FENCING}
        return [
            job for job in self._state.jobs.values() if job.state in may and job.lease is not None and job.lease < now
        ]


class LostHosts(_Part):
    """Lost hosts."""

    def mark_lost(self, job_id: JobId, *, attempt: int, now: float) -> bool:
        job = self._state.jobs[job_id]
        if job.state is not State.RUNNING or job.attempt != attempt:
            return False
        known = self._state.queues.get(job.queue)
        self._state.move(job, Move.LOSE)
        hold_s = None if known is None else known.lost_hold_s
        job.lease = None if hold_s is None else max(job.lease or 0.0, now + hold_s)
        return True


class Admin(_Part):
    """Moves by operators."""

    def cancel(self, job_id: JobId, *, reason: str, now: float) -> bool:
        job = self._state.jobs[job_id]
        ids = self._state.cancel(self._state.ranks_of(job))
        if ids and job.run_id is not None:
            wave = [self._state.jobs[each] for each in ids]
            while wave:
                needing = {each.job_id: each for one in wave for each in self._state.needing(one)}
                wave = [self._state.jobs[each] for each in self._state.cancel(needing.values())]
                self._state.happened["cancelled with a needed job"] += len(wave)
            self._state.close(job.run_id, job)
        return bool(ids)

    def cancel_run(self, run_id: str, *, reason: str, now: float) -> list[JobId]:
        its = [job.job_id for job in self._state.jobs.values() if job.run_id == run_id]
        ids = self._state.cancel(self._state.jobs[each] for each in its)
        if its:
            self._state.end(run_id, Kind.RUN_CANCELLED, ids[0] if ids else max(its))
        return ids

    def block(self, job_id: JobId, *, reason: str, now: float) -> bool:
        job = self._state.jobs[job_id]
        if job.state not in (State.WAITING, State.QUEUED):
            return False
        self._state.move(job, Move.BLOCK)
        self._state.write_event(Kind.BLOCKED, job)
        return True

    def unblock(self, job_id: JobId, *, reason: str, now: float) -> bool:
        job = self._state.jobs[job_id]
        if job.state is not State.BLOCKED:
            return False
        self._state.move(job, Move.DEFER if self._state.pending(job) else Move.UNBLOCK)
        return True

    def lock(self, *, host: str, worker: str, who: str, reason: str, now: float) -> bool:
        row = self._state.workers.get((host, worker))
        if row is not None:
            row.locked = True
        return row is not None

    def unlock(self, *, host: str, worker: str, who: str, now: float) -> bool:
        row = self._state.workers.get((host, worker))
        if row is None or not row.locked:
            return False
        row.locked, row.unlocked_at = False, now
        return True

    def drain(self, *, host: str, worker: str) -> bool:
        row = self._state.workers.get((host, worker))
        if row is not None:
            row.draining_incarnation = row.incarnation
        return row is not None


class GpuQuarantine(_Part):
    """GPUs in quarantine."""

    def quarantine(self, gpus: Iterable[str], *, host: str, worker: str | None, reason: str, now: float) -> None:
        self._state.quarantined |= {(gpu, host, worker or "") for gpu in gpus}

    def release_gpu(self, gpu: str) -> bool:
        its = {each for each in self._state.quarantined if each[0] == gpu}
        self._state.quarantined -= its
        return bool(its)


class Outbox(_Part):
    """The events that consumers read."""

    def events(self, consumer: str, *, limit: int) -> list[tuple[int, VisibleEvent]]:
        """Each with its place."""
        seen = self._state.positions.get(consumer, 0)
        return list(enumerate(self._state.events, 1))[seen : seen + limit]

    def acknowledge(self, consumer: str, position: int) -> None:
        self._state.positions[consumer] = max(position, self._state.positions.get(consumer, 0))

    def consumers(self) -> dict[str, int]:
        return {consumer: len(self._state.events) - position for consumer, position in self._state.positions.items()}


class Model:
    """The queue, in the parts that the store has."""

    def __init__(self, happened: Counter[str]) -> None:
        self.state = Records(happened)
        self.submissions = Submissions(self.state)
        self.queue_settings = Settings(self.state)
        self.claims = Claims(self.state)
        self.fencing = Fencing(self.state)
        self.sweeps = Sweeps(self.state)
        self.lost_hosts = LostHosts(self.state)
        self.admin = Admin(self.state)
        self.gpu_quarantine = GpuQuarantine(self.state)
        self.outbox = Outbox(self.state)
