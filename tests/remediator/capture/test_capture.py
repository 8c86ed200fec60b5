"""What is captured of real processes, wedged in the ways that workers wedge, by the real py-spy; and its bounds."""

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
WEDGE = """
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
    """A process that runs it, from when it says that it is ready; its pid."""
    target = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert target.stdout is not None
        assert target.stdout.readline() == b"ready\n"
        yield target.pid
    finally:
        target.kill()
        target.communicate()


@contextmanager
def wedged(call: str = WITHOUT_IT) -> Iterator[int]:
    with python(WEDGE.format(call=call)) as pid:
        eventually(lambda: "pause" in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii"), "it has wedged")
        yield pid


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def captor(**changed: Any) -> CaptureRunner:
    return CaptureRunner(**{"for_s": 30.0, "max_bytes": MAX_BYTES, "py_spy": find_py_spy(), **changed})


def capture(*pids: int, by: CaptureRunner | None = None, armed: bool = True, **container: Any) -> Capture:
    target = build.container(**{"kind": "process", "pids": frozenset(pids), "cgroup": None, **container})
    return (by or captor()).capture(build.episode(), target, build.evidence(), armed=armed, now=build.NOW)


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


def test_a_thread_that_holds_pythons_lock_in_native_code_is_named_with_its_frames() -> None:
    with wedged(WITH_THE_LOCK) as pid:
        captured = capture(pid)

        thread = main_thread(captured, pid)
        assert captured.document["cut_short"] is None
        assert (thread["state"], thread["python"]["name"], thread["python"]["owns_gil"]) == ("S", "MainThread", True)
        assert functions(thread["python"]) == ["forward", "train", "<module>"]


def test_a_thread_that_sleeps_without_the_lock_is_not_said_to_hold_it_and_each_thread_is_told_of() -> None:
    with wedged() as pid:
        captured = capture(pid)

        thread = main_thread(captured, pid)
        assert functions(thread["python"]) == ["forward", "train", "<module>"]
        assert thread["python"]["owns_gil"] is False
        names = {each["python"]["name"] for each in process(captured, pid)["seen"]}
        assert names == {"MainThread", "heartbeat"}


def test_the_kernel_tells_where_a_thread_waits_and_how_much_cpu_it_has_used() -> None:
    with python("print('ready', flush=True)\nsum(range(10**8))\nimport time; time.sleep(600)") as pid:
        eventually(lambda: state(pid) == "S", "it has computed, and sleeps", within_s=60)

        thread = main_thread(capture(pid), pid)

        assert "nanosleep" in thread["wchan"]
        assert thread["cpu_ticks"] > 10
        if os.geteuid() == 0:
            assert "nanosleep" in thread["stack"][0]


def test_a_thread_that_runs_has_no_wait() -> None:
    with python("print('ready', flush=True)\nwhile True: pass") as pid:
        thread = main_thread(capture(pid), pid)

        assert (thread["state"], thread["wchan"]) == ("R", None)


def test_without_py_spy_there_is_all_the_rest_and_one_sentence() -> None:
    with wedged() as pid:
        captured = capture(pid, by=captor(py_spy=None))

        assert captured.document["notes"] == [
            "no Python stacks: py-spy is not installed (pip install 'gpuwarden[evidence]')"
        ]
        assert "python" not in main_thread(captured, pid)
        assert main_thread(captured, pid)["wchan"]


def test_where_it_may_not_trace_a_sentence_says_so() -> None:
    undumpable = WEDGE.replace("train()\n", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\ntrain()\n")
    drop = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace") if os.geteuid() == 0 else ()
    with python(undumpable.format(call=WITHOUT_IT)) as pid:
        captured = capture(pid, by=captor(look=(*drop, *LOOK)))

        (note,) = captured.document["notes"]
        assert note.startswith(f"no Python stacks of process {pid}: ")
        assert "Permission" in note
        assert main_thread(captured, pid)["state"] == "S"


def test_what_is_no_python_is_told_of_without_stacks() -> None:
    with subprocess.Popen(["sleep", "600"]) as target:
        captured = capture(target.pid, armed=False)
        target.kill()

    assert process(captured, target.pid)["name"] == "sleep"
    (note,) = captured.document["notes"]
    assert note.startswith(
        f"no Python stacks of process {target.pid}: py-spy failed: Error: Failed to find python version"
    )


def test_a_process_that_has_ended_meanwhile_is_said_to_be_gone() -> None:
    with subprocess.Popen(["true"]) as target:
        pass

    captured = capture(target.pid)

    assert captured.document["processes"] == []
    assert captured.document["notes"] == [f"process {target.pid} was not read: No such file or directory"]


def test_a_py_spy_that_hangs_costs_its_own_time_and_is_told(tmp_path: Path) -> None:
    hangs = script(tmp_path / "py-spy", "exec sleep 600")
    with wedged() as pid:
        captured = capture(pid, by=captor(for_s=4.0, py_spy=hangs), armed=False)

    assert 3.0 < captured.took_s < 5.0
    assert captured.document["cut_short"] is None
    (note,) = captured.document["notes"]
    assert note.startswith(f"no Python stacks of process {pid}: py-spy timed out after ")
    assert main_thread(captured, pid)["wchan"]


def test_a_hanging_capture_is_killed_at_its_deadline_and_what_it_has_is_kept(tmp_path: Path) -> None:
    hangs = script(tmp_path / "py-spy", f"kill -STOP $PPID; echo $$ >{tmp_path}/pid; exec sleep 600")
    with wedged() as pid:
        captured = capture(pid, by=captor(for_s=3.0, py_spy=hangs))

        assert 3.0 <= captured.took_s < 4.0
        assert captured.document["cut_short"] == "cut short after 3 s"
        assert captured.message.endswith("; cut short after 3 s")
        assert main_thread(captured, pid)["wchan"]
        left = int((tmp_path / "pid").read_text(encoding="ascii"))
        eventually(lambda: not Path(f"/proc/{left}").exists() or state(left) == "Z", "what it started is gone")


def test_a_look_that_fails_says_why() -> None:
    captured = capture(1, by=captor(look=(sys.executable, "-c", "raise SystemExit('no luck')")))

    assert captured.document["cut_short"] == "the probe failed (1): no luck"


def test_a_look_that_cannot_be_started_says_why() -> None:
    captured = capture(1, by=captor(look=("/nowhere/python",)))

    assert captured.document["cut_short"].startswith("the probe did not start: ")
    assert "No such file" in captured.document["cut_short"]


def test_nobody_is_left_to_go_on_where_the_one_who_waits_is_killed(tmp_path: Path) -> None:
    code = f"""
        from remediator.capture.capture import CaptureRunner
        from tests.remediator import builders as build
        captor = CaptureRunner(for_s=5.0, max_bytes=2**18, engines={{"docker": "unix://{tmp_path}/engine"}})
        captor.capture(build.episode(), build.container(), None, armed=False, now=build.NOW)
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

        with pytest.raises(OSError, match="Broken pipe"):  # before all of it is told
            _tell_slowly(its, 999)

        its.close()
        eventually(lambda: not Path(f"/proc/{look}").exists() or state(look) == "Z", "it has ended by itself")


