"""Whether something may be begun: who armed it, what is paused, the brake, cool-downs; a sentence a row."""

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
    Stage,
    Start,
    Step,
    Stop,
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
    return Order(**{"act": act, "at": at, "who": "ann@box1", "because": "a drill", "host": host, **more})


ARM, DISARM = order(Act.ARM), order(Act.DISARM)
ASK = order(Act.ASK)
YES = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key=KEY)
NO = order(Act.DECLINE, HOST, episode_id=1, key=KEY)
PAUSE = order(Act.PAUSE, until=NOW + 90, order_id=4)
BRAKE, RELEASE = order(Act.BREAKER), order(Act.RELEASE, at=NOW - 30)


def orders(*given: Order) -> Orders:
    return Orders(given=given)


@pytest.mark.parametrize(
    ("given", "armed"),
    [
        pytest.param((), False, id="nobody ordered anything: a dry run"),
        pytest.param((ARM,), True, id="everything is armed"),
        pytest.param((ARM, DISARM), False, id="the newest order counts"),
        pytest.param((DISARM, ARM), True, id="disarmed, and armed again"),
        pytest.param((order(Act.ARM, HOST),), True, id="this host is armed"),
        pytest.param((order(Act.ARM, "box2"),), False, id="another host's arming is not ours"),
        pytest.param((ARM, order(Act.DISARM, "box2")), True, id="nor is its disarming"),
        pytest.param((order(Act.ARM, remedy=REMEDY),), True, id="this remedy is armed"),
        pytest.param((order(Act.ARM, remedy="other"),), False, id="another remedy's arming is not this one's"),
        pytest.param((ARM, order(Act.DISARM, remedy=REMEDY)), False, id="all but this remedy"),
        pytest.param((order(Act.DISARM, remedy=REMEDY), ARM), True, id="all, after this one was disarmed"),
        pytest.param((ARM, PAUSE, BRAKE), True, id="a pause and a brake disarm nothing"),
        pytest.param((ASK,), True, id="armed with approval"),
        pytest.param((ASK, DISARM), False, id="a dry run wins over approval"),
    ],
)
def test_what_is_armed(given: tuple[Order, ...], *, armed: bool) -> None:
    assert orders(*given).armed(host=HOST, remedy=REMEDY) is armed


@pytest.mark.parametrize(
    ("given", "paused"),
    [
        pytest.param((), False, id="nobody paused"),
        pytest.param((PAUSE,), True, id="every host is paused"),
        pytest.param((order(Act.PAUSE, until=NOW),), False, id="a pause ends by itself, to the second"),
        pytest.param((order(Act.PAUSE, until=None),), True, id="one without an end stands"),
        pytest.param((order(Act.PAUSE, HOST, until=NOW + 1),), True, id="this host is paused"),
        pytest.param((order(Act.PAUSE, "box2", until=NOW + 1),), False, id="another host's pause is not ours"),
        pytest.param((PAUSE, order(Act.RESUME)), False, id="resumed"),
        pytest.param((PAUSE, order(Act.RESUME, HOST)), True, id="resuming a host leaves the pause of every host"),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 9), order(Act.RESUME, HOST)), False, id="a host's own pause is resumed"
        ),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 9), order(Act.RESUME)), False, id="resuming all ends a host's pause"
        ),
        pytest.param((order(Act.RESUME), PAUSE), True, id="paused after a resume"),
        pytest.param(
            (order(Act.PAUSE, HOST, until=NOW + 99), order(Act.PAUSE, until=NOW - 1)),
            True,
            id="a shorter pause of every host does not cut a host's own short",
        ),
    ],
)
def test_what_is_paused(given: tuple[Order, ...], *, paused: bool) -> None:
    assert bool(orders(*given).pauses(host=HOST, now=NOW)) is paused


def pause(host: str | None = None, *, since: float = -10, until: float = 90, number: int = 4) -> Order:
    return order(Act.PAUSE, host, since=NOW + since, until=NOW + until, order_id=number)


