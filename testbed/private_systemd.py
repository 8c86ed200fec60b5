"""A private systemd for tests: PID 1 of its namespaces, in its control group. Root only.

It sees the host's files except `/run`, and runs only the units that a test writes. It ends with its caller. Commands of
`Systemd.enter` run in its namespaces.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.standalone import debian_packages

CGROUPS = Path("/sys/fs/cgroup")
READY_TIMEOUT_S = 30
REMOVE_TIMEOUT_S = 10
_GROUP = "gpuwarden-systemd-"
"""Prefix of its control groups; the pid of the caller follows."""
UNITS = Path("/run/systemd/system")
"""Folder of units below its root."""

# `container` disables what only the first systemd of a machine may do. Its control groups are bind mounts of the
# host's, because it makes missing ones read-only.
_BOOT = """set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/systemd/system /run/cgroup
if [ "$(stat -f -c %T /sys/fs/cgroup)" = tmpfs ]; then
  mount --rbind /sys/fs/cgroup /run/cgroup
  mount -t tmpfs tmpfs /sys/fs/cgroup
  for hierarchy in $(ls /run/cgroup); do
    mkdir "/sys/fs/cgroup/$hierarchy"
    mount --bind "/run/cgroup/$hierarchy" "/sys/fs/cgroup/$hierarchy"
  done
  umount --lazy /run/cgroup
fi
printf '[Unit]\\nDefaultDependencies=no\\n' >/run/systemd/system/boot.target
exec env container=gpuwarden SYSTEMD_UNIT_PATH=/run/systemd/system SYSTEMD_PROC_CMDLINE= \\
  "$1" --system --unit=boot.target --log-target=console --show-status=no
"""


@dataclass(frozen=True, kw_only=True)
class Systemd:
    """A running systemd. `pid` is its pid on the host; `root` shows its files."""

    pid: int
    path: str

    @property
    def enter(self) -> list[str]:
        """Command prefix to run in its namespaces, with `systemctl` on PATH."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--", "env", f"PATH={self.path}"]

    @property
    def root(self) -> Path:  # noqa: D102
        return Path(f"/proc/{self.pid}/root")

    def write(self, unit: str, text: str) -> None:
        """Write a unit (systemd.unit(5)) and reload."""
        (self.root / UNITS.relative_to("/") / unit).write_text(text, encoding="utf-8")
        subprocess.run([*self.enter, "systemctl", "daemon-reload"], check=True, timeout=READY_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class NoSystemd:
    """No systemd, with the reason."""

    reason: str


@contextmanager
def private_systemd(work: Path) -> Iterator[Systemd | NoSystemd]:
    """Yield a systemd, or the reason why there is none. Its log is `systemd.log` in `work`."""
    if os.geteuid() != 0:
        yield NoSystemd(reason="only root may start a private systemd")
        return
    try:
        program = debian_packages.find("systemd")
    except debian_packages.PartMissing as missing:
        yield NoSystemd(reason=str(missing))
        return
    env = _environment(program)
    for left in (left for hierarchy in _hierarchies() for left in hierarchy.glob(f"{_GROUP}*")):
        if not Path("/proc", left.name.removeprefix(_GROUP)).exists():  # left by a killed caller
            _remove(left)
    name = f"{_GROUP}{os.getpid()}"
    groups = [_group(hierarchy / name) for hierarchy in _hierarchies()]
    with (work / "systemd.log").open("wb") as log:
        begun = subprocess.Popen(
            [
                *("/bin/sh", "-c", 'for group in $1; do echo $$ >"$group/cgroup.procs"; done; shift; exec "$@"', "sh"),
                " ".join(str(group) for group in groups),
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("unshare", "--fork", "--pid", "--mount-proc", "--mount", "--kill-child"),
                *("/bin/sh", "-c", _BOOT, "sh"),
                str(program),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _wait_until_ready(begun, work / "systemd.log", env["PATH"])
    finally:
        begun.kill()
        begun.wait()
        for group in groups:
            _remove(group)


def _hierarchies() -> list[Path]:
    """Mount points of the control groups: v1 hierarchies and the unified one, or only the latter."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS]
    return [
        folder for folder in sorted(CGROUPS.iterdir()) if not folder.is_symlink() and (folder / "cgroup.procs").exists()
    ]


def _group(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)  # left by an earlier run
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists() and not (folder / name).read_text().strip():
            with suppress(OSError):  # inherited in version 2
                (folder / name).write_text((folder.parent / name).read_text())
    return folder


def _remove(group: Path) -> None:
    give_up = time.monotonic() + REMOVE_TIMEOUT_S
    while group.exists() and time.monotonic() < give_up:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):  # a process in it is still ending
                Path(folder).rmdir()
        time.sleep(0.02)


def _environment(program: Path) -> dict[str, str]:
    """The environment; for an unpacked systemd also scripts on PATH that set its libraries."""
    env = dict(os.environ)
    if not program.is_relative_to(debian_packages.PARTS_DIR):
        return env
    room = debian_packages.PARTS_DIR / program.relative_to(debian_packages.PARTS_DIR).parts[0]
    folders = [folder for each in debian_packages.library_folders(room) for folder in (each, each / "systemd")]
    libraries = os.pathsep.join(str(folder) for folder in folders)
    scripts = room / "scripts"
    scripts.mkdir(exist_ok=True)
    for name in ("systemctl", "systemd-run"):
        (found,) = [path for path in (room / "bin" / name, room / "usr/bin" / name) if path.exists()][:1]
        (scripts / name).write_text(f"#!/bin/sh\nLD_LIBRARY_PATH='{libraries}' exec '{found}' \"$@\"\n")
        (scripts / name).chmod(0o755)
    return {**env, "PATH": f"{scripts}{os.pathsep}{env['PATH']}", "LD_LIBRARY_PATH": libraries}


def _wait_until_ready(begun: subprocess.Popen[bytes], log: Path, path: str) -> Systemd | NoSystemd:
    give_up = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up and begun.poll() is None:
        children = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()
        if children and (Path(f"/proc/{children[0]}/root") / "run/systemd/private").exists():
            return Systemd(pid=int(children[0]), path=path)
        time.sleep(0.02)
    return NoSystemd(reason=f"systemd did not start: {log.read_text(errors='replace').strip()[-500:]}")
