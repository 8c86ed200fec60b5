"""SIGKILL at random points: each command ends once or is reported lost, and nothing is left."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from gpuwarden import procfs
from gpuwarden.job import FINAL, JobId, State
from gpuwarden.queue import JobStore, Submission
from gpuwarden.supervisor import files
from tests.e2e.running import Run, free_ports, up
from tests.waiting import eventually

SEED: Final = 5
NIGHTLY_S = 600.0
OPEN_MAX: Final = 100
NAMES: Final = ("r0", "r1")
# Has a child in its group, works up to 0.6 s, and says once that it is done.
TREE: Final = """
import os, subprocess, sys, time
marker, done, ident = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", marker])
time.sleep(0.3 + 0.3 * (int(ident) % 2))
with open(done, "a") as file:
    file.write(ident + "\\n")
"""
JOBS: Final = """
import fcntl, os, time
from pathlib import Path
from gpuwarden import Queue
queue = Queue(name="killed")

@queue.job(retries=0)
def work(number, folder, pause_s):
    with open(f"{folder}/{number}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            Path(folder, f"{number}.twice").touch()
        time.sleep(pause_s)
"""


def marked(marker: str) -> list[int]:
    """The processes of this test that live."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid() and not procfs.is_zombie(pid)]


def zombies() -> list[int]:
    """Ended children of this process, not yet reaped."""
    stats = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                stats[int(entry.name)] = procfs.stat(int(entry.name))
    return [pid for pid, each in stats.items() if each[0] == "Z" and int(each[1]) == os.getpid()]


class Runs:
    """Guarded commands, two at a time, one of which is sometimes killed."""

    def __init__(self, folder: Path, directory: Path, chance: random.Random) -> None:
        self.marker = f"killed-{folder.name}-{os.getpid()}"
        self.ends: dict[int, int] = {}
        self._done = folder / "done"
        self._done.touch()
        self._directory = directory
        self._chance = chance
        self._running: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        self._number = 0

    def start(self, name: str) -> subprocess.Popen[bytes]:
        self._number += 1
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuwarden", "run", "--name", name, "--"),
                *(sys.executable, "-c", TREE, self.marker, str(self._done), str(self._number)),
            ],
            env={**os.environ, "GPUWARDEN_RUNTIME_DIR": str(self._directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._running[name] = self._number, process
        return process

    def step(self) -> None:
        """Start what has ended, and kill a supervisor or a command, or neither."""
        for name in NAMES:
            number, process = self._running.get(name, (0, None))
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                process.wait()
                self.ends[number] = process.returncode
            self.start(name)
        time.sleep(self._chance.uniform(0.0, 0.4))
        name, victim = self._chance.choice(NAMES), self._chance.choice(("supervisor", "command", "none"))
        pid = self._running[name][1].pid if victim == "supervisor" else self._command(name)
        if victim != "none" and pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _command(self, name: str) -> int | None:
        try:
            file = files.supervised(self._directory / name, name, holder=None)
        except files.SupervisedFileError:
            return None
        return None if file is None else file.process.pid

    def finish(self) -> None:
        """Wait for all, and run each name once more."""
        for number, process in self._running.values():
            process.wait(timeout=60)
            self.ends[number] = process.returncode
        for name in NAMES:
            process = self.start(name)
            process.wait(timeout=60)
            self.ends[self._number] = process.returncode

    def check(self) -> None:
        done = Counter(map(int, self._done.read_text().split()))
        killed = -signal.SIGKILL, 128 + signal.SIGKILL
        assert set(self.ends.values()) <= {0, *killed}, Counter(self.ends.values())
        assert {number for number, code in self.ends.items() if code == 0} <= set(done)
        assert set(done.values()) == {1}
        assert set(self.ends.values()) >= {0, *killed}, "each kind of end was met"
        eventually(lambda: not marked(self.marker), "no process is left", within_s=20)
        assert zombies() == []


@pytest.mark.slow
def test_supervisors_and_commands_killed_at_random_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "host").write_text("host1\n")
    runs = Runs(tmp_path, tmp_path, random.Random(SEED))  # noqa: S311
    until_s = time.monotonic() + 20

    while time.monotonic() < until_s:
        runs.step()
    runs.finish()

    runs.check()


@contextmanager
def restarted(folder: Path, ports: dict[str, int]) -> Iterator[Run]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ("--armed", "--worker", "jobs:2")
    with up(folder, ports, *options, cwd=folder, env=environment) as run:
        yield run.ready()


@pytest.mark.nightly
@pytest.mark.needs_parts
@pytest.mark.slow
def test_up_workers_and_runs_killed_for_ten_minutes_leave_nothing(tmp_path: Path) -> None:
    chance, ports = random.Random(SEED), free_ports()  # noqa: S311
    until_s = time.monotonic() + NIGHTLY_S
    (tmp_path / "jobs.py").write_text(JOBS)
    runs = Runs(tmp_path, tmp_path / "data" / "run", chance)
    submitted: list[JobId] = []
    while time.monotonic() < until_s:
        with restarted(tmp_path, ports) as run:
            life_s = time.monotonic() + chance.uniform(10, 40)
            while time.monotonic() < min(life_s, until_s):
                with closing(JobStore.open(f"sqlite:///{run.data}/queue/queue.db")) as store:
                    # On a slow host the workers finish fewer jobs than this loop takes turns.
                    if len(submitted) < OPEN_MAX or store.job(submitted[-OPEN_MAX]).state in FINAL:
                        submitted.append(_submit(store, len(submitted), tmp_path))
                runs.step()
                worker = f"jobs-{chance.randrange(2)}"
                with suppress(OSError):
                    pid = files.lock_holder(run.data / "run" / worker, worker)[1]
                    if pid is not None and chance.random() < 0.1:
                        os.kill(pid, signal.SIGKILL)
        # `up` is killed here
    with restarted(tmp_path, ports) as run:
        runs.finish()
        with closing(JobStore.open(f"sqlite:///{run.data}/queue/queue.db")) as store:
            eventually(
                lambda: all(store.job(each).state in (State.COMPLETED, State.FAILED) for each in submitted),
                "each job is completed or reported lost",
                within_s=300,
                log=lambda: str(Counter(store.job(each).state for each in submitted)),
            )
        assert run.stop() == 0

    assert not list(tmp_path.glob("*.twice"))
    runs.check()
    assert marked(str(tmp_path)) == []


def _submit(store: JobStore, number: int, folder: Path) -> JobId:
    arguments = {"number": number, "folder": str(folder), "pause_s": 0.5}
    task = Submission(queue="killed", payload={"task": "work", "arguments": arguments})
    return store.runs.submit(task, now=store.now())
