"""The data directory: its default, its permissions, and leftovers of a killed run."""

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
        pytest.param({"XDG_STATE_HOME": "/s"}, 0, Path("/var/lib/gpuwarden"), id="root with a variable"),
        pytest.param({"XDG_STATE_HOME": "/s"}, 1000, Path("/s/gpuwarden"), id="user with a variable"),
        pytest.param({}, 1000, Path.home() / ".local/state/gpuwarden", id="user"),
        pytest.param(
            {"XDG_STATE_HOME": "s"}, 1000, Path.home() / ".local/state/gpuwarden", id="relative path is ignored"
        ),
    ],
)
def test_default_data_directory(env: dict[str, str], euid: int, data: Path) -> None:
    assert default_data(env, euid=euid) == data


def test_system_data_directory_has_its_state_files_in_run(tmp_path: Path) -> None:
    assert default_directory(Path("/var/lib/gpuwarden")) == Path("/run/gpuwarden")
    assert default_directory(tmp_path) == tmp_path / "run"


def test_host_key_survives_a_reboot(tmp_path: Path) -> None:
    assert host_key(tmp_path, tmp_path / "run", "box1") == "box1"
    assert host_key(tmp_path, tmp_path / "run", None) == "box1"
    assert host_key(tmp_path, tmp_path / "run", "box2") == "box2"


def test_existing_host_key_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host").write_text("box3\n")

    assert host_key(tmp_path, tmp_path / "run", None) == "box3"


def test_directory_is_private_and_locked(tmp_path: Path) -> None:
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
        pytest.param("photos", 0o700, "holds other files", id="other files in it"),
        pytest.param("lost+found", 0o755, "other users may enter", id="other users may enter"),
        pytest.param("lost+found", 0o1777, "run chmod 700", id="everyone may write"),
    ],
)
def test_foreign_directory_is_rejected_and_not_changed(tmp_path: Path, holds: str, mode: int, says: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / holds).mkdir()
    data.chmod(mode)

    with pytest.raises(DataDirError, match=says), lock_data_dir(data, say=print):
        pass

    assert data.stat().st_mode & 0o7777 == mode
    assert [path.name for path in data.iterdir()] == [holds]


@pytest.mark.parametrize("holds", ["lost+found", "ledger"], ids=["separate disk", "restored backup"])
def test_empty_own_directory_is_used(tmp_path: Path, holds: str) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / holds).mkdir()
    for _ in range(2):
        with lock_data_dir(data, say=print):
            assert (data / "lock").exists()


def test_unusable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DataDirError, match="cannot be used"), lock_data_dir(tmp_path / "file" / "data", say=print):
        pass


def test_processes_of_a_killed_run_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_process_with_a_reused_pid_is_not_stopped(tmp_path: Path, change: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as other:
        record(tmp_path, serve=other.pid)
        recorded = json.loads((tmp_path / "parts.json").read_text())
        recorded |= {name: text.replace("{pid}", str(other.pid)) for name, text in change.items()}
        (tmp_path / "parts.json").write_text(json.dumps(recorded))
        with lock_data_dir(tmp_path, say=print):
            assert other.poll() is None
        other.kill()


def record(data: Path, **pids: int) -> None:
    """Write the record which a chain keeps of its processes."""
    parts = {name: f"{pid} {procfs.start_ticks(pid)}" for name, pid in pids.items()}
    (data / "lock").touch()
    (data / "parts.json").write_text(json.dumps({"boot_id": clock.boot_id(), **parts}))
