"""Services of this host's systemd, by the whole name of their unit, through `systemctl`. No shell sees a name.

Only a service whose name matches a pattern that its host's owner has set is ever touched, and never the one that the
remediator itself runs in. What is read of a unit (org.freedesktop.systemd1(5), systemd.service(5)):

    LoadState        `not-found`: it is gone
    ActiveState, SubState   whether it runs; between two lives (`auto-restart`) it does not
    InvocationID     one life of it. systemd forgets it once the unit is down and nothing refers to the unit: then what
                     ran last is not known, and its incarnation is empty
    ControlGroup     where its processes are
    Restart          `always`, and down without having failed: somebody told it to stop
    Transient        made by systemd-run and the like: gone once it is down
    FreezerState     `frozen`: it runs, and gets no time
    Type             `oneshot`: it does what it is there for while it counts as activating
    Job              what systemd has yet to do about it
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from gpuwarden import cgroup as cgroups
from remediator.actuators import ActuatorError
from remediator.plan import ContainerState

TIMEOUT_S: Final = 10.0
"""How long systemd may take to answer, and a service that was told to start to be seen starting, seconds."""

RUNS_FOR_S: Final = 0.5
"""For how long one life is seen after a start, seconds: a program that cannot be executed has failed by then, though
systemd calls a simple service active before."""

KILL_WAIT_S: Final = 5.0
POLL_S: Final = 0.05

_PROPERTIES: Final = (
    *("Id", "LoadState", "ActiveState", "SubState", "InvocationID", "ControlGroup", "Restart", "Transient"),
    *("FreezerState", "Result", "Type", "Job"),
)
_UP: Final = frozenset({"active", "activating", "deactivating", "reloading", "refreshing"})
_WITHOUT_PROCESSES: Final = frozenset({"auto-restart", "auto-restart-queued", "exited"})
"""States of a unit that counts as up to systemd and runs nothing."""


class SystemdActuator:
    """Looks at, stops and starts the services whose names match one of `patterns` (fnmatch).

    `systemctl` is how systemd is asked.
    """

    def __init__(self, patterns: Sequence[str], *, systemctl: Sequence[str] = ("systemctl",)) -> None:
        self._patterns = tuple(patterns)
        self._systemctl = tuple(systemctl)

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """See `Actuator.look`."""
        shown = self._show(handle)
        running = _runs(shown)
        if shown["LoadState"] == "not-found" and not running and not (cgroup and _processes(handle, Path(cgroup))):
            return None
        group = _group(shown["ControlGroup"]) or (Path(cgroup) if cgroup else None)
        if running and group is None:
            raise ActuatorError(f"{handle} runs and is in no control group: it is starting or ending")
        invocation = shown["InvocationID"]
        return ContainerState(
            kind="systemd",
            handle=handle,
            name=handle,
            incarnation=f"{handle}@{invocation}" if invocation else "",
            running=running,
            managed=self._is_managed(handle),
            pids=_processes(handle, group),
            cgroup=None if group is None else str(group),
            paused=shown["FreezerState"] == "frozen",
            vanishes=shown["Transient"] == "yes" or shown["LoadState"] == "not-found",
            left_down=shown["ActiveState"] == "inactive" and shown["Restart"] == "always",
            starting=_starts(shown),
        )

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`. After `grace_s` SIGKILL to all of its processes, whatever its own timeout and KillMode.

        To those of the life that was to be stopped: one that somebody begins meanwhile is left alone. systemd
        restarts nothing that it was told to stop, whatever `Restart` says.
        """
        self._check(handle)
        before = self._show(handle)
        group, life = _group(before["ControlGroup"]), before["InvocationID"]
        if _runs(before):
            self._ask("stop", "--no-block", "--", handle)
        deadline_s = time.monotonic() + grace_s
        while True:
            shown = self._show(handle)
            if _runs(shown) and shown["InvocationID"] != life:
                return  # that life is over, and somebody has begun another
            if not _runs(shown) and not _processes(handle, group):
                return
            late_s = time.monotonic() - deadline_s
            if late_s >= KILL_WAIT_S:
                raise ActuatorError(f"{handle} does not die")
            if late_s >= 0:
                self._kill(handle, group, life)
            time.sleep(POLL_S)

    def start(self, handle: str) -> None:
        """See `Actuator.start`. A service that systemd refuses to start again (its start limit) stays down."""
        self._check(handle)
        if _runs(self._show(handle)):
            return
        self._ask("start", "--no-block", "--", handle)
        deadline_s = time.monotonic() + TIMEOUT_S
        life, since_s = "", 0.0
        while True:
            shown, now_s = self._show(handle), time.monotonic()
            if not _runs(shown):
                life = ""
            elif shown["InvocationID"] != life:
                life, since_s = shown["InvocationID"], now_s
            elif now_s - since_s >= RUNS_FOR_S:
                return
            is_over = (
                shown["ActiveState"] not in _UP and not shown["Job"]
            )  # what it was before its start is not counted
            if is_over or now_s >= deadline_s:
                state = f"{shown['ActiveState']}, {shown['Result']}"
                raise ActuatorError(f"{handle} does not start ({state}): journalctl --unit={handle} says why")
            time.sleep(POLL_S)

    def _kill(self, handle: str, group: Path | None, life: str) -> None:
        """SIGKILL to the processes of one life, unless it is over.

        Each is held by a descriptor before it is asked whose life this is: what is held then is of no later one.
        """
        with ExitStack() as stack:
            held: dict[int, int] = {}
            for pid in _processes(handle, group):
                try:
                    held[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    raise ActuatorError(f"process {pid} of {handle} cannot be held: {error}") from None
                stack.callback(os.close, held[pid])
            # A pid that ended before it was held may be somebody else's by now.
            ours = _processes(handle, group)
            if self._show(handle)["InvocationID"] not in ("", life):
                return
            for pid in ours & held.keys():
                try:
                    signal.pidfd_send_signal(held[pid], signal.SIGKILL)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    raise ActuatorError(
                        f"process {pid} of {handle} may not be killed: run the executor as root"
                    ) from None
                except OSError as error:
                    raise ActuatorError(f"process {pid} of {handle} cannot be killed: {error}") from None

    def _is_managed(self, handle: str) -> bool:
        """Whether its name was opted in. Nobody can opt in what the remediator itself runs in: it would stop itself."""
        return any(fnmatchcase(handle, pattern) for pattern in self._patterns) and cgroups.unit(os.getpid()) != handle

    def _check(self, handle: str) -> None:
        if not self._is_managed(handle):
            raise ActuatorError(f"{handle} is not opted in, or is the remediator itself: see --systemd-unit")

    def _show(self, handle: str) -> dict[str, str]:
        """A unit's properties; a name that is none of a service, or only another name of one, is refused."""
        if not cgroups.UNIT.fullmatch(handle):
            raise ActuatorError(f"{handle!r} is no whole name of a service")
        told = self._ask("show", f"--property={','.join(_PROPERTIES)}", "--", handle)
        shown = dict(line.partition("=")[::2] for line in told.splitlines())
        missing = [name for name in _PROPERTIES[:6] if name not in shown]
        if missing:
            raise ActuatorError(
                f"systemd does not tell {', '.join(missing)} of {handle}: systemd 246 or later is wanted"
            )
        if shown["Id"] != handle:
            raise ActuatorError(f"{handle} is only another name of {shown['Id']}")
        return dict.fromkeys(_PROPERTIES, "") | shown

    def _ask(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [*self._systemctl, "--no-pager", "--no-ask-password", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ActuatorError(f"systemd did not answer `systemctl {arguments[0]}` within {TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise ActuatorError(f"systemd cannot be asked: {error}") from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "backslashreplace").strip()[:300]
            raise ActuatorError(f"systemd refused to {arguments[0]} {arguments[-1]}: {said}")
        return done.stdout.decode("utf-8", "backslashreplace")


def _runs(shown: dict[str, str]) -> bool:
    return shown["ActiveState"] in _UP and shown["SubState"] not in _WITHOUT_PROCESSES


def _starts(shown: dict[str, str]) -> bool:
    does_its_work = shown["Type"] == "oneshot" and shown["SubState"] == "start"
    return shown["ActiveState"] == "activating" and _runs(shown) and not does_its_work


def _group(told: str) -> Path | None:
    """Where the processes of a unit are listed: in systemd's own hierarchy of version 1, else in the unified one."""
    for root in (cgroups.ROOT / "systemd", cgroups.ROOT / "unified", cgroups.ROOT):
        group = root / told.strip("/")
        if told.strip("/") and (group / "cgroup.procs").exists():
            return group
    return None


def _processes(handle: str, group: Path | None) -> frozenset[int]:
    try:
        return frozenset() if group is None else cgroups.processes(group)
    except OSError as error:
        raise ActuatorError(f"the processes of {handle} cannot be listed: {error}") from error
