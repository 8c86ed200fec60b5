"""The process actuator on real processes: look, start, stop, children, stale records, and files that will not do."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.procfs import ProcessId
from remediator.actuators import ActuatorError, process
from remediator.actuators.process import ProcessActuator
from tests.waiting import eventually

# Says when it is ready: a signal before that would find Python still starting.
PATIENT = "import signal; print('ready', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PATIENT
FAMILY = (
    "import signal, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-1); "
    "child.stdout.readline(); print(child.pid, flush=True); signal.pause()"
)


class Room:
    """One supervised worker, its files, and what is ended when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid_file = folder / "w1.pid"
        self.log = folder / "w1.log"
        self.started: list[int] = []

    def actuator(self, *argv: str, **env: str) -> ProcessActuator:
        shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in env.items())
        file = self.folder / "workers.toml"
        file.write_text(
            f"[worker.w1]\nargv = {json.dumps(argv)}\nenv = {{ {shown} }}\n"
            f"pid_file = '{self.pid_file}'\nlog_file = '{self.log}'\n"
        )
        return ProcessActuator(file)

    def start(self, actuator: ProcessActuator) -> int:
        """Start it and wait until it says a line; its pid."""
        actuator.start("w1")
        pid = int(self.pid_file.read_text().split()[0])
        self.started.append(pid)
        eventually(lambda: "\n" in self.log.read_text(), "the worker is ready")
        return pid


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    found = Room(tmp_path)
    yield found
    for pid in found.started:
        process._end(ProcessId(pid, start_ticks(pid)), grace_s=0.0)


def start_ticks(pid: int) -> int:
    try:
        return procfs.start_ticks(pid)
    except OSError:
        return 0


def lives(pid: int) -> bool:
    return start_ticks(pid) != 0 and procfs.stat(pid)[0] != "Z"


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-c", program, *arguments


# --- look


def test_what_the_file_does_not_name_is_gone_for_good(room: Room) -> None:
    assert room.actuator(*python(PATIENT)).look("w2") is None


def test_a_worker_that_never_started_does_not_run(room: Room) -> None:
    found = room.actuator(*python(PATIENT)).look("w1")

    assert found is not None
    assert (found.running, found.incarnation, found.pids, found.managed) == (False, "", frozenset(), True)