def _tell_slowly(whom: socket.socket, size: int) -> None:
    for _ in range(size):
        whom.sendall(b".")
        time.sleep(0.1)


def test_a_number_that_is_somebody_elses_by_now_is_not_looked_at(tmp_path: Path) -> None:
    listing = tmp_path / "inside" / "cgroup.procs"
    listing.parent.mkdir()
    (tmp_path / "cgroup.procs").touch()
    with wedged() as one, wedged() as other:
        listing.write_text(f"{other}\n", encoding="ascii")
        captured = [
            capture(one, other, cgroup=str(tmp_path)),
            capture(one, cgroup=str(tmp_path / "gone")),
            capture(one, session=one),
            capture(one, session=os.getsid(one)),
        ]

    looked_at = [[each["pid"] for each in told.document["processes"]] for told in captured]
    assert looked_at == [[other], [], [], [one]]
    stranger = f"process {one} was not read: it does not belong to the target now"
    assert [stranger in told.document["notes"] for told in captured] == [True, True, True, False]


def test_more_than_may_be_kept_is_cut_the_stacks_first_and_how_much_is_told() -> None:
    deep = WEDGE.replace("def train():\n    forward()", "def train(n=50):\n    return train(n - 1) if n else forward()")
    many = deep.replace("train()\n", "for n in range(40):\n    threading.Thread(target=beat).start()\ntrain()\n")
    with python(many.format(call=WITHOUT_IT)) as pid:
        whole, cut = capture(pid), capture(pid, by=captor(max_bytes=16 * 2**10))

    assert (whole.document["left_out_bytes"], len(process(whole, pid)["seen"])) == (0, 42)
    assert len(json.dumps(cut.document)) <= 17 * 2**10
    assert cut.document["left_out_bytes"] > 16 * 2**10
    assert len(process(cut, pid)["seen"]) > 10
    assert not all("python" in thread for thread in process(cut, pid)["seen"])


def test_the_innermost_frames_of_a_deep_stack_are_kept() -> None:
    deep = WEDGE.replace(
        "def train():\n    forward()", "def train(n=200):\n    return train(n - 1) if n else forward()"
    )
    with python(deep.format(call=WITHOUT_IT)) as pid:
        stack = main_thread(capture(pid), pid)["python"]

    assert (len(stack["frames"]), stack["frames"][0]["function"]) == (probe.FRAMES_MAX, "forward")
    assert stack["frames_cut"] == 203 - probe.FRAMES_MAX


