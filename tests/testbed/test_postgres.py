"""A private PostgreSQL: its user, its data, and its end."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from deploy.standalone import debian_packages
from testbed import postgres as module
from testbed.postgres import NoPostgres, Postgres, PostgresFailed
from testbed.postgres import postgres as postgres_server

pytestmark = pytest.mark.needs_postgres

CHECKOUT = Path(debian_packages.__file__).resolve().parents[2]
GONE_TIMEOUT_S = 20
HOLD_A_SERVER = """
import sys, time
from pathlib import Path
from testbed.postgres import postgres

with postgres(Path(sys.argv[1]), durable=sys.argv[2] == "durable") as server:
    print(server.port, server.sockets.parent, flush=True)
    time.sleep(600)
"""

root_only = pytest.mark.skipif("os.geteuid() != 0", reason="only root has to run PostgreSQL as someone else")


def ask(server: Postgres, statement: str, database: str = "postgres") -> Any:
    """Commit a statement; return its first value, or None."""
    with closing(connect(server, database)) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def connect(server: Postgres, database: str = "postgres") -> psycopg.Connection:
    return psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname=database, autocommit=True)


def processes_in(folder: Path) -> set[int]:
    """Pids of processes with this working directory."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.add(int(process.name))
    return found


@pytest.fixture(scope="session")
def unpacked() -> Path:
    """The unpacked PostgreSQL of this checkout."""
    part = debian_packages.PARTS["postgres"]
    try:
        return debian_packages.unpack(
            part.room, part.packages, dependencies=True, without=part.without, finish=part.finish
        )
    except debian_packages.PartMissing as missing:
        pytest.skip(f"Debian's packages cannot be fetched here: {missing}")


@pytest.fixture
def server(postgres: Postgres) -> Iterator[Postgres]:
    """The server with a new database `thing`; started again after the test if needed."""
    postgres.drop("thing")
    postgres.create("thing")
    yield postgres
    postgres.start()
    postgres.drop("thing")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No PostgreSQL on PATH or where Debian would install it."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    monkeypatch.setattr(debian_packages, "SYSTEM", tmp_path / "no-system")


def test_second_stop_and_second_start_have_no_effect(server: Postgres) -> None:
    server.start()
    began = ask(server, "SELECT pg_postmaster_start_time()")
    server.start()
    assert ask(server, "SELECT pg_postmaster_start_time()") == began

    for end in (server.stop, server.stop, server.kill):
        end()
    server.start()

    assert ask(server, "SELECT pg_postmaster_start_time()") > began


@pytest.mark.parametrize("durable", [True, False])
def test_fsync_is_on_unless_not_durable(durable: bool, tmp_path: Path) -> None:
    with postgres_server(tmp_path, durable=durable) as found:
        assert isinstance(found, Postgres), found
        fsync, jit = ask(found, "SHOW fsync"), ask(found, "SHOW jit")

    assert (fsync, jit) == ("on" if durable else "off", "off")


@pytest.mark.parametrize(
    ("durable", "wanted_bytes", "in_memory"),
    [
        pytest.param(False, 0, True, id="they need not outlive the host"),
        pytest.param(True, 0, False, id="they must outlive the host"),
        pytest.param(False, 2**60, False, id="too little memory is free"),
    ],
)
def test_data_is_in_memory_unless(
    durable: bool, wanted_bytes: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", wanted_bytes)

    with module._create_room(None, durable=durable) as room:
        (room.data / "file").touch()
        kept = [room.data, room.path]
        assert (room.path / "data" / "file").exists()
        assert room.data.is_relative_to(module.MEMORY) is in_memory

    assert [folder for folder in kept if folder.exists()] == []


def test_only_the_log_is_left(tmp_path: Path) -> None:
    with postgres_server(tmp_path / "work") as found:
        assert isinstance(found, Postgres), found
        room = found.sockets.parent
        during = processes_in(room / "data")

    assert len(during) > 1
    assert processes_in(room / "data") == set()
    assert not room.exists()
    assert "database system is shut down" in (tmp_path / "work/postgres.log").read_text()


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGTERM, "durable"), (signal.SIGKILL, "not durable")])
def test_server_of_a_killed_caller_ends_and_is_swept(number: signal.Signals, kept: str, tmp_path: Path) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_SERVER, str(tmp_path), kept], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout
    with caller.stdout:
        room = Path(caller.stdout.readline().split()[1])
    data = (room / "data").resolve()
    assert len(processes_in(data)) > 1
    caller.send_signal(number)
    caller.wait(GONE_TIMEOUT_S)
    give_up = time.monotonic() + GONE_TIMEOUT_S
    while processes_in(data):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert room.exists(), "the test needs a leftover"

    with postgres_server(tmp_path / "next"):
        pass

    assert not room.exists()
    assert not data.exists()


