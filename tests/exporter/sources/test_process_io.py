"""Work of processes as the kernel reports it, and containers of dead workers (A5, A14)."""

import gc
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import LogCapture

from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import GpuAttribution
from exporter.evidence.work_history import ContainerWork
from exporter.http import evidence
from exporter.model.container import Container, RamUse
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import ProcessWork, WorkerReading, WorkerReadings
from exporter.sampler import Sampler
from exporter.sources import processes, workers
from exporter.sources.containers.poller import Listing
from exporter.sources.process_io import Work
from gpuwarden import cgroup, procfs
from gpuwarden.evidence import WorkerFacts
from gpuwarden.files import OPEN_FILES
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.waiting import eventually

pytestmark = pytest.mark.pure

IO = "rchar: 100\nwchar: 20\nsyscr: 9\nsyscw: 9\nread_bytes: 3\nwrite_bytes: 4\ncancelled_write_bytes: 1000\n"
TICKS = procfs.TICKS_PER_S


def kernel(proc: Path, pid: int, *, io: str | None = IO) -> Path:
    """A process in /proc. The value of each stat field is its number."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (a (b) c) 1) {' '.join(['S', *map(str, range(4, 53))])}\n")
    if io is not None:
        (folder / "io").write_text(io)
    return folder


def test_work_is_io_faults_and_cpu_time_with_ended_children(tmp_path: Path) -> None:
    kernel(tmp_path, 41)

    found = Work(proc=tmp_path).read([41])[41]

    assert (found.start_ticks, found.io_bytes, found.faults) == (22, 127, 10 + 11 + 12 + 13)
    assert found.cpu_s == pytest.approx((14 + 15 + 16 + 17) / TICKS)


def test_unchanged_files_are_not_parsed_again(tmp_path: Path) -> None:
    folder = kernel(tmp_path, 41)
    work = Work(proc=tmp_path)
    first, again = work.read([41])[41], work.read([41])[41]
    (folder / "stat").write_text((folder / "stat").read_text().replace(" 14 15 ", " 1400 15 "))
    ran = work.read([41])[41]
    (folder / "io").write_text(IO.replace("wchar: 20", "wchar: 21"))
    wrote = work.read([41])[41]

    assert again is first
    assert ran.cpu_s - first.cpu_s == pytest.approx((1400 - 14) / TICKS)
    assert (ran.io_bytes, wrote.io_bytes) == (127, 128)


def test_unknown_format_of_an_io_file_is_an_error(tmp_path: Path) -> None:
    kernel(tmp_path, 41, io="rchar: 100\n")

    with pytest.raises(ValueError, match="unknown format"):
        Work(proc=tmp_path).read([41])


def test_ended_process_is_left_out(tmp_path: Path) -> None:
    kernel(tmp_path, 41)

    assert Work(proc=tmp_path).read([40, 41]).keys() == {41}


def test_process_that_ends_between_its_two_files_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kernel(tmp_path, 41, io=None)
    read = os.pread

    def then_it_goes(*arguments: int) -> bytes:
        found = read(*arguments)
        (folder / "stat").unlink()
        return found

    monkeypatch.setattr(os, "pread", then_it_goes)

    assert Work(proc=tmp_path).read([41]) == {}


def test_files_of_an_ended_process_are_closed() -> None:
    work, open_before = Work(), descriptors()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        first, again = work.read([process.pid]), work.read([process.pid])
        kept = descriptors() - open_before
        process.kill()

    assert (set(first), set(again), len(kept)) == ({process.pid}, {process.pid}, 3)  # its standard input and two files
    assert work.read([process.pid]) == {}
    assert descriptors() == open_before


def descriptors() -> set[int]:
    """The open files of this process."""
    found = {int(each) for each in os.listdir("/proc/self/fd")}  # noqa: PTH208 - one of them lists them
    return {each for each in found if Path(f"/proc/self/fd/{each}").exists()}


def test_files_of_unread_processes_are_closed_and_all_with_the_reader(tmp_path: Path) -> None:
    for pid in (41, 42):
        kernel(tmp_path, pid)
    gc.collect()  # close what earlier tests left open
    open_before = descriptors()
    work = Work(proc=tmp_path)
    work.read([41, 42])
    work.close_unused()
    both = descriptors() - open_before
    work.read([42])
    work.close_unused()
    one = descriptors() - open_before
    del work
    gc.collect()

    assert (len(both), len(one), descriptors()) == (4, 2, open_before)


def test_number_of_open_files_is_bounded_without_effect_on_results(tmp_path: Path) -> None:
    for pid in (41, 42, 43):
        kernel(tmp_path, pid)
    open_before = descriptors()
    work = Work(proc=tmp_path, open_max=1)

    found = [work.read([41, 42, 43]) for _ in range(2)]

    assert len(descriptors() - open_before) == 2
    assert found[0] == found[1] == Work(proc=tmp_path).read([41, 42, 43])


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"), [(1024, None, OPEN_FILES), (1024, 2048, 2048), (9000, None, 9000)]
)
def test_limit_of_open_files_is_raised(soft: int, hard: int | None, allowed: int) -> None:
    program = (
        "import resource, sys; from gpuwarden.files import raise_file_limit; "
        "soft, hard = map(int, sys.argv[1:]);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)); raise_file_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    hard = hard or max(9000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])

    result = subprocess.run(
        [sys.executable, "-c", program, str(soft), str(hard)], capture_output=True, check=True, text=True
    )

    assert result.stdout.strip() == f"({allowed}, {hard})"


def test_open_file_is_read_again(tmp_path: Path) -> None:
    folder = kernel(tmp_path, 41)
    work = Work(proc=tmp_path)
    before = work.read([41])[41].io_bytes
    (folder / "io").write_text(IO.replace("rchar: 100", "rchar: 1000"))

    assert (before, work.read([41])[41].io_bytes) == (127, 1027)


def test_open_files_stay_open_while_their_processes_live(tmp_path: Path) -> None:
    for pid in (41, 42, 43):
        kernel(tmp_path, pid)
    open_before = descriptors()
    work = Work(proc=tmp_path)
    work.read([41, 42, 43])
    work.close_unused()
    work.read([41])

    work.close_unused({42})

    assert len(descriptors() - open_before) == 4


def test_io_without_accounting_is_unknown_and_the_rest_is_known(tmp_path: Path) -> None:
    kernel(tmp_path, 41, io=None)

    found = Work(proc=tmp_path).read([41])[41]

    assert (found.io_bytes, found.faults) == (None, 46)


def test_forbidden_io_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(tmp_path, 41)
    opened = os.open

    def refuse(path: str, flags: int) -> int:
        if path.endswith("/io"):
            raise PermissionError("not yours")
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refuse)

    assert Work(proc=tmp_path).read([41])[41].io_bytes is None


def test_work_of_this_process_grows() -> None:
    work = Work()
    before = work.read([os.getpid()])[os.getpid()]
    block = bytearray(64 * 2**20)  # One page fault for each page, or for each huge page.
    Path("/usr/bin/env").read_bytes()

    def more() -> bool:
        sum(range(10**6))
        after = work.read([os.getpid()])[os.getpid()]
        return (
            after.faults > before.faults
            and after.cpu_s > before.cpu_s
            and (after.io_bytes is None or after.io_bytes > (before.io_bytes or 0))
        )

    eventually(more)
    assert len(block) == 64 * 2**20


ASKED = "import urllib.request, sys; print('asks', flush=True); sys.stdin.read()"
"""A health check in Python which waits for its answer."""

BY_A_PROCESS_EACH = f"""
import subprocess, sys
for _ in sys.stdin:
    with subprocess.Popen([sys.executable, "-c", {ASKED!r}], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        process.stdin.close()
    print("done", flush=True)
"""
"""A worker which starts a process for each item and waits for it; one item per input line."""


def test_health_check_from_outside_is_no_work_and_a_child_of_a_worker_is() -> None:
    work, asked, waits = Work(), ContainerHistory(Thresholds()), ContainerHistory(Thresholds())

    def sample_with(history: ContainerHistory, *pids: int, now_s: float) -> float | None:
        found = ContainerWork(processes=work.read(pids))
        use = GpuAttribution(gpus=(), shares=(), utilization_ratio=0.0, unknown=None)
        return history.observe(RUNNING, use, RamUse(usage_bytes=1), found, now_s=now_s).page_fault_idle_s

    python = [sys.executable, "-c"]
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stalled,
        subprocess.Popen([*python, BY_A_PROCESS_EACH], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker,
    ):
        assert worker.stdin
        assert worker.stdout
        worker.stdin.write(b"first item, after imports\n")
        worker.stdin.flush()
        worker.stdout.readline()
        sample_with(asked, stalled.pid, now_s=1000.0)
        sample_with(waits, worker.pid, now_s=1000.0)
        with subprocess.Popen([*python, ASKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as check:
            assert check.stdout
            sample_with(asked, stalled.pid, check.pid, now_s=1001.0)
            check.stdout.readline()
            faults = work.read([check.pid])[check.pid].faults
            sample_with(asked, stalled.pid, check.pid, now_s=1002.0)
            while_asked = sample_with(asked, stalled.pid, check.pid, now_s=1003.0)
        afterwards = sample_with(asked, stalled.pid, now_s=1004.0)
        worker.stdin.write(b"one\n")
        worker.stdin.flush()
        worker.stdout.readline()
        worked = sample_with(waits, worker.pid, now_s=1001.0)

    assert faults > 10 * Thresholds().page_faults_idle_per_s
    assert (while_asked, afterwards) == (3.0, 4.0)
    assert worked == 0.0


# In the sampler


class Docker:
    """The list of Docker. A test moves containers between running and stopped."""

    def __init__(self, running: Container | None = None, down: Container | None = None) -> None:
        self.running = running
        self.down = down
        self.silent = False

    def latest(self) -> Listing:
        if self.silent:
            raise OSError("no answer")
        return Listing(
            containers={} if self.running is None else {self.running.id: self.running},
            down={} if self.down is None else {self.down.id: self.down},
            taken_s=0.0,
            duration_s=0.0,
        )


RUNNING = build.container(pid=os.getpid(), folders=("f0",))
RESTARTED = replace(RUNNING, incarnation=f"{build.DOCKER_ID}@2024-05-01T11:00:00Z")
ALIVE = build.sighting(pid=os.getpid(), folder="f0")
DEAD = build.sighting(alive=False, pid=None, container_id=None, folder="f0")


def sampler(house: Path, docker: Docker | None = None, **changes: Any) -> Sampler:
    engines = {} if docker is None else {"docker": docker}
    return Sampler(host="box-1", directory=house, containers=engines, gpus=None, thresholds=Thresholds(**changes))


def sample_with(found: Sampler, monkeypatch: pytest.MonkeyPatch, *seen: WorkerReading) -> Snapshot:
    monkeypatch.setattr(workers, "read", lambda _: WorkerReadings(workers=seen))
    return found.sample()


def evidence_of(snapshot: Snapshot) -> WorkerFacts:
    facts = evidence.worker_evidence("w0", snapshot, now=snapshot.taken)
    assert facts is not None
    return facts


def place(snapshot: Snapshot) -> tuple[str | None, str | None]:
    facts = evidence_of(snapshot)
    return facts.container, facts.container_incarnation


def test_dead_worker_was_in_its_last_container(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = house / "group"
    group.mkdir()
    for name, text in (("cgroup.procs", f"{os.getpid()}\n"), ("memory.current", "7\n"), ("memory.stat", "anon 7\n")):
        (group / name).write_text(text)
    for name in ("directory", "memory_directory"):
        monkeypatch.setattr(cgroup, name, lambda *_, **__: group)
    found = sampler(house, Docker(replace(RUNNING, folders=())))

    assert place(sample_with(found, monkeypatch, ALIVE)) == ("worker-0", RUNNING.incarnation)
    dead = sample_with(found, monkeypatch, DEAD)
    assert place(dead) == ("worker-0", RUNNING.incarnation)
    assert (evidence_of(dead).alive, evidence_of(dead).container_workers, evidence_of(dead).dead_s) == (False, 0, 0.0)
    later = sample_with(found, monkeypatch, DEAD)
    assert (evidence_of(later).dead_s or 0.0) > 0.0
    assert evidence_of(later).ram_bytes is not None  # it runs another process


def test_container_that_stopped_with_its_worker_is_known(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Docker(RUNNING)
    found = sampler(house, docker)
    sample_with(found, monkeypatch, ALIVE)
    docker.running, docker.down = None, replace(RUNNING, pid=0)

    dead = sample_with(found, monkeypatch, DEAD)

    assert place(dead) == ("worker-0", RUNNING.incarnation)
    assert dead.containers == ()
    assert (evidence_of(dead).ram_bytes, evidence_of(dead).gpu_idle_s, evidence_of(dead).work_unknown) == (
        None,
        None,
        "the container does not run",
    )


def test_removed_container_keeps_its_name(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Docker(RUNNING)
    found = sampler(house, docker)
    sample_with(found, monkeypatch, ALIVE)

    docker.running = None
    assert place(sample_with(found, monkeypatch, DEAD)) == ("worker-0", RUNNING.incarnation)
    docker.silent = True
    assert place(sample_with(found, monkeypatch, DEAD)) == ("worker-0", RUNNING.incarnation)


def test_restarted_container_restarts_the_death_time(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Docker(RUNNING)
    found = sampler(house, docker)
    sample_with(found, monkeypatch, ALIVE)
    waited = [sample_with(found, monkeypatch, DEAD) for _ in range(3)][-1]
    docker.running = RESTARTED

    started = sample_with(found, monkeypatch, DEAD)

    assert (evidence_of(waited).dead_s or 0.0) > 0.0
    assert evidence_of(started).dead_s == 0.0
    assert place(started) == ("worker-0", RESTARTED.incarnation)


def test_worker_in_a_paused_container_is_not_dead(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Docker(RUNNING)
    found = sampler(house, docker)
    waited = [sample_with(found, monkeypatch, DEAD) for _ in range(3)][-1]
    still = [sample_with(found, monkeypatch, ALIVE) for _ in range(3)][-1]
    docker.running = replace(RUNNING, paused=True)
    asleep, frozen = sample_with(found, monkeypatch, DEAD), sample_with(found, monkeypatch, ALIVE)
    docker.running = RUNNING

    assert (evidence_of(waited).dead_s or 0.0) > 0.0
    assert evidence_of(still).cpu_idle_s is not None
    assert (evidence_of(asleep).dead_s, evidence_of(frozen).cpu_idle_s) == (None, None)
    assert frozen.unknown["worker-0", "death", "paused"] == 1
    assert frozen.unknown["worker-0", "cpu", "paused"] == 1
    assert evidence_of(sample_with(found, monkeypatch, DEAD)).dead_s == 0.0
    assert evidence_of(sample_with(found, monkeypatch, ALIVE)).cpu_idle_s == 0.0


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(build.sighting(worker=build.worker_file(worker="w1"), folder="f0", alive=None), id="untested"),
        pytest.param(
            build.sighting(worker=build.worker_file(worker="w1"), folder="f0", pid=None, container_id=None),
            id="other pid namespace",
        ),
    ],
)
def test_uncertain_worker_count_is_unknown(other: WorkerReading, house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampler(house, Docker(RUNNING))

    assert evidence_of(sample_with(found, monkeypatch, ALIVE)).container_workers == 1
    assert evidence_of(sample_with(found, monkeypatch, ALIVE, other)).container_workers is None
    assert evidence_of(sample_with(found, monkeypatch, DEAD, other)).container_workers is None


@pytest.mark.parametrize(
    ("docker", "found"),
    [
        pytest.param(Docker(RUNNING), "worker-0", id="running, with its folder"),
        pytest.param(Docker(None, RUNNING), "worker-0", id="stopped, with its folder"),
        pytest.param(Docker(replace(RUNNING, folders=("f1",))), None, id="another folder"),
        pytest.param(Docker(RUNNING, replace(RUNNING, id="cd" * 32)), None, id="two with its folder"),
        pytest.param(Docker(), None, id="no container"),
        pytest.param(None, None, id="no engine"),
    ],
)
def test_dead_worker_never_seen_alive_was_in_the_container_with_its_folder(
    docker: Docker | None, found: str | None, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = sample_with(sampler(house, docker), monkeypatch, DEAD)

    assert evidence_of(dead).container == found
    assert evidence_of(dead).dead_s == 0.0


def test_new_incarnation_has_no_container_of_the_old_one(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampler(house, Docker(replace(RUNNING, folders=())))
    sample_with(found, monkeypatch, ALIVE)

    other = replace(DEAD, worker=replace(DEAD.worker, incarnation="inc-2"))

    assert place(sample_with(found, monkeypatch, other)) == (None, None)


def test_untested_lock_is_not_a_death(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampler(house, Docker(RUNNING))
    sample_with(found, monkeypatch, ALIVE)

    unknown = sample_with(found, monkeypatch, replace(DEAD, alive=None))

    assert evidence_of(unknown).dead_s is None
    assert place(unknown) == (None, None)
    assert place(sample_with(found, monkeypatch, DEAD)) == ("worker-0", RUNNING.incarnation)


def test_killed_bare_worker_is_logged_once(house: Path, start_worker: StartWorker, logged: LogCapture) -> None:
    worker = start_worker("w0", job_id=7)
    found = sampler(house, dead_after_s=0.3)
    alive = evidence_of(found.sample())
    worker.kill()

    dead = eventually(lambda: facts if (facts := evidence_of(found.sample())).dead_s and facts.dead_s >= 0.3 else None)
    found.sample()

    assert (dead.alive, dead.container_kind, dead.container) == (False, "process", "w0")
    assert dead.container_incarnation == alive.container_incarnation
    assert (dead.job_id, dead.attempt) == (7, 1)
    log_lines = [(each["log_level"], each["event"], each["container"]) for each in logged.entries]
    assert log_lines == [("error", "worker dead: process ended", "w0")]


@pytest.mark.parametrize("job_id", [None, 7])
def test_dead_worker_in_an_unknown_container_is_logged_only_with_a_job(
    job_id: int | None,
    house: Path,
    start_worker: StartWorker,
    logged: LogCapture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_worker("w0", job_id=job_id).kill()
    monkeypatch.setattr(procfs, "pid_namespace", lambda: 1)
    found = sampler(house, dead_after_s=0.2)

    eventually(lambda: (evidence_of(found.sample()).dead_s or 0.0) >= 0.2)

    assert [each["container"] for each in logged.entries] == ([] if job_id is None else [None])


def test_new_exporter_knows_the_process_of_a_killed_bare_worker(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0", job_id=7)
    alive = evidence_of(sampler(house).sample())
    worker.kill()

    found = sampler(house)
    dead, later = evidence_of(found.sample()), evidence_of(found.sample())

    assert (alive.process_ended, alive.worker_uid) == (None, os.getuid())
    assert (dead.alive, dead.container_kind, dead.container, dead.process_ended) == (False, "process", "w0", True)
    assert dead.container_incarnation == alive.container_incarnation
    assert (dead.container_workers, dead.worker_uid) == (0, os.getuid())
    assert (later.dead_s or 0.0) > 0.0


@pytest.mark.parametrize("silent", [True, False], ids=["Docker is silent", "two containers mount it"])
def test_file_in_a_folder_that_containers_may_mount_names_no_process(
    silent: bool, house: Path, start_worker: StartWorker
) -> None:
    start_worker("w0", job_id=7).kill()
    mounts = replace(RUNNING, folders=("w0",))
    docker = Docker(mounts, replace(mounts, id="cd" * 32))
    docker.silent = silent

    dead = evidence_of(sampler(house, docker).sample())

    assert (dead.alive, dead.container) == (False, None)


@pytest.mark.parametrize(
    ("file", "ended"),
    [
        pytest.param({}, True, id="start time gone"),
        pytest.param({"start_ticks": procfs.start_ticks(os.getpid())}, False, id="runs without its lock"),
        pytest.param({"start_ticks": None}, None, id="no start time"),
        pytest.param({"pid_namespace": 1}, None, id="other pid namespace"),
        pytest.param({"pid_namespace": None}, None, id="older worker"),
        pytest.param({"pid": 0}, None, id="no pid"),
        pytest.param({"pid": 2**40}, None, id="impossible pid"),
    ],
)
def test_process_of_a_dead_worker_has_ended_or_is_unknown(
    file: dict[str, int | None], ended: bool | None, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {"pid": os.getpid(), "start_ticks": 1, "pid_namespace": procfs.pid_namespace(), **file}
    dead = replace(DEAD, worker=replace(DEAD.worker, **own))

    found = evidence_of(sample_with(sampler(house), monkeypatch, dead))

    assert found.process_ended is ended
    assert (found.container_kind == "process") is (ended is not None)


def test_process_of_a_dead_worker_is_the_last_holder_of_its_lock(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(ALIVE, pid=os.getpid(), container_id=None)
    found = sampler(house)
    sample_with(found, monkeypatch, bare)
    named = replace(DEAD.worker, pid=os.getpid(), start_ticks=1, pid_namespace=procfs.pid_namespace())

    dead = evidence_of(sample_with(found, monkeypatch, replace(DEAD, worker=named)))

    assert (dead.container_kind, dead.process_ended) == ("process", False)


def test_live_workers_in_the_group_of_a_dead_one_are_counted() -> None:
    leader = subprocess.Popen(["sleep", "600"], process_group=0)
    member = subprocess.Popen(["sleep", "600"], process_group=leader.pid)
    process = procfs.ProcessId.of(leader.pid)
    leader.kill()
    leader.wait()

    dead = processes.dead_process(process, [member.pid, os.getpid()])
    member.kill()
    member.wait()
    unknown = processes.dead_process(process, [member.pid])

    assert dead == (True, 1)
    assert unknown == (True, None)


def test_folder_of_a_worker_is_read(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", folder="own")

    (seen,) = workers.read(house).workers

    assert seen.folder == "own"


# Unknown work


def test_work_of_every_process_of_a_container_is_read(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0")
    found = sampler(house)
    found.sample()

    (seen,) = found.sample().containers

    assert seen.page_fault_idle_s is not None
    assert seen.cpu_idle_s is not None
    assert seen.work_unknown is None or seen.io_idle_s is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(PermissionError("not ours"), "unreadable", id="refused"),
        pytest.param(ValueError("no such line"), "unreadable", id="not understood"),
        pytest.param(KeyError("rchar"), "unreadable", id="a line is missing"),
    ],
)
def test_unreadable_work_is_unknown_and_counted(
    error: Exception, reason: str, house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker("w0")

    def refuse(*_: Any) -> dict[int, ProcessWork]:
        raise error

    monkeypatch.setattr(Work, "read", refuse)
    snapshot = sampler(house).sample()

    assert snapshot.containers[0].work_idle_s is None
    assert snapshot.unknown["w0", "work", reason] == 1
    assert snapshot.containers[0].ram_bytes is not None


def test_work_of_unknown_processes(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker("w0")
    found = sampler(house)
    before = found.sample().containers[0].page_fault_idle_s
    monkeypatch.setattr(processes, "resident_bytes", failing)

    after = found.sample().containers[0]

    assert before is not None
    assert (after.page_fault_idle_s, after.gpu_unknown is not None) == (None, True)


def failing(*_: object, **__: object) -> int:
    raise OSError("none can be read")


def test_unreadable_io_is_counted(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker("w0")
    monkeypatch.setattr(Work, "_io", lambda *_: None)
    snapshot = sampler(house).sample()

    assert (snapshot.containers[0].io_idle_s, snapshot.containers[0].page_fault_idle_s) == (None, 0.0)
    assert snapshot.unknown["w0", "work", "io_unreadable"] == 1


def test_work_of_a_crowd_is_unknown(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    start_worker("w0")
    monkeypatch.setattr(processes, "PROCESSES_MAX", 0)
    snapshot = sampler(house).sample()

    assert snapshot.containers[0].work_unknown is not None
    assert snapshot.containers[0].work_unknown.message == "1 processes are more than 0"
    assert snapshot.unknown["w0", "work", "too_many"] == 1
