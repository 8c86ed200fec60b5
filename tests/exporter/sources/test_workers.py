"""Workers as their files and locks tell of them: real files, real locks, real deaths, and tenants who play tricks."""

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


def test_a_living_worker_is_seen_with_its_job_and_pid(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0", folder="slot-a", job_id=7)

    found = read(house)

    (sighting,) = found.workers
    assert (sighting.alive, sighting.pid) == (True, worker.pid)
    assert sighting.worker.incarnation == worker.incarnation
    assert sighting.job is not None
    assert sighting.job.job_id == 7
    assert sighting.container_id == cgroup.container_id(worker.pid)
    assert (dict(found.errors), found.duplicates) == ({}, 0)


def test_a_worker_killed_is_dead_while_its_files_remain(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", job_id=7).kill()

    (sighting,) = read(house).workers

    assert (sighting.alive, sighting.pid, sighting.container_id) == (False, None, None)
    assert sighting.job is not None


def test_a_worker_that_ended_cleanly_is_not_there(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0", job_id=7).end()

    assert read(house) == WorkerReadings(workers=())


def test_looking_does_not_take_the_lock_away(house: Path, start_worker: StartWorker) -> None:
    start_worker("w0")

    assert [read(house).workers[0].alive for _ in range(3)] == [True, True, True]


def test_without_its_lock_file_whether_a_worker_lives_is_unknown(house: Path) -> None:
    path = leave(house, "w0")
    assert read(house).workers[0].alive is False

    path.with_name("w0.lock").unlink()

    found = read(house)
    assert found.workers[0].alive is None
    assert dict(found.errors) == {"lock_missing": 1}


def test_a_folder_may_hide_a_worker(house: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
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


# One bad file costs its own worker only


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
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
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
        pytest.param(oversized_in_the_middle_of_a_letter, "oversized", id="oversized, cut within a letter"),
        pytest.param(another_name, "name", id="of another name than its file"),
        pytest.param(lone_surrogate, "field", id="a text that no scrape can carry"),
        pytest.param(folder, "not_a_file", id="a folder"),
        pytest.param(pipe, "not_a_file", id="a pipe"),
        pytest.param(link, "unreadable", id="a symbolic link"),
        pytest.param(listening_socket, "unreadable", id="a socket"),
    ],
)
def test_an_untrusted_file_costs_its_worker(spoil: Callable[[Path], None], reason: str, house: Path) -> None:
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
        pytest.param(lone_surrogate_as_model, "field", id="a text that no scrape can carry"),
        pytest.param(pipe, "not_a_file", id="a pipe"),
        pytest.param(link, "unreadable", id="a symbolic link"),
    ],
)
def test_an_untrusted_job_file_costs_its_job(spoil: Callable[[Path], None], reason: str, house: Path) -> None:
    job_path = leave(house, "w0").with_name("w0.job.json")
    job = build.job_file(worker="w0", incarnation=build.worker_file().incarnation)
    job_path.write_text(state_file.render(job))
    assert read(house).workers[0].job == job
    spoil(job_path)

    found = read(house)

    assert (names(found), found.workers[0].job) == (["w0"], None)
    assert dict(found.errors) == {reason: 1}
    assert found.first_errors[reason].startswith(f"{job_path}: ")


def test_a_pipe_that_somebody_holds_open_does_not_hold_us_up(house: Path) -> None:
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


@pytest.mark.parametrize("spoil", [pytest.param(pipe, id="a pipe"), pytest.param(folder, id="a folder")])
def test_a_lock_that_is_no_file_is_skipped(spoil: Callable[[Path], None], house: Path) -> None:
    lock = leave(house, "w0").with_name("w0.lock")
    spoil(lock)

    found = read(house)

    assert found.workers[0].alive is None
    assert dict(found.errors) == {"lock_unreadable": 1}
    assert found.first_errors["lock_unreadable"].startswith(f"{lock}: ")


def test_a_lock_behind_a_link_tells_nothing(house: Path, start_worker: StartWorker) -> None:
    start_worker("other")
    lock = leave(house, "w0").with_name("w0.lock")
    lock.unlink()
    lock.symlink_to(house / "other/other.lock")

    assert {each.worker.worker: each.alive for each in read(house).workers} == {"other": True, "w0": None}


def test_a_linked_folder_is_not_followed(house: Path, tmp_path: Path) -> None:
    leave(house, "good")
    leave(tmp_path, "outside")
    (house / "linked").symlink_to(tmp_path / "outside")

    assert names(read(house)) == ["good"]


def test_half_made_files_hidden_by_their_dot_are_passed_by(house: Path) -> None:
    path = leave(house, "w0")
    path.with_name(".w1.worker.json").write_text("{")
    path.with_name(".w0.worker.json.new").write_text("{")

    assert read(house).errors == {}


