"""The two programs as they are started: what is wired, how they end, and who may execute."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gpuwarden import logs
from gpuwarden.cli.main import main
from remediator.executor.lock import ExecutorLock
from remediator.ledger.ledger import Ledger
from tests.asking import PLAIN
from tests.remediator.builders import HOST
from tests.waiting import eventually

TOKEN = "0123456789abcdef-token"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "host").write_text(f"{HOST}\n")
    (folder / "token").write_text(TOKEN)
    (folder / "web.yml").write_text("bearer_token_file: token\n")
    return folder


@pytest.fixture
def execute(house: Path) -> list[str]:
    """How the executor of this house is started."""
    databases = ["--ledger", f"sqlite:///{house}/ledger.db", "--queue-db", f"sqlite:///{house}/queue.db"]
    return ["remediator", "execute", "--runtime-dir", str(house), *databases, "--interval-s", "0.05"]


@pytest.fixture
def told_to_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run a program in this process; once it is up, send this process SIGTERM; its exit code."""
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


def beats(house: Path) -> tuple[bool, float, int] | None:
    if not (house / "ledger.db").exists():
        return None
    ledger = Ledger.open(f"sqlite:///{house}/ledger.db")
    try:
        return ledger.reports.totals(HOST).executor
    finally:
        ledger.close()


def refused(arguments: list[str], **env: str) -> tuple[int, list[str]]:
    """A program that does not start: its exit code and what it says beside its log."""
    ended = subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, [line for line in ended.stderr.splitlines() if not line.startswith("{")]


def test_serve_ends_with_0_when_told_to(house: Path, told_to_end: Callable[..., int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        "--runtime-dir",
        str(house),
        "--ledger",
        f"sqlite:///{house}/l.db",
        "--web-config-file",
        str(house / "web.yml"),
    ]

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/-/ready", trust_env=False, verify=PLAIN).status_code == 200
        except httpx.TransportError:
            return False

    handler = signal.getsignal(signal.SIGTERM)
    assert told_to_end(["remediator", "serve", *options, "--port", str(port)], up=answers) == 0
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("armed", ["--armed", "--no-armed"])
def test_execute_beats_and_exits(house: Path, execute: list[str], told_to_end: Callable[..., int], armed: str) -> None:
    assert told_to_end([*execute, armed], up=lambda: beats(house)) == 0

    found = beats(house)
    assert found is not None
    assert found[0] is (armed == "--armed")


def test_an_order_outlives_start_armed(house: Path, execute: list[str], told_to_end: Callable[..., int]) -> None:
    assert told_to_end([*execute, "--armed"], up=lambda: beats(house)) == 0
    assert main(["disarm", "--ledger", f"sqlite:///{house}/ledger.db"]) == 0
    last = beats(house)

    assert told_to_end([*execute, "--armed"], up=lambda: beats(house) != last) == 0

    found = beats(house)
    assert found is not None
    assert found[0] is False


def test_execute_supervises_processes(house: Path, execute: list[str], told_to_end: Callable[..., int]) -> None:
    workers = house / "workers.toml"
    workers.write_text("[worker.w1]\nargv = ['true']\npid_file = 'p'\nlog_file = 'l'\n")

    assert told_to_end([*execute, "--docker", "none", "--processes", str(workers)], up=lambda: beats(house)) == 0


@pytest.mark.needs_postgres
def test_a_second_executor_exits_1_on_postgres(house: Path, postgres_url: str, told_to_end: Callable[..., int]) -> None:
    databases = ["--ledger", postgres_url, "--queue-db", postgres_url]
    execute = ["remediator", "execute", "--runtime-dir", str(house), *databases, "--interval-s", "0.05"]
    ledger = Ledger.open(postgres_url)
    lock = ExecutorLock(ledger, host=HOST)

    code, said = refused(execute)

    lock.close()
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith(
        f"gpuwarden remediator: another executor holds this ledger's lock (gpuwarden pid {os.getpid()} "
    )
    assert told_to_end(execute, up=ledger.executors.last_beats) == 0
    ledger.close()


def test_a_second_executor_exits_1(house: Path, execute: list[str], told_to_end: Callable[..., int]) -> None:
    with (house / "log").open("wb") as log:
        first = subprocess.Popen([sys.executable, "-m", "gpuwarden", *execute], stderr=log)
    try:
        eventually(lambda: beats(house) or first.poll() is not None, "the first one beats")

        code, said = refused(execute)

        assert (code, len(said)) == (1, 1)
        assert said[0].startswith(
            f"gpuwarden remediator: another executor holds this ledger's lock (pid {first.pid} holds"
        )
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        assert '"event": "executor stopped"' in (house / "log").read_text()
    finally:
        first.kill()
        first.wait()
    last = beats(house)

    assert told_to_end(execute, up=lambda: beats(house) != last) == 0


def test_a_dry_run_says_so_in_its_log(house: Path, execute: list[str]) -> None:
    with (house / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "gpuwarden", *execute], stderr=log)
    try:
        eventually(lambda: "dry run" in (house / "log").read_text(), "it says that it is a dry run")
    finally:
        process.kill()
        process.wait()
    assert "arm it with `gpuwarden arm`" in (house / "log").read_text()


def test_settings_that_will_not_do_are_a_line_each_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["remediator", "execute", "--ledger", "sqlite:////l.db", "--retries-max", "many"]) == 2

    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("gpuwarden remediator execute: error: ").partition(" (")[0] for line in said] == [
        "--queue-db",
        "'many' will not do for --retries-max",
    ]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda house: (house / "host").unlink(), "no host key at"),
        (lambda house: (house / "queue.db").mkdir(), "unable to open database file"),
        (lambda house: (house / "workers.toml").write_text("worker = 3"), "invalid file of supervised workers"),
    ],
    ids=["no host key", "no queue", "a bad file of workers"],
)
def test_a_bad_execute_is_a_line(house: Path, execute: list[str], broken: Callable[[Path], None], says: str) -> None:
    (house / "workers.toml").write_text("[worker]")
    broken(house)

    code, said = refused([*execute, "--docker", "none", "--processes", str(house / "workers.toml")])

    assert code == 1
    assert said[0].startswith("gpuwarden remediator: ")
    assert says in said[0]
