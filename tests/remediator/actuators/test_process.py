"""The process actuator on real processes: it finds a worker, ends it with its children, and signals nothing else."""

import errno
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Condition
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor import files
from gpuwarden.supervisor.files import Notice, ProcessFile
from remediator.actuators import ActuatorError, Announces, process
from remediator.actuators.process import ProcessActuator
from remediator.plan import ContainerState
from tests.waiting import eventually

NAME: Final = "w1"
OTHER_UID: Final = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")

# Each prints when it is ready: an earlier signal would find Python still starting.
PATIENT: Final = "import signal; print('ready', flush=True); signal.pause()"
DEAF: Final = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PATIENT
ORDERLY: Final = """
import signal, sys
def end(*_):
    print("orderly", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""
# Prints the pid of its child once that is ready. Arguments: the child's program, and whether it has a session.
FAMILY: Final = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=-1, start_new_session=sys.argv[2] == "session")
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
# Its child starts a grandchild in the same group and ends, so that init or a subreaper adopts the grandchild.
ORPHAN: Final = """
import os, signal, subprocess, sys
read, write = os.pipe()
if os.fork() == 0:
    grandchild = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=-1)
    grandchild.stdout.readline()
    os.write(write, str(grandchild.pid).encode())
    os._exit(0)
pid = os.read(read, 20).decode()
os.wait()
print(pid, flush=True)
signal.pause()
"""
LEADERLESS: Final = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another thread runs."""

# A worker without a supervisor: it holds the lock itself. Arguments: $GPUWARDEN_RUNTIME_DIR and the folder.
PLAIN: Final = """
import sys
from pathlib import Path
from gpuwarden.reporter import Reporter
with Reporter(Path(sys.argv[1]), worker="w1", queue="gpu", subdirectory=sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.read()
"""


class Host:
    """A runtime directory, its actuator, and the processes to end after the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / NAME
        self.actuator = ProcessActuator(directory)
        self.started: list[subprocess.Popen[str]] = []

    def popen(self, argv: Sequence[str], **how: Any) -> subprocess.Popen[str]:
        """Start a process in its own session and wait for its first line, kept in `first_line`."""
        how = {"start_new_session": True, "stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL} | how
        found = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **how)
        self.started.append(found)
        assert found.stdout
        self.first_line = found.stdout.readline().strip()
        assert self.first_line
        return found

    def plain(self, folder: str = NAME) -> int:
        """Start a worker without a supervisor. Returns its pid."""
        return self.popen(python(PLAIN, str(self.directory), folder)).pid

    def supervised(self, program: str, *arguments: str, **claim: Any) -> subprocess.Popen[str]:
        """Start a process that this one supervises."""
        found = self.popen(python(program, *arguments))
        self.claim(ProcessId.of(found.pid), **claim)
        return found

    def claim(self, of: ProcessId, *, supervisor: int | None = None, **changes: Any) -> None:
        """Write a process file."""
        self.folder.mkdir(exist_ok=True)
        given: dict[str, Any] = {"supervisor": ProcessId.of(supervisor or os.getpid()), "restarts": True} | changes
        files.write(self.folder, NAME, ProcessFile(process=of, **given))

    def look(self) -> ContainerState:
        found = self.actuator.look(NAME)
        assert found is not None
        return found

    def runs(self) -> bool:
        return self.look().running

    def close(self) -> None:
        for found in self.started:
            leader = ProcessId(found.pid, start_ticks(found.pid))
            for each in procfs.family(leader):
                procfs.signal_process(each, signal.SIGKILL)
            found.kill()
            found.communicate()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.close()


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids that got a signal, which is also sent."""
    sent: list[int] = []
    send = procfs.signal_process

    def note(to: ProcessId, number: signal.Signals) -> None:
        sent.append(to.pid)
        send(to, number)

    monkeypatch.setattr(procfs, "signal_process", note)
    return sent


def start_ticks(pid: int) -> int:
    try:
        return procfs.start_ticks(pid)
    except OSError:
        return 0


def lives(pid: int) -> bool:
    return start_ticks(pid) != 0 and not procfs.is_zombie(pid)


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-c", program, *arguments


# --- look


def test_unknown_worker_is_none(host: Host) -> None:
    host.plain()

    assert host.actuator.look("w2") is None


@pytest.mark.parametrize("name", ["", "../w1", ".", "a/b", "a\0b"])
def test_invalid_name_is_refused(host: Host, name: str) -> None:
    with pytest.raises(GpuwardenError, match=r"worker name .* is invalid"):
        host.actuator.look(name)


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ActuatorError, match=r"cannot read .*missing"):
        ProcessActuator(tmp_path / "missing").look(NAME)


