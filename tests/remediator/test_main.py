"""Start and end of `serve` and `execute` as programs, and the lock of the executor."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from gpuwarden import logs
from gpuwarden.cli.main import main
from gpuwarden.queue import JobStore
from gpuwarden.supervisor import files as supervision
from remediator.executor.lock import ExecutorLock
from remediator.ledger.chain import ExecutorHeartbeat
from remediator.ledger.ledger import Ledger
from tests.asking import PLAIN
from tests.remediator.builders import HOST
from tests.waiting import eventually

TERM_GRACE_S = 60.0
"""TimeoutStopSec of deploy/templates/gpuwarden-executor.service."""

TOKEN = "0123456789abcdef-token"


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "host").write_text(f"{HOST}\n")
    (folder / "token").write_text(TOKEN)
    (folder / "web.yml").write_text("bearer_token_file: token\n")
    return folder


@pytest.fixture
def execute(runtime_dir: Path) -> list[str]:
    """The command line of an executor."""
    databases = ["--ledger", f"sqlite:///{runtime_dir}/ledger.db", "--queue-db", f"sqlite:///{runtime_dir}/queue.db"]
    return ["remediator", "execute", "--runtime-dir", str(runtime_dir), *databases, "--interval-s", "0.05"]


@pytest.fixture
def run_until_sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run a program in this process and send SIGTERM once it is up. Returns its exit code."""
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(arguments: list[str], *, up: Callable[[], object]) -> int:
        def end() -> None:
            eventually(up, "it is up")
            os.kill(os.getpid(), signal.SIGTERM)

        ender = threading.Thread(target=end)
        ender.start()
        code = main(arguments)
        ender.join()
        return code

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def beats(runtime_dir: Path) -> ExecutorHeartbeat | None:
    if not (runtime_dir / "ledger.db").exists():
        return None
    ledger = Ledger.open(f"sqlite:///{runtime_dir}/ledger.db")
    try:
        return ledger.reports.totals(HOST).executor
    finally:
        ledger.close()


def refused(arguments: list[str], **env: str) -> tuple[int, list[str]]:
    """Run a program that does not start. Returns its exit code and the lines that are not log lines."""
    ended = subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, [line for line in ended.stderr.splitlines() if not line.startswith("{")]


