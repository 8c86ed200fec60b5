"""The remedy for silent hosts as truth tables: what it decides from which facts, with a sentence a row."""

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
HEARD = held_job(job_id=8, heard_s_ago=9.0)
UNHEARD = held_job(job_id=9, heard_s_ago=None)
BOUND_S = LIMITS.host_lost_after_s


def test_the_remedy_is_found_by_the_name_that_rules_use_and_is_about_hosts() -> None:
    remedy = REMEDIES["hold_lost_host"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.HOST)
    assert {Condition.HOST_LOST} == CONFIRMABLE


WAITS: dict[str, tuple[Facts, Reason]] = {
    "the queue does not answer": (host_facts(host=None, unknown="no answer"), Reason.QUEUE_UNREACHABLE),
    "its own remediator shows life": (host_facts(RUNS, shows_life=True), Reason.EXECUTOR_ALIVE),
    "its remediator was heard within the bound": (
        host_facts(RUNS, silent_for_s=BOUND_S - 0.001),
        Reason.OBSERVATION_TOO_SHORT,
    ),
    "this one has only begun to look": (host_facts(RUNS, silent_for_s=0.0), Reason.OBSERVATION_TOO_SHORT),
    "two of three hosts are said to be silent": (
        host_facts(RUNS, accused=2, alive=1),
        Reason.MAJORITY_SILENT,
    ),
    "the queue heard of its job within the bound": (
        host_facts(held_job(heard_s_ago=BOUND_S - 0.001)),
        Reason.WORKERS_ALIVE,
    ),
    "its job was never heard of": (host_facts(UNHEARD), Reason.WORKERS_ALIVE),
    "it has no job": (host_facts(), Reason.NO_JOBS),
    "its jobs are held already": (host_facts(LOST, taken=True), Reason.JOBS_HELD),
    "one is held and the other was heard of": (host_facts(LOST, HEARD, taken=True), Reason.WORKERS_ALIVE),
    "a dry run that has said so": (host_facts(RUNS, armed=False, would_act=True), Reason.DRY_RUN),
    "the alert ended and nobody heard of it": (
        host_facts(LOST, firing=False, taken=True),
        Reason.JOBS_HELD,
    ),
    "it is back and nobody is armed": (
        host_facts(LOST, firing=False, shows_life=True, silent_for_s=0.0, armed=False),
        Reason.DRY_RUN,
    ),
    "it is back, its alert fires still, and nobody is armed": (
        host_facts(LOST, shows_life=True, silent_for_s=0.0, armed=False),
        Reason.DRY_RUN,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), WAITS.values(), ids=WAITS)
def test_it_waits_when(given: Facts, reason: Reason) -> None:
    step = decide(given)

    assert isinstance(step, Wait)
    assert step.reason is reason


ACTS: dict[str, tuple[Facts, Step]] = {
    "nobody heard of it for the bound": (
        host_facts(RUNS),
        Lose(
            jobs=(RUNS,),
            message="",
        ),
    ),
    "to the second": (
        host_facts(replace(RUNS, heard_s_ago=BOUND_S), silent_for_s=BOUND_S),
        Lose(
            jobs=(replace(RUNS, heard_s_ago=BOUND_S),),
            message="",
        ),
    ),
    "one of two hosts is silent, and only the job that is silent too": (
        host_facts(HEARD, RUNS, UNHEARD, LOST, accused=1, alive=1),
        Lose(
            jobs=(RUNS,),
            message="",
        ),
    ),
    "in a dry run": (
        host_facts(RUNS, armed=False),
        WouldAct(message=""),
    ),
    "it is back, and a job of it was not heard of": (
        host_facts(LOST, HEARD, firing=False, shows_life=True, taken=True),
        Return(
            jobs=(LOST,),
            message="",
        ),
    ),
    "it is back, and that its alert ended has not been heard": (
        host_facts(LOST, HEARD, shows_life=True, taken=True),
        Return(
            jobs=(LOST,),
            message="",
        ),
    ),
    "it is back with its jobs": (
        host_facts(RUNS, firing=False, shows_life=True, taken=True),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
    "it stays away, and a person gave its jobs up": (
        host_facts(firing=False, taken=True),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
    "the alert ended before anything was done": (
        host_facts(RUNS, firing=False),
        Close(outcome=Outcome.UNCONFIRMED, reason=Reason.NO_JOBS, message=""),
    ),
}


@pytest.mark.parametrize(("given", "step"), ACTS.values(), ids=ACTS)
def test_what_it_does_when(given: Facts, step: Step) -> None:
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
    silent_for_s=st.floats(0, 1000),
    accused=st.integers(1, 5),
    alive=st.integers(1, 5),
    taken=st.booleans(),
)
def test_whatever_is_known_a_job_is_taken_for_lost_only_where_nobody_heard_of_it_or_its_host(
    jobs: list[HeldJob],
    armed: bool,
    firing: bool,
    shows_life: bool,
    silent_for_s: float,
    accused: int,
    alive: int,
    taken: bool,
) -> None:
    seen = host(
        *jobs, shows_life=shows_life, silent_for_s=silent_for_s, accused=accused, alive=alive, taken=taken
    )  # fmt: skip

    step = decide(host_facts(host=seen, armed=armed, firing=firing))

    assert isinstance(step, Wait | Close | WouldAct | Lose | Return)
    if isinstance(step, Lose):
        assert armed
        assert firing
        assert not shows_life
        assert silent_for_s >= BOUND_S
        assert accused <= alive
        assert step.jobs
        assert all(each.state is State.RUNNING and (each.heard_s_ago or 0) >= BOUND_S for each in step.jobs)
    if isinstance(step, Return):
        assert armed
        assert shows_life
        assert all(each.state is State.HOST_LOST for each in step.jobs)
    if isinstance(step, Close):
        assert not firing
        assert State.HOST_LOST not in {each.state for each in jobs}
