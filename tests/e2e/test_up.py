"""`make up`: the whole chain until it is told to stop, kept in one folder, a port in use named."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.chain import CHECKOUT, LISTENERS
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

HEALTH = {
    "exporter": "/healthz", "remediator": "/healthz", "alertmanager": "/-/ready", "prometheus": "/-/ready",
}  # fmt: skip


def test_it_answers_everywhere_stops_cleanly_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ports = free_ports()
    with up(tmp_path, ports, "--host", "box1") as (process, log):
        eventually(lambda: "ready; Ctrl-C" in log.read_text(), "it is ready", within_s=40, log=log.read_text)
        for part, path in HEALTH.items():
            assert httpx.get(f"http://127.0.0.1:{ports[part]}{path}", trust_env=False).status_code == 200
        assert "dry run" in log.read_text()
        armed = httpx.get(f"http://127.0.0.1:{ports['remediator']}/metrics", trust_env=False).text
        assert "gpuwarden_remediator_armed 0.0" in armed
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    token = (tmp_path / "data" / "token").read_text()
    assert (tmp_path / "data" / "token").stat().st_mode & 0o077 == 0

    with up(tmp_path, ports) as (process, log):
        eventually(lambda: "ready; Ctrl-C" in log.read_text(), "it is ready again", within_s=40, log=log.read_text)
        assert "host box1" in log.read_text()
        assert (tmp_path / "data" / "token").read_text() == token
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    for port in ports.values():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    ports = free_ports()
    with socket.create_server(("127.0.0.1", ports["prometheus"])), up(tmp_path, ports) as (process, log):
        assert process.wait(timeout=30) == 1

    assert f"port {ports['prometheus']}, wanted for prometheus, cannot be used" in log.read_text()
    assert "--prometheus-port" in log.read_text()


def free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        probes = {part: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for part in LISTENERS}
        return {part: probe.getsockname()[1] for part, probe in probes.items()}


@contextmanager
def up(folder: Path, ports: dict[str, int], *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = folder / "up.log"
    listening = [word for part, port in ports.items() for word in (f"--{part}-port", str(port))]
    command = [sys.executable, "-m", "deploy.up", "--data", str(folder / "data"), *listening, *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=file, stderr=file)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()
