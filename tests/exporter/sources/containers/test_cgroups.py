"""Containers in directories like those of the kernel: their cgroups, and containers which no engine lists."""

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest

from exporter.http import evidence
from exporter.model.container import Container, ContainerEvidence
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReadings
from exporter.sampler import Sampler
from exporter.sources import workers
from exporter.sources.containers.cgroups import ContainerCgroups, UnlistedContainers
from exporter.sources.containers.docker import EngineContainers
from exporter.sources.containers.poller import Listing
from gpuwarden import cgroup, clock
from testbed.docker_engine import Engine
from testbed.worker_image import worker_image
from tests.exporter import builders as build
from tests.waiting import eventually

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
POD = "kubepods.slice/kubepods-pod1.slice"


class Host:
    """A host with cgroup version 2, or with the memory controller of version 1, and its processes."""

    def __init__(self, folder: Path, *, version_1: bool = False) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        self.version_2 = not version_1
        self.top = self.root / "memory" if version_1 else self.root
        self.line = "4:memory:/{}" if version_1 else "0::/{}"
        self.usage = "memory.usage_in_bytes" if version_1 else "memory.current"
        self.where: dict[int, str] = {}

    def process(self, pid: int, group: str, *, ticks: int = 77, gpus: str | None = None) -> None:
        """Start a process in a group, move it there, or replace it."""
        if pid in self.where:
            self.end(pid)
        self.where[pid] = group
        folder, place = self.proc / str(pid), self.top / group
        for each in (folder, place):
            each.mkdir(parents=True, exist_ok=True)
        for above in place.parents:
            if above.is_relative_to(self.top) and not (above / "cgroup.procs").exists():
                (above / "cgroup.procs").write_text("")
        (folder / "cgroup").write_text(self.line.format(group) + "\n")
        (folder / "stat").write_text(f"{pid} (x) S" + " 0" * 18 + f" {ticks} 0 0\n")
        (folder / "environ").write_text("" if gpus is None else f"NVIDIA_VISIBLE_DEVICES={gpus}\0")
        (place / self.usage).write_text("1000\n")
        (place / "memory.stat").write_text("")
        self._list(place)

    def end(self, pid: int) -> None:
        place = self.top / self.where.pop(pid)
        shutil.rmtree(self.proc / str(pid))
        self._list(place)

    def make_zombie(self, pid: int) -> None:
        """End a process that is not reaped. Version 1 shows it in the root group."""
        place = self.top / self.where.pop(pid)
        if not self.version_2:
            (self.proc / str(pid) / "cgroup").write_text(self.line.format("") + "\n")
        (self.proc / str(pid) / "stat").write_text(f"{pid} (x) Z" + " 0" * 18 + " 77 0 0\n")
        self._list(place)

    def remove(self, group: str) -> None:
        """End all processes of a group and remove it."""
        for pid in [pid for pid, where in self.where.items() if where == group]:
            self.end(pid)
        shutil.rmtree(self.top / group)

    def _list(self, place: Path) -> None:
        pids = [pid for pid, where in self.where.items() if self.top / where == place]
        (place / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        if self.version_2:
            (place / "cgroup.controllers").write_text("memory\n")

    def places(self) -> ContainerCgroups:
        return ContainerCgroups(proc=self.proc, root=self.root)

    def unlisted(self, own: str | None = None) -> UnlistedContainers:
        return UnlistedContainers(own, proc=self.proc, root=self.root)


@pytest.fixture(params=[False, True], ids=["version 2", "version 1"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, version_1=request.param)


def scope(full_id: str = ID, by: str = "cri-containerd") -> str:
    return f"{POD}/{by}-{full_id}.scope"


def listing(*ids: str, containers: dict[str, Container] | None = None) -> Listing:
    """What an engine lists now."""
    return Listing(containers=containers or {}, taken_s=time.monotonic(), duration_s=0.0, ids=frozenset(ids))


def container(pid: int = 41, full_id: str = ID, **changes: object) -> Container:
    return build.container(id=full_id, incarnation=f"{full_id}@1", pid=pid, **changes)


def processes_in(places: ContainerCgroups, place: Container) -> set[int] | None:
    pids, _ = places.read(place)
    return None if pids is None else set(pids)


# Frozen


def freeze(host: Host, content: str, *, full_id: str = ID, below: str = "") -> None:
    """Write the state of the freezer: `FROZEN` or another state of version 1, a line of version 2."""
    place = host.root / (below if host.version_2 else "freezer") / scope(full_id)
    place.mkdir(parents=True, exist_ok=True)
    (place / ("cgroup.events" if host.version_2 else "freezer.state")).write_text(content)
    if not host.version_2:
        (host.proc / "41" / "cgroup").write_text(f"7:freezer,misc:/{scope()}\n4:memory:/{scope()}\n")


FROZEN = {True: "populated 1\nfrozen 1\n", False: "FROZEN\n"}


def test_frozen_container_has_the_time_of_the_reading(host: Host) -> None:
    host.process(41, scope())
    freeze(host, FROZEN[host.version_2])
    before_s = clock.boottime_s()

    frozen_s = host.places().frozen_s(container())

    assert frozen_s is not None
    assert before_s <= frozen_s <= clock.boottime_s()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({True: "populated 1\nfrozen 0\n", False: "THAWED\n"}, id="not frozen"),
        pytest.param({True: "populated 1\nfrozen 10\n", False: "FREEZING\n"}, id="partly frozen"),
        pytest.param({True: "", False: ""}, id="empty file"),
    ],
)
def test_container_without_a_frozen_state_is_not_frozen(host: Host, content: dict[bool, str]) -> None:
    host.process(41, scope())
    freeze(host, content[host.version_2])

    assert host.places().frozen_s(container()) is None


