"""The queue answers as a plain model does, for any order of calls by workers, operators, conditions and timers.

`tools.mutation` plants bugs in the queue, and this machine must find each.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuwarden.job import AVOID_S, FINAL, RECLAIMS_MAX, Condition, JobClass, JobId, Kind, Move, State
from gpuwarden.queue import (
    DrainedError,
    Event,
    Job,
    JobStore,
    QueueSettings,
    ReplacedError,
    Slot,
    Submission,
    SubmissionError,
)
from gpuwarden.queue.models import Success
from testbed.postgres import Postgres
from tests.gpuwarden.queue.queue_model import HELD, Model, Place, Task, VisibleEvent
from tests.races import databases
from tests.races.databases import Databases

NOW: Final = 1_000_000.0
STEPS: Final = 60
EXAMPLES: Final = 11
ROUNDS: Final = 12

GPUS: Final[dict[Place, tuple[str, ...]]] = {
    ("h1", "a"): ("GPU-0",),
    ("h1", "b"): ("GPU-0", "GPU-1"),
    ("h1", "c"): ("GPU-1",),
    ("h2", "d"): ("GPU-2",),
}
"""Slots that share GPUs, and one on another host."""

PLACES: Final = st.sampled_from(sorted(GPUS))
QUEUES: Final = st.sampled_from(["gpu", "gpu", "gpu", "gpu", "fetch", "farm"])
MODELS: Final = st.sampled_from([None, None, "m1", "m2"])
RUNS: Final = st.sampled_from(["r1", "r2", "r3"])
PRIORITIES: Final = st.sampled_from([1, 50, 100, 100])
ATTEMPTS: Final = st.sampled_from([1, 2, 20, 20])
RESULTS: Final = st.sampled_from([None, {"n": 1}, ["é"]])
PICKS: Final = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5, 8])
"""Index from the end: mostly the latest."""

WORK: Final = st.none() | st.tuples(MODELS, st.integers(0, 4))
"""Work after a rule: every worker claims with a loaded model, and some complete."""

SHAPES: Final = st.sampled_from(
    [
        {"b": ["a"], "c": ["a", "b"]},
        {"b": ["a"], "c": ["a"], "d": ["b", "c"]},
        {"c": ["a", "b"]},
        {"b": ["a"], "c": ["b"]},
    ]
)
"""Needs of the jobs of a run."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a worker, which may be outdated."""

    job_id: JobId
    attempt: int
    incarnation: str
    place: Place

    @property
    def its(self) -> dict[str, Any]:
        return {"attempt": self.attempt, "incarnation": self.incarnation}


def slot(place: Place) -> dict[str, str]:
    """The arguments of a slot."""
    return {"host": place[0], "worker": place[1]}


def answer(ask: Callable[[], Any]) -> Any:
    """The answer of a call, or the type of its error."""
    try:
        return ask()
    except (ReplacedError, DrainedError, SubmissionError) as error:
        return type(error)


