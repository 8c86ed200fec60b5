"""Ends real process groups of tasks, and refuses what is not certainly the task's."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gpuwarden import procfs
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from remediator.actuators import process, task_group
from remediator.actuators.task_group import TaskGroups
from tests.waiting import eventually

pytestmark = pytest.mark.behaviour("D7")

TASK: Final = 123
IGNORES: Final = "trap '' TERM; sleep 600 & echo $!; wait"
ENDS: Final = "sleep 600 & echo $!; wait"


def lives(pid: int) -> bool:
    return Path("/proc", str(pid)).exists() and not procfs.is_zombie(pid)


class Group:
    """A shell that leads a group, and its child."""

    def __init__(self, script: str = ENDS) -> None:
        self.shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0)
        assert self.shell.stdout
        with self.shell.stdout as output:
            self.child = int(output.readline())
        self.pid = self.shell.pid

    @property
    def living(self) -> list[bool]:
        return [lives(self.pid), lives(self.child)]

    def kill(self) -> None:
        if self.shell.returncode is None:
            self.shell.kill()
            self.shell.wait()
        if lives(self.child):
            os.kill(self.child, signal.SIGKILL)


@pytest.fixture
def start() -> Iterator[Callable[..., Group]]:
    """Start groups."""
    started: list[Group] = []

    def begin(script: str = ENDS) -> Group:
        started.append(Group(script))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "running_tasks"
    found.mkdir(0o755)
    return found


def write(folder: Path, pid: int, **fields: Any) -> Path:
    """The file of the task, as its shell writes it."""
    its = {"running_log_id": TASK, "remote_pid": str(pid), "remote_pgid": str(pid), "timestamp": f"{time.time():.0f}"}
    path = folder / f"{TASK}.json"
    path.write_text(json.dumps(its | fields))
    path.chmod(0o644)
    return path


def end(*folders: Path, grace_s: float = 5.0) -> TaskResult:
    return TaskGroups(folders, grace_s=grace_s).end(TASK)


# --- what is ended


def test_whole_group_is_ended_and_no_other(folder: Path, start: Callable[..., Group]) -> None:
    task, other = start(), start()
    write(folder, task.pid)

    found = end(folder)

    assert found == TaskResult(
        task_id=TASK, outcome=TaskOutcome.ENDED, message=f"group {task.pid}, processes: 2"
    )  # fmt: skip
    assert (task.living, other.living) == ([False, False], [True, True])


def test_group_that_ignores_sigterm_is_killed_after_the_grace(folder: Path, start: Callable[..., Group]) -> None:
    task = start(IGNORES)
    write(folder, task.pid)

    assert end(folder, grace_s=0.2).outcome is TaskOutcome.ENDED

    assert task.living == [False, False]


def test_process_that_does_not_lead_its_group_is_found_by_the_group(folder: Path, start: Callable[..., Group]) -> None:
    """A task whose runner is started by another shell."""
    task = start()
    write(folder, task.child, remote_pgid=task.pid)

    assert end(folder).outcome is TaskOutcome.ENDED
    assert task.living == [False, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_process_of_another_user_in_the_group_is_left(folder: Path, start: Callable[..., Group]) -> None:
    """Else a group with a program of root would end that."""
    task = start()
    theirs = subprocess.Popen(["sleep", "600"], user=65534, process_group=task.pid)
    write(folder, task.pid)
    try:
        found = end(folder)

        assert (found.outcome, found.message) == (
            TaskOutcome.ENDED, f"group {task.pid}, processes: 2; 1 of other users left in it"
        )  # fmt: skip
        assert task.living == [False, False]
        assert lives(theirs.pid)
    finally:
        theirs.kill()
        theirs.wait()


def test_group_that_survives_sigkill_is_a_failure(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = start()
    write(folder, task.pid)
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    found = end(folder, grace_s=0.0)

    assert (found.outcome, found.message) == (TaskOutcome.FAILED, f"group {task.pid} still runs after SIGKILL")


# --- what is gone


def test_task_whose_process_has_ended_is_gone(folder: Path, start: Callable[..., Group]) -> None:
    task = start()
    write(folder, task.pid)
    task.kill()

    eventually(lambda: end(folder).outcome is TaskOutcome.GONE, "its child has ended too")
    assert end(folder).message == f"process {task.pid} has ended"


def test_pid_that_is_not_visible_is_not_gone(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, the host's pids are unknown."""
    task = start()
    write(folder, task.pid)
    task.kill()
    monkeypatch.setattr(procfs, "sees_all_pids", lambda: False)

    assert (found := end(folder)).outcome is TaskOutcome.REFUSED
    assert "is not seen from the executor's pid namespace" in found.message