@pytest.mark.parametrize(
    ("given", "running", "left"),
    [
        pytest.param((), None, [], id="none was planned"),
        pytest.param((PAUSE,), 4, [4], id="it began when it was ordered, where nothing else is said"),
        pytest.param((pause(since=1),), None, [4], id="it is still to come"),
        pytest.param((pause(since=0),), 4, [4], id="it begins to the second"),
        pytest.param((pause(until=0),), None, [], id="it ends to the second"),
        pytest.param((pause(HOST),), 4, [4], id="this host is paused"),
        pytest.param((pause("box2"),), None, [], id="another host's is not ours"),
        pytest.param((pause(), order(Act.RESUME, ends=4)), None, [], id="it was ended before its time"),
        pytest.param((pause(since=9), order(Act.RESUME, ends=4)), None, [], id="or called off"),
        pytest.param((pause(), order(Act.RESUME, ends=3)), 4, [4], id="another one was ended"),
        pytest.param((pause(since=-500), order(Act.RESUME)), None, [], id="all that run were ended"),
        pytest.param((pause(since=9), order(Act.RESUME)), None, [4], id="what is planned is not ended with them"),
        pytest.param(
            (pause(since=50, number=5), pause(), pause(since=20, number=6)),
            4,
            [4, 6, 5],
            id="several are planned, the next one first",
        ),
        pytest.param((pause(), pause(HOST, until=95, number=5)), 5, [4, 5], id="of two, the one that ends last"),
    ],
)
def test_which_pause_runs(given: tuple[Order, ...], running: int | None, left: list[int]) -> None:
    found = orders(*given).pause(host=HOST, now=NOW)

    assert (None if found is None else found.order_id) == running
    assert [each.order_id for each in orders(*given).pauses(host=HOST, now=NOW)] == left


def test_every_hosts_pauses_are_found_where_no_host_is_asked_for() -> None:
    given = orders(PAUSE, order(Act.PAUSE, "box2", until=NOW + 1))

    assert [each.host for each in given.pauses(host=None, now=NOW)] == [None, "box2"]


@pytest.mark.parametrize(
    ("given", "latched", "released_at"),
    [
        pytest.param((), None, None, id="never latched"),
        pytest.param((ARM, BRAKE), BRAKE, None, id="latched"),
        pytest.param((BRAKE, RELEASE), None, RELEASE.at, id="released"),
        pytest.param((BRAKE, RELEASE, BRAKE), BRAKE, None, id="latched again"),
    ],
)
def test_the_brake(given: tuple[Order, ...], latched: Order | None, released_at: float | None) -> None:
    assert (orders(*given).breaker(), orders(*given).released_at()) == (latched, released_at)


@pytest.mark.parametrize(("fleet", "above"), [(None, 3), (1, 3), (2, 3), (4, 3), (8, 3), (15, 3), (16, 4), (100, 25)])
def test_how_many_single_faults_a_fleet_has(fleet: int | None, above: int) -> None:
    assert SAFETY_LIMITS.containers_max(fleet) == above


@pytest.mark.parametrize(("fleet", "above"), [(None, 6), (1, 6), (6, 6), (7, 7), (100, 100)])
def test_how_many_frees_an_hour_a_fleet_has(fleet: int | None, above: int) -> None:
    assert SAFETY_LIMITS.restarts_max(fleet) == above


def others(count: int) -> frozenset[str]:
    return frozenset(f"{HOST}/c{number}" for number in range(count))