class QueueMachine(RuleBasedStateMachine):
    """One queue and its model; each rule calls both. `laws` holds for any queue."""

    databases: ClassVar[Databases]
    happened: ClassVar[Counter[str]]

    @initialize()
    def open(self) -> None:
        self.databases.empty()
        self.store = JobStore(self.databases.queue)
        self.model = Model(self.happened)
        self.now = NOW
        self.claims: list[Claim] = []
        self.born: Counter[Place] = Counter()
        self.incarnations = {place: f"{place[1]}0" for place in GPUS}
        self.before: dict[int, Row] = {}
        self.read: dict[str, list[int]] = {"notifier": [], "planner": []}

    def both(self, name: str, *args: Any, **how: Any) -> Any:
        """Call store and model, and compare."""
        expected = answer(lambda: attrgetter(name)(self.model)(*args, **how))
        found = answer(lambda: attrgetter(name)(self.store)(*args, **how))
        assert found == expected, f"{name}{args} {how}: {found}, and the model says {expected}"
        return found

    def job(self, pick: int, *states: State) -> Task:
        """A job in one of these states, else any."""
        every = list(self.model.state.jobs.values())
        its = [job for job in every if job.state in states] or every
        return its[-1 - min(pick, len(its) - 1)]

    def a_claim(self, pick: int, *states: State) -> Claim:
        """A claim of the current attempt of a job in one of these states, else any."""
        its = [each for each in self.claims if self.is_at(each, states)] or self.claims
        return its[-1 - min(pick, len(its) - 1)]

    def is_at(self, claim: Claim, states: Sequence[State]) -> bool:
        job = self.model.state.jobs[claim.job_id]
        return job.state in states and job.attempt == claim.attempt

    # --- submissions

    @rule(
        queue=QUEUES,
        job_class=st.sampled_from([None, None, None, JobClass.CPU, JobClass.INGEST]),
        run_id=st.none() | RUNS,
        priority=PRIORITIES,
        attempts_max=ATTEMPTS,
        model=MODELS,
        budget_s=st.sampled_from([None, None, 60.0]),
        needed=st.lists(PICKS, max_size=2),
        among=st.sampled_from(["its run", "its run", "its run", "all", "failed or cancelled", "failed or cancelled"]),
    )
    def submit(self, run_id: str | None, needed: list[int], among: str, **asked: Any) -> None:
        every = list(self.model.state.jobs.values())
        if among == "failed or cancelled":
            every = [each for each in every if each.state in (State.FAILED, State.CANCELLED)]
            open_ones = [each for each in every if self.model.state.runs.get(each.run_id or "") == "running"]
            run_id = open_ones[-1].run_id if open_ones else run_id
        its = [each.job_id for each in every if among == "all" or (run_id and each.run_id == run_id)]
        needs = tuple(its[-1 - min(each, len(its) - 1)] for each in needed) if its else ()
        self.submits(Submission(run_id=run_id, needs=needs, **asked))

    @rule(priority=PRIORITIES, model=MODELS, retries=st.sampled_from([0, 2]), many=st.integers(1, 3), work=WORK)
    def submit_plain(self, priority: int, model: str | None, retries: int, many: int, work: Any) -> None:
        for _ in range(many):
            self.submits(Submission(queue="gpu", priority=priority, model=model, retries_max=retries))
        self.works(work)

    def submits(self, submission: Submission) -> None:
        refused = self.model.submissions.refusal(submission, submission.run_id, submission.needs)
        found = answer(lambda: self.store.runs.submit(submission, now=self.now))
        assert (found is SubmissionError) is (refused is not None), (found, refused)
        if refused is None:
            self.model.submissions.submitted(found, submission, submission.run_id, submission.needs, self.now)
        else:
            self.happened[f"refused: {refused}"] += 1

    @rule(run_id=RUNS, shape=SHAPES, priority=PRIORITIES, attempts_max=ATTEMPTS, work=WORK)
    def submit_run(self, run_id: str, shape: dict[str, list[str]], priority: int, attempts_max: int, work: Any) -> None:
        names = sorted({*shape, *(each for needs in shape.values() for each in needs)})
        jobs = {name: Submission(queue="gpu", priority=priority, attempts_max=attempts_max) for name in names}
        refused = self.model.submissions.refusal_of_run(run_id, jobs)
        found = answer(lambda: self.store.runs.submit_run(run_id, jobs, needs=shape, now=self.now))
        assert (found is SubmissionError) is refused
        if not refused:
            self.model.submissions.submitted_run(found, run_id, jobs, shape, self.now)
        self.works(work)

    @rule(
        run_id=RUNS,
        ranks=st.sampled_from([2, 2, 3]),
        priority=PRIORITIES,
        attempts_max=ATTEMPTS,
        follows=st.booleans(),
        result=RESULTS,
        ends=st.integers(0, 4),
    )
    def submit_gang(self, run_id: str, follows: bool, result: Any, ends: int, **asked: Any) -> None:
        """Submit ranks and a dependant; every worker claims, and some complete."""
        before = len(self.model.state.jobs)
        self.submits(Submission(queue="gpu", run_id=run_id, **asked))
        if follows and len(self.model.state.jobs) > before:
            self.submits(Submission(queue="gpu", run_id=run_id, needs=(list(self.model.state.jobs)[before],)))
        self.works((None, ends), "gpu", result)

    @rule(
        queue=QUEUES,
        job_class=st.sampled_from([None, JobClass.CPU]),
        budget_s=st.sampled_from([None, 5.0]),
        lost_hold_s=st.sampled_from([None, 0.0, 40.0, 40.0]),
        forget=st.sampled_from([False, False, False, True]),
    )
    def set_queue(self, forget: bool, **figures: Any) -> None:
        if forget:
            self.both("queue_settings.unset_queue", figures["queue"])
        else:
            self.both("queue_settings.set_queue", QueueSettings(set_at=self.now, set_by="someone", **figures))

    # --- workers

    @rule(place=PLACES, queue=QUEUES, knows=st.sampled_from([True, True, True, False]))
    def register(self, place: Place, queue: str, knows: bool) -> None:
        self.born[place] += 1
        self.incarnations[place] = f"{place[1]}{self.born[place]}"
        how = {**slot(place), "gpus": GPUS[place] if knows else ()}
        self.both("claims.register", queue, incarnation=self.incarnations[place], now=self.now, **how)

    @rule(place=PLACES, queue=QUEUES, loaded=MODELS)
    def claim(self, place: Place, queue: str, loaded: str | None) -> None:
        self.claims_as(self.incarnations[place], place, queue, loaded)

    @rule(queue=QUEUES, loaded=MODELS, restarts=st.booleans(), result=RESULTS, ends=st.integers(0, 4))
    def a_round_of_work(self, queue: str, loaded: str | None, restarts: bool, result: Any, ends: int) -> None:
        """Every worker claims, after a restart if it has ended, and some complete."""
        for place, row in self.model.state.workers.items():
            if restarts and row.incarnation in (row.retired_incarnation, row.draining_incarnation):
                self.register(place, queue, knows=True)
        self.works((loaded, ends), queue, result)

    def works(self, work: tuple[str | None, int] | None, queue: str = "gpu", result: Any = None) -> None:
        if work is None:
            return
        loaded, ends = work
        for place, incarnation in self.incarnations.items():
            self.claims_as(incarnation, place, queue, loaded)
        for claim in [each for each in self.claims if self.is_at(each, [State.RUNNING])][:ends]:
            self.both("claims.complete", claim.job_id, **claim.its, now=self.now, result=result)

    def claims_as(self, incarnation: str, place: Place, queue: str, loaded: str | None) -> None:
        how: dict[str, Any] = {**slot(place), "incarnation": incarnation, "now": self.now, "loaded": loaded}
        expected = answer(lambda: self.model.claims.claim(queue, **how))
        self.claimed(answer(lambda: self.store.claims.claim(queue, **how)), expected, incarnation, place)

    def claimed(self, found: Any, expected: Any, incarnation: str, place: Place) -> None:
        job = found if isinstance(found, Job) else None
        assert (found if job is None else (job.job_id, job.attempt)) == expected
        if job is None:
            return
        claim = Claim(job_id=job.job_id, attempt=job.attempt, incarnation=incarnation, place=place)
        if claim not in self.claims:
            self.claims.append(claim)
        assert self.store.runs.inputs(job.job_id) == {
            each: self.model.state.jobs[each].result for each in sorted(self.model.state.jobs[job.job_id].needs)
        }

    @precondition(lambda self: self.claims)
    @rule(pick=PICKS, place=PLACES, queue=QUEUES, model=MODELS)
    def renew(self, pick: int, place: Place, queue: str, model: str | None) -> None:
        """Renew a lease, and send a heartbeat."""
        claim = self.a_claim(pick, State.HOST_LOST, State.RUNNING)
        self.both("claims.owns", claim.job_id, **claim.its)
        self.both("claims.renew", claim.job_id, **claim.its, now=self.now)
        how = {"queue": queue, "model": model, "now": self.now, **slot(place)}
        self.both("claims.heartbeat", incarnation=self.incarnations[place], **how)

    @precondition(lambda self: self.claims)
    @rule(
        pick=PICKS, act=st.sampled_from(["complete", "fail_by_worker", "retry", "release", "give_back"]), result=RESULTS
    )
    def end(self, pick: int, act: str, result: Any) -> None:
        self.ends(self.a_claim(pick, State.HOST_LOST, State.RUNNING), act, result)

    def goes_on(self, claim: Claim, result: Any) -> None:
        """A worker completes its job with its row and the next claim."""
        how: dict[str, Any] = {"queue": "gpu", **slot(claim.place), "incarnation": claim.incarnation, "now": self.now}
        done = self.model.claims.complete(claim.job_id, **claim.its, now=self.now, result=result)
        expected, is_idle = None, False
        if done and self.model.claims.heartbeat(model=None, **how):
            expected = answer(lambda: self.model.claims.claim(**how, loaded="m1"))
            is_idle = expected is None
        in_run = self.store.job(claim.job_id).run_id is not None
        success = Success(claim.job_id, claim.attempt, result, in_run=in_run)
        accepted, found, waits = self.store.claims.complete_and_claim(success, **how, loaded="m1")
        assert (accepted, waits) == (done, is_idle)
        self.claimed(found, expected if isinstance(expected, tuple) else None, claim.incarnation, claim.place)

    def ends(self, claim: Claim, act: str, result: Any = None) -> None:
        if act == "complete" and result == {"n": 1}:
            self.goes_on(claim, result)
            return
        more: dict[str, dict[str, Any]] = {
            "complete": {"result": result},
            "fail_by_worker": {"reason": "boom"},
            "retry": {"reason": "boom"},
            "give_back": {"reason": "CUDA error", "slot": Slot(**slot(claim.place), gpus=GPUS[claim.place])},
        }
        self.both(f"claims.{act}", claim.job_id, **claim.its, now=self.now, **more.get(act, {}))

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 40), act=st.sampled_from(["complete", "release", "renew", "fence", "claim"]))
    def a_former_holder_acts(self, pick: int, act: str) -> None:
        old = [each for each in self.claims if self.model.state.has_gone_on(each.job_id, each.attempt)] or self.claims
        claim = old[pick % len(old)]
        if act == "claim":
            self.claims_as(claim.incarnation, claim.place, "gpu", None)
            return
        more = {"condition": Condition.STALL} if act == "fence" else {}
        part = "fencing" if act == "fence" else "claims"
        if not self.both(f"{part}.{act}", claim.job_id, **claim.its, now=self.now, **more):
            self.happened["refused: an old claim"] += 1

    # --- conditions

    @precondition(lambda self: self.claims)
    @rule(
        pick=PICKS,
        condition=st.sampled_from([Condition.STALL, Condition.DEAD_WORKER]),
        then=st.sampled_from(["requeue", "requeue", "fail", "hold", "nothing"]),
        avoids=st.sampled_from([False, True, True]),
        work=WORK,
    )
    def condition(self, pick: int, condition: Condition, then: str, avoids: bool, work: Any) -> None:
        claim = self.a_claim(pick, *HELD)
        self.both("fencing.fence", claim.job_id, **claim.its, condition=condition, now=self.now)
        self.settles(claim, then, avoids=avoids)
        if work is not None:
            self.register(claim.place, "gpu", knows=True)
            for place in (each for each in sorted(GPUS) if each != claim.place):
                how = {"queue": "gpu", "model": None, "now": self.now, **slot(place)}
                self.both("claims.heartbeat", incarnation=self.incarnations[place], **how)
            self.claims_as(self.incarnations[claim.place], claim.place, "gpu", work[0])
        self.works(work)

    @rule(run_id=RUNS, then=st.sampled_from(["requeue", "requeue", "fail"]), work=WORK)
    def settle_one_of_two_fenced_ranks(self, run_id: str, then: str, work: Any) -> None:
        self.submits(Submission(queue="gpu", run_id=run_id, priority=1, ranks=2))
        self.works((None, 0))
        jobs = self.model.state.jobs
        running = [each for each in self.claims if self.is_at(each, [State.RUNNING]) and jobs[each.job_id].gang]
        ranks = [each for each in running if jobs[each.job_id].gang == jobs[running[-1].job_id].gang]
        for claim in ranks:
            self.both("fencing.fence", claim.job_id, **claim.its, condition=Condition.STALL, now=self.now)
        for claim in ranks[:1]:
            self.settles(claim, then, avoids=False)
        self.works(work)

    @precondition(lambda self: self.claims)
    @rule(pick=PICKS, then=st.sampled_from(["requeue", "fail", "hold"]), avoids=st.booleans())
    def settle(self, pick: int, then: str, avoids: bool) -> None:
        self.settles(self.a_claim(pick, State.FENCING), then, avoids=avoids)

    def settles(self, claim: Claim, then: str, *, avoids: bool) -> None:
        its = {"attempt": claim.attempt, "now": self.now}
        avoid = Slot(**slot(claim.place), gpus=GPUS[claim.place]) if avoids else None
        if then == "requeue":
            self.both("fencing.requeue", claim.job_id, **its, condition=Condition.STALL, avoid=avoid, avoid_s=AVOID_S)
        elif then == "fail":
            self.both("fencing.fail", claim.job_id, **its, reason="at the cap")
        elif then == "hold":
            self.both("fencing.hold_fence", claim.job_id, **its)

    # --- timers

    @rule(s=st.sampled_from([1, 1, 20, 41, 301, 301, 601]), work=WORK)
    def time_passes(self, s: float, work: Any) -> None:
        self.now += s
        self.works(work)

    @rule(place=PLACES, model=MODELS, loaded=MODELS, s=st.sampled_from([1, 299, 301]))
    def two_wait_for_a_worker(self, place: Place, model: str | None, loaded: str | None, s: float) -> None:
        for each in (model, loaded):
            self.submits(Submission(queue="gpu", model=each, priority=2))
        self.now += s
        self.register(place, "gpu", knows=True)
        self.claims_as(self.incarnations[place], place, "gpu", loaded)

    @rule(
        s=st.sampled_from([0, 41, 601]),
        ingest=st.sampled_from([None, None, True, False]),
        place=st.none() | PLACES,
    )
    def reclaim_expired(self, s: float, ingest: bool | None, place: Place | None) -> None:
        if place is not None:
            self.submits(Submission(queue="fetch"))
            self.claims_as(self.incarnations[place], place, "fetch", None)
        self.now += s
        self.both("sweeps.expired", now=self.now)
        self.both("sweeps.reclaim_expired", now=self.now, ingest=ingest)

    @rule()
    def consume_events(self) -> None:
        self.both("sweeps.consume_events", now=self.now)

    # --- hosts, operators, GPUs

    @precondition(lambda self: self.claims)
    @rule(
        pick=PICKS,
        host=st.none() | st.sampled_from(["h1", "h2"]),
        hold_s=st.sampled_from([None, None, 40.0, 40.0]),
        back=st.sampled_from([None, None, "complete", "fail_by_worker", "release", "renew"]),
        s=st.sampled_from([0, 0, 601]),
        work=WORK,
    )
    def lose(self, pick: int, host: str | None, hold_s: float | None, back: str | None, s: float, work: Any) -> None:
        claim = self.a_claim(pick, State.RUNNING)
        if hold_s is not None:
            how: dict[str, Any] = {
                "queue": self.model.state.jobs[claim.job_id].queue,
                "job_class": None,
                "budget_s": None,
            }
            self.both(
                "queue_settings.set_queue", QueueSettings(lost_hold_s=hold_s, set_at=self.now, set_by="someone", **how)
            )
        if host is None:
            self.both("lost_hosts.mark_lost", claim.job_id, attempt=claim.attempt, now=self.now)
        else:
            for job in self.store.lost_hosts.jobs_on(host):
                self.both("lost_hosts.mark_lost", job.job_id, attempt=job.attempt, now=self.now)
        if work is not None:
            self.submits(Submission(queue="gpu"))
            for place in sorted(GPUS):
                if not self.model.state.held_by(place):
                    self.claims_as(self.incarnations[place], place, "gpu", work[0])
        if back is not None and self.is_at(claim, [State.HOST_LOST]):
            self.ends(claim, back)
        if s:
            self.now += s
            self.both("sweeps.reclaim_expired", now=self.now, ingest=None)

    @precondition(lambda self: self.model.state.jobs)
    @rule(
        pick=PICKS,
        state=st.sampled_from([State.RUNNING, State.QUEUED, State.WAITING, State.BLOCKED, State.FENCING]),
        run_id=st.sampled_from([None, None, None, "r1", "r2"]),
    )
    def cancel(self, pick: int, state: State, run_id: str | None) -> None:
        if run_id is None:
            self.both("admin.cancel", self.job(pick, state).job_id, reason="a person said so", now=self.now)
        else:
            self.both("admin.cancel_run", run_id, reason="a person said so", now=self.now)

    @precondition(lambda self: self.model.state.jobs)
    @rule(pick=PICKS, act=st.sampled_from(["block", "block", "unblock", "both"]), work=WORK)
    def block(self, pick: int, act: str, work: Any) -> None:
        if act != "unblock":
            waits = State.WAITING if work else State.QUEUED
            self.both("admin.block", self.job(pick, waits).job_id, reason="a person said so", now=self.now)
        if act != "block":
            self.both("admin.unblock", self.job(pick, State.BLOCKED).job_id, reason="so", now=self.now)
        self.works(work)

    @rule(place=PLACES, act=st.sampled_from(["lock", "drain", "quarantine", "quarantine its slot"]), work=WORK)
    def an_operator_stops_a_worker(self, place: Place, act: str, work: Any) -> None:
        if act == "lock":
            self.both("admin.lock", **slot(place), who="someone", reason="so", now=self.now)
        elif act == "drain":
            self.both("admin.drain", **slot(place))
        else:
            whose = {"host": place[0], "worker": place[1] if "slot" in act else None}
            self.both("gpu_quarantine.quarantine", GPUS[place][:1], **whose, reason="D state", now=self.now)
        self.works(work)

    @rule(work=WORK)
    def an_operator_frees_all_workers(self, work: Any) -> None:
        for place in GPUS:
            self.both("admin.unlock", **slot(place), who="someone", now=self.now)
        for gpu in ("GPU-0", "GPU-1", "GPU-2"):
            self.both("gpu_quarantine.release_gpu", gpu)
        self.works(work)

    # --- the outbox

    @rule(consumer=st.sampled_from(["notifier", "planner"]), limit=st.integers(1, 4), done=st.integers(0, 4))
    def read_events(self, consumer: str, limit: int, done: int) -> None:
        found = self.store.outbox.events(consumer, limit=limit)
        assert [(each.position, visible(each)) for each in found] == self.model.outbox.events(consumer, limit=limit)
        self.read[consumer] += [each.position for each in found]
        for event in found[:done][-1:]:
            self.store.outbox.acknowledge(consumer, event, now=self.now)
            self.model.outbox.acknowledge(consumer, event.position)
            self.happened[f"acknowledged: {consumer}"] += 1

    @rule(consumer=st.sampled_from(["notifier", "planner"]), pick=PICKS)
    def acknowledge_an_old_one(self, consumer: str, pick: int) -> None:
        old = self.store.outbox.events("newcomer", limit=1 + pick)
        if old and old[-1].position < self.model.state.positions.get(consumer, 0):
            self.happened["acknowledged again"] += 1
            self.store.outbox.acknowledge(consumer, old[-1], now=self.now)
        assert self.store.outbox.consumers() == self.model.outbox.consumers()

    # --- invariants

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        look = self.databases.see_queue.execute
        every = f"SELECT {', '.join(Row._fields)} FROM jobs"  # noqa: S608 - our own names
        rows = {row[0]: Row(*row) for row in look(every).fetchall()}
        outbox = look("SELECT kind, job_id, attempt, run_id FROM outbox_events ORDER BY event_id").fetchall()
        needs = look("SELECT job_id, needs_job_id FROM dependencies").fetchall()
        assert dict(look("SELECT run_id, state FROM runs").fetchall()) == self.model.state.runs
        assert rows.keys() == self.model.state.jobs.keys()
        for job in self.model.state.jobs.values():
            found, wanted = rows[job.job_id], expected(job, self.model, rows[job.job_id])
            assert found == wanted, [each for each in zip(Row._fields, found, wanted, strict=True) if len({*each}) == 3]
        assert outbox == [(each.kind, each.job_id, each.attempt, each.run_id) for each in self.model.state.events]
        laws(self.before, rows, outbox, needs)
        self.before = rows


