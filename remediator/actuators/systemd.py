"""Services of systemd that match a pattern, by full unit name, through `systemctl`. Never the remediator's own unit.

Properties read (org.freedesktop.systemd1(5), systemd.service(5)):

    - LoadState        `not-found`: it is gone
    - ActiveState, SubState   whether it runs; in `auto-restart` it does not
    - InvocationID     its incarnation; empty once the unit is down and unloaded
    - ControlGroup     where its processes are
    - Restart          `always` and down without a failure: a stop was requested
    - Transient        made by systemd-run: gone once it is down
    - FreezerState     `frozen`: paused
    - Type             `oneshot`: works while it is activating
    - Job              systemd's pending job
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
"""Timeout of a systemctl call, and of a service start, seconds."""

RUNS_FOR_S: Final = 0.5
"""One incarnation must run this long after a start, seconds. systemd calls a simple service active before exec."""

KILL_WAIT_S: Final = 5.0
POLL_S: Final = 0.05

_PROPERTIES: Final = (
    *("Id", "LoadState", "ActiveState", "SubState", "InvocationID", "ControlGroup", "Restart", "Transient"),
    *("FreezerState", "Result", "Type", "Job"),
)
_UP: Final = frozenset({"active", "activating", "deactivating", "reloading", "refreshing"})
_WITHOUT_PROCESSES: Final = frozenset({"auto-restart", "auto-restart-queued", "exited"})


class SystemdActuator:
    """Inspects, stops and starts the services whose names match one of `patterns` (fnmatch)."""

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
        """See `Actuator.stop`. After `grace_s` seconds all its processes get SIGKILL, even if KillMode spares them.

        Only processes of the stopped incarnation are killed. systemd does not restart a stopped unit.
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
                return  # another incarnation has started
            if not _runs(shown) and not _processes(handle, group):
                return
            late_s = time.monotonic() - deadline_s
            if late_s >= KILL_WAIT_S:
                raise ActuatorError(f"{handle} still runs after SIGKILL")
            if late_s >= 0:
                self._kill(handle, group, life)
            time.sleep(POLL_S)

    def start(self, handle: str) -> None:
        """See `Actuator.start`. A service over its start limit stays down."""
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
            is_over = shown["ActiveState"] not in _UP and not shown["Job"]
            if is_over or now_s >= deadline_s:
                state = f"{shown['ActiveState']}, {shown['Result']}"
                raise ActuatorError(f"{handle} does not start ({state}): see journalctl --unit={handle}")
            time.sleep(POLL_S)

    def _kill(self, handle: str, group: Path | None, life: str) -> None:
        """Send SIGKILL to the processes of one incarnation. A pid is opened before it is checked."""
        with ExitStack() as stack:
            held: dict[int, int] = {}
            for pid in _processes(handle, group):
                try:
                    held[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    raise ActuatorError(f"process {pid} of {handle} cannot be opened: {error}") from None
                stack.callback(os.close, held[pid])
            # A pid may have been reused before it was opened.
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

        return any(fnmatchcase(handle, pattern) for pattern in self._patterns) and cgroups.unit(os.getpid()) != handle

    def _check(self, handle: str) -> None:
        if not self._is_managed(handle):
            raise ActuatorError(f"{handle} matches no --systemd-unit pattern, or is the remediator's own unit")

    def _show(self, handle: str) -> dict[str, str]:
        """Read a unit's properties. Aliases and names of other unit types are refused."""
        if not cgroups.UNIT.fullmatch(handle):
            raise ActuatorError(f"{handle!r} is not a full service name")
        output = self._ask("show", f"--property={','.join(_PROPERTIES)}", "--", handle)
        shown = dict(line.partition("=")[::2] for line in output.splitlines())
        missing = [name for name in _PROPERTIES[:6] if name not in shown]
        if missing:
            raise ActuatorError(f"systemd does not report {', '.join(missing)} of {handle}: 246 or later is needed")
        if shown["Id"] != handle:
            raise ActuatorError(f"{handle} is an alias of {shown['Id']}")
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
            raise ActuatorError(f"systemctl cannot be run: {error}") from None
        if done.returncode != 0:
            message = done.stderr.decode("utf-8", "backslashreplace").strip()[:300]
            raise ActuatorError(f"systemd refused to {arguments[0]} {arguments[-1]}: {message}")
        return done.stdout.decode("utf-8", "backslashreplace")


def _runs(shown: dict[str, str]) -> bool:
    return shown["ActiveState"] in _UP and shown["SubState"] not in _WITHOUT_PROCESSES


def _starts(shown: dict[str, str]) -> bool:
    does_its_work = shown["Type"] == "oneshot" and shown["SubState"] == "start"
    return shown["ActiveState"] == "activating" and _runs(shown) and not does_its_work


def _group(control_group: str) -> Path | None:
    """The unit's cgroup folder: in the systemd hierarchy of cgroup v1, else in the unified hierarchy."""
    for root in (cgroups.ROOT / "systemd", cgroups.ROOT / "unified", cgroups.ROOT):
        group = root / control_group.strip("/")
        if control_group.strip("/") and (group / "cgroup.procs").exists():
            return group
    return None


def _processes(handle: str, group: Path | None) -> frozenset[int]:
    try:
        return frozenset() if group is None else cgroups.processes(group)
    except OSError as error:
        raise ActuatorError(f"the processes of {handle} cannot be listed: {error}") from error
