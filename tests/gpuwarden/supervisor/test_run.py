"""`gpuwarden run` with real processes; the executor's part is played by its actuator."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from gpuwarden import procfs, state_file
from gpuwarden.job import Condition, Phase
from gpuwarden.supervisor import files
from gpuwarden.supervisor.run import default_name
from tests.gpuwarden.supervisor.guarded import DEAF, NAME, WAITS, Guarded, python, when_ready
from tests.waiting import eventually

# Makes standard input the terminal of its session.
OWN_TERMINAL: Final = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def cpu_ticks(pid: int) -> int:
    """CPU time that the process has used, clock ticks."""
    fields = procfs.stat(pid)
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
    ],
)
def test_exit_code_is_the_commands(guarded: Guarded, program: str, code: int) -> None:
    found, said = guarded.result(python(program))

    assert found == code
    assert "no executor runs on this host" in said
    assert sorted(path.name for path in guarded.folder.iterdir()) == [f"{NAME}.lock"]


@pytest.mark.parametrize(
    ("cmd", "code", "says"), [("nosuch-command", 127, "command not found"), ("/etc/passwd", 126, "not executable")]
)
def test_command_that_cannot_start(guarded: Guarded, cmd: str, code: int, says: str) -> None:
    found, said = guarded.result([cmd])

    assert found == code
    assert f"gpuwarden run: {cmd}: {says}\n" in said


def test_health_window_below_its_minimum_is_refused(guarded: Guarded) -> None:
    found, said = guarded.result(python("raise SystemExit(0)"), "--health-window-s", "29")

    assert found == 2
    assert "argument --health-window-s: invalid time '29': expected 30 seconds or more" in said


def test_budget_of_zero_is_none(guarded: Guarded) -> None:
    assert guarded.result(python("raise SystemExit(3)"), "--budget-s", "0")[0] == 3


def test_command_without_dashes_is_refused_with_advice() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "run", "python", "train.py"], capture_output=True, text=True, check=False
    )

    assert found.returncode == 2
    assert "put -- before the command: gpuwarden run [options] -- python train.py" in found.stderr


def test_second_run_with_one_name_is_refused(guarded: Guarded) -> None:
    when_ready(guarded.start(python(WAITS)))

    code, said = guarded.result(python(WAITS))

    assert code == 1
    assert f"another process is worker '{NAME}'" in said
    assert "use another name" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_of_a_person_ends_the_command_for_good(guarded: Guarded, number: signal.Signals) -> None:
    process = guarded.start(python(WAITS), "--restart", "always")
    when_ready(process)

    process.send_signal(number)
    process.communicate(timeout=10)

    assert process.returncode == 128 + number


def test_second_signal_kills_a_command_that_ignores_the_first(guarded: Guarded) -> None:
    process = guarded.start(python(DEAF))
    when_ready(process)

    process.terminate()
    time.sleep(1.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=10)

    assert process.returncode == 128 + signal.SIGKILL


def test_children_that_left_the_group_end_with_the_command(guarded: Guarded, tmp_path: Path) -> None:
    forks = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(0.05)\n"
    )
    code, _ = guarded.result(python(forks, str(tmp_path / "pid")))

    assert code == 0
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_command_dies_with_its_supervisor(guarded: Guarded) -> None:
    process = guarded.start(python(DEAF))
    when_ready(process)
    pid = guarded.pid()

    process.kill()

    eventually(lambda: not Path("/proc", str(pid)).exists() or procfs.is_zombie(pid), "the command is killed")


@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(("condition", "code"), [(Condition.STALL, 76), (Condition.HEALTH, 78), (Condition.BUDGET, 75)])
def test_exit_code_names_why_gpuwarden_ended_the_command(guarded: Guarded, condition: Condition, code: int) -> None:
    process = guarded.start(python(WAITS), "--restart", "never")
    when_ready(process)

    guarded.end(condition)
    said = process.communicate(timeout=10)[0]

    assert process.returncode == code
    assert f"gpuwarden ends the command: {condition}: no step for 120 s" in said
    assert f"ended by gpuwarden: {condition}; not started again" in said


@pytest.mark.behaviour("A8")
@pytest.mark.slow
def test_hung_command_is_started_again_three_times(guarded: Guarded) -> None:
    process = guarded.start(python(WAITS))
    pid = None
    for attempt in (1, 2, 3, 4):
        pid = guarded.pid(but=pid)
        job = state_file.parse_job((guarded.folder / f"{NAME}.job.json").read_text())
        assert (job.attempt, job.phase) == (attempt, Phase.LOAD)
        guarded.end(Condition.STALL)
    said = process.communicate(timeout=30)[0]

    assert process.returncode == 76
    assert [line for line in said.splitlines() if "ended by" in line] == [
        *(f"gpuwarden run: ended by gpuwarden: stall; started again in {delay} s" for delay in (1, 2, 4)),
        "gpuwarden run: ended by gpuwarden: stall; not started again",
    ]


def test_dry_run_prints_what_would_be_done(guarded: Guarded) -> None:
    process = guarded.start(python("import time; print('ready', flush=True); time.sleep(3)"))
    when_ready(process)

    guarded.end(Condition.STALL, acts=False)
    said = process.communicate(timeout=10)[0]

    assert process.returncode == 0
    assert "dry run: gpuwarden would end the command: stall: no step for 120 s; see `gpuwarden arm`" in said


@pytest.mark.behaviour("A1")
@pytest.mark.parametrize("program", [WAITS, DEAF], ids=["ends at SIGTERM", "ignores SIGTERM"])
@pytest.mark.slow
def test_without_an_executor_the_budget_still_ends_the_command(guarded: Guarded, program: str) -> None:
    began_s = time.monotonic()
    code, said = guarded.result(python(program), "--budget-s", "2")

    assert code == 75
    assert time.monotonic() - began_s >= 2
    assert "over its time budget of 2 s: ended" in said


def test_with_an_executor_the_budget_is_its_matter(guarded: Guarded) -> None:
    files.write_executor(guarded.directory, armed=False)

    code, said = guarded.result(python("import time; time.sleep(3)"), "--budget-s", "1")

    assert code == 0
    assert "dry run: a hang is recorded and nothing is ended" in said


def test_matching_lines_are_steps(guarded: Guarded) -> None:
    prints = "import time\nfor step in range(5): print('epoch 1 step', step); time.sleep(0.3)\ntime.sleep(1000)"
    process = guarded.start(python(prints), "--steps-from", r"step \d+")
    path = guarded.folder / f"{NAME}.job.json"

    def job() -> state_file.JobFile | None:
        return state_file.parse_job(path.read_text()) if path.exists() else None

    eventually(lambda: (found := job()) is not None and found.step >= 4, "four steps are seen")
    found = job()
    assert found is not None
    assert found.phase is Phase.STEP
    assert found.step_beat is not None
    process.terminate()
    said = process.communicate(timeout=10)[0]
    assert [line for line in said.splitlines() if line.startswith("epoch")] == [f"epoch 1 step {n}" for n in range(5)]


def test_reporter_of_the_script_reports_its_steps(guarded: Guarded) -> None:
    steps = (
        "import time\nfrom gpuwarden.reporter import Reporter\nreporter = Reporter()\n"
        "for _ in range(30):\n    reporter.step()\n    time.sleep(0.1)\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    process = guarded.start(python(steps))
    when_ready(process)

    job = state_file.parse_job((guarded.folder / f"{NAME}.job.json").read_text())
    assert job.phase is Phase.STEP
    assert job.step >= 20
    assert job.after_gpu_use
    assert not job.health_acts
    process.terminate()
    process.communicate(timeout=10)
    assert not (guarded.folder / f"{NAME}.job.json").exists()


def test_reporter_outside_of_a_run_reports_nothing(tmp_path: Path) -> None:
    script = (
        "from gpuwarden.reporter import Reporter\nwith Reporter() as r:\n    r.step(); r.phase('eval'); r.end_job()"
    )

    found = subprocess.run(python(script), capture_output=True, text=True, cwd=tmp_path, check=False)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reader_that_waits_stops_the_output_and_not_the_heartbeat_and_costs_no_cpu(guarded: Guarded) -> None:
    prints = "import time\nfor step in range(40_000): print('step', step)\ntime.sleep(1000)"
    process = guarded.start(python(prints), "--steps-from", "step")
    path = guarded.folder / f"{NAME}.worker.json"
    guarded.pid()
    time.sleep(2)  # the pipe is full
    before, used = state_file.parse_worker(path.read_text()).heartbeat, cpu_ticks(process.pid)

    eventually(lambda: state_file.parse_worker(path.read_text()).heartbeat != before, "it beats", within_s=15)
    assert cpu_ticks(process.pid) - used < procfs.TICKS_PER_S / 2, "it waits for the reader without a loop"
    assert process.stdout is not None
    assert sum(1 for _, line in zip(range(40_004), process.stdout, strict=False) if line.startswith("step ")) == 40_000


def test_full_disk_under_the_output_is_said_once(guarded: Guarded) -> None:
    prints = "import sys\nfor step in range(3): print('step', step, flush=True)"
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "gpuwarden", "run", "--name", NAME, "--steps-from", "step", "--", *python(prints)],
            env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(guarded.directory)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert found.returncode == 0
    assert found.stderr.count("the command's output cannot be written (No space left on device)") == 1


# --- a terminal


class Terminal:
    """A pseudo-terminal with its own session."""

    def __init__(self, guarded: Guarded, program: str, *options: str) -> None:
        self.said = b""
        ours, theirs = pty.openpty()
        self._terminal = ours
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "gpuwarden", "run", "--name", NAME),
                *(*options, "--", *python(program)),
            ],
            env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(guarded.directory)},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def until(self, text: bytes) -> None:
        eventually(lambda: self._read() and text in self.said, text.decode(), log=self.said.decode)

    def exit_code(self) -> int:
        eventually(lambda: self._read() and self.process.poll() is not None, "it ends", log=self.said.decode)
        self._read()
        os.close(self._terminal)
        return self.process.returncode

    def _read(self) -> bool:
        while select.select([self._terminal], [], [], 0)[0]:
            try:
                self.said += os.read(self._terminal, 4096)
            except OSError:
                break  # no process has it
        return True


STEPS = """
import time
for n in range(1, 5):
    print("step", n, flush=True)
    time.sleep(0.2)
