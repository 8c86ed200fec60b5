"""Faulty worker or faulty job: the verdict on a tally as truth tables, and properties for any tally."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.job import Condition
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from remediator.plan import (
    BlockRun,
    Close,
    Facts,
    Limits,
    LockWorker,
    Migrate,
    Outcome,
    Subject,
    Wait,
    WouldAct,
    Wrangle,
)
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.wrangle import (
    ACTIVATION,
    CONFIRMABLE,
    MIGRATIONS_MAX,
    TIMEOUT_S,
    NoAction,
    Rules,
    Verdict,
    classify,
    decide,
    rules,
    still_valid,
)
from tests.remediator.builders import run_facts

pytestmark = pytest.mark.pure


RULES = Rules()


def worker(
    name: str, *, done: int = 0, failed: int = 0, runs_for_s: float | None = 60.0, spent: str | None = None
) -> WorkerTally:
    return WorkerTally(host="box1", worker=name, done=done, failed=failed, runs_for_s=runs_for_s, spent=spent)


def run(*workers: WorkerTally, **changed: Any) -> RunTally:
    its: dict[str, Any] = {"asked": True, "over": False, "ranked": False, "unsettled": 0, "migrations": 0}
    return RunTally(run_id="r1", workers=workers, **its | changed)


BAD = worker("bad", failed=6)
LAST = worker("bad", failed=6, spent="job 7 has no attempt left")
GONE = worker("bad", failed=6, runs_for_s=None)

TABLE: dict[str, tuple[RunTally, type[Verdict], str]] = {
    # B1
    "no worker has run it": (run(), NoAction, ""),
    "five failures are allowed": (run(worker("w1", failed=5), worker("w2", done=9)), NoAction, ""),
    "five failures of each of ten workers are allowed": (
        run(*(worker(f"w{n}", failed=5) for n in range(10))),
        NoAction,
        "",
    ),
    # B2
    "six failures, others finish items: the worker": (
        run(BAD, worker("w2", done=3, failed=1), worker("w3", done=4)),
        LockWorker,
        "lock bad on box1",
    ),
    "others finished items and left": (
        run(BAD, worker("w2", done=1, runs_for_s=None)),
        LockWorker,
        "lock bad on box1",
    ),
    "it left, others finished items": (run(GONE, worker("w2", done=1)), LockWorker, "lock bad on box1"),
    "others finish and fail items": (run(BAD, worker("w2", done=1, failed=50)), LockWorker, "lock bad on box1"),
    "two faulty workers: the worse first": (
        run(worker("b1", failed=7), worker("b2", failed=8), worker("w3", done=1)),
        LockWorker,
        "lock b2 on box1",
    ),
    "others finished items, a job is fenced": (
        run(BAD, worker("w2", done=1), unsettled=1),
        LockWorker,
        "lock bad on box1",
    ),
    # B3
    "no finished item, all fail: the job": (
        run(BAD, worker("w2", failed=1), worker("w3", failed=2)),
        BlockRun,
        "block it",
    ),
    "all fail, one without failures left: the job": (
        run(BAD, worker("w2", failed=1), worker("w3", runs_for_s=None)),
        BlockRun,
        "block it",
    ),
    # B4
    "another has not ended its first item": (
        run(BAD, worker("w2", runs_for_s=TIMEOUT_S - 0.1)),
        Wait,
        Reason.INSUFFICIENT_DATA,
    ),
    "one is undecided, all others fail": (
        run(BAD, worker("w2", failed=3), worker("w3")),
        Wait,
        Reason.INSUFFICIENT_DATA,
    ),
    "only this one fails after the wait: the worker": (
        run(BAD, worker("w2", runs_for_s=TIMEOUT_S)),
        LockWorker,
        "lock bad on box1",
    ),
    "one does not fail, another is undecided: the worker": (
        run(BAD, worker("w2"), worker("w3", runs_for_s=TIMEOUT_S), worker("w4", failed=1)),
        LockWorker,
        "lock bad on box1",
    ),
    # B5
    "alone: moved": (
        run(BAD),
        Migrate,
        "move it from bad on box1",
    ),
    "alone now, others left: moved": (
        run(BAD, worker("w2", failed=2, runs_for_s=None), worker("w3", runs_for_s=None)),
        Migrate,
        "move it from bad on box1",
    ),
    "the third move is the last": (run(BAD, migrations=2), Migrate, "move it from bad on box1"),
    "the fourth worker fails as well: the job": (
        run(BAD, worker("w1", failed=6, runs_for_s=None), migrations=3),
        BlockRun,
        "block it",
    ),
    "the worst left, another faulty one is alone: moved": (
        run(worker("w1", failed=9, runs_for_s=None), BAD, migrations=1),
        Migrate,
        "move it from bad on box1",
    ),
    "moved, the next one has few failures": (
        run(GONE, worker("w2", failed=5), migrations=1),
        NoAction,
        "",
    ),
    "moved, the next one finishes items: the worker": (
        run(GONE, worker("w2", done=1), migrations=1),
        LockWorker,
        "lock bad on box1",
    ),
    # A job at its cap
    "another worker is at its cap": (run(BAD, worker("w2", done=1, spent="job 8")), LockWorker, "lock bad on box1"),
    # B6
    "one finished item clears a worker": (run(worker("w1", done=1, failed=99)), NoAction, ""),
    "one worker is cleared, the other locked": (
        run(worker("w1", done=1, failed=99), BAD),
        LockWorker,
        "lock bad on box1",
    ),
    # B7
    "wrangling is off": (run(BAD, worker("w2", done=1), asked=False), NoAction, ""),
    # Unknown
    "the run ended": (run(BAD, worker("w2", done=1), over=True), NoAction, ""),
    "a run of a gang": (run(BAD, worker("w2", done=1), ranked=True), NoAction, ""),
    "one of its jobs is on a lost host": (run(BAD, unsettled=1), Wait, Reason.JOBS_IN_DOUBT),
    "no worker runs it": (run(GONE), NoAction, ""),
}


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(run(LAST, worker("w2", done=1)), id="others finish items"),
        pytest.param(run(LAST, worker("w2", runs_for_s=TIMEOUT_S)), id="another has no failures for long"),
        pytest.param(run(LAST), id="it is alone"),
    ],
)
def test_job_without_an_attempt_left_is_not_taken(counts: RunTally) -> None:
    verdict = classify(counts, RULES)

    assert isinstance(verdict, Wait)
    assert verdict.reason is Reason.ATTEMPTS_EXHAUSTED
    assert "job 7 has no attempt left" in verdict.message


HERE, HERE_WORSE = worker("bad", failed=6), worker("b2", failed=7)
THERE = replace(worker("worse", failed=9), host="box2")
FINE = worker("w2", done=1)


def at_cap(each: WorkerTally) -> WorkerTally:
    return replace(each, spent="job 7 has no attempt left")


@pytest.mark.parametrize(
    ("counts", "host", "said"),
    [
        pytest.param(run(HERE, THERE, FINE), "box1", "lock bad on box1", id="the own host, another host is worse"),
        pytest.param(run(HERE, HERE_WORSE, THERE, FINE), "box1", "lock b2 on box1", id="the worst of the own host"),
        pytest.param(
            run(HERE, at_cap(HERE_WORSE), FINE), "box1", "lock bad on box1", id="one of the own host not at its cap"
        ),
        pytest.param(run(THERE, FINE), "box1", "lock worse on box2", id="another host, none on the own host"),
        pytest.param(
            run(at_cap(HERE), THERE, FINE), "box1", "lock worse on box2", id="another host, the own at its cap"
        ),
        pytest.param(run(at_cap(HERE), FINE), "box1", Reason.ATTEMPTS_EXHAUSTED, id="none, all at their caps"),
        pytest.param(
            run(HERE, at_cap(THERE), FINE), None, "lock bad on box1", id="for an operator, one not at its cap"
        ),
        pytest.param(run(HERE, THERE), "box1", "block it", id="no finished item: the run"),
        pytest.param(
            run(HERE, THERE, worker("w2", runs_for_s=TIMEOUT_S)),
            "box1",
            "lock worse on box2",
            id="no finished item: the worst of all",
        ),
    ],
)
def test_order_of_several_faulty_workers(counts: RunTally, host: str | None, said: str) -> None:
    verdict = classify(counts, RULES, host=host)

    assert deed_or_reason(verdict) == said
    assert isinstance(verdict, Wait) or still_valid(counts, verdict, RULES)  # type: ignore[arg-type]


def test_run_is_blocked_although_a_job_has_no_attempt_left() -> None:
    assert isinstance(classify(run(LAST, worker("w2", failed=1)), RULES), BlockRun)


@pytest.mark.parametrize(("counts", "expected", "said"), TABLE.values(), ids=TABLE)
def test_verdict_on_a_tally(counts: RunTally, expected: type[Verdict], said: str) -> None:
    verdict = classify(counts, RULES)

    assert (type(verdict), deed_or_reason(verdict)) == (expected, said)


def deed_or_reason(verdict: Verdict) -> str:
    match verdict:
        case NoAction():
            return ""
        case Wait(reason=reason):
            return reason
    return verdict.deed


FIGURES: dict[str, tuple[RunTally, tuple[str, ...]]] = {
    "lock": (run(BAD, worker("w2", done=3), worker("w3", done=4)), ("bad on box1", "failed 6", "finished 7")),
    "block": (run(BAD, worker("w2", failed=1), worker("w3", failed=2)), ("bad on box1", "failed 6", "the 2 others")),
    "wait": (run(BAD, worker("w2")), ("bad on box1", "w2 on box1", "1800 s")),
    "move": (run(BAD, migrations=1), ("bad on box1", "failed 6", "move 2 of 3")),
    "the last move is over": (run(BAD, migrations=3), ("after 3 moves of at most 3",)),
}


@pytest.mark.parametrize(("counts", "figures"), FIGURES.values(), ids=FIGURES)
def test_message_names_workers_and_figures(counts: RunTally, figures: tuple[str, ...]) -> None:
    message = classify(counts, RULES).message

    assert [each for each in figures if each not in message] == []


def test_constants_are_those_of_the_specification() -> None:
    assert (ACTIVATION, MIGRATIONS_MAX) == (5, 3)
    assert Rules(activation=ACTIVATION, migrations_max=MIGRATIONS_MAX, timeout_s=TIMEOUT_S) == RULES


@pytest.mark.parametrize(
    ("rules", "counts", "expected"),
    [
        pytest.param(Rules(activation=0), run(worker("w1", failed=1)), Migrate, id="activation 0"),
        pytest.param(Rules(activation=9), run(worker("w1", failed=9)), NoAction, id="activation 9"),
        pytest.param(Rules(migrations_max=0), run(BAD), BlockRun, id="no moves"),
        pytest.param(Rules(timeout_s=60), run(BAD, worker("w2")), LockWorker, id="timeout 60 s"),
    ],
)
def test_constants_can_be_set(rules: Rules, counts: RunTally, expected: type[Verdict]) -> None:
    assert type(classify(counts, rules)) is expected


def test_recipients_of_a_lock_and_a_block() -> None:
    lock, block = classify(run(BAD, worker("w2", done=1)), RULES), classify(run(BAD, worker("w2", failed=1)), RULES)

    assert isinstance(lock, LockWorker)
    assert isinstance(block, BlockRun)
    assert (lock.tell, block.tell) == ("administrator", "submitter")


# --- any tally

TALLIES = st.builds(
    WorkerTally,
    host=st.sampled_from(["box1", "box2"]),
    worker=st.sampled_from(["w1", "w2", "w3", "w4", "w5"]),
    done=st.sampled_from([0, 0, 0, 1, 7]),
    failed=st.integers(0, 9),
    runs_for_s=st.none() | st.floats(0, 2 * TIMEOUT_S),
)
RUNS = st.builds(
    RunTally,
    run_id=st.just("r1"),
    asked=st.booleans() | st.just(value=True),
    over=st.just(value=False) | st.booleans(),
    ranked=st.just(value=False) | st.booleans(),
    unsettled=st.sampled_from([0, 0, 0, 1]),
    migrations=st.integers(0, 4),
    workers=st.lists(TALLIES, max_size=6, unique_by=lambda each: (each.host, each.worker)).map(tuple),
)


@given(RUNS)
def test_no_tally_locks_a_worker_that_finished_an_item(counts: RunTally) -> None:
    verdict = classify(counts, RULES)

    if isinstance(verdict, NoAction):
        return
    assert counts.asked
    assert not counts.over
    assert not counts.ranked
    assert any(each.failed > ACTIVATION and not each.done for each in counts.workers)
    if isinstance(verdict, LockWorker | Migrate):
        (judged,) = (each for each in counts.workers if (each.host, each.worker) == (verdict.host, verdict.worker))
        assert judged.done == 0
        assert judged.failed > ACTIVATION
    if isinstance(verdict, Migrate):
        assert counts.migrations < MIGRATIONS_MAX
    if isinstance(verdict, Migrate | BlockRun):
        assert not any(each.done for each in counts.workers)
        assert not counts.unsettled


@given(RUNS, st.randoms(use_true_random=False))
def test_order_of_workers_does_not_change_the_verdict(counts: RunTally, random: Any) -> None:
    shuffled = random.sample(counts.workers, len(counts.workers))
    found, again = classify(counts, RULES), classify(replace(counts, workers=tuple(shuffled)), RULES)

    assert type(found) is type(again)
    if isinstance(found, LockWorker | Migrate):
        assert (found.host, found.worker) == (again.host, again.worker)  # type: ignore[union-attr]


class Farm:
    """One run on a farm. A worker finishes every item, fails every item, or never ends its first."""

    def __init__(self, nature: dict[str, str], at_once: int) -> None:
        self.nature, self.at_once = nature, at_once
        self.counts = {name: [0, 0] for name in nature}
        self.running: dict[str, float] = {}
        self.locked: set[str] = set()
        self.tried: set[str] = set()
        self.migrations = 0

    def hour(self) -> None:
        """Let free workers claim jobs of the run, and each of them try an item."""
        for name in self.nature:
            if len(self.running) < self.at_once and name not in {*self.running, *self.locked, *self.tried}:
                self.running[name] = 0.0
        for name in self.running:
            self.running[name] += TIMEOUT_S / 4
            if self.nature[name] != "slow":
                self.counts[name][self.nature[name] == "bad"] += 1

    def tally(self) -> RunTally:
        return run(
            *(
                worker(name, done=done, failed=failed, runs_for_s=self.running.get(name))
                for name, (done, failed) in self.counts.items()
            ),
            migrations=self.migrations,
        )

    def carry_out(self, verdict: LockWorker | Migrate) -> None:
        if isinstance(verdict, LockWorker):
            self.locked.add(verdict.worker)
            self.counts[verdict.worker] = [0, 0]
        else:
            self.migrations += 1
            assert verdict.worker not in self.tried, "it was moved to an earlier worker"
            self.tried.add(verdict.worker)
        self.running.pop(verdict.worker, None)


@given(
    st.lists(st.sampled_from(["good", "bad", "bad", "slow"]), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_farm_ends_with_its_good_workers_after_three_moves(natures: list[str], at_once: int) -> None:
    farm = Farm({f"w{n}": nature for n, nature in enumerate(natures)}, at_once)
    acts: list[Verdict] = []
    for _ in range(20 * len(natures)):
        farm.hour()
        while isinstance(verdict := classify(farm.tally(), RULES), LockWorker | Migrate):
            acts.append(verdict)
            farm.carry_out(verdict)
        if isinstance(verdict, BlockRun):
            acts.append(verdict)
            break

    assert len(acts) <= len(natures) + MIGRATIONS_MAX + 1
    assert farm.migrations <= MIGRATIONS_MAX
    assert {farm.nature[name] for name in farm.locked} <= {"bad"}
    assert not isinstance(verdict, Wait), "a wait ends"
    if "good" not in natures and "slow" not in natures and len(natures) > MIGRATIONS_MAX:
        assert isinstance(verdict, BlockRun)


# --- the episode

LOCKS = run(BAD, worker("w2", done=3))
BLOCKS = run(BAD, worker("w2", failed=1))
MOVES = run(BAD)
NOTHING = run(worker("bad", failed=5))
ELSEWHERE = run(THERE, FINE)


def test_remedy_has_the_name_of_the_rules_and_is_about_runs() -> None:
    remedy = REMEDIES["wrangle"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.RUN)
    assert {Condition.ITEMS} == CONFIRMABLE


@pytest.mark.parametrize("firing", [True, False], ids=["alert fires", "alert ended"])
@pytest.mark.parametrize(
    ("counts", "expected", "deed"),
    [
        pytest.param(LOCKS, LockWorker, "lock bad on box1", id="lock"),
        pytest.param(MOVES, Migrate, "move it from bad on box1", id="move"),
        pytest.param(BLOCKS, BlockRun, "block it", id="block"),
    ],
)
def test_action_is_done_or_recorded_once(counts: RunTally, expected: type[Wrangle], deed: str, *, firing: bool) -> None:
    step = decide(run_facts(counts, firing=firing))
    would = decide(run_facts(counts, firing=firing, armed=False))
    again = decide(run_facts(counts, firing=firing, armed=False, dry_run_recorded=True))

    assert isinstance(step, expected)
    assert step == classify(counts, RULES)
    assert step.deed == deed
    assert isinstance(would, WouldAct)
    assert deed in would.message
    assert step.message in would.message
    assert isinstance(again, Wait)
    assert (again.reason, again.about) == (Reason.DRY_RUN, deed)


WAITS: dict[str, tuple[Facts, Reason]] = {
    "the queue does not answer": (
        run_facts(LOCKS, run=None, unknown="no answer"),
        Reason.QUEUE_UNREACHABLE,
    ),
    "the alert ended, and the queue does not answer": (
        run_facts(LOCKS, run=None, firing=False),
        Reason.QUEUE_UNREACHABLE,
    ),
    "the queue has no such run": (run_facts(None), Reason.NO_RUN),
    "no fault in the queue": (run_facts(NOTHING), Reason.NO_FAULT_FOUND),
    "jobs in doubt": (run_facts(run(BAD, unsettled=1)), Reason.JOBS_IN_DOUBT),
    "jobs in doubt, alert ended": (
        run_facts(run(BAD, unsettled=1), firing=False),
        Reason.JOBS_IN_DOUBT,
    ),
    "the faulty worker is on another host": (
        run_facts(ELSEWHERE),
        Reason.OTHER_WORKER_FAULTY,
    ),
}


@pytest.mark.parametrize(("given_facts", "reason"), WAITS.values(), ids=WAITS)
def test_episode_waits(given_facts: Facts, reason: Reason) -> None:
    step = decide(given_facts)

    assert isinstance(step, Wait)
    assert step.reason is reason


@pytest.mark.parametrize(
    ("ended", "outcome", "reason"),
    [
        pytest.param(
            run_facts(NOTHING, firing=False, decided=True, done=True),
            Outcome.FIXED,
            Reason.DONE,
            id="action done",
        ),
        pytest.param(
            run_facts(NOTHING, firing=False, decided=True),
            Outcome.PARTLY,
            Reason.NOT_RECORDED,
            id="action not recorded",
        ),
        pytest.param(run_facts(NOTHING, firing=False), Outcome.UNCONFIRMED, Reason.NO_FAULT_FOUND, id="no action"),
        pytest.param(run_facts(None, firing=False), Outcome.UNCONFIRMED, Reason.NO_RUN, id="unknown run"),
        pytest.param(
            run_facts(ELSEWHERE, firing=False),
            Outcome.UNCONFIRMED,
            Reason.OTHER_WORKER_FAULTY,
            id="another host is faulty",
        ),
    ],
)
def test_episode_closes_with_its_alert(ended: Facts, outcome: Outcome, reason: Reason) -> None:
    assert decide(ended) == Close(outcome=outcome, reason=reason, message="")


def test_rules_have_the_constants_of_the_settings() -> None:
    assert rules(Limits()) == Rules()
    assert rules(Limits(wrangle_activation=1, wrangle_migrations_max=2, wrangle_timeout_s=3.0)) == Rules(
        activation=1, migrations_max=2, timeout_s=3.0
    )
    assert isinstance(decide(run_facts(NOTHING, limits=Limits(wrangle_activation=4))), Migrate)


@pytest.mark.parametrize(
    ("counts", "so"),
    [
        pytest.param(run(replace(BAD, failed=9), worker("w2", done=8)), True, id="more failures"),
        pytest.param(run(replace(BAD, done=1), worker("w2", done=3)), False, id="it finished an item"),
        pytest.param(run(BAD, unsettled=1), False, id="jobs in doubt"),
        pytest.param(MOVES, False, id="another verdict"),
        pytest.param(
            run(worker("other", failed=6), worker("w2", done=3)), False, id="the same verdict on another worker"
        ),
    ],
)
def test_verdict_is_still_valid(counts: RunTally, *, so: bool) -> None:
    assert still_valid(counts, classify(LOCKS, RULES), RULES) is so  # type: ignore[arg-type]
