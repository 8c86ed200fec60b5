"""What people type starts fast: help and lists import no heavy module that they do not use."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from gpuwarden.queue import JobStore, Submission
from remediator.ledger.ledger import Ledger
from tests.gpuwarden.worker.builders import Spawn, gateway
from tests.waiting import eventually

HEAVY: Final = {
    *("alembic", "bcrypt", "docker", "fastapi", "httpx", "prometheus_client", "psycopg", "pydantic"),
    *("pydantic_settings", "rich", "sqlalchemy.dialects.postgresql", "sqlalchemy.orm", "starlette", "structlog"),
    *("uvicorn", "yaml"),
}
"""Each takes 15 to 150 ms."""

PROGRAM: Final = """
import atexit, sys
from gpuwarden.cli.main import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.exit(main())
"""


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that name an empty queue and an empty ledger."""
    folder = tmp_path_factory.mktemp("databases")
    queue, ledger = (f"sqlite:///{folder / name}" for name in ("queue.db", "ledger.db"))
    with closing(JobStore.open(queue)), closing(Ledger.open(ledger, host="box1")):
        pass
    return {"GPUWARDEN_QUEUE_DB": queue, "GPUWARDEN_REMEDIATOR_LEDGER": ledger}


def imported(arguments: str, databases: dict[str, str]) -> set[str]:
    """The modules that a command imports."""
    program = [sys.executable, "-c", PROGRAM, *arguments.split()]
    ran = subprocess.run(program, env=os.environ | databases, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode in (0, 1), ran.stderr
    return set(ran.stderr.splitlines()[-1].split())


def test_help_imports_neither_a_database_nor_a_client() -> None:
    found = imported("--help", {})

    assert "gpuwarden.cli.main" in found
    assert found & {*HEAVY, "sqlalchemy", "asyncio"} == set()


def test_run_imports_only_the_standard_library_and_not_its_slow_parts(tmp_path: Path) -> None:
    found = imported("run --name true -- true", {"GPUWARDEN_RUNTIME_DIR": str(tmp_path)})

    assert "gpuwarden.supervisor.run" in found
    assert found & {*HEAVY, "asyncio", "email", "importlib.metadata", "logging", "sqlalchemy"} == set()


def test_worker_behind_a_gateway_imports_neither_a_database_nor_a_framework(
    tmp_path: Path, host_dir: Path, spawn: Spawn
) -> None:
    (host_dir / "w1").mkdir()
    (tmp_path / "jobs.py").write_text("def load(job, report):\n    return lambda: None\n")
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with closing(JobStore.open(url)) as store:
        store.runs.submit(Submission(queue="gpu"), now=store.now())
    gateway(spawn, host_dir, url)

    found = imported(
        "worker run jobs:load --name w1 --jobs-max 1",
        {
            "GPUWARDEN_RUNTIME_DIR": str(host_dir),
            "GPUWARDEN_QUEUE_DB": "gateway",
            "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path)),
        },
    )

    assert "jobs" in found
    assert found & {*HEAVY, "sqlalchemy"} == {"structlog"}


def test_gateway_in_front_of_a_central_one_imports_no_database(tmp_path: Path, host_dir: Path, spawn: Spawn) -> None:
    (tmp_path / "token").write_text("none\n")
    log = tmp_path / "log"
    its = f"--central http://127.0.0.1:1 --token-file {tmp_path}/token --runtime-dir {host_dir} --port 0"
    process = spawn("-c", PROGRAM, "gateway", "host", *its.split(), stderr=log)
    eventually(lambda: "gateway ready" in log.read_text(), "the gateway is ready", log=log.read_text)

    process.terminate()
    assert process.wait(timeout=20) == 0

    found = set(log.read_text().splitlines()[-1].split())
    assert "gpuwarden.gateway.main" in found
    assert found & {"alembic", "bcrypt", "psycopg", "pygments", "rich", "sqlalchemy", "yaml"} == set()


@pytest.mark.parametrize(
    "command",
    ["job list", "queue list", "runs list", "worker list", "gpu list", "host list", "wrangle list", "events me"],
)
def test_commands_of_the_queue_import_no_client(command: str, databases: dict[str, str]) -> None:
    found = imported(command, databases)

    assert "sqlalchemy" in found
    assert found & HEAVY == set()


@pytest.mark.parametrize("command", ["ledger list", "ledger summary", "ledger audit", "arm --yes", "disarm"])
def test_commands_of_the_ledger_import_neither_a_client_nor_the_queue(command: str, databases: dict[str, str]) -> None:
    found = imported(command, databases)

    assert "sqlalchemy" in found
    assert found & {*HEAVY, "gpuwarden.queue.store"} == set()


@pytest.mark.parametrize("command", ["status", "top"])
def test_status_and_top_without_http_parts_import_no_client(command: str, databases: dict[str, str]) -> None:
    parts = " ".join(f"--{name}=none" for name in ("remediator", "exporter", "prometheus", "alertmanager"))

    found = imported(f"{command} {parts}", databases)

    assert "sqlalchemy" in found
    assert found & HEAVY == set()


def test_status_with_its_http_parts_imports_no_command_of_the_client(databases: dict[str, str]) -> None:
    found = imported("status", databases)

    assert "httpx" in found
    assert found & {"click", "pygments", "rich"} == set()
