"""What every actuator guarantees, on real Docker, Podman, systemd and processes.

After a crash the executor repeats an intent that may be done. So each action runs twice here.
"""

import os
import signal
import subprocess
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
"""A program that ignores SIGTERM, as a hung worker does."""

# Starts a program at each line of its input. Arguments: $GPUWARDEN_RUNTIME_DIR and the program.
SUPERVISOR = """
import os, subprocess, sys
from pathlib import Path
from gpuwarden.procfs import ProcessId
from gpuwarden.reporter import Reporter
from gpuwarden.supervisor import files
from gpuwarden.supervisor.files import ProcessFile
with Reporter(Path(sys.argv[1]), worker="w1", queue="gpu") as reporter:
    for _ in sys.stdin:
        child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
        own = ProcessId.of(os.getpid())
        file = ProcessFile(process=ProcessId.of(child.pid), supervisor=own, restarts=True)
        files.write(reporter.folder, "w1", file)
        child.wait()
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One stopped container that may be restarted; `absent` is a handle of its kind without a container.

    `restart` starts an ended one, if the actuator leaves that to a supervisor.
    """

    actuator: Actuator
    handle: str
    absent: str
    restart: Callable[[], None] | None = None

    def up(self) -> ContainerState:
        """Start it and wait until it ignores SIGTERM."""
        found = self.actuator.look(self.handle)
        if self.restart is not None and (found is None or not found.running):
            self.restart()
            eventually(lambda: (now := self.actuator.look(self.handle)) is not None and now != found, "it is started")
        self.actuator.start(self.handle)
        return eventually(self._deaf_state, "it runs and ignores SIGTERM", within_s=30)

    def _deaf_state(self) -> ContainerState | None:
        found = self.actuator.look(self.handle)
        if found is None or not found.running or len(found.pids) != 1:
            return None
        status = Path(f"/proc/{next(iter(found.pids))}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        return found if ignored & 1 << signal.SIGTERM - 1 else None


@contextmanager
def engine_subject(
    folder: Path, engine: Callable[[Path], AbstractContextManager[Engine | NoEngine]]
) -> Iterator[Subject]:
    with engine(folder) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.reason)
        client = docker.DockerClient(base_url=found.base_url)
        container = client.containers.create(
            worker_image(client, extra={}), ["python3", "-c", DEAF], network_mode="none", labels={LABEL: "true"}
        )
        actuator = DockerActuator(found.base_url, kind=found.kind)
        yield Subject(actuator=actuator, handle=str(container.id), absent="f" * 64)
        container.remove(force=True)
        client.close()


@contextmanager
def docker_subject(folder: Path) -> Iterator[Subject]:
    with engine_subject(folder, docker_engine) as found:
        yield found


@contextmanager
def podman_subject(folder: Path) -> Iterator[Subject]:
    with engine_subject(folder, podman_engine) as found:
        yield found


@contextmanager
def systemd_subject(folder: Path) -> Iterator[Subject]:
    with private_systemd(folder) as found:
        if isinstance(found, NoSystemd):
            pytest.skip(found.reason)
        program = folder / "deaf.py"
        program.write_text(DEAF)
        start = f"ExecStart={sys.executable} {program}"
        found.write("w@.service", f"[Unit]\nDefaultDependencies=no\n[Service]\n{start}\nRestart=always\n")
        actuator = SystemdActuator(["w@*.service"], systemctl=[*found.enter, "systemctl"])
        yield Subject(actuator=actuator, handle="w@1.service", absent="absent.service")


@contextmanager
def process_subject(folder: Path) -> Iterator[Subject]:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), DEAF],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )

    def restart() -> None:
        assert supervisor.stdin
        supervisor.stdin.write("start\n")
        supervisor.stdin.flush()

    actuator = ProcessActuator(folder)
    yield Subject(actuator=actuator, handle="w1", absent="w2", restart=restart)
    assert supervisor.stdin
    supervisor.stdin.close()
    actuator.stop("w1", grace_s=0.0)
    supervisor.wait(30)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(docker_subject, id="docker", marks=pytest.mark.needs_docker),
        pytest.param(podman_subject, id="podman", marks=pytest.mark.needs_podman),
        pytest.param(systemd_subject, id="systemd", marks=pytest.mark.needs_systemd),
        pytest.param(process_subject, id="process"),
    ],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with request.param(tmp_path_factory.mktemp("subject")) as found:
        yield found


def look(subject: Subject, *, cgroup: str | None = None) -> ContainerState:
    found = subject.actuator.look(subject.handle, cgroup=cgroup)
    assert found is not None
    return found


def test_look_changes_nothing(subject: Subject) -> None:
    up = subject.up()

    assert look(subject) == look(subject) == up
    assert up.managed
    assert up.incarnation


def test_second_stop_does_nothing_and_no_process_remains(subject: Subject) -> None:
    up = subject.up()

    subject.actuator.stop(subject.handle, grace_s=0.1)
    subject.actuator.stop(subject.handle, grace_s=0.1)

    down = look(subject, cgroup=up.cgroup)
    assert (down.running, down.pids) == (False, frozenset())
    assert down.incarnation in (up.incarnation, "")  # systemd forgets a stopped unit
    (pid,) = up.pids
    assert not Path(f"/proc/{pid}").exists()


def test_second_start_does_nothing(subject: Subject) -> None:
    subject.actuator.stop(subject.handle, grace_s=0.1)

    up = subject.up()
    subject.actuator.start(subject.handle)
    subject.actuator.start(subject.handle)

    assert look(subject) == up


def test_each_start_gives_a_new_incarnation(subject: Subject) -> None:
    first = subject.up()
    subject.actuator.stop(subject.handle, grace_s=0.1)
    second = subject.up()

    assert first.incarnation != second.incarnation
    assert first.pids.isdisjoint(second.pids)


def test_container_killed_by_a_signal_is_down_or_a_new_incarnation(subject: Subject) -> None:
    up = subject.up()
    (pid,) = up.pids

    os.kill(pid, signal.SIGKILL)

    def over() -> bool:
        try:
            found = look(subject)
        except ActuatorError:  # it ends during the look
            return False
        return not found.running or found.incarnation != up.incarnation

    eventually(over, "that incarnation has ended", within_s=30)


def test_absent_container_is_none_and_rejects_actions(subject: Subject) -> None:
    assert subject.actuator.look(subject.absent) is None
    with pytest.raises(ActuatorError):
        subject.actuator.stop(subject.absent, grace_s=0.0)
    with pytest.raises(ActuatorError):
        subject.actuator.start(subject.absent)
