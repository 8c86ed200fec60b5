"""Run a private Docker or Podman engine under a guardian process that removes all of it.

`python -m testbed.private_engine WORK dockerd|podman PROGRAM` (root only) removes leftovers in WORK, starts the engine,
prints `started` and waits for the end of its standard input. The kernel closes it if the caller is killed. Then `sweep`
removes daemons, shims, containers, mounts, control groups, sockets and data.

In WORK: `dockerd.log` or `podman.log` (kept), `engine.lock` (held by the guardian), `podman/` (configuration, kept) and
`engine/` (data, removed). Sockets are in `/run/gpuwarden-<hash of WORK>`, because a socket's path is limited to 107
bytes.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LOCK_TIMEOUT_S = 30
"""Time for a previous guardian to finish its sweep, seconds."""
SWEEP_TIMEOUT_S = 20
REAP_INTERVAL_S = 0.5
SWEEP_FAILED = 3
"""Exit status if something of the engine is left. The last log line says what."""

# <sys/prctl.h>, <sys/mount.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MNT_DETACH = 2
_ENGINE_PROGRAMS = frozenset({"dockerd", "containerd", "containerd-shim-runc-v2", "runc", "podman", "conmon"})
_RUNC_STATE = Path("/run/runc")
"""Default state folder of runc. Podman sets no other."""
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class EnginePaths:
    """Paths of the private engine of one WORK folder."""

    work: Path
    run: Path
    program: str = "dockerd"

    @classmethod
    def of(cls, work: Path, program: str = "dockerd") -> "EnginePaths":
        """Paths of `work`. They are stable, so a later run finds leftovers."""
        work = work.resolve()
        run = Path("/run") / f"gpuwarden-{hashlib.sha256(os.fsencode(work)).hexdigest()[:12]}"
        return cls(work=work, run=run, program=program)

    @property
    def data(self) -> Path:  # noqa: D102
        return self.work / "engine"

    @property
    def socket(self) -> Path:  # noqa: D102
        return self.run / "docker.sock"

    @property
    def configuration(self) -> Path:  # noqa: D102
        return self.run / "daemon.json"

    @property
    def log(self) -> Path:  # noqa: D102
        return self.work / f"{self.program}.log"


class SweepFailed(Exception):  # noqa: N818 - it reads as what happened
    """Something of the engine is left. The message says what."""


def run_guardian(paths: EnginePaths, engine: str) -> int:
    """Run the engine until standard input ends or a signal arrives. Returns 1 if the engine exited."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    # Adopt orphaned shims and containers: PID 1 may not reap them.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with (paths.work / "engine.lock").open("w") as lock:
        _lock(lock.fileno())
        # After the lock: before it, the log may be another engine's.
        os.truncate(paths.log, 0)
        sweep(paths)
        paths.run.mkdir(mode=0o700)
        paths.data.mkdir(mode=0o711)
        try:
            return _run_until_input_ends(paths, engine)
        finally:
            # Do not interrupt the sweep; it has a timeout.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            sweep(paths)


def dockerd_command(paths: EnginePaths, dockerd: str) -> list[str]:
    """Command line of dockerd."""
    return [
        *(dockerd, "--host", f"unix://{paths.socket}", "--group", "root"),
        *("--data-root", str(paths.data / "data"), "--exec-root", str(paths.run / "exec")),
        *("--pidfile", str(paths.run / "dockerd.pid"), "--config-file", str(paths.configuration)),
        *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
    ]


def podman_command(paths: EnginePaths, podman: str) -> list[str]:
    """Command line of Podman's service, configured by its environment (`testbed.private_podman`)."""
    return [podman, "system", "service", "--time", "0", f"unix://{paths.socket}"]