def test_container_without_group_or_process_is_not_frozen(host: Host) -> None:
    host.process(41, scope())
    without_file = host.places().frozen_s(container())

    assert (without_file, host.places().frozen_s(container(pid=99))) == (None, None)


def test_frozen_neighbour_does_not_count(host: Host) -> None:
    host.process(41, scope())
    host.process(51, scope(OTHER))
    freeze(host, FROZEN[host.version_2], full_id=OTHER)

    assert host.places().frozen_s(container()) is None


def test_hybrid_host_may_use_either_version(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.process(41, scope())
    freeze(host, FROZEN[True], below="unified")

    assert host.places().frozen_s(container()) is not None


def test_slow_reading_does_not_date_a_frozen_container(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.process(41, scope())
    freeze(host, FROZEN[host.version_2])
    times_s = iter([100.0, 100.1, 200.0, 200.2])
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: next(times_s))

    assert [host.places().frozen_s(container()) for _ in range(2)] == [pytest.approx(100.0), None]


# Cgroup of a container


def test_container_is_located_once_and_read_each_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    host.process(42, scope())
    monkeypatch.setattr(cgroup, "place", lambda *_, **__: pytest.fail("it was searched again"))

    pids, ram = places.read(container())

    assert (set(pids or ()), ram.usage_bytes) == ({41, 42}, 1000)


def test_moved_process_is_in_its_new_container_at_the_next_sample(host: Host) -> None:
    for pid, full_id in ((41, ID), (42, ID), (51, OTHER)):
        host.process(pid, scope(full_id))
    places = host.places()
    before = [processes_in(places, each) for each in (container(), container(51, OTHER))]
    host.process(42, scope(OTHER))

    after = [processes_in(places, each) for each in (container(), container(51, OTHER))]

    assert (before, after) == ([{41, 42}, {51}], [{41}, {42, 51}])


def test_first_process_of_a_container_may_end_first(host: Host) -> None:
    host.process(41, scope())
    host.process(42, scope())
    places = host.places()
    places.read(container())
    host.end(41)

    assert processes_in(places, container()) == {42}


@pytest.mark.parametrize("seen_before", [True, False])
def test_container_whose_only_process_is_a_zombie_has_no_live_process(host: Host, seen_before: bool) -> None:
    host.process(41, scope())
    places = host.places()
    if seen_before:
        places.read(container())
    host.make_zombie(41)

    found = [places.read(container()) for _ in range(2)]

    assert [(pids, ram.usage_bytes) for pids, ram in found] == [(frozenset(), 1000)] * 2


def test_empty_group_of_a_live_process_is_unknown(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    (host.top / scope() / "cgroup.procs").write_text("")

    assert processes_in(places, container()) is None


def test_reused_pid_does_not_locate_a_container(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    host.remove(scope())
    host.process(41, scope(OTHER), ticks=99)

    pids, ram = places.read(container())

    assert (pids, ram.usage_bytes) == (None, None)


def test_restarted_container_is_located_again(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    host.remove(scope())
    gone = places.read(container())
    host.process(41, scope())

    assert (gone[0], gone[1].unknown is not None) == (None, True)
    assert processes_in(places, container()) == {41}


def test_container_is_located_after_its_process_joins_its_group(host: Host) -> None:
    host.process(41, "system.slice/containerd.service")
    places = host.places()
    before = processes_in(places, container())
    host.process(41, scope())

    assert (before, processes_in(places, container())) == (None, {41})


def test_open_files_return_current_content(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    before = [places.read(container()) for _ in range(3)][-1]
    host.process(42, scope())
    (host.top / scope() / host.usage).write_text("3000\n")
    (host.top / scope() / "memory.stat").write_text("anon 300\ntotal_rss 300\n")

    after = places.read(container())

    assert (before[0], before[1].usage_bytes, before[1].anon_bytes) == (frozenset({41}), 1000, None)
    assert (after[0], after[1].usage_bytes, after[1].anon_bytes) == (frozenset({41, 42}), 3000, 300)


def test_memory_parts_are_read_if_usage_changed_and_at_intervals(host: Host) -> None:
    host.process(41, scope())
    files = {each: host.top / scope() / each for each in (host.usage, "memory.stat")}
    files["memory.stat"].write_text("anon 1\ntotal_rss 1\n")
    places = host.places()

    def anon(said: int, usage: int) -> int | None:
        files["memory.stat"].write_text(f"anon {said}\ntotal_rss {said}\n")
        files[host.usage].write_text(f"{usage}\n")
        return places.read(container())[1].anon_bytes

    first = anon(1, 1000)
    same = [anon(2, 1000) for _ in range(cgroup.PARTS_READS)]

    assert (first, same) == (1, [1] * (cgroup.PARTS_READS - 1) + [2])
    assert anon(3, 1001) == 3
    assert anon(4, 1001) == 3


def test_recreated_group_is_read_instead_of_its_open_files(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    host.remove(scope())  # its open files keep their content
    host.process(42, scope())
    (host.top / scope() / host.usage).write_text("3000\n")
    moved = replace(container(), pid=42)

    pids, ram = places.read(moved)

    assert (pids, ram.usage_bytes) == (frozenset({42}), 3000)


def test_new_child_group_is_read(host: Host) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    host.process(42, f"{scope()}/inside")

    assert processes_in(places, container()) == {41, 42}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "with child groups"])
def test_renamed_group_lists_only_its_own_processes(host: Host, nested: bool) -> None:
    below = "/inside" if nested else ""
    host.process(41, scope())
    host.process(42, scope() + below)
    group = cgroup.Group(host.top / scope())
    before = group.processes()
    (host.top / scope()).rename(host.top / POD / "old")
    host.where.clear()
    host.process(51, scope())
    host.process(52, scope() + below)
    there = cgroup.processes(host.top / scope())

    assert before == group.processes() == {41, 42}
    assert there == {51, 52}


def test_removed_group_with_child_groups_is_gone_even_if_replaced(host: Host) -> None:
    host.process(41, scope())
    host.process(42, f"{scope()}/inside")
    group = cgroup.Group(host.top / scope())
    before = group.processes()
    host.remove(f"{scope()}/inside")
    host.remove(scope())
    host.process(51, scope())
    host.process(52, f"{scope()}/inside")

    assert before == {41, 42}
    with pytest.raises(FileNotFoundError):
        group.processes()


def test_number_of_open_files_is_bounded_and_removed_containers_have_none(host: Host) -> None:
    running = [container(), container(51, OTHER)]
    for each in running:
        host.process(each.pid, scope(each.id))
    open_before = descriptors()
    places = ContainerCgroups(proc=host.proc, root=host.root, open_max=1)

    found = [[processes_in(places, each) for each in running] for _ in range(2)]
    kept = len(descriptors() - open_before)
    places.keep([running[1].incarnation])

    assert found == [[{41}, {51}]] * 2
    # The usage, its parts, the folder and the processes. Version 1 builds the process list at open, so it is not kept.
    assert (kept, descriptors()) == (4 if host.version_2 else 3, open_before)


def test_stale_open_files_are_replaced_in_the_same_sample(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.process(41, scope())
    places = host.places()
    places.read(container())
    read, refusals = cgroup.File.read, iter([OSError(errno.ENODEV, "the kernel has removed it")])

    def refuse_once(file: cgroup.File) -> bytes:
        for each in refusals:
            raise each
        return read(file)

    monkeypatch.setattr(cgroup.File, "read", refuse_once)

    assert processes_in(places, container()) == {41}


def descriptors() -> set[str]:
    """The open files below the test's cgroup directories."""
    found = (Path(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))  # noqa: PTH208 - one lists them
    return {f"{each}" for each in found if each.is_symlink() and "/cgroup/" in str(each.readlink())}


def test_hundreds_of_ended_containers_leave_no_state(host: Host) -> None:
    places, unlisted = host.places(), host.unlisted()
    for round_ in range(20):
        ids = [f"{round_ * 10 + number:064x}" for number in range(10)]
        for number, full_id in enumerate(ids):
            host.process(100 + number, scope(full_id), ticks=round_)
        running = {each.incarnation: each for each in map(container, range(100, 110), ids)}
        places.keep(running)
        seen = [processes_in(places, each) for each in running.values()]
        found = unlisted.find(range(100, 110), {})

        assert seen == [{100 + number} for number in range(10)]
        assert sorted(each.id for each in found) == ids
        for full_id in ids:
            host.remove(scope(full_id))
    places.keep(())

    assert unlisted.find((), {}) == []
    assert (places._places, places._files, unlisted._first_seen_s, unlisted._found) == ({}, {}, {}, {})


# Unlisted containers


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        pytest.param(scope(), "containerd", id="containerd"),
        pytest.param(scope(by="crio") + "/container", "cri-o", id="CRI-O"),
        pytest.param(f"user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", "libpod",
                     id="Podman of a user"),
        pytest.param(f"docker/{ID}", "container", id="an engine that is not listed"),
    ],
)  # fmt: skip
def test_unlisted_container_is_found_by_its_process(host: Host, group: str, kind: str) -> None:
    host.process(41, group, gpus="GPU-1,GPU-2")

    (found,) = host.unlisted().find([41], {})

    assert (found.id, found.name, found.kind, found.pid) == (ID, ID[:12], kind, 41)
    assert found.gpu_request == ("GPU-1", "GPU-2")
    assert found.incarnation.startswith(f"{ID}@")


def test_container_without_a_gpu_variable_has_no_request(host: Host) -> None:
    host.process(41, scope())

    assert host.unlisted().find([41], {})[0].gpu_request is None


def test_no_container_for_host_processes_ended_ones_and_the_exporters_own(host: Host) -> None:
    host.process(41, "system.slice/ssh.service")
    host.process(42, scope())

    assert host.unlisted(own=ID).find([41, 42, 43], {}) == []


def test_listed_container_is_not_unlisted(host: Host) -> None:
    host.process(41, scope())
    unlisted = host.unlisted()
    unlisted.find([41], {"docker": listing()})

    before = unlisted.find([41], {"docker": listing()})
    after = unlisted.find([41], {"docker": listing(ID)})

    assert ([each.id for each in before], after) == ([ID], [])


def test_listing_from_before_the_first_sight_does_not_make_a_container_unlisted(host: Host) -> None:
    """A container that started later is in the next listing with its name."""
    host.process(41, scope())
    unlisted, old = host.unlisted(), listing()

    assert unlisted.find([41], {"docker": old}) == []
    assert unlisted.find([41], {"docker": old}) == []
    assert len(unlisted.find([41], {"docker": listing()})) == 1


def test_listing_with_a_lag_is_not_used_within_its_lag(host: Host) -> None:
    """For example the Kubernetes API, which lists a container seconds after its process starts."""
    host.process(41, scope())

    for lag_s, found in ((30.0, 0), (0.0, 1)):
        lagging = host.unlisted()
        lagging.find([41], {"kubernetes": listing()})
        assert len(lagging.find([41], {"kubernetes": replace(listing(), lag_s=lag_s)})) == found


def test_silent_engine_adds_no_unlisted_container_and_removes_none(host: Host) -> None:
    host.process(41, scope())
    host.process(51, scope(OTHER))
    unlisted = host.unlisted()
    unlisted.find([41], {"docker": listing()})
    unlisted.find([41], {"docker": listing()})

    found = unlisted.find([41, 51], {"docker": None})
    found = unlisted.find([41, 51], {"docker": None})

    assert [each.id for each in found] == [ID]


def test_unlisted_container_stays_until_its_group_is_removed(host: Host) -> None:
    """Its process may have left the GPU: its idle time continues."""
    host.process(41, scope())
    host.process(42, scope())
    unlisted = host.unlisted()
    (first,) = unlisted.find([41], {})
    host.end(41)

    stays = unlisted.find([], {})
    host.remove(scope())

    assert (stays, unlisted.find([], {})) == ([first], [])


def test_restarted_unlisted_container_is_another_incarnation(host: Host) -> None:
    host.process(41, scope())
    unlisted = host.unlisted()
    (first,) = unlisted.find([41], {})
    (host.top / scope()).rename(host.top / "kept")  # Its inode number is not reused.
    host.where.clear()
    host.process(41, scope(), ticks=99)

    (second,) = unlisted.find([41], {})

    assert (second.id, second.pid) == (first.id, first.pid)
    assert second.incarnation != first.incarnation


def test_reused_pid_finds_its_own_container(host: Host) -> None:
    host.process(41, scope())
    unlisted = host.unlisted()
    unlisted.find([41], {})
    host.remove(scope())
    host.process(41, scope(OTHER), ticks=99)

    assert [each.id for each in unlisted.find([41], {})] == [OTHER]


def test_moved_process_is_found_at_once(host: Host) -> None:
    host.process(41, scope())
    unlisted = host.unlisted()
    unlisted.find([41], {})
    host.process(41, scope(OTHER))

    assert [each.id for each in unlisted.find([41], {})] == [OTHER]


# An engine that does not answer


class EngineStub:
    """An engine that lists one container until it stops answering."""

    def __init__(self, container: Container) -> None:
        self.answers = True
        self.gone = False
        self.container = container

    def latest(self) -> Listing:
        if not self.answers:
            raise OSError("it hangs")
        listed = {} if self.gone else {self.container.id: self.container}
        return Listing(containers=listed, taken_s=time.monotonic(), duration_s=0.0)


@pytest.fixture
def engine_stub() -> EngineStub:
    return EngineStub(build.container(id=ID, name="llm", pid=41, gpu_request=("GPU-0",)))


def sampler_on(host: Host, engine: EngineStub, directory: Path, **changes: Any) -> Sampler:
    given: dict[str, Any] = {
        "gpus": lambda: build.gpus(build.gpu(0, build.process(41, 0.5, build.MIB))),
        "places": host.places(),
        "unlisted": host.unlisted(),
    }
    return Sampler(
        host="box-1", directory=directory, containers={"docker": engine}, thresholds=Thresholds(), **(given | changes)
    )


def test_silent_engine_keeps_names_and_values(host: Host, engine_stub: EngineStub, tmp_path: Path) -> None:
    host.process(41, scope())
    sampler = sampler_on(host, engine_stub, tmp_path)
    sampler.sample()
    first = sampler.sample()
    engine_stub.answers = False

    (kept,) = (left := sampler.sample()).containers
    engine_stub.answers = True
    (again,) = sampler.sample().containers

    assert kept.container == replace(engine_stub.container, listed=False)
    assert (kept.ram_bytes, kept.shares[0].memory_bytes, kept.shares[0].utilization_ratio) == (1000, build.MIB, 0.5)
    assert kept.busy_s["GPU-0"] > first.containers[0].busy_s["GPU-0"]  # Counters continue.
    assert [each.success for each in left.sources if each.source == "docker"] == [False]
    assert left.servers is None
    assert left.unplaced == ()  # An unlisted container may have started.
    assert again.container == engine_stub.container


def test_counters_continue_while_the_engine_is_silent(host: Host, engine_stub: EngineStub, tmp_path: Path) -> None:
    host.process(41, scope())
    sampler = sampler_on(host, engine_stub, tmp_path, gpus=lambda: (_ for _ in ()).throw(OSError("no driver")))
    sampler.sample()
    engine_stub.answers = False

    counts = [sampler.sample().unknown["llm", "gpu", "source_failed"] for _ in range(3)]

    assert counts == [2, 3, 4]


@pytest.mark.parametrize("how", ["ended", "restarted"])
def test_container_that_ends_while_its_engine_is_silent_is_removed(
    host: Host, engine_stub: EngineStub, tmp_path: Path, how: str
) -> None:
    host.process(41, scope())
    sampler = sampler_on(host, engine_stub, tmp_path)
    sampler.sample()
    engine_stub.answers = False
    stood = sampler.sample()

    host.end(41)
    (host.top / scope()).rename(host.top / "gone")  # the next folder gets another inode number.
    if how == "restarted":
        host.process(42, scope())

    assert len(stood.containers) == 1
    assert sampler.sample().containers == sampler.sample().containers == ()


def test_container_of_a_dead_worker_is_found_later(
    host: Host, engine_stub: EngineStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = build.sighting(container_id=ID)
    seen = [alive]
    monkeypatch.setattr(workers, "read", lambda _: WorkerReadings(workers=tuple(seen)))
    host.process(41, scope())
    sampler = sampler_on(host, engine_stub, tmp_path)

    def container() -> str | None:
        snapshot = sampler.sample()
        facts = evidence.worker_evidence(alive.worker.worker, snapshot, now=snapshot.taken)
        return None if facts is None else facts.container_incarnation

    lived = container()
    engine_stub.answers = False
    container()
    host.end(41)
    (host.top / scope()).rename(host.top / "gone")
    seen[:] = [replace(alive, alive=False, pid=None, container_id=None)]
    silent = container()
    engine_stub.answers, engine_stub.gone = True, True  # The container stops while the engine is silent.

    assert lived == engine_stub.container.incarnation
    assert silent is None
    assert [container(), container()] == [lived, lived]


# Real containers


def sampler_with(house: Path, pid: int | None = None, **engines: Any) -> Sampler:
    """A sampler on a host with one GPU, which lists a process."""
    found = build.gpus(build.gpu(0, *([] if pid is None else [build.process(pid, 0.5, build.MIB)])))
    return Sampler(host="box-1", directory=house, containers=engines, gpus=lambda: found, thresholds=Thresholds())


def of(full_id: str | None, sampler: Sampler) -> ContainerEvidence | None:
    return next((each for each in sampler.sample().containers if each.container.id == full_id), None)


@pytest.mark.needs_docker
def test_real_container_of_an_unlisted_engine_is_found_by_its_process(client: docker.DockerClient, house: Path) -> None:
    image = worker_image(client, extra={})
    real = client.containers.run(image, ["sleep", "600"], detach=True, network_mode="none")
    try:
        real.reload()
        sampler = sampler_with(house, real.attrs["State"]["Pid"])
        found = of(real.id, sampler)
        again = of(real.id, sampler)
    finally:
        real.remove(force=True)

    assert found is not None
    assert again is not None
    assert (found.container.kind, found.container.name) == ("container", (real.id or "")[:12])
    assert found.ram_bytes is not None
    assert found.ram_bytes > 0
    assert [(each.gpu, each.memory_bytes) for each in again.shares] == [("GPU-0", build.MIB)]
    assert again.container.incarnation == found.container.incarnation
    assert of(real.id, sampler) is None


@pytest.mark.needs_docker
def test_real_oom_kill_is_counted(engine: Engine, client: docker.DockerClient, house: Path) -> None:
    image = worker_image(client, extra={})
    kills_one = (
        "import subprocess, time; subprocess.run(['python3', '-c', 'x = b\"x\" * (256 << 20)']); time.sleep(600)"
    )
    limited = client.containers.run(image, ["python3", "-c", kills_one], detach=True, network_mode="none",
                                    mem_limit="64m", memswap_limit="64m")  # fmt: skip
    source = EngineContainers(engine.base_url)
    source.start()
    sampler = sampler_with(house, docker=source)

    def kills() -> int | None:
        seen = of(limited.id, sampler)
        return None if seen is None else seen.ram.oom_kills

    try:
        killed = eventually(kills)
    finally:
        source.close()
        limited.remove(force=True)

    assert killed == 1


def ids(snapshot: Snapshot) -> set[str]:
    return {each.container.id for each in snapshot.containers}


def group_of(real: Any) -> Path:
    """The group of a real container, once both of its processes have started."""
    real.reload()
    found = cgroup.directory(real.attrs["State"]["Pid"], real.id)
    assert found is not None
    place = found
    eventually(lambda: len(cgroup.processes(place)) == 2)
    return place


@pytest.mark.needs_docker
def test_later_process_is_seen_within_a_second(client: docker.DockerClient) -> None:
    sleeper = ["python3", "-c", "import time; time.sleep(600)"]
    real = client.containers.run(worker_image(client, extra={}), sleeper, detach=True, network_mode="none")
    try:
        real.reload()
        place = cgroup.directory(int(real.attrs["State"]["Pid"]), str(real.id))
        assert place is not None
        group = cgroup.Group(place)
        eventually(lambda: len(group.processes()) == 1)
        client.api.exec_start(client.api.exec_create(real.id, sleeper)["Id"], detach=True)

        seen = eventually(lambda: pids if len(pids := group.processes()) == 2 else None)
    finally:
        real.remove(force=True)

    assert real.attrs["State"]["Pid"] in seen


@pytest.mark.needs_docker
def test_gpu_memory_follows_a_process_to_another_container(
    client: docker.DockerClient, engine: Engine, house: Path
) -> None:
    image = worker_image(client, extra={})
    parent = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    first, second = (
        client.containers.run(image, ["python3", "-c", parent], detach=True, network_mode="none") for _ in range(2)
    )
    source = EngineContainers(engine.base_url)
    source.start()
    try:
        group, other = group_of(first), group_of(second)
        (child,) = cgroup.processes(group) - {first.attrs["State"]["Pid"]}
        sampler = sampler_with(house, child, docker=source)

        def holders() -> list[str]:
            return [each.container.id for each in sampler.sample().containers if each.shares]

        eventually(lambda: holders() == [first.id])
        (other / "cgroup.procs").write_text(str(child))
        after = holders()
    finally:
        source.close()
        for each in (first, second):
            each.remove(force=True)

    assert after == [second.id]
