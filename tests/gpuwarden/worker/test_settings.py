"""Options of a worker, and refused starts."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cli.main import main
from gpuwarden.worker import main as main_module
from tests.gpuwarden.worker.builders import Spawn, state_files


@pytest.fixture
def refused(
    tmp_path: Path,
    host_dir: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Run a worker in this process with changed options; returns its exit code and error text."""
    (tmp_path / "bodies.py").write_text("def load(job, report): ...\nnot_callable = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bodies", raising=False)
    monkeypatch.setattr("gpuwarden.worker.main.signal.signal", lambda *_: None)
    monkeypatch.setattr("gpuwarden.worker.main.logs.configure", lambda **_: None)

    def run(**changed: str) -> tuple[int, str]:
        good = {
            "name": "w1",
            "handler": "bodies:load",
            "queue_db": f"sqlite:///{database}",
            "runtime_dir": str(host_dir),
        }
        options = [f"--{name.replace('_', '-')}={value}" for name, value in {**good, **changed}.items()]
        try:
            code = main(["worker", "run", *options])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param({"runtime_dir": "/no/such"}, "no host key at /no/such/host", id="no host file"),
        pytest.param({"handler": "bodies"}, "no handler at 'bodies'", id="no function named"),
        pytest.param({"handler": "bodies:nothing"}, "no handler at 'bodies:nothing'", id="no such function"),
        pytest.param({"handler": "no_such_module:load"}, "give module:function, importable from here", id="no module"),
        pytest.param({"handler": "bodies:not_callable"}, "is int, not a function that loads a job", id="not callable"),
        pytest.param({"queue_db": "queue.db"}, "invalid database URL 'queue.db'", id="invalid URL"),
        pytest.param({"queue_db": "sqlite:////no/such/q.db"}, "does not exist: create it first", id="no folder for it"),
        pytest.param({"name": "a/b"}, "worker name 'a/b' is invalid", id="invalid name"),
        pytest.param({"subdirectory": ".."}, "subdirectory name '..' is invalid", id="invalid subdirectory"),
        pytest.param({"subdirectory": "host"}, "cannot write state files in", id="no folder for state files"),
    ],
)
def test_invalid_start_is_one_line(refused: Callable[..., tuple[int, str]], changed: dict[str, str], says: str) -> None:
    code, err = refused(**changed)

    assert code == 1
    assert says in err
    assert err.startswith("gpuwarden worker: ")
    assert err.count("\n") == 1


def test_second_worker_of_one_name_names_the_holder(
    start: Callable[..., Any], spawn: Spawn, tmp_path: Path, host_dir: Path, database: Path
) -> None:
    first = start()
    options = ["--name=w1", "--handler=bodies:load", f"--queue-db=sqlite:///{database}", f"--runtime-dir={host_dir}"]

    second = spawn(
        "-m", "gpuwarden", "worker", "run", *options, stderr=tmp_path / "second.log", PYTHONPATH=str(tmp_path)
    )
    second.communicate()

    assert second.returncode == 1
    complaint = (tmp_path / "second.log").read_text()
    assert complaint.startswith("gpuwarden worker: another process is worker 'w1'")
    assert complaint.count("\n") == 1
    assert first.poll() is None


@pytest.mark.parametrize(
    "changed", [{"heartbeat_s": "700"}, {"heartbeat_s": "10", "lease_s": "29.9"}, {"heartbeat_s": "0"}], ids=str
)
def test_lease_shorter_than_three_heartbeats_is_refused(
    refused: Callable[..., tuple[int, str]], changed: dict[str, str]
) -> None:
    code, err = refused(**changed, jobs_max="0")

    assert code == 2
    assert "--lease-s must be 3 times --heartbeat-s or more" in " ".join(err.split())


def test_heartbeat_above_its_maximum_is_refused(refused: Callable[..., tuple[int, str]]) -> None:
    code, err = refused(heartbeat_s="10.1", jobs_max="0")

    assert code == 2
    assert "--heartbeat-s must be 10 or less" in " ".join(err.split())


def test_lease_of_three_heartbeats_is_accepted(refused: Callable[..., tuple[int, str]]) -> None:
    code, _ = refused(heartbeat_s="10", lease_s="30", jobs_max="0")

    assert code == 0


def test_worker_without_jobs_starts_and_ends(refused: Callable[..., tuple[int, str]], host_dir: Path) -> None:
    code, _ = refused(jobs_max="0")

    assert code == 0
    assert state_files(host_dir) == {"w1.lock"}


def test_help_names_every_option_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_module.command(["--help"])

    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in (
        "--name",
        "--handler",
        "--queue",
        "--queue-db",
        "--runtime-dir",
        "--subdirectory",
        "--lease-s",
        "--heartbeat-s",
    ):
        assert option in shown
    assert "77 the job has another owner" in shown
    assert "--gpus" in shown
    assert "On PostgreSQL the worker stops after this time without renewal" in shown
    assert "seconds between renewals of the lease" in shown