@pytest.mark.parametrize(
    ("given", "recent", "verdict"),
    [
        pytest.param((ARM,), RecentActivity(), None, id="armed and quiet: it begins"),
        pytest.param((), RecentActivity(), Reason.DRY_RUN, id="not armed"),
        pytest.param((ARM, DISARM), RecentActivity(), Reason.DRY_RUN, id="disarmed since the facts were read"),
        pytest.param((ARM, PAUSE), RecentActivity(), Reason.PAUSED, id="paused"),
        pytest.param((ARM, BRAKE), RecentActivity(), Reason.CIRCUIT_BREAKER, id="the brake is latched"),
        pytest.param(
            (ARM, PAUSE, BRAKE),
            RecentActivity(),
            Reason.CIRCUIT_BREAKER,
            id="the brake is told before a pause, which ends by itself",
        ),
        pytest.param(
            (ARM,), RecentActivity(restarted_s_ago=299.9), Reason.COOLDOWN, id="freed less than the cool-down ago"
        ),
        pytest.param((ARM,), RecentActivity(restarted_s_ago=300.0), None, id="its cool-down is over"),
        pytest.param(
            (ARM,), RecentActivity(restarted_s_ago=-10.0), Reason.COOLDOWN, id="the clock was set back a little"
        ),
        pytest.param(
            (ARM,), RecentActivity(restarted_s_ago=-9000.0), None, id="the clock was set back by more than that"
        ),
        pytest.param(
            (ARM,), RecentActivity(targets=others(2), fleet=4), None, id="the third of four is a fault of its own"
        ),
        pytest.param((ARM,), RecentActivity(targets=others(3), fleet=4), "storm", id="the fourth of four is a storm"),
        pytest.param((ARM,), RecentActivity(targets=others(3), fleet=8), "storm", id="the fourth of eight is one too"),
        pytest.param((ARM,), RecentActivity(targets=others(3)), "storm", id="and so in a fleet nobody counted"),
        pytest.param((ARM,), RecentActivity(targets=others(3), fleet=16), None, id="the fourth of sixteen is none"),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(2) | {f"{HOST}/{HANDLE}"}),
            None,
            id="one that was freed within the window already is no further one",
        ),
        pytest.param(
            (ARM,), RecentActivity(restarts=5, fleet=1), None, id="the sixth free of the hour on a small box begins"
        ),
        pytest.param((ARM,), RecentActivity(restarts=6, fleet=1), "storm", id="the seventh is a storm, of however few"),
        pytest.param(
            (ARM,), RecentActivity(restarts=6), "storm", id="and so in a fleet nobody counted, as the hour has it"
        ),
        pytest.param((ARM,), RecentActivity(restarts=6, fleet=16), None, id="in a fleet of sixteen it is none"),
        pytest.param((ARM,), RecentActivity(restarts=16, fleet=16), "storm", id="but the seventeenth is"),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(9), restarted_s_ago=1.0),
            Reason.COOLDOWN,
            id="what cools down makes no storm",
        ),
        pytest.param(
            (ARM,),
            RecentActivity(gpu_restarted_s_ago=0.0),
            Reason.GPU_COOLDOWN,
            id="another one on its GPU is being freed",
        ),
        pytest.param(
            (ARM,), RecentActivity(gpu_restarted_s_ago=119.9), Reason.GPU_COOLDOWN, id="another one was, a moment ago"
        ),
        pytest.param(
            (ARM,), RecentActivity(gpu_restarted_s_ago=-1.0), Reason.GPU_COOLDOWN, id="and the clock was set back since"
        ),
        pytest.param((ARM,), RecentActivity(gpu_restarted_s_ago=120.0), None, id="its GPU has cooled down"),
        pytest.param(
            (ARM,),
            RecentActivity(targets=others(9), gpu_restarted_s_ago=1.0),
            Reason.GPU_COOLDOWN,
            id="what waits for it is no storm",
        ),
    ],
)
def test_what_may_begin(given: tuple[Order, ...], recent: RecentActivity, verdict: str | None) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    word = "storm" if isinstance(found, TripBreaker) else None if found is None else found.reason
    assert word == verdict


