"""Identity and state of processes."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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


# --- signals

# In a pid namespace the test chooses the next pid. The worker ends before its pidfd opens, and another process gets
# its pid.
RECYCLED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gpuwarden import procfs
from gpuwarden.procfs import ProcessId

def patient():
    return subprocess.Popen(["sleep", "600"], start_new_session=True)

worker = patient()
seen = ProcessId.of(worker.pid)
strangers = []
held = os.pidfd_open

def recycled(pid):
    if not strangers:
        worker.kill()
        worker.wait()
        time.sleep(0.05)  # a start time has a resolution of 10 ms
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        strangers.append(patient())
    return held(pid)

os.pidfd_open = recycled
procfs.signal_process(seen, signal.SIGKILL)
(stranger,) = strangers
time.sleep(0.05)
print(stranger.pid == worker.pid, stranger.poll())
procfs.signal_process(ProcessId.of(stranger.pid), signal.SIGKILL)
print(stranger.wait())
"""


def test_pid_reused_before_its_pidfd_opens_is_not_signalled() -> None:
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]

    said = subprocess.run(
        ["unshare", *rights, "--pid", "--fork", "--mount-proc", sys.executable, "-c", RECYCLED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (said.stdout.splitlines(), said.stderr) == (["True None", "-9"], "")


def test_ended_process_gets_no_signal(sleeper: "subprocess.Popen[bytes]") -> None:
    process = ProcessId.of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()

    procfs.signal_process(process, signal.SIGTERM)


def test_kernel_without_pidfds_is_an_error(sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)

    with pytest.raises(OSError, match="Function not implemented"):
        procfs.signal_process(ProcessId.of(sleeper.pid), signal.SIGTERM)

    assert sleeper.poll() is None


# --- families


def process_table(folder: Path, *processes: Sequence[int], ended: Sequence[int] = ()) -> Path:
    """A /proc of processes with pid, parent, process group and session. Each starts at its pid."""
    for pid, parent, group, session in processes:
        (folder / str(pid)).mkdir()
        state = "Z" if pid in ended else "S"
        (folder / str(pid) / "stat").write_text(
            f"{pid} (python) {state} {parent} {group} {session} 0 -1 4194560 5 0 0 0 1 2 0 0 20 0 1 0 {pid} 1000 10 0\n"
        )
    (folder / "self").mkdir()
    (folder / "77").mkdir()  # it ends during the listing
    return folder


LEADER = 20
TABLE = (
    (1, 0, 1, 1),
    (10, 1, 10, 10),
    (LEADER, 10, LEADER, LEADER),
    (21, LEADER, LEADER, LEADER),
    (22, 21, 22, LEADER),
    (23, 1, LEADER, LEADER),
    (24, LEADER, 24, 24),
    (25, 24, 25, 25),
    (26, 1, 26, LEADER),
    (30, 10, 30, 30),
    (31, 30, 31, 30),
)
"""The leader has children, one adopted process in its group, one in its session, and one child in another session."""


def pids(found: Sequence[ProcessId]) -> list[int]:
    assert all(each.start_ticks == each.pid for each in found)
    return [each.pid for each in found]


def test_family_is_the_group_the_session_and_all_children(tmp_path: Path) -> None:
    proc = process_table(tmp_path, *TABLE)

    assert pids(procfs.family(ProcessId(LEADER, LEADER), proc=proc)) == [20, 21, 22, 23, 24, 25, 26]
    assert pids(procfs.descendants(LEADER, proc=proc)) == [21, 22, 24, 25]


def test_family_without_its_leader_is_its_group_and_session(tmp_path: Path) -> None:
    adopted = [(pid, 1 if parent == LEADER else parent, *rest) for pid, parent, *rest in TABLE if pid != LEADER]
    proc = process_table(tmp_path, *adopted)

    assert pids(procfs.family(ProcessId(LEADER, LEADER), proc=proc)) == [21, 22, 23, 26]


def test_ended_processes_are_left_out_and_their_children_are_not(tmp_path: Path) -> None:
    proc = process_table(tmp_path, *TABLE, ended=(LEADER, 24))

    assert pids(procfs.family(ProcessId(LEADER, LEADER), proc=proc)) == [21, 22, 23, 25, 26]


def test_leader_with_another_start_time_has_no_family(tmp_path: Path) -> None:
    proc = process_table(tmp_path, *TABLE)

    assert procfs.family(ProcessId(LEADER, LEADER - 1), proc=proc) == []
    assert procfs.family(ProcessId(99, 1), proc=proc) == []