def test_worker_that_holds_its_lock_is_found(host: Host) -> None:
    pid = host.plain()

    assert host.look() == ContainerState(
        kind="process",
        handle=NAME,
        name=NAME,
        incarnation=f"process:{pid}:{procfs.start_ticks(pid)}@{clock.boot_id()}",
        running=True,
        managed=True,
        pids=frozenset({pid}),
        cgroup=None,
        process_group=pid,
    )


def test_worker_in_another_folder_is_found_by_its_lock(host: Host) -> None:
    """A container's folder may have several workers."""
    pid = host.plain("shared")

    assert host.look().pids == {pid}


def test_worker_without_a_supervisor_that_ended_is_none(host: Host) -> None:
    host.plain()
    host.started[0].kill()
    host.started[0].wait()

    assert (host.folder / f"{NAME}.lock").exists()
    assert host.actuator.look(NAME) is None


def test_supervised_worker_is_found_by_its_process_file(host: Host) -> None:
    worker = host.supervised(PATIENT, log_file="/var/log/w1.log")

    assert host.look() == ContainerState(
        kind="process",
        handle=NAME,
        name=NAME,
        incarnation=f"process:{worker.pid}:{procfs.start_ticks(worker.pid)}@{clock.boot_id()}",
        running=True,
        managed=True,
        pids=frozenset({worker.pid}),
        cgroup=None,
        starting=True,
        log_file="/var/log/w1.log",
        process_group=worker.pid,
    )


def test_supervised_worker_starts_until_it_holds_its_lock(host: Host) -> None:
    worker = host.popen(python(PLAIN, str(host.directory), NAME))
    host.claim(ProcessId.of(worker.pid))

    assert (host.look().running, host.look().starting) == (True, False)


@pytest.mark.parametrize("restarts", [True, False])
def test_ended_worker_is_left_down_if_nothing_starts_it(host: Host, restarts: bool) -> None:
    worker = host.supervised(PATIENT, restarts=restarts)
    before = host.look()
    worker.kill()
    worker.wait()

    after = host.look()

    assert (after.running, after.starting, after.left_down) == (False, False, not restarts)
    assert after.incarnation == before.incarnation
    assert after.pids == frozenset()


def test_process_file_of_a_supervisor_that_ended_counts_no_more(host: Host) -> None:
    supervisor = host.popen(python(FAMILY, PATIENT, "session"))
    child = ProcessId.of(int(host.first_line))
    host.claim(child, supervisor=supervisor.pid)
    assert host.look().pids == {child.pid}
    supervisor.kill()
    supervisor.wait()

    assert host.actuator.look(NAME) is None
    with pytest.raises(ActuatorError, match="worker w1 has no process and no supervisor"):
        host.actuator.stop(NAME, grace_s=0.0)

    assert lives(child.pid)
    procfs.signal_process(child, signal.SIGKILL)


def test_worker_whose_supervisor_ended_is_found_by_its_lock(host: Host) -> None:
    pid = host.plain()
    host.claim(ProcessId.of(pid), supervisor=os.getpid())
    file = json.loads((host.folder / f"{NAME}.process.json").read_text())
    file["supervisor"] = [os.getpid(), 1]
    (host.folder / f"{NAME}.process.json").write_text(json.dumps(file))

    found = host.look()

    assert (found.running, found.pids, found.log_file) == (True, frozenset({pid}), None)


