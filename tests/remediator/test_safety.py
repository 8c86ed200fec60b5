"""Whether something may be begun: who armed it, what is paused, the brake, cool-downs; a sentence a row."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpuwarden.job import State
from remediator import plan, safety
from remediator.plan import Begin, Facts, Fence, Listener, Stage, Start, Step, Stop, Wait, Warn
from remediator.safety import Act, Latch, Order, Orders, Recent, Safeguards
from tests.remediator import builders as build
from tests.remediator.builders import HANDLE, HOST, KEY, NOW

REMEDY = "restart_worker"
SAFEGUARDS = Safeguards()
BEGIN = Begin(
    trip=build.episode().trip, free_key=KEY, container_kind="docker", container_handle=HANDLE, container_name="c1",
    settle_key="7/1", worker_incarnation="i1", because="silent",
)  # fmt: skip


def order(act: Act, host: str | None = None, *, at: float = NOW - 60, **more: Any) -> Order:
    return Order(**{"act": act, "at": at, "who": "ann@box1", "because": "a drill", "host": host, **more})


ARM, DISARM = order(Act.ARM), order(Act.DISARM)
PAUSE = order(Act.PAUSE, until=NOW + 60)
BRAKE, RELEASE = order(Act.BRAKE), order(Act.RELEASE, at=NOW - 30)


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
    assert (orders(*given).brake(), orders(*given).released_at()) == (latched, released_at)


@pytest.mark.parametrize(("fleet", "above"), [(None, 3), (1, 3), (2, 3), (4, 3), (8, 3), (15, 3), (16, 4), (100, 25)])
def test_how_many_single_faults_a_fleet_has(fleet: int | None, above: int) -> None:
    assert SAFEGUARDS.storm_above(fleet) == above


def others(count: int) -> frozenset[str]:
    return frozenset(f"{HOST}/c{number}" for number in range(count))


@pytest.mark.parametrize(
    ("given", "recent", "verdict"),
    [
        pytest.param((ARM,), Recent(), None, id="armed and quiet: it begins"),
        pytest.param((), Recent(), "dry_run", id="not armed"),
        pytest.param((ARM, DISARM), Recent(), "dry_run", id="disarmed since the facts were read"),
        pytest.param((ARM, PAUSE), Recent(), "paused", id="paused"),
        pytest.param((ARM, BRAKE), Recent(), "brake", id="the brake is latched"),
        pytest.param(
            (ARM, PAUSE, BRAKE), Recent(), "brake", id="the brake is told before a pause, which ends by itself"
        ),
        pytest.param((ARM,), Recent(freed_s_ago=299.9), "cooldown", id="freed less than the cool-down ago"),
        pytest.param((ARM,), Recent(freed_s_ago=300.0), None, id="its cool-down is over"),
        pytest.param((ARM,), Recent(freed_s_ago=-10.0), "cooldown", id="the clock was set back a little"),
        pytest.param((ARM,), Recent(freed_s_ago=-9000.0), None, id="the clock was set back by more than that"),
        pytest.param((ARM,), Recent(targets=others(2), fleet=4), None, id="the third of four is a fault of its own"),
        pytest.param((ARM,), Recent(targets=others(3), fleet=4), "storm", id="the fourth of four is a storm"),
        pytest.param((ARM,), Recent(targets=others(3), fleet=8), "storm", id="the fourth of eight is one too"),
        pytest.param((ARM,), Recent(targets=others(3)), "storm", id="and so in a fleet nobody counted"),
        pytest.param((ARM,), Recent(targets=others(3), fleet=16), None, id="the fourth of sixteen is none"),
        pytest.param(
            (ARM,),
            Recent(targets=others(2) | {f"{HOST}/{HANDLE}"}),
            None,
            id="one that was freed within the window already is no further one",
        ),
        pytest.param(
            (ARM,), Recent(targets=others(9), freed_s_ago=1.0), "cooldown", id="what cools down makes no storm"
        ),
    ],
)
def test_what_may_begin(given: tuple[Order, ...], recent: Recent, verdict: str | None) -> None:
    found = safety.may_begin(
        orders(*given), recent, SAFEGUARDS, host=HOST, remedy=REMEDY, target=safety.target(HOST, HANDLE), now=NOW
    )

    word = "storm" if isinstance(found, Latch) else None if found is None else found.reason
    assert word == verdict


def test_one_gpu_of_one_is_not_a_storm_however_often_it_wedges() -> None:
    again = Recent(targets=frozenset({f"{HOST}/{HANDLE}"}), freed_s_ago=301.0, fleet=1)

    assert (
        safety.may_begin(orders(ARM), again, SAFEGUARDS, host=HOST, remedy=REMEDY, target=f"{HOST}/{HANDLE}", now=NOW)
        is None
    )


FENCE, STOP = Fence(because="wedged"), Stop(because="wedged")
WARN = Warn(because="wedged", signal="SIGUSR1", listener=Listener(pid=4001, start_ticks=7))
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
        pytest.param(Start(because="dead"), build.facts(build.free(Stage.DEAD)), False, id="a stopped one is started"),
        pytest.param(FENCE, build.facts(), True, id="a promise of nothing but a settle"),
    ],
)
@pytest.mark.parametrize("stop", [PAUSE, BRAKE], ids=["paused", "braked"])
def test_what_is_held_by_a_pause_or_the_brake(step: Step, facts: Facts, stop: Order, *, held: bool) -> None:
    found = safety.hold(step, facts, orders(ARM, stop), Recent(), SAFEGUARDS, now=NOW)

    assert isinstance(found, Wait) is held
    assert held or found is step
    assert safety.hold(step, facts, orders(ARM), Recent(), SAFEGUARDS, now=NOW) is step, "the control"


def test_what_would_latch_the_brake_is_told_by_the_transaction_that_would_begin_it() -> None:
    storm = Recent(targets=others(9))

    assert safety.hold(BEGIN, build.facts(), orders(ARM), storm, SAFEGUARDS, now=NOW) is BEGIN


def test_every_refusal_says_who_and_why_and_what_ends_it() -> None:
    def because(*given: Order, recent: Recent = Recent()) -> str:  # noqa: B008 - frozen
        found = safety.may_begin(orders(*given), recent, SAFEGUARDS, host=HOST, remedy=REMEDY, target="t", now=NOW)
        assert isinstance(found, plan.Wait | Latch)
        return found.because

    assert because() == "disarmed just now: nobody armed it"
    assert because(ARM, DISARM) == "disarmed just now: by ann@box1: a drill"
    assert because(ARM, order(Act.PAUSE, because="")).startswith("paused: by ann@box1; it ends by itself")
    assert "`gpuwarden brake release`" in because(ARM, BRAKE)
    assert "was freed 12 s ago and cools down for 300 s" in because(ARM, recent=Recent(freed_s_ago=12.0))
    assert because(ARM, recent=Recent(targets=others(3), fleet=4)).startswith(
        "4 containers to be freed within 600 s, with 4 workers; above 3"
    )
    assert "with an unknown number of workers" in because(ARM, recent=Recent(targets=others(3)))


def test_an_orders_scope_reads_as_words() -> None:
    assert ARM.scope == "every remedy on every host"
    assert order(Act.ARM, HOST, remedy=REMEDY).scope == f"{REMEDY} on {HOST}"
