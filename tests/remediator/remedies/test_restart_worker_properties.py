"""Properties of the remedy `restart_worker` for any facts."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import Condition, State
from remediator.plan import (
    Begin,
    Close,
    Facts,
    Fail,
    Fence,
    Quarantine,
    Requeue,
    Stage,
    Start,
    Stop,
    Wait,
    WouldAct,
)
from remediator.reasons import Reason
from remediator.remedies.restart import TRIES_MAX
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import (
    KEY,
    LIMITS,
    PIDS,
    REBORN,
    container,
    episode,
    evidence,
    facts,
    free,
    job,
    settle,
)

pytestmark = pytest.mark.pure


# --- any facts

SECONDS = st.one_of(st.none(), st.sampled_from([0.0, 119.9, 120.0, 130.0]))
PID_SETS = st.sampled_from([frozenset[int](), PIDS, frozenset({5001})])

EVIDENCE = st.builds(
    evidence,
    sample_age_s=st.sampled_from([0.3, 5.0, 5.1, 60.0]),
    alive=st.sampled_from([True, True, False, None]),
    worker_incarnation=st.sampled_from(["i1", "i1", "i2"]),
    container_incarnation=st.sampled_from([KEY, KEY, REBORN, None]),
    job_id=st.sampled_from([7, 7, None]),
    attempt=st.sampled_from([1, 1, 2]),
    stall_timeout_s=st.sampled_from([120.0, 120.0, 0.0, None]),
    heartbeat_age_s=st.sampled_from([None, 1.0, 30.0]),
    cpu_idle_s=st.sampled_from([None, 0.0, 30.0]),
    step_beat_age_s=SECONDS,
    gpu_idle_s=SECONDS,
    ram_idle_s=SECONDS,
    gpu_pids=st.sampled_from([None, {}, {"GPU-0": None}, {"GPU-0": []}, {"GPU-0": [4001]}]),
)
STALLED = st.builds(evidence)
CONTAINER = st.builds(
    container,
    incarnation=st.sampled_from([KEY, REBORN]),
    running=st.booleans(),
    managed=st.booleans(),
    pids=PID_SETS,
)
FREE = st.builds(
    lambda stage, tries, quarantined: free(stage, tries=tries, quarantined=quarantined),
    st.sampled_from([stage for stage in Stage if stage is not Stage.FENCED]),
    st.sampled_from([0, 1, TRIES_MAX]),
    st.booleans(),
)
SETTLE = st.builds(settle, st.sampled_from([Stage.PLANNED, Stage.FENCED, Stage.DONE, Stage.ABANDONED]))
JOB = st.builds(
    job,
    attempt=st.sampled_from([1, 1, 2]),
    claimed_by=st.sampled_from(["i1", "i1", "i2", None]),
    state=st.sampled_from([State.FENCING, *State]),
    watchdog_retries=st.integers(0, 5),
    attempts_max=st.sampled_from([1, 2, 20]),
    retried=st.booleans(),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    planned = draw(st.none() | FREE)
    return facts(
        episode=episode(
            planned,
            None if planned is None else draw(st.none() | SETTLE),
            firing=draw(st.booleans()),
            dry_run_recorded=draw(st.booleans()),
            incarnation=draw(st.sampled_from(["i1", None])),
            condition=draw(st.sampled_from([Condition.STALL, Condition.STALL, *Condition])),
            conditions=frozenset(draw(st.sets(st.sampled_from(list(Condition)), max_size=2))),
        ),
        armed=draw(st.booleans()),
        evidence=draw(st.none() | EVIDENCE | STALLED),
        container=draw(st.none() | CONTAINER),
        container_known=draw(st.booleans()),
        job=draw(st.none() | JOB),
        job_known=draw(st.booleans()),
        worker_ended=draw(st.booleans()),
        free_for_s=draw(st.sampled_from([0.0, 59.0, 119.9, 120.0])),
        settle_for_s=draw(st.sampled_from([0.0, 59.9, 60.0, 120.0])),
        quiet_for_s=draw(st.sampled_from([0.0, 3600.0])),
        refused_s_ago=draw(st.sampled_from([None, 0.0, 3600.0])),
        stopped_s_ago=draw(st.sampled_from([None, 0.0, 3600.0])),
    )


def confirmed(known: Facts) -> bool:
    """Whether the evidence confirms an action, computed independently of the remedy."""
    seen: WorkerFacts | None = known.evidence
    if seen is None or seen.sample_age_s > LIMITS.evidence_fresh_s:
        return False
    silence = (seen.step_beat_age_s, seen.gpu_idle_s, seen.ram_idle_s)
    stalled = bool(seen.stall_timeout_s) and all(
        age is not None and age >= (seen.stall_timeout_s or 0) for age in silence
    )
    dead = all(age is not None and age >= seen.dead_after_s for age in (seen.heartbeat_age_s, seen.cpu_idle_s))
    reported = known.episode.conditions | {known.episode.condition}
    return (
        seen.alive is True
        and seen.container_incarnation == KEY
        and (seen.job_id, seen.attempt) == (7, 1)
        and ((stalled and Condition.STALL in reported) or (dead and Condition.DEAD_WORKER in reported))
    )


@given(any_facts())
def test_stop_needs_fresh_evidence_unless_it_has_begun(known: Facts) -> None:
    step = decide(known)
    planned = known.episode.free

    if isinstance(step, Stop):
        assert planned is not None
        assert known.container_known
        assert known.container is not None
        assert known.container.incarnation == planned.key
        assert planned.stage is Stage.STOPPING or (planned.stage is Stage.PLANNED and confirmed(known))


@given(any_facts())
def test_live_worker_is_fenced_only_with_evidence(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Fence):
        assert known.job is not None
        ended = known.container_known and (
            known.container is None or known.container.incarnation != KEY or not known.container.running
        )
        held = known.job.claimed_by == "i1"
        assert known.job.state is State.FENCING or (known.armed and held and (ended or confirmed(known)))


@given(any_facts())
def test_job_is_settled_only_after_the_exit_or_the_timeout(known: Facts) -> None:
    step = decide(known)
    planned, owed = known.episode.free, known.episode.settle

    if isinstance(step, Requeue | Fail):
        assert planned is not None
        assert owed is not None
        assert owed.stage is Stage.FENCED
        assert known.job is not None
        assert (known.job.state, known.job.attempt) == (State.FENCING, 1)
        dead = planned.stage in (Stage.DEAD, Stage.STARTING, Stage.DONE)
        assert dead or known.settle_for_s >= LIMITS.settle_timeout_s
        capped = known.job.watchdog_retries >= LIMITS.retries_max or known.job.attempt >= known.job.attempts_max
        assert isinstance(step, Fail) or not capped


@given(any_facts())
def test_gpus_are_quarantined_once_and_only_after_a_failed_stop(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Quarantine):
        free = known.episode.free
        assert known.armed
        assert free is not None
        up = known.container is not None and known.container.incarnation == free.key and known.container.running
        assert free.stage is Stage.STOPPING or (free.stage is Stage.PLANNED and not up)
        assert known.free_for_s >= LIMITS.restart_timeout_s
        assert not free.data["quarantined"]
        assert known.container_known


@given(any_facts())
def test_disarmed_remedy_only_waits_closes_or_records(known: Facts) -> None:
    assume(known.episode.free is None)

    step = decide(replace(known, armed=False))

    assert isinstance(step, Wait | Close | WouldAct)
    assert not isinstance(step, WouldAct) or not known.episode.dry_run_recorded


@given(any_facts())
def test_begin_needs_evidence_and_an_opted_in_container(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Begin | WouldAct):
        assert confirmed(known)
        assert known.container is not None
        assert known.container.managed
        assert known.container.running
        assert known.episode.free is None


@given(any_facts())
def test_container_starts_only_after_its_job_is_settled(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Start):
        assert known.episode.settle is None or known.episode.settle.over
        assert known.container is not None
        assert not known.container.running


@given(any_facts())
def test_episode_closes_only_without_open_intents(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Close):
        assert all(intent is None or intent.over for intent in (known.episode.free, known.episode.settle))


@given(any_facts())
def test_episode_of_a_stopped_container_closes_only_when_its_target_runs(known: Facts) -> None:
    step, planned = decide(known), known.episode.free

    if isinstance(step, Close) and planned is not None and planned.stage is Stage.ABANDONED and planned.data["tries"]:
        found, seen = known.container, known.evidence
        runs = found is not None and found.running and found.incarnation == REBORN
        elsewhere = seen is not None and seen.alive is True and seen.container_incarnation == REBORN
        assert runs or elsewhere


@given(any_facts())
def test_every_step_has_a_message(known: Facts) -> None:
    assert decide(known).message


def test_paused_container_is_not_touched() -> None:
    before = decide(facts(container=container(paused=True)))
    begun = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=container(paused=True)))

    assert (isinstance(before, Wait) and before.reason) == Reason.CONTAINER_PAUSED
    assert (isinstance(begun, Wait) and begun.reason) == Reason.UNCONFIRMED
    assert isinstance(decide(facts()), Begin)