def test_folder_in_use_is_not_swept(server: Postgres, tmp_path: Path) -> None:
    with postgres_server(tmp_path):
        pass

    assert server.sockets.exists()
    with (server.sockets.parent / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@root_only
def test_server_of_root_runs_as_another_user(server: Postgres) -> None:
    pid = int((server.sockets.parent / "data/postmaster.pid").read_text().splitlines()[0])

    assert Path(f"/proc/{pid}").stat().st_uid != 0
    assert (server.sockets.parent / "data").stat().st_uid == Path(f"/proc/{pid}").stat().st_uid
    assert "\nGroups:\t \n" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.usefixtures("nothing_installed")
def test_unpacked_server_uses_its_own_libraries(unpacked: Path, tmp_path: Path) -> None:
    with postgres_server(tmp_path / "work") as found:
        assert isinstance(found, Postgres), found
        pid = int((found.sockets.parent / "data/postmaster.pid").read_text().splitlines()[0])
        # As pmap(1) reads it: the sixth column is the file.
        mapped = {line.split()[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if ".so" in line}

    elsewhere = {Path(file).name.split(".so")[0] for file in mapped if not file.startswith(f"{unpacked}/")}
    assert any(file.startswith(f"{unpacked}/") for file in mapped)
    assert elsewhere <= {"ld-linux-x86-64", "ld-linux-aarch64", "libc", "libm", "libresolv"}


@root_only
@pytest.mark.usefixtures("nothing_installed")
def test_programs_out_of_reach_of_the_user_are_copied(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed/postgresql").symlink_to(unpacked)

    with postgres_server(tmp_path / "work", parts_dir=tmp_path / "closed") as found:
        assert isinstance(found, Postgres), found
        answer = ask(found, "SELECT 41 + 1")
        copied = (found.sockets.parent / "programs").is_dir()

    assert (answer, copied) == (42, True)


@pytest.mark.usefixtures("nothing_installed")
def test_without_apt_get_the_reason_says_what_to_install(tmp_path: Path) -> None:
    with postgres_server(tmp_path, parts_dir=tmp_path / "parts") as found:
        pass

    assert isinstance(found, NoPostgres)
    assert "apt-get install postgresql" in found.reason


@root_only
def test_closed_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(closed))

    with postgres_server(tmp_path / "work") as found:
        pass

    assert isinstance(found, NoPostgres)
    assert "set $TMPDIR to a folder that all users may enter" in found.reason
    assert list(closed.iterdir()) == []


def test_program_that_its_user_may_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initdb", "postgres"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "_may_run", lambda *_: False)

    with postgres_server(tmp_path / "work") as found:
        pass

    assert isinstance(found, NoPostgres)
    assert f"may not run {tmp_path}/bin/postgres: open its folder to all users" in found.reason


def test_initdb_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Path(tempfile.mkdtemp(prefix="gpuwarden-test-"))
    try:
        room.chmod(0o755)
        for name in ("initdb", "postgres"):
            (room / name).write_text("#!/bin/sh\necho 'no space left here' >&2\nexit 1\n")
            (room / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{room}:{os.environ['PATH']}")
        with postgres_server(tmp_path) as found:
            pass
    finally:
        shutil.rmtree(room)

    assert found == NoPostgres(reason="initdb exited with code 1:\nno space left here")


def test_failed_start_reports_the_log(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    server.stop()
    real = server._command
    with monkeypatch.context() as broken:
        broken.setattr(server, "_command", lambda: [*real(), "-c", "no_such_setting=1"])
        with pytest.raises(PostgresFailed) as failed:
            server.start()

    assert "exited with code 1" in str(failed.value)
    assert 'unrecognized configuration parameter "no_such_setting"' in str(failed.value)
    server.start()
    assert ask(server, "SELECT 1") == 1
