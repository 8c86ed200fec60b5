"""Workers for demo and tests: Docker containers, systemd services or supervised processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import docker
from docker.errors import NotFound
from docker.models.containers import Container

from deploy.standalone.stack import CHECKOUT
from gpuwarden.job import LEASE_S
from remediator.actuators.docker import LABEL
from remediator.actuators.process import ProcessActuator
from remediator.actuators.systemd import SystemdActuator
from testbed import worker_image
from testbed.demo.job_body import REAL_GPU
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres

BODY: Final = "testbed.demo.job_body:load"
QUEUE: Final = "gpu"
START_S: Final = 60.0
"""Time for a supervisor to start its worker on a busy machine, seconds."""
STAGE_LABEL: Final = "gpuwarden.stage"
"""Label of these containers, to find leftovers of a killed run."""

IMAGE_DISTRIBUTIONS: Final = (
    *("alembic", "Mako", "MarkupSafe", "psycopg", "psycopg-binary", "SQLAlchemy", "structlog", "typing_extensions"),
)
"""Packages that a worker needs, compiled for this Python. In an image with another Python, MarkupSafe and SQLAlchemy
run uncompiled, and psycopg does not run.
"""


@dataclass(frozen=True, kw_only=True)
class Database:
    """A database of a PostgreSQL on this host. Hosts may share it."""

    server: Postgres
    name: str

    @property
    def url(self) -> str:
        """URL for programs on this host."""
        return self.server.url(self.name)


@dataclass(frozen=True, kw_only=True)
class HostPaths:
    """Paths of a fleet on this host. The queue is in `database` or in SQLite.

    With `real_gpus`, jobs of workers outside containers compute on their NVIDIA GPU.
    """

    directory: Path
    queue: Path
    data: Path
    database: Database | None = None
    real_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of all workers of a fleet, seconds. `restart` is Docker's restart policy."""

    heartbeat_s: float = 2.0
    lease_s: float = LEASE_S
    restart: Literal["always", "on-failure"] | None = None


class Fleet(Protocol):
    """Some workers. `where` names their environment."""

    where: str

    def __enter__(self) -> Self:
        """Create the workers."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Remove the workers."""

    def start(self, worker: str) -> None:
        """Start one worker."""

    def incarnation(self, worker: str) -> str:
        """Current incarnation of its container."""


