"""Captures of real hung processes with the real py-spy, and their limits."""

import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remediator.capture import probe
from remediator.capture.capture import CaptureRunner, find_py_spy
from remediator.ledger.captures import Capture
from tests.remediator import builders as build
from tests.waiting import eventually

MAX_BYTES = 256 * 2**10
LOOK = (sys.executable, "-IS", probe.__file__)
WITH_THE_LOCK = "ctypes.PyDLL(None).pause()"
WITHOUT_IT = "ctypes.CDLL(None).pause()"
HANG = """
import ctypes, sys, threading, time
sys.setswitchinterval(1e-4)

def beat():
    while True:
        time.sleep(0.05)

def forward():
    print("ready", flush=True)
    {call}

def train():
    forward()

threading.Thread(target=beat, name="heartbeat", daemon=True).start()
train()
"""


@contextmanager
def python(code: str) -> Iterator[int]:
    """A process that runs this code. Yields its pid after it printed `ready`."""
    target = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert target.stdout is not None
        assert target.stdout.readline() == b"ready\n"
        yield target.pid
    finally:
        target.kill()
        target.communicate()


@contextmanager
def hung(call: str = WITHOUT_IT) -> Iterator[int]:
    with python(HANG.format(call=call)) as pid:
        eventually(lambda: "pause" in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii"), "it has hung")
        yield pid


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def capture_runner(**changed: Any) -> CaptureRunner:
    return CaptureRunner(**{"for_s": 30.0, "max_bytes": MAX_BYTES, "py_spy": find_py_spy(), **changed})


def capture(
    *pids: int, by: CaptureRunner | None = None, armed: bool = True, worker_pid: int | None = None, **container: Any
) -> Capture:
    target = build.container(**{"kind": "process", "pids": frozenset(pids), "cgroup": None, **container})
    facts = build.evidence(worker_pid=worker_pid)
    return (by or capture_runner()).capture(build.episode(), target, facts, armed=armed, now=build.NOW)


def process(captured: Capture, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in captured.document["processes"] if each["pid"] == pid)
    return found


def main_thread(captured: Capture, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in process(captured, pid)["seen"] if each["tid"] == pid)
    return found


def functions(stack: dict[str, Any]) -> list[str]:
    return [frame["function"] for frame in stack["frames"]]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def test_thread_that_holds_the_gil_in_native_code_is_named_with_its_frames() -> None:
    with hung(WITH_THE_LOCK) as pid:
        captured = capture(pid)

        thread = main_thread(captured, pid)
        assert captured.document["cut_short"] is None
        assert (thread["state"], thread["python"]["name"], thread["python"]["owns_gil"]) == ("S", "MainThread", True)
        assert functions(thread["python"]) == ["forward", "train", "<module>"]


def test_thread_without_the_gil_is_not_marked_and_all_threads_are_listed() -> None:
    with hung() as pid:
        captured = capture(pid)

        thread = main_thread(captured, pid)
        assert functions(thread["python"]) == ["forward", "train", "<module>"]
        assert thread["python"]["owns_gil"] is False
        names = {each["python"]["name"] for each in process(captured, pid)["seen"]}
        assert names == {"MainThread", "heartbeat"}


def test_wait_channel_and_cpu_time_of_a_thread_are_captured() -> None:
    with python("print('ready', flush=True)\nsum(range(10**8))\nimport time; time.sleep(600)") as pid:
        eventually(lambda: state(pid) == "S", "it has computed, and sleeps", within_s=60)

        thread = main_thread(capture(pid), pid)

        assert "nanosleep" in thread["wchan"]
        assert thread["cpu_ticks"] > 10
        if os.geteuid() == 0:
            assert "nanosleep" in thread["stack"][0]


def test_running_thread_has_no_wait_channel() -> None:
    with python("print('ready', flush=True)\nwhile True: pass") as pid:
        thread = main_thread(capture(pid), pid)

        assert (thread["state"], thread["wchan"]) == ("R", None)


def test_without_py_spy_only_the_stacks_are_missing() -> None:
    with hung() as pid:
        captured = capture(pid, by=capture_runner(py_spy=None))

        assert captured.document["notes"] == ["no Python stacks: py-spy is not installed (pip install py-spy)"]
        assert "python" not in main_thread(captured, pid)
        assert main_thread(captured, pid)["wchan"]


def test_missing_right_to_trace_is_noted() -> None:
    undumpable = HANG.replace("train()\n", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\ntrain()\n")
    drop = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace") if os.geteuid() == 0 else ()
    with python(undumpable.format(call=WITHOUT_IT)) as pid:
        captured = capture(pid, by=capture_runner(look=(*drop, *LOOK)))

        (note,) = captured.document["notes"]
        assert note.startswith(f"no Python stacks of process {pid}: ")
        assert "Permission" in note
        assert main_thread(captured, pid)["state"] == "S"


def test_process_other_than_python_has_no_stacks() -> None:
    with subprocess.Popen(["sleep", "600"]) as target:
        captured = capture(target.pid, armed=False)
        target.kill()

    assert process(captured, target.pid)["name"] == "sleep"
    (note,) = captured.document["notes"]
    assert note.startswith(
        f"no Python stacks of process {target.pid}: py-spy failed: Error: Failed to find python version"
    )


def test_ended_process_is_noted() -> None:
    with subprocess.Popen(["true"]) as target:
        pass

    captured = capture(target.pid)

    assert captured.document["processes"] == []
    assert captured.document["notes"] == [f"process {target.pid} was not read: No such file or directory"]


def test_hung_py_spy_costs_only_its_own_time(tmp_path: Path) -> None:
    hangs = script(tmp_path / "py-spy", "exec sleep 600")
    with hung() as pid:
        captured = capture(pid, by=capture_runner(for_s=4.0, py_spy=hangs), armed=False)

    assert 3.0 < captured.took_s < 5.0
    assert captured.document["cut_short"] is None
    (note,) = captured.document["notes"]
    assert note.startswith(f"no Python stacks of process {pid}: py-spy timed out after ")
    assert main_thread(captured, pid)["wchan"]


def test_hung_capture_is_killed_at_its_deadline_and_partly_saved(tmp_path: Path) -> None:
    hangs = script(tmp_path / "py-spy", f"kill -STOP $PPID; echo $$ >{tmp_path}/pid; exec sleep 600")
    with hung() as pid:
        captured = capture(pid, by=capture_runner(for_s=3.0, py_spy=hangs))

        assert 3.0 <= captured.took_s < 4.0
        assert captured.document["cut_short"] == "cut short after 3 s"
        assert captured.message.endswith("; cut short after 3 s")
        assert main_thread(captured, pid)["wchan"]
        left = int((tmp_path / "pid").read_text(encoding="ascii"))
        eventually(lambda: not Path(f"/proc/{left}").exists() or state(left) == "Z", "its child ended")


def test_failed_probe_gives_the_reason() -> None:
    captured = capture(1, by=capture_runner(look=(sys.executable, "-c", "raise SystemExit('no luck')")))

    assert captured.document["cut_short"] == "the probe failed (1): no luck"


def test_probe_that_cannot_start_gives_the_reason() -> None:
    captured = capture(1, by=capture_runner(look=("/nowhere/python",)))

    assert captured.document["cut_short"].startswith("the probe did not start: ")
    assert "No such file" in captured.document["cut_short"]


def test_probe_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
        from remediator.capture.capture import CaptureRunner
        from tests.remediator import builders as build
        capture_runner = CaptureRunner(for_s=5.0, max_bytes=2**18, engines={{"docker": "unix://{tmp_path}/engine"}})
        capture_runner.capture(build.episode(), build.container(), None, armed=False, now=build.NOW)
    """
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "engine"))
        engine.listen()
        engine.settimeout(30)
        waits = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
        its, _ = engine.accept()
        look = struct.unpack("3i", its.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        waits.kill()
        waits.wait()
        its.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")

        with pytest.raises(OSError, match="Broken pipe"):  # the probe ended before the whole answer
            _send_slowly(its, 999)

        its.close()
        eventually(lambda: not Path(f"/proc/{look}").exists() or state(look) == "Z", "the probe has ended")


def _send_slowly(connection: socket.socket, size: int) -> None:
    for _ in range(size):
        connection.sendall(b".")
        time.sleep(0.1)


def test_reused_pid_is_not_read(tmp_path: Path) -> None:
    listing = tmp_path / "inside" / "cgroup.procs"
    listing.parent.mkdir()
    (tmp_path / "cgroup.procs").touch()
    with hung() as one, hung() as other:
        listing.write_text(f"{other}\n", encoding="ascii")
        captured = [
            capture(one, other, cgroup=str(tmp_path)),
            capture(one, cgroup=str(tmp_path / "gone")),
            capture(one, process_group=one),
            capture(one, process_group=os.getpgid(one)),
        ]

    looked_at = [[process["pid"] for process in each.document["processes"]] for each in captured]
    assert looked_at == [[other], [], [], [one]]
    stranger = f"process {one} was not read: it does not belong to the target now"
    assert [stranger in each.document["notes"] for each in captured] == [True, True, True, False]


def test_capture_over_its_limit_loses_stacks_first_and_counts_them() -> None:
    deep = HANG.replace("def train():\n    forward()", "def train(n=50):\n    return train(n - 1) if n else forward()")
    many = deep.replace("train()\n", "for n in range(40):\n    threading.Thread(target=beat).start()\ntrain()\n")
    with python(many.format(call=WITHOUT_IT)) as pid:
        whole, cut = capture(pid), capture(pid, by=capture_runner(max_bytes=16 * 2**10))

    assert (whole.document["left_out_bytes"], len(process(whole, pid)["seen"])) == (0, 42)
    assert len(json.dumps(cut.document)) <= 17 * 2**10
    assert cut.document["left_out_bytes"] > 16 * 2**10
    assert len(process(cut, pid)["seen"]) > 10
    assert not all("python" in thread for thread in process(cut, pid)["seen"])


def test_innermost_frames_of_a_deep_stack_are_kept() -> None:
    deep = HANG.replace("def train():\n    forward()", "def train(n=200):\n    return train(n - 1) if n else forward()")
    with python(deep.format(call=WITHOUT_IT)) as pid:
        stack = main_thread(capture(pid), pid)["python"]

    assert (len(stack["frames"]), stack["frames"][0]["function"]) == (probe.FRAMES_MAX, "forward")
    assert stack["frames_cut"] == 203 - probe.FRAMES_MAX


def test_threads_and_processes_over_the_limit_are_counted() -> None:
    many = HANG.replace("train()\n", "for n in range(300):\n    threading.Thread(target=beat).start()\ntrain()\n")
    with python(many.format(call=WITHOUT_IT)) as pid:
        idle = [subprocess.Popen(["sleep", "600"]) for _ in range(probe.PROCESSES_MAX)]
        captured = capture(pid, *(each.pid for each in idle), by=capture_runner(py_spy=None))
    for each in idle:
        each.kill()
        each.wait()

    seen = [thread for each in captured.document["processes"] for thread in each["seen"]]
    assert (len(captured.document["processes"]), len(seen)) == (probe.PROCESSES_MAX, probe.THREADS_MAX)
    assert "1 of 33 processes were not read" in captured.document["notes"]
    assert any(note.endswith(f"threads of process {pid} were not read") for note in captured.document["notes"])


def test_process_of_the_worker_is_kept_among_many_older_ones() -> None:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2 * probe.PROCESSES_MAX)]
    worker = max(each.pid for each in started)
    captured = capture(*(each.pid for each in started), by=capture_runner(py_spy=None), worker_pid=worker)
    for each in started:
        each.kill()
        each.wait()

    kept = [each["pid"] for each in captured.document["processes"]]
    assert (kept[0], len(kept)) == (worker, probe.PROCESSES_MAX)


def test_oldest_processes_are_kept_after_the_pids_wrapped(tmp_path: Path) -> None:
    pids = range(1, probe.PROCESSES_MAX + 3)
    for pid in pids:
        (tmp_path / f"{pid}" / "task").mkdir(parents=True)
        (tmp_path / f"{pid}" / "cmdline").touch()
        (tmp_path / f"{pid}" / "stat").write_text(f"{pid} (p) S{' 0' * 18} {1000 - pid}", encoding="ascii")
    code = "import probe, pathlib, sys; probe._PROC = pathlib.Path(sys.argv.pop(1)); sys.exit(probe.main(sys.argv))"
    look = ("env", f"PYTHONPATH={Path(probe.__file__).parent}", sys.executable, "-c", code, str(tmp_path))

    captured = capture(*pids, by=capture_runner(py_spy=None, look=look))

    assert [each["pid"] for each in captured.document["processes"]] == [*reversed(pids)][: probe.PROCESSES_MAX]


# --- the last lines


def logs(**container: Any) -> Capture:
    return capture(os.getpid(), by=capture_runner(py_spy=None), **container)


def test_last_lines_of_the_log_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {number}\n" for number in range(250)), encoding="ascii")

    (kept,) = logs(log_file=str(log)).document["logs"]

    assert kept["source"] == str(log)
    assert kept["lines"] == [f"line {number}" for number in range(150, 250)]


def test_log_is_kept_up_to_its_byte_limit_with_any_bytes(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"x" * 100_000 + b"\n\0\xff\x1b[2J\nlast\n")

    (kept,) = logs(log_file=str(log)).document["logs"]

    assert kept["lines"] == ["\\x00\\xff\x1b[2J", "last"]


@pytest.mark.parametrize("end", ["", "\n"])
def test_end_of_a_last_line_over_the_limit_is_kept(tmp_path: Path, end: str) -> None:
    log = tmp_path / "worker.log"
    log.write_text(f"before\n{'x' * 5 * 2**20}last{end}", encoding="ascii")

    document = logs(log_file=str(log)).document

    ((line,),) = [each["lines"] for each in document["logs"]]
    assert (len(line + end), line[-6:]) == (probe.LOG_MAX_BYTES, "xxlast")


@pytest.mark.parametrize(("length", "lines"), [(16378, ["x" * 16378, "last"]), (16379, ["last"])])
def test_line_is_kept_whole_or_dropped(tmp_path: Path, length: int, lines: list[str]) -> None:
    log = tmp_path / "worker.log"
    log.write_text(f"before\n{'x' * length}\nlast\n", encoding="ascii")

    document = logs(log_file=str(log)).document

    assert [each["lines"] for each in document["logs"]] == [lines]
    assert not any("last" in note for note in document["notes"])


def test_log_of_the_job_is_preferred_to_that_of_the_worker(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("the worker's\n", encoding="ascii")
    by = capture_runner(py_spy=None, job_logs=tmp_path)
    before = capture(os.getpid(), by=by, log_file=str(tmp_path / "worker.log"))
    (tmp_path / "job-7-attempt-1.log").write_text("the job's\n", encoding="ascii")

    after = capture(os.getpid(), by=by, log_file=str(tmp_path / "worker.log"))

    assert [each["lines"] for each in before.document["logs"]] == [["the worker's"]]
    assert [each["lines"] for each in after.document["logs"]] == [["the job's"]]


def test_log_that_is_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n", encoding="ascii")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")

    link, pipe = logs(log_file=str(tmp_path / "link")), logs(log_file=str(tmp_path / "pipe"))

    assert (link.document["logs"], pipe.document["logs"]) == ([], [])
    assert link.document["notes"][0] == f"no last lines of {tmp_path}/link: Too many levels of symbolic links"
    assert pipe.document["notes"][0] == f"no last lines of {tmp_path}/pipe: not a regular file"


def test_missing_engine_or_socket_is_noted(tmp_path: Path) -> None:
    log_notes = []
    for url in (f"unix://{tmp_path}/docker.sock", "tcp://127.0.0.1:2375"):
        target = build.container(pids=frozenset({os.getpid()}))
        by = capture_runner(py_spy=None, engines={"docker": url})
        captured = by.capture(build.episode(), target, None, armed=True, now=build.NOW)
        log_notes += [note for note in captured.document["notes"] if "last lines" in note]

    assert log_notes == [
        "no last lines of the container's log: No such file or directory",
        "no last lines of the container's log: the engine at tcp://127.0.0.1:2375 has no local socket",
    ]


def test_evidence_is_kept_without_the_pids_of_other_processes() -> None:
    captured = capture(os.getpid(), by=capture_runner(py_spy=None))

    facts = captured.document["facts"]
    assert (facts["step_beat_age_s"], facts["gpu_idle_s"], facts["ram_idle_s"], facts["phase"], facts["step"]) == (
        130.0, 130.0, 130.0, "step", 5,
    )  # fmt: skip
    assert "gpu_pids" not in facts


def test_duration_of_a_slow_capture_is_recorded(tmp_path: Path) -> None:
    slow = script(tmp_path / "py-spy", "sleep 0.5; exit 1")
    started_s = time.monotonic()

    captured = capture(os.getpid(), by=capture_runner(py_spy=slow), armed=False)

    assert 0.5 < captured.took_s <= time.monotonic() - started_s
    assert captured.document["took_s"] == pytest.approx(captured.took_s, abs=0.001)