print("no newline", end="", flush=True)
time.sleep(0.2)
print(" here", flush=True)
"""


def test_terminal_has_a_bar_where_the_number_of_steps_is_known(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal(guarded, STEPS, "--steps-from", r"^step", "--steps-total", "4")

    assert terminal.exit_code() == 0
    said = terminal.said
    assert re.search(rb"step 2\r?\n#+-+ 2/4, \d+ s left\r\x1b\[Kstep 3", said), said
    assert b"no newline here" in said
    assert b"4/4" not in said


@pytest.mark.parametrize("term", ["dumb", None])
def test_no_bar_without_a_terminal(guarded: Guarded, monkeypatch: pytest.MonkeyPatch, term: str | None) -> None:
    monkeypatch.setenv("TERM", term or "xterm")
    options = ("--steps-from", r"^step", "--steps-total", "4")
    if term is None:
        process = guarded.start(python(STEPS), *options)
        said = process.communicate()[0]
        assert "2/4" not in said
    else:
        terminal = Terminal(guarded, STEPS, *options)
        assert terminal.exit_code() == 0
        assert b"2/4" not in terminal.said


def test_number_of_steps_needs_the_steps(guarded: Guarded) -> None:
    process = guarded.start(python("pass"), "--steps-total", "4")

    said = process.communicate()
    assert (process.returncode, "--steps-total needs --steps-from" in "".join(filter(None, said))) == (2, True)


@pytest.mark.parametrize("options", [(), ("--steps-from", "step")], ids=["terminal", "pseudo-terminal"])
def test_command_reads_the_terminal_and_ctrl_c_ends_it_for_good(guarded: Guarded, options: tuple[str, ...]) -> None:
    reads = "import sys, time; print('ready', sys.stdout.isatty(), flush=True); print('got', input()); time.sleep(1000)"
    terminal = Terminal(guarded, reads, "--restart", "always", *options)
    terminal.until(b"ready True")

    terminal.type(b"words\n")
    terminal.until(b"got words")
    terminal.type(b"\x03")

    assert terminal.exit_code() == 128 + signal.SIGINT, terminal.said
    assert b"not started again" in terminal.said


def test_ctrl_z_suspends_the_run_and_its_job_is_not_judged(guarded: Guarded) -> None:
    terminal = Terminal(guarded, WAITS)
    terminal.until(b"ready")
    job = guarded.folder / f"{NAME}.job.json"

    terminal.type(b"\x1a")
    eventually(lambda: procfs.stat(terminal.process.pid)[0] == "T", "the supervisor is stopped")
    assert not job.exists()

    terminal.process.send_signal(signal.SIGCONT)
    eventually(job.exists, "the job is back")
    terminal.type(b"\x03")
    assert terminal.exit_code() == 128 + signal.SIGINT, terminal.said


@pytest.mark.parametrize(
    ("cmd", "name"),
    [
        (["python", "-u", "jobs/train.py", "--lr", "3"], "train"),
        (["./start me.sh"], "start-me"),
        (["python3", "-c", "print()"], "python3"),
        (["/"], "command"),
    ],
)
def test_default_name_is_the_scripts(cmd: list[str], name: str) -> None:
    assert default_name(cmd) == name


def test_notice_about_another_process_ends_nothing(guarded: Guarded) -> None:
    process = guarded.start(python("import time; print('ready', flush=True); time.sleep(2); raise SystemExit(4)"))
    when_ready(process)
    file = files.read_process(guarded.folder, NAME)
    assert file is not None
    other = json.dumps({"process": [file.process.pid, 1], "condition": "stall", "acts": True, "message": "forged"})
    (guarded.folder / f"{NAME}.notice.json").write_text(other)

    said = process.communicate(timeout=10)[0]

    assert process.returncode == 4
    assert "forged" not in said