def _run_until_input_ends(paths: EnginePaths, program: str) -> int:
    # An empty file, so that /etc/docker/daemon.json is not used.
    paths.configuration.write_text("{}")
    command = podman_command if paths.program == "podman" else dockerd_command
    with paths.log.open("ab") as log:
        engine = subprocess.Popen(
            command(paths, program),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Safe with one thread. Ends the engine if the guardian is killed.
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
    print("started", flush=True)
    while engine.pid not in _reap_children():
        ended, _, _ = select.select([sys.stdin], [], [], REAP_INTERVAL_S)
        if ended:
            return 0
    return 1


def sweep(paths: EnginePaths) -> None:
    """Remove all processes, mounts, control groups and files of an engine.

    Raises SweepFailed if something is left, and then keeps the files.
    """
    give_up = time.monotonic() + SWEEP_TIMEOUT_S
    # Daemons first: dockerd would restart containers.
    while left := [*_engine_pids(paths), *_container_pids(_container_ids(paths))]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap_children()
        if time.monotonic() > give_up:
            raise SweepFailed(f"still running after SIGKILL: {left}; data is left in {paths.data} and {paths.run}")
        time.sleep(0.02)
    _reap_children()
    for mount in _mounts_below(paths.data, paths.run):
        _libc.umount2(os.fsencode(mount), _MNT_DETACH)
    if still := _mounts_below(paths.data, paths.run):
        # Deleting through a mount could delete foreign files.
        raise SweepFailed(f"still mounted: {', '.join(still)}; unmount them, then remove {paths.data} and {paths.run}")
    _remove_shim_sockets(paths)
    _remove_cgroups(_container_ids(paths))
    for state in (_RUNC_STATE / container for container in _container_ids(paths)):
        shutil.rmtree(state, ignore_errors=True)
    for folder in (paths.data, paths.run):
        if folder.exists():
            shutil.rmtree(folder)


def _container_ids(paths: EnginePaths) -> frozenset[str]:
    folders = (paths.data / "data").glob("*containers/*")  # Podman adds its storage driver
    return frozenset(path.name for path in folders if _CONTAINER_ID.fullmatch(path.name))


def _engine_pids(paths: EnginePaths) -> Iterator[int]:
    """Daemons and shims of this engine: their arguments contain the run folder."""
    for pid in _pids():
        arguments = _read(f"/proc/{pid}/cmdline").split("\0")
        if os.path.basename(arguments[0]) in _ENGINE_PROGRAMS and f"{paths.run}/" in " ".join(arguments):  # noqa: PTH119
            yield pid


def _container_pids(containers: frozenset[str]) -> Iterator[int]:
    for pid in _pids():
        if containers.intersection(_CONTAINER_ID.findall(_read(f"/proc/{pid}/cgroup"))) and not _is_zombie(pid):
            yield pid


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]  # noqa: PTH208


def _is_zombie(pid: int) -> bool:
    return "\nState:\tZ" in _read(f"/proc/{pid}/status")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _mounts_below(*folders: Path) -> list[str]:
    """Mount points in `folders`, deepest first. Format: proc(5), mountinfo; blanks are octal escapes."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        if any(mount == str(folder) or mount.startswith(f"{folder}/") for folder in folders):
            found.append(mount)
    return found[::-1]


def _remove_shim_sockets(paths: EnginePaths) -> None:
    """Remove sockets of killed shims in /run/containerd/s. The task folder holds the path."""
    for address in paths.run.glob("exec/containerd/daemon/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().strip().removeprefix("unix://")).unlink(missing_ok=True)


def _remove_cgroups(containers: frozenset[str]) -> None:
    """Remove the empty control groups of these containers, v1 and v2."""
    if not containers:
        return
    for folder, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
        if containers.intersection(_CONTAINER_ID.findall(folder)):
            with suppress(OSError):
                Path(folder).rmdir()


def _reap_children() -> set[int]:
    """Reap ended children and return their pids."""
    ended = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def _lock(descriptor: int) -> None:
    give_up = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise SystemExit(f"another engine has used this work folder for {LOCK_TIMEOUT_S} s") from None
            time.sleep(0.1)
        else:
            return


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(run_guardian(EnginePaths.of(Path(sys.argv[1]), sys.argv[2]), sys.argv[3]))
    except SweepFailed as problem:
        print(problem, file=sys.stderr)
        sys.exit(SWEEP_FAILED)
