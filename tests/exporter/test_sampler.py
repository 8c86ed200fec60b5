"""One sample of the host: real workers, real process trees, sources that fail."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import LogCapture

from exporter.evidence import gpu_trackers
from exporter.model.container import ContainerEvidence, GpuShare, RamUse, VramBudget
from exporter.model.gpu import Gpu, GpuReadings
from exporter.model.snapshot import DriverHealth, Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources import processes
from exporter.sources.containers.cgroups import ContainerCgroups
from exporter.sources.containers.poller import Listener, Listing
from exporter.sources.gpu import simulated
from exporter.sources.gpu.drm import clients
from exporter.sources.gpu.drm.gpus import AMD, DrmGpus
from exporter.sources.gpu.nvml.presence import NvidiaHost
from exporter.worker_watch import locate
from gpuwarden import cgroup, procfs
from gpuwarden.errors import GpuwardenError
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.exporter.sources.gpu import gpu_tree
from tests.exporter.sources.gpu.gpu_tree import Tree
from tests.waiting import eventually


class Docker:
    """A listing, or an error instead."""

    def __init__(self, *containers: Any, error: Exception | None = None) -> None:
        self.listing: Any = Listing(containers={each.id: each for each in containers}, taken_s=0.0, duration_s=0.0)
        self.error = error

    def latest(self) -> Listing:
        if self.error:
            raise self.error
        found: Listing = self.listing
        return found


class Driver:
    """Counts questions and returns a given health."""

    def __init__(self, health: DriverHealth | None = None) -> None:
        self.asked = 0
        self._health = health or DriverHealth()

    def ask(self) -> None:
        self.asked += 1

    def health(self) -> DriverHealth:
        return self._health

    def timing(self) -> None:
        """It has no process."""


def sampler(house: Path, **changes: Any) -> Sampler:
    given: dict[str, Any] = {"host": "box-1", "containers": {}, "gpus": None, "thresholds": Thresholds()}
    return Sampler(directory=house, **(given | changes))


def simulate(folder: Path, *gpus: dict[str, Any]) -> Callable[[], GpuReadings]:
    path = folder / "gpus.json"
    path.write_text(json.dumps({"gpus": gpus}))
    return partial(simulated.read, path)


def health(snapshot: Snapshot) -> dict[str, bool]:
    return {each.source: each.success for each in snapshot.sources}


def only(snapshot: Snapshot) -> ContainerEvidence:
    (found,) = snapshot.containers
    return found


def test_worker_without_container_has_its_process_tree(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker("w0", job_id=7)
    busy = {"pid": worker.pid, "utilization_ratio": 0.75, "memory_bytes": 1024}
    gpus = simulate(tmp_path, {"uuid": "GPU-sim-0", "index": 0, "utilization_ratio": 0.75, "processes": [busy]})

    snapshot = sampler(house, gpus=gpus).sample()

    found = only(snapshot)
    assert (found.container.kind, found.container.name, found.container.pid) == ("process", "w0", worker.pid)
    assert (found.gpus, found.gpu_idle_s, found.shares[0].utilization_ratio) == (("GPU-sim-0",), 0.0, 0.75)
    assert found.ram_bytes is not None
    assert found.ram_bytes > build.MIB
    assert found.ram_idle_s == 0.0
    assert snapshot.workers is not None
    assert snapshot.container_of(snapshot.workers.workers[0]) is found
    assert health(snapshot) == {"workers": True, "gpu": True}


def test_durations_grow_between_samples(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    start_worker("w0")
    gpus = simulate(tmp_path, {"uuid": "GPU-sim-0", "index": 0, "utilization_ratio": 0.0, "processes": []})
    look = sampler(house, gpus=gpus)

    first, second = look.sample(), look.sample()

    between_s = second.taken.boottime_s - first.taken.boottime_s
    assert (only(second).gpu_idle_s, only(second).ram_idle_s) == (between_s, between_s)


def test_missing_gpu_source_is_not_an_outage(
    house: Path, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_trackers, "OUTAGE_S", 0.0)
    start_worker("w0")
    fails = partial(simulated.read, tmp_path / "no such file")

    assert only(sampler(house, gpus=fails).sample()).gpu_last_busy_age_s == 0.0
    assert only(sampler(house).sample()).gpu_last_busy_age_s is None


def test_restarted_worker_has_new_durations(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    gpus = simulate(tmp_path, {"uuid": "GPU-sim-0", "index": 0, "utilization_ratio": 0.0, "processes": []})
    look = sampler(house, gpus=gpus)
    first = start_worker("w0")
    before = [look.sample(), look.sample()][-1]
    first.end()
    start_worker("w0")

    after = look.sample()

    assert only(before).gpu_idle_s != 0.0
    assert only(after).gpu_idle_s == only(after).ram_idle_s == 0.0
    assert only(after).container.incarnation != only(before).container.incarnation


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        pytest.param({}, ("GPU-0", "GPU-1"), id="no variable: every GPU"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "1"}, ("GPU-1",), id="CUDA_VISIBLE_DEVICES"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-0"}, ("GPU-0",), id="NVIDIA_VISIBLE_DEVICES"
        ),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, (), id="-1 hides every GPU"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, (), id="empty: no GPU"),
    ],
)
def test_worker_without_container_has_the_gpus_of_its_environment(
    environment: dict[str, str],
    gpus: tuple[str, ...],
    house: Path,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    start_worker("w0", env=environment)

    found = only(sampler(house, gpus=lambda: build.gpus(build.gpu(0), build.gpu(1))).sample())

    assert found.gpus == gpus
    assert (found.gpu_idle_s is None) == (gpus == ())


def test_process_tree_has_children_of_every_thread_and_sums_their_ram(tmp_path: Path) -> None:
    def shape(pid: int, *, pages: int, children: dict[int, str]) -> None:
        for thread, listed in children.items():
            task = tmp_path / str(pid) / "task" / str(thread)
            task.mkdir(parents=True)
            (task / "children").write_text(listed)
        (tmp_path / str(pid) / "statm").write_text(f"{pages * 2} {pages} 1 1 0 1 0\n")

    shape(1, pages=10, children={1: "2 ", 11: "3 4 "})
    shape(2, pages=20, children={2: "", 21: "1 "})
    shape(3, pages=40, children={3: ""})

    assert processes.process_tree(1, proc=tmp_path) == {1, 2, 3, 4}
    assert processes.resident_bytes({1, 2, 3, 4}, proc=tmp_path) == 70 * processes.PAGE_BYTES
    with pytest.raises(OSError, match="no process of the worker can be read"):
        processes.resident_bytes({4}, proc=tmp_path)


# Sources that fail


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError("the driver is gone"), id="system error"),
        pytest.param(simulated.SimulationError("no simulated GPUs"), id="own error"),
        pytest.param(RuntimeError("a defect"), id="defect"),
    ],
)
def test_failing_gpu_source_affects_only_gpus(error: Exception, house: Path, start_worker: StartWorker) -> None:
    start_worker("w0")

    def fail() -> GpuReadings:
        raise error

    snapshot = sampler(house, gpus=fail, containers={"docker": Docker()}).sample()

    assert health(snapshot) == {"workers": True, "gpu": False, "docker": True}
    assert snapshot.gpus is None
    assert only(snapshot).gpu_idle_s is None
    assert only(snapshot).ram_bytes is not None


def test_health_of_a_hanging_driver_is_published(house: Path) -> None:
    def fail() -> GpuReadings:
        raise GpuwardenError("it hangs")

    hanging = DriverHealth(killed=1, abandoned=1, xids={("GPU-0", 119): 1})
    driver = Driver(hanging)
    snapshot = sampler(house, gpus=fail, drivers={"gpu": driver}).sample()

    assert (snapshot.gpus, snapshot.drivers) == (None, {"gpu": hanging})


def test_every_driver_is_asked_before_the_first_answer_is_awaited(house: Path) -> None:
    asked = {"gpu": Driver(), "drm": Driver()}
    waited: list[int] = []

    def read() -> GpuReadings:
        waited.append(sum(each.asked for each in asked.values()))
        return build.gpus()

    snapshot = sampler(house, gpus=read, drm=read, drivers=asked).sample()

    assert waited == [2, 2]
    assert snapshot.drivers == {"gpu": DriverHealth(), "drm": DriverHealth()}


def test_gpu_sources_fail_separately(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0")
    card = build.gpu(0, node="renderD128", uuid="GPU-amd", source="amdgpu")
    answers: dict[str, GpuReadings] = {"gpu": build.gpus(build.gpu(0)), "drm": GpuReadings(source="drm", gpus=(card,))}
    look = sampler(house, gpus=lambda: answers["gpu"], drm=lambda: answers["drm"])

    both = look.sample()
    del answers["gpu"]
    one = look.sample()
    del answers["drm"]
    none = look.sample()

    assert both.gpus == GpuReadings(source="test", gpus=(build.gpu(0), card))
    assert one.gpus == GpuReadings(source="drm", gpus=(card,), failed=("gpu",), nvidia_unread=True)
    assert none.gpus is None
    assert [health(each) for each in (both, one, none)] == [
        {"workers": True, "gpu": True, "drm": True},
        {"workers": True, "gpu": False, "drm": True},
        {"workers": True, "gpu": False, "drm": False},
    ]
    # Without the NVIDIA driver the number of the worker's GPUs is unknown, so it is not idle.
    assert (only(both).gpu_idle_s, only(one).gpu_idle_s) == (0.0, None)


class Amd:
    """A worker on an AMD GPU that was given an idle NVIDIA GPU."""

    def __init__(self, house: Path, tree: Tree, pid: int, **changes: Any) -> None:
        tree.node(1, gpu_id=5, minor=128, unique_id=7)
        tree.gpu(128, "0000:03:00.0", "amdgpu", busy_percent=90, vram=(3, 16))
        tree.computes(pid, vram={5: 4096}, queues={0: 5}, occupied={5: 9})
        tree.opens(pid, {3: ("/dev/dri/renderD128", gpu_tree.amdgpu("0000:03:00.0"))})
        self.tree = tree
        self.pid = pid
        self.hangs = False
        self.source = self.reader()
        self.sampler = sampler(house, gpus=lambda: build.gpus(build.gpu(0)), drm=self._read, **changes)

    def reader(self) -> DrmGpus:
        return DrmGpus(AMD, sys=self.tree.sys, proc=self.tree.proc)

    def _read(self) -> GpuReadings:
        if self.hangs:
            raise OSError("a read hangs")
        return self.source.read()

    def look(self) -> tuple[float | None, tuple[str, ...]] | None:
        """GPU idle time of the container, and its GPUs; `None` if the container is missing."""
        found = self.sampler.sample().containers
        return (found[0].gpu_idle_s, found[0].gpus) if found else None


BOTH = ("GPU-0", "GPU-0000000000000007")


def test_unreadable_gpu_stays_unknown(house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    docker = Docker(build.container(pid=pid, gpu_request=("0",)))
    places = ContainerCgroups()
    amd = Amd(house, Tree(tmp_path / "host"), pid, containers={"docker": docker}, places=places)
    monkeypatch.setattr(places, "read", lambda _: (frozenset({pid}), RamUse(usage_bytes=1)))
    looks = [amd.look()]
    amd.hangs = True
    looks += [amd.look()]

    docker.error = OSError("Docker restarts")
    looks += [amd.look(), amd.look()]
    docker.error = None
    looks += [amd.look(), amd.look()]
    amd.hangs = False
    shutil.rmtree(amd.tree.sys / "class/kfd/kfd/proc" / str(pid))
    gone = amd.look()

    assert looks == [(None, BOTH), (None, BOTH), None, None, (None, BOTH), (None, BOTH)]
    assert gone == (0.0, ("GPU-0",))


def test_only_its_engine_removes_a_container(house: Path) -> None:
    docker, podman = Docker(build.container()), Docker()
    look = sampler(house, containers={"docker": docker, "podman": podman})
    look.sample()
    podman.error = OSError("it is away")
    look.sample()
    kept = len(look._containers._histories)
    docker.listing = Docker().listing
    look.sample()

    assert (kept, len(look._containers._histories)) == (1, 0)


def test_unlisted_worker_keeps_its_gpus(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    amd = Amd(house, Tree(tmp_path / "host"), start_worker("w0", env={"CUDA_VISIBLE_DEVICES": "0"}).pid)
    looks = [amd.look()]
    amd.hangs = True

    house.rename(house.with_name("away"))
    looks += [amd.look()]
    house.with_name("away").rename(house)
    looks += [amd.look()]

    assert looks == [(None, BOTH), None, (None, BOTH)]


@pytest.mark.parametrize("request_", [{"CUDA_VISIBLE_DEVICES": "0"}, {}], ids=["another GPU assigned", "no GPU named"])
def test_worker_on_a_gpu_with_unlisted_processes_is_unknown(
    request_: dict[str, str], house: Path, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    amd = Amd(house, Tree(tmp_path / "host"), start_worker("w0", env=request_).pid)
    looks = [amd.look()]

    shutil.rmtree(amd.tree.sys / "class/kfd/kfd/proc")
    looks += [amd.look()]
    amd.hangs = True
    looks += [amd.look()]
    amd.hangs = False
    (amd.tree.sys / "class/kfd/kfd/proc").mkdir()
    shutil.rmtree(amd.tree.proc / str(amd.pid))
    seen = amd.look()

    assert [look and look[0] for look in looks] == [None] * 3
    assert seen == (0.0, ("GPU-0",))


@pytest.mark.parametrize("request_", [{"CUDA_VISIBLE_DEVICES": "0"}, {}], ids=["another GPU assigned", "no GPU named"])
def test_worker_is_unknown_until_a_new_reader_has_read_its_files(
    request_: dict[str, str], house: Path, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clients, "is_device", lambda _: True)
    tree = Tree(tmp_path / "host")
    amd = Amd(house, tree, start_worker("w0", env=request_).pid)
    shutil.rmtree(tree.sys / "class/kfd/kfd/proc" / str(amd.pid))  # only graphics, no compute
    looks = [amd.look()]

    amd.hangs = True
    looks += [amd.look()]
    amd.hangs, amd.source = False, amd.reader()
    with monkeypatch.context() as patch:
        patch.setattr(clients, "LOOK_S", -1.0)
        looks += [amd.look()]
    found = amd.look()

    assert [look and look[0] for look in looks] == [looks[0] and looks[0][0], None, None]
    assert found is not None
    assert set(BOTH) <= set(found[1])


def test_container_with_a_gpu_missing_from_the_start_is_unknown_and_counted(house: Path) -> None:
    docker = Docker(build.container(gpu_request=("renderD129",)))

    snapshot = sampler(house, containers={"docker": docker}, gpus=lambda: build.gpus(build.gpu(0))).sample()

    assert only(snapshot).gpu_idle_s is None
    assert snapshot.unknown["worker-0", "gpu", "gpu_missing"] == 1


def test_lost_gpu_counts_only_for_containers_found_at_the_start(house: Path) -> None:
    lost = replace(build.gpu(0), utilization_ratio=None, processes=None, lost=True)
    ran = build.container(pid=os.getpid(), gpu_request=("0",))
    docker = Docker(ran, error=GpuwardenError("is being started"))
    look = sampler(house, containers={"docker": docker}, gpus=lambda: build.gpus(lost))
    assert look.sample().containers == ()

    docker.error = None
    look.sample()
    later = replace(ran, id="later", name="later", incarnation="later", pid=os.getppid())
    docker.listing = replace(docker.listing, containers={ran.id: ran, later.id: later})
    look.sample()

    lost_s = {each.container.id: each.gpu_lost_s for each in look.sample().containers}

    assert lost_s.keys() == {ran.id, later.id}
    assert lost_s[ran.id]
    assert lost_s[later.id] is None


@pytest.mark.parametrize("nvidia", [True, False], ids=["NVIDIA driver", "no NVIDIA driver"])
def test_gpu_of_another_vendor_is_separate(
    nvidia: bool, house: Path, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker("w0")
    tree = Tree(tmp_path / "host")
    if nvidia:
        (tree.proc / "driver/nvidia").mkdir(parents=True)
    at_rest = build.gpu(0, node="renderD128", uuid="pci-0000:00:02.0", source="i915")
    docker = Docker(build.container(gpu_request=("all",)))
    look = sampler(
        house,
        containers={"docker": docker},
        gpus=build.gpus,
        drm=lambda: GpuReadings(source="drm", gpus=(at_rest,)),
        nvidia=NvidiaHost(sys=tree.sys, proc=tree.proc),
    )

    found = {each.container.name: (each.gpu_idle_s, each.gpus) for each in look.sample().containers}

    assert found == {"w0": (None, ()) if nvidia else (0.0, (at_rest.uuid,)), "worker-0": (None, ())}


def test_missing_gpu_is_known_by_its_node(house: Path) -> None:
    cards = [build.gpu(0, node="renderD128", uuid="GPU-amd"), build.gpu(1, node="renderD129", uuid="pci-0000:00:02.0")]
    look = sampler(house, drm=lambda: build.gpus(*cards))
    first = look.sample().gpus
    away = cards.pop(0)
    second = look.sample().gpus
    cards.append(away)
    third = look.sample().gpus

    assert [each and each.gone for each in (first, second, third)] == [{}, {"renderD128": "GPU-amd"}, {}]


def test_failing_worker_source_keeps_containers_and_gpus(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0")
    docker = Docker(build.container(pid=worker.pid))

    snapshot = sampler(house / "nowhere", containers={"docker": docker}, gpus=lambda: build.gpus(build.gpu(0))).sample()

    assert health(snapshot) == {"workers": False, "gpu": True, "docker": True}
    assert snapshot.workers is None
    assert only(snapshot).container.name == "worker-0"


def test_silent_engine_affects_only_its_containers(house: Path) -> None:
    docker = Docker(build.container())
    podman = Docker(build.container(kind="podman", id="b" * 64, name="p", incarnation="p@1"))
    look = sampler(house, containers={"docker": docker, "podman": podman})

    both = look.sample()
    docker.error = OSError("it hangs")
    one = look.sample()

    assert {each.container.kind for each in both.containers} == {"docker", "podman"}
    assert [each.container.kind for each in one.containers] == ["podman"]
    assert health(one) == {"workers": True, "docker": False, "podman": True}


@pytest.mark.parametrize(
    ("docker", "podman", "placed"),
    [
        pytest.param("down", "none", "docker", id="container of the first engine"),
        pytest.param("none", "down", "podman", id="container of the second engine"),
        pytest.param("down", "down", None, id="containers of both engines"),
        pytest.param("down", "silent", None, id="second engine silent"),
        pytest.param("down", "pods", "docker", id="silent pods have no folders"),
    ],
)
def test_dead_worker_never_seen_alive_was_where_its_folder_is(docker: str, podman: str, placed: str | None) -> None:
    def listing(kind: str, says: str) -> Listing | None:
        held = build.container(kind=kind, id=kind, folders=("f0",), pid=0)
        down = {kind: held} if says == "down" else {}
        return None if says == "silent" else Listing(containers={}, down=down, taken_s=0.0, duration_s=0.0)

    other = {"kubernetes": None} if podman == "pods" else {"podman": listing("podman", podman)}

    found = locate(None, "f0", {"docker": listing("docker", docker), **other})

    assert (found and found.kind) == placed


def test_budgeted_containers_without_a_ranking_are_named(house: Path) -> None:
    budgeted = VramBudget(recyclable=True, budget_bytes=2**30)
    one, other = (
        build.container(kind=kind, id=kind, incarnation=f"{kind}@1", name="same", vram_budget=budgeted)
        for kind in ("docker", "podman")
    )
    docker, podman = Docker(one), Docker(other, build.container(kind="podman", id="p", name="same"))
    docker.listing = replace(docker.listing, unseen=("stuck",))
    look = sampler(house, containers={"docker": docker, "podman": podman})

    assert look.sample().unseen == ("same", "stuck")
    podman.listing = replace(podman.listing, containers={})
    docker.listing = replace(docker.listing, unseen=())
    assert look.sample().unseen == ()


UNPLACED: dict[str, Callable[["Docker", Path], object]] = {
    "engine silent": lambda docker, _: setattr(docker, "error", OSError("Docker does not answer")),
    "one container not inspected": lambda docker, _: setattr(
        docker, "listing", replace(docker.listing, containers={}, whole=False)
    ),
    "processes unknown": lambda _, group: (group / "cgroup.procs").write_text(""),
    "duplicate name": lambda docker, _: docker.listing.containers.update(
        two=build.container(id="two", incarnation="two@1")
    ),
    "workers unlisted": lambda _, group: (group.parent / "gpuwarden").rename(group.parent / "elsewhere"),
}


@pytest.mark.parametrize("spoil", UNPLACED.values(), ids=UNPLACED)
def test_use_outside_requires_every_container(spoil: Callable[["Docker", Path], object], tmp_path: Path) -> None:
    group, folder = tmp_path / "group", tmp_path / "gpuwarden"
    group.mkdir()
    folder.mkdir()
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    docker = Docker(build.container(pid=os.getpid(), group=str(group)))
    gpu = build.gpu(0, build.process(os.getpid(), 0.5, 9), build.process(2**22 + 1, 0.25, 7))
    look = sampler(folder, containers={"docker": docker}, gpus=lambda: build.gpus(gpu))
    first = look.sample()

    spoil(docker, group)

    assert first.unplaced == (GpuShare(gpu="GPU-0", utilization_ratio=0.25, memory_bytes=7),)
    assert look.sample().unplaced == ()


def test_memory_of_an_ended_process_returns_even_if_the_driver_still_lists_it(house: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    gpu = build.gpu(0, build.process(process.pid, 0.0, 7), build.process(os.getpid(), 0.0, 9))
    look = sampler(house, gpus=lambda: build.gpus(gpu), thresholds=Thresholds(vram_return_s=3.0))
    try:
        beginning = look.sample()
        first = beginning.reclaiming_bytes
        eventually(lambda: look.sample().reclaiming_bytes == {"GPU-0": 0}, "nothing returns")
    finally:
        process.kill()
    eventually(lambda: look.sample().reclaiming_bytes == {"GPU-0": 7}, "it is a zombie")
    process.wait()

    assert first == {}
    assert beginning.gpu_totals["GPU-0"].unknown == {("memory_reclaiming_bytes", "not_yet"): 1}
    assert look.sample().reclaiming_bytes == {"GPU-0": 7}
    eventually(lambda: look.sample().reclaiming_bytes == {"GPU-0": 0}, "the bound has passed")


def test_unreadable_process_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "7" / "stat").mkdir(parents=True)

    assert not processes.has_ended(7, proc=tmp_path)
    assert processes.has_ended(8, proc=tmp_path)


LEADERLESS: Final = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another thread runs."""