@pytest.mark.parametrize(
    ("given", "recent", "verdict"),
    [
        pytest.param((ASK,), RecentActivity(), Reason.APPROVAL, id="nobody has answered: it waits"),
        pytest.param((ASK,), RecentActivity(answer=YES), None, id="approved"),
        pytest.param((ASK,), RecentActivity(answer=order(Act.APPROVE, key=KEY)), None, id="approved without an end"),
        pytest.param(
            (ASK,), RecentActivity(answer=order(Act.APPROVE, key=KEY, until=NOW)), Reason.APPROVAL, id="it has run out"
        ),
        pytest.param(
            (ASK,),
            RecentActivity(answer=order(Act.APPROVE, key="k2", until=NOW + 1)),
            Reason.APPROVAL,
            id="of another life",
        ),
        pytest.param((ASK,), RecentActivity(answer=NO), Reason.DECLINED, id="declined"),
        pytest.param(
            (ASK,), RecentActivity(answer=order(Act.DECLINE, key="k2")), Reason.APPROVAL, id="another life was declined"
        ),
        pytest.param((ARM,), RecentActivity(answer=NO), Reason.DECLINED, id="a no stands whatever is armed later"),
        pytest.param((ARM, order(Act.ASK, HOST)), RecentActivity(), Reason.APPROVAL, id="this host asks"),
        pytest.param((ASK, order(Act.ARM, remedy=REMEDY)), RecentActivity(), None, id="all but this remedy ask"),
        pytest.param((ASK, DISARM), RecentActivity(answer=YES), Reason.DRY_RUN, id="a dry run wins over a yes"),
        pytest.param((ASK, PAUSE), RecentActivity(answer=YES), Reason.PAUSED, id="a pause holds what was approved"),
        pytest.param((ASK, BRAKE), RecentActivity(answer=YES), Reason.CIRCUIT_BREAKER, id="so does the brake"),
        pytest.param((ASK,), RecentActivity(answer=YES, restarted_s_ago=1.0), Reason.COOLDOWN, id="and a cool-down"),
        pytest.param(
            (ASK,), RecentActivity(answer=YES, targets=others(3)), "storm", id="what was approved counts as a storm"
        ),
        pytest.param((ASK,), RecentActivity(targets=others(3)), Reason.APPROVAL, id="what was not is none"),
        pytest.param(
            (ASK, PAUSE), RecentActivity(), Reason.PAUSED, id="nobody is asked about what may not begin anyway"
        ),
    ],
)
def test_what_may_begin_where_a_person_is_asked(
    given: tuple[Order, ...], recent: RecentActivity, verdict: str | None
) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    word = "storm" if isinstance(found, TripBreaker) else None if found is None else found.reason
    assert word == verdict


def test_without_a_cool_down_one_goes_at_a_time_all_the_same() -> None:
    none = replace(SAFETY_LIMITS, vram_cooldown_s=0.0)

    held = guards.may_begin(build.wish(), orders(ARM), RecentActivity(gpu_restarted_s_ago=0.0), none, now=NOW)
    begun = guards.may_begin(build.wish(), orders(ARM), RecentActivity(gpu_restarted_s_ago=0.1), none, now=NOW)

    assert isinstance(held, Wait)
    assert held.reason == Reason.GPU_COOLDOWN
    assert begun is None


def test_one_gpu_of_one_is_not_a_storm_before_it_has_wedged_too_often() -> None:
    again = RecentActivity(targets=frozenset({f"{HOST}/{HANDLE}"}), restarts=5, restarted_s_ago=301.0, fleet=1)

    assert guards.may_begin(build.wish(), orders(ARM), again, SAFETY_LIMITS, now=NOW) is None


FENCE, STOP = Fence(message="wedged"), Stop(message="wedged")
WARN = Warn(message="wedged", signal="SIGUSR1", listener=ProcessId(pid=4001, start_ticks=7))
SEEN_DEAD = Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message="it does not run")
PROMISED: Mapping[str, Any] = {"free": build.free(Stage.PLANNED), "settle": build.settle(Stage.PLANNED)}


