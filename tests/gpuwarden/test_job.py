"""The moves of a job as a truth table; fencing; classes, budgets and timeouts."""

import pytest

from gpuwarden.job import (
    EXIT_DISOWNED,
    FINAL,
    MOVES,
    Condition,
    IllegalMoveError,
    JobClass,
    Move,
    Phase,
    State,
    after,
    stall_timeout_s,
)

pytestmark = pytest.mark.pure

# Every move that is legal, by the state it starts from. What is not here must be refused.
LEGAL: dict[str, dict[str, str]] = {
    "waiting": {"ready": "queued", "block": "blocked", "cancel": "cancelled"},
    "queued": {"claim": "running", "block": "blocked", "cancel": "cancelled"},
    "running": {
        "complete": "completed",
        "fail_by_worker": "failed",
        "release": "queued",
        "reclaim": "queued",
        "supersede": "queued",
        "exhaust": "failed",
        "fence": "fencing",
        "lose": "host_lost",
        "finish": "finished",
        "recall": "queued",
        "halt": "blocked",
        "cancel": "cancelled",
    },
    "finished": {"close": "completed", "recall": "queued", "exhaust": "failed", "cancel": "cancelled"},
    "fencing": {
        "requeue": "queued",
        "fail": "failed",
        "reclaim": "queued",
        "exhaust": "failed",
        "cancel": "cancelled",
    },
    "host_lost": {
        "return": "running",
        "reclaim": "queued",
        "supersede": "queued",
        "exhaust": "failed",
        "fence": "fencing",
        "recall": "queued",
        "cancel": "cancelled",
    },
    "blocked": {"unblock": "queued", "defer": "waiting", "cancel": "cancelled"},
    "completed": {},
    "failed": {},
    "cancelled": {},
}

TABLE = [pytest.param(state, move, id=f"{state}-{move}") for state in State for move in Move]


@pytest.mark.parametrize(("state", "move"), TABLE)
def test_a_move_is_made_from_its_own_states_and_refused_from_every_other(state: State, move: Move) -> None:
    target = LEGAL[state].get(move)
    if target is None:
        with pytest.raises(IllegalMoveError, match=f"cannot {move} a job that is {state}: it must be"):
            after(state, move)
    else:
        assert after(state, move) == target


def test_the_table_covers_every_state_and_every_move() -> None:
    assert set(LEGAL) == set(State)
    assert {move for row in LEGAL.values() for move in row} == set(Move) == set(MOVES)


def test_nothing_leaves_a_final_state() -> None:
    assert {state for state, moves in LEGAL.items() if not moves} == FINAL


def test_a_refused_move_says_every_state_that_would_do() -> None:
    with pytest.raises(IllegalMoveError, match=r"it must be host_lost, running$"):
        after(State.QUEUED, Move.FENCE)


def test_only_a_claim_starts_a_job_that_waits() -> None:
    assert [move for move, target in LEGAL["queued"].items() if target == "running"] == ["claim"]


@pytest.mark.parametrize("move", [Move.CLAIM, Move.COMPLETE, Move.FAIL_BY_WORKER, Move.RELEASE, Move.SUPERSEDE])
def test_while_fencing_no_worker_old_or_new_moves_the_job(move: Move) -> None:
    with pytest.raises(IllegalMoveError):
        after(State.FENCING, move)


@pytest.mark.behaviour("A1")
@pytest.mark.parametrize(
    ("job_class", "budget_s", "retried"),
    [
        (JobClass.GPU, 8100, True),
        (JobClass.GPU_VIDEO, 1800, True),
        (JobClass.INGEST_FETCH, 7200, False),
        (JobClass.INGEST_LOAD, 3600, False),
        (JobClass.INPUT, 120, True),
        (JobClass.CPU, 2100, True),
    ],
)
def test_a_class_has_its_budget_and_its_end(job_class: JobClass, budget_s: float, *, retried: bool) -> None:
    assert (job_class.budget_s, job_class.retried) == (budget_s, retried)


@pytest.mark.behaviour("A1")
def test_every_class_has_a_budget_but_the_one_whose_queue_sets_it() -> None:
    assert {job_class for job_class in JobClass if not job_class.budget_s} == {JobClass.INGEST}


@pytest.mark.parametrize(
    ("job_class", "reports_steps", "configured_s", "allowed_s"),
    [
        pytest.param(JobClass.GPU, True, None, 120, id="a GPU job that reports steps is policed at 120 s"),
        pytest.param(JobClass.GPU, True, 30.0, 30, id="its owner may set the silence"),
        pytest.param(JobClass.GPU, True, 0.0, 0, id="its owner may switch it off"),
        pytest.param(JobClass.GPU, False, None, 0, id="without steps it is left alone"),
        pytest.param(JobClass.GPU, False, 30.0, 0, id="without steps a setting does not change that"),
        pytest.param(JobClass.GPU_VIDEO, True, None, 0, id="a video model is exempt"),
        pytest.param(JobClass.GPU_VIDEO, True, 30.0, 0, id="a video model stays exempt whatever is set"),
        pytest.param(JobClass.CPU, True, None, 0, id="a CPU job is exempt"),
        pytest.param(JobClass.INPUT, True, None, 0, id="a parked input is exempt"),
        pytest.param(JobClass.INGEST_FETCH, True, None, 0, id="an ingest sweep is exempt"),
    ],
)
def test_the_stall_condition_is_opt_in(
    job_class: JobClass, reports_steps: bool, configured_s: float | None, allowed_s: float
) -> None:
    assert stall_timeout_s(job_class, reports_steps=reports_steps, configured_s=configured_s) == allowed_s


def test_work_counts_in_the_phases_that_may_rightly_leave_gpu_and_ram_alone() -> None:
    assert {phase for phase in Phase if phase.counts_work} == {Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT}


def test_trips_are_told_apart_by_the_exit_code_of_a_worker_that_can_still_end_by_itself() -> None:
    told_apart = {condition: condition.exit_code for condition in Condition if condition.exit_code != EXIT_DISOWNED}

    assert told_apart == {Condition.BUDGET: 75, Condition.STALL: 76, Condition.GANG: 76, Condition.HEALTH: 78}
    assert EXIT_DISOWNED == 77