def test_process_with_a_running_thread_and_an_ended_main_thread_has_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE) as leaderless:
        try:
            leaderless.stdout.read(1)  # type: ignore[union-attr]
            eventually(lambda: procfs.stat(leaderless.pid)[0] == "Z", "its main thread has ended")

            assert not processes.has_ended(leaderless.pid), "it still holds its memory, also that of a GPU"
        finally:
            leaderless.kill()
        eventually(lambda: processes.has_ended(leaderless.pid), "it is a zombie")


def test_container_that_kubernetes_lists_too_belongs_to_its_pod(house: Path) -> None:
    ranked = build.container(vram_budget=VramBudget(budget_bytes=1, recyclable=True))
    pods = replace(ranked, kind="kubernetes", name="ml/llm-0/server", incarnation="uid@1", vram_budget=VramBudget())
    look = sampler(house, containers={"docker": Docker(ranked), "kubernetes": Docker(pods)})

    snapshot = look.sample()

    assert ([each.container.name for each in snapshot.containers], snapshot.unseen) == (["ml/llm-0/server"], ())


def test_failed_source_is_logged_once_and_again_when_it_recovers(house: Path, logged: LogCapture) -> None:
    docker = Docker(error=OSError("it hangs"))
    look = sampler(house, containers={"docker": docker})

    look.sample()
    look.sample()
    docker.error = None
    look.sample()

    assert [(each["event"], each.get("reason")) for each in logged.entries] == [
        ("source failed", "it hangs"),
        ("source answers again", None),
    ]