@pytest.mark.parametrize(
    ("step", "facts", "held"),
    [
        pytest.param(BEGIN, build.facts(), True, id="nothing new is begun"),
        pytest.param(FENCE, build.facts(**PROMISED), True, id="what is only promised is not fenced"),
        pytest.param(WARN, build.facts(**PROMISED), True, id="nor warned"),
        pytest.param(
            FENCE,
            build.facts(**PROMISED, job=build.job(state=State.FENCING)),
            False,
            id="what is fenced already, and not told so, goes on",
        ),
        pytest.param(
            FENCE,
            build.facts(**PROMISED, job=build.job(state=State.FENCING, attempt=2)),
            True,
            id="another attempt's fence is not ours",
        ),
        pytest.param(FENCE, build.facts(**PROMISED, job=None), True, id="a job that the queue does not know"),
        pytest.param(STOP, build.facts(build.free(Stage.PLANNED)), True, id="a container without a job is not stopped"),
        pytest.param(
            STOP,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.ABANDONED)),
            True,
            id="nor one whose job somebody else settled",
        ),
        pytest.param(
            STOP,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.FENCED)),
            False,
            id="whose job was taken is stopped: what was begun is finished",
        ),
        pytest.param(STOP, build.facts(build.free(Stage.STOPPING)), False, id="a stop is tried again"),
        pytest.param(Start(message="dead"), build.facts(build.free(Stage.DEAD)), False, id="a stopped one is started"),
        pytest.param(
            SEEN_DEAD,
            build.facts(build.free(Stage.PLANNED), build.settle(Stage.ABANDONED)),
            True,
            id="what ended by itself, or by a person, is not started",
        ),
        pytest.param(SEEN_DEAD, build.facts(build.free(Stage.STOPPING)), False, id="what we stopped is"),
        pytest.param(FENCE, build.facts(), True, id="a promise of nothing but a settle"),
    ],
)
@pytest.mark.parametrize("stop", [PAUSE, BRAKE], ids=["paused", "braked"])
def test_a_pause_the_brake_or_a_window_holds(step: Step, facts: Facts, stop: Order, *, held: bool) -> None:
    found = guards.apply_holds(step, facts, orders(ARM, stop), RecentActivity(), SAFETY_LIMITS, now=NOW)

    assert isinstance(found, Wait) is held
    assert held or found is step
    assert guards.apply_holds(step, facts, orders(ARM), RecentActivity(), SAFETY_LIMITS, now=NOW) is step, "the control"


def test_what_was_promised_and_not_begun_is_held_for_an_approval_too() -> None:
    facts = build.facts(**PROMISED)

    held = guards.apply_holds(FENCE, facts, orders(ARM, ASK), RecentActivity(), SAFETY_LIMITS, now=NOW)

    assert isinstance(held, Wait)
    assert (held.reason, held.asks) == (Reason.APPROVAL, KEY)
    assert (
        guards.apply_holds(FENCE, facts, orders(ARM, ASK), RecentActivity(answer=YES), SAFETY_LIMITS, now=NOW) is FENCE
    )


def test_a_yes_that_runs_out_in_the_grace_of_a_warning_was_used_with_it_and_a_no_still_holds() -> None:
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
        pytest.param((), "", False, None, id="nothing is silenced"),
        pytest.param((Silence(silence_id="s1"),), "", False, Reason.SILENCED, id="silenced"),
        pytest.param(
            (Silence(silence_id="s1"),), "b is down", False, Reason.SILENCED, id="by one, while another is silent"
        ),
        pytest.param((), "b is down", False, None, id="unknown, and it goes on"),
        pytest.param((), "b is down", True, Reason.SILENCES_UNKNOWN, id="unknown, and it holds"),
        pytest.param((), "", True, None, id="known, where unknown would hold"),
    ],
)
def test_what_is_held_by_a_silence(
    silences: tuple[Silence, ...], unknown: str, held: str | None, *, holds: bool
) -> None:
    found = guards.check_silences(silences, unknown, SafetyLimits(unknown_holds=holds))

    assert (None if found is None else found.reason) == held


YES_TO_HOST = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key=HOST)
HOLD: dict[str, tuple[tuple[Order, ...], RecentActivity, str | None]] = {
    "armed": ((ARM,), RecentActivity(), None),
    "paused": ((ARM, PAUSE), RecentActivity(), Reason.PAUSED),
    "the brake is latched": ((ARM, BRAKE), RecentActivity(), Reason.CIRCUIT_BREAKER),
    "who would hold them is paused": ((ARM, order(Act.PAUSE, "box2")), RecentActivity(), Reason.PAUSED),
    "a third is paused": ((ARM, order(Act.PAUSE, "box3")), RecentActivity(), None),
    "nobody has approved it": ((ASK,), RecentActivity(), Reason.APPROVAL),
    "somebody approved it": ((ASK,), RecentActivity(answer=YES_TO_HOST), None),
    "somebody approved a container on it": ((ASK,), RecentActivity(answer=YES), Reason.APPROVAL),
    "a storm of others, and it cools down": (
        (ARM,),
        RecentActivity(targets=frozenset("abcdef"), restarts=99, restarted_s_ago=1),
        None,
    ),
}


