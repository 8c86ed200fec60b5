"""Control groups of version 1, version 2 and the hybrid."""

import errno
import os
from pathlib import Path

import pytest

from gpuwarden import cgroup, procfs

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
PID = 4242


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / str(PID)).mkdir(parents=True)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    return folder


def belongs(proc: Path, *lines: str) -> None:
    """Write /proc/PID/cgroup."""
    (proc / str(PID) / "cgroup").write_text("".join(line + "\n" for line in lines))


def group(folder: Path, **files: str) -> Path:
    """Create a cgroup with kernel files; the first `_` in a name becomes a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content)
    return folder


# --- container of a process


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(f"/docker/{ID}", id="Docker, cgroupfs"),
        pytest.param(f"/system.slice/docker-{ID}.scope", id="Docker, systemd"),
        pytest.param(f"/docker/{ID}/init.scope", id="systemd inside Docker"),
        pytest.param(f"/user.slice/user-1000.slice/docker-{ID}.scope", id="rootless Docker"),
        pytest.param(f"/kubepods.slice/kubepods-podabc.slice/cri-containerd-{ID}.scope", id="containerd pod, systemd"),
        pytest.param(f"/kubepods/burstable/pod5d0c1f4e/{ID}", id="containerd pod, cgroupfs"),
        pytest.param(f"/kubepods-besteffort-pod1.slice:cri-containerd:{ID}", id="containerd pod, old systemd"),
        pytest.param(f"/kubepods.slice/kubepods-pod1.slice/crio-{ID}.scope", id="CRI-O pod"),
        pytest.param(f"/kubepods.slice/crio-{ID}.scope/container", id="CRI-O pod, crun's own group"),
        pytest.param(f"/machine.slice/libpod-{ID}.scope", id="Podman"),
        pytest.param(f"/machine.slice/libpod-{ID}.scope/container", id="Podman, crun's own group"),
        pytest.param(f"/user.slice/user-1.slice/user.slice/libpod-{ID}.scope", id="rootless Podman"),
        pytest.param(f"/libpod_parent/libpod-{ID}", id="Podman, cgroupfs"),
        pytest.param(f"/../../docker/{ID}", id="from a sibling cgroup namespace"),
    ],
)
def test_container_id_is_found_for_each_runtime(proc: Path, path: str) -> None:
    belongs(proc, f"0::{path}")

    assert cgroup.container_id(PID, proc=proc) == ID


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/", id="the root"),
        pytest.param("/system.slice/ssh.service", id="a unit"),
        pytest.param(f"/docker/{ID[:12]}", id="a short id"),
        pytest.param(f"/docker/{ID}0", id="a digit too many"),
        pytest.param(f"/docker/{ID.upper()}", id="capitals"),
        pytest.param(f"/x{ID}", id="an id inside a word"),
        pytest.param(f"/docker-{ID}.service", id="a unit named like one"),
        pytest.param(f"/machine.slice/libpod-conmon-{ID}.scope", id="conmon of Podman"),
        pytest.param(f"/kubepods.slice/crio-conmon-{ID}.scope", id="conmon of CRI-O"),
    ],
)
def test_process_outside_containers_has_no_container(proc: Path, path: str) -> None:
    belongs(proc, f"0::{path}")

    assert cgroup.container_id(PID, proc=proc) is None


@pytest.mark.parametrize(
    ("path", "runtime"),
    [
        pytest.param(f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", "containerd", id="containerd"),
        pytest.param(f"/kubepods-pod1.slice:cri-containerd:{ID}", "containerd", id="containerd, old systemd"),
        pytest.param(f"/system.slice/nerdctl-{ID}.scope", "containerd", id="nerdctl"),
        pytest.param(f"/kubepods.slice/crio-{ID}.scope/container", "cri-o", id="CRI-O"),
        pytest.param(f"/kubepods/pod1/crio-{ID}", "cri-o", id="CRI-O, cgroupfs"),
        pytest.param(f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", "libpod",
                     id="rootless Podman"),
        pytest.param(f"/libpod_parent/libpod-{ID}", "libpod", id="Podman, cgroupfs"),
        pytest.param(f"/kubepods/burstable/pod5d0c1f4e/{ID}", None, id="a pod, cgroupfs"),
        pytest.param(f"/system.slice/docker-{ID}.scope", "docker", id="Docker"),
        pytest.param(f"/docker/{ID}", "docker", id="Docker, cgroupfs"),
        pytest.param(f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", None,
                     id="rootless Docker"),
        pytest.param(f"/not-docker/{ID}", None, id="another parent name than Docker"),
        pytest.param(f"/not-libpod/{ID}", None, id="another parent name"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lines", [["0::{}"], ["4:memory:{}", "1:name=systemd:{}", "0::/"]], ids=["v2", "hybrid"])
def test_group_name_gives_the_runtime(proc: Path, lines: list[str], path: str, runtime: str | None) -> None:
    belongs(proc, *(line.format(path) for line in lines))

    assert cgroup.owner(PID, proc=proc) == (ID, runtime)


def test_group_name_with_invalid_text_has_no_container(proc: Path) -> None:
    (proc / str(PID) / "cgroup").write_bytes(b"0::/rv-\xff\n")

    assert cgroup.owner(PID, proc=proc) is None
    assert cgroup.directory(PID, ID, proc=proc, root=proc) is None


def test_container_is_found_in_version_1_hierarchies(proc: Path) -> None:
    belongs(proc, "12:cpuset:/", f"11:memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_container_is_found_if_only_the_last_hierarchy_names_it(proc: Path) -> None:
    belongs(proc, "2:memory:/", f"1:name=systemd:/docker/{ID}", "0::/")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_nested_container_is_named_by_the_outer_one(proc: Path) -> None:
    belongs(proc, f"0::/docker/{ID}/docker/{OTHER}")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_colon_stays_in_the_path(proc: Path) -> None:
    belongs(proc, f"1:name=systemd:/a:b/docker-{ID}.scope")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_cgroup_of_an_ended_process_raises(proc: Path, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup.container_id(99, proc=proc)
    for ask_place in (cgroup.memory_directory, cgroup.directory):
        with pytest.raises(FileNotFoundError):
            ask_place(99, ID, proc=proc, root=root)


# --- service of a process


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        pytest.param("/system.slice/w.service", "w.service", id="a service"),
        pytest.param("/system.slice/system-w.slice/w@a.service", "w@a.service", id="an instance, in its own slice"),
        pytest.param("/gpu.slice/gpu-a.slice/w.service/inner", "w.service", id="a group that it made itself"),
        pytest.param("/system.slice/w.service/x.service", "w.service", id="one named like a service, too"),
        pytest.param(
            "/user.slice/user-1.slice/user@1.service/app.slice/w.service", "user@1.service", id="a user's own"
        ),
        pytest.param("/w.service", "w.service", id="in no slice"),
        pytest.param("/user.slice/user-1.slice/session-3.scope", None, id="a session"),
        pytest.param("/init.scope", None, id="systemd itself"),
        pytest.param("/system.slice", None, id="a slice alone"),
        pytest.param("/", None, id="the root"),
        pytest.param("/system.slice/_w.service", None, id="a name that systemd escaped"),
        pytest.param("/system.slice/-w.service", None, id="a name like an option"),
    ],
)
@pytest.mark.parametrize(
    "lines",
    [["0::{}"], ["4:memory:/elsewhere", "1:name=systemd:{}", "0::/"], ["1:name=systemd:{}"]],
    ids=["version 2", "hybrid", "version 1"],
)
def test_process_is_in_its_systemd_service(proc: Path, lines: list[str], path: str, unit: str | None) -> None:
    belongs(proc, *(line.format(path) for line in lines))
    init(proc, *(line.format("/init.scope") for line in lines))

    assert cgroup.unit(PID, proc=proc) == unit


def init(proc: Path, *lines: str) -> None:
    """Write /proc/1/cgroup."""
    (proc / "1").mkdir()
    (proc / "1/cgroup").write_text("".join(line + "\n" for line in lines))


def test_systemd_in_a_container_names_its_own_services(proc: Path) -> None:
    belongs(proc, "0::/machine.slice/box.scope/system.slice/w.service")
    init(proc, "0::/machine.slice/box.scope/init.scope")

    assert cgroup.unit(PID, proc=proc) == "w.service"


def test_process_outside_of_this_systemd_has_no_service(proc: Path) -> None:
    belongs(proc, "0::/machine.slice/boxer/w.service")
    init(proc, "0::/machine.slice/box/init.scope")

    assert cgroup.unit(PID, proc=proc) is None


def test_service_has_the_memory_and_processes_of_its_whole_group(proc: Path, root: Path) -> None:
    belongs(proc, "4:memory:/system.slice/w@a.service/inner", "1:name=systemd:/system.slice/w@a.service", "0::/")
    place = group(root / "memory/system.slice/w@a.service", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, "w@a.service", proc=proc, root=root) == place
    assert cgroup.directory(PID, "w@a.service", proc=proc, root=root) == place
    assert cgroup.directory(PID, "w@b.service", proc=proc, root=root) is None


def test_service_name_is_not_a_pattern(proc: Path, root: Path) -> None:
    belongs(proc, "4:memory:/system.slice/wxa.service")
    group(root / "memory/system.slice/wxa.service", cgroup_procs=f"{PID}\n")

    assert cgroup.directory(PID, "w.a.service", proc=proc, root=root) is None


# --- groups of a container


def test_version_2_has_memory_and_processes_in_one_group(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/system.slice/docker-{ID}.scope")
    place = group(root / f"system.slice/docker-{ID}.scope", memory_current="1\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == place
    assert cgroup.directory(PID, ID, proc=proc, root=root) == place


def test_version_1_has_memory_in_its_own_hierarchy(proc: Path, root: Path) -> None:
    belongs(proc, f"5:cpu,cpuacct:/docker/{ID}", f"4:memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}")
    place = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == place
    assert cgroup.directory(PID, ID, proc=proc, root=root) == place


def test_hybrid_host_lists_processes_in_the_memory_group(proc: Path, root: Path) -> None:
    belongs(
        proc, f"4:hugetlb,memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}", "0::/system.slice/containerd.service"
    )
    accounted = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")
    group(root / "unified/system.slice/containerd.service", cgroup_procs=f"1\n2\n{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted


@pytest.mark.parametrize("place", ["/docker/{id}", "/system.slice/docker-{id}.scope"])
def test_subgroups_of_a_container_belong_to_it(proc: Path, root: Path, place: str) -> None:
    own = place.format(id=ID)
    belongs(proc, f"0::{own}/workers/one")
    accounted = group(root / own.strip("/"), memory_current="7\n", cgroup_procs="")
    group(accounted / "workers/one", memory_current="5\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.processes(accounted) == {PID}


def test_hybrid_host_without_unified_mount_uses_version_1(proc: Path, root: Path) -> None:
    belongs(proc, f"4:memory:/docker/{ID}", f"0::/docker/{ID}")
    accounted = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")

    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted


def test_host_without_memory_controller_has_no_memory_group(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/system.slice/docker-{ID}.scope")
    listed = group(root / f"system.slice/docker-{ID}.scope", cgroup_procs="")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) is None
    assert cgroup.directory(PID, ID, proc=proc, root=root) == listed


def test_host_without_cgroups_has_no_groups(proc: Path, root: Path) -> None:
    belongs(proc, f"1:name=systemd:/docker/{ID}")

    assert cgroup.directory(PID, ID, proc=proc, root=root) is None


@pytest.mark.parametrize("path", ["/", f"/docker/{OTHER}", "/system.slice/x.service"])
def test_process_outside_its_containers_group_gives_no_other_group(proc: Path, root: Path, path: str) -> None:
    """An exited process is in the root of version 1, which lists all processes."""
    belongs(proc, f"4:memory:{path}", f"1:name=systemd:{path}", f"0::{path}")
    for hierarchy in (root, root / "memory"):
        group(hierarchy / path.strip("/"), memory_current="7\n", cgroup_procs="1\n2\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) is None
    assert cgroup.directory(PID, ID, proc=proc, root=root) is None


def test_container_inside_lxc_has_its_group_below_the_lxcs_own_version_1(proc: Path, root: Path) -> None:
    belongs(proc, f"4:memory:/lxc/101/docker/{ID}", f"1:name=systemd:/lxc/101/docker/{ID}", "0::/")
    own = group(root / "memory" / "docker" / ID, cgroup_procs="7\n", memory_usage_in_bytes="5\n")

    assert cgroup.place(PID, ID, proc=proc, root=root) == cgroup.Place(group=own, memory=own)


def test_container_inside_lxc_has_its_group_below_the_lxcs_own_version_2(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/lxc/101/system.slice/docker-{ID}.scope")
    own = group(root / "system.slice" / f"docker-{ID}.scope", cgroup_procs="7\n", memory_current="5\n")

    assert cgroup.place(PID, ID, proc=proc, root=root) == cgroup.Place(group=own, memory=own)


def test_nested_container_has_its_own_group(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/docker/{OTHER}/docker/{ID}/workers")
    own = group(root / f"docker/{OTHER}/docker/{ID}", memory_current="7\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == own
    assert cgroup.directory(PID, ID, proc=proc, root=root) == own


# --- memory


def test_version_2_memory_is_the_whole_charge_with_its_parts(root: Path) -> None:
    place = group(root / "c", memory_current="1000\n", memory_stat="anon 300\nfile 700\ninactive_file 150\n")

    assert cgroup.memory(place) == cgroup.Memory(usage_bytes=1000, anon_bytes=300, working_set_bytes=850)


def test_version_1_memory_is_the_whole_charge_with_its_parts(root: Path) -> None:
    stat = "rss 1\ninactive_file 2\ntotal_rss 300\ntotal_inactive_file 150\n"
    place = group(root / "c", memory_usage_in_bytes="1000\n", memory_stat=stat)

    assert cgroup.memory(place) == cgroup.Memory(usage_bytes=1000, anon_bytes=300, working_set_bytes=850)


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        pytest.param({"memory_current": "1\n", "memory_events": "oom 4\noom_kill 3\noom_group_kill 1\n"}, 3, id="v2"),
        pytest.param({"memory_usage_in_bytes": "1\n", "memory_oom_control": "oom_kill_disable 0\nunder_oom 0\n"
                      "oom_kill 2\n"}, 2, id="v1"),
        pytest.param({"memory_current": "1\n", "memory_events": "oom 0\noom_kill 0\n"}, 0, id="none yet"),
        pytest.param({"memory_usage_in_bytes": "1\n", "memory_oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, None,
                     id="a kernel that does not count them"),
        pytest.param({"memory_current": "1\n"}, None, id="no such file"),
    ],
)  # fmt: skip
def test_oom_kills_are_read_from_the_kernel(root: Path, files: dict[str, str], kills: int | None) -> None:
    assert cgroup.memory(group(root / "c", **files, memory_stat="")).oom_kills == kills


@pytest.mark.parametrize("usage", [{"memory_current": "10\n"}, {"memory_usage_in_bytes": "10\n"}], ids=["v2", "v1"])
def test_missing_memory_parts_are_unknown(root: Path, usage: dict[str, str]) -> None:
    place = group(root / "c", **usage, memory_stat="cache 0\n")

    assert cgroup.memory(place) == cgroup.Memory(usage_bytes=10, anon_bytes=None, working_set_bytes=None)


def test_working_set_is_never_negative(root: Path) -> None:
    place = group(root / "c", memory_current="10\n", memory_stat="inactive_file 20\n")

    assert cgroup.memory(place).working_set_bytes == 0


def test_memory_of_a_removed_group_raises(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup.memory(root / "gone")


@pytest.mark.parametrize("files", [{"memory_current": "max\n", "memory_stat": ""},
                                   {"memory_current": "1\n", "memory_stat": "anon\n"}])  # fmt: skip
def test_invalid_memory_number_raises(root: Path, files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|sequence element"):
        cgroup.memory(group(root / "c", **files))


# --- processes


def test_processes_of_a_group_include_subgroups(root: Path) -> None:
    group(root / "c", cgroup_procs="1\n2\n")
    group(root / "c/init.scope", cgroup_procs="3\n")
    group(root / "c/a/b", cgroup_procs="4\n2\n")
    group(root / "beside", cgroup_procs="9\n")

    assert cgroup.processes(root / "c") == {1, 2, 3, 4}


def test_long_process_list_is_read_whole(root: Path) -> None:
    pids = range(100_000, 110_000)
    group(root / "c", cgroup_procs="".join(f"{pid}\n" for pid in pids))

    assert cgroup.processes(root / "c") == set(pids)


def test_empty_or_removed_group_has_no_process(root: Path) -> None:
    group(root / "c", cgroup_procs="")

    assert cgroup.processes(root / "c") == frozenset()
    assert cgroup.processes(root / "gone") == frozenset()


def test_process_of_another_pid_namespace_counts(root: Path) -> None:
    group(root / "c", cgroup_procs="0\n")  # a process outside this pid namespace

    assert cgroup.processes(root / "c") == {0}


def unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Fail the read of one file with a kernel error."""
    read = procfs.read

    def refuse(asked: str) -> bytes:
        if asked == str(path):
            raise OSError(number, os.strerror(number), asked)
        return read(asked)

    monkeypatch.setattr(procfs, "read", refuse)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP], ids=["gone", "going", "threaded"])