class Row(NamedTuple):
    """The compared columns of a job."""

    job_id: int
    state: str
    run_id: str | None
    job_class: str
    priority: int
    attempt: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    host: str | None
    worker: str | None
    lease_expires_at: float | None
    queued_at: float | None
    budget_s: float
    needs: int
    pending: int
    gang: int | None
    requeued_with_ranks: int


def expected(job: Task, model: Model, found: Row) -> Row:
    """The row that the model expects. `pending` counts only until the job ends."""
    host, worker = job.place or (None, None)
    return Row(
        job_id=job.job_id,
        state=job.state,
        run_id=job.run_id,
        job_class=job.job_class,
        priority=job.priority,
        attempt=job.attempt,
        watchdog_retries=job.retries,
        reclaims=job.reclaims,
        claimed_by=job.holder,
        host=host,
        worker=worker,
        lease_expires_at=job.lease,
        queued_at=job.queued_at,
        budget_s=job.budget_s,
        needs=len(job.needs),
        pending=found.pending if job.state in FINAL else model.state.pending(job),
        gang=job.gang,
        requeued_with_ranks=found.requeued_with_ranks if job.state in FINAL else job.requeued_with_ranks,
    )


def visible(event: Event) -> VisibleEvent:
    timed = event.kind in (Kind.COMPLETED, Kind.FAILED)
    return VisibleEvent(
        kind=event.kind,
        job_id=event.job_id,
        attempt=event.attempt,
        run_id=event.run_id,
        waited_s=event.waited_s if timed else None,
        ran_s=event.ran_s if timed else None,
    )