@pytest.mark.parametrize(("given", "recent", "reason"), HOLD.values(), ids=HOLD)
def test_when_a_silent_hosts_jobs_may_be_held(
    given: tuple[Order, ...], recent: RecentActivity, reason: str | None
) -> None:
    step = Lose(message="no word of it", jobs=(build.held_job(),))
    wanted = guards.proposed_action(build.host_facts().episode, step)

    held = guards.may_hold(wanted, orders(*given), recent, by="box2", now=NOW)

    assert (wanted.handle, wanted.key, wanted.message) == ("", HOST, "no word of it")
    assert (None if held is None else held.reason) == reason


LOCK = LockWorker(host=HOST, worker="w1", message="it fails")
MOVE = Migrate(host=HOST, worker="w1", message="it fails")
BLOCK = BlockRun(message="all fail")
YES_TO_LOCK = order(Act.APPROVE, HOST, until=NOW + 1, episode_id=1, key="lock w1 on box1")
WRANGLE: dict[str, tuple[plan.Wrangle, tuple[Order, ...], RecentActivity, str | None]] = {
    "armed and quiet": (LOCK, (ARM,), RecentActivity(), None),
    "not armed": (LOCK, (), RecentActivity(), Reason.DRY_RUN),
    "paused": (MOVE, (ARM, PAUSE), RecentActivity(), Reason.PAUSED),
    "the brake is latched": (MOVE, (ARM, BRAKE), RecentActivity(), Reason.CIRCUIT_BREAKER),
    "nobody has approved it": (LOCK, (ASK,), RecentActivity(), Reason.APPROVAL),
    "somebody approved it": (LOCK, (ASK,), RecentActivity(answer=YES_TO_LOCK), None),
    "somebody approved something else": (MOVE, (ASK,), RecentActivity(answer=YES_TO_LOCK), Reason.APPROVAL),
    "the third condemned is a fault of its own": (LOCK, (ARM,), RecentActivity(lock_targets=others(2)), None),
    "the fourth is a storm": (LOCK, (ARM,), RecentActivity(lock_targets=others(3)), "storm"),
    "and so is a fourth run to be blocked": (BLOCK, (ARM,), RecentActivity(lock_targets=others(3)), "storm"),
    "the same worker for another run is no fourth": (
        LOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"worker box1/w1"}),
        None,
    ),
    "the same run by another host is no fourth": (
        BLOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"run r1"}),
        None,
    ),
    "a run of a worker's name is another": (
        BLOCK,
        (ARM,),
        RecentActivity(lock_targets=others(2) | {"worker box1/r1"}),
        "storm",
    ),
    "in a fleet of sixteen it is none": (LOCK, (ARM,), RecentActivity(lock_targets=others(3), fleet=16), None),
    "a move lock_target nobody": (MOVE, (ARM,), RecentActivity(lock_targets=others(99)), None),
    "what nobody approved is no storm": (LOCK, (ASK,), RecentActivity(lock_targets=others(99)), Reason.APPROVAL),
    "a storm of frees, and a container cools down": (
        LOCK,
        (ARM,),
        RecentActivity(targets=others(99), restarts=99, restarted_s_ago=1, gpu_restarted_s_ago=1),
        None,
    ),
}


@pytest.mark.parametrize(("step", "given", "recent", "verdict"), WRANGLE.values(), ids=WRANGLE)
def test_what_may_be_done_about_a_run(
    step: plan.Wrangle, given: tuple[Order, ...], recent: RecentActivity, verdict: str | None
) -> None:
    wanted = guards.proposed_action(build.run_facts(None).episode, step)

    found = guards.may_wrangle(wanted, orders(*given), recent, SAFETY_LIMITS, now=NOW)

    assert (wanted.handle, wanted.key, wanted.message) == ("", step.deed, step.message)
    assert ("storm" if isinstance(found, TripBreaker) else found and found.reason) == verdict


