"""Run a PostgreSQL server on loopback for tests and demo.

The programs come from PATH, Debian's folder or `.parts`. PostgreSQL refuses to run as root, so root runs it as
`postgres` or `nobody`. Every local user may connect as superuser.

Data and sockets are in `$TMPDIR/gpuwarden-postgres-*`, because the server's user may not enter the caller's folder, and
a socket's path is limited to 107 bytes:

- `lock`: held by caller and server. A room with a free lock is removed by the next caller.
- `data/`, `sockets/`: the cluster and its socket. Without `durable`, `data` is a link to memory: creating a database
  writes 300 files.
- `programs/`: a copy of the unpacked packages, if the server's user may not enter `.parts`.
"""

import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from deploy.standalone import debian_packages, ports

SUPERUSER: Final = "postgres"
MAX_CONNECTIONS: Final = 200
INITDB_TIMEOUT_S: Final = 60.0
READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0
KILL_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 5
_POLL_S: Final = 0.02
_LOG_LINES: Final = 15
_ROOM: Final = "gpuwarden-postgres-"
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - used by tempfile
MEMORY_BYTES: Final = 2 * 2**30
"""Free memory needed to keep data there, bytes. Half of it is PostgreSQL's log."""
_IPC_RMID: Final = 0  # <sys/ipc.h>


class PostgresFailed(Exception):  # noqa: N818 - it reads as what happened
    """The server did not start. The message ends with the end of its log."""


@dataclass(frozen=True, kw_only=True)
class NoPostgres:
    """PostgreSQL is not available, with the reason."""

    reason: str


