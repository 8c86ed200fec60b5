"""Lock and files of a worker, as the exporter sees them.

This process never opens a lock file that it holds: a close would drop the lock.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.model.worker import WorkerReading
from exporter.sources import workers
from gpuwarden import procfs
from gpuwarden import reporter as reporter_module
from gpuwarden.job import JobClass, Phase
from gpuwarden.reporter import HostKeyError, LockHeldError, Reporter, StateFolderError, host_key
from gpuwarden.state_file import JobFile, LongStep, StateFileError, WorkerFile, parse_job, parse_worker
from tests.waiting import eventually

Spawn = Callable[..., subprocess.Popen[str]]

# A worker process with a reporter, which ends when its standard input closes.
SCRIPT = """
import ctypes, os, sys
from pathlib import Path
from gpuwarden import reporter
from gpuwarden.job import JobClass, Phase
JOB = dict(job_id=7, attempt=1, job_class=JobClass.GPU, model="m", budget_s=60.0, stall_timeout_s=5.0)
with reporter.Reporter(Path(sys.argv[1]), worker="w1", queue="gpu", heartbeat_s=0.05) as report:
    exec(sys.argv[2])
    sys.stdin.read()
"""


@pytest.fixture
def start(spawn: Spawn, host_dir: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a worker process that runs some lines, and wait for its files."""

    def run(lines: str = "") -> subprocess.Popen[str]:
        process = spawn("-c", SCRIPT, str(host_dir), lines)
        eventually(lambda: (seen := sighting(host_dir)) and seen.pid == process.pid, "the worker is seen alive")
        return process

    return run


def sighting(directory: Path) -> WorkerReading | None:
    """The one worker of a host as the exporter sees it, if any."""
    readings = workers.read(directory)
    assert not readings.errors
    assert len(readings.workers) <= 1
    return readings.workers[0] if readings.workers else None


def seen(directory: Path) -> WorkerReading:
    found = sighting(directory)
    assert found is not None
    return found


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    """A reporter in this process that writes each step."""
    monkeypatch.setattr(reporter_module, "STEP_WRITE_S", 0.0)
    with Reporter(tmp_path, worker="w1", queue="gpu", heartbeat_s=0.02) as opened:
        yield opened


def start_job(report: Reporter, **changed: Any) -> None:
    asked: dict[str, Any] = {
        "job_id": 7,
        "attempt": 1,
        "job_class": JobClass.GPU,
        "model": None,
        "budget_s": 60.0,
        "stall_timeout_s": 5.0,
    }
    report.start_job(**{**asked, **changed})


def job_file(report: Reporter) -> JobFile:
    return parse_job((report.folder / "w1.job.json").read_text())


def worker_file(report: Reporter) -> WorkerFile:
    return parse_worker((report.folder / "w1.worker.json").read_text())


# --- lock


def test_lock_of_a_live_worker_shows_its_pid(start: Callable[..., Any], host_dir: Path) -> None:
    process = start()

    found = seen(host_dir)
    assert (found.alive, found.pid, found.worker.pid) == (True, process.pid, process.pid)
    assert found.worker.start_ticks == procfs.start_ticks(process.pid)
    assert found.worker.pid_namespace == procfs.pid_namespace()


def test_killed_worker_leaves_its_files_and_a_free_lock(start: Callable[..., Any], host_dir: Path) -> None:
    process = start("report.start_job(**JOB)")
    eventually(lambda: seen(host_dir).job, "its job is seen")

    process.send_signal(signal.SIGKILL)
    process.wait()

    found = seen(host_dir)
    assert (found.alive, found.pid) == (False, None)
    assert found.job is not None
    assert found.job.job_id == 7


def test_stopped_worker_keeps_its_lock(start: Callable[..., Any], host_dir: Path) -> None:
    process = start()
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: stopped(process.pid), "the process is stopped")

    found = seen(host_dir)

    assert (found.alive, found.pid) == (True, process.pid)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_clean_end_removes_the_files(start: Callable[..., Any], host_dir: Path) -> None:
    process = start("report.start_job(**JOB); report.ready()")

    process.communicate()

    assert process.returncode == 0
    assert [path.name for path in (host_dir / "w1").iterdir()] == ["w1.lock"]