def test_last_success_of_a_source_stays_after_a_failure(house: Path) -> None:
    docker = Docker(error=OSError("it hangs"))
    look = sampler(house, containers={"docker": docker})

    def answered() -> tuple[float | None, str | None]:
        (found,) = [each for each in look.sample().sources if each.source == "docker"]
        return found.succeeded_unix_s, found.message

    assert answered() == (None, "it hangs")
    docker.error = None
    before = time.time()
    docker.listing = replace(docker.listing, taken_s=time.monotonic())
    at, message = answered()
    docker.error = OSError("it hangs again")

    assert at is not None
    assert (before <= at <= time.time(), message) == (True, None)
    assert answered() == (at, "it hangs again")


def test_duration_of_an_engine_is_that_of_its_listing(house: Path) -> None:
    source = Docker()
    taken_s = time.monotonic() - 6.5
    source.listing = Listing(containers={}, taken_s=taken_s, duration_s=0.25)
    look = sampler(house, containers={"docker": source})
    now_unix_s = time.time()

    first, again = (of_source(look.sample(), "docker") for _ in range(2))
    source.listing = Listing(containers={}, taken_s=taken_s + 6, duration_s=0.5)
    third = of_source(look.sample(), "docker")

    assert [each.success for each in (first, again, third)] == [True] * 3
    assert [each.duration_s for each in (first, again, third)] == [0.25, 0.25, 0.5]
    assert first.succeeded_unix_s == pytest.approx(now_unix_s - 6.5, abs=0.5)
    assert again.succeeded_unix_s == first.succeeded_unix_s
    assert third.succeeded_unix_s == pytest.approx(now_unix_s - 0.5, abs=0.5)


