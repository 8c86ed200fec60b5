"""An exporter that sends its page to a central gateway."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from exporter.main import command
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import HostReport
from tests.certificates import authority
from tests.gpuwarden.gateway.builders import CentralDoor
from tests.gpuwarden.worker.builders import Spawn
from tests.waiting import eventually

TASK = '{"running_log_id":123,"remote_pid":"1","remote_pgid":"1","timestamp":"1734220000"}'
INFO = 'gpuwarden_exporter_info{host="box1",instance="box1",job="gpuwarden-exporter",nodename="box1"'


class Pushes(Protocol):
    def __call__(self, url: str, *options: str) -> subprocess.Popen[str]: ...


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "exporter.log"


@pytest.fixture
def token_file(tmp_path: Path, store: JobStore) -> Path:
    file = tmp_path / "token"
    file.write_text(store.host_tokens.enrol("box1", now=store.now()) + "\n")
    return file


@pytest.fixture
def push(spawn: Spawn, host_dir: Path, token_file: Path, log: Path) -> Pushes:
    """Start an exporter of box1 with a task, which reports each second."""
    (host_dir / "tasks").mkdir()
    (host_dir / "tasks" / "123.json").write_text(TASK)

    def start(url: str, *options: str) -> subprocess.Popen[str]:
        its = ["--runtime-dir", host_dir, "--port=0", "--docker=none", "--nvml=off", "--task-dir", host_dir / "tasks"]
        its += ["--push", url, "--token-file", token_file, "--push-interval-s=1"]
        return spawn("-m", "gpuwarden", "exporter", *map(str, its), *options, stderr=log)

    return start


def has(central: CentralDoor, start: str) -> Callable[[], bool]:
    return lambda: any(line.startswith(start) for line in central.published())


@pytest.mark.behaviour("D2")
@pytest.mark.behaviour("D9")
def test_exporter_sends_its_page_and_ends_with_sigterm(
    spawn: Spawn, tmp_path: Path, url: str, push: Pushes, log: Path
) -> None:
    central = CentralDoor(spawn, tmp_path, url)
    process = push(central.url)

    eventually(has(central, "gpuwarden_task_info{"), "its tasks are published", log=log.read_text)
    assert has(central, INFO)()
    assert has(central, 'up{host="box1",instance="box1",job="gpuwarden-exporter"} 1.0')()
    assert not has(central, "process_")()

    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert log.read_text().count("reports accepted") == 1


@pytest.mark.behaviour("D3")
def test_tasks_can_be_left_out(spawn: Spawn, tmp_path: Path, url: str, push: Pushes, log: Path) -> None:
    central = CentralDoor(spawn, tmp_path, url)
    push(central.url, "--no-push-tasks")

    eventually(has(central, INFO), "its page is published", log=log.read_text)
    eventually(has(central, "gpuwarden_sample_age_seconds"), "with a sample", log=log.read_text)
    assert not has(central, "gpuwarden_task")()


@pytest.mark.slow
def test_newest_page_is_sent_after_the_gateway_was_away(
    spawn: Spawn, tmp_path: Path, url: str, push: Pushes, log: Path, host_dir: Path
) -> None:
    central = CentralDoor(spawn, tmp_path, url)
    process = push(central.url)
    eventually(has(central, INFO), "its page is published", log=log.read_text)

    central.process.kill()
    central.process.wait()
    eventually(lambda: "report not accepted" in log.read_text(), "the failure is logged", log=log.read_text)
    process.send_signal(signal.SIGSTOP)  # it makes no page now
    (host_dir / "tasks" / "7.json").write_text(TASK.replace("123", "7"))
    process.send_signal(signal.SIGCONT)
    central.start()

    eventually(has(central, "gpuwarden_task_info{"), "its page is published", log=log.read_text)
    newest = 'gpuwarden_task_info{host="box1",instance="box1",job="gpuwarden-exporter",pgid="1",pid="1",task="7"}'
    eventually(has(central, newest), "the newest page is published", within_s=30, log=log.read_text)
    assert log.read_text().count("reports accepted") == 2
    assert "Connection refused" in log.read_text()


def test_wrong_token_is_named_and_a_new_one_is_read(
    spawn: Spawn, tmp_path: Path, url: str, push: Pushes, token_file: Path, log: Path
) -> None:
    central = CentralDoor(spawn, tmp_path, url)
    valid = token_file.read_text()
    token_file.write_text("wrong")
    push(central.url)
    eventually(lambda: "report not accepted" in log.read_text(), "it is refused", log=log.read_text)
    assert "401: the token is wrong, revoked, or not for the reports: make a token with" in log.read_text()

    scratch = token_file.with_name("new")
    scratch.write_text(valid)
    scratch.replace(token_file)
    eventually(has(central, INFO), "its page is published", log=log.read_text)


def test_certificate_is_checked(
    spawn: Spawn, tmp_path: Path, url: str, push: Pushes, log: Path, store: JobStore
) -> None:
    ours = authority(tmp_path / "ours")
    web = tmp_path / "web.yml"
    web.write_text(f"tls_server_config: {{cert_file: {ours.server.cert}, key_file: {ours.server.key}}}\n")
    central = CentralDoor(spawn, tmp_path, url, "--web-config-file", str(web))

    def reports() -> list[HostReport]:
        return list(store.host_reports.newest(fresh_s=60, now=store.now()))

    first = push(central.url.replace("http", "https"))
    eventually(lambda: "certificate verify failed" in log.read_text(), "it is refused", log=log.read_text)
    assert not reports()
    first.kill()
    push(central.url.replace("http", "https"), "--ca-file", str(ours.own.cert))
    eventually(lambda: bool(reports()), "it is accepted", log=log.read_text)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--push", "https://x"], "--push and --token-file go together"),
        (["--token-file", "t"], "--push and --token-file go together"),
        (["--push", "x", "--token-file", "t"], "--push: invalid address 'x': use https://HOST:PORT"),
        (["--push", "http://x", "--token-file", "t"], "--push: http://x is not encrypted, and would show the token"),
    ],
)
def test_wrong_options_are_refused(given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(given) == 2
    assert complaint in capsys.readouterr().err