class DockerFleet:
    """One container per worker, without network, with its own state folder."""

    where = "Docker containers"

    def __init__(
        self,
        client: docker.DockerClient,
        slots: Sequence[Slot],
        paths: HostPaths,
        *,
        unmanaged: Sequence[str],
        queues: Mapping[str, str],
        options: WorkerOptions,
    ) -> None:
        self._client = client
        self._slots = slots
        self._paths = paths
        self._options = options
        self._unmanaged = unmanaged
        self._queues = queues
        self._containers: dict[str, Container] = {}

    def __enter__(self) -> Self:
        """Create the containers without starting them."""
        name = worker_image.worker_image(self._client, extra=image_files())
        self._remove_leftovers()
        try:
            for slot in self._slots:
                self._containers[slot.worker] = self._create(slot, name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Remove the containers."""
        for container in self._containers.values():
            try:
                container.remove(force=True)
            except NotFound:
                continue

    def start(self, worker: str) -> None:
        """Start one container."""
        self._containers[worker].start()

    def container(self, worker: str) -> Container:
        """One container, with fresh attributes."""
        self._containers[worker].reload()
        return self._containers[worker]

    def incarnation(self, worker: str) -> str:
        """Full id and StartedAt."""
        container = self.container(worker)
        return f"{container.id}@{container.attrs['State']['StartedAt']}"

    def logs(self, worker: str) -> str:
        """Logs of a worker."""
        text: bytes = self._containers[worker].logs()
        return text.decode("utf-8", "replace")

    def pid(self, worker: str) -> int:
        """Host pid of a container's main process; 0 while it does not run."""
        return int(self.container(worker).attrs["State"]["Pid"])

    def history(self, worker: str) -> list[str]:
        """Engine events of a container: `start`, `kill`, `die`, `stop`..."""
        # End of this second: the engine accepts whole seconds and waits.
        until = int(time.time()) + 1
        events = self._client.events(
            since=0, until=until, filters={"container": self._containers[worker].id}, decode=True
        )
        return [event["Action"] for event in events]

    def _remove_leftovers(self) -> None:
        """Remove containers of a killed run. A foreign container of the same name stays."""
        ours = {slot.worker for slot in self._slots}
        for container in self._client.containers.list(all=True, filters={"label": STAGE_LABEL}):
            if container.name in ours:
                container.remove(force=True)

    def _create(self, slot: Slot, image_name: str) -> Container:
        paths, worker, options = self._paths, slot.worker, self._options
        (paths.directory / worker).mkdir(exist_ok=True)
        managed = {STAGE_LABEL: "true"} | ({} if worker in self._unmanaged else {LABEL: "true"})
        volumes = {
            str(paths.directory / worker): {"bind": f"/run/gpuwarden/{worker}", "mode": "rw"},
            str(paths.directory / "host"): {"bind": "/run/gpuwarden/host", "mode": "ro"},
            str(paths.queue): {"bind": "/queue", "mode": "rw"},
            str(paths.data): {"bind": "/data", "mode": "rw"},
        }
        store = "sqlite:////queue/queue.db"
        if paths.database is not None:
            server = paths.database.server
            volumes[str(server.sockets)] = {"bind": "/postgres", "mode": "rw"}
            store = server.url(paths.database.name, sockets="/postgres")
        queue = self._queues.get(worker, QUEUE)
        return self._client.containers.create(
            image_name,
            ["/usr/bin/python3", *_worker_command(worker, queue=queue, store=store, options=options)],
            name=worker,
            labels=managed,
            environment={"NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpus) or "none", "GPUWARDEN_DEMO_DATA": "/data"},
            network_mode="none",
            user=f"{os.getuid()}:{os.getgid()}",
            volumes=volumes,
            restart_policy=None if options.restart is None else {"Name": options.restart},
        )


class ProcessFleet:
    """One supervised process per worker, for hosts without an engine."""

    where = "supervised processes (no Docker engine can be used here)"

    def __init__(
        self, slots: Sequence[Slot], paths: HostPaths, *, queues: Mapping[str, str], options: WorkerOptions
    ) -> None:
        self._slots = {slot.worker: slot for slot in slots}
        self._queues = queues
        self._options = options
        self._paths = paths
        self._actuator = ProcessActuator(paths.directory)
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}
        self._tree = paths.directory.parent / "tree"

    def __enter__(self) -> Self:
        """Start workers from this checkout."""
        self.install(CHECKOUT)
        return self

    def install(self, tree: Path) -> None:
        """Replace the version of workers that start later, as an upgrade of a package does."""
        self._tree.parent.mkdir(parents=True, exist_ok=True)
        self._tree.unlink(missing_ok=True)
        self._tree.symlink_to(tree)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End the processes."""
        for supervisor in self._supervisors.values():
            supervisor.terminate()
        time.sleep(0.5)
        for supervisor in self._supervisors.values():
            supervisor.terminate()  # the second one kills its worker
            supervisor.wait(timeout=10)

    def start(self, worker: str) -> None:
        """Start one process with its supervisor. Returns when it runs."""
        environment, argv = _on_this_host(
            self._slots[worker], self._paths, queue=self._queues.get(worker, QUEUE), options=self._options
        )
        environment["PYTHONPATH"] = str(self._tree)
        with (self._paths.data / f"{worker}.log").open("ab") as log:
            self._supervisors[worker] = subprocess.Popen(
                [*argv, "--processes", "1"],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while not self.incarnation(worker) and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def incarnation(self, worker: str) -> str:
        """Pid, start time and boot id."""
        state = self._actuator.look(worker)
        return state.incarnation if state else ""


@dataclass(frozen=True, kw_only=True)
class Services:
    """The systemd of this host, and its folder of units."""

    units: Path = Path("/run/systemd/system")


class SystemdFleet:
    """One service per worker. Each start adds a line to `lives`."""

    where = "services of systemd"

    def __init__(
        self,
        services: Services,
        slots: Sequence[Slot],
        paths: HostPaths,
        *,
        queues: Mapping[str, str],
        options: WorkerOptions,
    ) -> None:
        self._slots = slots
        self._paths = paths
        self._queues = queues
        self._options = options
        self._units = {slot.worker: services.units / f"{slot.worker}.service" for slot in slots}
        self._actuator = SystemdActuator([unit.name for unit in self._units.values()])

    def __enter__(self) -> Self:
        """Write the units."""
        for slot in self._slots:
            self._units[slot.worker].write_text(self._unit(slot), encoding="utf-8")
        self._reload()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the services and remove their units."""
        for unit in self._units.values():
            self._actuator.stop(unit.name, grace_s=0.5)
            unit.unlink()
        self._reload()

    def start(self, worker: str) -> None:
        """Start one service."""
        self._actuator.start(self._units[worker].name)

    def incarnation(self, worker: str) -> str:
        """Unit and invocation id."""
        state = self._actuator.look(self._units[worker].name)
        return state.incarnation if state else ""

    def lives(self, worker: str) -> int:
        """Number of starts."""
        return len(self._lives(worker).read_text().splitlines())

    def _lives(self, worker: str) -> Path:
        return self._paths.data / f"{worker}.lives"

    def _unit(self, slot: Slot) -> str:
        queue = self._queues.get(slot.worker, QUEUE)
        environment, argv = _on_this_host(slot, self._paths, queue=queue, options=self._options)
        # systemd's double quotes are C's, as JSON's. `%` is escaped (systemd.unit(5)).
        settings = [f"Environment={json.dumps(f'{name}={value}')}" for name, value in environment.items()]
        settings.append(f"ExecStartPre=/bin/sh -c {json.dumps(f'echo life >>{self._lives(slot.worker)}')}")
        settings.append("ExecStart=" + " ".join(json.dumps(word) for word in argv))
        settings = [setting.replace("%", "%%") for setting in settings]
        return "\n".join(["[Unit]", "DefaultDependencies=no", "[Service]", *settings, ""])

    def _reload(self) -> None:
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=30)


