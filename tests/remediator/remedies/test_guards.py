"""Guards as truth tables: arming, pauses, the circuit breaker, cool-downs, approvals and silences."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.procfs import ProcessId
from remediator import plan
from remediator.plan import (
    Advance,
    Begin,
    BlockRun,
    Facts,
    Fence,
    Kind,
    LockWorker,
    Lose,
    Migrate,
    NodeFacts,
    Stage,
    Start,
    Step,
    Stop,
    Taint,
    Wait,
    Warn,
)
from remediator.reasons import Reason
from remediator.remedies import guards
from remediator.remedies.guards import Act, Order, Orders, RecentActivity, SafetyLimits, Silence, TripBreaker
from tests.remediator import builders as build
from tests.remediator.builders import HANDLE, HOST, KEY, NOW

pytestmark = pytest.mark.pure

REMEDY = "restart_worker"
SAFETY_LIMITS = SafetyLimits()
BEGIN = Begin(
    condition=build.episode().condition,
    free_key=KEY,
    container_kind="docker",
    container_handle=HANDLE,
    container_name="c1",
    settle_key="7/1",
    worker_incarnation="i1",
    message="silent",
)


def order(act: Act, host: str | None = None, *, at: float = NOW - 60, **more: Any) -> Order:
    return Order(**{"act": act, "at": at, "who": "ann@box1", "reason": "a drill", "host": host, **more})


ARM, DISARM = order(Act.ARM), order(Act.DISARM)
ASK = order(Act.ASK)
YES = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key=KEY)
NO = order(Act.DECLINE, HOST, episode_id=1, key=KEY)
PAUSE = order(Act.PAUSE, until=NOW + 90, order_id=4)
BREAKER, RELEASE = order(Act.BREAKER), order(Act.RELEASE, at=NOW - 30)


def orders(*given: Order) -> Orders:
    return Orders(given=given)


@pytest.mark.parametrize(
    ("given", "armed"),
    [
        pytest.param((), False, id="no order: a dry run"),
        pytest.param((ARM,), True, id="everything is armed"),
        pytest.param((ARM, DISARM), False, id="the newest order counts"),
        pytest.param((DISARM, ARM), True, id="disarmed, and armed again"),
        pytest.param((order(Act.ARM, HOST),), True, id="this host is armed"),
        pytest.param((order(Act.ARM, "box2"),), False, id="another host is armed"),
        pytest.param((ARM, order(Act.DISARM, "box2")), True, id="another host is disarmed"),
        pytest.param((order(Act.ARM, remedy=REMEDY),), True, id="this remedy is armed"),
        pytest.param((order(Act.ARM, remedy="other"),), False, id="another remedy is armed"),
        pytest.param((ARM, order(Act.DISARM, remedy=REMEDY)), False, id="all but this remedy"),
        pytest.param(
            (order(Act.DISARM, remedy=REMEDY), ARM), True, id="everything armed after this remedy was disarmed"
        ),
        pytest.param((ARM, PAUSE, BREAKER), True, id="a pause and an open breaker do not disarm"),
        pytest.param((ASK,), True, id="armed with approval"),
        pytest.param((ASK, DISARM), False, id="disarmed after approval was ordered"),
    ],
)
def test_remedy_is_armed_by_the_newest_matching_order(given: tuple[Order, ...], *, armed: bool) -> None:
    assert orders(*given).armed(host=HOST, remedy=REMEDY) is armed


@pytest.mark.parametrize(
    ("given", "paused"),
    [
        pytest.param((), False, id="no pause"),
        pytest.param((PAUSE,), True, id="every host is paused"),
        pytest.param((order(Act.PAUSE, until=NOW),), False, id="the pause ends now"),
        pytest.param((order(Act.PAUSE, until=None),), True, id="a pause without an end"),
        pytest.param((order(Act.PAUSE, HOST, until=NOW + 1),), True, id="this host is paused"),
        pytest.param((order(Act.PAUSE, "box2", until=NOW + 1),), False, id="another host is paused"),
        pytest.param((PAUSE, order(Act.RESUME)), False, id="resumed"),
        pytest.param(
            (PAUSE, order(Act.RESUME, HOST)), True, id="resume of one host does not end a pause of every host"
        ),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 9), order(Act.RESUME, HOST)),
            False,
            id="resume of a host ends its own pause",
        ),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 9), order(Act.RESUME)),
            False,
            id="resume of every host ends the pause of one",
        ),
        pytest.param((order(Act.RESUME), PAUSE), True, id="paused after a resume"),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 99), order(Act.PAUSE, until=NOW - 1)),
            True,
            id="an ended pause of every host does not end the host's own",
        ),
    ],
)
def test_host_is_paused_by_matching_orders(given: tuple[Order, ...], *, paused: bool) -> None:
    assert bool(orders(*given).pauses(host=HOST, now=NOW)) is paused


def pause(host: str | None = None, *, since: float = -10, until: float = 90, number: int = 4) -> Order:
    return order(Act.PAUSE, host, since=NOW + since, until=NOW + until, order_id=number)


@pytest.mark.parametrize(
    ("given", "running", "left"),
    [
        pytest.param((), None, [], id="no pause"),
        pytest.param((PAUSE,), 4, [4], id="without a start it begins at once"),
        pytest.param((pause(since=1),), None, [4], id="it begins in a second"),
        pytest.param((pause(since=0),), 4, [4], id="it begins now"),
        pytest.param((pause(until=0),), None, [], id="it ends now"),
        pytest.param((pause(HOST),), 4, [4], id="this host is paused"),
        pytest.param((pause("box2"),), None, [], id="another host is paused"),
        pytest.param((pause(), order(Act.RESUME, ends=4)), None, [], id="it was ended early"),
        pytest.param((pause(since=9), order(Act.RESUME, ends=4)), None, [], id="it was ended before its start"),
        pytest.param((pause(), order(Act.RESUME, ends=3)), 4, [4], id="another pause was ended"),
        pytest.param((pause(since=-500), order(Act.RESUME)), None, [], id="all current pauses were ended"),
        pytest.param(
            (pause(since=9), order(Act.RESUME)), None, [4], id="a planned pause is not ended with the current ones"
        ),
        pytest.param(
            (pause(since=50, number=5), pause(), pause(since=20, number=6)),
            4,
            [4, 6, 5],
            id="several are planned, in order of their start",
        ),
        pytest.param((pause(), pause(HOST, until=95, number=5)), 5, [4, 5], id="two pauses: the one that ends last"),
    ],
)
def test_current_and_pending_pauses(given: tuple[Order, ...], running: int | None, left: list[int]) -> None:
    found = orders(*given).pause(host=HOST, now=NOW)

    assert (None if found is None else found.order_id) == running
    assert [each.order_id for each in orders(*given).pauses(host=HOST, now=NOW)] == left


def test_pauses_of_every_host_are_returned_without_a_host() -> None:
    given = orders(PAUSE, order(Act.PAUSE, "box2", until=NOW + 1))

    assert [each.host for each in given.pauses(host=None, now=NOW)] == [None, "box2"]


@pytest.mark.parametrize(
    ("given", "breaker", "breaker_reset_at"),
    [
        pytest.param((), None, None, id="never open"),
        pytest.param((ARM, BREAKER), BREAKER, None, id="open"),
        pytest.param((BREAKER, RELEASE), None, RELEASE.at, id="reset"),
        pytest.param((BREAKER, RELEASE, BREAKER), BREAKER, None, id="open again"),
    ],
)
def test_breaker_is_open_until_its_reset(
    given: tuple[Order, ...], breaker: Order | None, breaker_reset_at: float | None
) -> None:
    assert (orders(*given).breaker(), orders(*given).breaker_reset_at()) == (breaker, breaker_reset_at)


@pytest.mark.parametrize(("fleet", "above"), [(None, 3), (1, 3), (2, 3), (4, 3), (8, 3), (15, 3), (16, 4), (100, 25)])
def test_container_limit_grows_with_the_fleet(fleet: int | None, above: int) -> None:
    assert SAFETY_LIMITS.containers_max(fleet) == above


@pytest.mark.parametrize(("fleet", "above"), [(None, 6), (1, 6), (6, 6), (7, 7), (100, 100)])
def test_restart_limit_grows_with_the_fleet(fleet: int | None, above: int) -> None:
    assert SAFETY_LIMITS.restarts_max(fleet) == above


@pytest.mark.parametrize(
    ("recent", "held"),
    [
        pytest.param(RecentActivity(restarted_s_ago=1.0), None, id="no cool-down"),
        pytest.param(RecentActivity(restarted_s_ago=1.0, restarts=6, fleet=1), "trip", id="the breaker opens"),
    ],
)
def test_worker_that_has_ended_has_no_cooldown(recent: RecentActivity, held: str | None) -> None:
    begin = replace(BEGIN, gone=True)
    action = guards.proposed_action(build.episode(), begin)

    verdict = guards.may_begin(action, Orders(given=(ARM,)), recent, SAFETY_LIMITS, now=NOW)

    assert isinstance(verdict, TripBreaker) if held else verdict is None


def others(count: int) -> frozenset[str]:
    return frozenset(f"{HOST}/c{number}" for number in range(count))


@pytest.mark.parametrize(
    ("given", "recent", "verdict"),
    [
        pytest.param((ARM,), RecentActivity(), None, id="armed, no recent activity"),
        pytest.param((), RecentActivity(), Reason.DRY_RUN, id="not armed"),
        pytest.param((ARM, DISARM), RecentActivity(), Reason.DRY_RUN, id="disarmed since the facts were read"),
        pytest.param((ARM, PAUSE), RecentActivity(), Reason.PAUSED, id="paused"),
        pytest.param((ARM, BREAKER), RecentActivity(), Reason.CIRCUIT_BREAKER, id="breaker open"),
        pytest.param(
            (ARM, PAUSE, BREAKER),
            RecentActivity(),
            Reason.CIRCUIT_BREAKER,
            id="an open breaker is reported before a pause",
        ),
        pytest.param((ARM,), RecentActivity(restarted_s_ago=299.9), Reason.COOLDOWN, id="within its cool-down"),
        pytest.param((ARM,), RecentActivity(restarted_s_ago=300.0), None, id="its cool-down ended"),
        pytest.param(
            (ARM,), RecentActivity(restarted_s_ago=-10.0), Reason.COOLDOWN, id="the clock was set back a little"
        ),
        pytest.param(
            (ARM,),
            RecentActivity(restarted_s_ago=-9000.0),
            None,
            id="the clock was set back by more than the cool-down",
        ),
        pytest.param((ARM,), RecentActivity(targets=others(2), fleet=4), None, id="the third container of four"),
        pytest.param(
            (ARM,), RecentActivity(targets=others(3), fleet=4), "trip", id="the fourth container of four trips"
        ),
        pytest.param(
            (ARM,), RecentActivity(targets=others(3), fleet=8), "trip", id="the fourth container of eight trips"
        ),
        pytest.param(
            (ARM,), RecentActivity(targets=others(3)), "trip", id="the fourth container of an unknown fleet trips"
        ),
        pytest.param((ARM,), RecentActivity(targets=others(3), fleet=16), None, id="the fourth container of sixteen"),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(2) | {f"{HOST}/{HANDLE}"}),
            None,
            id="a container restarted within the window counts once",
        ),
        pytest.param(
            (ARM,), RecentActivity(restarts=5, fleet=1), None, id="the sixth restart of the hour on a small fleet"
        ),
        pytest.param(
            (ARM,), RecentActivity(restarts=6, fleet=1), "trip", id="the seventh restart on a small fleet trips"
        ),
        pytest.param((ARM,), RecentActivity(restarts=6), "trip", id="the seventh restart on an unknown fleet trips"),
        pytest.param(
            (ARM,), RecentActivity(restarts=6, fleet=16), None, id="the seventh restart in a fleet of sixteen"
        ),
        pytest.param(
            (ARM,),
            RecentActivity(restarts=16, fleet=16),
            "trip",
            id="the seventeenth restart in a fleet of sixteen trips",
        ),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(9), restarted_s_ago=1.0),
            Reason.COOLDOWN,
            id="a cool-down comes before a trip",
        ),
        pytest.param(
            (ARM,),
            RecentActivity(gpu_restarted_s_ago=0.0),
            Reason.GPU_COOLDOWN,
            id="another container on its GPU is being restarted",
        ),
        pytest.param(
            (ARM,),
            RecentActivity(gpu_restarted_s_ago=119.9),
            Reason.GPU_COOLDOWN,
            id="another container on its GPU was restarted a moment ago",
        ),
        pytest.param(
            (ARM,),
            RecentActivity(gpu_restarted_s_ago=-1.0),
            Reason.GPU_COOLDOWN,
            id="another container on its GPU, and the clock was set back",
        ),
        pytest.param((ARM,), RecentActivity(gpu_restarted_s_ago=120.0), None, id="the cool-down of its GPU ended"),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(9), gpu_restarted_s_ago=1.0),
            Reason.GPU_COOLDOWN,
            id="a cool-down of its GPU comes before a trip",
        ),
    ],
)
def test_action_may_begin_or_is_held(given: tuple[Order, ...], recent: RecentActivity, verdict: str | None) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    word = "trip" if isinstance(found, TripBreaker) else None if found is None else found.reason
    assert word == verdict


@pytest.mark.parametrize(
    ("given", "recent", "verdict"),
    [
        pytest.param((ASK,), RecentActivity(), Reason.APPROVAL, id="no answer"),
        pytest.param((ASK,), RecentActivity(answer=YES), None, id="approved"),
        pytest.param((ASK,), RecentActivity(answer=order(Act.APPROVE, key=KEY)), None, id="approved without an end"),
        pytest.param(
            (ASK,), RecentActivity(answer=order(Act.APPROVE, key=KEY, until=NOW)), Reason.APPROVAL, id="expired"
        ),
        pytest.param(
            (ASK,),
            RecentActivity(answer=order(Act.APPROVE, key="k2", until=NOW + 1)),
            Reason.APPROVAL,
            id="approval of another incarnation",
        ),
        pytest.param((ASK,), RecentActivity(answer=NO), Reason.DECLINED, id="declined"),
        pytest.param(
            (ASK,),
            RecentActivity(answer=order(Act.DECLINE, key="k2")),
            Reason.APPROVAL,
            id="another incarnation was declined",
        ),
        pytest.param((ARM,), RecentActivity(answer=NO), Reason.DECLINED, id="declined, then armed without approval"),
        pytest.param((ARM, order(Act.ASK, HOST)), RecentActivity(), Reason.APPROVAL, id="approval for this host"),
        pytest.param(
            (ASK, order(Act.ARM, remedy=REMEDY)), RecentActivity(), None, id="approval for all but this remedy"
        ),
        pytest.param((ASK, DISARM), RecentActivity(answer=YES), Reason.DRY_RUN, id="approved and disarmed"),
        pytest.param((ASK, PAUSE), RecentActivity(answer=YES), Reason.PAUSED, id="approved and paused"),
        pytest.param(
            (ASK, BREAKER), RecentActivity(answer=YES), Reason.CIRCUIT_BREAKER, id="approved and breaker open"
        ),
        pytest.param(
            (ASK,), RecentActivity(answer=YES, restarted_s_ago=1.0), Reason.COOLDOWN, id="approved within its cool-down"
        ),
        pytest.param(
            (ASK,), RecentActivity(answer=YES, targets=others(3)), "trip", id="approved, but it trips the breaker"
        ),
        pytest.param(
            (ASK,), RecentActivity(targets=others(3)), Reason.APPROVAL, id="not approved: it does not trip the breaker"
        ),
        pytest.param((ASK, PAUSE), RecentActivity(), Reason.PAUSED, id="paused: no approval is requested"),
    ],
)
def test_action_with_approval_may_begin_or_is_held(
    given: tuple[Order, ...], recent: RecentActivity, verdict: str | None
) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    word = "trip" if isinstance(found, TripBreaker) else None if found is None else found.reason
    assert word == verdict


def test_gpu_without_a_cooldown_still_allows_one_restart_at_a_time() -> None:
    none = replace(SAFETY_LIMITS, vram_cooldown_s=0.0)

    held = guards.may_begin(build.wish(), orders(ARM), RecentActivity(gpu_restarted_s_ago=0.0), none, now=NOW)
    begun = guards.may_begin(build.wish(), orders(ARM), RecentActivity(gpu_restarted_s_ago=0.1), none, now=NOW)

    assert isinstance(held, Wait)
    assert held.reason == Reason.GPU_COOLDOWN
    assert begun is None


def test_single_container_does_not_trip_below_the_restart_limit() -> None:
    again = RecentActivity(targets=frozenset({f"{HOST}/{HANDLE}"}), restarts=5, restarted_s_ago=301.0, fleet=1)

    assert guards.may_begin(build.wish(), orders(ARM), again, SAFETY_LIMITS, now=NOW) is None


FENCE, STOP = Fence(message="stalled"), Stop(message="stalled")
WARN = Warn(message="stalled", signal="SIGUSR1", listener=ProcessId(pid=4001, start_ticks=7))
SEEN_DEAD = Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message="it does not run")
PROMISED: Mapping[str, Any] = {"free": build.free(Stage.PLANNED), "settle": build.settle(Stage.PLANNED)}


@pytest.mark.parametrize(
    ("step", "facts", "held"),
    [
        pytest.param(BEGIN, build.facts(), True, id="a begin"),
        pytest.param(FENCE, build.facts(**PROMISED), True, id="a fence of a planned restart"),
        pytest.param(WARN, build.facts(**PROMISED), True, id="a warning of a planned restart"),
        pytest.param(
            FENCE,
            build.facts(**PROMISED, job=build.job(state=State.FENCING)),
            False,
            id="a fence that is done but not recorded",
        ),
        pytest.param(
            FENCE,
            build.facts(**PROMISED, job=build.job(state=State.FENCING, attempt=2)),
            True,
            id="the job is fenced at another attempt",
        ),
        pytest.param(FENCE, build.facts(**PROMISED, job=None), True, id="a fence of an unknown job"),
        pytest.param(STOP, build.facts(build.free(Stage.PLANNED)), True, id="a stop without a job"),
        pytest.param(
            STOP,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.ABANDONED)),
            True,
            id="a stop whose job was settled by another program",
        ),
        pytest.param(
            STOP,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.FENCED)),
            False,
            id="a stop after the fence",
        ),
        pytest.param(STOP, build.facts(build.free(Stage.STOPPING)), False, id="a repeated stop"),
        pytest.param(Start(message="dead"), build.facts(build.free(Stage.DEAD)), False, id="a start after the stop"),
        pytest.param(
            SEEN_DEAD,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.ABANDONED)),
            True,
            id="an exit that the executor did not cause",
        ),
        pytest.param(SEEN_DEAD, build.facts(build.free(Stage.STOPPING)), False, id="an exit after a stop"),
        pytest.param(FENCE, build.facts(), True, id="a fence without a planned restart"),
    ],
)
@pytest.mark.parametrize("stop", [PAUSE, BREAKER], ids=["paused", "breaker open"])
def test_pause_and_breaker_hold_only_what_has_not_begun(step: Step, facts: Facts, stop: Order, *, held: bool) -> None:
    found = guards.apply_holds(step, facts, orders(ARM, stop), RecentActivity(), SAFETY_LIMITS, now=NOW)

    assert isinstance(found, Wait) is held
    assert held or found is step
    assert guards.apply_holds(step, facts, orders(ARM), RecentActivity(), SAFETY_LIMITS, now=NOW) is step, "the control"


def test_planned_restart_is_held_for_approval() -> None:
    facts = build.facts(**PROMISED)

    held = guards.apply_holds(FENCE, facts, orders(ARM, ASK), RecentActivity(), SAFETY_LIMITS, now=NOW)

    assert isinstance(held, Wait)
    assert (held.reason, held.asks) == (Reason.APPROVAL, KEY)
    assert (
        guards.apply_holds(FENCE, facts, orders(ARM, ASK), RecentActivity(answer=YES), SAFETY_LIMITS, now=NOW) is FENCE
    )


def test_approval_that_expires_in_the_grace_period_still_counts() -> None:
    warned = build.facts(build.free(Stage.PLANNED, warned={"tries": 1}), build.settle(Stage.PLANNED))

    assert (
        guards.apply_holds(FENCE, warned, orders(ARM, ASK), RecentActivity(answer=YES), SAFETY_LIMITS, now=NOW + 9)
        is FENCE
    )
    assert isinstance(
        guards.apply_holds(FENCE, warned, orders(ARM, ASK), RecentActivity(answer=NO), SAFETY_LIMITS, now=NOW + 9), Wait
    )
    late = guards.apply_holds(
        FENCE, build.facts(**PROMISED), orders(ARM, ASK), RecentActivity(answer=YES), SAFETY_LIMITS, now=NOW + 9
    )
    assert isinstance(late, Wait)


@pytest.mark.parametrize(
    ("silences", "unknown", "holds", "held"),
    [
        pytest.param((), "", False, None, id="not silenced"),
        pytest.param((Silence(silence_id="s1"),), "", False, Reason.SILENCED, id="silenced"),
        pytest.param(
            (Silence(silence_id="s1"),),
            "b is down",
            False,
            Reason.SILENCED,
            id="silenced by one Alertmanager, the other is down",
        ),
        pytest.param((), "b is down", False, None, id="unknown, does not hold"),
        pytest.param((), "b is down", True, Reason.SILENCES_UNKNOWN, id="unknown, holds by setting"),
        pytest.param((), "", True, None, id="known, unknown would hold"),
    ],
)
def test_silence_holds(silences: tuple[Silence, ...], unknown: str, held: str | None, *, holds: bool) -> None:
    found = guards.check_silences(silences, unknown, SafetyLimits(unknown_holds=holds))

    assert (None if found is None else found.reason) == held


YES_TO_HOST = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key=HOST)
HOLD: dict[str, tuple[tuple[Order, ...], RecentActivity, str | None]] = {
    "armed": ((ARM,), RecentActivity(), None),
    "paused": ((ARM, PAUSE), RecentActivity(), Reason.PAUSED),
    "breaker open": ((ARM, BREAKER), RecentActivity(), Reason.CIRCUIT_BREAKER),
    "the observing host is paused": ((ARM, order(Act.PAUSE, "box2")), RecentActivity(), Reason.PAUSED),
    "a third host is paused": ((ARM, order(Act.PAUSE, "box3")), RecentActivity(), None),
    "not approved": ((ASK,), RecentActivity(), Reason.APPROVAL),
    "approved": ((ASK,), RecentActivity(answer=YES_TO_HOST), None),
    "a container on it was approved": ((ASK,), RecentActivity(answer=YES), Reason.APPROVAL),
    "many restarts of others and a cool-down": (
        (ARM,),
        RecentActivity(targets=frozenset("abcdef"), restarts=99, restarted_s_ago=1),
        None,
    ),
}


@pytest.mark.parametrize(("given", "recent", "reason"), HOLD.values(), ids=HOLD)
def test_hold_of_a_lost_host_may_begin_or_is_held(
    given: tuple[Order, ...], recent: RecentActivity, reason: str | None
) -> None:
    step = Lose(message="no heartbeat", jobs=(build.held_job(),))
    wanted = guards.proposed_action(build.host_facts().episode, step)

    held = guards.may_hold(wanted, orders(*given), recent, by="box2", now=NOW)

    assert (wanted.handle, wanted.key, wanted.message) == ("", HOST, "no heartbeat")
    assert (None if held is None else held.reason) == reason


LOCK = LockWorker(host=HOST, worker="w1", message="it fails")
MOVE = Migrate(host=HOST, worker="w1", message="it fails")
BLOCK = BlockRun(message="all fail")
YES_TO_LOCK = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key="lock w1 on box1")
WRANGLE: dict[str, tuple[plan.Wrangle, tuple[Order, ...], RecentActivity, str | None]] = {
    "armed, no recent activity": (LOCK, (ARM,), RecentActivity(), None),
    "not armed": (LOCK, (), RecentActivity(), Reason.DRY_RUN),
    "paused": (MOVE, (ARM, PAUSE), RecentActivity(), Reason.PAUSED),
    "breaker open": (MOVE, (ARM, BREAKER), RecentActivity(), Reason.CIRCUIT_BREAKER),
    "not approved": (LOCK, (ASK,), RecentActivity(), Reason.APPROVAL),
    "approved": (LOCK, (ASK,), RecentActivity(answer=YES_TO_LOCK), None),
    "another action was approved": (MOVE, (ASK,), RecentActivity(answer=YES_TO_LOCK), Reason.APPROVAL),
    "the third target": (LOCK, (ARM,), RecentActivity(lock_targets=others(2)), None),
    "the fourth target trips": (LOCK, (ARM,), RecentActivity(lock_targets=others(3)), "trip"),
    "the fourth target is a run: trips": (BLOCK, (ARM,), RecentActivity(lock_targets=others(3)), "trip"),
    "the same worker for another run counts once": (
        LOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"worker box1/w1"}),
        None,
    ),
    "the same run by another host counts once": (
        BLOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"run r1"}),
        None,
    ),
    "a run with the name of a worker counts separately": (
        BLOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"worker box1/r1"}),
        "trip",
    ),
    "the fourth target in a fleet of sixteen": (LOCK, (ARM,), RecentActivity(lock_targets=others(3), fleet=16), None),
    "a move locks no target": (MOVE, (ARM,), RecentActivity(lock_targets=others(99)), None),
    "not approved: does not trip": (LOCK, (ASK,), RecentActivity(lock_targets=others(99)), Reason.APPROVAL),
    "many restarts and a cool-down": (
        LOCK,
        (ARM,),
        RecentActivity(targets=others(99), restarts=99, restarted_s_ago=1, gpu_restarted_s_ago=1),
        None,
    ),
}


@pytest.mark.parametrize(("step", "given", "recent", "verdict"), WRANGLE.values(), ids=WRANGLE)
def test_run_action_may_begin_or_is_held(
    step: plan.Wrangle, given: tuple[Order, ...], recent: RecentActivity, verdict: str | None
) -> None:
    wanted = guards.proposed_action(build.run_facts(None).episode, step)

    found = guards.may_wrangle(wanted, orders(*given), recent, SAFETY_LIMITS, now=NOW)

    assert (wanted.handle, wanted.key, wanted.message) == ("", step.deed, step.message)
    assert ("trip" if isinstance(found, TripBreaker) else found and found.reason) == verdict


def test_silence_is_named_with_its_author_and_comment() -> None:
    silences = (Silence(silence_id="s1", by="ann", comment="new driver"), Silence(silence_id="s2"))

    found = guards.check_silences(silences, "", SAFETY_LIMITS)

    assert found is not None
    assert [each for each in ("s1 by ann", "new driver", "s2 by ?") if each not in found.message] == []


def test_trip_of_the_breaker_is_left_to_the_transaction_of_the_begin() -> None:
    many_restarts = RecentActivity(targets=others(9))

    assert guards.apply_holds(BEGIN, build.facts(), orders(ARM), many_restarts, SAFETY_LIMITS, now=NOW) is BEGIN


APPROVE, DECLINE = "`gpuwarden approve 1`", "`gpuwarden decline 1`"

NAMED: dict[str, tuple[tuple[Order, ...], RecentActivity, tuple[str, ...]]] = {
    "operator and reason of the disarm": ((ARM, DISARM), RecentActivity(), ("ann@box1", "a drill")),
    "operator and end of the pause": (
        (ARM, PAUSE),
        RecentActivity(),
        ("ann@box1", "a drill", "90 s", "`gpuwarden resume 4`"),
    ),
    "command that closes the breaker": ((ARM, BREAKER), RecentActivity(), ("`gpuwarden breaker reset`",)),
    "commands that answer": ((ASK,), RecentActivity(), (APPROVE, DECLINE, "silent for 130 s")),
    "commands that answer after an approval expired": (
        (ASK,),
        RecentActivity(answer=order(Act.APPROVE, key=KEY, until=NOW)),
        ("expired", APPROVE, DECLINE, "silent for 130 s"),
    ),
    "operator who declined": ((ASK,), RecentActivity(answer=NO), ("ann@box1", "a drill", APPROVE)),
    "cool-down": ((ARM,), RecentActivity(restarted_s_ago=12.0), ("12 s ago", "300 s")),
    "containers and window": (
        (ARM,),
        RecentActivity(targets=others(3), fleet=4),
        ("4 containers", "600 s", "4 workers", "3 allowed"),
    ),
    "unknown fleet": ((ARM,), RecentActivity(targets=others(3)), ("unknown number of workers",)),
    "restarts and window": (
        (ARM,),
        RecentActivity(restarts=6, fleet=2),
        ("7 restarts", "3600 s", "2 workers", "6 allowed"),
    ),
}


@pytest.mark.parametrize(("given", "recent", "names"), NAMED.values(), ids=NAMED)
def test_hold_names_its_figures_and_commands(
    given: tuple[Order, ...], recent: RecentActivity, names: tuple[str, ...]
) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    assert isinstance(found, plan.Wait | TripBreaker)
    assert [each for each in names if each not in found.message] == []


def test_scope_of_an_order_as_text() -> None:
    assert ARM.scope == "every remedy on every host"
    assert order(Act.ARM, HOST, remedy=REMEDY).scope == f"{REMEDY} on {HOST}"
    assert YES.scope == f"episode 1 on {HOST}"
    assert PAUSE.scope == "pause 4 on every host"
    assert order(Act.RESUME, HOST, ends=4, order_id=9).scope == f"pause 4 on {HOST}"


def test_only_a_vram_recycle_has_gpus() -> None:
    begin = replace(BEGIN, gpus=("GPU-0", "GPU-1"))

    assert guards.proposed_action(build.tenant_facts().episode, begin).gpus == {"GPU-0", "GPU-1"}
    assert guards.proposed_action(build.episode(), begin).gpus == frozenset()
    assert guards.proposed_action(build.tenant_facts(build.free(Stage.PLANNED)).episode, STOP).gpus == frozenset()


YES_TO_TAINT = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key="GPU-0")
TAINTS: dict[str, tuple[tuple[Order, ...], RecentActivity, NodeFacts, str | None]] = {
    "armed": ((ARM,), RecentActivity(), NodeFacts(), None),
    "not armed": ((), RecentActivity(), NodeFacts(), Reason.DRY_RUN),
    "paused": ((ARM, PAUSE), RecentActivity(), NodeFacts(), Reason.PAUSED),
    "breaker open": ((ARM, BREAKER), RecentActivity(), NodeFacts(), Reason.CIRCUIT_BREAKER),
    "not approved": ((ASK,), RecentActivity(), NodeFacts(), Reason.APPROVAL),
    "approved": ((ASK,), RecentActivity(answer=YES_TO_TAINT), NodeFacts(), None),
    "the third node of ten": ((ARM,), RecentActivity(), NodeFacts(tainted_nodes=2, nodes=10), None),
    "the fourth node of ten": ((ARM,), RecentActivity(), NodeFacts(tainted_nodes=3, nodes=10), Reason.MANY_TAINTED),
    "the fourth node of sixteen": ((ARM,), RecentActivity(), NodeFacts(tainted_nodes=3, nodes=16), None),
}


@pytest.mark.parametrize(("given", "recent", "node", "reason"), TAINTS.values(), ids=TAINTS)
def test_node_may_be_tainted_or_is_held(
    given: tuple[Order, ...], recent: RecentActivity, node: NodeFacts, reason: str | None
) -> None:
    wanted = guards.proposed_action(build.gpu_facts().episode, Taint(message="lost"))

    held = guards.may_taint(wanted, orders(*given), recent, SafetyLimits(), node, now=NOW)

    assert (None if held is None else held.reason) == reason
