"""Commands that are hard to end, and supervisors that are killed, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from gpuwarden import procfs, state_file
from gpuwarden.job import Condition
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor import files
from gpuwarden.supervisor.child import Child, End
from gpuwarden.supervisor.files import ProcessFile
from tests.gpuwarden.supervisor.guarded import DEAF, NAME, WAITS, Guarded, python, when_ready
from tests.waiting import eventually

# A handler of SIGTERM in Python runs only when the call returns.
GIL: Final = (
    "import ctypes, signal; signal.signal(signal.SIGTERM, lambda *_: None); print('ready', flush=True); "
    "ctypes.PyDLL(None).sleep(1000)"
)
FORKS: Final = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.05)
print("ready", flush=True)
time.sleep(1000)
"""
PRINTS: Final = "print('ready', flush=True)\nwhile True: print('step ' + 'x' * 100)"
LEAVES: Final = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
STEPS: Final = (
    "import time\nfrom gpuwarden.reporter import Reporter\nreporter = Reporter()\nreporter.step()\n"
    "print('ready', flush=True)\ntime.sleep(1000)"
)


def lives(pid: int) -> bool:
    return Path("/proc", str(pid)).exists() and not procfs.is_zombie(pid)


def job(guarded: Guarded) -> state_file.JobFile:
    return state_file.parse_job((guarded.folder / f"{NAME}.job.json").read_text())


@pytest.mark.parametrize(
    "program", [WAITS, GIL, DEAF, FORKS], ids=["in Python", "in C with the GIL", "ignores SIGTERM", "forks, setsid"]
)
def test_command_that_hangs_is_ended_with_all_that_it_started(guarded: Guarded, tmp_path: Path, program: str) -> None:
    process = guarded.start(python(program, str(tmp_path / "pid")), "--restart", "never")
    when_ready(process)
    pids = [guarded.pid()] + [int(path.read_text()) for path in tmp_path.glob("pid")]

    guarded.end(Condition.STALL)
    process.communicate(timeout=20)

    assert process.returncode == 76
    assert not any(lives(pid) for pid in pids)


@pytest.mark.parametrize("options", [(), ("--steps-from", "step")], ids=["", "with steps"])
def test_command_that_prints_without_end_is_ended(guarded: Guarded, options: tuple[str, ...]) -> None:
    process = guarded.start(python(PRINTS), "--restart", "never", *options)
    when_ready(process)
    pid = guarded.pid()

    guarded.actuator.announce(NAME, condition=Condition.STALL, acts=True, message="none")
    guarded.actuator.stop(NAME, grace_s=0.5)
    said = process.communicate(timeout=20)[0]

    assert process.returncode == 76
    assert not lives(pid)
    assert "ended by gpuwarden: stall" in said


def test_command_that_exits_0_in_mid_run_is_done_and_leaves_nothing(guarded: Guarded) -> None:
    code, said = guarded.result(python(LEAVES))

    assert code == 0
    assert not lives(int(next(line for line in said.splitlines() if line.isdigit())))
    assert "started again" not in said


def test_stopped_command_is_not_judged_until_it_goes_on(guarded: Guarded) -> None:
    process = guarded.start(python(STEPS))
    when_ready(process)
    pid, path = guarded.pid(), guarded.folder / f"{NAME}.job.json"
    beat = job(guarded).step_beat
    assert beat is not None

    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: not path.exists(), "the job is hidden")
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    eventually(path.exists, "the job is back")

    after = job(guarded).step_beat
    assert after is not None
    assert after.boottime_s - beat.boottime_s >= 1
    process.terminate()
    assert "the command is stopped by SIGSTOP: it is not judged until SIGCONT" in process.communicate(timeout=10)[0]


def test_stop_and_continue_of_the_run_reach_the_command(guarded: Guarded) -> None:
    process = guarded.start(python(STEPS))
    when_ready(process)
    pid = guarded.pid()

    process.send_signal(signal.SIGTSTP)
    eventually(lambda: procfs.stat(pid)[0] == "T", "the command is stopped")
    process.send_signal(signal.SIGCONT)
    eventually(lambda: procfs.stat(pid)[0] != "T", "the command goes on")


# --- killed supervisors


