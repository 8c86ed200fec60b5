"""Bars of `gpuwarden job wait` in a real terminal."""

import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.job import JobClass, JobId
from gpuwarden.queue import JobStore, Submission
from gpuwarden.reporter import Reporter
from tests.terminal import terminal
from tests.waiting import eventually


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "host").write_text("box1\n")
    return f"sqlite:///{tmp_path / 'queue.db'}"


def test_bar_shows_known_steps_and_goes_when_the_job_ends(tmp_path: Path, url: str) -> None:
    with closing(JobStore.open(url)) as store, Reporter(tmp_path, worker="w1", queue="gpu") as reporter:
        store.runs.submit(Submission(queue="gpu", payload={"task": "train"}, steps_total=40), now=store.now())
        its = reporter.incarnation
        job = store.claims.claim("gpu", host="box1", worker="w1", incarnation=its, now=store.now())
        assert job is not None
        reporter.start_job(
            job_id=1, attempt=1, job_class=JobClass.GPU, model=None, budget_s=0, stall_timeout_s=0, steps_total=40
        )
        reporter.ready()
        with terminal("job", "wait", "1", "--queue-db", url, "--runtime-dir", str(tmp_path)) as (process, said):
            eventually(lambda: "job 1 train" in said() and "0/40" in said(), "the bar")

            def is_seen() -> bool:
                reporter.step()
                return re.search(r"[1-9]\d*/40", said()) is not None

            eventually(is_seen, "the next step")
            store.claims.complete(job.job_id, attempt=1, incarnation=its, now=store.now())
            eventually(lambda: process.poll() is not None, "it ends")

            assert process.returncode == 0
            assert "1 completed\r\n" in said()
            assert said().count("\x1b[?25h") == 1, "the cursor is shown again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_shows_the_cursor_again(tmp_path: Path, url: str, number: signal.Signals) -> None:
    with closing(JobStore.open(url)) as store:
        store.runs.submit(Submission(queue="gpu", payload={}), now=store.now())
    with terminal("job", "wait", "1", "--queue-db", url, "--runtime-dir", str(tmp_path)) as (process, said):
        eventually(lambda: "\x1b[?25l" in said(), "it waits")
        process.send_signal(number)
        eventually(lambda: process.poll() is not None, "it ends")

        assert process.returncode == 128 + number
        assert said().count("\x1b[?25h") == 1, "the cursor is shown again"


def test_without_a_terminal_there_is_no_bar(tmp_path: Path, url: str) -> None:
    with closing(JobStore.open(url)) as store:
        store.runs.submit(Submission(queue="gpu", payload={}), now=store.now())
        store.admin.cancel(JobId(1), reason="a test", now=store.now())
    program = [sys.executable, "-m", "gpuwarden", "job", "wait", "1", "--queue-db", url]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (1, "1 cancelled\n", "")