def test_folder_behind_a_link_is_not_read(host: Host, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = Host(tmp_path_factory.mktemp("elsewhere"))
    elsewhere.plain()
    host.folder.symlink_to(elsewhere.folder)

    assert host.actuator.look(NAME) is None
    elsewhere.close()


def test_held_lock_counts_before_a_process_file_elsewhere(host: Host) -> None:
    host.supervised(PATIENT)
    pid = host.plain("other")

    assert host.look().pids == {pid}


def test_worker_in_two_folders_is_an_error(host: Host) -> None:
    pids = host.plain(), host.plain("other")

    with pytest.raises(ActuatorError, match="worker w1 runs in folders other and w1"):
        host.actuator.stop(NAME, grace_s=0.0)

    assert all(map(lives, pids))


# --- claims that the kernel does not confirm

INVALID: Final = {
    "empty": "",
    "no object": "[]",
    "no JSON": "{",
    "no process": "{}",
    "a negative pid": '{"process": [-1, 5], "supervisor": [1, 1]}',
    "pid 0": '{"process": [0, 5], "supervisor": [1, 1]}',
    "a pid as text": '{"process": ["12", 5], "supervisor": [1, 1]}',
    "no start time": '{"process": [12], "supervisor": [1, 1]}',
    "no supervisor": '{"process": [12, 5]}',
    "too deep": "[" * 60_000,
    "too large": '{"process": [12, 5], "supervisor": [1, 1], "more": "' + "x" * 70_000 + '"}',
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_invalid_process_file_is_an_error(host: Host, text: str) -> None:
    host.folder.mkdir()
    (host.folder / f"{NAME}.process.json").write_text(text)

    for act in actions(host.actuator):
        with pytest.raises(ActuatorError):
            act()


def actions(actuator: ProcessActuator) -> list[Callable[[], object]]:
    return [
        lambda: actuator.look(NAME),
        lambda: actuator.stop(NAME, grace_s=0.0),
        lambda: actuator.start(NAME),
        lambda: actuator.announce(NAME, condition=Condition.STALL, acts=True, message="no step"),
    ]


def refuses(host: Host, says: str) -> None:
    for act in actions(host.actuator):
        with pytest.raises(ActuatorError, match=says):
            act()


def test_link_as_a_process_file_is_an_error(host: Host) -> None:
    host.supervised(PATIENT)
    path = host.folder / f"{NAME}.process.json"
    (host.directory / "elsewhere.json").write_text(path.read_text())
    path.unlink()
    path.symlink_to(host.directory / "elsewhere.json")

    refuses(host, "cannot read .*Too many levels of symbolic links")


def test_process_that_is_no_child_of_the_supervisor_is_refused(host: Host, signalled: list[int]) -> None:
    stranger, supervisor = (host.popen(python(PATIENT)) for _ in range(2))
    host.claim(ProcessId.of(stranger.pid), supervisor=supervisor.pid)

    refuses(host, f"names process {stranger.pid}, whose parent is {os.getpid()} and not {supervisor.pid}")

    assert signalled == []


def test_init_is_refused(host: Host, signalled: list[int]) -> None:
    host.claim(ProcessId.of(1))

    refuses(host, "names process 1, whose parent is 0 and not")

    assert signalled == []


@root_only
@pytest.mark.parametrize(
    ("uid", "owner"),
    [(OTHER_UID, 0), (0, OTHER_UID)],
    ids=["a process of another user", "a folder of another user names a process of root"],
)
def test_process_of_another_user_than_its_folder_is_refused(
    host: Host, signalled: list[int], uid: int, owner: int
) -> None:
    worker = host.popen(["/bin/sh", "-c", "echo ready; exec sleep 600"], user=uid)
    host.claim(ProcessId.of(worker.pid))
    os.chown(host.folder, owner, owner)

    refuses(host, f"names process {worker.pid} of user .*, but the folder belongs to user {owner}")

    assert signalled == []


@root_only
def test_lock_holder_of_another_user_than_its_folder_is_refused(host: Host, signalled: list[int]) -> None:
    """Else a user who owns a folder could have a process of root ended that opened its lock."""
    pid = host.plain()
    os.chown(host.folder, OTHER_UID, OTHER_UID)

    refuses(host, f"its folder and process {pid} belong to different users")

    assert signalled == []


def test_process_file_beside_a_lock_of_another_process_is_refused(host: Host, signalled: list[int]) -> None:
    pid = host.plain()
    host.supervised(PATIENT)

    refuses(host, f"but process {pid} holds the worker's lock")

    assert signalled == []


def test_lock_that_is_held_in_an_unknown_place_is_an_error(host: Host) -> None:
    """The kernel names no pid of an open file description lock, and none outside of this pid namespace."""
    host.folder.mkdir()
    with (host.folder / f"{NAME}.lock").open("wb") as held:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))

        refuses(host, "the lock of worker w1 is held outside of this process namespace")


def test_lock_that_is_no_file_is_an_error(host: Host) -> None:
    host.folder.mkdir()
    os.mkfifo(host.folder / f"{NAME}.lock")

    refuses(host, "cannot read the lock of worker w1: .* is not a regular file")


def test_reused_pid_is_not_the_worker(host: Host, signalled: list[int]) -> None:
    stranger = host.popen(python(PATIENT))
    host.claim(ProcessId(stranger.pid, procfs.start_ticks(stranger.pid) - 1))

    found = host.look()
    host.actuator.stop(NAME, grace_s=0.0)

    assert (found.running, found.pids) == (False, frozenset())
    assert signalled == []
    assert lives(stranger.pid)


