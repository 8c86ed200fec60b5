"""The process actuator on real processes: look, start, stop, children, stale records and invalid files."""

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
from remediator.actuators.process import OrphanActuator, ProcessActuator, orphans_handle
from tests.waiting import eventually

# Prints when it is ready: an earlier signal would find Python still starting.
PATIENT = "import signal; print('ready', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PATIENT
FAMILY = (
    "import signal, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=-1); "
    "child.stdout.readline(); print(child.pid, flush=True); signal.pause()"
)


class Supervised:
    """One supervised worker, its files, and the pids to end after the test."""

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
        """Start it and wait until it prints a line. Returns its pid."""
        actuator.start("w1")
        pid = int(self.pid_file.read_text().split()[0])
        self.started.append(pid)
        eventually(lambda: "\n" in self.log.read_text(), "the worker is ready")
        return pid


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(tmp_path)
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


def test_worker_missing_from_the_file_is_none(supervised: Supervised) -> None:
    assert supervised.actuator(*python(PATIENT)).look("w2") is None


def test_worker_that_never_started_does_not_run(supervised: Supervised) -> None:
    found = supervised.actuator(*python(PATIENT)).look("w1")

    assert found is not None
    assert (found.running, found.incarnation, found.pids, found.managed) == (False, "", frozenset(), True)


