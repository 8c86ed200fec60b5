"""The actuator of orphans on real processes: what a dead worker without a supervisor left."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden import clock, procfs
from gpuwarden.procfs import ProcessId
from remediator.actuators import ActuatorError, process
from remediator.actuators.process import OrphanActuator, orphans_handle


def lives(pid: int) -> bool:
    return Path("/proc", str(pid)).exists() and not procfs.is_zombie(pid)


class Family:
    """A shell and its child, both in the process group that the shell leads."""

    def __init__(self, *, session: bool = False) -> None:
        self.parent = subprocess.Popen(
            ["sh", "-c", "sleep 600 & echo $!; wait"],
            stdout=subprocess.PIPE, text=True, process_group=None if session else 0, start_new_session=session,
        )  # fmt: skip
        assert self.parent.stdout
        with self.parent.stdout as output:
            self.child = int(output.readline())
        self.process = ProcessId.of(self.parent.pid)

    def handle(self, *, boot_id: str | None = None, uid: int | None = None) -> str:
        incarnation = f"process:{self.process.pid}:{self.process.start_ticks}@{boot_id or clock.boot_id()}"
        return orphans_handle("w1", incarnation, os.getuid() if uid is None else uid)

    def kill_parent(self) -> None:
        self.parent.kill()
        self.parent.wait()


@pytest.fixture(params=[False, True], ids=["process group", "session"])
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    found = Family(session=request.param)
    yield found
    if found.parent.returncode is None:
        found.kill_parent()
    if lives(found.child):
        os.kill(found.child, signal.SIGKILL)


def test_children_that_a_dead_worker_left_are_listed_and_stopped(family: Family) -> None:
    actuator = OrphanActuator()
    family.kill_parent()
    left = actuator.look(family.handle())

    actuator.stop(family.handle(), grace_s=5.0)

    after = actuator.look(family.handle())
    assert (left.running, left.pids, left.managed, left.startable) == (True, frozenset({family.child}), True, False)
    assert (left.name, left.incarnation) == ("w1", family.handle().split()[1])
    assert (after.running, after.pids) == (False, frozenset())
    assert not lives(family.child)


def test_children_of_another_user_or_an_earlier_boot_are_no_orphans(family: Family) -> None:
    actuator = OrphanActuator()
    family.kill_parent()

    for handle in (family.handle(uid=os.getuid() + 1), family.handle(boot_id="earlier")):
        actuator.stop(handle, grace_s=0.0)

        assert actuator.look(handle).pids == frozenset()
    assert lives(family.child)


def test_children_of_a_live_worker_are_no_orphans(family: Family) -> None:
    actuator = OrphanActuator()

    with pytest.raises(ActuatorError, match=r"runs, or cannot be read"):
        actuator.look(family.handle())
    with pytest.raises(ActuatorError):
        actuator.stop(family.handle(), grace_s=0.0)

    assert lives(family.parent.pid)
    assert lives(family.child)


def test_group_of_a_later_process_with_the_same_pid_is_left_alone(family: Family) -> None:
    earlier = family.handle().replace(f":{family.process.start_ticks}@", ":1@")
    actuator = OrphanActuator()

    actuator.stop(earlier, grace_s=0.0)

    assert actuator.look(earlier).pids == frozenset()
    assert lives(family.parent.pid)
    assert lives(family.child)


def test_orphan_that_survives_sigkill_is_an_error(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    family.kill_parent()
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)

    with pytest.raises(ActuatorError, match="still run after SIGKILL"):
        OrphanActuator().stop(family.handle(), grace_s=0.0)


@pytest.mark.parametrize("handle", ["w1", "w1 process:1@b 0", "w1 process:1:2@b", "w1 process:1:2@b -1"])
def test_handle_without_a_process_is_refused(handle: str) -> None:
    with pytest.raises(ActuatorError, match="names no process"):
        OrphanActuator().look(handle)


def test_dead_worker_without_a_supervisor_is_not_started(family: Family) -> None:
    with pytest.raises(ActuatorError, match="has no supervisor"):
        OrphanActuator().start(family.handle())