def test_removed_subgroup_hides_no_process(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    group(root / "c", cgroup_procs="1\n")
    below = group(root / "c/below", cgroup_procs="2\n")
    unreadable(monkeypatch, below / "cgroup.procs", number)

    assert cgroup.processes(root / "c") == {1}


def test_unreadable_group_raises(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = group(root / "c", cgroup_procs="1\n")
    unreadable(monkeypatch, place / "cgroup.procs", errno.EACCES)

    with pytest.raises(PermissionError):
        cgroup.processes(place)


# --- all containers


@pytest.mark.parametrize("hierarchy", ["", "memory"], ids=["version 2", "version 1 and the hybrid"])
def test_all_containers_of_a_host_are_found(root: Path, hierarchy: str) -> None:
    top = root / hierarchy
    pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"
    first = group(top / pod / f"cri-containerd-{ID}.scope", cgroup_procs="1\n")
    group(first / f"docker/{'ab' * 32}", cgroup_procs="2\n")
    second = group(top / f"docker/{OTHER}", cgroup_procs="3\n")
    group(top / f"machine.slice/libpod-conmon-{'cd' * 32}.scope", cgroup_procs="4\n")
    group(root / f"unified/docker/{'ef' * 32}")

    assert cgroup.containers(root) == {ID: first, OTHER: second} | (
        {} if hierarchy else {"ef" * 32: root / f"unified/docker/{'ef' * 32}"}
    )


def test_host_without_cgroup_mount_has_no_containers(tmp_path: Path) -> None:
    assert cgroup.containers(tmp_path / "nothing") == {}
