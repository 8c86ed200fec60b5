"""`--watch` at a terminal, without one, and with a reader that leaves."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.queue import JobStore, Submission
from remediator.ledger.ledger import Ledger
from remediator.remedies.guards import Act, Order
from tests.terminal import at_terminal, terminal
from tests.waiting import eventually

WATCH = ("job", "list", "--watch", "--queue-db")
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobStore]:
    with closing(JobStore.open(f"sqlite:///{tmp_path / 'queue.db'}")) as store:
        submit(store, "train")
        yield store


def submit(store: JobStore, task: str) -> None:
    store.runs.submit(Submission(queue="gpu", payload={"task": task}), now=store.now())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_terminal_is_redrawn_in_place_and_the_last_page_stays(
    queue: JobStore, tmp_path: Path, number: signal.Signals
) -> None:
    with terminal(*WATCH, f"sqlite:///{tmp_path / 'queue.db'}") as (process, said):
        eventually(lambda: "train" in said(), "the first page")
        submit(queue, "second-task")
        eventually(lambda: "second-task" in said(), "the next page")
        process.send_signal(number)
        eventually(lambda: process.poll() is not None, "it ends")

        assert (process.returncode, said().count(ALTERNATE), said().count(NORMAL)) == (128 + number, 1, 1)
        after = said().split(NORMAL)[1]
        assert "second-task" in after
        assert "Traceback" not in said()


def test_small_terminal_shows_the_newest_jobs_on_lines_that_fit(queue: JobStore, tmp_path: Path) -> None:
    for number in range(30):
        submit(queue, f"task-{number:02}")
    with terminal(*WATCH, f"sqlite:///{tmp_path / 'queue.db'}", rows=10) as (process, said):
        eventually(lambda: "task-29" in said(), "the first page")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        page = said().split(NORMAL)[0]

    assert "task-22" in page
    assert "task-21" not in page
    assert all(len(line) <= 80 for line in said().split(NORMAL)[1].splitlines())


@pytest.mark.usefixtures("queue")
def test_without_a_terminal_each_page_is_printed_and_sigterm_ends_it(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "gpuwarden", *WATCH, f"sqlite:///{tmp_path / 'queue.db'}"]
    with (out := tmp_path / "out").open("wb") as file:
        process = subprocess.Popen(program, stdout=file, stderr=file)
    eventually(lambda: out.read_text().count("train") >= 2, "two pages")
    process.terminate()

    assert process.wait(timeout=20) == 143
    assert "\x1b" not in out.read_text()
    assert "Traceback" not in out.read_text()


@pytest.mark.usefixtures("queue")
def test_reader_that_leaves_ends_it_without_a_word(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "gpuwarden", *WATCH, f"sqlite:///{tmp_path / 'queue.db'}"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"JOB" in process.stdout.readline()
    process.stdout.close()

    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_status_is_redrawn_in_place(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with closing(Ledger.open(url, host="box1")) as ledger:
        parts = [f"--{name}=none" for name in ("remediator", "exporter", "prometheus", "alertmanager", "queue-db")]
        with terminal("status", "--watch", "--ledger", url, *parts) as (process, said):
            eventually(lambda: "no executor ever ran" in said(), "the first page")
            ledger.executors.beat(host="box1", pid=1, armed=False, started_at=1.0, errors=0, now=time.time())
            eventually(lambda: "executor box1" in said(), "the next page")
            process.send_signal(signal.SIGINT)
            eventually(lambda: process.poll() is not None, "it ends")

            assert (process.returncode, said().count(ALTERNATE), said().count(NORMAL)) == (130, 1, 1)


@pytest.mark.parametrize("columns", [80, 200])
def test_status_fits_the_terminal(tmp_path: Path, columns: int) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    parts = [f"--{name}=none" for name in ("remediator", "exporter", "prometheus", "alertmanager", "queue-db")]
    reason = "4 workers need a restart, which is more than the limit of 3 in an hour on a ledger: " + "x" * 40
    with closing(Ledger.open(url, host="box1")) as ledger:
        ledger.orders.give(Order(act=Act.BREAKER, at=time.time(), who="gpuwarden", reason=reason))
    program = [sys.executable, "-m", "gpuwarden", "status", "--ledger", url, *parts]
    with at_terminal(program, columns=columns) as found:
        eventually(lambda: found.process.poll() is not None, "it ends")
        lines = found.said().splitlines()

    assert max(map(len, lines)) <= columns
    assert "ledger        ok        readable and writable" in lines
    begin = next(at for at, line in enumerate(lines) if line.startswith("  - circuit breaker open"))
    need = lines[begin : next(at for at, line in enumerate(lines) if "breaker reset`" in line) + 1]
    assert all(line.startswith("    ") for line in need[1:])
    assert " ".join(line.strip() for line in need).endswith(
        f"{reason}; find the cause, then run `gpuwarden breaker reset`"
    )
    assert len(need) == {80: 4, 200: 2}[columns]


def test_queue_that_does_not_exist_ends_the_watch_at_once(tmp_path: Path) -> None:
    with terminal(*WATCH, f"sqlite:///{tmp_path / 'absent.db'}") as (process, said):
        eventually(lambda: process.poll() is not None, "it ends")

        assert process.returncode == 1
        assert ALTERNATE not in said()