class Engine(Listener):
    """Lists once, and then not until it is allowed."""

    def __init__(self) -> None:
        super().__init__("engine", failure_prefix="the engine does not answer", refresh_s=0.01, fresh_s=0.1)
        self.answers = threading.Event()
        self.listed = False

    def list_now(self) -> Listing:
        if self.listed:
            assert self.answers.wait(60)
            raise OSError("it refuses")
        self.listed = True
        return Listing(containers={}, taken_s=time.monotonic(), duration_s=0.001)


def test_duration_of_a_silent_engine_is_the_time_since_its_question(house: Path) -> None:
    source = Engine()
    look = sampler(house, containers={"docker": source})
    source.start()
    try:
        listed = of_source(look.sample(), "docker")
        hangs = eventually(lambda: found if (found := of_source(look.sample(), "docker")).duration_s > 0.2 else None)
        source.answers.set()
        refused = eventually(
            lambda: found if (found := of_source(look.sample(), "docker")).duration_s < hangs.duration_s else None
        )
    finally:
        source.answers.set()
        source.close()

    assert (listed.success, listed.duration_s) == (True, 0.001)
    assert (hangs.success, hangs.succeeded_unix_s) == (False, listed.succeeded_unix_s)
    assert "no answer since the last one" in (hangs.message or "")
    assert "it refuses" in (refused.message or "")