def test_second_process_of_one_worker_is_refused(start: Callable[..., Any], host_dir: Path) -> None:
    process = start("report.start_job(**JOB)")
    eventually(lambda: seen(host_dir).job, "its job is seen")

    with pytest.raises(LockHeldError, match=r"another process is worker 'w1'.*stop it, or use another name"):
        Reporter(host_dir, worker="w1", queue="gpu").open()

    found = seen(host_dir)
    assert (found.alive, found.pid) == (True, process.pid)
    assert found.job is not None


def test_successor_of_a_killed_worker_has_no_job(start: Callable[..., Any], host_dir: Path) -> None:
    first = start("report.start_job(**JOB)")
    before = seen(host_dir).worker.incarnation
    first.kill()
    first.wait()

    start()

    # The files of the first worker stay until its successor has the lock.
    eventually(lambda: seen(host_dir).alive and seen(host_dir).worker.incarnation != before, "the next one is there")
    assert seen(host_dir).job is None


def test_second_reporter_in_one_process_is_refused_and_the_lock_stays(report: Reporter) -> None:
    with pytest.raises(LockHeldError):
        Reporter(report.folder.parent, worker="w1", queue="gpu").open()

    look = "import sys; from pathlib import Path; from exporter.sources import workers\n"
    look += "print([each.pid for each in workers.read(Path(sys.argv[1])).workers])"
    done = subprocess.run([sys.executable, "-c", look, str(report.folder.parent)], capture_output=True, check=True)
    assert json.loads(done.stdout) == [os.getpid()]


def test_closed_reporter_can_be_opened_again_in_one_process(tmp_path: Path) -> None:
    for _ in range(2):
        with Reporter(tmp_path, worker="w1", queue="gpu") as opened:
            assert worker_file(opened).incarnation == opened.incarnation


def test_closing_in_a_forked_child_keeps_the_parents_lock(start: Callable[..., Any], host_dir: Path) -> None:
    forked = "pid = os.fork()\nif not pid:\n    report.close()\n    os._exit(0)\n"
    process = start(forked + "os.waitpid(pid, 0); report.start_job(**JOB)")
    eventually(lambda: seen(host_dir).job, "the parent goes on after its child ended")

    found = seen(host_dir)
    assert (found.alive, found.pid) == (True, process.pid)


# --- opening


def test_uncreatable_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")

    with pytest.raises(StateFolderError, match=r"cannot write state files in .*create it, writable for this user"):
        Reporter(tmp_path / "run", worker="w1", queue="gpu").open()


def test_failed_open_publishes_nothing_and_holds_no_lock(tmp_path: Path) -> None:
    in_the_way = tmp_path / "w1" / "w1.worker.json"
    in_the_way.mkdir(parents=True)
    (in_the_way / "x").touch()
    refused = Reporter(tmp_path, worker="w1", queue="gpu")
    with pytest.raises(StateFolderError):
        refused.open()
    refused.close()

    (in_the_way / "x").unlink()
    in_the_way.rmdir()
    with Reporter(tmp_path, worker="w1", queue="gpu") as opened:
        assert worker_file(opened).worker == "w1"


def test_file_system_without_locks_is_not_a_held_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("gpuwarden.reporter.fcntl.lockf", refuse)

    with pytest.raises(StateFolderError, match="No locks available"):
        Reporter(tmp_path, worker="w1", queue="gpu").open()


@pytest.mark.parametrize("names", [{"worker": "../w"}, {"worker": "w1", "subdirectory": "a/b"}])
def test_name_that_leaves_the_folder_is_refused(tmp_path: Path, names: dict[str, Any]) -> None:
    with pytest.raises(StateFileError):
        Reporter(tmp_path, queue="gpu", **names)


def test_container_has_its_own_folder(tmp_path: Path) -> None:
    with Reporter(tmp_path, worker="w1", queue="gpu", subdirectory="c1") as opened:
        assert opened.folder == tmp_path / "c1"
        assert seen_files(tmp_path / "c1") == {"w1.lock", "w1.worker.json"}


