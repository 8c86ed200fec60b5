"""Workers to watch: Docker containers where an engine runs, else supervised processes. Made here, gone afterwards."""

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
STAGE_LABEL: Final = "gpuwarden.stage"
"""Marks the containers made here, so that those of a killed run are known again."""

IMAGE_DISTRIBUTIONS: Final = (
    *("alembic", "Mako", "MarkupSafe", "psycopg", "psycopg-binary", "SQLAlchemy", "structlog", "typing_extensions"),
)
"""What a worker needs beside the standard library, as installed here, and so compiled for our Python. Where the image
has another one, MarkupSafe and SQLAlchemy do without what is compiled; psycopg, for a queue in PostgreSQL, does not
run."""


@dataclass(frozen=True, kw_only=True)
class Database:
    """A database of a PostgreSQL that runs on this host; hosts that are given the same one share what is in it."""

    server: Postgres
    name: str

    @property
    def url(self) -> str:
        """For what runs on this host."""
        return self.server.url(self.name)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where a fleet's workers find what they need, on this host. The queue is in `database`, or an SQLite file.

    With `real_gpus`, the jobs of workers outside containers compute on their NVIDIA GPU.
    """

    directory: Path
    queue: Path
    data: Path
    database: Database | None = None
    real_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How every worker of a fleet goes about its work; durations are seconds.

    `restart` is Docker's own restart policy.
    """

    heartbeat_s: float = 2.0
    lease_s: float = LEASE_S
    restart: Literal["always", "on-failure"] | None = None


class Fleet(Protocol):
    """Some workers. `where` says in what they run, for people."""

    where: str

    def __enter__(self) -> Self:
        """Make the workers."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Remove them, whatever they do."""

    def start(self, worker: str) -> None:
        """Start one of them."""

    def incarnation(self, worker: str) -> str:
        """What runs in its container now."""