def of_source(snapshot: Snapshot, source: str) -> SourceHealth:
    return next(each for each in snapshot.sources if each.source == source)


def test_duration_of_a_sample_is_published(house: Path) -> None:
    slow = sampler(house, gpus=lambda: time.sleep(0.05) or build.gpus())  # type: ignore[func-returns-value]
    began_s = time.monotonic()

    took_s = slow.sample().took_s

    assert took_s is not None
    assert 0.05 <= took_s <= time.monotonic() - began_s


def test_thread_survives_a_defect_and_keeps_the_old_snapshot(house: Path, logged: LogCapture) -> None:
    docker = Docker()
    whole = docker.listing
    docker.listing = replace(whole, containers=None)
    look = sampler(house, containers={"docker": docker}, interval_s=0.01)
    look.start()
    eventually(lambda: any(each["event"] == "sample failed" for each in logged.entries))
    assert look.latest() is None

    docker.listing = whole
    first = eventually(look.latest)
    eventually(lambda: look.latest() is not first)
    look.close()

    last = look.latest()
    time.sleep(0.05)  # five intervals in which a live thread would take a sample
    assert look.latest() is last


# Unknown values are counted


def test_unknown_values_are_counted_while_the_container_runs(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0")
    lost = Gpu(
        uuid="GPU-0", index=0, name="", utilization_ratio=None, memory_used_bytes=None, memory_size_bytes=None,
        processes=None,
    )  # fmt: skip
    look = sampler(house, gpus=lambda: build.gpus(lost))
    assert look.sample().unknown == {("w0", "gpu", "not_listed"): 1}
    assert look.sample().unknown == {("w0", "gpu", "not_listed"): 2}

    worker.end()

    assert look.sample().unknown == {}


def test_container_without_a_gpu_has_no_unknown_values(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", env={"NVIDIA_VISIBLE_DEVICES": "none"})

    assert sampler(house).sample().unknown == {}


def test_container_without_its_first_process_is_unknown(house: Path) -> None:
    gone = build.container(pid=2**22 + 1)

    snapshot = sampler(house, containers={"docker": Docker(gone)}, gpus=lambda: build.gpus(build.gpu(0))).sample()

    found = only(snapshot)
    assert (found.ram_bytes, found.ram_idle_s, found.gpu_idle_s) == (None, None, None)
    assert snapshot.unknown == {("worker-0", "gpu", "processes_unknown"): 1, ("worker-0", "ram", "unreadable"): 1}


def test_ram_requires_a_controller(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start_worker("w0")
    group = house / "group"
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{worker.pid}\n")
    monkeypatch.setattr(cgroup, "directory", lambda *_, **__: group)
    monkeypatch.setattr(cgroup, "memory_directory", lambda *_, **__: None)
    docker = Docker(build.container(name="w0", pid=worker.pid))

    snapshot = sampler(house, containers={"docker": docker}, gpus=lambda: build.gpus(build.gpu(0))).sample()

    assert (only(snapshot).gpu_idle_s, only(snapshot).ram_bytes) == (0.0, None)
    assert snapshot.unknown["w0", "ram", "no_controller"] == 1


def test_removed_cgroup_is_unknown(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "directory", lambda *_, **__: house / "gone")
    docker = Docker(build.container(name="w0", pid=start_worker("w0").pid))

    snapshot = sampler(house, containers={"docker": docker}, gpus=lambda: build.gpus(build.gpu(0))).sample()

    assert only(snapshot).gpu_idle_s is None
    assert snapshot.unknown["w0", "gpu", "processes_unknown"] == 1


def test_second_container_with_one_name_is_counted(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0")
    docker = Docker(build.container(name="w0", pid=worker.pid, gpu_request=None))

    snapshot = sampler(house, containers={"docker": docker}).sample()

    assert only(snapshot).container.kind == "docker"
    assert snapshot.unknown["w0", "processes", "duplicate_name"] == 1


def test_unreadable_worker_is_counted(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not ours to look at")

    monkeypatch.setattr(processes, "container", refuse)
    start_worker("w0")

    snapshot = sampler(house, gpus=lambda: build.gpus(build.gpu(0))).sample()

    assert snapshot.containers == ()
    assert snapshot.unknown == {("w0", "processes", "unreadable"): 1}
    assert snapshot.unplaced == ()
