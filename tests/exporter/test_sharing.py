"""Two workers in a shared container: the work of each, by real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources import processes, workers
from gpuwarden import cgroup
from tests.exporter import builders as build
from tests.exporter.test_sampler import Docker, sampler

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from gpuwarden.reporter import Reporter
held = []
with Reporter(Path(sys.argv[1]), worker=sys.argv[2], queue="gpu", subdirectory=sys.argv[2], heartbeat_s=60.0):
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        if line == "start a child\\n":
            held.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL))
            print(held[-1].pid, flush=True)
        elif line == "leave an orphan\\n":
            print(subprocess.check_output(["sh", "-c", "sleep 600 >&2 & echo $!"], text=True).strip(), flush=True)
        elif line == "take 64 MiB\\n":
            held.append(b"x" * 2**26)
            print(0, flush=True)
        elif line == "read 64 MiB\\n":
            with open("/dev/zero", "rb") as zeros:
                for _ in range(64):
                    zeros.read(2**20)
            print(0, flush=True)
"""


class Worker:
    """A real worker process which executes commands."""

    def __init__(self, house: Path, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(house), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._answer()

    def send(self, what: str) -> int:
        """Send a command and return the pid in the answer, or 0."""
        assert self.process.stdin
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate()


@dataclass
class Shared:
    """A container with the workers `w` and `v`. A test selects which processes use its GPU."""

    house: Path
    sampler: Sampler
    docker: Docker
    w: Worker
    v: Worker
    busy: set[int] = field(default_factory=set)
    beside: list[int] = field(default_factory=list)

    def hold(self, *pids: int) -> None:
        """Put these processes into the container, with its workers."""
        self.beside.extend(pids)
        inside = [each.pid for each in (self.w, self.v) if each.process.poll() is None]
        (self.house / "group" / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (*inside, *self.beside)))

    def idle(self) -> dict[str, bool | None]:
        """Whether each worker has left the GPU idle between two samples; `None` if unknown."""
        self.sampler.sample()
        found = self.sampler.sample().worker_evidence
        return {name: None if each.gpu_idle_s is None else each.gpu_idle_s > 0 for name, each in found.items()}

    def readings(self) -> GpuReadings:
        return build.gpus(build.gpu(0, *(build.process(pid, 0.95 / len(self.busy)) for pid in self.busy)))


@pytest.fixture
def shared(house: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    (house / "group").mkdir()
    w, v = Worker(house, "w"), Worker(house, "v")
    docker = Docker(build.container(pid=1))
    monkeypatch.setattr(cgroup, "directory", lambda *_, **__: house / "group")
    monkeypatch.setattr(cgroup, "memory_directory", lambda *_, **__: None)
    # These processes really are in the cgroup of the tests.
    monkeypatch.setattr(workers, "own_container", lambda: None)
    monkeypatch.setattr(cgroup, "container_id", lambda pid, **_: build.DOCKER_ID if pid in (w.pid, v.pid) else None)
    limits = Thresholds(ram_idle_bytes=2**25, io_idle_bytes_per_s=1.0)
    found = Shared(house=house, sampler=sampler(house), docker=docker, w=w, v=v)
    found.sampler = sampler(house, containers={"docker": docker}, gpus=found.readings, thresholds=limits)
    found.hold()
    yield found
    for pid in found.beside:
        os.kill(pid, signal.SIGKILL)
    for each in (w, v):
        each.process.kill()
        each.process.communicate()


def test_idle_worker_is_separate_from_a_computing_one(shared: Shared) -> None:
    shared.busy = {shared.v.pid}

    assert shared.idle() == {"w": True, "v": False}
    assert shared.sampler.sample().containers[0].gpu_idle_s == 0.0


def test_child_of_a_worker_computes_only_for_it(shared: Shared) -> None:
    shared.hold(child := shared.v.send("start a child"))
    shared.busy = {child}

    assert shared.idle() == {"w": True, "v": False}


def test_orphan_computes_for_both(shared: Shared) -> None:
    shared.hold(orphan := shared.v.send("leave an orphan"))
    shared.busy = {orphan}

    assert shared.idle() == {"w": False, "v": False}


def test_single_remaining_worker_has_no_separate_evidence(shared: Shared) -> None:
    before = shared.idle()
    shared.v.end()
    shared.hold()

    assert (before, shared.idle()) == ({"w": True, "v": True}, {})


def test_ram_and_io_are_separate_for_each_worker(shared: Shared) -> None:
    shared.sampler.sample()
    shared.v.send("take 64 MiB")
    shared.v.send("read 64 MiB")
    found = shared.sampler.sample().worker_evidence
    of_w, of_v = found["w"], found["v"]

    assert (of_v.ram_idle_s, of_v.io_idle_s, of_v.work_idle_s) == (0.0, 0.0, 0.0)
    assert of_w.ram_idle_s is not None
    assert of_w.io_idle_s is not None
    assert min(of_w.ram_idle_s, of_w.io_idle_s) > 0.0


def test_worker_without_its_process_in_the_container_is_unknown_not_idle(shared: Shared) -> None:
    (shared.house / "group" / "cgroup.procs").write_text(f"{shared.v.pid}\n")

    assert shared.idle() == {"v": True}


def test_unreadable_ram_is_unknown_and_counted(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError("not ours to look at")

    (shared.house / "group" / "memory.current").write_text("4096\n")
    (shared.house / "group" / "memory.stat").write_text("anon 0\ninactive_file 0\n")
    monkeypatch.setattr(cgroup, "memory_directory", lambda *_, **__: shared.house / "group")
    monkeypatch.setattr(processes, "resident_bytes", refuse)

    snapshot = shared.sampler.sample()

    assert snapshot.containers[0].ram_bytes == 4096
    assert {name: each.ram_idle_s for name, each in snapshot.worker_evidence.items()} == {"w": None, "v": None}
    assert snapshot.unknown["worker-0", "worker_ram", "unreadable"] == 2


def test_worker_without_evidence_in_one_sample_restarts_its_durations(shared: Shared) -> None:
    assert shared.idle() == {"w": True, "v": True}
    (shared.house / "group" / "cgroup.procs").write_text(f"{shared.v.pid}\n")
    shared.sampler.sample()
    shared.hold()

    found = shared.sampler.sample().worker_evidence

    assert found["w"].gpu_idle_s == 0.0
    assert (found["v"].gpu_idle_s or 0.0) > 0.0
