"""What every actuator promises, on the real thing each time: Docker, Podman, systemd, processes.

An intent that is taken up again after a crash asks once more for what may have been done. So each is asked for twice,
and asked for what somebody else has done meanwhile.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest

from remediator.actuators import Actuator, ActuatorError
from remediator.actuators.docker import LABEL, DockerActuator
from remediator.actuators.process import ProcessActuator
from remediator.actuators.systemd import SystemdActuator
from remediator.plan import ContainerState
from testbed.docker_engine import Engine, NoEngine, docker_engine, podman_engine
from testbed.private_systemd import NoSystemd, private_systemd
from testbed.worker_image import worker_image
from tests.waiting import eventually

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
"""What is stopped here ignores SIGTERM, as what is wedged does."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """One container that may be freed, down; `absent` is a handle of the same kind that names none."""

    actuator: Actuator
    handle: str
    absent: str

    def up(self) -> ContainerState:
        """Start it, as somebody would, and wait until it is deaf."""
        self.actuator.start(self.handle)
        return eventually(self._deaf, "it runs and ignores SIGTERM", within_s=30)

    def _deaf(self) -> ContainerState | None:
        found = self.actuator.look(self.handle)
        if found is None or not found.running or len(found.pids) != 1:
            return None
        status = Path(f"/proc/{next(iter(found.pids))}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        return found if ignored & 1 << signal.SIGTERM - 1 else None


@contextmanager
def engine_ground(
    folder: Path, engine: Callable[[Path], AbstractContextManager[Engine | NoEngine]]
) -> Iterator[Ground]:
    with engine(folder) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.because)
        client = docker.DockerClient(base_url=found.base_url)
        container = client.containers.create(
            worker_image(client, extra={}), ["python3", "-c", DEAF], network_mode="none", labels={LABEL: "true"}
        )
        actuator = DockerActuator(found.base_url, kind=found.kind)
        yield Ground(actuator=actuator, handle=str(container.id), absent="f" * 64)
        container.remove(force=True)
        client.close()


@contextmanager
def docker_ground(folder: Path) -> Iterator[Ground]:
    with engine_ground(folder, docker_engine) as found:
        yield found


@contextmanager
def podman_ground(folder: Path) -> Iterator[Ground]:
    with engine_ground(folder, podman_engine) as found:
        yield found


@contextmanager
def systemd_ground(folder: Path) -> Iterator[Ground]:
    with private_systemd(folder) as found:
        if isinstance(found, NoSystemd):
            pytest.skip(found.because)
        program = folder / "deaf.py"
        program.write_text(DEAF)
        start = f"ExecStart={sys.executable} {program}"
        found.write("w@.service", f"[Unit]\nDefaultDependencies=no\n[Service]\n{start}\nRestart=always\n")
        actuator = SystemdActuator(["w@*.service"], systemctl=[*found.enter, "systemctl"])
        yield Ground(actuator=actuator, handle="w@1.service", absent="absent.service")


@contextmanager
def process_ground(folder: Path) -> Iterator[Ground]:
    file = folder / "workers.toml"
    argv = json.dumps([sys.executable, "-c", DEAF])
    file.write_text(f"[worker.w1]\nargv = {argv}\npid_file = '{folder}/pid'\nlog_file = '{folder}/log'\n")
    actuator = ProcessActuator(file)
    yield Ground(actuator=actuator, handle="w1", absent="w2")
    actuator.stop("w1", grace_s=0.0)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(docker_ground, id="docker", marks=pytest.mark.needs_docker),
        pytest.param(podman_ground, id="podman", marks=pytest.mark.needs_podman),
        pytest.param(systemd_ground, id="systemd", marks=pytest.mark.needs_systemd),
        pytest.param(process_ground, id="process"),
    ],
)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with request.param(tmp_path_factory.mktemp("ground")) as found:
        yield found


def look(ground: Ground, *, cgroup: str | None = None) -> ContainerState:
    found = ground.actuator.look(ground.handle, cgroup=cgroup)
    assert found is not None
    return found


def test_a_look_changes_nothing_and_tells_the_same_twice(ground: Ground) -> None:
    up = ground.up()

    assert look(ground) == look(ground) == up
    assert up.managed
    assert up.incarnation


def test_what_is_stopped_twice_is_stopped_once_and_nothing_of_it_is_left(ground: Ground) -> None:
    up = ground.up()

    ground.actuator.stop(ground.handle, grace_s=0.1)
    ground.actuator.stop(ground.handle, grace_s=0.1)

    down = look(ground, cgroup=up.cgroup)
    assert (down.running, down.pids) == (False, frozenset())
    assert down.incarnation in (up.incarnation, "")  # systemd forgets what is down, and claims nothing then
    (pid,) = up.pids
    assert not Path(f"/proc/{pid}").exists()


def test_what_is_started_twice_is_started_once(ground: Ground) -> None:
    ground.actuator.stop(ground.handle, grace_s=0.1)

    up = ground.up()
    ground.actuator.start(ground.handle)
    ground.actuator.start(ground.handle)

    assert look(ground) == up


def test_each_start_is_another_incarnation(ground: Ground) -> None:
    first = ground.up()
    ground.actuator.stop(ground.handle, grace_s=0.1)
    second = ground.up()

    assert first.incarnation != second.incarnation
    assert first.pids.isdisjoint(second.pids)


def test_what_ended_by_a_signal_of_somebody_elses_is_that_incarnation_no_more_or_down(ground: Ground) -> None:
    up = ground.up()
    (pid,) = up.pids

    os.kill(pid, signal.SIGKILL)

    def over() -> bool:
        try:
            found = look(ground)
        except ActuatorError:  # it is ending as it is looked at
            return False
        return not found.running or found.incarnation != up.incarnation

    eventually(over, "that life is seen to be over", within_s=30)


def test_what_is_not_there_is_none_and_cannot_be_acted_on(ground: Ground) -> None:
    assert ground.actuator.look(ground.absent) is None
    with pytest.raises(ActuatorError):
        ground.actuator.stop(ground.absent, grace_s=0.0)
    with pytest.raises(ActuatorError):
        ground.actuator.start(ground.absent)