def laws(before: dict[int, Row], rows: dict[int, Row], outbox: Sequence[Any], needs: Sequence[Any]) -> None:
    """Check what holds for any queue."""
    owned = {State.RUNNING, State.FENCING, State.HOST_LOST}
    holders = Counter(row.claimed_by for row in rows.values() if row.state in HELD)
    assert all(count == 1 for count in holders.values()), "an incarnation has one job at a time"
    ended = Counter((job_id, kind) for kind, job_id, *_ in outbox)
    lacks = Counter(job_id for job_id, needed in needs if rows[needed].state != State.COMPLETED)
    for job_id, row in rows.items():
        assert (row.claimed_by is not None) == (row.state in owned), "an owned job has an owner, others have none"
        assert row.reclaims < RECLAIMS_MAX
        assert row.attempt > 0 or row.state not in owned
        assert row.state not in FINAL or ended[job_id, row.state] == 1, "one event of its end"
        assert sum(ended[job_id, kind] for kind in FINAL) == (row.state in FINAL), "and no other"
        if row.state == State.WAITING:
            assert row.pending == lacks[job_id] > 0, "a waiting job has pending needs"
        if row.state in {State.QUEUED, State.COMPLETED} | owned:
            assert lacks[job_id] == 0, "no job runs before its needs"
            assert row.queued_at is not None, "queued_at is known"
        if (was := before.get(job_id)) is not None:
            assert row.attempt >= was.attempt, "attempts only grow"
            # A round of work may end one attempt and begin the next.
            assert was.state not in FINAL or row == was, "a final job does not change"


