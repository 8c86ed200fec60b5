"""Find programs (Prometheus, Docker, PostgreSQL and others), or unpack them from Debian packages.

Programs that are not on PATH are fetched with `apt-get download` and unpacked
with `dpkg-deb -x` into `<checkout>/.parts`. This needs no root and changes nothing on the system. Below `.parts`:

- `apt/`: package lists, cache and configuration.
- `<room>/`: one unpacked set of packages, created by rename. `<room>/.packages` lists it.
- `.tmp-*`: unfinished work, removed by the next fetch. `.lock` allows one fetch at a time.
"""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from gpuwarden.format import Parser, show

PARTS_DIR = Path(__file__).resolve().parents[2] / ".parts"
LISTS_FRESH_S = 12 * 3600
"""Older lists are fetched again: they name versions that mirrors have removed."""
APT_TIMEOUT_S = 600
BIN_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin")
SYSTEM = Path("/")


class PartMissing(Exception):  # noqa: N818 - it reads as what happened
    """A program was not found and cannot be fetched. The message says where and what to install."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program, and the Debian packages that hold it and its libraries.

    Args:
        beside_path: folder patterns outside PATH, below the system's root or a room.
        without: unpack all dependencies except these patterns. The room is `closed`.
    """

    names: tuple[str, ...]
    packages: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    beside_path: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    finish: Callable[[Path], None] | None = None

    @property
    def room(self) -> str:
        """Folder of these packages below `.parts`."""
        return self.packages[0]

    @property
    def closed(self) -> bool:
        """Whether other programs must not load the room's libraries."""
        return bool(self.without)

    @property
    def advice(self) -> str:
        """Command that installs the program."""
        return "apt-get install " + " ".join(self.packages)


# Without a bridge, as the private engine runs, dockerd 20.10 to 28 never calls iptables.
_ENGINE = ("docker.io", "containerd", "runc", "tini")
_ENGINE_LIBRARIES = ("libdevmapper1.02.1", "libseccomp2")
ENGINE_PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc", "docker-init")

PODMAN_PROGRAMS = ("podman", "conmon")
# Keeps podman, conmon, a network helper (podman requires one) and libraries. The OCI runtime is Docker's.
_NOT_FOR_PODMAN = frozenset(
    {
        *("[!clnp]*", "crun", "containers-*", "libc6", "libc-*", "libpam*", "libperl*", "lib*-perl", "lsb-*", "passwd"),
        *("perl*", "pinentry-*"),
    }
)

# Keeps systemd and its libraries. Maintainer scripts do not run.
_NOT_FOR_SYSTEMD = frozenset(
    {
        *("[!ls]*", "libc6", "libc-*", "libpam-*", "libperl*", "lib*-perl", "libnss-*", "login", "logsave", "lsb-*"),
        *("systemd-*", "sed", "sysvinit*", "sensible-utils"),
    }
)

POSTGRES_PROGRAMS = ("postgres", "initdb", "pg_ctl")
# Keeps the server and its libraries, whose names change with the release. Drops scripts, jit and client. libc must
# match the system's loader.
_NOT_FOR_A_SERVER = frozenset(
    {
        *("[!lpz]*", "libc6", "libc-*", "locales", "lsb-*", "libpam-*", "libllvm*", "libz3-*", "libperl*", "lib*-perl"),
        *("passwd", "perl*", "postgresql-client*", "postgresql-common*"),
    }
)

# Keeps ip and its libraries.
_NOT_FOR_IP = frozenset({"[!il]*", "init*", "libc6", "libc-*", "libpam*", "libperl*", "lib*-perl"})


def _table() -> dict[str, Part]:
    prometheus = ("prometheus",)
    alertmanager = ("prometheus-alertmanager",)
    table = {
        "prometheus": Part(names=("prometheus",), packages=prometheus),
        "promtool": Part(names=("promtool",), packages=prometheus),
        "alertmanager": Part(
            names=("alertmanager", "prometheus-alertmanager"), packages=alertmanager, finish=_relocate_alertmanager
        ),
        "amtool": Part(names=("amtool",), packages=alertmanager, finish=_relocate_alertmanager),
        "shellcheck": Part(names=("shellcheck",), packages=("shellcheck",), libraries=("libgmp10", "libffi8")),
        # Any C compiler, for test libraries without headers or other libraries.
        "cc": Part(names=("cc", "tcc"), packages=("tcc",)),
        "zsh": Part(names=("zsh",), packages=("zsh", "zsh-common")),
        "fish": Part(names=("fish",), packages=("fish", "fish-common"), libraries=("libpcre2-32-0",)),
        "ip": Part(names=("ip",), packages=("iproute2",), without=_NOT_FOR_IP),
    }
    for program in ENGINE_PROGRAMS:
        table[program] = Part(names=(program,), packages=_ENGINE, libraries=_ENGINE_LIBRARIES)
    table["systemd"] = Part(
        names=("systemd",),
        packages=("systemd",),
        beside_path=("usr/lib/systemd", "lib/systemd"),
        without=_NOT_FOR_SYSTEMD,
    )
    for program in PODMAN_PROGRAMS:
        table[program] = Part(names=(program,), packages=("podman", "netavark"), without=_NOT_FOR_PODMAN)
    for program in POSTGRES_PROGRAMS:
        table[program] = Part(
            names=(program,),
            packages=("postgresql",),
            beside_path=("usr/lib/postgresql/*/bin",),
            without=_NOT_FOR_A_SERVER,
            finish=_slim_postgresql,
        )
    return table