@pytest.mark.parametrize("options", ["", ", start_new_session=True"], ids=["in-the-group", "after-setsid"])
def test_next_run_ends_what_a_killed_run_left(guarded: Guarded, options: str) -> None:
    first = guarded.start(
        python(
            f"import subprocess, time; print(subprocess.Popen(['sleep', '1000']{options}).pid, flush=True)\n"
            "time.sleep(1000)"
        )
    )
    assert first.stdout is not None
    left = next(int(line) for line in first.stdout if line.strip().isdigit())
    command = guarded.pid()
    first.kill()
    eventually(lambda: not lives(command), "the command dies with its supervisor")
    assert lives(left)

    code, said = guarded.result(python("raise SystemExit(0)"))

    assert code == 0
    assert "an earlier run of this name was killed: its processes are ended" in said
    assert not lives(left)


def test_command_is_known_before_its_first_instruction(guarded: Guarded) -> None:
    process_file = guarded.folder / f"{NAME}{files.PROCESS_SUFFIX}"

    for _ in range(5):
        code, said = guarded.result(["sh", "-c", f'read line < {process_file} && [ "${{line##*[$$,}}" != "$line" ]'])
        assert code == 0, said


def test_command_does_not_run_without_its_supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)  # in the new process: killed in the meantime

    child = Child(["touch", str(tmp_path / "ran")], os.environ)

    eventually(lambda: isinstance(child.wait(), End), "it ends")
    assert not (tmp_path / "ran").exists()


def test_process_file_with_a_reused_pid_ends_nothing(guarded: Guarded) -> None:
    guarded.folder.mkdir()
    with subprocess.Popen(["sleep", "1000"], process_group=0) as other:
        newer = ProcessId.of(other.pid)
        for process in (ProcessId(newer.pid, newer.start_ticks - 1), ProcessId(newer.pid, 1)):
            gone = ProcessFile(process=process, supervisor=ProcessId(newer.pid, 1), restarts=True)
            files.write(guarded.folder, NAME, gone)

            code, said = guarded.result(python("raise SystemExit(0)"))

            assert code == 0
            assert "earlier run" not in said
            assert other.poll() is None
        other.kill()


FULL_DISK: Final = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
open(sys.argv[1] + "/host", "w").write("host1")
output = os.open(sys.argv[1] + "/output", os.O_WRONLY | os.O_CREAT)
os.dup2(output, 1)
os.execv(sys.executable, [sys.executable, "-m", "gpuwarden", "run", *sys.argv[2:]])
"""
FILLS: Final = """
import os, time
from gpuwarden.reporter import Reporter
reporter = Reporter()
try:
    with open(os.environ["GPUWARDEN_RUNTIME_DIR"] + "/fills", "wb", buffering=0) as full:
        while True:
            full.write(b"x" * 1000)
except OSError:
    pass
for step in range(20):
    reporter.step()
    print("step", step, flush=True)
    time.sleep(0.1)
raise SystemExit(5)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.slow
def test_full_disk_under_state_files_and_output_does_not_end_the_command(tmp_path: Path) -> None:
    found = subprocess.run(
        [
            *("unshare", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path)),
            *("--name", NAME, "--steps-from", "step", "--", *python(FILLS)),
        ],
        env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )

    assert found.returncode == 5
    assert found.stderr.count("the command's output cannot be written (No space left on device)") == 1
    assert "Traceback" not in found.stderr


def test_stopped_supervisor_is_no_dead_worker(guarded: Guarded) -> None:
    process = guarded.start(python(STEPS))
    when_ready(process)
    look = Sampler(
        host="h", directory=guarded.directory, containers={}, gpus=None, thresholds=Thresholds(dead_after_s=0.5)
    )

    process.send_signal(signal.SIGSTOP)
    look.sample()
    time.sleep(1)
    snapshot = look.sample()
    process.send_signal(signal.SIGCONT)

    assert snapshot.workers is not None
    assert [each.alive for each in snapshot.workers.workers] == [True]
    assert snapshot.cpu_idle_s == {}


def test_executor_that_ended_leaves_the_budget_to_the_run(guarded: Guarded) -> None:
    files.write_executor(guarded.directory, armed=True)
    files.remove_executor(guarded.directory)
    files.remove_executor(guarded.directory)

    code, said = guarded.result(python(WAITS), "--budget-s", "1")

    assert code == 75
    assert "over its time budget" in said