def test_the_job_of_an_earlier_incarnation_is_not_this_workers(house: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w0", job_id=7)
    job = build.job_file(worker="w0", incarnation="the-one-before")
    (worker.folder / "w0.job.json").write_text(state_file.render(job))

    found = read(house)

    assert found.workers[0].job is None
    assert dict(found.errors) == {"foreign": 1}


# Two that claim one name


def test_of_two_with_one_name_the_living_is_kept(house: Path, start_worker: StartWorker) -> None:
    leave(house, "w0", folder="a-stale-one")
    worker = start_worker("w0", folder="b")
    leave(house, "w0", folder="c-stale-too")

    found = read(house)

    assert [sighting.pid for sighting in found.workers] == [worker.pid]
    assert found.duplicates == 2


@pytest.mark.parametrize(("honest", "liar"), [("a", "b"), ("b", "a")], ids=["honest folder first", "liar's first"])
def test_a_later_process_cannot_claim_an_age(honest: str, liar: str, house: Path, start_worker: StartWorker) -> None:
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
    """Rewrite its file, and put a folder where its heartbeat would write the truth again."""
    path = rival.folder / "w0.worker.json"
    worker = state_file.parse_worker(path.read_text())
    (rival.folder / ".w0.worker.json.new").unlink(missing_ok=True)
    (rival.folder / ".w0.worker.json.new").mkdir()
    older = state_file.Stamp(boottime_s=0.0, boot_id=worker.started.boot_id, unix_s=0.0)
    claim = build.worker_file(worker="w0", incarnation=worker.incarnation, started=older)
    path.write_text(state_file.render(claim))


# Bounds, and what cannot be read


def test_a_tenant_with_endless_files_crowds_out_itself_only(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FILES_MAX", 3)
    for number in range(5):
        leave(house, f"w{number}", folder="greedy")
    leave(house, "zeta")

    found = read(house)

    assert names(found) == ["w0", "w1", "w2", "zeta"]
    assert dict(found.errors) == {"too_many": 1}


def test_a_folder_of_endless_files_is_read_within_bounds(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """As nobody for a while: permissions mean nothing to root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def public_house() -> Iterator[Path]:
    """A $GPUWARDEN_RUNTIME_DIR that everyone can reach."""
    directory = Path(tempfile.mkdtemp(prefix="gw-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_a_folder_that_may_not_be_read_is_counted_and_costs_itself_only(public_house: Path) -> None:
    leave(public_house, "good")
    leave(public_house, "closed").parent.chmod(0)

    with unprivileged():
        found = workers.read(public_house)

    (public_house / "closed").chmod(0o755)
    assert names(found) == ["good"]
    assert dict(found.errors) == {"unreadable": 1}


def test_a_lock_that_may_not_be_read_tells_nothing(public_house: Path) -> None:
    lock = leave(public_house, "w0").with_name("w0.lock")
    lock.chmod(0)

    with unprivileged():
        found = workers.read(public_house)

    assert found.workers[0].alive is None


def test_without_its_directory_the_source_fails_as_a_whole(house: Path) -> None:
    with pytest.raises(FileNotFoundError):
        workers.read(house / "nowhere")


def test_a_worker_that_dies_has_no_pid(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    start_worker("w0")
    (tmp_path / "proc").mkdir()

    (sighting,) = workers.read(house, proc=tmp_path / "proc").workers

    assert (sighting.alive, sighting.pid, sighting.container_id) == (True, None, None)


def test_a_worker_that_ends_while_it_is_read_is_no_error(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_file_holds_is_parsed_once_and_read_at_each_look(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(house, "w0", folder="slot")
    before = read(house).workers[0].worker
    path = house / "slot" / f"w0{state_file.WORKER_SUFFIX}"
    monkeypatch.setattr(state_file, "parse_worker", lambda _: pytest.fail("it was parsed again"))
    again = read(house).workers[0].worker
    monkeypatch.undo()
    path.write_text(path.read_text().replace('"queue": "', '"queue": "another-'))  # in place, within the same moment
    after = read(house).workers[0].worker
    path.write_text("{")
    broken = read(house)

    assert again is before
    assert after.queue == f"another-{before.queue}"
    assert (broken.workers, dict(broken.errors)) == ((), {"not_json": 1})


def test_of_files_that_are_gone_nothing_is_remembered(house: Path) -> None:
    path = leave(house, "w0", folder="slot")
    seen = read(house).workers
    path.unlink()

    for _ in range(2):
        read(house)

    assert len(seen) == 1

    assert (workers._WORKER_FILES._now, workers._WORKER_FILES._before) == ({}, {})


def test_a_workers_container_is_its_cgroup(house: Path, start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker("w0")
    group = tmp_path / "proc" / str(worker.pid) / "cgroup"
    group.parent.mkdir(parents=True)
    group.write_text(f"0::/system.slice/docker-{build.DOCKER_ID}.scope\n")

    (sighting,) = workers.read(house, proc=tmp_path / "proc").workers

    assert (sighting.pid, sighting.container_id) == (worker.pid, build.DOCKER_ID)
