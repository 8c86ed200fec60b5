"""Modules in a running exporter: none which only other programs need."""

import http.client
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.exporter.conftest import StartWorker
from tests.exporter.http.test_server import environment
from tests.exporter.sources.containers.docker_daemon import EventDaemon, daemon
from tests.waiting import eventually


def answers(port: int, path: str) -> bool:
    """Whether the page answers with success."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def _worker(start_worker: StartWorker) -> None:
    start_worker("w0")


def loaded(house: Path, *arguments: object) -> set[str]:
    """The packages which an exporter has loaded after requests, as Python reports them."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "gpuwarden",
        "exporter",
        "--runtime-dir",
        house,
        "--pods",
        "off",
        "--nvml",
        "off",
        "--port",
        0,
        "--sample-interval-s",
        0.05,
        *arguments,
    ]
    process = subprocess.Popen(list(map(str, command)), env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr
    log_lines: list[str] = []
    with process:
        try:
            while not log_lines or "exporter ready" not in log_lines[-1]:
                log_lines.append(process.stderr.readline())
                assert log_lines[-1], log_lines
            port = int(log_lines[-1].partition('"port": ')[2].partition(",")[0])  # the line may contain another one
            for path in ("/metrics", "/"):
                assert answers(port, path), path
            for path in ("/-/ready", "/evidence?worker=w0"):  # at twenty samples a second one can be late
                eventually(partial(answers, port, path), f"{path} answers")
        finally:
            process.terminate()
        log_lines += process.communicate(timeout=20)[1].splitlines()
    assert process.returncode == 0, log_lines
    modules = (line.rpartition("|")[2].strip() for line in log_lines if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules}


NEEDLESS = {"bcrypt", "httpx", "pynvml", "sqlalchemy", "yaml"}
CLIENT = {"docker", "requests"}


def test_running_exporter_loads_no_library_of_other_programs(house: Path) -> None:
    found = loaded(house, "--docker", "none")

    assert {"exporter", "gpuwarden", "prometheus_client", "structlog"} <= found
    assert found.isdisjoint(NEEDLESS | CLIENT)


def test_exporter_with_an_engine_loads_only_its_client(house: Path, short_path: Path) -> None:
    event_daemon = EventDaemon()

    with daemon(short_path, event_daemon) as url:
        found = loaded(house, "--docker", url)

    assert event_daemon.listings
    assert found >= CLIENT
    assert found.isdisjoint(NEEDLESS)
