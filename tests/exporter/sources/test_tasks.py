"""Tasks of other runners: a shell script with their files, real processes, and invalid files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import exporter.sources.tasks
from exporter.model.worker import TaskReadings
from exporter.sources.tasks import ENTRIES_MAX, TASKS_MAX, Tasks
from gpuwarden import clock, procfs
from tests.exporter.collectors.test_registry import values
from tests.exporter.http.test_server import Exporter, command, environment
from tests.served import get
from tests.waiting import eventually

RUNNER = """
set -eu
folder=$1 id=$2
trap 'rm -f "$folder/$id.json"' EXIT
printf '{"running_log_id":%s,"remote_pid":"%s","remote_pgid":"%s","timestamp":"%s"}' \\
  "$id" "$$" "$(cut -d ' ' -f 5 "/proc/$$/stat")" "$(date +%s)" >"$folder/$id.json"
read -r _
"""
"""A runner in its own process group: it writes the file, then ends after one line of input."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder. The pids of its tasks are always of this namespace."""
    monkeypatch.setattr(procfs, "sees_all_pids", lambda: True)
    found = tmp_path / "running_tasks"
    found.mkdir()
    return found


@pytest.fixture
def run_task(folder: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start a task like a runner, and wait for its file."""
    started: list[subprocess.Popen[str]] = []

    def run(task_id: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", RUNNER, "sh", str(folder), str(task_id)],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        path = folder / f"{task_id}.json"
        eventually(lambda: path.exists() and path.read_text().endswith("}"), "its file is complete")
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def write(folder: Path, task_id: int, *, pid: int | None = None, started_s: float | None = None) -> Path:
    """The file of a task; by default of this process, started now."""
    path = folder / f"{task_id}.json"
    fields = {
        "running_log_id": task_id,
        "remote_pid": str(pid or os.getpid()),
        "remote_pgid": str(os.getpgrp()),
        "timestamp": str(time.time() if started_s is None else started_s),
    }
    path.write_text(json.dumps(fields))
    return path


def alive(found: TaskReadings) -> dict[int, bool | None]:
    return {each.task.task_id: each.alive for each in found.tasks}


@contextmanager
def an_exporter(house: Path, *folders: Path) -> Iterator[Exporter]:
    """The program with these folders of tasks."""
    options = ["--sample-interval-s", 0.05, *(option for each in folders for option in ("--task-dir", each))]
    process = subprocess.Popen(
        command("--runtime-dir", house, "--docker", "none", "--nvml", "off", "--port", 0, *options),
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr
    try:
        entry = {"event": ""}
        while entry["event"] != "exporter ready":
            entry = json.loads(process.stderr.readline())
        yield Exporter(process=process, port=int(entry["port"]))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.behaviour("D1")
def test_task_lives_and_dies(house: Path, folder: Path, run_task: Callable[[int], subprocess.Popen[str]]) -> None:
    with an_exporter(house, folder) as program:

        def alive_series() -> dict[str, list[float]]:
            text = get(program.port, "/metrics")[1]
            return {task: values(text, "gpuwarden_task_alive", task=task) for task in ("7", "8")}

        before_s = time.time()
        ends, killed = run_task(7), run_task(8)
        eventually(lambda: alive_series() == {"7": [1.0], "8": [1.0]}, "both are alive")
        text = get(program.port, "/metrics")[1]

        ends.communicate("go\n")
        killed.send_signal(signal.SIGKILL)
        killed.wait()

        eventually(lambda: alive_series() == {"7": [], "8": [0.0]}, "one ended, the other is dead")
        assert (folder / "8.json").exists()
        assert values(text, "gpuwarden_task_info", task="8", pid=str(killed.pid), pgid=str(killed.pid)) == [1.0]
        (started_s,) = values(text, "gpuwarden_task_start_timestamp_seconds", task="8")
        assert before_s - 1 <= started_s <= time.time()


def test_zombie_task_is_dead(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write(folder, 7, pid=process.pid)
        tasks = Tasks([folder])
        before = alive(tasks.read())
        process.kill()
        stat = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it is a zombie")

        assert (before, alive(tasks.read())) == ({7: True}, {7: False})


LEADERLESS: Final = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another thread runs."""


def test_task_with_a_running_thread_and_an_ended_main_thread_is_alive(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.DEVNULL) as process:
        try:
            write(folder, 7, pid=process.pid)
            tasks = Tasks([folder])
            eventually(lambda: procfs.stat(process.pid)[0] == "Z", "its main thread has ended")

            assert alive(tasks.read()) == {7: True}
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("ago_s", "expected"),
    [
        pytest.param(0.0, True, id="started before its file"),
        pytest.param(3600.0, False, id="reused pid"),
    ],
)
def test_task_is_a_process_as_old_as_its_file(folder: Path, ago_s: float, expected: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        write(folder, 7, pid=process.pid, started_s=time.time() - ago_s)

        assert alive(Tasks([folder]).read()) == {7: expected}
        process.kill()


def test_clock_change_does_not_end_a_known_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 7)
    seen, unseen = Tasks([folder]), Tasks([folder])
    seen.read()

    started_unix_s = clock.started_unix_s
    monkeypatch.setattr(clock, "started_unix_s", lambda ticks: started_unix_s(ticks) + 1e7)

    assert alive(seen.read()) == {7: True}
    assert alive(unseen.read()) == {7: False}  # by the clock the pid belongs to a later process
    os.utime(folder / "7.json")
    assert alive(seen.read()) == {7: True}, "a rewritten file with the same process is the same task"


