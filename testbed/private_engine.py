"""An engine of one's own, Docker or Podman, run by a guardian process that always cleans up after it.

`python -m testbed.private_engine WORK dockerd|podman PROGRAM` (root only) sweeps what is left in WORK, starts dockerd
or Podman's service of Docker's API in the environment that `testbed.private_podman` made, writes the line `started` and
waits until its standard input ends, which the kernel sees to even when whoever holds the other end is killed. Then
everything goes: the engine's daemons, shims and containers by SIGKILL, mounts, control groups, sockets and data.
Nothing of such an engine is worth a graceful end, so the clean end, the end after a failure and the sweep of what
an earlier, killed guardian left are one and the same path: `sweep`.

In WORK: `dockerd.log` or `podman.log` (kept; of the latest engine), `engine.lock` (kept; held by the guardian while it
lives), for Podman `podman/` with its configuration (kept), and `engine/` (gone afterwards) with the data. Sockets and
run-time state lie in `/run/gpuwarden-<hash of WORK>` (gone afterwards), because a socket's path is limited to 107 bytes
and WORK may be deep.
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
"""For as long a guardian that was told to go, or lost its caller, may still be sweeping."""
SWEEP_TIMEOUT_S = 20
REAP_INTERVAL_S = 0.5
SWEEP_FAILED = 3
"""The guardian's exit status when something of its engine is left; the log's last line says what."""

# <sys/prctl.h>, <sys/mount.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MNT_DETACH = 2
_ENGINE_PROGRAMS = frozenset({"dockerd", "containerd", "containerd-shim-runc-v2", "runc", "podman", "conmon"})
_RUNC_STATE = Path("/run/runc")
"""Where runc keeps the state of its containers unless it is told another place; Podman tells it none."""
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the files of the private engine of one WORK folder lie."""

    work: Path
    run: Path
    program: str = "dockerd"

    @classmethod
    def of(cls, work: Path, program: str = "dockerd") -> "Places":
        """The places of `work`: always the same ones, so that a later run finds what an earlier one left."""
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
    """Something of the engine could not be removed. The message says what."""


def guard(places: Places, engine: str) -> int:
    """Run the engine until standard input ends or a signal asks to stop; 0, or 1 when the engine ended by itself."""
    for asked_to_stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(asked_to_stop, _leave)
    # Orphaned shims and containers become children of this process, which reaps them wherever PID 1 does not.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with (places.work / "engine.lock").open("w") as lock:
        _lock(lock.fileno())
        # Only now: until the lock was ours, the log may have been another engine's.
        os.truncate(places.log, 0)
        sweep(places)
        places.run.mkdir(mode=0o700)
        places.data.mkdir(mode=0o711)
        try:
            return _run_until_told(places, engine)
        finally:
            # From here on nothing may interrupt: the sweep is bounded by itself.
            for asked_to_stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(asked_to_stop, signal.SIG_IGN)
            sweep(places)


def dockerd_command(places: Places, dockerd: str) -> list[str]:
    """What starts the engine of `places`, whose folders and `daemon.json` must be there."""
    return [
        *(dockerd, "--host", f"unix://{places.socket}", "--group", "root"),
        *("--data-root", str(places.data / "data"), "--exec-root", str(places.run / "exec")),
        *("--pidfile", str(places.run / "dockerd.pid"), "--config-file", str(places.configuration)),
        *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
    ]


def podman_command(places: Places, podman: str) -> list[str]:
    """What starts Podman's service of `places`, configured by its environment (`testbed.private_podman`)."""
    return [podman, "system", "service", "--time", "0", f"unix://{places.socket}"]


def _run_until_told(places: Places, program: str) -> int:
    # An empty configuration keeps /etc/docker/daemon.json, written for another engine, out of this one.
    places.configuration.write_text("{}")
    command = podman_command if places.program == "podman" else dockerd_command
    with places.log.open("ab") as log:
        engine = subprocess.Popen(
            command(places, program),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Safe here: this process has one thread. It covers a guardian that is itself killed.
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
    print("started", flush=True)
    while engine.pid not in _reaped():
        told, _, _ = select.select([sys.stdin], [], [], REAP_INTERVAL_S)
        if told:
            return 0
    return 1


def sweep(places: Places) -> None:
    """Remove every process, mount, control group and file of the engine of `places`. Nothing there is fine too.

    Raises SweepFailed when something is left after a bound, and then leaves the files alone.
    """
    give_up = time.monotonic() + SWEEP_TIMEOUT_S
    # The daemons first: a living dockerd would restart what asks to be always restarted.
    while left := [*_engine_pids(places), *_container_pids(_container_ids(places))]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reaped()
        if time.monotonic() > give_up:
            raise SweepFailed(
                f"still running after SIGKILL: {left}; their data stays in {places.data} and {places.run}"
            )
        time.sleep(0.02)
    _reaped()
    for mount in _mounts_below(places.data, places.run):
        _libc.umount2(os.fsencode(mount), _MNT_DETACH)
    if still := _mounts_below(places.data, places.run):
        # Deleting through a mount could delete what belongs to someone else.
        raise SweepFailed(
            f"still mounted: {', '.join(still)}; unmount them, then remove {places.data} and {places.run}"
        )
    _remove_shim_sockets(places)
    _remove_cgroups(_container_ids(places))
    for state in (_RUNC_STATE / container for container in _container_ids(places)):
        shutil.rmtree(state, ignore_errors=True)
    for folder in (places.data, places.run):
        if folder.exists():
            shutil.rmtree(folder)


def _container_ids(places: Places) -> frozenset[str]:
    folders = (places.data / "data").glob("*containers/*")  # Podman names them after its storage driver
    return frozenset(path.name for path in folders if _CONTAINER_ID.fullmatch(path.name))


def _engine_pids(places: Places) -> Iterator[int]:
    """The daemons and shims of this engine: each has a path below the run folder, unique to WORK, in its arguments."""
    for pid in _pids():
        arguments = _read(f"/proc/{pid}/cmdline").split("\0")
        if os.path.basename(arguments[0]) in _ENGINE_PROGRAMS and f"{places.run}/" in " ".join(arguments):  # noqa: PTH119
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
    """Mount points in and below `folders`, deepest first. Format: proc(5), mountinfo; blanks come as octal escapes."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        if any(mount == str(folder) or mount.startswith(f"{folder}/") for folder in folders):
            found.append(mount)
    return found[::-1]


def _remove_shim_sockets(places: Places) -> None:
    """A killed shim leaves its socket in /run/containerd/s; its task folder says which one that is."""
    for address in places.run.glob("exec/containerd/daemon/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().strip().removeprefix("unix://")).unlink(missing_ok=True)


def _remove_cgroups(containers: frozenset[str]) -> None:
    """Remove the empty groups of these containers, in every hierarchy of v1 and in v2, cgroupfs or systemd style."""
    if not containers:
        return
    for folder, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
        if containers.intersection(_CONTAINER_ID.findall(folder)):
            with suppress(OSError):
                Path(folder).rmdir()


def _reaped() -> set[int]:
    """Collect every child that has ended, and say which these were."""
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
                raise SystemExit(
                    f"another engine has been running in the same work folder for {LOCK_TIMEOUT_S} s"
                ) from None
            time.sleep(0.1)
        else:
            return


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(guard(Places.of(Path(sys.argv[1]), sys.argv[2]), sys.argv[3]))
    except SweepFailed as problem:
        print(problem, file=sys.stderr)
        sys.exit(SWEEP_FAILED)