_ALERTMANAGER_FILES = (b"/usr/share/prometheus/alertmanager", b"usr/share//prometheus/alertmanager")


def _relocate_alertmanager(root: Path) -> None:
    """Make Debian's Alertmanager find its templates.

    Replaces the path by a relative one of equal length. The program becomes a script that first changes into the room,
    so pass absolute paths. A build without that path is left unchanged.
    """
    absolute, relative = _ALERTMANAGER_FILES
    for name in ("prometheus-alertmanager", "amtool"):
        program = root / "usr/bin" / name
        content = program.read_bytes() if program.exists() else b""
        if absolute in content:
            moved = program.with_name(name + ".relocated")
            moved.write_bytes(content.replace(absolute, relative))
            moved.chmod(0o755)
            program.write_text(f'#!/bin/sh\ncd "$(dirname "$0")/../.." && exec usr/bin/{moved.name} "$@"\n', "ascii")


def _slim_postgresql(root: Path) -> None:
    """Delete files that the server does not read. Half of the room is jit bitcode."""
    for pattern in ("usr/lib/postgresql/*/lib/bitcode", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        for left_out in root.glob(pattern):
            shutil.rmtree(left_out)


PARTS: Mapping[str, Part] = MappingProxyType(_table())


def find(program: str, *, parts_dir: Path = PARTS_DIR, fetch: bool = True) -> Path:
    """Return the path of `program` (a key of PARTS); fetch it if it is missing and `fetch` is set.

    Start a program from `.parts` with `env_for_parts()`, one from a closed room with its `library_folders`. Raises
    PartMissing.
    """
    part = PARTS.get(program)
    if part is None:
        raise PartMissing(f"unknown program {program!r}; known: {', '.join(sorted(PARTS))}")
    for name in part.names:
        if on_path := shutil.which(name):
            return Path(on_path)
    if beside_path := _program_below(SYSTEM, part.names, part.beside_path):
        return beside_path
    room = parts_dir / part.room
    if not room.is_dir() and not fetch:
        raise PartMissing(f"{' or '.join(part.names)} is not on PATH: {part.advice}")
    if not room.is_dir():
        try:
            unpack(
                part.room,
                part.packages + part.libraries,
                dependencies=part.closed,
                without=part.without,
                finish=part.finish,
                parts_dir=parts_dir,
            )
        except PartMissing as missing:
            raise PartMissing(f"{missing}\n  install {program} by hand: {part.advice}") from missing
    if unpacked := _program_below(room, part.names, BIN_FOLDERS + part.beside_path):
        return unpacked
    raise PartMissing(
        f"{' or '.join(part.names)} is not on PATH and not in the packages {', '.join(part.packages)} "
        f"(unpacked in {room})\n  install it by hand: {part.advice}"
    )


def _program_below(root: Path, names: Sequence[str], folders: Sequence[str]) -> Path | None:
    for name in names:
        for pattern in folders:
            for folder in sorted(root.glob(pattern), key=_version, reverse=True):
                if os.access(folder / name, os.X_OK):
                    return folder / name
    return None


def _version(folder: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", str(folder))]


def env_for_parts(*, parts_dir: Path = PARTS_DIR) -> dict[str, str]:
    """The environment with unpacked programs and libraries at the end of PATH and LD_LIBRARY_PATH.

    The system's own files win. Closed rooms are left out.
    """
    env = dict(os.environ)
    rooms = [parts_dir / part.room for part in PARTS.values() if not part.closed]
    rooms = [room for room in dict.fromkeys(rooms) if room.is_dir()]
    programs = [str(room / folder) for room in rooms for folder in BIN_FOLDERS if (room / folder).is_dir()]
    libraries = [str(folder) for room in rooms for folder in library_folders(room)]
    # dockerd is in sbin, which is not on every PATH.
    env["PATH"] = os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin", *programs])
    if libraries:
        # An empty entry would mean the working directory.
        own = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
        env["LD_LIBRARY_PATH"] = os.pathsep.join([*own, *libraries])
    return env


def library_folders(room: Path) -> list[Path]:
    """Folders of an unpacked room with shared libraries."""
    multiarch = [folder for lib in ("usr/lib", "lib") for folder in sorted((room / lib).glob("*-linux-gnu*"))]
    return [folder for folder in multiarch if folder.is_dir() and any(folder.glob("*.so*"))]


def unpack(
    room: str,
    packages: Sequence[str],
    *,
    dependencies: bool = False,
    without: frozenset[str] = frozenset(),
    finish: Callable[[Path], None] | None = None,
    parts_dir: Path = PARTS_DIR,
) -> Path:
    """Unpack `packages` into `.parts/<room>` unless it exists, and return it.

    `finish` is called with the folder before its final rename. Raises PartMissing.
    """
    where = parts_dir / room
    for tool in ("apt-get", "dpkg-deb"):
        if not where.is_dir() and shutil.which(tool) is None:
            raise PartMissing(f"{room}: not on PATH and not in {where}; {tool} is needed to unpack Debian packages")
    parts_dir.mkdir(parents=True, exist_ok=True)
    with _hold_lock(parts_dir / ".lock"):
        if where.is_dir():
            return where
        for abandoned in parts_dir.glob(".tmp-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=parts_dir) as scratch:
            apt = _Apt(parts_dir / "apt")
            apt.refresh()
            wanted = apt.with_dependencies(packages, without=without) if dependencies else list(packages)
            _say(f"fetching {', '.join(wanted)}")
            files = apt.download(wanted, Path(scratch, "packages"))
            root = Path(scratch, "root")
            root.mkdir()
            for file in files:
                _run(["dpkg-deb", "-x", str(file), str(root)])
            if finish:
                finish(root)
            (root / ".packages").write_text("".join(f"{file.name}\n" for file in files))
            root.rename(where)
        _say(f"unpacked {where}")
    return where


class _Apt:
    """apt-get with separate lists, cache and status, and the system's sources, keys and proxy."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._config = home / "apt.conf"
        for folder in (home / "lists/partial", home / "cache/archives/partial"):
            folder.mkdir(parents=True, exist_ok=True)
        # An empty status: dependencies are then the same on every machine.
        (home / "status").touch()
        self._config.write_text(
            # The file given by -c is read after the system's. Their hooks would clean the system's caches.
            "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
            f'Dir::State::lists "{home}/lists";\nDir::State::status "{home}/status";\nDir::Cache "{home}/cache";\n'
            # As root, apt drops to a user that may not enter this checkout.
            'APT::Sandbox::User "root";\nDebug::NoLocking "true";\nAPT::Install-Recommends "false";\n'
            'Acquire::Retries "3";\nAcquire::http::Timeout "30";\nAcquire::https::Timeout "30";\n'
        )

    def refresh(self) -> None:
        """Fetch the package lists if they are old or missing."""
        stamp = self._home / "lists.fresh"
        if stamp.exists() and 0 <= time.time() - stamp.stat().st_mtime < LISTS_FRESH_S:
            return
        _say("fetching Debian's package lists")
        try:
            self._apt(["update", "--error-on=any"])
        except PartMissing as problem:
            # One of several sources may be down: continue with the existing lists.
            if not any((self._home / "lists").glob("*_Packages*")):
                raise
            _say(f"using old package lists: {problem}")
        else:
            stamp.touch()

    def with_dependencies(self, packages: Sequence[str], *, without: frozenset[str]) -> list[str]:
        """The packages and all dependencies, as apt would install them on an empty system."""
        simulated = self._apt(["install", "--simulate", *packages])
        names = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in without)]

    def download(self, packages: Sequence[str], into: Path) -> list[Path]:
        """Download the packages. apt checks them against the signed lists."""
        into.mkdir()
        self._apt(["download", *packages], cwd=into)
        return sorted(into.glob("*.deb"))

    def _apt(self, arguments: Sequence[str], *, cwd: Path | None = None) -> str:
        return _run(["apt-get", "-q", "-c", str(self._config), *arguments], cwd=cwd)


def _run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise PartMissing(f"{command[0]} did not finish in {APT_TIMEOUT_S} s: {' '.join(command)}") from expired
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg"))]
        found = "; ".join(complaints) or f"exit status {done.returncode}"
        raise PartMissing(f"Debian packages could not be fetched: {found}\n  command: {' '.join(command)}")
    return done.stdout


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock file. The kernel releases it when the process ends."""
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for the fetch of another process")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _say(what: str) -> None:
    show(f"parts: {what}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Find or fetch the named programs and print their paths. Returns 1 if one is missing."""
    known = "\n".join(f"  {program:<26}{part.advice}" for program, part in PARTS.items())
    parser = Parser(
        prog="python -m deploy.standalone.debian_packages",
        description="Find the programs that tests and demo use, and fetch missing ones.\n"
        f"Programs that are not on PATH are unpacked from Debian packages into {PARTS_DIR}.\n"
        "This needs no root and changes nothing on the system.",
        epilog=f"programs, and the command that installs them:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("programs", metavar="PROGRAM", nargs="*", help="a program from the list below (default: all)")
    missing = 0
    for program in parser.parse_args(arguments).programs or PARTS:
        try:
            show(f"{program:<26}{find(program)}", flush=True)
        except PartMissing as problem:
            show(*f"parts: {program}: {problem}".split("\n"), file=sys.stderr, flush=True)
            missing += 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