def test_a_silence_is_named_with_who_made_it_and_why() -> None:
    silences = (Silence(silence_id="s1", by="ann", comment="new driver"), Silence(silence_id="s2"))

    found = guards.check_silences(silences, "", SAFETY_LIMITS)

    assert found is not None
    assert [each for each in ("s1 by ann", "new driver", "s2 by ?") if each not in found.message] == []


def test_what_would_latch_the_brake_is_told_by_the_transaction_that_would_begin_it() -> None:
    storm = RecentActivity(targets=others(9))

    assert guards.apply_holds(BEGIN, build.facts(), orders(ARM), storm, SAFETY_LIMITS, now=NOW) is BEGIN


APPROVE, DECLINE = "`gpuwarden approve 1`", "`gpuwarden decline 1`"

NAMED: dict[str, tuple[tuple[Order, ...], RecentActivity, tuple[str, ...]]] = {
    "who disarmed it and why": ((ARM, DISARM), RecentActivity(), ("ann@box1", "a drill")),
    "who paused it, and until when": (
        (ARM, PAUSE),
        RecentActivity(),
        ("ann@box1", "a drill", "90 s", "`gpuwarden resume 4`"),
    ),
    "what closes the breaker": ((ARM, BRAKE), RecentActivity(), ("`gpuwarden breaker reset`",)),
    "how to answer, and what is asked": ((ASK,), RecentActivity(), (APPROVE, DECLINE, "silent for 130 s")),
    "how to answer once an approval ran out": (
        (ASK,),
        RecentActivity(answer=order(Act.APPROVE, key=KEY, until=NOW)),
        ("expired", APPROVE, DECLINE, "silent for 130 s"),
    ),
    "who declined it": ((ASK,), RecentActivity(answer=NO), ("ann@box1", "a drill", APPROVE)),
    "how long it cools down": ((ARM,), RecentActivity(restarted_s_ago=12.0), ("12 s ago", "300 s")),
    "how many containers in which time": (
        (ARM,),
        RecentActivity(targets=others(3), fleet=4),
        ("4 containers", "600 s", "4 workers", "3 allowed"),
    ),
    "that the fleet is unknown": ((ARM,), RecentActivity(targets=others(3)), ("unknown number of workers",)),
    "how many restarts in which time": (
        (ARM,),
        RecentActivity(restarts=6, fleet=2),
        ("7 restarts", "3600 s", "2 workers", "6 allowed"),
    ),
}


@pytest.mark.parametrize(("given", "recent", "names"), NAMED.values(), ids=NAMED)
def test_every_refusal_names(given: tuple[Order, ...], recent: RecentActivity, names: tuple[str, ...]) -> None:
    found = guards.may_begin(build.wish(), orders(*given), recent, SAFETY_LIMITS, now=NOW)

    assert isinstance(found, plan.Wait | TripBreaker)
    assert [each for each in names if each not in found.message] == []


def test_an_orders_scope_reads_as_words() -> None:
    assert ARM.scope == "every remedy on every host"
    assert order(Act.ARM, HOST, remedy=REMEDY).scope == f"{REMEDY} on {HOST}"
    assert YES.scope == f"episode 1 on {HOST}"
    assert PAUSE.scope == "pause 4 on every host"
    assert order(Act.RESUME, HOST, ends=4, order_id=9).scope == f"pause 4 on {HOST}"


def test_only_what_is_freed_for_a_gpus_memory_waits_for_that_gpu() -> None:
    begin = replace(BEGIN, gpus=("GPU-0", "GPU-1"))

    assert guards.proposed_action(build.tenant_facts().episode, begin).gpus == {"GPU-0", "GPU-1"}
    assert guards.proposed_action(build.episode(), begin).gpus == frozenset()
    assert guards.proposed_action(build.tenant_facts(build.free(Stage.PLANNED)).episode, STOP).gpus == frozenset()