def seen_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_host_key_is_the_one_chosen_at_set_up(host_dir: Path) -> None:
    assert host_key(host_dir) == "box1"


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff"], ids=["missing", "empty", "words", "bytes"])
def test_invalid_host_key_is_refused_with_a_hint(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "host").write_bytes(content)

    with pytest.raises(HostKeyError, match=r"no host key at .*: write this host's name to the file"):
        host_key(tmp_path)


# --- the heartbeat


def test_heartbeat_continues_while_the_job_computes(report: Reporter) -> None:
    first = worker_file(report).heartbeat

    eventually(lambda: worker_file(report).heartbeat.boottime_s > first.boottime_s, "a later heartbeat")

    assert worker_file(report).loop.boottime_s <= first.boottime_s


def test_main_loop_is_seen_only_when_it_reports(report: Reporter) -> None:
    before = worker_file(report).loop

    report.loop_seen()

    eventually(lambda: worker_file(report).loop.boottime_s > before.boottime_s, "the loop was seen")


# --- the job


def test_beat_is_absent_until_the_first_step_phase(report: Reporter) -> None:
    start_job(report)
    report.phase(Phase.LOAD)
    report.phase(Phase.CHECKPOINT)
    assert job_file(report).step_beat is None

    report.ready()

    armed = job_file(report)
    assert armed.step_beat is not None
    assert armed.phase is Phase.STEP


def test_first_beat_is_published_even_if_the_next_instruction_hangs(start: Callable[..., Any], host_dir: Path) -> None:
    # PyDLL holds the GIL during the call: the whole process hangs.
    start("report.start_job(**JOB); report.ready(); ctypes.PyDLL(None).sleep(600)")

    eventually(lambda: (job := seen(host_dir).job) and job.step_beat, "the arming beat is seen")


def test_phase_is_a_beat_after_the_first_beat(report: Reporter) -> None:
    start_job(report)
    report.ready()
    first = job_file(report).step_beat
    assert first is not None

    report.phase(Phase.SAVE)

    later = job_file(report)
    assert later.phase is Phase.SAVE
    assert later.step_beat == later.phase_started
    assert later.step_beat.boottime_s > first.boottime_s


def test_beat_alone_keeps_phase_and_timeout_and_counts_no_step(report: Reporter) -> None:
    start_job(report)
    report.step_beat()
    assert job_file(report).step_beat is None, "it does not start the monitoring"
    report.ready()
    report.phase(Phase.LOAD, timeout_s=900)
    before = job_file(report)

    report.step_beat()

    later = job_file(report)
    assert before.step_beat is not None
    assert later.step_beat is not None
    assert later.step_beat.boottime_s > before.step_beat.boottime_s
    assert (later.phase, later.phase_started) == (Phase.LOAD, before.phase_started)
    assert (later.timeout_s, later.step) == (900.0, 0)


def test_phase_may_set_its_timeout(report: Reporter) -> None:
    start_job(report)
    report.ready()

    report.phase(Phase.EVAL, timeout_s=900)
    report.step()
    asked = job_file(report)
    report.phase(Phase.CHECKPOINT)

    assert (asked.phase, asked.timeout_s) == (Phase.EVAL, 900.0)
    assert job_file(report).timeout_s is None


def test_busy_timeout_is_of_the_job_unless_a_phase_sets_its_own(report: Reporter) -> None:
    start_job(report, busy_timeout_s=600.0)

    given = job_file(report).busy_timeout_s
    report.phase(Phase.STEP, busy_timeout_s=1800)
    own = job_file(report).busy_timeout_s
    report.phase(Phase.STEP, busy_timeout_s=-1)

    assert (given, own, job_file(report).busy_timeout_s) == (600.0, 1800.0, 600.0)
    assert report.write_errors == 1


def test_first_beat_ends_the_timeout_of_the_load(report: Reporter) -> None:
    start_job(report)
    report.phase(Phase.LOAD, timeout_s=900)

    report.ready()

    assert job_file(report).timeout_s is None


