"""Workers in systemd services, in directories like those of the kernel and of systemd."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from exporter.model.container import Container, GpuShare
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReading, WorkerReadings
from exporter.sampler import Sampler
from exporter.settings import Settings
from exporter.sources import workers
from exporter.sources.containers.systemd import Units
from testbed import private_systemd as private
from testbed.private_systemd import NoSystemd, private_systemd
from tests.exporter import builders as build
from tests.exporter.sources.containers import test_cgroups
from tests.waiting import eventually

UNIT = "w@a.service"


class Host:
    """A host whose systemd runs some services."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        self.invocations = folder / "units"
        self.invocations.mkdir()
        self.process(1, "/init.scope")

    def process(self, pid: int, group: str, **environment: str) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text(f"0::{group}\n")
        (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in environment.items()))

    def invoke(self, unit: str, invocation: str) -> None:
        link = self.invocations / f"invocation:{unit}"
        link.unlink(missing_ok=True)
        link.symlink_to(invocation)

    def units(self, *patterns: str) -> Units:
        return Units(patterns, proc=self.proc, root=self.root, invocations=self.invocations)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    found = Host(tmp_path)
    found.process(42, f"/system.slice/{UNIT}", NVIDIA_VISIBLE_DEVICES="0")
    found.invoke(UNIT, "abc")
    return found


def sighting(pid: int | None = 42, **changes: object) -> WorkerReading:
    return replace(build.sighting(pid=pid, container_id=None), **changes)  # type: ignore[arg-type]


def placed(units: Units, *seen: WorkerReading) -> list[str | None]:
    return [each.container_id for each in units.place(WorkerReadings(workers=seen)).workers]


@pytest.mark.parametrize(
    ("patterns", "unit"),
    [(("w@*.service",), UNIT), (("x.service", UNIT), UNIT), (("x@*.service",), None), ((), None)],
    ids=["pattern", "name among others", "other name", "no names"],
)
def test_worker_is_in_the_service_that_was_named(host: Host, patterns: tuple[str, ...], unit: str) -> None:
    assert placed(host.units(*patterns), sighting()) == [unit]


def test_worker_in_a_container_or_unreadable_is_in_no_service(host: Host) -> None:
    seen = sighting(container_id="c" * 64), sighting(pid=None), sighting(pid=99)

    assert placed(host.units("*"), *seen) == ["c" * 64, None, None]


def test_service_is_a_container_with_its_invocation(host: Host) -> None:
    found = host.units("*").containers([sighting(container_id=UNIT)])

    assert found == {
        UNIT: Container(kind="systemd", id=UNIT, name=UNIT, incarnation=f"{UNIT}@abc", pid=42, gpu_request=("0",))
    }


def test_service_has_the_gpus_of_all_its_workers(host: Host) -> None:
    host.process(43, f"/system.slice/{UNIT}", NVIDIA_VISIBLE_DEVICES="1,0")
    host.process(44, f"/system.slice/{UNIT}", NVIDIA_VISIBLE_DEVICES="none")
    host.process(45, f"/system.slice/{UNIT}")
    units = host.units("*")

    def gpus(*pids: int) -> tuple[str, ...] | None:
        return units.containers([sighting(pid=pid, container_id=UNIT) for pid in pids])[UNIT].gpu_request

    assert (gpus(42, 43, 44), gpus(44), gpus(44, 42), gpus(42, 45)) == (("0", "1"), None, ("0",), ("all",))


def test_service_unknown_to_systemd_is_not_a_container(host: Host) -> None:
    (host.invocations / f"invocation:{UNIT}").unlink()

    assert host.units("*").containers([sighting(container_id=UNIT)]) == {}


def test_restarted_service_of_a_dead_worker_is_another_incarnation(host: Host) -> None:
    units = host.units("*")
    last = units.containers([sighting(container_id=UNIT)])[UNIT]

    host.invoke(UNIT, "def")
    restarted = units.refresh(last)
    (host.invocations / f"invocation:{UNIT}").unlink()
    forgotten = units.refresh(last)

    assert (restarted.incarnation, restarted.pid) == (f"{UNIT}@def", 0)
    assert (forgotten.incarnation, forgotten.pid) == (f"{UNIT}@abc", 0)