class Postgres:
    """A running server. `port` and data survive `stop`, `kill` and `start`."""

    def __init__(self, programs: "_Programs", room: "_Room", *, log: Path, durable: bool) -> None:
        (self.port,) = ports.free_ports(1)
        self.sockets = room.path / "sockets"
        """Folder of the Unix socket, for containers without a network."""
        self._programs = programs
        self._room = room
        self._log = log
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str, *, sockets: str | None = None) -> str:
        """SQLAlchemy URL of a database, over TCP or through a socket folder."""
        name = quote(database, safe="")
        if sockets is None:
            return f"postgresql+psycopg://{SUPERUSER}@127.0.0.1:{self.port}/{name}"
        return f"postgresql+psycopg://{SUPERUSER}@/{name}?host={quote(sockets)}&port={self.port}"

    def create(self, name: str, template: str | None = None) -> None:
        """Create a database, empty or from `template`, which must have no connections."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
            if not self._durable:  # a file copy costs a quarter of one through the log
                statement += sql.SQL(" STRATEGY FILE_COPY")
        self._execute(statement)

    def drop(self, name: str) -> None:
        """Drop a database with its connections, if it exists."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def start(self) -> None:
        """Start the server and wait until it answers. Raises PostgresFailed.

        The server ends with the thread that calls this.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            # Processes left by a crash would block the next start.
            self.kill()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_end_with_parent(), *self._command()],
                env=self._programs.env,
                cwd=self._room.data,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only the caller, which stops the server.
                start_new_session=True,
                pass_fds=(self._room.lock,),
                **_as_user(self._programs.account),
            )
        try:
            self._await_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server cleanly: connections are closed, commits are on disk."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End all server processes by SIGKILL, as a crash would."""
        if self._process is None:
            return
        # Kill the postmaster first: it would restart its children.
        self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)
        give_up = time.monotonic() + KILL_TIMEOUT_S
        while left := self._processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > give_up:
                raise PostgresFailed(f"still running {KILL_TIMEOUT_S:.0f} s after SIGKILL: {left}\n{self._log_tail()}")
            time.sleep(_POLL_S)
        self._process = None
        _remove_shared_memory(self._room.data)

    def _processes(self) -> list[int]:
        """Server processes: their working directory is the data folder."""
        found = []
        for name in os.listdir("/proc"):  # noqa: PTH208
            with suppress(OSError):
                if name.isdecimal() and os.readlink(f"/proc/{name}/cwd") == str(self._room.data):  # noqa: PTH115
                    found.append(int(name))
        return found

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.sockets),
            "max_connections": str(MAX_CONNECTIONS),
            "shared_buffers": "16MB",
            # Files in the data folder: /dev/shm is small in containers.
            "dynamic_shared_memory_type": "mmap",
            # The jit compiler is not unpacked.
            "jit": "off",
            # Needs no time zone files.
            "timezone": "GMT",
            "log_timezone": "GMT",
        }
        if not self._durable:
            # Only fsync: with synchronous_commit off, a killed server would lose commits.
            settings["fsync"] = "off"
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._programs.postgres), "-D", str(self._room.data), *options]

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                self._connect().close()
            except psycopg.OperationalError as error:
                reason = str(error)
            else:
                return
            if process.poll() is not None:
                raise PostgresFailed(f"PostgreSQL exited with code {process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > give_up:
                raise PostgresFailed(
                    f"PostgreSQL was not ready in {READY_TIMEOUT_S:.0f} s ({reason}):\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _execute(self, statement: sql.Composed) -> None:
        with closing(self._connect()) as connection:
            connection.execute(statement)

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=SUPERUSER,
            dbname="postgres",
            connect_timeout=_CONNECT_TIMEOUT_S,
            autocommit=True,
        )

    def _log_tail(self) -> str:
        return _tail(self._log.read_text(encoding="utf-8", errors="replace"))


@contextmanager
def postgres(
    work: Path, *, durable: bool = True, parts_dir: Path = debian_packages.PARTS_DIR
) -> Iterator[Postgres | NoPostgres]:
    """Yield a PostgreSQL server, or the reason why there is none.

    `work` receives `postgres.log`. Without `durable` fsync is off: faster, but a crash of the host may lose data.
    """
    with ExitStack() as stack:
        found: Postgres | NoPostgres
        try:
            found = stack.enter_context(_server(work, durable=durable, parts_dir=parts_dir))
        except (debian_packages.PartMissing, PostgresFailed) as problem:
            found = NoPostgres(reason=str(problem))
        except OSError as problem:
            found = NoPostgres(reason=f"PostgreSQL cannot be run here: {problem}")
        yield found


@contextmanager
def _server(work: Path, *, durable: bool, parts_dir: Path) -> Iterator[Postgres]:
    work.mkdir(parents=True, exist_ok=True)
    log = work / "postgres.log"
    log.write_bytes(b"")
    initdb, server_program = (debian_packages.find(program, parts_dir=parts_dir) for program in ("initdb", "postgres"))
    account = _account()
    with _create_room(account, durable=durable) as room:
        programs = _prepare_programs(initdb, server_program, account=account, room=room, parts_dir=parts_dir)
        _init(programs, room)
        server = Postgres(programs, room, log=log, durable=durable)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@dataclass(frozen=True, kw_only=True)
class _Programs:
    """Programs, environment and user."""

    initdb: Path
    postgres: Path
    env: Mapping[str, str]
    account: pwd.struct_passwd | None


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Folders of a server and its open lock file."""

    path: Path
    data: Path
    lock: int


@contextmanager
def _create_room(account: pwd.struct_passwd | None, *, durable: bool) -> Iterator[_Room]:
    _sweep()
    path = Path(tempfile.mkdtemp(prefix=_ROOM)).resolve()
    # Rename after locking, so that other callers do not remove the new room.
    lock = os.open(path / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / "lock.new").rename(path / "lock")
        path.chmod(0o711)
        _check_access(path, account)
        room = _Room(path=path, data=_create_data(path, durable=durable), lock=lock)
        (path / "sockets").mkdir()
        for folder, mode in ((room.data, 0o700), (path / "sockets", 0o755)):
            folder.chmod(mode)
            if account is not None:
                os.chown(folder, account.pw_uid, account.pw_gid)
        yield room
    finally:
        _remove(path)
        os.close(lock)


def _create_data(room: Path, *, durable: bool) -> Path:
    """Create the data folder, in memory or in the room."""
    data = room / "data"
    if not durable and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
        data.symlink_to(tempfile.mkdtemp(prefix=_ROOM, dir=MEMORY))
    else:
        data.mkdir()
    return data.resolve()


def _remove(room: Path) -> None:
    """Remove a room and its data."""
    for folder in ((room / "data").resolve(), room):
        shutil.rmtree(folder, ignore_errors=True)


def _check_access(path: Path, account: pwd.struct_passwd | None) -> None:
    closed = [folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH]
    if account is not None and closed:
        raise PostgresFailed(
            f"user {account.pw_name}, which runs PostgreSQL for root, may not enter {closed[-1]}: "
            "set $TMPDIR to a folder that all users may enter"
        )


def _sweep() -> None:
    """Remove rooms of killed callers of this user."""
    for path in Path(tempfile.gettempdir()).glob(f"{_ROOM}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                with (path / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path)


def _account() -> pwd.struct_passwd | None:
    """User of the server, or `None` for the caller."""
    if os.geteuid() != 0:
        return None
    for name in (SUPERUSER, "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise PostgresFailed("PostgreSQL does not run as root: create a user postgres")


def _prepare_programs(
    initdb: Path, server: Path, *, account: pwd.struct_passwd | None, room: _Room, parts_dir: Path
) -> _Programs:
    """Programs and libraries that the server's user can run."""
    # PG* variables of the caller are for another server.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
    unpacked = parts_dir / debian_packages.PARTS["postgres"].room
    ours = server.is_relative_to(unpacked)
    if not _may_run(server, account):
        if not ours or account is None:
            who = "this user" if account is None else f"user {account.pw_name}, which runs PostgreSQL for root,"
            advice = debian_packages.PARTS["postgres"].advice
            raise PostgresFailed(f"{who} may not run {server}: open its folder to all users, or {advice}")
        copy = room.path / "programs"
        shutil.copytree(unpacked, copy, symlinks=True)
        copy.chmod(0o755)
        initdb, server = (copy / program.relative_to(unpacked) for program in (initdb, server))
        unpacked = copy
    if ours:
        own = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
        env["LD_LIBRARY_PATH"] = os.pathsep.join([*own, *map(str, debian_packages.library_folders(unpacked))])
    return _Programs(initdb=initdb, postgres=server, env=env, account=account)


def _may_run(program: Path, account: pwd.struct_passwd | None) -> bool:
    try:
        # Only whether it starts matters: libraries may be missing yet.
        subprocess.run(
            [program, "--version"], cwd="/", capture_output=True, check=False, timeout=30, **_as_user(account)
        )
    except PermissionError:
        return False
    return True


def _init(programs: _Programs, room: _Room) -> None:
    command = [
        *(str(programs.initdb), "-D", str(room.data), "--username", SUPERUSER, "--auth", "trust"),
        # Equal byte order and messages on every machine. A new cluster needs no sync.
        *("--encoding", "UTF8", "--no-locale", "--no-sync"),
    ]
    try:
        done = subprocess.run(
            command,
            env=programs.env,
            cwd=room.data,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INITDB_TIMEOUT_S,
            check=False,
            **_as_user(programs.account),
        )
    except subprocess.TimeoutExpired as expired:
        raise PostgresFailed(f"initdb did not finish in {INITDB_TIMEOUT_S:.0f} s") from expired
    if done.returncode:
        raise PostgresFailed(f"initdb exited with code {done.returncode}:\n{_tail(done.stdout + done.stderr)}")


def _as_user(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments of subprocess to run as `account`."""
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _end_with_parent() -> Sequence[str]:
    """Command prefix that ends the server with its caller, if setpriv exists.

    SIGINT, because SIGTERM waits for connections.
    """
    setpriv = shutil.which("setpriv", path=os.defpath)
    return (setpriv, "--pdeathsig", "INT", "--") if setpriv else ()


def _remove_shared_memory(data: Path) -> None:
    """Remove the System V segment of a killed server. Its id is in line 7 of the pid file."""
    with suppress(OSError, IndexError, ValueError):
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), _IPC_RMID, None)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_LINES:]) or "(nothing was logged)"
