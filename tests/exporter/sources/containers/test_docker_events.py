"""A daemon that sends events is asked when something changed, and else seldom."""

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
    Telling,
    Unframed,
    a_daemon,
    asked,
    daemon,
    inspected,
    listing_of,
    row,
)
from tests.waiting import eventually


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often, but hardly ever one who tells by itself of what changes."""
    monkeypatch.setattr(containers, "REFRESH_S", 0.02)
    monkeypatch.setattr(containers, "CALM_S", 60.0)
    monkeypatch.setattr(containers, "FRESH_S", 60.0)


STARTED = {"Type": "container", "Action": "start", "id": build.DOCKER_ID}


@pytest.mark.usefixtures("calm")
def test_one_that_tells_of_what_changes_is_asked_when_something_has(short_path: Path) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url) as source:
        eventually(telling.is_left_alone)
        before = len(telling.listings)
        telling.events.put(STARTED)
        eventually(lambda: len(telling.listings) > before)
        assert listing_of(source)
        eventually(telling.is_left_alone)

    (path,) = telling.followed
    assert {"start", "die", "destroy", "rename", "pause", "unpause"} <= set(re.findall("[a-z]+", unquote(path)))


def test_after_a_calm_a_listing_is_believed_for_as_long_as_the_next_answer_may_take() -> None:
    longest_s = containers.SWIFT_S + containers.CALM_S + containers.TIMEOUT_S

    assert longest_s <= containers.FRESH_S


@pytest.mark.usefixtures("calm")
def test_one_whose_listing_takes_long_is_not_left_alone(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))
    monkeypatch.setattr(containers, "SWIFT_S", 0.0)

    with daemon(short_path, telling) as url, asked(url):
        eventually(lambda: telling.followed)
        before = len(telling.listings)

        eventually(lambda: len(telling.listings) > before + 10)


@pytest.mark.usefixtures("calm")
def test_one_that_ends_what_it_told_is_asked_often_again(short_path: Path) -> None:
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url):
        eventually(telling.is_left_alone)
        telling.events.put(None)
        eventually(lambda: not telling.is_left_alone())
        assert not telling.is_left_alone()

    assert len(telling.followed) == 1


@pytest.mark.usefixtures("calm")
def test_one_that_ended_and_tells_again_is_left_alone_again(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_events, "RETRY_S", 0.1)
    telling = Telling(row(), inspect=inspected(pid=os.getpid()))

    with daemon(short_path, telling) as url, asked(url):
        eventually(telling.is_left_alone)
        telling.events.put(None)
        eventually(lambda: len(telling.followed) == 2)
        eventually(telling.is_left_alone)


@pytest.mark.parametrize(
    ("state", "inspection"),
    [
        pytest.param("running", inspected(pid=os.getpid(), labels=OWN, health=UNHEALTHY), id="a server's health"),
        pytest.param("running", (500, {"message": "broken"}), id="one that runs and cannot be inspected"),
        pytest.param("exited", (500, {"message": "broken"}), id="one that is down and cannot be inspected"),
    ],
)
@pytest.mark.usefixtures("calm")
def test_an_open_question_is_asked_often(state: str, inspection: Any, short_path: Path, house: Path) -> None:
    mounts = [{"Source": str(house / "w0")}]
    telling = Telling({**row(), "State": state, "Mounts": mounts}, inspect=inspection)

    with daemon(short_path, telling) as url, asked(url, house):
        eventually(lambda: telling.followed)
        time.sleep(0.2)
        assert not telling.is_left_alone()


@pytest.mark.usefixtures("calm")
def test_one_that_is_down_and_was_inspected_leaves_nothing_open(short_path: Path, house: Path) -> None:
    mounts = [{"Source": str(house / "w0")}]
    down = inspected(running=False, pid=0, mounts=mounts)
    telling = Telling({**row(), "State": "exited", "Mounts": mounts}, inspect=down)

    with daemon(short_path, telling) as url, asked(url, house):
        eventually(telling.is_left_alone)


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("ends", [True, False], ids=["and end", "and never end"])
def test_one_whose_events_do_not_come_in_chunks_is_asked_often(short_path: Path, ends: bool) -> None:
    whole, endless = Telling(row(), inspect=inspected(pid=os.getpid())), Unframed()
    told = [STARTED] if ends else endless
    answer: Answer = lambda path: told if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url, asked(url) as source:
        eventually(lambda: len(whole.listings) > 3)
        assert not whole.is_left_alone()
        assert source._events is not None
        assert source._events._stream is None


@pytest.mark.usefixtures("calm")
def test_what_follows_a_daemon_that_says_nothing_at_all_holds_up_no_end(short_path: Path) -> None:
    silence = threading.Event()
    whole = a_daemon(row(), inspect=inspected(pid=os.getpid()))
    answer: Answer = lambda path: silence.wait(20) if "/events" in path else whole(path)  # noqa: E731

    with daemon(short_path, answer) as url:
        with asked(url) as source:
            eventually(lambda: listing_of(source))
            began_s = time.monotonic()
        took_s = time.monotonic() - began_s
        silence.set()

    assert took_s < 2