def test_serve_exits_0_on_sigterm(runtime_dir: Path, run_until_sigterm: Callable[..., int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        "--runtime-dir",
        str(runtime_dir),
        "--ledger",
        f"sqlite:///{runtime_dir}/l.db",
        "--web-config-file",
        str(runtime_dir / "web.yml"),
    ]

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/-/ready", trust_env=False, verify=PLAIN).status_code == 200
        except httpx.TransportError:
            return False

    handler = signal.getsignal(signal.SIGTERM)
    assert run_until_sigterm(["remediator", "serve", *options, "--port", str(port)], up=answers) == 0
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("armed", ["--armed", "--no-armed"])
def test_execute_writes_heartbeats_and_exits_0(
    runtime_dir: Path, execute: list[str], run_until_sigterm: Callable[..., int], armed: str
) -> None:
    assert run_until_sigterm([*execute, armed], up=lambda: beats(runtime_dir)) == 0

    found = beats(runtime_dir)
    assert found is not None
    assert found.armed is (armed == "--armed")


def test_disarm_outlasts_a_restart_with_armed(
    runtime_dir: Path, execute: list[str], run_until_sigterm: Callable[..., int]
) -> None:
    assert run_until_sigterm([*execute, "--armed"], up=lambda: beats(runtime_dir)) == 0
    assert main(["disarm", "--ledger", f"sqlite:///{runtime_dir}/ledger.db"]) == 0
    last = beats(runtime_dir)

    assert run_until_sigterm([*execute, "--armed"], up=lambda: beats(runtime_dir) != last) == 0

    found = beats(runtime_dir)
    assert found is not None
    assert found.armed is False


@pytest.mark.parametrize("armed", ["--armed", "--no-armed"])
def test_supervisors_of_the_host_read_whether_execute_is_armed(
    runtime_dir: Path, execute: list[str], run_until_sigterm: Callable[..., int], armed: str
) -> None:
    """The file goes with the program: a supervisor then checks the budget itself."""
    seen = []

    def up() -> object:
        seen.append(supervision.read_executor(runtime_dir))
        return seen[-1]

    assert run_until_sigterm([*execute, armed], up=up) == 0

    assert seen[-1] is not None
    assert seen[-1].armed is (armed == "--armed")
    assert supervision.read_executor(runtime_dir) is None


@pytest.mark.needs_postgres
def test_second_executor_exits_1_on_postgres(
    runtime_dir: Path, postgres_url: str, run_until_sigterm: Callable[..., int]
) -> None:
    databases = ["--ledger", postgres_url, "--queue-db", postgres_url, "--allow-shared-role"]
    execute = ["remediator", "execute", "--runtime-dir", str(runtime_dir), *databases, "--interval-s", "0.05"]
    ledger = Ledger.open(postgres_url)
    lock = ExecutorLock(ledger, host=HOST)

    code, said = refused(execute)

    lock.close()
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith(
        f"gpuwarden remediator: another executor holds this ledger's lock (gpuwarden pid {os.getpid()} "
    )
    assert run_until_sigterm(execute, up=ledger.executors.last_beats) == 0
    ledger.close()


def test_second_executor_exits_1(runtime_dir: Path, execute: list[str], run_until_sigterm: Callable[..., int]) -> None:
    with (runtime_dir / "log").open("wb") as log:
        first = subprocess.Popen([sys.executable, "-m", "gpuwarden", *execute], stderr=log)
    try:
        eventually(lambda: beats(runtime_dir) or first.poll() is not None, "the first one has a heartbeat")

        code, said = refused(execute)

        assert (code, len(said)) == (1, 1)
        assert said[0].startswith(
            f"gpuwarden remediator: another executor holds this ledger's lock (pid {first.pid} holds"
        )
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        assert '"event": "executor stopped"' in (runtime_dir / "log").read_text()
    finally:
        first.kill()
        first.wait()
    last = beats(runtime_dir)

    assert run_until_sigterm(execute, up=lambda: beats(runtime_dir) != last) == 0


def test_executor_starts_and_ends_while_the_queue_is_locked(runtime_dir: Path, execute: list[str]) -> None:
    JobStore.open(f"sqlite:///{runtime_dir}/queue.db").close()
    with (
        (runtime_dir / "log").open("wb") as log,
        closing(sqlite3.connect(runtime_dir / "queue.db", isolation_level=None)) as its_own,
    ):
        its_own.execute("PRAGMA locking_mode = EXCLUSIVE")
        its_own.execute("BEGIN EXCLUSIVE")
        process = subprocess.Popen([sys.executable, "-m", "gpuwarden", *execute], stderr=log)
        try:
            eventually(lambda: beats(runtime_dir) or process.poll() is not None, "it has a heartbeat", within_s=60)
            eventually(lambda: "queue unreachable" in (runtime_dir / "log").read_text(), "a sweep fails", within_s=60)
            process.send_signal(signal.SIGTERM)

            assert process.wait(TERM_GRACE_S) == 0
        finally:
            process.kill()
            process.wait()


def test_dry_run_is_logged(runtime_dir: Path, execute: list[str]) -> None:
    with (runtime_dir / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "gpuwarden", *execute], stderr=log)
    try:
        eventually(lambda: "dry run" in (runtime_dir / "log").read_text(), "the dry run is logged")
    finally:
        process.kill()
        process.wait()
    assert "arm it with `gpuwarden arm`" in (runtime_dir / "log").read_text()


def test_invalid_settings_are_one_line_each_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["remediator", "execute", "--ledger", "sqlite:////l.db", "--retries-max", "many"]) == 2

    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("gpuwarden remediator execute: error: ").partition(" (")[0] for line in said] == [
        "missing --queue-db",
        "'many' is invalid for --retries-max",
    ]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda runtime_dir: (runtime_dir / "host").unlink(), "no host key at"),
        (lambda runtime_dir: (runtime_dir / "queue.db").mkdir(), "queue.db is not a regular file"),
    ],
    ids=["no host key", "no queue"],
)
def test_failed_start_of_execute_is_one_line(
    runtime_dir: Path, execute: list[str], broken: Callable[[Path], None], says: str
) -> None:
    broken(runtime_dir)

    code, said = refused([*execute, "--docker", "none"])

    assert code == 1
    assert said[0].startswith("gpuwarden remediator: ")
    assert says in said[0]