# --- stop


def test_sigterm_ends_a_worker(host: Host) -> None:
    worker = host.supervised(ORDERLY)

    host.actuator.stop(NAME, grace_s=20.0)

    assert not host.runs()
    assert worker.communicate()[0] == "orderly\n"


def test_plain_worker_ends_and_is_gone(host: Host) -> None:
    pid = host.plain()

    host.actuator.stop(NAME, grace_s=20.0)

    assert not lives(pid)
    assert host.actuator.look(NAME) is None


def test_worker_that_ignores_sigterm_is_killed_after_its_grace(host: Host) -> None:
    worker = host.supervised(DEAF)
    began_s = time.monotonic()

    host.actuator.stop(NAME, grace_s=0.3)

    assert time.monotonic() - began_s >= 0.3
    assert worker.wait() == -signal.SIGKILL


def test_stopped_process_handles_sigterm(host: Host) -> None:
    worker = host.supervised(ORDERLY)
    os.kill(worker.pid, signal.SIGSTOP)
    eventually(lambda: procfs.stat(worker.pid)[0] == "T", "it is stopped")

    host.actuator.stop(NAME, grace_s=20.0)

    assert worker.communicate()[0] == "orderly\n"


@pytest.mark.parametrize("place", ["group", "session"])
@pytest.mark.parametrize("child_program", [PATIENT, DEAF], ids=["ends at SIGTERM", "ignores SIGTERM"])
def test_children_end_with_the_worker(host: Host, place: str, child_program: str) -> None:
    """A child in another session counts too. Its parent may end first."""
    worker = host.supervised(FAMILY, child_program, place)
    child = int(host.first_line)
    assert host.look().pids == {worker.pid, child}

    host.actuator.stop(NAME, grace_s=1.0 if child_program == DEAF else 20.0)

    assert not lives(worker.pid)
    assert not lives(child)


def test_adopted_process_of_its_group_ends_with_the_worker(host: Host) -> None:
    worker = host.supervised(ORPHAN, DEAF)
    orphan = int(host.first_line)
    assert int(procfs.stat(orphan)[1]) != worker.pid
    assert host.look().pids == {worker.pid, orphan}

    host.actuator.stop(NAME, grace_s=0.2)

    assert not lives(orphan)


def test_children_that_outlive_the_worker_are_listed_and_stopped(host: Host) -> None:
    worker = host.supervised(FAMILY, PATIENT, "group")
    child = int(host.first_line)
    worker.kill()
    worker.wait()
    left = host.look()

    host.actuator.stop(NAME, grace_s=5.0)

    assert (left.running, left.pids) == (False, frozenset({child}))
    assert host.look().pids == frozenset()
    assert not lives(child)


def test_worker_whose_main_thread_ended_still_runs(host: Host) -> None:
    worker = host.supervised(LEADERLESS)
    eventually(lambda: procfs.stat(worker.pid)[0] == "Z", "its main thread has ended")
    before = host.runs()

    host.actuator.stop(NAME, grace_s=0.1)

    assert before, "a thread that hangs in a driver keeps its GPU"
    assert not host.runs()


def test_stop_signals_the_worker_and_its_children_only(host: Host, signalled: list[int]) -> None:
    neighbour = host.popen(python(PATIENT))
    worker = host.supervised(FAMILY, PATIENT, "session")
    child = int(host.first_line)

    host.actuator.stop(NAME, grace_s=20.0)

    assert set(signalled) == {worker.pid, child}
    assert lives(neighbour.pid)


def test_stop_of_an_ended_worker_does_nothing(host: Host, signalled: list[int]) -> None:
    worker = host.supervised(PATIENT)
    worker.kill()
    worker.wait()

    host.actuator.stop(NAME, grace_s=0.0)

    assert signalled == []