def test_another_process_with_the_same_id_is_another_task(folder: Path) -> None:
    tasks = Tasks([folder])
    write(folder, 7)
    assert alive(tasks.read()) == {7: True}
    write(folder, 7, pid=dead_pid())

    assert alive(tasks.read()) == {7: False}


def dead_pid() -> int:
    """The pid of a process that has just ended."""
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    return process.pid


def test_hidden_process_is_unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like /proc with hidepid, which hides processes of other users from a process that is not root."""
    write(folder, 7)

    def hidden(*_: object, **__: object) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(procfs, "stat", hidden)

    assert alive(Tasks([folder]).read()) == {7: None}


def test_unchanged_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 7)
    tasks = Tasks([folder])
    first = tasks.read()
    monkeypatch.setattr(exporter.sources.tasks, "files", None)

    assert tasks.read() == first


def test_invalid_file_affects_only_its_task_and_is_counted(folder: Path) -> None:
    write(folder, 7)
    (folder / "8.json").write_text('{"running_log_id":8,"remote_p')
    write(folder, 9).rename(folder / "10.json")
    write(folder, 11).rename(folder / "011.json")
    (folder / "notes.json").write_text("{}")
    (folder / "12.json").symlink_to(write(folder, 13))
    os.mkfifo(folder / "14.json")
    (folder / "15.json").write_bytes(b"\xff")
    (folder / "16.json").write_text(" " * 70_000)
    (folder / "17.json").mkdir()
    (folder / ".18.json.new").write_text("incomplete")
    (folder / "19.txt").write_text("something else")

    found = Tasks([folder]).read()

    assert alive(found) == {7: True, 13: True}
    assert found.errors == {
        "not_json": 2, "name": 3, "unreadable": 1, "not_a_file": 2, "oversized": 1,
    }  # fmt: skip
    assert {reason: said for reason, said in found.first_errors.items() if reason in ("unreadable", "oversized")} == {
        "unreadable": f"{folder}/12.json: Too many levels of symbolic links",
        "oversized": f"{folder}/16.json: over 65536 bytes",
    }


def test_invalid_file_name_is_escaped(folder: Path) -> None:
    (folder / os.fsdecode(b"\xff.json")).touch()

    found = Tasks([folder]).read()

    assert found.first_errors["name"].encode().startswith(f"{folder}/\\xff.json: ".encode())


def test_task_that_ends_between_two_samples_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 7)
    write(folder, 8)
    listed = Tasks._entries

    def then_it_ends(*arguments: object) -> object:
        entries = list(listed(*arguments))  # type: ignore[arg-type]
        (folder / "7.json").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(Tasks, "_entries", then_it_ends)
    found = Tasks([folder]).read()

    assert (alive(found), found.errors) == ({8: True}, {})


def test_missing_folder_affects_only_its_tasks(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(folder, 7)
    write(other, 8)
    tasks = Tasks([folder, other])
    assert alive(tasks.read()) == {7: True, 8: True}

    other.rename(tmp_path / "away")
    gone = tasks.read()
    (tmp_path / "away").rename(other)
    back = tasks.read()

    assert (alive(gone), gone.errors) == ({7: True}, {"folder_missing": 1})
    assert (alive(back), back.errors) == ({7: True, 8: True}, {})


def test_tasks_are_unknown_if_no_folder_is_readable(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tasks([tmp_path / "nowhere"]).read()


def test_file_instead_of_a_folder_is_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write(folder, 7)

    assert Tasks([folder, tmp_path / "file"]).read().errors == {"folder_unreadable": 1}


def test_live_task_of_two_with_one_id_is_kept(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(folder, 7, pid=dead_pid())
    write(other, 7)

    for folders in ([folder, other], [other, folder]):
        found = Tasks(folders).read()
        assert (alive(found), found.errors) == ({7: True}, {"duplicate": 1})


def test_newest_and_live_tasks_are_read_if_there_are_too_many(folder: Path) -> None:
    tasks, dead = Tasks([folder]), dead_pid()
    write(folder, 7)
    assert alive(tasks.read()) == {7: True}
    for task_id in range(100, 100 + TASKS_MAX + 3):
        path, written_s = write(folder, task_id, pid=dead), time.time() + task_id
        os.utime(path, (written_s, written_s))

    found = tasks.read()

    newest = range(100 + 4, 100 + TASKS_MAX + 3)
    assert alive(found) == {7: True} | dict.fromkeys(newest, False)
    assert found.errors == {"too_many": 1}


@pytest.mark.parametrize("hosts", [True, False], ids=["host pid namespace", "other pid namespace"])
def test_unseen_process_is_dead_only_in_the_host_pid_namespace(
    folder: Path, run_task: Callable[[int], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, hosts: bool
) -> None:
    """In another namespace the host's pids are unknown."""
    monkeypatch.setattr(procfs, "sees_all_pids", lambda: hosts)
    tasks = Tasks([folder])
    seen = run_task(7)
    write(folder, 8, pid=dead_pid())
    write(folder, 9, started_s=time.time() - 1e6)
    never = False if hosts else None

    assert alive(tasks.read()) == {7: True, 8: never, 9: never}
    seen.kill()
    seen.wait()
    assert alive(tasks.read()) == {7: False, 8: never, 9: never}


def test_number_of_directory_entries_is_bounded(folder: Path) -> None:
    for number in range(ENTRIES_MAX + 1):
        (folder / f"{number}.txt").touch()

    assert Tasks([folder]).read().errors == {"too_many": 1}
