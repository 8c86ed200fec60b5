"""Workers from their files and locks: real files, real locks, real deaths, and malicious containers."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.model.worker import WorkerReadings
from exporter.sources import workers
from gpuwarden import cgroup, procfs, state_file
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker, Worker
from tests.waiting import eventually, within


def read(house: Path) -> WorkerReadings:
    return within(10, lambda: workers.read(house))


def leave(house: Path, name: str, *, folder: str | None = None, text: str | None = None) -> Path:
    """A worker file and a free lock, without a living worker."""
    path = house / (folder or name) / f"{name}.worker.json"
    path.parent.mkdir(exist_ok=True)
    path.with_name(f"{name}.lock").touch()
    path.write_text(state_file.render(build.worker_file(worker=name)) if text is None else text)
    return path


def names(found: WorkerReadings) -> list[str]:
    return [sighting.worker.worker for sighting in found.workers]


def test_living_worker_is_read_with_its_job_and_pid(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0", folder="slot-a", job_id=7)

    found = read(house)

    (sighting,) = found.workers
    assert (sighting.alive, sighting.pid) == (True, worker.pid)
    assert sighting.worker.incarnation == worker.incarnation
    assert sighting.job is not None
    assert sighting.job.job_id == 7
    assert sighting.container_id == cgroup.container_id(worker.pid)
    assert (dict(found.errors), found.duplicates) == ({}, 0)


def test_killed_worker_is_dead_while_its_files_exist(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", job_id=7).kill()

    (sighting,) = read(house).workers

    assert (sighting.alive, sighting.pid, sighting.container_id) == (False, None, None)
    assert sighting.job is not None


def test_worker_that_ended_cleanly_is_not_listed(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", job_id=7).end()

    assert read(house) == WorkerReadings(workers=())


def test_read_does_not_take_the_lock(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0")

    assert [read(house).workers[0].alive for _ in range(3)] == [True, True, True]


def test_worker_without_a_lock_file_is_unknown(house: Path) -> None:
    path = leave(house, "w0")
    assert read(house).workers[0].alive is False

    path.with_name("w0.lock").unlink()

    found = read(house)
    assert found.workers[0].alive is None
    assert dict(found.errors) == {"lock_missing": 1}


def test_unread_folder_may_hide_a_worker(
    house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(house, "stale", folder="free")
    half(leave(house, "bad", folder="spoilt"))
    monkeypatch.setattr(workers, "FILES_MAX", 2)
    for number in range(3):
        leave(house, f"x{number}", folder="greedy")
    for folder in ("one", "two"):
        start_worker("w0", folder=folder)
    leave(house, "w0", folder="free")

    found = read(house)

    kept = next(each.folder for each in found.workers if each.worker.worker == "w0")
    assert found.unread == {"spoilt", "greedy", "one", "two"} - {kept}


# An invalid file affects only its worker


def no_text(path: Path) -> None:
    path.write_text("")


def half(path: Path) -> None:
    path.write_text(path.read_text()[: len(path.read_text()) // 2])


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"worker": "\xff"}')


def oversized(path: Path) -> None:
    path.write_text(path.read_text() + " " * state_file.SIZE_MAX_BYTES)


def oversized_in_the_middle_of_a_letter(path: Path) -> None:
    path.write_bytes(b"x" * state_file.SIZE_MAX_BYTES + "é".encode())


def another_name(path: Path) -> None:
    path.write_text(state_file.render(build.worker_file(worker="somebody-else")))


def lone_surrogate(path: Path) -> None:
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "queue": "\ud800"}))


def lone_surrogate_as_model(path: Path) -> None:
    path.write_text(path.read_text().replace('"sdxl"', r'"\ud800"'))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    secret = path.with_name("elsewhere")
    path.rename(secret)
    path.symlink_to(secret)


def listening_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket path has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(no_text, "not_json", id="empty"),
        pytest.param(half, "not_json", id="half-written"),
        pytest.param(not_utf8, "not_json", id="not UTF-8"),
        pytest.param(oversized, "oversized", id="oversized"),
        pytest.param(oversized_in_the_middle_of_a_letter, "oversized", id="oversized, cut within a character"),
        pytest.param(another_name, "name", id="name differs from its file"),
        pytest.param(lone_surrogate, "field", id="text that no page can carry"),
        pytest.param(folder, "not_a_file", id="folder"),
        pytest.param(pipe, "not_a_file", id="pipe"),
        pytest.param(link, "unreadable", id="symbolic link"),
        pytest.param(listening_socket, "unreadable", id="socket"),
    ],
)
def test_invalid_file_affects_only_its_worker(spoil: Callable[[Path], None], reason: str, house: Path) -> None:
    leave(house, "good")
    spoil(leave(house, "bad"))
    leave(house, "fine", folder="bad")

    found = read(house)

    assert names(found) == ["fine", "good"]
    assert dict(found.errors) == {reason: 1}
    assert found.first_errors[reason].startswith(f"{house}/bad/bad.")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(half, "not_json", id="half-written"),
        pytest.param(lone_surrogate_as_model, "field", id="text that no page can carry"),
        pytest.param(pipe, "not_a_file", id="pipe"),
        pytest.param(link, "unreadable", id="symbolic link"),
    ],
)
def test_invalid_job_file_affects_only_its_job(spoil: Callable[[Path], None], reason: str, house: Path) -> None:
    job_path = leave(house, "w0").with_name("w0.job.json")
    job = build.job_file(worker="w0", incarnation=build.worker_file().incarnation)
    job_path.write_text(state_file.render(job))
    assert read(house).workers[0].job == job
    spoil(job_path)

    found = read(house)

    assert (names(found), found.workers[0].job) == (["w0"], None)
    assert dict(found.errors) == {reason: 1}
    assert found.first_errors[reason].startswith(f"{job_path}: ")


def test_open_pipe_does_not_block_the_read(house: Path) -> None:
    leave(house, "good")
    path = leave(house, "bad")
    pipe(path)
    holder = os.open(path, os.O_RDWR)

    try:
        found = read(house)
    finally:
        os.close(holder)

    assert names(found) == ["good"]
    assert dict(found.errors) == {"not_a_file": 1}


@pytest.mark.parametrize("spoil", [pytest.param(pipe, id="pipe"), pytest.param(folder, id="folder")])
def test_lock_that_is_not_a_file_is_skipped(spoil: Callable[[Path], None], house: Path) -> None:
    lock = leave(house, "w0").with_name("w0.lock")
    spoil(lock)

    found = read(house)

    assert found.workers[0].alive is None
    assert dict(found.errors) == {"lock_unreadable": 1}
    assert found.first_errors["lock_unreadable"].startswith(f"{lock}: ")


def test_linked_lock_is_unknown(house: Path, start_worker: StartWorker) -> None:
    start_worker("other")
    lock = leave(house, "w0").with_name("w0.lock")
    lock.unlink()
    lock.symlink_to(house / "other/other.lock")

    assert {each.worker.worker: each.alive for each in read(house).workers} == {"other": True, "w0": None}


def test_linked_folder_is_not_followed(house: Path, tmp_path: Path) -> None:
    leave(house, "good")
    leave(tmp_path, "outside")
    (house / "linked").symlink_to(tmp_path / "outside")

    assert names(read(house)) == ["good"]


def test_hidden_incomplete_files_are_ignored(house: Path) -> None:
    path = leave(house, "w0")
    path.with_name(".w1.worker.json").write_text("{")
    path.with_name(".w0.worker.json.new").write_text("{")

    assert read(house).errors == {}


def test_job_of_an_earlier_incarnation_is_ignored(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0", job_id=7)
    job = build.job_file(worker="w0", incarnation="the-one-before")
    (worker.folder / "w0.job.json").write_text(state_file.render(job))

    found = read(house)

    assert found.workers[0].job is None
    assert dict(found.errors) == {"foreign": 1}


# Two workers with the same name


def test_living_worker_of_several_with_one_name_is_kept(house: Path, start_worker: StartWorker) -> None:
    leave(house, "w0", folder="a-stale-one")
    worker = start_worker("w0", folder="b")
    leave(house, "w0", folder="c-stale-too")

    found = read(house)

    assert [sighting.pid for sighting in found.workers] == [worker.pid]
    assert found.duplicates == 2


@pytest.mark.parametrize(
    ("honest", "liar"), [("a", "b"), ("b", "a")], ids=["honest folder first", "other folder first"]
)
def test_later_process_cannot_claim_an_earlier_start(
    honest: str, liar: str, house: Path, start_worker: StartWorker
) -> None:
    worker = start_worker("w0", folder=honest)
    eventually(lambda: uptime_ticks() > procfs.start_ticks(worker.pid) + 2)
    rival = start_worker("w0", folder=liar)
    claim_to_be_older(rival)

    found = read(house)

    assert [sighting.pid for sighting in found.workers] == [worker.pid]
    assert found.duplicates == 1


def uptime_ticks() -> float:
    return float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")


def claim_to_be_older(rival: Worker) -> None:
    """Rewrite its file, and block its heartbeat with a folder."""
    path = rival.folder / "w0.worker.json"
    worker = state_file.parse_worker(path.read_text())
    (rival.folder / ".w0.worker.json.new").unlink(missing_ok=True)
    (rival.folder / ".w0.worker.json.new").mkdir()
    older = state_file.Stamp(boottime_s=0.0, boot_id=worker.started.boot_id, unix_s=0.0)
    claim = build.worker_file(worker="w0", incarnation=worker.incarnation, started=older)
    path.write_text(state_file.render(claim))


# Bounds, and unreadable files


def test_folder_with_too_many_files_affects_only_itself(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FILES_MAX", 3)
    for number in range(5):
        leave(house, f"w{number}", folder="greedy")
    leave(house, "zeta")

    found = read(house)

    assert names(found) == ["w0", "w1", "w2", "zeta"]
    assert dict(found.errors) == {"too_many": 1}


def test_folder_with_endless_entries_is_read_within_bounds(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ENTRIES_MAX", 10)
    (house / "greedy").mkdir()
    for number in range(50):
        (house / "greedy" / str(number)).touch()
    leave(house, "zeta")

    found = read(house)

    assert names(found) == ["zeta"]
    assert dict(found.errors) == {"too_many": 1}


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root for a while, since root ignores permissions."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def public_house() -> Iterator[Path]:
    """A $GPUWARDEN_RUNTIME_DIR which every user can reach."""
    directory = Path(tempfile.mkdtemp(prefix="gw-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_forbidden_folder_is_counted_and_affects_only_itself(public_house: Path) -> None:
    leave(public_house, "good")
    leave(public_house, "closed").parent.chmod(0)

    with unprivileged():
        found = workers.read(public_house)

    (public_house / "closed").chmod(0o755)
    assert names(found) == ["good"]
    assert dict(found.errors) == {"unreadable": 1}


def test_forbidden_lock_is_unknown(public_house: Path) -> None:
    lock = leave(public_house, "w0").with_name("w0.lock")
    lock.chmod(0)

    with unprivileged():
        found = workers.read(public_house)

    assert found.workers[0].alive is None


def test_missing_directory_fails_the_source(house: Path) -> None:
    with pytest.raises(FileNotFoundError):
        workers.read(house / "nowhere")


def test_worker_that_dies_during_the_read_has_no_pid(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    start_worker("w0")
    (tmp_path / "proc").mkdir()

    (sighting,) = workers.read(house, proc=tmp_path / "proc").workers

    assert (sighting.alive, sighting.pid, sighting.container_id) == (True, None, None)


def test_worker_that_ends_during_the_read_is_not_an_error(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leave(house, "w0", folder="slot")
    leave(house, "a-first-one", folder="slot")
    parse = state_file.parse_worker

    def end_after_listing(text: str) -> state_file.WorkerFile:
        path.unlink(missing_ok=True)
        return parse(text)

    monkeypatch.setattr(state_file, "parse_worker", end_after_listing)

    found = read(house)

    assert names(found) == ["a-first-one"]
    assert dict(found.errors) == {}


def test_unchanged_content_is_parsed_once(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(house, "w0", folder="slot")
    before = read(house).workers[0].worker
    path = house / "slot" / f"w0{state_file.WORKER_SUFFIX}"
    monkeypatch.setattr(state_file, "parse_worker", lambda _: pytest.fail("it was parsed again"))
    again = read(house).workers[0].worker
    monkeypatch.undo()
    path.write_text(path.read_text().replace('"queue": "', '"queue": "another-'))  # in place, at the same time stamp
    after = read(house).workers[0].worker
    path.write_text("{")
    broken = read(house)

    assert again is before
    assert after.queue == f"another-{before.queue}"
    assert (broken.workers, dict(broken.errors)) == ((), {"not_json": 1})


def test_removed_files_leave_no_state(house: Path) -> None:
    path = leave(house, "w0", folder="slot")
    seen = read(house).workers
    path.unlink()

    for _ in range(2):
        read(house)

    assert len(seen) == 1

    assert (workers._WORKER_FILES._now, workers._WORKER_FILES._before) == ({}, {})


def test_container_of_a_worker_is_read_from_its_cgroup(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker("w0")
    group = tmp_path / "proc" / str(worker.pid) / "cgroup"
    group.parent.mkdir(parents=True)
    group.write_text(f"0::/system.slice/docker-{build.DOCKER_ID}.scope\n")

    (sighting,) = workers.read(house, proc=tmp_path / "proc").workers

    assert (sighting.pid, sighting.container_id) == (worker.pid, build.DOCKER_ID)