# --- what is refused


def refused(*folders: Path, says: str) -> None:
    found = end(*folders)
    assert (found.outcome, says in found.message) == (TaskOutcome.REFUSED, True), found.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"timestamp": "1734220000"}, "started after the task: its pid was used again"),
        ({"timestamp": time.time() + 3600}, "timestamp is in the future"),
        ({"timestamp": time.time() * 1000}, "field 'timestamp'"),
        ({"timestamp": "now"}, "field 'timestamp'"),
        ({"timestamp": None}, "field 'timestamp'"),
        ({"remote_pgid": 0}, "field 'remote_pgid'"),
        ({"remote_pgid": "-1"}, "field 'remote_pgid'"),
        ({"remote_pgid": "1"}, "group 1 and process"),
        ({"remote_pid": "1"}, "and process 1 are not of a task"),
        ({"remote_pgid": None}, "no remote_pgid"),
        ({"running_log_id": 124}, "is of task 124"),
    ],
)
def test_file_that_is_not_certain_ends_nothing(
    folder: Path, start: Callable[..., Group], fields: dict[str, Any], says: str
) -> None:
    task = start()
    write(folder, task.pid, **fields)

    refused(folder, says=says)

    assert task.living == [True, True]


@pytest.mark.parametrize("mine", ["getpgrp", "getsid"])
def test_group_of_the_executor_itself_is_not_ended(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    """The kernel reports 0 for the tests' own group if it began outside their pid namespace, so the task's is named."""
    task = start()
    write(folder, task.pid)
    monkeypatch.setattr(os, mine, lambda *_: task.pid)

    refused(folder, says="is that of the executor")

    assert task.living == [True, True]


def test_file_of_another_user_ends_nothing(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = start()
    write(folder, task.pid)
    monkeypatch.setattr(procfs, "real_uid", lambda _: os.getuid() + 1)

    refused(folder, says=f"is of user {os.getuid() + 1}, and the task's file of user {os.getuid()}")

    assert task.living == [True, True]


def test_pid_outside_of_the_group_ends_nothing(folder: Path, start: Callable[..., Group]) -> None:
    task, other = start(), start()
    write(folder, task.pid, remote_pgid=other.pid)

    refused(folder, says=f"process {task.pid} is in group {task.pid}, not {other.pid}")

    assert task.living + other.living == [True] * 4


def test_group_whose_leader_has_ended_is_left_to_a_person(folder: Path, start: Callable[..., Group]) -> None:
    task = start()
    write(folder, task.child, remote_pgid=task.pid)
    task.shell.kill()
    task.shell.wait()

    refused(folder, says=f"process {task.pid} has ended, and 1 of group {task.pid} run: end them by hand")

    assert lives(task.child)


def test_kernel_thread_is_not_a_task(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = start()
    write(folder, task.pid)
    fields = procfs.stat(task.pid)
    flags = str(int(fields[6]) | 0x00200000)
    monkeypatch.setattr(procfs, "stat", lambda *_, **__: [*fields[:6], flags, *fields[7:]])

    refused(folder, says=f"process {task.pid} is a kernel thread")


def test_process_that_ends_while_its_user_is_read_is_not_the_tasks(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user may be that of the next process with the pid."""
    task = start()
    write(folder, task.pid)
    uid, reads = procfs.real_uid(task.pid), list[int]()

    def ending(pid: int) -> int:
        reads.append(pid)
        if len(reads) == 2:
            task.kill()
        return uid

    monkeypatch.setattr(procfs, "real_uid", ending)

    refused(folder, says=f"process {task.pid} or {task.pid} ended during the checks")


def test_pid_that_was_used_again_after_the_checks_is_not_signalled(
    folder: Path, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = start()
    write(folder, task.pid)
    earlier = ProcessId(task.pid, ProcessId.of(task.pid).start_ticks - 1)
    monkeypatch.setattr(task_group, "_leader", lambda *_: earlier)

    end(folder, grace_s=0.0)

    assert task.living == [True, True]


def test_link_fifo_long_file_and_second_file_end_nothing(
    folder: Path, tmp_path: Path, start: Callable[..., Group]
) -> None:
    task = start()
    path = write(folder, task.pid)
    second = tmp_path / "second"
    second.mkdir(0o755)

    (second / path.name).symlink_to(path)
    refused(second, says="cannot be read")
    (second / path.name).unlink()
    os.mkfifo(second / path.name)
    refused(second, says="not a regular file")
    (second / path.name).unlink()
    (second / path.name).write_text(path.read_text() + " " * 10**6)
    refused(second, says="over ")
    write(second, task.pid)
    refused(folder, second, says="2 folders have a file 123.json")

    assert task.living == [True, True]


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_file_that_others_may_write_ends_nothing(folder: Path, start: Callable[..., Group], mode: int) -> None:
    """Another user could write another pid of the owner into it."""
    task = start()
    write(folder, task.pid).chmod(mode)

    refused(folder, says=f"others may write its file {folder}/123.json: start its runner with umask 022")

    assert task.living == [True, True]


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_file_that_others_may_replace_ends_nothing(folder: Path, start: Callable[..., Group], mode: int) -> None:
    task = start()
    write(folder, task.pid)
    folder.chmod(mode)

    refused(folder, says=f"others may write in the folder of its file, {folder}")

    assert task.living == [True, True]


def test_sticky_folder_of_several_users_is_used(folder: Path, start: Callable[..., Group]) -> None:
    """In it, only the owner replaces a file."""
    task = start()
    write(folder, task.pid)
    folder.chmod(0o1777)

    assert end(folder).outcome is TaskOutcome.ENDED


@pytest.mark.parametrize(("umask", "outcome"), [("022", TaskOutcome.ENDED), ("002", TaskOutcome.REFUSED)])
def test_umask_of_a_shell_decides_whether_its_task_can_be_ended(
    folder: Path, start: Callable[..., Group], umask: str, outcome: TaskOutcome
) -> None:
    fields = '{"running_log_id":123,"remote_pid":"%s","remote_pgid":"%s","timestamp":"%s"}'
    start(f"umask {umask}; printf '{fields}' $$ $$ $(date +%s) >{folder}/123.json; {ENDS}")

    assert end(folder).outcome is outcome


def test_id_without_a_file_is_refused(folder: Path) -> None:
    """A wrong id, host or folder is no success."""
    refused(folder, says=f"no file of this task here: no 123.json in {folder}")


def test_message_about_many_folders_fits_a_report(tmp_path: Path) -> None:
    """A gateway refuses a longer message, and JSON one that is not UTF-8."""
    folders = [tmp_path / f"{number}\udcff" for number in range(200)]
    for each in folders:
        each.mkdir()

    message = end(*folders).message

    assert message.startswith("no file of this task here")
    assert len(message.encode()) <= 500


def test_folder_that_cannot_be_read_is_not_an_empty_one(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "missing", folder, says="missing cannot be read: No such file or directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user")
def test_executor_of_another_user_says_that_it_may_not(start: Callable[..., Group]) -> None:
    task = start()
    code = (
        "import os, sys; from pathlib import Path; from remediator.actuators import process, task_group;"
        "os.setuid(65534); process.KILL_WAIT_S = 0.1;"
        "print(task_group.TaskGroups([Path(sys.argv[1])], grace_s=0.1).end(123))"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        write(Path(folder), task.pid)
        command = [sys.executable, "-c", code, folder]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert "still runs after SIGKILL: the executor is not root and not user 0" in ran.stdout, ran.stderr
    assert task.living == [True, True]
