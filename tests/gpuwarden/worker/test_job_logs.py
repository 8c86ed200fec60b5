"""Logs of jobs: the output of each attempt."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.worker import job_logs, log_writer
from gpuwarden.worker.job_logs import JobLogError
from tests.waiting import eventually


def test_newest_attempt_is_shown_by_default(tmp_path: Path) -> None:
    for attempt in (1, 2, 10):
        job_logs.path_of(tmp_path, 7, attempt).write_text(f"attempt {attempt}\n")
    (tmp_path / "job-7-attempt-x.log").touch()

    assert list(job_logs.lines(job_logs.newest(tmp_path, 7))) == ["attempt 10\n"]
    assert job_logs.newest(tmp_path, 7, 2).read_text() == "attempt 2\n"
    with pytest.raises(JobLogError, match=r"no log of attempt 3 of job 7 in .*: see the host and user that ran it"):
        job_logs.newest(tmp_path, 7, 3)
    with pytest.raises(JobLogError, match="no log of job 8 in"):
        job_logs.newest(tmp_path / "missing", 8)


def test_followed_log_ends_with_its_attempt(tmp_path: Path) -> None:
    path = job_logs.path_of(tmp_path, 7, 1)
    path.write_text("first\n")
    answers = iter([True, True, False])

    def goes_on() -> bool:
        more = next(answers)
        with path.open("a") as log:
            log.write(f"{more}\n")
        return more

    assert list(job_logs.lines(path, goes_on=goes_on)) == ["first\n", "True\n", "True\n", "False\n"]


def test_logs_of_the_newest_jobs_are_kept(tmp_path: Path) -> None:
    for job_id in range(5):
        for attempt in (1, 2):
            path = job_logs.path_of(tmp_path, job_id, attempt)
            path.touch()
            os.utime(path, (job_id, job_id))
    (tmp_path / "mine.log").touch()

    with job_logs.kept(tmp_path, 9, 1, jobs_max=3):
        pass

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "job-3-attempt-1.log", "job-3-attempt-2.log", "job-4-attempt-1.log", "job-4-attempt-2.log",
        "job-9-attempt-1.log", "mine.log",
    ]  # fmt: skip


def test_log_that_is_written_now_is_not_deleted(tmp_path: Path) -> None:
    with job_logs.kept(tmp_path, 1, 1):
        eventually(lambda: _is_locked(tmp_path / "job-1-attempt-1.log"))
        os.utime(tmp_path / "job-1-attempt-1.log", (1, 1))
        with job_logs.kept(tmp_path, 2, 1, jobs_max=1):
            pass
    with job_logs.kept(tmp_path, 3, 1, jobs_max=2):
        pass

    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-2-attempt-1.log", "job-3-attempt-1.log"]


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return path.exists()
    return False


def test_logs_that_are_older_than_their_job_are_of_another_queue(tmp_path: Path) -> None:
    for attempt in (1, 2):
        path = job_logs.path_of(tmp_path, 7, attempt)
        path.write_text("other\n")
        os.utime(path, (1000, 1000))

    with pytest.raises(JobLogError):
        job_logs.newest(tmp_path, 7, submitted_at=1001)
    with job_logs.kept(tmp_path, 7, 1, submitted_at=1001):
        pass

    assert [path.read_text() for path in tmp_path.iterdir()] == [""]


def write(log: Path, most_bytes: int, *parts: bytes) -> tuple[bytes, bytes]:
    """Write the parts to a log as output; returns what is passed on, and what is said on standard error."""
    reads, writes = os.pipe()
    os.close(writes)
    command = [sys.executable, "-I", "-S", log_writer.__file__, str(log), str(most_bytes), str(reads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=(reads,), **pipes) as writer:  # type: ignore[call-overload]
        os.close(reads)
        output, errors = writer.communicate(b"".join(parts), timeout=30)
    return output, errors


def test_long_log_keeps_its_end_in_limited_space(tmp_path: Path) -> None:
    log = tmp_path / "job-1-attempt-1.log"
    printed = [b"line %06d\n" % number for number in range(40_000)]

    output, _ = write(log, 200_000, *printed)

    assert output == b"".join(printed)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200_000
    kept = "".join(job_logs.lines(log)).encode()
    assert 100_000 < len(kept) <= 200_000
    assert output.endswith(kept)


def test_log_grows_over_a_restart_of_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "job-1-attempt-1.log"

    write(log, 1000, b"first\n")
    write(log, 1000, b"second\n")

    assert log.read_text() == "first\nsecond\n"


def test_followed_log_goes_on_in_its_new_half(tmp_path: Path) -> None:
    path = job_logs.path_of(tmp_path, 7, 1)
    path.write_text("first\n")
    turns = iter(range(4))

    def goes_on() -> bool:
        turn = next(turns)
        if turn == 1:
            with path.open("a") as log:
                log.write("second\n")
            path.rename(tmp_path / "job-7-attempt-1.log.1")
            path.write_text("third\n")
        return turn < 3

    assert list(job_logs.lines(path, goes_on=goes_on)) == ["first\n", "second\n", "third\n"]


def test_output_that_is_gone_stops_neither_the_job_nor_its_log(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from gpuwarden.worker import job_logs
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
with job_logs.kept(Path({str(tmp_path)!r}), 1, 1):
    for _ in range(1000):
        print("x" * 100, flush=True)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    assert job_logs.newest(tmp_path, 1).stat().st_size == 101_000


def test_default_folder_differs_between_queues_and_holds_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    urls = [
        "sqlite:////data/a/queue.db", "sqlite:////data/b/queue.db",
        "postgresql://u:secret@db/q", "postgresql://u:secret@db/r", "postgresql://u:secret@other/q",
    ]  # fmt: skip

    folders = {str(job_logs.default_folder(url)) for url in urls}

    assert len(folders) == len(urls)
    assert all(folder.startswith("/state/gpuwarden/job-logs/") and "secret" not in folder for folder in folders)
    assert job_logs.default_folder("postgresql://u:other@db/q") == job_logs.default_folder(urls[2])


@pytest.mark.parametrize("url", ["nonsense", ""])
def test_invalid_address_has_no_default_folder(url: str) -> None:
    with pytest.raises(JobLogError, match="name one with --logs"):
        job_logs.default_folder(url)