def test_a_running_worker_is_known_by_pid_start_and_boot(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    pid = room.start(actuator)

    found = actuator.look("w1")

    assert found is not None
    assert found.running
    assert found.incarnation == f"process:{pid}:{procfs.start_ticks(pid)}@{clock.boot_id()}"
    assert found.pids == {pid}
    assert (found.kind, found.handle, found.cgroup) == ("process", "w1", None)


@pytest.mark.parametrize(
    "record",
    ["", "12", "pid ticks", "1 2 3", "0 5", "1 5", "-1 5", "\xff"],
    ids=["empty", "no ticks", "words", "three", "pid 0", "init", "every process", "no ASCII"],
)
def test_a_record_that_cannot_be_one_is_no_process(room: Room, record: str) -> None:
    actuator = room.actuator(*python(PATIENT))
    room.pid_file.write_text(record, encoding="latin-1")

    found = actuator.look("w1")

    assert found is not None
    assert (found.running, found.incarnation, found.pids) == (False, "", frozenset())
    actuator.stop("w1", grace_s=0.0)


def test_a_stale_record_whose_pid_is_somebody_elses_now_names_nothing_of_theirs(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    stranger = subprocess.Popen(python(PATIENT), stdout=subprocess.PIPE, start_new_session=True)
    assert stranger.stdout
    stranger.stdout.readline()
    room.pid_file.write_text(f"{stranger.pid} {procfs.start_ticks(stranger.pid) - 1}\n")

    found = actuator.look("w1")
    actuator.stop("w1", grace_s=0.0)

    assert found is not None
    assert (found.running, found.pids) == (False, frozenset())
    assert lives(stranger.pid)
    stranger.kill()
    stranger.communicate()


def test_a_record_from_another_boot_is_a_process_of_no_more(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    room.pid_file.write_text("4194304 1\n")

    found = actuator.look("w1")

    assert found is not None
    assert not found.running


# --- start


def test_it_leads_a_session_and_process_group_of_its_own(room: Room) -> None:
    pid = room.start(room.actuator(*python(PATIENT)))

    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)


def test_its_environment_is_the_remediators_and_its_own(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")

    room.start(room.actuator(*python("import os; print(os.environ['INHERITED'], os.environ['ADDED'])"), ADDED="too"))

    assert room.log.read_text() == "yes too\n"


def test_it_ignores_no_signal_that_python_does(room: Room) -> None:
    room.start(room.actuator("/bin/sh", "-c", "grep SigIgn /proc/self/status"))

    assert int(room.log.read_text().split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_its_log_goes_on_where_it_was(room: Room) -> None:
    actuator = room.actuator("/bin/sh", "-c", "echo out; echo err >&2")
    room.start(actuator)
    eventually(lambda: not running(actuator), "it ended")

    room.start(actuator)

    eventually(lambda: room.log.read_text() == "out\nerr\n" * 2, "both runs are in the log")


def running(actuator: ProcessActuator) -> bool:
    found = actuator.look("w1")
    return found is not None and found.running


def test_what_runs_is_not_started_twice(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    pid = room.start(actuator)

    assert room.start(actuator) == pid


LEADERLESS: Final = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends and whose other one goes on."""


def test_one_whose_main_thread_has_ended_runs_and_is_not_started_twice_until_it_is_stopped(room: Room) -> None:
    actuator = room.actuator(*python(LEADERLESS))
    pid = room.start(actuator)
    eventually(lambda: procfs.stat(pid)[0] == "Z", "its main thread has ended")

    before = running(actuator), room.start(actuator) == pid
    actuator.stop("w1", grace_s=0.1)

    assert before == (True, True), "a thread that hangs in a driver keeps its GPU"
    assert not running(actuator)


def test_the_next_start_is_another_incarnation(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    room.start(actuator)
    before = actuator.look("w1")
    actuator.stop("w1", grace_s=5.0)
    room.start(actuator)
    after = actuator.look("w1")

    assert before is not None
    assert after is not None
    assert after.running
    assert before.incarnation != after.incarnation


@pytest.mark.parametrize(
    "argv", [("/no/such/program",), ("/etc/passwd",), ("a\0b",)], ids=["none", "no right", "a NUL"]
)
def test_what_cannot_be_started_says_so(room: Room, argv: tuple[str, ...]) -> None:
    actuator = room.actuator(*python(PATIENT))
    actuator._commands["w1"].argv = list(argv)

    with pytest.raises(ActuatorError, match="worker w1 cannot be started"):
        actuator.start("w1")


def test_an_unrecorded_process_is_ended(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    actuator = room.actuator(*python(DEAF))
    room.pid_file.mkdir()
    spawn = os.posix_spawnp

    def spawn_and_note(*arguments: Any, **how: Any) -> int:
        room.started.append(spawn(*arguments, **how))
        return room.started[-1]

    monkeypatch.setattr(os, "posix_spawnp", spawn_and_note)

    with pytest.raises(ActuatorError, match="was stopped: cannot write its pid file"):
        actuator.start("w1")

    assert [lives(pid) for pid in room.started] == [False]


def test_where_it_could_not_be_put_on_record_nothing_is_started(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    actuator._commands["w1"].pid_file = room.folder / "missing" / "w1.pid"

    with pytest.raises(ActuatorError, match="worker w1 cannot be started"):
        actuator.start("w1")

    assert not room.log.exists()


# --- who starts it is killed at it


KILLED = """
import os, signal, sys
from pathlib import Path
from remediator.actuators import process

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

replace = Path.replace
def killed_at_the_record(self, target):
    killed() if target.name == "w1.pid" else replace(self, target)

{at}
process.ProcessActuator(Path(sys.argv[1])).start("w1")
"""
BEFORE = "os.posix_spawnp = killed"
AFTER = {
    "right after it was started": "spawn = os.posix_spawnp; os.posix_spawnp = lambda *a, **k: killed(spawn(*a, **k))",
    "before it is on record": "Path.replace = killed_at_the_record",
    "once it is on record": "unlink = Path.unlink\n"
    "Path.unlink = lambda self, **k: killed() if self.suffix == '.starting' else unlink(self, **k)",
}


def killed(room: Room, at: str) -> ProcessActuator:
    """Started anew by a program that is killed there; what the next one works with."""
    actuator = room.actuator(*python(PATIENT))
    room.start(actuator)
    actuator.stop("w1", grace_s=5.0)
    room.log.unlink()
    starter = subprocess.run(python(KILLED.format(at=at), str(room.folder / "workers.toml")), check=False, timeout=30)
    assert starter.returncode == -signal.SIGKILL
    return room.actuator(*python(PATIENT))


@pytest.mark.parametrize("at", AFTER.values(), ids=AFTER)
def test_what_was_started_by_one_who_was_killed_at_it_is_known_to_the_next_one(room: Room, at: str) -> None:
    actuator = killed(room, at)
    eventually(lambda: room.log.exists() and room.log.read_text() == "ready\n", "it runs")

    found = actuator.look("w1")

    assert found is not None
    assert found.running
    (pid,) = found.pids
    room.started.append(pid)
    assert found.incarnation == f"process:{pid}:{procfs.start_ticks(pid)}@{clock.boot_id()}"
    assert room.start(actuator) == pid, "it is not started a second time"
    actuator.stop("w1", grace_s=5.0)
    assert not lives(pid)
    assert room.log.read_text() == "ready\n"


def test_what_is_started_by_one_who_is_killed_before_it_is_started_by_the_next_one(room: Room) -> None:
    actuator = killed(room, BEFORE)

    assert not running(actuator)
    room.start(actuator)

    assert running(actuator)
    assert sorted(each.name for each in room.folder.iterdir()) == ["w1.log", "w1.pid", "workers.toml"]


def test_a_child_that_leads_a_session_of_its_own_is_not_taken_for_what_was_started(room: Room) -> None:
    """It has the mark too; once the start is on record nobody looks for that."""
    apart = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    actuator = room.actuator(*python(apart, "import os; print(os.getpid(), flush=True); " + PATIENT))
    room.start(actuator)
    child = int(eventually(lambda: room.log.read_text().partition("\n")[0], "its child lives"))
    room.started.append(child)
    eventually(lambda: not running(actuator), "it ended")

    found = actuator.look("w1")

    assert lives(child)
    assert found is not None
    assert (found.running, found.pids) == (False, frozenset())


# --- stop


def test_sigterm_ends_one_that_heeds_it(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    pid = room.start(actuator)

    actuator.stop("w1", grace_s=20.0)

    assert not lives(pid)
    assert not running(actuator)


def test_one_that_ignores_sigterm_is_killed_after_its_grace(room: Room) -> None:
    actuator = room.actuator(*python(DEAF))
    pid = room.start(actuator)

    actuator.stop("w1", grace_s=0.1)

    assert not lives(pid)


def test_its_children_end_with_it_deaf_or_not(room: Room) -> None:
    actuator = room.actuator(*python(FAMILY, DEAF))
    pid = room.start(actuator)
    child = int(room.log.read_text())
    found = actuator.look("w1")
    assert found is not None
    assert found.pids == {pid, child}

    actuator.stop("w1", grace_s=0.1)

    assert not lives(child)


def test_children_that_outlive_it_are_seen_and_are_ended_by_a_stop(room: Room) -> None:
    actuator = room.actuator(*python(FAMILY, PATIENT))
    pid = room.start(actuator)
    child = int(room.log.read_text())
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not running(actuator), "the worker itself is gone")
    left = actuator.look("w1")
    assert left is not None
    assert left.pids == {child}

    actuator.stop("w1", grace_s=5.0)

    after = actuator.look("w1")
    assert after is not None
    assert after.pids == frozenset()
    assert not lives(child)


def test_a_stop_of_what_is_down_does_nothing(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))
    actuator.stop("w1", grace_s=0.0)
    room.start(actuator)
    actuator.stop("w1", grace_s=5.0)

    actuator.stop("w1", grace_s=0.0)


def test_one_that_does_not_die_is_an_error(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process outlives SIGKILL here; one stuck in a driver does, so its death is what is held back."""
    actuator = room.actuator(*python(PATIENT))
    room.start(actuator)
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    with pytest.raises(ActuatorError, match=r"worker w1 \(pid \d+\) still runs after SIGKILL"):
        actuator.stop("w1", grace_s=0.0)

    monkeypatch.undo()
    assert running(actuator)


# Run in a pid namespace of its own, where the next pid can be chosen: a worker ends between the moment it is seen and
# the moment it is held, and a stranger is born with its pid. What is printed is how many strangers live, and how the
# stranger fares that is signalled as itself.
RECYCLED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gpuwarden.procfs import ProcessId
from remediator.actuators import process

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
        time.sleep(0.05)  # a start is counted in hundredths of a second
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        strangers.append(patient())
    return held(pid)

os.pidfd_open = recycled
process._signal(seen, signal.SIGKILL)
(stranger,) = strangers
time.sleep(0.05)
print(stranger.pid == worker.pid, stranger.poll())
process._signal(ProcessId.of(stranger.pid), signal.SIGKILL)
print(stranger.wait())
"""


def test_a_pid_that_is_somebody_elses_by_the_time_it_is_held_is_not_signalled() -> None:
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]

    said = subprocess.run(
        ["unshare", *rights, "--pid", "--fork", "--mount-proc", sys.executable, "-c", RECYCLED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (said.stdout.splitlines(), said.stderr) == (["True None", "-9"], "")


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSYS, "needs Linux 5.3 or later"), (errno.EMFILE, "Too many open files")],
    ids=["an old kernel", "no descriptor left"],
)
def test_an_unheld_pid_is_not_signalled(room: Room, monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    actuator = room.actuator(*python(PATIENT))
    pid = room.start(actuator)

    def refused(_: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refused)
        with pytest.raises(ActuatorError, match=f"process {pid} was not signalled: .*{says}"):
            actuator.stop("w1", grace_s=0.0)

    assert lives(pid)


def test_what_the_file_does_not_name_is_neither_started_nor_stopped(room: Room) -> None:
    actuator = room.actuator(*python(PATIENT))

    with pytest.raises(ActuatorError, match="worker w2 is not listed in the file of supervised workers"):
        actuator.start("w2")
    with pytest.raises(ActuatorError, match="worker w2 is not listed in the file of supervised workers"):
        actuator.stop("w2", grace_s=0.0)


def test_another_programs_child_is_looked_at_and_left_to_it_to_reap(room: Room) -> None:
    """The remediator was started anew: the worker is not its child any more."""
    actuator = room.actuator(*python(PATIENT))
    room.pid_file.write_text(f"{os.getppid()} {procfs.start_ticks(os.getppid())}\n")

    assert running(actuator)


# --- the file

BAD: dict[str, tuple[str | None, str]] = {
    "missing": (None, "No such file"),
    "no TOML": ("[worker", "Expected"),
    "no worker": ("", "worker"),
    "no command": ("[worker.w1]\npid_file = 'p'\nlog_file = 'l'", "argv"),
    "an empty command": ("[worker.w1]\nargv = []\npid_file = 'p'\nlog_file = 'l'", "at least 1 item"),
    "a command in one string": ("[worker.w1]\nargv = 'sh -c x'\npid_file = 'p'\nlog_file = 'l'", "valid list"),
    "a misspelt key": ("[worker.w1]\nargv = ['a']\npidfile = 'p'\nlog_file = 'l'", "pidfile"),
    "no text": ("\xff", "decode"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_a_file_that_will_not_do_says_which_and_why(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "workers.toml"
    if text is not None:
        file.write_text(text, encoding="latin-1")

    with pytest.raises(GpuwardenError) as raised:
        ProcessActuator(file)

    assert f"invalid file of supervised workers {file}" in str(raised.value)
    assert says in str(raised.value)
