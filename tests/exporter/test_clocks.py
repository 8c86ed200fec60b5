"""Clock changes and suspended machines trigger no condition; a whole observed silence does (A2, A14)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import exporter.sampler
from exporter.http import evidence
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from gpuwarden import state_file
from gpuwarden.evidence import WorkerFacts
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter import golden
from tests.exporter.conftest import StartWorker, Worker

SLEEP_S = 600
STEPS = pytest.mark.parametrize("step_s", [600.0, -600.0], ids=["forward", "back"])


class Machine:
    """A host with clocks that the test sets, a real sampler and real state files.

    Its worker is a real process which holds its lock and is stopped. It uses no CPU time and writes no file; the test
    writes its files. Its GPU is idle.
    """

    def __init__(self, house: Path, worker: Worker) -> None:
        self._worker = worker
        self._boottime_s = 50_000.0
        self._set_by_s = 0.0
        thresholds = Thresholds()
        self._sampler = Sampler(
            host="box-1", directory=house, containers={}, gpus=lambda: build.gpus(build.gpu(0)), thresholds=thresholds
        )

    def stamp(self) -> Stamp:
        now = build.ago(0, now_s=self._boottime_s)
        return replace(now, unix_s=now.unix_s + self._set_by_s)

    def set_wall_clock(self, step_s: float) -> None:
        self._set_by_s += step_s

    def sleep(self, seconds: float) -> None:
        """Suspend and resume: CLOCK_BOOTTIME advances without a sample."""
        self._boottime_s += seconds

    def show_life(self) -> None:
        """Heartbeat and step beat, now."""
        now, incarnation = self.stamp(), self._worker.incarnation
        worker = build.worker_file(incarnation=incarnation, started=now, heartbeat=now, loop=now)
        job = build.job_file(incarnation=incarnation, started=now, phase_started=now, step_beat=now)
        (self._worker.folder / "w0.worker.json").write_text(state_file.render(worker))
        (self._worker.folder / "w0.job.json").write_text(state_file.render(job))

    def look(self) -> Snapshot:
        return self._sampler.sample()

    def watch(self, seconds: int, *, alive: bool = False) -> None:
        """One sample per second, each after a heartbeat and a step beat if `alive`."""
        for _ in range(seconds):
            self._boottime_s += 1.0
            if alive:
                self.show_life()
            self.look()

    def facts(self) -> WorkerFacts:
        """The evidence for a remediator, without the size of the RAM."""
        found = evidence.worker_evidence("w0", self.look(), now=self.stamp())
        assert found is not None
        return replace(found, ram_bytes=None)

    def conditions(self) -> set[str]:
        """The conditions that the evidence meets."""
        found = self.facts()
        assert found.job_id is not None
        assert found.alive
        stall = (found.step_beat_age_s, found.gpu_idle_s, found.ram_idle_s)
        dead = (found.heartbeat_age_s, found.cpu_idle_s)
        return {
            name
            for name, silences, allowed_s in (
                ("stall", stall, found.stall_timeout_s), ("dead_worker", dead, found.dead_after_s)
            )
            if allowed_s is not None and all(each is not None and each >= allowed_s for each in silences)
        }  # fmt: skip


@pytest.fixture
def machine(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    worker = start_worker("w0", job_id=7)
    worker.stop()
    found = Machine(house, worker)
    monkeypatch.setattr(exporter.sampler, "clock", SimpleNamespace(stamp=found.stamp))
    found.show_life()
    found.look()
    return found


def test_whole_silence_meets_the_conditions(machine: Machine) -> None:
    """The control of every test below."""
    machine.watch(29)
    assert machine.conditions() == set()
    machine.watch(1)
    assert machine.conditions() == {"dead_worker"}
    machine.watch(89)
    assert machine.conditions() == {"dead_worker"}
    machine.watch(1)
    assert machine.conditions() == {"dead_worker", "stall"}


# Wall clock changes


@STEPS
def test_wall_clock_change_does_not_change_ages_and_durations(machine: Machine, step_s: float) -> None:
    machine.watch(20)
    before = machine.facts()

    machine.set_wall_clock(step_s)

    assert machine.facts() == before
    assert (before.heartbeat_age_s, before.step_beat_age_s, before.elapsed_s) == (20.0, 20.0, 20.0)
    assert (before.cpu_idle_s, before.gpu_idle_s, before.ram_idle_s) == (20.0, 20.0, 20.0)


@STEPS
def test_step_beat_after_a_wall_clock_change_is_recent(machine: Machine, step_s: float) -> None:
    machine.watch(200)
    machine.set_wall_clock(step_s)

    machine.show_life()

    found = machine.facts()
    assert (found.heartbeat_age_s, found.step_beat_age_s, found.elapsed_s) == (0.0, 0.0, 0.0)
    assert machine.conditions() == set()


@STEPS
def test_wall_clock_change_does_not_change_a_silence(machine: Machine, step_s: float) -> None:
    machine.watch(15)
    machine.set_wall_clock(step_s)
    machine.watch(14)
    assert machine.conditions() == set()

    machine.watch(1)
    assert machine.conditions() == {"dead_worker"}
    machine.watch(90)
    assert machine.conditions() == {"dead_worker", "stall"}


@STEPS
def test_wall_clock_change_affects_only_published_unix_times(step_s: float) -> None:
    def scraped(set_by_s: float) -> list[str]:
        def at(age_s: float) -> Stamp:
            found = build.ago(age_s)
            return replace(found, unix_s=found.unix_s + set_by_s)

        worker = build.worker_file(started=at(900), heartbeat=at(40), loop=at(300))
        job = build.job_file(started=at(300), phase_started=at(200), step_beat=at(130))
        return golden.scraped(build.snapshot(build.sighting(worker=worker, job=job))).splitlines()

    changed = {old.partition("{")[0] for old, new in zip(scraped(0.0), scraped(step_s), strict=True) if old != new}

    assert changed == {"gpuwarden_worker_heartbeat_timestamp_seconds", "gpuwarden_job_step_beat_timestamp_seconds"}


# Suspension


def test_resumed_machine_meets_no_condition_at_once(machine: Machine) -> None:
    machine.watch(200, alive=True)
    machine.sleep(SLEEP_S)

    found = machine.facts()

    assert (found.heartbeat_age_s, found.step_beat_age_s) == (SLEEP_S, SLEEP_S)
    assert (found.cpu_idle_s, found.gpu_idle_s, found.ram_idle_s) == (0.0, 0.0, 0.0)
    assert machine.conditions() == set()


def test_living_worker_meets_no_condition_after_a_suspension(machine: Machine) -> None:
    machine.watch(200, alive=True)
    machine.sleep(SLEEP_S)
    machine.watch(9)  # a heartbeat comes every 10 s
    assert machine.conditions() == set()

    machine.watch(200, alive=True)
    assert machine.conditions() == set()


def test_whole_silence_after_a_suspension_meets_the_conditions(machine: Machine) -> None:
    machine.watch(200, alive=True)
    machine.sleep(SLEEP_S)
    machine.look()

    machine.watch(29)
    assert machine.conditions() == set()
    machine.watch(1)
    assert machine.conditions() == {"dead_worker"}
    machine.watch(90)
    assert machine.conditions() == {"dead_worker", "stall"}


def test_suspension_restarts_a_silence(machine: Machine) -> None:
    machine.watch(29)
    machine.sleep(SLEEP_S)
    machine.watch(30)
    assert machine.conditions() == set()

    machine.watch(1)
    assert machine.conditions() == {"dead_worker"}


@STEPS
def test_wall_clock_change_at_resume_meets_no_condition(machine: Machine, step_s: float) -> None:
    machine.watch(200, alive=True)
    machine.sleep(SLEEP_S)
    machine.set_wall_clock(step_s)

    assert machine.conditions() == set()