# --- on both databases


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Databases]:
    with databases.sqlite() as found:
        yield found


@pytest.fixture(scope="module")
def postgresql(postgres: Postgres) -> Iterator[Databases]:
    with databases.postgresql(postgres) as found:
        yield found


def run(found: Databases, *, rounds: int) -> Counter[str]:
    """Run the same examples each time; returns counts of events.

    In rounds: from the eleventh example on hypothesis mostly copies parts of earlier ones.
    """
    machine = type("On", (QueueMachine,), {"databases": found, "happened": Counter()})
    how = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for number in range(rounds):
        run_state_machine_as_test(seed(number)(machine), settings=how)
    happened: Counter[str] = machine.happened  # type: ignore[attr-defined]
    return happened


WANTED: Final = (
    *(f"move: {move}" for move in Move if move is not Move.HALT),  # the tests of wrangling cover it
    *(f"event: {kind}" for kind in Kind),
    *("claimed", "claimed again", "claimed by model", "overtaken long enough", "left to another worker"),
    *("claimed with needs", "claimed with several needs", "ready", "ready while blocked"),
    "recalled while it is fenced",
    *("cancelled with a needed job", "run opened again", "budget of the queue", "ingest reclaimed"),
    *("refused: no retry is left", "nothing: its retry is not due"),
    *("nothing: locked", "nothing: in quarantine", "nothing: a lost host's GPU"),
    *("back by a renewal", "back by a result", "back by a claim", "back by a release", "lost: given away at last"),
    *("refused: replaced", "refused: drained", "refused: an old claim", "refused: its run is over"),
    *("refused: no budget is set", "refused: an ingest job has no run"),
    *("refused: a needed job is in another run", "refused: a needed job cannot complete"),
    *("acknowledged: notifier", "acknowledged: planner", "acknowledged again"),
)


def test_queue_agrees_with_its_model_on_sqlite_in_a_few_histories(sqlite: Databases) -> None:
    happened = run(sqlite, rounds=2)

    wanted = ("claimed", "claimed by model", "ready", "refused: replaced", "event: run_completed")
    assert [what for what in wanted if not happened[what]] == []


@pytest.mark.nightly
def test_queue_agrees_with_its_model_on_sqlite(sqlite: Databases) -> None:
    happened = run(sqlite, rounds=ROUNDS)

    assert [what for what in WANTED if not happened[what]] == []


@pytest.mark.needs_postgres
@pytest.mark.nightly
def test_queue_agrees_with_its_model_on_postgresql(postgresql: Databases) -> None:
    happened = run(postgresql, rounds=4)

    wanted = ("claimed by model", "left to another worker", "ready", "back by a claim",
              "ingest reclaimed", "event: run_completed", "event: run_failed", "acknowledged again")  # fmt: skip
    assert [what for what in wanted if not happened[what]] == []
