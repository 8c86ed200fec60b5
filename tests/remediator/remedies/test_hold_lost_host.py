"""The remedy `hold_lost_host` as truth tables."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.job import Condition, State
from remediator.plan import Close, Facts, HeldJob, Lose, Outcome, Return, Step, Subject, Wait, WouldAct
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.hold_lost_host import CONFIRMABLE, decide
from tests.remediator.builders import LIMITS, held_job, host, host_facts

pytestmark = pytest.mark.pure

RUNS = held_job()
LOST = held_job(state=State.HOST_LOST)
HEARTBEAT = held_job(job_id=8, heard_s_ago=9.0)
NO_HEARTBEAT = held_job(job_id=9, heard_s_ago=None)
TIMEOUT_S = LIMITS.host_lost_after_s


def test_remedy_has_the_name_of_the_rules_and_is_about_hosts() -> None:
    remedy = REMEDIES["hold_lost_host"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.HOST)
    assert {Condition.HOST_LOST} == CONFIRMABLE


WAITS: dict[str, tuple[Facts, Reason]] = {
    "the queue does not answer": (host_facts(host=None, unknown="no answer"), Reason.QUEUE_UNREACHABLE),
    "its own executor is alive": (host_facts(RUNS, shows_life=True), Reason.EXECUTOR_ALIVE),
    "its executor was alive within the timeout": (
        host_facts(RUNS, silent_for_s=TIMEOUT_S - 0.001),
        Reason.OBSERVATION_TOO_SHORT,
    ),
    "this executor has just started": (host_facts(RUNS, silent_for_s=0.0), Reason.OBSERVATION_TOO_SHORT),
    "the gateway has not marked it as lost": (host_facts(RUNS, lost=False), Reason.OBSERVATION_TOO_SHORT),
    "the gateway marked it, and its worker had a heartbeat": (host_facts(HEARTBEAT, lost=True), Reason.WORKERS_ALIVE),
    "two of three hosts are silent": (
        host_facts(RUNS, accused=2, alive=1),
        Reason.MAJORITY_SILENT,
    ),
    "its worker had a heartbeat within the timeout": (
        host_facts(held_job(heard_s_ago=TIMEOUT_S - 0.001)),
        Reason.WORKERS_ALIVE,
    ),
    "its worker never had a heartbeat": (host_facts(NO_HEARTBEAT), Reason.WORKERS_ALIVE),
    "it has no job": (host_facts(), Reason.NO_JOBS),
    "its jobs are held already": (host_facts(LOST, taken=True), Reason.JOBS_HELD),
    "one job is held, the other has a heartbeat": (host_facts(LOST, HEARTBEAT, taken=True), Reason.WORKERS_ALIVE),
    "a recorded dry run": (host_facts(RUNS, armed=False, dry_run_recorded=True), Reason.DRY_RUN),
    "the alert ended without a heartbeat": (
        host_facts(LOST, firing=False, taken=True),
        Reason.JOBS_HELD,
    ),
    "it is back in a dry run": (
        host_facts(LOST, firing=False, shows_life=True, silent_for_s=0.0, armed=False),
        Reason.DRY_RUN,
    ),
    "it is back in a dry run, and its alert fires": (
        host_facts(LOST, shows_life=True, silent_for_s=0.0, armed=False),
        Reason.DRY_RUN,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), WAITS.values(), ids=WAITS)
def test_waits(given: Facts, reason: Reason) -> None:
    step = decide(given)

    assert isinstance(step, Wait)
    assert step.reason is reason


ACTS: dict[str, tuple[Facts, Step]] = {
    "silent for the timeout": (
        host_facts(RUNS),
        Lose(
            jobs=(RUNS,),
            message="",
        ),
    ),
    "exactly at the timeout": (
        host_facts(replace(RUNS, heard_s_ago=TIMEOUT_S), silent_for_s=TIMEOUT_S),
        Lose(
            jobs=(replace(RUNS, heard_s_ago=TIMEOUT_S),),
            message="",
        ),
    ),
    "the gateway has marked it as lost: the ledger is not asked": (
        host_facts(RUNS, lost=True, silent_for_s=0.0, accused=2, alive=1),
        Lose(
            jobs=(RUNS,),
            message="",
        ),
    ),
    "one of two hosts is silent: only the silent job": (
        host_facts(HEARTBEAT, RUNS, NO_HEARTBEAT, LOST, accused=1, alive=1),
        Lose(
            jobs=(RUNS,),
            message="",
        ),
    ),
    "dry run": (
        host_facts(RUNS, armed=False),
        WouldAct(message=""),
    ),
    "it is back, and one job is held": (
        host_facts(LOST, HEARTBEAT, firing=False, shows_life=True, taken=True),
        Return(
            jobs=(LOST,),
            message="",
        ),
    ),
    "it is back, and its alert still fires": (
        host_facts(LOST, HEARTBEAT, shows_life=True, taken=True),
        Return(
            jobs=(LOST,),
            message="",
        ),
    ),
    "it is back with its jobs": (
        host_facts(RUNS, firing=False, shows_life=True, taken=True),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
    "it stays silent, and an operator gave its jobs away": (
        host_facts(firing=False, taken=True),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
    "the alert ended before any action": (
        host_facts(RUNS, firing=False),
        Close(outcome=Outcome.UNCONFIRMED, reason=Reason.NO_JOBS, message=""),
    ),
}


@pytest.mark.parametrize(("given", "step"), ACTS.values(), ids=ACTS)
def test_acts(given: Facts, step: Step) -> None:
    assert decide(given) == step


JOBS = st.builds(
    HeldJob,
    job_id=st.integers(1, 9),
    attempt=st.integers(1, 3),
    state=st.sampled_from([State.RUNNING, State.HOST_LOST]),
    heard_s_ago=st.none() | st.floats(0, 1000),
)


@given(
    jobs=st.lists(JOBS, max_size=4),
    armed=st.booleans(),
    firing=st.booleans(),
    shows_life=st.booleans(),
    lost=st.none() | st.booleans(),
    silent_for_s=st.floats(0, 1000),
    accused=st.integers(1, 5),
    alive=st.integers(1, 5),
    taken=st.booleans(),
)
def test_only_silent_jobs_of_a_silent_host_are_held(
    jobs: list[HeldJob],
    armed: bool,
    firing: bool,
    shows_life: bool,
    lost: bool | None,
    silent_for_s: float,
    accused: int,
    alive: int,
    taken: bool,
) -> None:
    seen = host(
        *jobs, shows_life=shows_life, lost=lost, silent_for_s=silent_for_s, accused=accused, alive=alive, taken=taken
    )  # fmt: skip

    step = decide(host_facts(host=seen, armed=armed, firing=firing))

    assert isinstance(step, Wait | Close | WouldAct | Lose | Return)
    if isinstance(step, Lose):
        assert armed
        assert firing
        assert not shows_life
        assert lost or (lost is None and silent_for_s >= TIMEOUT_S and accused <= alive)
        assert step.jobs
        assert all(each.state is State.RUNNING and (each.heard_s_ago or 0) >= TIMEOUT_S for each in step.jobs)
    if isinstance(step, Return):
        assert armed
        assert shows_life
        assert all(each.state is State.HOST_LOST for each in step.jobs)
    if isinstance(step, Close):
        assert not firing
        assert State.HOST_LOST not in {each.state for each in jobs}
