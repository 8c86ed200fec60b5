"""Control groups of both versions and the hybrid, from directories shaped like the kernel's; and this process's own."""

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
    """A cgroup's directory with some of the kernel's files; `_` in a name stands for the first dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content)
    return folder


# --- which container


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
        pytest.param(f"/../../docker/{ID}", id="seen from a cgroup namespace beside it"),
    ],
)
def test_a_container_is_known_by_its_full_id_whatever_runs_it(proc: Path, path: str) -> None:
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
        pytest.param(f"/machine.slice/libpod-conmon-{ID}.scope", id="what watches a container of Podman's"),
        pytest.param(f"/kubepods.slice/crio-conmon-{ID}.scope", id="what watches a container of CRI-O's"),
    ],
)
def test_a_process_outside_containers_is_in_none(proc: Path, path: str) -> None:
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
        pytest.param(f"/kubepods/burstable/pod5d0c1f4e/{ID}", None, id="a pod, cgroupfs: whoever runs it"),
        pytest.param(f"/system.slice/docker-{ID}.scope", "docker", id="Docker"),
        pytest.param(f"/docker/{ID}", "docker", id="Docker, cgroupfs"),
        pytest.param(f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", None,
                     id="a user's own Docker, which is at another socket"),
        pytest.param(f"/not-docker/{ID}", None, id="a parent that is called otherwise than Docker's"),
        pytest.param(f"/not-libpod/{ID}", None, id="a parent that is called otherwise"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lines", [["0::{}"], ["4:memory:{}", "1:name=systemd:{}", "0::/"]], ids=["v2", "hybrid"])
def test_a_groups_name_tells_the_engine(proc: Path, lines: list[str], path: str, runtime: str | None) -> None:
    belongs(proc, *(line.format(path) for line in lines))

    assert cgroup.owner(PID, proc=proc) == (ID, runtime)


def test_a_group_whose_name_is_no_text_is_nobodys(proc: Path) -> None:
    (proc / str(PID) / "cgroup").write_bytes(b"0::/rv-\xff\n")

    assert cgroup.owner(PID, proc=proc) is None
    assert cgroup.directory(PID, ID, proc=proc, root=proc) is None


def test_a_container_is_found_in_the_hierarchies_of_version_1(proc: Path) -> None:
    belongs(proc, "12:cpuset:/", f"11:memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_a_container_is_found_when_only_the_last_hierarchy_names_it(proc: Path) -> None:
    belongs(proc, "2:memory:/", f"1:name=systemd:/docker/{ID}", "0::/")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_of_a_container_in_a_container_the_hosts_own_is_named(proc: Path) -> None:
    belongs(proc, f"0::/docker/{ID}/docker/{OTHER}")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_a_colon_in_a_path_stays_in_the_path(proc: Path) -> None:
    belongs(proc, f"1:name=systemd:/a:b/docker-{ID}.scope")

    assert cgroup.container_id(PID, proc=proc) == ID


def test_a_process_that_is_gone_is_an_error(proc: Path, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup.container_id(99, proc=proc)
    for ask_place in (cgroup.memory_directory, cgroup.directory):
        with pytest.raises(FileNotFoundError):
            ask_place(99, ID, proc=proc, root=root)


# --- which service


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
def test_a_process_is_in_its_hosts_service(proc: Path, lines: list[str], path: str, unit: str | None) -> None:
    belongs(proc, *(line.format(path) for line in lines))
    init(proc, *(line.format("/init.scope") for line in lines))

    assert cgroup.unit(PID, proc=proc) == unit


def init(proc: Path, *lines: str) -> None:
    """Write /proc/1/cgroup."""
    (proc / "1").mkdir()
    (proc / "1/cgroup").write_text("".join(line + "\n" for line in lines))


def test_of_a_systemd_in_a_container_its_own_services_are_named(proc: Path) -> None:
    belongs(proc, "0::/machine.slice/box.scope/system.slice/w.service")
    init(proc, "0::/machine.slice/box.scope/init.scope")

    assert cgroup.unit(PID, proc=proc) == "w.service"


def test_what_is_outside_of_the_systemd_that_is_asked_about_is_in_no_service_of_it(proc: Path) -> None:
    belongs(proc, "0::/machine.slice/boxer/w.service")
    init(proc, "0::/machine.slice/box/init.scope")

    assert cgroup.unit(PID, proc=proc) is None


def test_a_services_memory_and_processes_are_those_of_its_whole_group(proc: Path, root: Path) -> None:
    belongs(proc, "4:memory:/system.slice/w@a.service/inner", "1:name=systemd:/system.slice/w@a.service", "0::/")
    place = group(root / "memory/system.slice/w@a.service", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, "w@a.service", proc=proc, root=root) == place
    assert cgroup.directory(PID, "w@a.service", proc=proc, root=root) == place
    assert cgroup.directory(PID, "w@b.service", proc=proc, root=root) is None


def test_a_services_name_is_no_pattern(proc: Path, root: Path) -> None:
    belongs(proc, "4:memory:/system.slice/wxa.service")
    group(root / "memory/system.slice/wxa.service", cgroup_procs=f"{PID}\n")

    assert cgroup.directory(PID, "w.a.service", proc=proc, root=root) is None


# --- where


def test_version_2_accounts_memory_and_lists_processes_in_one_place(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/system.slice/docker-{ID}.scope")
    place = group(root / f"system.slice/docker-{ID}.scope", memory_current="1\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == place
    assert cgroup.directory(PID, ID, proc=proc, root=root) == place


def test_version_1_accounts_memory_in_its_own_hierarchy(proc: Path, root: Path) -> None:
    belongs(proc, f"5:cpu,cpuacct:/docker/{ID}", f"4:memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}")
    place = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == place
    assert cgroup.directory(PID, ID, proc=proc, root=root) == place


def test_the_hybrid_lists_where_it_accounts_for_the_unified_group_may_be_the_daemons(proc: Path, root: Path) -> None:
    belongs(
        proc, f"4:hugetlb,memory:/docker/{ID}", f"1:name=systemd:/docker/{ID}", "0::/system.slice/containerd.service"
    )
    accounted = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")
    group(root / "unified/system.slice/containerd.service", cgroup_procs=f"1\n2\n{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted


@pytest.mark.parametrize("place", ["/docker/{id}", "/system.slice/docker-{id}.scope"])
def test_groups_that_a_container_made_inside_itself_count_as_its_own(proc: Path, root: Path, place: str) -> None:
    own = place.format(id=ID)
    belongs(proc, f"0::{own}/workers/one")
    accounted = group(root / own.strip("/"), memory_current="7\n", cgroup_procs="")
    group(accounted / "workers/one", memory_current="5\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted
    assert cgroup.processes(accounted) == {PID}


def test_the_hybrid_without_its_unified_mount_lists_in_version_1(proc: Path, root: Path) -> None:
    belongs(proc, f"4:memory:/docker/{ID}", f"0::/docker/{ID}")
    accounted = group(root / f"memory/docker/{ID}", cgroup_procs=f"{PID}\n")

    assert cgroup.directory(PID, ID, proc=proc, root=root) == accounted


def test_without_a_memory_controller_memory_is_accounted_nowhere(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/system.slice/docker-{ID}.scope")
    listed = group(root / f"system.slice/docker-{ID}.scope", cgroup_procs="")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) is None
    assert cgroup.directory(PID, ID, proc=proc, root=root) == listed


def test_without_any_hierarchy_there_is_no_place(proc: Path, root: Path) -> None:
    belongs(proc, f"1:name=systemd:/docker/{ID}")

    assert cgroup.directory(PID, ID, proc=proc, root=root) is None


@pytest.mark.parametrize("path", ["/", f"/docker/{OTHER}", "/system.slice/x.service"])
def test_a_process_that_is_not_in_its_containers_group_tells_of_no_other(proc: Path, root: Path, path: str) -> None:
    """As one that has exited in the root of version 1: all processes of the host are listed there."""
    belongs(proc, f"4:memory:{path}", f"1:name=systemd:{path}", f"0::{path}")
    for hierarchy in (root, root / "memory"):
        group(hierarchy / path.strip("/"), memory_current="7\n", cgroup_procs="1\n2\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) is None
    assert cgroup.directory(PID, ID, proc=proc, root=root) is None


def test_a_container_in_a_container_has_its_own_group(proc: Path, root: Path) -> None:
    belongs(proc, f"0::/docker/{OTHER}/docker/{ID}/workers")
    own = group(root / f"docker/{OTHER}/docker/{ID}", memory_current="7\n", cgroup_procs=f"{PID}\n")

    assert cgroup.memory_directory(PID, ID, proc=proc, root=root) == own
    assert cgroup.directory(PID, ID, proc=proc, root=root) == own


# --- how much


def test_memory_of_version_2_is_the_whole_charge_with_its_parts(root: Path) -> None:
    place = group(root / "c", memory_current="1000\n", memory_stat="anon 300\nfile 700\ninactive_file 150\n")

    assert cgroup.memory(place) == cgroup.Memory(usage_bytes=1000, anon_bytes=300, working_set_bytes=850)


def test_memory_of_version_1_is_the_whole_charge_with_its_parts(root: Path) -> None:
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
def test_kills_for_memory_are_counted_by_the_kernel(root: Path, files: dict[str, str], kills: int | None) -> None:
    assert cgroup.memory(group(root / "c", **files, memory_stat="")).oom_kills == kills


@pytest.mark.parametrize("usage", [{"memory_current": "10\n"}, {"memory_usage_in_bytes": "10\n"}], ids=["v2", "v1"])
def test_parts_that_the_kernel_does_not_tell_are_unknown_not_zero(root: Path, usage: dict[str, str]) -> None:
    place = group(root / "c", **usage, memory_stat="cache 0\n")

    assert cgroup.memory(place) == cgroup.Memory(usage_bytes=10, anon_bytes=None, working_set_bytes=None)


def test_a_working_set_is_never_negative(root: Path) -> None:
    place = group(root / "c", memory_current="10\n", memory_stat="inactive_file 20\n")

    assert cgroup.memory(place).working_set_bytes == 0


def test_memory_of_a_group_that_is_gone_is_an_error(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup.memory(root / "gone")


@pytest.mark.parametrize("files", [{"memory_current": "max\n", "memory_stat": ""},
                                   {"memory_current": "1\n", "memory_stat": "anon\n"}])  # fmt: skip
def test_memory_that_is_no_number_is_an_error(root: Path, files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|sequence element"):
        cgroup.memory(group(root / "c", **files))


# --- who


def test_the_processes_of_a_group_are_those_below_it_too(root: Path) -> None:
    group(root / "c", cgroup_procs="1\n2\n")
    group(root / "c/init.scope", cgroup_procs="3\n")
    group(root / "c/a/b", cgroup_procs="4\n2\n")
    group(root / "beside", cgroup_procs="9\n")

    assert cgroup.processes(root / "c") == {1, 2, 3, 4}


def test_a_long_list_of_processes_is_read_whole(root: Path) -> None:
    pids = range(100_000, 110_000)
    group(root / "c", cgroup_procs="".join(f"{pid}\n" for pid in pids))

    assert cgroup.processes(root / "c") == set(pids)


def test_a_group_that_is_empty_or_gone_has_no_process(root: Path) -> None:
    group(root / "c", cgroup_procs="")

    assert cgroup.processes(root / "c") == frozenset()
    assert cgroup.processes(root / "gone") == frozenset()


def test_a_process_of_another_pid_namespace_still_counts_as_one(root: Path) -> None:
    group(root / "c", cgroup_procs="0\n")  # how the kernel lists a process that this namespace cannot name

    assert cgroup.processes(root / "c") == {0}


def unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Let reading one file fail as the kernel makes it fail."""
    read = procfs.read

    def refuse(asked: str) -> bytes:
        if asked == str(path):
            raise OSError(number, os.strerror(number), asked)
        return read(asked)

    monkeypatch.setattr(procfs, "read", refuse)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP], ids=["gone", "going", "threaded"])
def test_an_ended_subgroup_hides_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    group(root / "c", cgroup_procs="1\n")
    below = group(root / "c/below", cgroup_procs="2\n")
    unreadable(monkeypatch, below / "cgroup.procs", number)

    assert cgroup.processes(root / "c") == {1}


def test_a_group_that_may_not_be_read_is_an_error_and_never_empty(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = group(root / "c", cgroup_procs="1\n")
    unreadable(monkeypatch, place / "cgroup.procs", errno.EACCES)

    with pytest.raises(PermissionError):
        cgroup.processes(place)


# --- which there are


@pytest.mark.parametrize("hierarchy", ["", "memory"], ids=["version 2", "version 1 and the hybrid"])
def test_every_container_of_a_host_is_found_by_its_group(root: Path, hierarchy: str) -> None:
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


def test_where_nothing_is_mounted_there_is_no_container(tmp_path: Path) -> None:
    assert cgroup.containers(tmp_path / "nothing") == {}
