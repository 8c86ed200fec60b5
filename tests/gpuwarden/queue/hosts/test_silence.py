"""Which silent hosts are lost."""

from collections.abc import Collection

import pytest

from gpuwarden.queue.hosts.silence import QUIET_S, SeenHost, Verdict, decide
from tests.gpuwarden.queue.builders import NOW

pytestmark = pytest.mark.pure

AFTER_S = 180.0


def seen(*silent_s: float) -> list[SeenHost]:
    return [SeenHost(host=f"box{n}", heard_at=NOW - each) for n, each in enumerate(silent_s)]


def judged(
    hosts: list[SeenHost], *, listens_s: float = NOW, after_s: float = AFTER_S, idle: Collection[str] = ()
) -> Verdict:
    at_work = {each.host for each in hosts} - {*idle}
    return decide(hosts, at_work=at_work, now=NOW, since=NOW - listens_s, after_s=after_s)


def lost(hosts: list[SeenHost], *, listens_s: float = 1000.0, idle: Collection[str] = ()) -> list[str]:
    return [each.host for each in judged(hosts, listens_s=listens_s, idle=idle).lost]


@pytest.mark.behaviour("D4")
def test_host_is_lost_at_the_limit() -> None:
    assert lost(seen(0, 179.9)) == []
    assert lost(seen(0, 180)) == ["box1"]


@pytest.mark.behaviour("D5")
def test_only_a_host_that_was_heard_can_be_lost() -> None:
    assert lost([]) == []


def test_time_before_the_gateway_listened_does_not_count() -> None:
    assert lost(seen(0, 3000), listens_s=179) == []
    assert lost(seen(0, 3000), listens_s=180) == ["box1"]


def test_none_is_lost_while_more_are_silent_than_heard() -> None:
    assert lost(seen(0, 0, 180, 180)) == ["box2", "box3"]
    assert lost(seen(0, 180, 180)) == []
    assert lost(seen(180)) == []
    found = judged(seen(0, 180, QUIET_S))
    assert found == Verdict(spared=(SeenHost(host="box1", heard_at=NOW - 180),))
    assert lost(seen(0, 180, QUIET_S - 1)) == ["box1"]


def test_silent_host_without_jobs_is_not_lost_and_does_not_count() -> None:
    assert lost(seen(0, 180, 180), idle=["box1"]) == ["box2"]
    assert lost(seen(0, 180, 180, 180), idle=["box0", "box1", "box2"]) == ["box3"]
    assert lost(seen(180, 180), idle=["box0"]) == []  # none is heard
    assert judged(seen(180, 180), idle=["box0"]).spared == (SeenHost(host="box1", heard_at=NOW - 180),)


def test_hosts_that_are_lost_already_do_not_count() -> None:
    before = SeenHost(host="old", heard_at=NOW - 900, lost_at=NOW - 700)

    assert lost([before, *seen(0, 180)]) == ["box1"]


def test_host_from_the_future_is_heard() -> None:
    assert lost(seen(-5000, 180)) == ["box1"]
    assert seen(-5000)[0].silent_s(NOW) == 0.0


def test_short_limit_is_the_limit_of_silence_too() -> None:
    hosts = seen(0, 12, 12)

    assert judged(hosts, after_s=10.0).spared == tuple(hosts[1:])