def _on_this_host(
    slot: Slot, paths: HostPaths, *, queue: str, options: WorkerOptions
) -> tuple[dict[str, str], list[str]]:
    """Environment and command line of a worker outside containers."""
    environment = {
        "GPUWARDEN_RUNTIME_DIR": str(paths.directory),
        "GPUWARDEN_DEMO_DATA": str(paths.data),
        "NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpus) or "none",
        "PYTHONPATH": str(CHECKOUT),
    }
    if paths.real_gpus:
        environment |= {REAL_GPU: "1", "CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}
    store = paths.database.url if paths.database else f"sqlite:///{paths.queue / 'queue.db'}"
    return environment, [
        sys.executable,
        *_worker_command(slot.worker, queue=queue, store=store, options=options),
    ]


def _worker_command(worker: str, *, queue: str, store: str, options: WorkerOptions) -> list[str]:
    return [
        *("-m", "gpuwarden", "worker", "run", "--name", worker, "--queue", queue, "--handler", BODY),
        *("--queue-db", store, "--heartbeat-s", str(options.heartbeat_s), "--lease-s", str(options.lease_s)),
    ]


def image_files() -> Mapping[str, Path]:
    """Files of the worker image: this library, its dependencies and the demo's job."""
    files: dict[str, Path] = {
        "/app/gpuwarden": CHECKOUT / "gpuwarden",
        "/app/testbed/__init__.py": CHECKOUT / "testbed" / "__init__.py",
        "/app/testbed/demo/__init__.py": CHECKOUT / "testbed" / "demo" / "__init__.py",
        "/app/testbed/demo/job_body.py": CHECKOUT / "testbed" / "demo" / "job_body.py",
    }
    for name in IMAGE_DISTRIBUTIONS:
        files |= {f"/app/{path.name}": path for path in _installed(name)}
    return files


def _installed(name: str) -> set[Path]:
    """Top-level folders and modules of an installed distribution."""
    found = distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return {Path(str(found.locate_file(top))) for top in tops}
