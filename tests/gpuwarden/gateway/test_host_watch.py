"""The central gateway decides which hosts are lost."""

import argparse
import asyncio
from contextlib import nullcontext, suppress

import pytest
from structlog.testing import capture_logs

from gpuwarden.db.errors import DatabaseError
from gpuwarden.gateway import host_watch
from gpuwarden.gateway.host_watch import GAP_S, LOOK_S, HostWatch
from gpuwarden.gateway.main import _lost_after_s
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.silence import Verdict
from tests.gpuwarden.queue.builders import NOW, put_to_work

AFTER_S = 60.0


class Clocks:
    """The database's clock and the time since boot."""

    def __init__(self, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.boot_s = NOW, 1000.0
        monkeypatch.setattr(store, "now", lambda: self.now)
        monkeypatch.setattr(host_watch, "boottime_s", lambda: self.boot_s)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.boot_s += seconds


class Scene:
    """A gateway that looks every 5 s. Box 1 is silent, and box 2 is heard."""

    def __init__(self, store: JobStore, clocks: Clocks) -> None:
        self.store, self.clocks, self.watch = store, clocks, HostWatch(store, after_s=AFTER_S)
        put_to_work(store, "box1", "box2")
        for host in ("box1", "box2"):
            store.batches.sync(host, [], [], now=NOW)

    def play(self, seconds: float, *, heard: tuple[str, ...] = ("box2",)) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.clocks.advance(LOOK_S)
            for host in heard:
                self.store.batches.sync(host, [], [], now=self.clocks.now)
            self.watch.look()

    def lost(self) -> list[str]:
        return [each.host for each in self.store.seen_hosts.rows() if each.lost_at is not None]


@pytest.fixture
def scene(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(store, Clocks(store, monkeypatch))


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_silent_host_is_lost_and_comes_back_and_both_are_logged(scene: Scene) -> None:
    scene.watch.look()
    scene.play(AFTER_S - LOOK_S)
    assert scene.lost() == []

    with capture_logs() as logs:
        scene.play(3 * LOOK_S)
        assert scene.lost() == ["box1"]
        scene.play(LOOK_S, heard=("box1", "box2"))

    assert scene.lost() == []
    assert [(each["event"], each["host"]) for each in logs] == [
        ("host lost", "box1"),
        ("lost host is back, or forgotten", "box1"),
    ]


@pytest.mark.parametrize(("text", "is_valid"), [("29", False), ("30", True), ("480", True), ("481", False)])
def test_limit_is_longer_than_the_interval_of_heartbeats(text: str, is_valid: bool) -> None:
    with nullcontext() if is_valid else pytest.raises(argparse.ArgumentTypeError, match="from 30 to 480"):
        assert _lost_after_s(text) == float(text)


def test_gateway_that_just_started_loses_no_host(scene: Scene) -> None:
    scene.clocks.advance(1000)
    scene.play(AFTER_S)
    assert scene.lost() == []

    scene.play(LOOK_S)
    assert scene.lost() == ["box1"]


@pytest.mark.parametrize("clock", ["both", "database ahead", "database back", "suspended"])
def test_time_without_a_look_does_not_count(scene: Scene, clock: str) -> None:
    """The database did not answer, its clock was set, or this machine was suspended."""
    scene.watch.look()
    scene.play(AFTER_S - LOOK_S)
    if clock == "both":
        scene.clocks.advance(GAP_S)
    elif clock == "suspended":
        scene.clocks.boot_s += GAP_S
    else:
        scene.clocks.now += GAP_S if clock == "database ahead" else -2 * GAP_S
    scene.play(AFTER_S)
    assert scene.lost() == []

    scene.play(LOOK_S)
    assert scene.lost() == ["box1"]


def test_silent_majority_is_logged_once_and_not_lost(scene: Scene) -> None:
    scene.watch.look()
    with capture_logs() as logs:
        scene.play(2 * AFTER_S, heard=())

    assert scene.lost() == []
    assert [(each["event"], each["hosts"]) for each in logs] == [
        ("no host is lost, because more are silent than heard", ["box1", "box2"])
    ]


def test_failing_database_is_logged_once_and_asked_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def fail(*_: object, **__: object) -> Verdict:
        asked.append(None)
        raise DatabaseError("gone")

    monkeypatch.setattr(host_watch, "LOOK_S", 0.01)
    monkeypatch.setattr("gpuwarden.queue.hosts.seen_hosts.SeenHosts.decide", fail)

    async def run() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await scene.watch.run()

    with capture_logs() as logs:
        asyncio.run(run())

    assert [each["reason"] for each in logs] == ["DatabaseError: gone"]
    assert len(asked) > 1
