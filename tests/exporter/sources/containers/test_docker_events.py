"""A daemon with events is listed after an event, and rarely without one."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from exporter.sources.containers import docker as containers
from exporter.sources.containers import docker_events
from tests.exporter import builders as build
from tests.exporter.sources.containers.docker_daemon import (
    OWN,
    UNHEALTHY,
    Answer,
    EventDaemon,
    UnchunkedEvents,
    a_daemon,
    daemon,
    inspected,
    listing_of,
    polling,
    row,
)
from tests.waiting import eventually


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """List often without events, and rarely with events."""
    monkeypatch.setattr(containers, "REFRESH_S", 0.02)
    monkeypatch.setattr(containers, "CALM_S", 60.0)
    monkeypatch.setattr(containers, "FRESH_S", 60.0)


STARTED = {"Type": "container", "Action": "start", "id": build.DOCKER_ID}


@pytest.mark.usefixtures("calm")
def test_daemon_with_events_is_listed_after_an_event(short_path: Path) -> None:
    event_daemon = EventDaemon(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, event_daemon) as url, polling(url) as source:
        eventually(event_daemon.is_rarely_listed)
        before = len(event_daemon.listings)
        event_daemon.events.put(STARTED)
        eventually(lambda: len(event_daemon.listings) > before)
        assert listing_of(source)
        eventually(event_daemon.is_rarely_listed)

    (path,) = event_daemon.followed
    assert {"start", "die", "destroy", "rename", "pause", "unpause"} <= set(re.findall("[a-z]+", unquote(path)))


def test_listing_stays_valid_until_the_next_one_of_an_idle_daemon() -> None:
    longest_s = containers.SWIFT_S + containers.CALM_S + containers.TIMEOUT_S

    assert longest_s <= containers.FRESH_S


@pytest.mark.usefixtures("calm")
def test_daemon_with_slow_listings_is_listed_often(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_daemon = EventDaemon(row(), inspect=inspected(pid=os.getpid()))
    monkeypatch.setattr(containers, "SWIFT_S", 0.0)

    with daemon(short_path, event_daemon) as url, polling(url):
        eventually(lambda: event_daemon.followed)
        before = len(event_daemon.listings)

        eventually(lambda: len(event_daemon.listings) > before + 10)


@pytest.mark.usefixtures("calm")
def test_daemon_that_ends_its_events_is_listed_often(short_path: Path) -> None:
    event_daemon = EventDaemon(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, event_daemon) as url, polling(url):
        eventually(event_daemon.is_rarely_listed)
        event_daemon.events.put(None)
        eventually(lambda: not event_daemon.is_rarely_listed())
        assert not event_daemon.is_rarely_listed()

    assert len(event_daemon.followed) == 1


@pytest.mark.usefixtures("calm")
def test_daemon_that_resumes_its_events_is_listed_rarely(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_events, "RETRY_S", 0.1)
    event_daemon = EventDaemon(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, event_daemon) as url, polling(url):
        eventually(event_daemon.is_rarely_listed)
        event_daemon.events.put(None)
        eventually(lambda: len(event_daemon.followed) == 2)
        eventually(event_daemon.is_rarely_listed)


@pytest.mark.parametrize(
    ("state", "inspection"),
    [
        pytest.param("running", inspected(pid=os.getpid(), labels=OWN, health=UNHEALTHY), id="health of a server"),
        pytest.param("running", (500, {"message": "broken"}), id="running container cannot be inspected"),
        pytest.param("exited", (500, {"message": "broken"}), id="stopped container cannot be inspected"),
    ],
)
@pytest.mark.usefixtures("calm")
def test_incomplete_listing_is_repeated_often(state: str, inspection: Any, short_path: Path, house: Path) -> None:
    mounts = [{"Source": str(house / "w0")}]
    event_daemon = EventDaemon({**row(), "State": state, "Mounts": mounts}, inspect=inspection)

    with daemon(short_path, event_daemon) as url, polling(url, house):
        eventually(lambda: event_daemon.followed)
        time.sleep(0.2)
        assert not event_daemon.is_rarely_listed()


@pytest.mark.usefixtures("calm")
def test_inspected_stopped_container_leaves_the_listing_complete(short_path: Path, house: Path) -> None:
    mounts = [{"Source": str(house / "w0")}]
    down = inspected(running=False, pid=0, mounts=mounts)
    event_daemon = EventDaemon({**row(), "State": "exited", "Mounts": mounts}, inspect=down)

    with daemon(short_path, event_daemon) as url, polling(url, house):
        eventually(event_daemon.is_rarely_listed)


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("ends", [True, False], ids=["ending", "endless"])
def test_daemon_with_unchunked_events_is_listed_often(short_path: Path, ends: bool) -> None:
    whole, endless = EventDaemon(row(), inspect=inspected(pid=os.getpid())), UnchunkedEvents()
    stream = [STARTED] if ends else endless
    answer: Answer = lambda path: stream if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url, polling(url) as source:
        eventually(lambda: len(whole.listings) > 3)
        assert not whole.is_rarely_listed()
        assert source._events is not None
        assert source._events._stream is None


@pytest.mark.usefixtures("calm")
def test_silent_event_stream_does_not_delay_the_end(short_path: Path) -> None:
    silence = threading.Event()
    whole = a_daemon(row(), inspect=inspected(pid=os.getpid()))
    answer: Answer = lambda path: silence.wait(20) if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url:
        with polling(url) as source:
            eventually(lambda: listing_of(source))
            began_s = time.monotonic()
        took_s = time.monotonic() - began_s
        silence.set()

    assert took_s < 2