@pytest.mark.parametrize(
    "timeout_s", [0, -1.0, math.nan, math.inf, 1e12, 10**400, "long", object(), "900", b"900", True]
)
def test_invalid_phase_timeout_is_counted_and_the_phase_is_set(report: Reporter, timeout_s: Any) -> None:
    start_job(report)

    report.phase(Phase.EVAL, timeout_s=timeout_s)

    assert report.write_errors == 1
    assert (job_file(report).phase, job_file(report).timeout_s) == (Phase.EVAL, None)


def test_step_phase_by_the_job_sends_the_first_beat(report: Reporter) -> None:
    start_job(report)

    report.phase(Phase.STEP)

    assert job_file(report).step_beat is not None


def test_step_is_a_beat_and_counts(report: Reporter) -> None:
    start_job(report, steps_total=20)
    report.ready()

    report.step()
    first = job_file(report)
    report.step()
    report.step()
    third = job_file(report)

    assert (first.step, first.step_mean_s, first.step_max_s) == (1, None, None)
    assert first.step_beat is not None
    assert (third.step, third.steps_total) == (3, 20)
    assert third.step_mean_s is not None
    assert third.step_max_s is not None
    assert 0 < third.step_mean_s <= third.step_max_s


def test_longest_steps_include_suspend_time(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("gpuwarden.reporter.time.monotonic", lambda: now_s)
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: now_s + 5000.0)
    start_job(report)
    report.ready()
    for took_s in (0.0, 3.0, 8.0):
        now_s += took_s
        report.step()

    found = job_file(report)
    assert found.longest == (LongStep(took_s=8.0, began_s=5103.0), LongStep(took_s=3.0, began_s=5100.0))
    assert found.step_max_s == 8.0


def test_step_start_is_unknown_after_a_suspend(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = 100.0, 5000.0
    monkeypatch.setattr("gpuwarden.reporter.time.monotonic", lambda: now_s)
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: now_s + slept_s)
    start_job(report)
    report.ready()
    report.step()
    slept_s += 0.6
    now_s += 3.0
    report.step()
    asleep = job_file(report).longest

    start_job(report, attempt=2)
    report.step()
    now_s += 3.0
    report.step()

    assert asleep == (LongStep(took_s=3.0, began_s=None),)
    assert job_file(report).longest == (LongStep(took_s=3.0, began_s=5103.6),)


def test_job_file_has_earlier_visits_to_its_phase(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("gpuwarden.reporter.time.monotonic", lambda: now_s)
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: now_s + 5000.0)
    start_job(report)
    now_s += 4.0
    report.ready()
    for took_s in (60.0, 90.0):
        report.phase(Phase.EVAL)
        now_s += took_s
        report.step()  # an evaluation batch
        report.phase(Phase.STEP)
        now_s += 1.0
    stepping = job_file(report)
    report.phase(Phase.EVAL)
    evaluating = job_file(report)
    report.phase(Phase.LOAD)
    loading = job_file(report)
    start_job(report, attempt=2)
    report.ready()
    report.phase(Phase.EVAL)

    assert stepping.stays == ()
    assert evaluating.stays == (LongStep(took_s=90.0, began_s=5165.0), LongStep(took_s=60.0, began_s=5104.0))
    assert loading.stays == (LongStep(took_s=4.0, began_s=5100.0),)
    assert job_file(report).stays == (), "another attempt has been nowhere yet"


def test_step_ends_an_idle_phase_at_once(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "STEP_WRITE_S", 1.0)
    now_s = 100.0
    monkeypatch.setattr("gpuwarden.reporter.time.monotonic", lambda: now_s)
    start_job(report)
    report.ready()
    report.phase(Phase.IDLE, timeout_s=900)
    idle = job_file(report)

    now_s += 0.1  # less than the write interval
    report.step()

    stepping = job_file(report)
    assert (idle.phase, idle.timeout_s) == (Phase.IDLE, 900.0)
    assert (stepping.phase, stepping.timeout_s, stepping.step) == (Phase.STEP, None, 1)
    assert stepping.step_beat == stepping.phase_started
    assert idle.step_beat is not None
    assert stepping.phase_started.boottime_s > idle.step_beat.boottime_s


