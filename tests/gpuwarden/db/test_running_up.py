"""Variables of a running `gpuwarden up` reach the commands of its own user only."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden import Queue, clock
from gpuwarden.cli.acts import runtime_dir
from gpuwarden.db import running_up
from gpuwarden.db.running_up import QUEUE_ENV, RUNTIME_DIR_ENV, published
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.open import default_store

UP = {QUEUE_ENV: "sqlite:////data/queue.db", RUNTIME_DIR_ENV: "/data/run", "GPUWARDEN_REMEDIATOR_PORT": "1"}


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in UP:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "gpuwarden" / "up.json"


def test_variables_are_found_while_it_runs_and_not_after(file: Path) -> None:
    with published(UP, os.environ):
        found = running_up.environment()
        mode = file.stat().st_mode & 0o777

    assert UP.items() <= found.items()
    assert mode == 0o600
    assert not file.exists()


def test_queue_folder_and_jobs_come_from_the_running_up() -> None:
    with published(UP, os.environ):
        assert default_store() == Queue().url == UP[QUEUE_ENV]
        assert runtime_dir() == Path("/data/run")
        assert running_up.runtime_dir_of(UP[QUEUE_ENV]) == Path("/data/run")
        assert running_up.runtime_dir_of("sqlite:////other.db") is None, "a worker of another queue has another folder"


def test_variable_and_argument_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUE_ENV, "sqlite:////mine.db")

    with published(UP, os.environ):
        assert default_store() == Queue().url == "sqlite:////mine.db"
        assert Queue("sqlite:////given.db").url == "sqlite:////given.db"


def test_later_up_keeps_its_file(file: Path) -> None:
    with published(UP, os.environ):
        later = published({QUEUE_ENV: "later"}, os.environ)
        later.__enter__()

    assert running_up.of_up(os.environ) == {QUEUE_ENV: "later"}
    later.__exit__(None, None, None)
    assert not file.exists()


def _of_ended_process(file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    name = str(ProcessId.of(child.pid))
    child.communicate()
    _change(process=name)(file)


def _symlink(file: Path) -> None:
    file.rename(file.with_name("other.json"))
    file.symlink_to("other.json")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _change(**fields: object) -> Callable[[Path], None]:
    return lambda file: _write(file, json.dumps({**json.loads(file.read_text()), **fields}))


def _write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_of_ended_process, id="its process ended"),
        pytest.param(_change(process=f"{os.getpid()} 1"), id="another process has its pid"),
        pytest.param(_change(process=7), id="no process"),
        pytest.param(_change(boot_id="other"), id="before a reboot, or on another host"),
        pytest.param(_change(variables=[1]), id="no variables"),
        pytest.param(lambda file: file.chmod(0o620), id="its group writes it"),
        pytest.param(lambda file: _write(file, "[]"), id="no object"),
        pytest.param(lambda file: _write(file, "{"), id="not JSON"),
        pytest.param(_symlink, id="a symbolic link"),
        pytest.param(_fifo, id="no regular file"),
        pytest.param(Path.unlink, id="no file"),
    ],
)
def test_untrusted_or_old_file_is_ignored(file: Path, spoil: Callable[[Path], None]) -> None:
    with published(UP, os.environ):
        spoil(file)

        assert running_up.of_up(os.environ) == {}


def test_file_of_another_user_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with published(UP, os.environ):
        mine = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: mine + 1)

        assert running_up.of_up(os.environ) == {}


def test_record_names_this_boot(file: Path) -> None:
    with published(UP, os.environ):
        assert json.loads(file.read_text())["boot_id"] == clock.boot_id()
