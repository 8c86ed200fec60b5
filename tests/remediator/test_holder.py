"""Who holds an intent: a process, by a name that its successor can judge, against real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpuwarden import procfs
from remediator.process_id import Holder
from tests.remediator.builders import HOST


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


@pytest.fixture
def us() -> Holder:
    return Holder.this_process(HOST)


def of(process: subprocess.Popen[bytes], us: Holder) -> Holder:
    return replace(us, pid=process.pid, start_ticks=procfs.start_ticks(process.pid))


@pytest.mark.parametrize("host", ["box1", "a box with spaces", "工"])
def test_a_name_is_read_back_as_it_was_written(host: str) -> None:
    found = Holder.this_process(host)

    assert Holder.parse(str(found)) == found


@pytest.mark.parametrize("name", ["", "box1", "box1 b 1 2", "box1 b one 2 3", "box1 b 1 -2 3"])
def test_a_name_that_is_not_ours_to_understand_is_none(name: str) -> None:
    assert Holder.parse(name) is None


def test_we_are_not_over(us: Holder) -> None:
    assert not us.is_over(seen_by=us)


def test_a_process_is_over_once_it_has_ended(process: subprocess.Popen[bytes], us: Holder) -> None:
    other = of(process, us)
    assert not other.is_over(seen_by=us)

    process.kill()
    process.wait()

    assert other.is_over(seen_by=us)


def test_a_process_that_is_stopped_is_not_over(process: subprocess.Popen[bytes], us: Holder) -> None:
    import signal  # noqa: PLC0415

    process.send_signal(signal.SIGSTOP)

    assert not of(process, us).is_over(seen_by=us)


def test_another_process_that_has_its_pid_now_is_another(process: subprocess.Popen[bytes], us: Holder) -> None:
    before = of(process, us)

    assert replace(before, start_ticks=before.start_ticks - 1).is_over(seen_by=us)


@pytest.mark.parametrize("elsewhere", [{"host": "box2"}, {"boot_id": "another"}, {"pid_namespace": 1}])
def test_a_process_that_cannot_be_seen_from_here_is_not_known_to_be_over(
    process: subprocess.Popen[bytes], us: Holder, elsewhere: dict[str, str]
) -> None:
    ended = of(process, us)
    process.kill()
    process.wait()

    assert not replace(ended, **elsewhere).is_over(seen_by=us)  # type: ignore[arg-type]
    assert ended.is_over(seen_by=us)


@pytest.mark.parametrize("refusal", [FileNotFoundError, PermissionError])
def test_where_proc_hides_a_process_it_is_not_over(
    us: Holder, monkeypatch: pytest.MonkeyPatch, refusal: type[OSError]
) -> None:
    """As with hidepid, where other users' processes are not to be seen; the kernel still knows the pid."""

    def hidden(_: int) -> int:
        raise refusal

    monkeypatch.setattr("gpuwarden.procfs.start_ticks", hidden)

    assert not us.is_over(seen_by=us)

    def not_ours(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_ours)
    assert not us.is_over(seen_by=us)