def test_step_after_idle_sends_the_first_beat(report: Reporter) -> None:
    start_job(report)
    report.phase(Phase.IDLE)
    idle = job_file(report)

    report.step()

    assert (idle.step_beat, job_file(report).phase) == (None, Phase.STEP)
    assert job_file(report).step_beat is not None


@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.IDLE])
def test_step_does_not_end_other_phases(report: Reporter, phase: Phase) -> None:
    start_job(report)
    report.phase(phase, timeout_s=900)
    before = job_file(report)

    report.step()
    report.step()

    after = job_file(report)
    assert after.step == 2
    assert after.step_max_s is not None
    assert (after.phase, after.phase_started, after.timeout_s) == (phase, before.phase_started, 900.0)


def test_step_does_not_wait_for_a_thread_that_sets_idle(report: Reporter) -> None:
    start_job(report)
    report.ready()
    report.phase(Phase.IDLE)

    with report._changing:
        beside = threading.Thread(target=report.step)
        beside.start()
        beside.join(timeout=10)
        waited, phase = beside.is_alive(), job_file(report).phase
    report.step()

    assert (waited, phase) == (False, Phase.IDLE)
    assert (job_file(report).phase, job_file(report).step) == (Phase.STEP, 2)


def test_earlier_step_does_not_end_an_idle_phase(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    start_job(report)
    report.ready()
    done_s = time.monotonic()
    report.phase(Phase.IDLE)

    with monkeypatch.context() as late:  # it read the clock, then the other thread ran
        late.setattr("gpuwarden.reporter.time.monotonic", lambda: done_s)
        report.step()
    late_step = job_file(report).phase
    report.step()

    assert (late_step, job_file(report).phase) == (Phase.IDLE, Phase.STEP)


def test_warm_up_step_sends_no_beat(report: Reporter) -> None:
    start_job(report)

    report.step()

    loading = job_file(report)
    assert (loading.phase, loading.step, loading.step_beat) == (Phase.LOAD, 1, None)


def test_steps_are_written_at_most_once_a_second(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "STEP_WRITE_S", 1.0)
    now_s = 100.0
    monkeypatch.setattr("gpuwarden.reporter.time.monotonic", lambda: now_s)
    start_job(report)

    report.step()
    assert job_file(report).step == 0
    now_s += 0.999
    report.step()
    assert job_file(report).step == 0
    now_s += 0.001
    report.step()

    assert job_file(report).step == 3


def test_new_attempt_starts_without_a_beat_and_from_zero(report: Reporter) -> None:
    start_job(report)
    report.step()
    report.step()
    report.items(done=2, failed=1)
    report.end_job()

    start_job(report, job_id=8, attempt=2)

    fresh = job_file(report)
    assert (fresh.job_id, fresh.attempt, fresh.step, fresh.step_beat) == (8, 2, 0, None)
    assert (fresh.step_mean_s, fresh.items_done, fresh.items_failed) == (None, 0, 0)


def test_items_are_published_with_the_next_write(report: Reporter) -> None:
    start_job(report)
    report.items(done=3, failed=1)
    assert job_file(report).items_done == 0

    report.ready()

    assert (job_file(report).items_done, job_file(report).items_failed) == (3, 1)


def test_ended_job_has_no_file_and_cannot_return(report: Reporter) -> None:
    start_job(report)

    report.end_job()
    report.step()
    report.ready()
    report.phase(Phase.SAVE)
    report.items(done=1, failed=0)

    assert seen_files(report.folder) == {"w1.lock", "w1.worker.json"}


# --- nothing raises into the job


def test_removed_folder_raises_nothing(report: Reporter) -> None:
    start_job(report)
    away = report.folder.rename(report.folder.with_name("away"))

    report.ready()
    report.step()
    report.phase(Phase.SAVE)
    counted = report.write_errors
    away.rename(report.folder)
    report.step()

    assert counted >= 3
    assert job_file(report).step == 2


def test_unremovable_files_raise_nothing_and_are_counted(report: Reporter) -> None:
    (report.folder / "w1.job.json").mkdir()

    report.end_job()

    assert report.write_errors == 1
    (report.folder / "w1.job.json").rmdir()


@pytest.mark.parametrize("budget_s", [float("inf"), float("nan"), 1j], ids=["inf", "nan", "complex"])
def test_non_finite_numbers_raise_nothing_and_are_counted(report: Reporter, budget_s: Any) -> None:
    start_job(report, budget_s=budget_s)

    assert report.write_errors == 1
    assert not (report.folder / "w1.job.json").exists()


class Int64:
    """An integer that json cannot write, as numpy.int64 or a 0-d tensor."""

    def __index__(self) -> int:
        return 5


def test_integers_of_any_library_are_item_counts(report: Reporter) -> None:
    start_job(report)

    report.items(done=Int64(), failed=0)  # type: ignore[arg-type]
    report.ready()

    assert job_file(report).items_done == 5
    assert report.write_errors == 0


@pytest.mark.parametrize("done", [None, "3", 1.5, -1])
def test_invalid_item_counts_change_nothing_and_are_counted(report: Reporter, done: Any) -> None:
    start_job(report)

    report.items(done=done, failed=0)
    report.ready()

    assert report.write_errors == 1
    assert job_file(report).items_done == 0


def test_phase_may_be_given_by_its_name(report: Reporter) -> None:
    start_job(report)

    report.phase("step")  # type: ignore[arg-type]

    assert job_file(report).phase is Phase.STEP
    assert job_file(report).step_beat is not None


def test_unknown_phase_changes_nothing_and_is_counted(report: Reporter) -> None:
    start_job(report)

    report.phase("decode")  # type: ignore[arg-type]

    assert report.write_errors == 1
    assert job_file(report).phase is Phase.LOAD


def test_signal_handler_may_report_while_its_thread_writes(report: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    start_job(report)
    replaced = Reporter._replace

    def interrupted(self: Reporter, suffix: str, text: str) -> None:
        monkeypatch.setattr(Reporter, "_replace", replaced)
        self.phase(Phase.CHECKPOINT)
        replaced(self, suffix, text)

    monkeypatch.setattr(Reporter, "_replace", interrupted)
    report.step()
    report.step()

    assert job_file(report).phase is Phase.CHECKPOINT


# --- atomic files


def test_reader_sees_the_old_or_the_new_state_whole(start: Callable[..., Any], host_dir: Path) -> None:
    process = start(
        "reporter.STEP_WRITE_S = 0.0; report.start_job(**JOB)\n"
        "while True:\n    report.step(); report.items(done=10 ** (report._timing.steps % 12), failed=0)"
    )
    path = host_dir / "w1" / "w1.job.json"
    eventually(path.exists, "the job's file")

    states: list[int] = []

    def read_many() -> bool:
        states.extend(parse_job(path.read_text()).step for _ in range(300))
        return len(states) >= 3000 and len(set(states)) > 100

    eventually(read_many, "a hundred states, each of them whole")

    assert process.poll() is None
    assert states == sorted(states)


def test_concurrent_steps_publish_whole_files(report: Reporter) -> None:
    start_job(report)
    with stepping(report, threads=4):
        for _ in range(1500):
            job_file(report)

    assert report.write_errors == 0


def test_late_step_of_a_thread_does_not_restore_an_ended_job(report: Reporter) -> None:
    with stepping(report, threads=2):
        for job_id in range(40):
            start_job(report, job_id=job_id)
            report.end_job()

            assert not (report.folder / "w1.job.json").exists()


class stepping:  # noqa: N801 - a context, named as it reads
    """Threads that call `step()` until the block ends."""

    def __init__(self, report: Reporter, *, threads: int) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._step_on, args=(report,)) for _ in range(threads)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _step_on(self, report: Reporter) -> None:
        while not self._over.is_set():
            report.step()
