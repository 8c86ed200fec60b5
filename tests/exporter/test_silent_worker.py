"""Silent workers in the sampler: processes that are stopped, compute, or are unreadable (A14)."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NamedTuple

import pytest
from structlog.testing import LogCapture

from exporter.http import evidence
from exporter.model.container import Container
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import CpuUse, WorkerReadings
from exporter.sampler import Sampler
from exporter.sources import processes, workers
from exporter.sources.containers.poller import Listing
from gpuwarden import procfs
from gpuwarden.job import Phase
from tests.exporter import builders as build
from tests.exporter import golden
from tests.exporter.conftest import StartWorker
from tests.waiting import eventually

PROCESS = CpuUse(start_ticks=77, used_ticks=12)


class Silence(NamedTuple):
    """Seconds since the last heartbeat of w0, and without CPU time."""

    heartbeat_s: float | None
    cpu_s: float | None


def sampler(house: Path, *running: Container, dead_after_s: float = 30.0) -> Sampler:
    listing = Listing(containers={each.id: each for each in running}, taken_s=0.0, duration_s=0.0)
    return Sampler(
        host="box-1",
        directory=house,
        containers={"docker": SimpleNamespace(latest=lambda: listing)} if running else {},
        gpus=None,
        thresholds=Thresholds(dead_after_s=dead_after_s),
    )


def silence(snapshot: Snapshot) -> Silence:
    facts = evidence.worker_evidence("w0", snapshot, now=snapshot.taken)
    assert facts is not None
    return Silence(facts.heartbeat_age_s, facts.cpu_idle_s)


def sample_until(look: Sampler, holds: Callable[[float, float], bool]) -> Silence:
    """Sample until both durations are known and `holds` accepts them."""

    def seen() -> Silence | None:
        found = silence(look.sample())
        return found if None not in found and holds(found.heartbeat_s or 0.0, found.cpu_s or 0.0) else None

    return eventually(seen)


def test_durations_of_a_stopped_worker_grow(house: Path, start_worker: StartWorker, logged: LogCapture) -> None:
    worker = start_worker("w0", job_id=7)
    look = sampler(house, dead_after_s=1.0)

    worker.stop()
    first = sample_until(look, lambda heartbeat_s, cpu_s: min(heartbeat_s, cpu_s) > 0.1)
    last = sample_until(look, lambda heartbeat_s, cpu_s: min(heartbeat_s, cpu_s) > 1.0)
    worker.go_on()
    sample_until(look, lambda heartbeat_s, _: heartbeat_s < 1.0)
    sample_until(look, lambda _, cpu_s: cpu_s < 1.0)

    assert (last.heartbeat_s or 0.0) - (first.heartbeat_s or 0.0) == pytest.approx(
        (last.cpu_s or 0.0) - (first.cpu_s or 0.0)
    )
    log_lines = [(each["log_level"], each["event"], each["worker"]) for each in logged.entries]
    assert log_lines[:2] == [
        ("error", "worker dead: no heartbeat, no CPU time", "w0"),
        ("info", "worker alive again", "w0"),
    ]
    assert (logged.entries[0]["job_id"], logged.entries[0]["attempt"]) == (7, 1)


def test_stopped_worker_without_a_job_is_not_dead(house: Path, start_worker: StartWorker, logged: LogCapture) -> None:
    worker = start_worker("w0")
    look = sampler(house, dead_after_s=0.5)

    worker.stop()
    sample_until(look, lambda heartbeat_s, cpu_s: min(heartbeat_s, cpu_s) > 0.5)

    assert logged.entries == []


def test_computing_worker_is_not_dead(house: Path, start_worker: StartWorker, logged: LogCapture) -> None:
    worker = start_worker("w0", job_id=7)
    look = sampler(house, dead_after_s=(dead_after_s := 3.0))  # longer than a busy machine may delay its computation

    worker.burn()
    found = sample_until(look, lambda heartbeat_s, _: heartbeat_s > dead_after_s + 0.5)
    logged_before = list(logged.entries)
    worker.stop()  # the control: the same worker with the same old heartbeat
    sample_until(look, lambda heartbeat_s, cpu_s: min(heartbeat_s, cpu_s) > dead_after_s)

    assert (found.cpu_s or 0.0) < dead_after_s
    assert logged_before == []
    assert [each["log_level"] for each in logged.entries] == ["error"]


def test_restarted_worker_has_a_new_cpu_idle_time(house: Path, start_worker: StartWorker) -> None:
    look = sampler(house)
    first = start_worker("w0")
    first.stop()
    sample_until(look, lambda _, cpu_s: cpu_s > 0.1)
    first.kill()
    start_worker("w0")

    assert silence(look.sample()).cpu_s == 0.0


IN_THE_KERNEL = """
import ctypes, os, signal, sys
CLONE_VFORK, clone = 0x4000, {"x86_64": 56, "aarch64": 220}[os.uname().machine]
if ctypes.PyDLL(None).syscall(clone, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    print("waited for", flush=True)
    sys.stdin.read(1)
    os._exit(0)
print("goes on", flush=True)
sys.stdin.read()
"""
"""Waits in state D with the interpreter lock until its child has read a letter, like a close on slow NFS."""


@pytest.mark.parametrize("phase", Phase)
def test_worker_that_waits_in_the_kernel_is_not_idle(
    phase: Phase, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = sampler(house)
    command = [sys.executable, "-c", IN_THE_KERNEL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        seen_as(monkeypatch, pid=process.pid, job=build.job_file(phase=phase))
        eventually(lambda: procfs.stat(process.pid)[0] == "D")
        waits = [silence(look.sample()).cpu_s for _ in range(3)][-1]
        process.stdin.write(b".")
        process.stdin.flush()
        process.stdout.readline()
        eventually(lambda: procfs.stat(process.pid)[0] == "S")
        eventually(lambda: (silence(look.sample()).cpu_s or 0.0) > 0.0)

    assert waits == 0.0


# Unknown values


def seen_as(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """The worker source lists w0 and w1, both in this test's process."""
    found = WorkerReadings(
        workers=tuple(
            build.sighting(
                worker=build.worker_file(worker=name),
                **{"job": None, "pid": os.getpid(), "container_id": None, **changes},
            )
            for name in ("w0", "w1")
        )
    )
    monkeypatch.setattr(workers, "read", lambda _: found)


CPU_STILL: Final = 'gpuwarden_worker_cpu_idle_seconds{container="w0",worker="w0"}'


@pytest.mark.parametrize(
    "error", [PermissionError("not ours to look at"), ValueError("no such line")], ids=["refused", "not understood"]
)
def test_unreadable_cpu_time_is_nan_and_counted_and_restarts(
    error: Exception, house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("w0").stop()
    look = sampler(house)
    known = [silence(look.sample()).cpu_s for _ in range(2)]

    def refuse(_: int) -> CpuUse:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(processes, "cpu_use", refuse)
        unread = [look.sample(), look.sample()][-1]
    again = look.sample()

    assert known[0] == 0.0
    assert known[1] != 0.0
    assert silence(unread).cpu_s is None
    assert unread.unknown["w0", "cpu", "unreadable"] == 2
    assert f"{CPU_STILL} NaN" in golden.scraped(unread, now=unread.taken)
    assert silence(again).cpu_s == 0.0
    assert f"{CPU_STILL} 0.0" in golden.scraped(again, now=again.taken)


def test_unreadable_worker_is_counted_by_its_container(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_as(monkeypatch, pid=2**22 + 1, container_id=build.DOCKER_ID)
    look = sampler(house, build.container(pid=os.getpid()))

    assert look.sample().unknown["worker-0", "cpu", "unreadable"] == 2


def test_worker_in_another_pid_namespace_is_unknown(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_as(monkeypatch, pid=None)

    snapshot = sampler(house).sample()

    assert silence(snapshot).cpu_s is None
    assert snapshot.unknown == {("w0", "cpu", "pid_unknown"): 1, ("w1", "cpu", "pid_unknown"): 1}


def test_dead_process_has_no_cpu_time_and_no_unknown_values(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", job_id=7).kill()

    snapshot = sampler(house).sample()

    assert silence(snapshot).cpu_s is None
    assert snapshot.unknown == {}


def test_two_workers_of_one_process_share_its_cpu_time(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(pid: int) -> CpuUse:
        asked.append(pid)
        return PROCESS

    monkeypatch.setattr(processes, "cpu_use", answer)
    seen_as(monkeypatch)
    look = sampler(house)

    look.sample()
    last = look.sample()

    assert asked == [os.getpid()] * 2
    assert last.workers is not None
    first_s, second_s = map(last.cpu_still_of, last.workers.workers)
    assert first_s == second_s != 0.0


def test_reused_pid_restarts_the_cpu_idle_time(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_as(monkeypatch)
    look = sampler(house)
    answers = [PROCESS, PROCESS, replace(PROCESS, start_ticks=78)]
    monkeypatch.setattr(processes, "cpu_use", lambda _: answers.pop(0))

    found = [silence(look.sample()).cpu_s for _ in range(3)]

    assert (found[0], found[2]) == (0.0, 0.0)
    assert found[1] != 0.0


@pytest.mark.parametrize("name", ["python3", "a (b) c) 1 2 3", ""])
def test_cpu_time_is_read_with_any_process_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "41").mkdir()
    fields = ["S", *map(str, range(4, 53))]  # the value of each field is its number in proc_pid_stat(5)
    (tmp_path / "41" / "stat").write_text(f"41 ({name}) {' '.join(fields)}\n")

    assert processes.cpu_use(41, proc=tmp_path) == CpuUse(start_ticks=22, used_ticks=14 + 15)


@pytest.mark.parametrize(("state", "uninterruptible"), [("D", True), ("S", False), ("R", False), ("T", False)])
def test_uninterruptible_state_is_read_with_the_cpu_time(state: str, uninterruptible: bool, tmp_path: Path) -> None:
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "stat").write_text(f"41 (x) {' '.join([state, *map(str, range(4, 53))])}\n")

    assert processes.cpu_use(41, proc=tmp_path).uninterruptible is uninterruptible


def test_line_that_is_too_short_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "stat").write_text("41 (x) S 1 2 3\n")

    with pytest.raises(ValueError, match="process 41: stat has 4 fields after the name, expected 20 or more"):
        processes.cpu_use(41, proc=tmp_path)


def test_cpu_time_of_this_process_grows_with_computation() -> None:
    before = processes.cpu_use(os.getpid())

    def more() -> bool:
        sum(range(10**6))
        return processes.cpu_use(os.getpid()).used_ticks > before.used_ticks

    eventually(more)
    assert processes.cpu_use(os.getpid()).start_ticks == before.start_ticks
