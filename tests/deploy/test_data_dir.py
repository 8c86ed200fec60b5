"""The data directory: where it is by default, who may use it, and what a killed run left in it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.standalone import data_dir
from deploy.standalone.data_dir import DataDirError, default_data, default_directory, host_key, lock_data_dir
from gpuwarden import clock, procfs
from tests.waiting import eventually

SLEEP = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("env", "euid", "data"),
    [
        pytest.param({}, 0, Path("/var/lib/gpuwarden"), id="root"),
        pytest.param({"XDG_STATE_HOME": "/s"}, 0, Path("/var/lib/gpuwarden"), id="root, whatever is set"),
        pytest.param({"XDG_STATE_HOME": "/s"}, 1000, Path("/s/gpuwarden"), id="a user who set it"),
        pytest.param({}, 1000, Path.home() / ".local/state/gpuwarden", id="a user who did not"),
        pytest.param(
            {"XDG_STATE_HOME": "s"}, 1000, Path.home() / ".local/state/gpuwarden", id="a relative path is none"
        ),
    ],
)
def test_where_it_is_by_default(env: dict[str, str], euid: int, data: Path) -> None:
    assert default_data(env, euid=euid) == data


def test_the_systems_own_has_its_state_files_where_every_program_looks(tmp_path: Path) -> None:
    assert default_directory(Path("/var/lib/gpuwarden")) == Path("/run/gpuwarden")
    assert default_directory(tmp_path) == tmp_path / "run"


def test_the_host_key_is_remembered_although_its_directory_is_empty_after_a_reboot(tmp_path: Path) -> None:
    assert host_key(tmp_path, tmp_path / "run", "box1") == "box1"
    assert host_key(tmp_path, tmp_path / "run", None) == "box1"
    assert host_key(tmp_path, tmp_path / "run", "box2") == "box2"


def test_a_host_key_that_was_there_before_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host").write_text("box3\n")

    assert host_key(tmp_path, tmp_path / "run", None) == "box3"


def test_it_is_its_owners_alone_and_one_runs_in_it_at_a_time(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with lock_data_dir(data, say=print):
        assert data.stat().st_mode & 0o777 == 0o700
        with pytest.raises(DataDirError, match=rf"pid {os.getpid()}\) runs on"), lock_data_dir(data, say=print):
            pass
    with lock_data_dir(data, say=print):
        pass


@pytest.mark.parametrize(
    ("holds", "mode", "says"),
    [
        pytest.param("photos", 0o700, "holds other files", id="something else is in it"),
        pytest.param("lost+found", 0o755, "other users may enter", id="others may enter"),
        pytest.param("lost+found", 0o1777, "run chmod 700", id="it is everybody's"),
    ],
)
def test_one_that_is_not_for_us_is_refused_and_left_as_it_is(tmp_path: Path, holds: str, mode: int, says: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / holds).mkdir()
    data.chmod(mode)

    with pytest.raises(DataDirError, match=says), lock_data_dir(data, say=print):
        pass

    assert data.stat().st_mode & 0o7777 == mode
    assert [path.name for path in data.iterdir()] == [holds]


@pytest.mark.parametrize("holds", ["lost+found", "ledger"], ids=["a disk of its own", "a backup that was put back"])
def test_an_empty_one_of_our_own_is_used(tmp_path: Path, holds: str) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / holds).mkdir()
    for _ in range(2):
        with lock_data_dir(data, say=print):
            assert (data / "lock").exists()


def test_one_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DataDirError, match="cannot be used"), lock_data_dir(tmp_path / "file" / "data", say=print):
        pass


def test_what_a_killed_run_left_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_dir, "_ORPHAN_S", 0.3)
    monkeypatch.setattr(data_dir, "_TERM_S", 0.3)
    said: list[str] = []
    with (
        subprocess.Popen([sys.executable, "-c", SLEEP]) as heeds,
        subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as deaf,
    ):
        assert deaf.stdout is not None
        deaf.stdout.readline()
        record(tmp_path, serve=heeds.pid, execute=deaf.pid)
        with lock_data_dir(tmp_path, say=said.append):
            eventually(lambda: heeds.poll() is not None and deaf.poll() is not None, "both are gone")

    assert (heeds.returncode, deaf.returncode) == (-signal.SIGTERM, -signal.SIGKILL)
    assert said == [f"waiting for processes of a killed run: serve (pid {heeds.pid}), execute (pid {deaf.pid})"]


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"serve": "{pid} 1"}], ids=["another boot", "a later process"]
)
def test_a_process_that_was_given_the_pid_since_is_left_alone(tmp_path: Path, change: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as other:
        record(tmp_path, serve=other.pid)
        recorded = json.loads((tmp_path / "parts.json").read_text())
        recorded |= {name: text.replace("{pid}", str(other.pid)) for name, text in change.items()}
        (tmp_path / "parts.json").write_text(json.dumps(recorded))
        with lock_data_dir(tmp_path, say=print):
            assert other.poll() is None
        other.kill()


def record(data: Path, **pids: int) -> None:
    """What the chain writes down of the parts that it starts."""
    parts = {name: f"{pid} {procfs.start_ticks(pid)}" for name, pid in pids.items()}
    (data / "lock").touch()
    (data / "parts.json").write_text(json.dumps({"boot_id": clock.boot_id(), **parts}))