def test_of_many_threads_and_many_processes_the_first_are_looked_at_and_the_rest_counted() -> None:
    many = WEDGE.replace("train()\n", "for n in range(300):\n    threading.Thread(target=beat).start()\ntrain()\n")
    with python(many.format(call=WITHOUT_IT)) as pid:
        idle = [subprocess.Popen(["sleep", "600"]) for _ in range(probe.PROCESSES_MAX)]
        captured = capture(pid, *(each.pid for each in idle), by=captor(py_spy=None))
    for each in idle:
        each.kill()
        each.wait()

    seen = [thread for each in captured.document["processes"] for thread in each["seen"]]
    assert (len(captured.document["processes"]), len(seen)) == (probe.PROCESSES_MAX, probe.THREADS_MAX)
    assert "1 of 33 processes were not read" in captured.document["notes"]
    assert any(note.endswith(f"threads of process {pid} were not read") for note in captured.document["notes"])


# --- the last lines


def logs(**container: Any) -> Capture:
    return capture(os.getpid(), by=captor(py_spy=None), **container)


def test_the_last_lines_of_its_output_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {number}\n" for number in range(250)), encoding="ascii")

    (kept,) = logs(log_file=str(log)).document["logs"]

    assert kept["source"] == str(log)
    assert kept["lines"] == [f"line {number}" for number in range(150, 250)]


def test_of_long_lines_so_many_bytes_are_kept_as_may_be_and_no_byte_of_them_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"x" * 100_000 + b"\n\0\xff\x1b[2J\nlast\n")

    (kept,) = logs(log_file=str(log)).document["logs"]

    assert kept["lines"] == ["\\x00\\xff\x1b[2J", "last"]


@pytest.mark.parametrize("end", ["", "\n"])
def test_of_a_last_line_that_is_longer_than_that_the_end_is_kept(tmp_path: Path, end: str) -> None:
    log = tmp_path / "worker.log"
    log.write_text(f"before\n{'x' * 5 * 2**20}last{end}", encoding="ascii")

    document = logs(log_file=str(log)).document

    ((line,),) = [each["lines"] for each in document["logs"]]
    assert (len(line + end), line[-6:]) == (probe.LOG_MAX_BYTES, "xxlast")


@pytest.mark.parametrize(("length", "lines"), [(16378, ["x" * 16378, "last"]), (16379, ["last"])])
def test_a_line_is_kept_whole_or_not_at_all(tmp_path: Path, length: int, lines: list[str]) -> None:
    log = tmp_path / "worker.log"
    log.write_text(f"before\n{'x' * length}\nlast\n", encoding="ascii")

    document = logs(log_file=str(log)).document

    assert [each["lines"] for each in document["logs"]] == [lines]
    assert not any("last" in note for note in document["notes"])


def test_a_jobs_own_log_is_read_rather_than_its_workers(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("the worker's\n", encoding="ascii")
    by = captor(py_spy=None, job_logs=tmp_path)
    before = capture(os.getpid(), by=by, log_file=str(tmp_path / "worker.log"))
    (tmp_path / "job-7-attempt-1.log").write_text("the job's\n", encoding="ascii")

    after = capture(os.getpid(), by=by, log_file=str(tmp_path / "worker.log"))

    assert [each["lines"] for each in before.document["logs"]] == [["the worker's"]]
    assert [each["lines"] for each in after.document["logs"]] == [["the job's"]]


def test_a_log_that_is_a_link_or_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n", encoding="ascii")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")

    link, pipe = logs(log_file=str(tmp_path / "link")), logs(log_file=str(tmp_path / "pipe"))

    assert (link.document["logs"], pipe.document["logs"]) == ([], [])
    assert link.document["notes"][0] == f"no last lines of {tmp_path}/link: Too many levels of symbolic links"
    assert pipe.document["notes"][0] == f"no last lines of {tmp_path}/pipe: not a regular file"


def test_an_engine_that_is_not_there_or_has_no_socket_is_said_to_give_no_lines(tmp_path: Path) -> None:
    told = []
    for url in (f"unix://{tmp_path}/docker.sock", "tcp://127.0.0.1:2375"):
        target = build.container(pids=frozenset({os.getpid()}))
        by = captor(py_spy=None, engines={"docker": url})
        captured = by.capture(build.episode(), target, None, armed=True, now=build.NOW)
        told += [note for note in captured.document["notes"] if "last lines" in note]

    assert told == [
        "no last lines of the container's log: No such file or directory",
        "no last lines of the container's log: the engine at tcp://127.0.0.1:2375 has no local socket",
    ]


def test_the_exporters_facts_are_kept_but_for_other_peoples_processes() -> None:
    captured = capture(os.getpid(), by=captor(py_spy=None))

    facts = captured.document["facts"]
    assert (facts["step_beat_age_s"], facts["gpu_idle_s"], facts["ram_idle_s"], facts["phase"], facts["step"]) == (
        130.0, 130.0, 130.0, "step", 5,
    )  # fmt: skip
    assert "gpu_pids" not in facts


def test_a_captor_that_takes_long_is_told_how_long(tmp_path: Path) -> None:
    slow = script(tmp_path / "py-spy", "sleep 0.5; exit 1")
    started_s = time.monotonic()

    captured = capture(os.getpid(), by=captor(py_spy=slow), armed=False)

    assert 0.5 < captured.took_s <= time.monotonic() - started_s
    assert captured.document["took_s"] == pytest.approx(captured.took_s, abs=0.001)
