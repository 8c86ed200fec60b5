"""Identity and state of processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden import procfs
from gpuwarden.procfs import ProcessId
from tests.waiting import eventually

PID = 4242
STAT_AFTER_NAME = "S 1 4242 4242 0 -1 4194560 5 0 0 0 1 2 0 0 20 0 1 0 987654 1000 10 18446744073709551615"


@pytest.mark.parametrize(
    "name", ["python", "tmux: server", "a) R 1 2 3", "((sd-pam))", "", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_start_is_read_for_any_process_name(tmp_path: Path, name: str) -> None:
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "stat").write_text(f"{PID} ({name}) {STAT_AFTER_NAME}\n")

    assert procfs.start_ticks(PID, proc=tmp_path) == 987654


def test_process_name_with_invalid_text_is_accepted(tmp_path: Path) -> None:
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "stat").write_bytes(f"{PID} (".encode() + b"\xff\xfe) " + STAT_AFTER_NAME.encode())

    assert procfs.start_ticks(PID, proc=tmp_path) == 987654


def test_this_process_started_after_its_parent_and_before_now() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    up_s = float(Path("/proc/uptime").read_text().split()[0])

    assert 0 < procfs.start_ticks(os.getpid()) / ticks <= up_s
    assert procfs.start_ticks(os.getpid()) == procfs.start_ticks(os.getpid())


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_ended_process_has_no_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        procfs.start_ticks(99, proc=tmp_path)


def test_process_id_round_trips() -> None:
    this = ProcessId.of(os.getpid())

    assert ProcessId.parse(f"{this}\n") == this


@pytest.mark.parametrize("text", ["", "12", "12 -3", "12 x", "1 2 3"])
def test_invalid_process_id_is_none(text: str) -> None:
    assert ProcessId.parse(text) is None


def test_process_runs_until_it_ends_even_as_a_zombie(sleeper: "subprocess.Popen[bytes]") -> None:
    process = ProcessId.of(sleeper.pid)
    ran = process.runs()

    sleeper.kill()
    eventually(lambda: procfs.stat(sleeper.pid)[0] == "Z", "it is a zombie")
    zombie = process.runs()
    sleeper.wait()

    assert (ran, zombie, process.runs()) == (True, False, False)


def refuse_to_read(*_: object) -> bytes:
    raise FileNotFoundError


def test_process_has_ended_when_its_pid_or_start_time_is_gone(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ProcessId.of(sleeper.pid)
    reused = ProcessId(sleeper.pid, process.start_ticks - 1)
    seen = [process.has_ended(), reused.has_ended()]
    with monkeypatch.context() as hidden:
        hidden.setattr(procfs, "read", refuse_to_read)
        seen.append(process.has_ended())
    sleeper.kill()
    eventually(lambda: procfs.stat(sleeper.pid)[0] == "Z", "it is a zombie")
    seen.append(process.has_ended())
    sleeper.wait()

    assert [*seen, process.has_ended()] == [False, True, None, True, True]


def test_process_of_another_user_has_not_ended() -> None:
    def refuse(_: int, __: int) -> None:
        raise PermissionError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "kill", refuse)

        assert ProcessId.of(os.getpid()).has_ended() is False


def test_pid_namespace_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.pid_namespace() == Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    assert procfs.pid_namespace() is None


def test_later_process_with_the_same_pid_is_another_one(sleeper: "subprocess.Popen[bytes]") -> None:
    before = ProcessId(sleeper.pid, procfs.start_ticks(sleeper.pid) - 1)

    assert not before.runs()
    with pytest.raises(ProcessLookupError), before.opened():
        pytest.fail("it was opened")


def test_opened_process_can_be_signalled(sleeper: "subprocess.Popen[bytes]") -> None:
    with ProcessId.of(sleeper.pid).opened() as descriptor:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)

    assert sleeper.wait() == -signal.SIGTERM
