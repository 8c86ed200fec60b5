"""README's first steps, with its commands as printed: a hung script and a hung job are restarted and recorded."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.standalone.debian_packages import env_for_parts
from deploy.standalone.stack import CHECKOUT
from testbed.changed_settings import CHANGED
from testbed.gpu_simulator import SimulatedGpus, Slot
from tests.e2e.running import READY, free_ports
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
SCRIPT, MODULE = "Any script", "A job queue"
WORKERS = {"worker-0", "worker-1"}
GPU = {SCRIPT: "GPU-sim-0", MODULE: "GPU-sim-1"}
LITERAL_S, WINDOW_S = 600, 30

# Computes on the simulated GPU. Its first life hangs; its second ends.
TRAIN = """
import json, pathlib, time

FOLDER = pathlib.Path({folder!r})

def compute(seconds):
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
    work = {{"busy_until_s": until_s, "ratio": 0.9, "memory_bytes": 2**30}}
    (FOLDER / "gpu-work.json").write_text(json.dumps(work))
    time.sleep(seconds)

def wait_for_data():
    time.sleep(10_000)  # hangs here

first = not pathlib.Path("checkpoint").exists()
pathlib.Path("checkpoint").touch()
compute(4)
if first:
    wait_for_data()
print("trained")
"""
TASKS = """
import time

from gpuwarden import Queue, current

queue = Queue()

def wait_for_data():
    time.sleep(10_000)  # hangs here

@queue.job(stall_timeout_s=6)
def train(epochs):
    job = current().job
    for step in current().steps(range(10 * epochs)):
        if step == 3 and job.job_id % 2 and job.attempt == 1:
            wait_for_data()
        time.sleep(0.2)
"""
LINES = {
    name: next(number for number, line in enumerate(text.splitlines(), 1) if "hangs here" in line)
    for name, text in (("train.py", TRAIN), ("tasks.py", TASKS))
}


def block(step: str, command: str) -> str:
    """The code block of a step of README that has this command."""
    (section,) = re.findall(rf"^\*\*\d\. {step}\.\*\*.*?(?=^\*\*\d\. |^## )", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in re.findall(r"```bash\n(.*?)```", section, re.DOTALL) if command in text]
    return str(found)


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person with terminals in one folder."""

    folder: Path
    env: dict[str, str]

    @contextmanager
    def terminal(self, name: str, text: str, *, gpu: str = "void") -> Iterator[subprocess.Popen[bytes]]:
        """Type a text into a terminal of its own. It is closed at the end of the block."""
        with (self.folder / name).open("wb") as said:
            shell = subprocess.Popen(
                ["bash", "-ec", text],
                cwd=self.folder, env=self.env | {"NVIDIA_VISIBLE_DEVICES": gpu}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
        try:
            yield shell
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(60)

    def said(self, name: str) -> str:
        """What a terminal has printed."""
        return (self.folder / name).read_text()

    def type(self, text: str) -> str:
        """Type a text, and return what it prints."""
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def restarted(self) -> set[str]:
        """What was restarted in the last minutes, by `gpuwarden status`."""
        return set(re.findall(r"^  (\S+) on \S+ restarted ", self.type("gpuwarden status"), re.MULTILINE))

    def rows(self, text: str) -> list[dict[str, Any]]:
        """Type a text, and return what it prints as JSON lines."""
        return [json.loads(row) for row in self.type(text).splitlines()]


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person for whom step 1's `gpuwarden up` runs, with options for a host without a GPU."""
    folder = tmp_path_factory.mktemp("readme")
    env = env_for_parts() | {"HOME": str(folder / "home"), "XDG_STATE_HOME": "", "PYTHONUNBUFFERED": "1"}
    env["PATH"] = f"{CHECKOUT / '.venv/bin'}{os.pathsep}{env['PATH']}"
    (folder / "home").mkdir()
    (run := folder / "data" / "run").mkdir(parents=True, mode=0o700)
    run.parent.chmod(0o700)
    (folder / "train.py").write_text(TRAIN.format(folder=str(run / "train")))
    (folder / "tasks.py").write_text(TASKS)
    person = Person(folder=folder, env=env)
    slots = [Slot(worker="train", gpus=(GPU[SCRIPT],)), Slot(worker="none", gpus=(GPU[MODULE],))]
    listening = " ".join(f"--{part}-port {port}" for part, port in free_ports().items())
    options = f"--data-dir data --docker none --simulate-gpu gpus.json {listening}"
    with (
        SimulatedGpus(folder / "gpus.json", directory=run, slots=slots),
        person.terminal("up", f"{block(SCRIPT, 'gpuwarden up').strip()} {options}"),
    ):
        eventually(lambda: READY in person.said("up"), "up is ready", within_s=90, log=lambda: person.said("up"))
        yield person


@pytest.mark.parametrize("window_s", [WINDOW_S, pytest.param(LITERAL_S, marks=pytest.mark.nightly, id="as-printed")])
@pytest.mark.behaviour("A7")
def test_script_and_job_that_hang_are_restarted_and_the_ledger_has_their_lines(person: Person, window_s: int) -> None:
    printed = f"--health-window-s {LITERAL_S}"
    guarded, look = block(SCRIPT, "gpuwarden run"), block(SCRIPT, "gpuwarden ledger")
    assert printed in guarded
    assert "health_window_s" in CHANGED
    (person.folder / "checkpoint").unlink(missing_ok=True)
    known = person.rows("gpuwarden ledger list --json")

    with (
        person.terminal("run", guarded.replace(printed, f"--health-window-s {window_s}"), gpu=GPU[SCRIPT]) as run,
        person.terminal("workers", block(MODULE, "gpuwarden worker run"), gpu=GPU[MODULE]),
    ):
        eventually(
            lambda: set(person.type("gpuwarden status").split()) >= {"train"} | WORKERS, "status lists all three"
        )
        for _ in range(2):
            person.type(block(MODULE, "submit"))
        jobs = [job["job_id"] for job in person.rows("gpuwarden job list --json")][-2:]
        waited = person.type(f"gpuwarden job wait {jobs[0]} {jobs[1]} --timeout-s 90") + person.said("workers")
        eventually(lambda: person.restarted() & WORKERS, "status has the restart of one worker")
        eventually(lambda: run.poll() is not None, within_s=window_s + 60, log=lambda: person.said("run"))

    assert (run.returncode, person.said("run").splitlines()[-1]) == (0, "trained")
    assert "started again" in person.said("run")
    ended = {(job["job_id"], job["state"], job["attempt"]) for job in person.rows("gpuwarden job list --json")}
    assert ended >= {(jobs[0], "completed", 2), (jobs[1], "completed", 1)}, waited
    new = [row["episode_id"] for row in person.rows("gpuwarden ledger list --json") if row not in known]
    said = "".join(person.type(look.replace("show 1\n", f"show {episode}\n")) for episode in new)
    assert "train" in person.restarted()
    fixed = re.findall(r"^episode \d+: (\S+ of [a-z]+).*: fixed ", said, re.MULTILINE)
    assert sorted(fixed) == ["health of train", "stall of worker"], said
    assert f"wait_for_data (train.py:{LINES['train.py']})" in said
    assert f"wait_for_data (tasks.py:{LINES['tasks.py']})" in said
