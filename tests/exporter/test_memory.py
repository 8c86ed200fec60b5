"""What a running exporter holds in memory: nothing of what only another program, or another host, needs."""

import http.client
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.exporter.conftest import StartWorker
from tests.exporter.http.test_server import environment
from tests.exporter.sources.containers.docker_daemon import Telling, daemon
from tests.waiting import eventually


def answers(port: int, path: str) -> bool:
    """Whether a page is there."""
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
    """The packages that an exporter has loaded that was scraped and asked; Python itself says so."""
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
    told: list[str] = []
    with process:
        try:
            while not told or "exporter ready" not in told[-1]:
                told.append(process.stderr.readline())
                assert told[-1], told
            port = int(told[-1].partition('"port": ')[2].partition(",")[0])  # another line may be in this one
            for path in ("/metrics", "/"):
                assert answers(port, path), path
            for path in ("/-/ready", "/evidence?worker=w0"):  # at twenty looks a second one can be late for it
                eventually(partial(answers, port, path), f"{path} answers")
        finally:
            process.terminate()
        told += process.communicate(timeout=20)[1].splitlines()
    assert process.returncode == 0, told
    modules = (line.rpartition("|")[2].strip() for line in told if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules}


NEEDLESS = {"pynvml", "sqlalchemy"}
CLIENT = {"docker", "requests"}


def test_a_running_exporter_has_loaded_no_library_that_only_others_need(house: Path) -> None:
    found = loaded(house, "--docker", "none")

    assert {"bcrypt", "exporter", "gpuwarden", "prometheus_client", "structlog"} <= found
    assert found.isdisjoint(NEEDLESS | CLIENT)


def test_nor_one_that_asks_an_engine_which_it_has_loaded_the_client_for(house: Path, short_path: Path) -> None:
    telling = Telling()

    with daemon(short_path, telling) as url:
        found = loaded(house, "--docker", url)

    assert telling.listings
    assert found >= CLIENT
    assert found.isdisjoint(NEEDLESS)