def test_incarnation_is_pid_start_time_and_boot_id(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    pid = supervised.start(actuator)

    found = actuator.look("w1")

    assert found is not None
    assert found.running
    assert found.incarnation == f"process:{pid}:{procfs.start_ticks(pid)}@{clock.boot_id()}"
    assert found.pids == {pid}
    assert (found.kind, found.handle, found.cgroup) == ("process", "w1", None)


@pytest.mark.parametrize(
    "record",
    ["", "12", "pid ticks", "1 2 3", "0 5", "1 5", "-1 5", "\xff"],
    ids=["empty", "no ticks", "words", "three numbers", "pid 0", "init", "every process", "not ASCII"],
)
def test_invalid_record_names_no_process(supervised: Supervised, record: str) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    supervised.pid_file.write_text(record, encoding="latin-1")

    found = actuator.look("w1")

    assert found is not None
    assert (found.running, found.incarnation, found.pids) == (False, "", frozenset())
    actuator.stop("w1", grace_s=0.0)


def test_stale_record_with_a_reused_pid_does_not_match(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    stranger = subprocess.Popen(python(PATIENT), stdout=subprocess.PIPE, start_new_session=True)
    assert stranger.stdout
    stranger.stdout.readline()
    supervised.pid_file.write_text(f"{stranger.pid} {procfs.start_ticks(stranger.pid) - 1}\n")

    found = actuator.look("w1")
    actuator.stop("w1", grace_s=0.0)

    assert found is not None
    assert (found.running, found.pids) == (False, frozenset())
    assert lives(stranger.pid)
    stranger.kill()
    stranger.communicate()


def test_record_from_an_earlier_boot_does_not_match(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    supervised.pid_file.write_text("4194304 1\n")

    found = actuator.look("w1")

    assert found is not None
    assert not found.running


# --- start


def test_worker_leads_its_own_session_and_process_group(supervised: Supervised) -> None:
    pid = supervised.start(supervised.actuator(*python(PATIENT)))

    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)


def test_environment_is_inherited_and_extended(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")

    supervised.start(
        supervised.actuator(*python("import os; print(os.environ['INHERITED'], os.environ['ADDED'])"), ADDED="too")
    )

    assert supervised.log.read_text() == "yes too\n"


def test_signals_ignored_by_python_are_reset(supervised: Supervised) -> None:
    supervised.start(supervised.actuator("/bin/sh", "-c", "grep SigIgn /proc/self/status"))

    assert int(supervised.log.read_text().split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_log_is_appended(supervised: Supervised) -> None:
    actuator = supervised.actuator("/bin/sh", "-c", "echo out; echo err >&2")
    supervised.start(actuator)
    eventually(lambda: not running(actuator), "it ended")

    supervised.start(actuator)

    eventually(lambda: supervised.log.read_text() == "out\nerr\n" * 2, "both runs are in the log")


def running(actuator: ProcessActuator) -> bool:
    found = actuator.look("w1")
    return found is not None and found.running


def test_running_worker_is_not_started_twice(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    pid = supervised.start(actuator)

    assert supervised.start(actuator) == pid


LEADERLESS: Final = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another thread runs."""


def test_worker_whose_main_thread_ended_still_runs(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(LEADERLESS))
    pid = supervised.start(actuator)
    eventually(lambda: procfs.stat(pid)[0] == "Z", "its main thread has ended")

    before = running(actuator), supervised.start(actuator) == pid
    actuator.stop("w1", grace_s=0.1)

    assert before == (True, True), "a thread that hangs in a driver keeps its GPU"
    assert not running(actuator)


def test_next_start_gives_a_new_incarnation(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    supervised.start(actuator)
    before = actuator.look("w1")
    actuator.stop("w1", grace_s=5.0)
    supervised.start(actuator)
    after = actuator.look("w1")

    assert before is not None
    assert after is not None
    assert after.running
    assert before.incarnation != after.incarnation


@pytest.mark.parametrize(
    "argv", [("/no/such/program",), ("/etc/passwd",), ("a\0b",)], ids=["missing", "not executable", "a NUL"]
)
def test_failed_start_raises(supervised: Supervised, argv: tuple[str, ...]) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    actuator._commands["w1"].argv = list(argv)

    with pytest.raises(ActuatorError, match="worker w1 cannot be started"):
        actuator.start("w1")


def test_process_that_cannot_be_recorded_is_ended(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    actuator = supervised.actuator(*python(DEAF))
    supervised.pid_file.mkdir()
    spawn = os.posix_spawnp

    def spawn_and_note(*arguments: Any, **how: Any) -> int:
        supervised.started.append(spawn(*arguments, **how))
        return supervised.started[-1]

    monkeypatch.setattr(os, "posix_spawnp", spawn_and_note)

    with pytest.raises(ActuatorError, match="was stopped: cannot write its pid file"):
        actuator.start("w1")

    assert [lives(pid) for pid in supervised.started] == [False]


def test_start_without_a_pid_file_folder_starts_nothing(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    actuator._commands["w1"].pid_file = supervised.folder / "missing" / "w1.pid"

    with pytest.raises(ActuatorError, match="worker w1 cannot be started"):
        actuator.start("w1")

    assert not supervised.log.exists()


# --- the starting process is killed


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
    "right after the start": "spawn = os.posix_spawnp; os.posix_spawnp = lambda *a, **k: killed(spawn(*a, **k))",
    "before the record": "Path.replace = killed_at_the_record",
    "after the record": "unlink = Path.unlink\n"
    "Path.unlink = lambda self, **k: killed() if self.suffix == '.starting' else unlink(self, **k)",
}


def killed(supervised: Supervised, at: str) -> ProcessActuator:
    """Restart the worker by a program that is killed at this point. Returns the actuator of the next program."""
    actuator = supervised.actuator(*python(PATIENT))
    supervised.start(actuator)
    actuator.stop("w1", grace_s=5.0)
    supervised.log.unlink()
    starter = subprocess.run(
        python(KILLED.format(at=at), str(supervised.folder / "workers.toml")), check=False, timeout=30
    )
    assert starter.returncode == -signal.SIGKILL
    return supervised.actuator(*python(PATIENT))


@pytest.mark.parametrize("at", AFTER.values(), ids=AFTER)
def test_worker_started_by_a_killed_program_is_found(supervised: Supervised, at: str) -> None:
    actuator = killed(supervised, at)
    eventually(lambda: supervised.log.exists() and supervised.log.read_text() == "ready\n", "it runs")

    found = actuator.look("w1")

    assert found is not None
    assert found.running
    (pid,) = found.pids
    supervised.started.append(pid)
    assert found.incarnation == f"process:{pid}:{procfs.start_ticks(pid)}@{clock.boot_id()}"
    assert supervised.start(actuator) == pid, "it is not started a second time"
    actuator.stop("w1", grace_s=5.0)
    assert not lives(pid)
    assert supervised.log.read_text() == "ready\n"


def test_start_by_a_program_killed_before_it_is_repeated(supervised: Supervised) -> None:
    actuator = killed(supervised, BEFORE)

    assert not running(actuator)
    supervised.start(actuator)

    assert running(actuator)
    assert sorted(each.name for each in supervised.folder.iterdir()) == ["w1.log", "w1.pid", "workers.toml"]


def test_child_in_another_session_is_not_taken_for_the_worker(supervised: Supervised) -> None:
    """The child inherits the mark, which counts only until the start is recorded."""
    detached = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    actuator = supervised.actuator(*python(detached, "import os; print(os.getpid(), flush=True); " + PATIENT))
    supervised.start(actuator)
    child = int(eventually(lambda: supervised.log.read_text().partition("\n")[0], "its child lives"))
    supervised.started.append(child)
    eventually(lambda: not running(actuator), "it ended")

    found = actuator.look("w1")

    assert lives(child)
    assert found is not None
    assert (found.running, found.pids) == (False, frozenset())


# --- stop


def test_sigterm_ends_a_worker(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    pid = supervised.start(actuator)

    actuator.stop("w1", grace_s=20.0)

    assert not lives(pid)
    assert not running(actuator)


def test_worker_that_ignores_sigterm_is_killed_after_its_grace(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(DEAF))
    pid = supervised.start(actuator)

    actuator.stop("w1", grace_s=0.1)

    assert not lives(pid)


def test_children_that_ignore_sigterm_end_with_the_worker(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(FAMILY, DEAF))
    pid = supervised.start(actuator)
    child = int(supervised.log.read_text())
    found = actuator.look("w1")
    assert found is not None
    assert found.pids == {pid, child}

    actuator.stop("w1", grace_s=0.1)

    assert not lives(child)


def test_children_that_outlive_the_worker_are_listed_and_stopped(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(FAMILY, PATIENT))
    pid = supervised.start(actuator)
    child = int(supervised.log.read_text())
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


# --- orphans of a worker that is not listed


class Family:
    """A shell and its child, both in the process group that the shell leads."""

    def __init__(self, *, session: bool = False) -> None:
        self.parent = subprocess.Popen(
            ["sh", "-c", "sleep 600 & echo $!; wait"],
            stdout=subprocess.PIPE, text=True, process_group=None if session else 0, start_new_session=session,
        )  # fmt: skip
        assert self.parent.stdout
        with self.parent.stdout as output:
            self.child = int(output.readline())
        self.process = ProcessId.of(self.parent.pid)

    def handle(self, *, boot_id: str | None = None, uid: int | None = None) -> str:
        incarnation = f"process:{self.process.pid}:{self.process.start_ticks}@{boot_id or clock.boot_id()}"
        return orphans_handle("w1", incarnation, os.getuid() if uid is None else uid)

    def kill_parent(self) -> None:
        self.parent.kill()
        self.parent.wait()


@pytest.fixture(params=[False, True], ids=["process group", "session"])
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    found = Family(session=request.param)
    yield found
    if found.parent.returncode is None:
        found.kill_parent()
    if lives(found.child):
        os.kill(found.child, signal.SIGKILL)


def test_children_that_a_dead_worker_left_are_listed_and_stopped(family: Family) -> None:
    actuator = OrphanActuator()
    family.kill_parent()
    left = actuator.look(family.handle())

    actuator.stop(family.handle(), grace_s=5.0)

    after = actuator.look(family.handle())
    assert (left.running, left.pids, left.managed, left.startable) == (True, frozenset({family.child}), True, False)
    assert (left.name, left.incarnation) == ("w1", family.handle().split()[1])
    assert (after.running, after.pids) == (False, frozenset())
    assert not lives(family.child)


def test_children_of_another_user_or_an_earlier_boot_are_no_orphans(family: Family) -> None:
    actuator = OrphanActuator()
    family.kill_parent()

    for handle in (family.handle(uid=os.getuid() + 1), family.handle(boot_id="earlier")):
        actuator.stop(handle, grace_s=0.0)

        assert actuator.look(handle).pids == frozenset()
    assert lives(family.child)


def test_children_of_a_live_worker_are_no_orphans(family: Family) -> None:
    actuator = OrphanActuator()

    with pytest.raises(ActuatorError, match=r"runs, or cannot be read"):
        actuator.look(family.handle())
    with pytest.raises(ActuatorError):
        actuator.stop(family.handle(), grace_s=0.0)

    assert lives(family.parent.pid)
    assert lives(family.child)


def test_group_of_a_later_process_with_the_same_pid_is_left_alone(family: Family) -> None:
    earlier = family.handle().replace(f":{family.process.start_ticks}@", ":1@")
    actuator = OrphanActuator()

    actuator.stop(earlier, grace_s=0.0)

    assert actuator.look(earlier).pids == frozenset()
    assert lives(family.parent.pid)
    assert lives(family.child)


def test_orphan_that_survives_sigkill_is_an_error(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    family.kill_parent()
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    with pytest.raises(ActuatorError, match="still run after SIGKILL"):
        OrphanActuator().stop(family.handle(), grace_s=0.0)


@pytest.mark.parametrize("handle", ["w1", "w1 process:1@b 0", "w1 process:1:2@b", "w1 process:1:2@b -1"])
def test_handle_without_a_process_is_refused(handle: str) -> None:
    with pytest.raises(ActuatorError, match="names no process"):
        OrphanActuator().look(handle)


def test_dead_worker_that_is_not_listed_is_not_started(family: Family) -> None:
    with pytest.raises(ActuatorError, match="not listed"):
        OrphanActuator().start(family.handle())


def test_stop_of_a_stopped_worker_does_nothing(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    actuator.stop("w1", grace_s=0.0)
    supervised.start(actuator)
    actuator.stop("w1", grace_s=5.0)

    actuator.stop("w1", grace_s=0.0)


def test_worker_that_survives_sigkill_is_an_error(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in a driver survives SIGKILL. Here no signal is sent."""
    actuator = supervised.actuator(*python(PATIENT))
    supervised.start(actuator)
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    with pytest.raises(ActuatorError, match=r"worker w1 \(pid \d+\) still runs after SIGKILL"):
        actuator.stop("w1", grace_s=0.0)

    monkeypatch.undo()
    assert running(actuator)


# In a pid namespace the test chooses the next pid. The worker ends before its pidfd opens, and another process gets
# its pid.
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
        time.sleep(0.05)  # a start time has a resolution of 10 ms
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


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSYS, "needs Linux 5.3 or later"), (errno.EMFILE, "Too many open files")],
    ids=["old kernel", "no free descriptor"],
)
def test_pid_without_a_pidfd_is_not_signalled(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    actuator = supervised.actuator(*python(PATIENT))
    pid = supervised.start(actuator)

    def refused(_: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refused)
        with pytest.raises(ActuatorError, match=f"process {pid} was not signalled: .*{says}"):
            actuator.stop("w1", grace_s=0.0)

    assert lives(pid)


def test_worker_missing_from_the_file_rejects_start_and_stop(supervised: Supervised) -> None:
    actuator = supervised.actuator(*python(PATIENT))

    with pytest.raises(ActuatorError, match="worker w2 is not listed in the file of supervised workers"):
        actuator.start("w2")
    with pytest.raises(ActuatorError, match="worker w2 is not listed in the file of supervised workers"):
        actuator.stop("w2", grace_s=0.0)


def test_child_of_another_process_is_read_but_not_reaped(supervised: Supervised) -> None:
    """After a restart of the remediator the worker is not its child."""
    actuator = supervised.actuator(*python(PATIENT))
    supervised.pid_file.write_text(f"{os.getppid()} {procfs.start_ticks(os.getppid())}\n")

    assert running(actuator)


# --- the file

BAD: dict[str, tuple[str | None, str]] = {
    "missing": (None, "No such file"),
    "not TOML": ("[worker", "Expected"),
    "no worker": ("", "worker"),
    "no command": ("[worker.w1]\npid_file = 'p'\nlog_file = 'l'", "argv"),
    "empty command": ("[worker.w1]\nargv = []\npid_file = 'p'\nlog_file = 'l'", "at least 1 item"),
    "command as one string": ("[worker.w1]\nargv = 'sh -c x'\npid_file = 'p'\nlog_file = 'l'", "valid list"),
    "unknown key": ("[worker.w1]\nargv = ['a']\npidfile = 'p'\nlog_file = 'l'", "pidfile"),
    "not UTF-8": ("\xff", "decode"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_invalid_file_is_named_with_the_reason(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "workers.toml"
    if text is not None:
        file.write_text(text, encoding="latin-1")

    with pytest.raises(GpuwardenError) as raised:
        ProcessActuator(file)

    assert f"invalid file of supervised workers {file}" in str(raised.value)
    assert says in str(raised.value)