def test_worker_that_survives_sigkill_is_an_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in a driver survives SIGKILL. Here no signal is sent."""
    worker = host.supervised(PATIENT)
    monkeypatch.setattr(procfs, "signal_process", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    with pytest.raises(ActuatorError, match=rf"worker w1 \(pid {worker.pid}\) still runs after SIGKILL"):
        host.actuator.stop(NAME, grace_s=0.0)

    monkeypatch.undo()
    assert host.runs()


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSYS, "needs Linux 5.3 or later"), (errno.EMFILE, "Too many open files")],
    ids=["old kernel", "no free descriptor"],
)
def test_pid_without_a_pidfd_is_not_signalled(
    host: Host, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    worker = host.supervised(PATIENT)

    def refused(_: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refused)
        with pytest.raises(ActuatorError, match=f"process {worker.pid} was not signalled: .*{says}"):
            host.actuator.stop(NAME, grace_s=0.0)

    assert lives(worker.pid)


# --- start


def test_running_worker_needs_no_start(host: Host) -> None:
    pid = host.plain()

    host.actuator.start(NAME)

    assert host.look().pids == {pid}


@pytest.mark.parametrize("restarts", [True, False])
def test_ended_worker_starts_only_if_its_supervisor_starts_it(host: Host, restarts: bool) -> None:
    worker = host.supervised(PATIENT, restarts=restarts)
    worker.kill()
    worker.wait()

    if restarts:
        host.actuator.start(NAME)
    else:
        with pytest.raises(ActuatorError, match="nothing starts worker w1: start it by hand"):
            host.actuator.start(NAME)

    assert not host.runs()


def test_unknown_worker_cannot_be_started_or_stopped(host: Host) -> None:
    with pytest.raises(ActuatorError, match="nothing starts worker w1: start it by hand"):
        host.actuator.start(NAME)
    with pytest.raises(ActuatorError, match="worker w1 has no process and no supervisor"):
        host.actuator.stop(NAME, grace_s=0.0)


# --- announce


@pytest.mark.parametrize("acts", [True, False])
def test_supervisor_reads_why_its_process_is_ended(host: Host, acts: bool) -> None:
    worker = host.supervised(PATIENT)
    assert isinstance(host.actuator, Announces)

    host.actuator.announce(NAME, condition=Condition.STALL, acts=acts, message="no step for 120 s")

    assert files.read_notice(host.folder, NAME) == Notice(
        process=ProcessId.of(worker.pid), condition="stall", acts=acts, message="no step for 120 s"
    )


def test_worker_without_a_supervisor_gets_no_notice(host: Host) -> None:
    host.plain()

    host.actuator.announce(NAME, condition=Condition.STALL, acts=True, message="no step")
    host.actuator.announce("w2", condition=Condition.STALL, acts=True, message="no step")

    assert not list(host.directory.glob(f"*/*{files.NOTICE_SUFFIX}"))


def test_notice_that_cannot_be_written_is_an_error(host: Host) -> None:
    host.supervised(PATIENT)
    (host.folder / f"{NAME}{files.NOTICE_SUFFIX}").mkdir()

    with pytest.raises(ActuatorError, match="worker w1: its supervisor was not informed"):
        host.actuator.announce(NAME, condition=Condition.STALL, acts=True, message="no step")


# --- supervisors


def supervisor_of(kind: str, directory: Path) -> list[str]:
    """The command line of a supervisor."""
    given = [sys.executable, "-m", "gpuwarden"]
    if kind == "run":
        return [*given, "run", "--name", NAME, "--", *python(DEAF)]
    return [
        *given, "worker", "run", "testbed.demo.job_body:load", "--name", NAME, "--processes", "1",
        "--queue-db", f"sqlite:///{directory}/queue.db",
    ]  # fmt: skip


@pytest.mark.behaviour("A18")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "worker run --processes"])
def test_supervisor_starts_an_ended_worker_again(host: Host, kind: str) -> None:
    (host.directory / "host").write_text("host1\n")
    log = host.directory / "log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            supervisor_of(kind, host.directory),
            env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(host.directory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def up(but: str = "") -> ContainerState | None:
        found = host.actuator.look(NAME)
        if found is None or not found.running or found.starting or found.incarnation == but:
            return None
        return found if found.log_file else None  # `run` takes the lock before it writes the process file

    try:
        before = eventually(up, "it runs", log=log.read_text)
        assert before.log_file == str(log)

        host.actuator.announce(NAME, condition=Condition.STALL, acts=True, message="no step for 120 s")
        host.actuator.stop(NAME, grace_s=0.5)
        host.actuator.start(NAME)
        after = eventually(lambda: up(before.incarnation), "it runs again", log=log.read_text)

        assert after.pids.isdisjoint(before.pids)
        assert supervisor.poll() is None
        assert "by gpuwarden: stall" in log.read_text()
        assert "started again" in log.read_text()
    finally:
        supervisor.terminate()
        time.sleep(0.2)
        supervisor.terminate()  # the second one kills a worker that ignores the first
        supervisor.wait(30)
    assert host.actuator.look(NAME) is None
    assert not any(map(lives, after.pids))