class DockerFleet:
    """One container a worker, no network, with its own state folder and nothing of the others'."""

    where = "Docker containers"

    def __init__(
        self,
        client: docker.DockerClient,
        slots: Sequence[Slot],
        ground: Ground,
        *,
        unmanaged: Sequence[str],
        queues: Mapping[str, str],
        habits: Habits,
    ) -> None:
        self._client = client
        self._slots = slots
        self._ground = ground
        self._habits = habits
        self._unmanaged = unmanaged
        self._queues = queues
        self._containers: dict[str, Container] = {}

    def __enter__(self) -> Self:
        """Create the containers; nothing runs yet."""
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
        """Remove the containers, running or not."""
        for container in self._containers.values():
            try:
                container.remove(force=True)
            except NotFound:
                continue

    def start(self, worker: str) -> None:
        """Start one container."""
        self._containers[worker].start()

    def container(self, worker: str) -> Container:
        """One container, its attributes read anew."""
        self._containers[worker].reload()
        return self._containers[worker]

    def incarnation(self, worker: str) -> str:
        """Full id and StartedAt."""
        container = self.container(worker)
        return f"{container.id}@{container.attrs['State']['StartedAt']}"

    def logs(self, worker: str) -> str:
        """What a worker has logged."""
        text: bytes = self._containers[worker].logs()
        return text.decode("utf-8", "replace")

    def pid(self, worker: str) -> int:
        """The process that the container was started for, by the host's numbers; 0 while it does not run."""
        return int(self.container(worker).attrs["State"]["Pid"])

    def history(self, worker: str) -> list[str]:
        """What the engine says has happened to a container since it was created: `start`, `kill`, `die`, `stop`..."""
        # Up to the end of this second: the engine takes whole ones, and waits for it.
        until = int(time.time()) + 1
        told = self._client.events(
            since=0, until=until, filters={"container": self._containers[worker].id}, decode=True
        )
        return [event["Action"] for event in told]

    def _remove_leftovers(self) -> None:
        """What a killed run left under these names; a container of that name that is not ours stays, and is named."""
        ours = {slot.worker for slot in self._slots}
        for container in self._client.containers.list(all=True, filters={"label": STAGE_LABEL}):
            if container.name in ours:
                container.remove(force=True)

    def _create(self, slot: Slot, image_name: str) -> Container:
        ground, worker, habits = self._ground, slot.worker, self._habits
        (ground.directory / worker).mkdir(exist_ok=True)
        managed = {STAGE_LABEL: "true"} | ({} if worker in self._unmanaged else {LABEL: "true"})
        volumes = {
            str(ground.directory / worker): {"bind": f"/run/gpuwarden/{worker}", "mode": "rw"},
            str(ground.directory / "host"): {"bind": "/run/gpuwarden/host", "mode": "ro"},
            str(ground.queue): {"bind": "/queue", "mode": "rw"},
            str(ground.data): {"bind": "/data", "mode": "rw"},
        }
        store = "sqlite:////queue/queue.db"
        if ground.database is not None:
            server = ground.database.server
            volumes[str(server.sockets)] = {"bind": "/postgres", "mode": "rw"}
            store = server.url(ground.database.name, sockets="/postgres")
        queue = self._queues.get(worker, QUEUE)
        return self._client.containers.create(
            image_name,
            ["/usr/bin/python3", *_worker_command(worker, queue=queue, store=store, habits=habits)],
            name=worker,
            labels=managed,
            environment={"NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpus) or "none", "GPUWARDEN_DEMO_DATA": "/data"},
            network_mode="none",
            user=f"{os.getuid()}:{os.getgid()}",
            volumes=volumes,
            restart_policy=None if habits.restart is None else {"Name": habits.restart},
        )


class ProcessFleet:
    """One supervised process a worker, for hosts without an engine. The remediator frees them by the same file."""

    where = "supervised processes (no Docker engine can be used here)"

    def __init__(
        self, slots: Sequence[Slot], ground: Ground, *, commands: Path, queues: Mapping[str, str], habits: Habits
    ) -> None:
        self._slots = slots
        self._queues = queues
        self._habits = habits
        self._ground = ground
        self._path = commands
        self._actuator: ProcessActuator | None = None

    def __enter__(self) -> Self:
        """Write the file of commands; nothing runs yet."""
        self._path.write_text("".join(self._table(slot) for slot in self._slots), encoding="utf-8")
        self._actuator = ProcessActuator(self._path)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End the processes."""
        if self._actuator is not None:
            for slot in self._slots:
                self._actuator.stop(slot.worker, grace_s=0.5)

    def start(self, worker: str) -> None:
        """Start one process."""
        if self._actuator is not None:
            self._actuator.start(worker)

    def incarnation(self, worker: str) -> str:
        """Pid, start time and boot id."""
        state = self._actuator.look(worker) if self._actuator else None
        return state.incarnation if state else ""

    def _table(self, slot: Slot) -> str:
        ground = self._ground
        environment, argv = _on_this_host(slot, ground, queue=self._queues.get(slot.worker, QUEUE), habits=self._habits)
        # TOML's basic strings and arrays of them are written as JSON writes them.
        rows = {
            "argv": argv,
            "pid_file": str(ground.data / f"{slot.worker}.pid"),
            "log_file": str(ground.data / f"{slot.worker}.log"),
        }
        text = f"[worker.{slot.worker}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in rows.items())
        pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in environment.items())
        return f"{text}env = {{ {pairs} }}\n\n"


@dataclass(frozen=True, kw_only=True)
class Services:
    """The systemd of the host that this runs on: workers are services of it, their units written into `units`."""

    units: Path = Path("/run/systemd/system")


class SystemdFleet:
    """One service a worker, named after it. Each start of one adds a line to `lives`."""

    where = "services of systemd"

    def __init__(
        self, services: Services, slots: Sequence[Slot], ground: Ground, *, queues: Mapping[str, str], habits: Habits
    ) -> None:
        self._slots = slots
        self._ground = ground
        self._queues = queues
        self._habits = habits
        self._units = {slot.worker: services.units / f"{slot.worker}.service" for slot in slots}
        self._actuator = SystemdActuator([unit.name for unit in self._units.values()])

    def __enter__(self) -> Self:
        """Write the units; nothing runs yet."""
        for slot in self._slots:
            self._units[slot.worker].write_text(self._unit(slot), encoding="utf-8")
        self._reload()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop the services and take their units away."""
        for unit in self._units.values():
            self._actuator.stop(unit.name, grace_s=0.5)
            unit.unlink()
        self._reload()

    def start(self, worker: str) -> None:
        """Start one service."""
        self._actuator.start(self._units[worker].name)

    def incarnation(self, worker: str) -> str:
        """Its unit and invocation id."""
        state = self._actuator.look(self._units[worker].name)
        return state.incarnation if state else ""

    def lives(self, worker: str) -> int:
        """How often it was started."""
        return len(self._lives(worker).read_text().splitlines())

    def _lives(self, worker: str) -> Path:
        return self._ground.data / f"{worker}.lives"

    def _unit(self, slot: Slot) -> str:
        queue = self._queues.get(slot.worker, QUEUE)
        environment, argv = _on_this_host(slot, self._ground, queue=queue, habits=self._habits)
        # systemd's double quotes are C's, and so are JSON's; `%` begins a specifier (systemd.unit(5)).
        settings = [f"Environment={json.dumps(f'{name}={value}')}" for name, value in environment.items()]
        settings.append(f"ExecStartPre=/bin/sh -c {json.dumps(f'echo life >>{self._lives(slot.worker)}')}")
        settings.append("ExecStart=" + " ".join(json.dumps(word) for word in argv))
        settings = [setting.replace("%", "%%") for setting in settings]
        return "\n".join(["[Unit]", "DefaultDependencies=no", "[Service]", *settings, ""])

    def _reload(self) -> None:
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=30)


def _on_this_host(slot: Slot, ground: Ground, *, queue: str, habits: Habits) -> tuple[dict[str, str], list[str]]:
    """Environment and command line of a worker that runs in no container."""
    environment = {
        "GPUWARDEN_DIR": str(ground.directory),
        "GPUWARDEN_DEMO_DATA": str(ground.data),
        "NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpus) or "none",
        "PYTHONPATH": str(CHECKOUT),
    }
    if ground.real_gpus:
        environment |= {REAL_GPU: "1", "CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}
    store = ground.database.url if ground.database else f"sqlite:///{ground.queue / 'queue.db'}"
    return environment, [sys.executable, *_worker_command(slot.worker, queue=queue, store=store, habits=habits)]


def _worker_command(worker: str, *, queue: str, store: str, habits: Habits) -> list[str]:
    return [
        *("-m", "gpuwarden", "worker", "--name", worker, "--queue", queue, "--body", BODY),
        *("--store", store, "--heartbeat-s", str(habits.heartbeat_s), "--lease-s", str(habits.lease_s)),
    ]


def image_files() -> Mapping[str, Path]:
    """What the worker image holds beside Python: this library, what it needs, and the demonstration's job body."""
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
    """The top-level folders and modules of an installed distribution, its metadata and bundled libraries included."""
    found = distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return {Path(str(found.locate_file(top))) for top in tops}
