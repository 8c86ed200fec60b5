"""Moves, classes, budgets and timeouts of jobs."""

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

# Legal moves by state. All others must be refused.
LEGAL: dict[str, dict[str, str]] = {
    "waiting": {"ready": "queued", "block": "blocked", "cancel": "cancelled"},
    "queued": {"claim": "running", "block": "blocked", "cancel": "cancelled"},
    "running": {
        "complete": "completed",
        "fail_by_worker": "failed",
        "retry": "queued",
        "release": "queued",
        "give_back": "queued",
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
def test_move_is_legal_from_its_own_states_only(state: State, move: Move) -> None:
    target = LEGAL[state].get(move)
    if target is None:
        with pytest.raises(IllegalMoveError, match=f"cannot {move} a job that is {state}: it must be"):
            after(state, move)
    else:
        assert after(state, move) == target


def test_table_covers_every_state_and_move() -> None:
    assert set(LEGAL) == set(State)
    assert {move for row in LEGAL.values() for move in row} == set(Move) == set(MOVES)


def test_final_state_has_no_moves() -> None:
    assert {state for state, moves in LEGAL.items() if not moves} == FINAL


def test_illegal_move_names_its_legal_states() -> None:
    with pytest.raises(IllegalMoveError, match=r"it must be host_lost, running$"):
        after(State.QUEUED, Move.FENCE)


def test_only_a_claim_starts_a_queued_job() -> None:
    assert [move for move, target in LEGAL["queued"].items() if target == "running"] == ["claim"]


@pytest.mark.parametrize(
    "move", [Move.CLAIM, Move.COMPLETE, Move.FAIL_BY_WORKER, Move.RELEASE, Move.GIVE_BACK, Move.SUPERSEDE]
)
def test_no_worker_moves_a_fenced_job(move: Move) -> None:
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
def test_class_has_its_budget_and_end(job_class: JobClass, budget_s: float, *, retried: bool) -> None:
    assert (job_class.budget_s, job_class.retried) == (budget_s, retried)


@pytest.mark.behaviour("A1")
def test_every_class_has_a_budget_unless_its_queue_sets_it() -> None:
    assert {job_class for job_class in JobClass if not job_class.budget_s} == {JobClass.INGEST}


@pytest.mark.parametrize(
    ("job_class", "reports_steps", "configured_s", "allowed_s"),
    [
        pytest.param(JobClass.GPU, True, None, 120, id="GPU job with steps: 120 s"),
        pytest.param(JobClass.GPU, True, 30.0, 30, id="set by the submission"),
        pytest.param(JobClass.GPU, True, 0.0, 0, id="switched off by the submission"),
        pytest.param(JobClass.GPU, False, None, 0, id="no steps: exempt"),
        pytest.param(JobClass.GPU, False, 30.0, 0, id="no steps: exempt with a setting"),
        pytest.param(JobClass.GPU_VIDEO, True, None, 0, id="video model: exempt"),
        pytest.param(JobClass.GPU_VIDEO, True, 30.0, 0, id="video model: exempt with a setting"),
        pytest.param(JobClass.CPU, True, None, 0, id="CPU job: exempt"),
        pytest.param(JobClass.INPUT, True, None, 0, id="parked input: exempt"),
        pytest.param(JobClass.INGEST_FETCH, True, None, 0, id="ingest sweep: exempt"),
    ],
)
def test_stall_condition_is_opt_in(
    job_class: JobClass, reports_steps: bool, configured_s: float | None, allowed_s: float
) -> None:
    assert stall_timeout_s(job_class, reports_steps=reports_steps, configured_s=configured_s) == allowed_s


def test_work_counts_in_phases_that_may_leave_gpu_and_ram_idle() -> None:
    assert {phase for phase in Phase if phase.counts_work} == {Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT}


def test_each_condition_has_its_exit_code() -> None:
    codes = {condition: condition.exit_code for condition in Condition if condition.exit_code != EXIT_DISOWNED}

    assert codes == {Condition.BUDGET: 75, Condition.STALL: 76, Condition.GANG: 76, Condition.HEALTH: 78}
    assert EXIT_DISOWNED == 77