def test_service_of_a_dead_worker_is_remembered(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Sampler(
        host="box-1",
        directory=tmp_path,
        containers={},
        gpus=None,
        thresholds=Thresholds(),
        units=host.units("w@*.service"),
    )
    dead = sighting(alive=False, pid=None)
    rounds = [sighting(), dead, dead]

    seen = []
    for each in rounds:
        monkeypatch.setattr(workers, "read", lambda _, each=each: WorkerReadings(workers=(each,)))
        seen.append(look.sample())
        host.invoke(UNIT, f"life-{len(seen)}")

    alive, first, second = seen
    assert [each.container.incarnation for each in alive.containers] == [f"{UNIT}@abc"]
    assert [each.container.incarnation for each in (*first.ended, *second.ended)] == [
        f"{UNIT}@life-1",
        f"{UNIT}@life-2",
    ]
    assert all(each.workers and each.workers.workers[0].container_id == UNIT for each in seen)
    assert list(second.dead_s.values()) == [0.0]


def test_unreadable_service_is_counted(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host.invocations / f"invocation:{UNIT}").unlink()
    pid = os.getpid()  # its CPU time is readable
    host.process(pid, f"/system.slice/{UNIT}")
    units = host.units("w@*.service")
    look = Sampler(host="box-1", directory=tmp_path, containers={}, gpus=None, thresholds=Thresholds(), units=units)
    monkeypatch.setattr(workers, "read", lambda _: WorkerReadings(workers=(sighting(pid),)))

    snapshot = look.sample()

    assert snapshot.containers == ()
    assert [key[1:] for key in snapshot.unknown] == [("processes", "unreadable")]


@pytest.mark.parametrize("pattern", ["*", "*.service", "w@*", "a/b.service", "--x.service", "w .service"])
def test_empty_or_unlimited_pattern_is_rejected(pattern: str) -> None:
    with pytest.raises(ValidationError, match="names no services"):
        CliApp.run(Settings, cli_args=[f"--systemd-unit={pattern}"])


def test_several_patterns_are_given_as_a_list_or_repeated() -> None:
    for options in (
        ["--systemd-unit=a@*.service,b.service"],
        ["--systemd-unit=a@*.service", "--systemd-unit=b.service"],
    ):
        assert CliApp.run(Settings, cli_args=options).systemd_unit == ("a@*.service", "b.service")


@pytest.fixture(params=[False, True], ids=["version 2", "version 1"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> test_cgroups.Host:
    """A host with an ollama.service of two processes, and a systemd that knows it."""
    found = test_cgroups.Host(tmp_path, version_1=request.param)
    found.process(1, "init.scope")
    found.process(41, OLLAMA, ticks=70)
    found.process(42, OLLAMA, ticks=77, gpus="7")
    (tmp_path / "units").mkdir()
    invoke(tmp_path, "ollama.service", "abc")
    return found


OLLAMA = "system.slice/ollama.service"


def invoke(folder: Path, unit: str, invocation: str) -> None:
    (folder / "units" / f"invocation:{unit}").symlink_to(invocation)


def units_of(kernel: test_cgroups.Host, folder: Path, *patterns: str) -> Units:
    return Units(patterns, proc=kernel.proc, root=kernel.root, invocations=folder / "units")


def test_service_without_a_worker_is_a_container(kernel: test_cgroups.Host, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    gpus = build.gpus(build.gpu(0, build.process(42, 0.4, 6 * 2**30)))
    kernel.process(42, OLLAMA, gpus="GPU-0")
    kernel.process(41, OLLAMA, ticks=70, gpus="GPU-0")

    def look(*patterns: str) -> tuple[list[tuple[str, str]], list[GpuShare], list[int | None]]:
        units = units_of(kernel, tmp_path, *patterns)
        sampler = Sampler(
            host="box-1", directory=tmp_path / "state", containers={}, gpus=lambda: gpus, thresholds=Thresholds(),
            units=units, places=kernel.places(),
        )  # fmt: skip
        snapshot = [sampler.sample() for _ in range(2)][1]
        kinds = [(each.container.kind, each.container.incarnation) for each in snapshot.containers]
        shares = [share for each in snapshot.containers for share in each.shares]
        return kinds, shares, [each.memory_bytes for each in snapshot.unplaced]

    kinds, (share,), unplaced = look("ollama.service")
    assert kinds == [("systemd", "ollama.service@abc")]
    assert (share.gpu, share.utilization_ratio, share.memory_bytes) == ("GPU-0", 0.4, 6 * 2**30)
    assert unplaced == [0]
    assert look() == look("other.service") == ([], [], [6 * 2**30])


def test_service_without_a_worker_has_its_oldest_process(kernel: test_cgroups.Host, tmp_path: Path) -> None:
    units = units_of(kernel, tmp_path, "ollama.service")

    def found() -> tuple[int, tuple[str, ...] | None] | None:
        its = units.containers([]).get("ollama.service")
        return None if its is None else (its.pid, its.gpu_request)

    first = found()
    kernel.process(43, OLLAMA, ticks=60)
    still = found()
    kernel.end(41)
    kernel.end(43)
    second = found()
    kernel.remove(OLLAMA)
    gone = found()
    kernel.process(44, OLLAMA, ticks=99)
    back = found()

    assert (first, still, second, gone, back) == ((41, ("all",)), (41, ("all",)), (42, ("7",)), None, (44, ("all",)))


def test_service_is_found_in_any_slice(kernel: test_cgroups.Host, tmp_path: Path) -> None:
    kernel.process(51, "gpu.slice/gpu-ml.slice/w@1.service")
    units = units_of(kernel, tmp_path, "w@*.service")

    before = units.containers([])
    invoke(tmp_path, "w@1.service", "def")
    found = units.containers([])

    assert before == {}
    assert [(each.id, each.pid, each.incarnation) for each in found.values()] == [
        ("w@1.service", 51, "w@1.service@def")
    ]


def test_other_fields_are_ignored(kernel: test_cgroups.Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.sources.containers.systemd.UNITS_MAX", 2)
    for number, unit in enumerate(("w@1.service", "w@2.service")):
        kernel.process(71 + number, f"system.slice/{unit}")
        invoke(tmp_path, unit, "abc")
        for what in ("log-level-max", "log-extra-fields", "log-rate-limit-burst"):
            (tmp_path / "units" / f"{what}:{unit}").symlink_to("6")

    assert sorted(units_of(kernel, tmp_path, "w@*.service").containers([])) == ["w@1.service", "w@2.service"]


def test_service_that_only_runs_containers_is_not_a_container(kernel: test_cgroups.Host, tmp_path: Path) -> None:
    kernel.process(61, f"{OLLAMA}/libpod-payload-{test_cgroups.ID}")

    assert units_of(kernel, tmp_path, "ollama.service").containers([]) == {}


@pytest.mark.needs_systemd
def test_real_service_without_a_worker_is_a_container_while_it_runs(tmp_path: Path) -> None:
    with private_systemd(tmp_path) as systemd:
        if isinstance(systemd, NoSystemd):
            pytest.skip(systemd.reason)
        enter = [*systemd.enter, "systemctl"]
        systemd.write(
            "w.service", "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/sh -c 'sleep 600 & sleep 600'\n"
        )
        invocations = systemd.root / "run/systemd/units"
        units = Units(("w.service",), root=its_groups(tmp_path / "cgroup"), invocations=invocations)
        before = units.containers([])
        subprocess.run([*enter, "start", "w.service"], check=True, timeout=30)
        found = eventually(lambda: units.containers([]).get("w.service"))
        # systemd names its process "(sh)" until it executes the shell.
        name = Path(f"/proc/{found.pid}/comm")
        eventually(lambda: name.read_text(encoding="ascii") == "sh\n", "its main process is the shell")
        subprocess.run([*enter, "stop", "w.service"], check=True, timeout=30)
        eventually(lambda: not units.containers([]))

    assert before == {}
    assert (found.kind, found.name) == ("systemd", "w.service")


def its_groups(folder: Path) -> Path:
    """The cgroups that this test's systemd sees below its own group."""
    name = f"{private._GROUP}{os.getpid()}"
    hierarchies = private._hierarchies()
    if hierarchies == [private.CGROUPS]:
        return private.CGROUPS / name
    folder.mkdir()
    for hierarchy in hierarchies:
        (folder / hierarchy.name).symlink_to(hierarchy / name)
    return folder
