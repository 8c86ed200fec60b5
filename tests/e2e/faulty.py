"""A host with faults for `gpuwarden up`: workers that wedge, an engine to stop, a disk to fill, a lock to hold.

Each is real. What a fault is set on ends with its block, and with us however we end.
"""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import docker
from sqlalchemy import select

from deploy.standalone import debian_packages
from deploy.standalone.docker_socket import NoEngine, engine_version
from deploy.standalone.stack import CHECKOUT
from gpuwarden import state_file
from gpuwarden.db.transactions import reading
from gpuwarden.job import JobId, State
from gpuwarden.queue import JobStore, Submission
from remediator.commands import status
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import INTENTS
from remediator.plan import Outcome
from testbed import private_engine
from testbed.demo.job_body import Script, write_picture
from testbed.docker_engine import Engine
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.stage import with_action
from testbed.workers import DockerFleet, HostPaths, WorkerOptions
from tests.e2e.running import Run, free_ports, up
from tests.waiting import eventually

HOST: Final = "box1"
SILENCE_S: Final = 3.0
PICTURE: Final = "faults"
WEDGE: Final = Script(
    picture=PICTURE, load_s=0.2, load_mib=1, steps=3, step_s=0.3, wedge_attempts=1, wedge_after_step=2
)
"""A job whose first attempt wedges within a second or two, and whose second is done in as many."""

SCALED: Final = ("-m", "tests.e2e.scaled_up")
_HOLD: Final = """\
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A small disk of its own at a folder."""

    at: Path

    @property
    def _filler(self) -> Path:
        return self.at / "filler"

    def fill(self) -> None:
        """Leave no room at all, and none in the last page of a log."""
        for path, sizes in ((self._filler, (2**20, 4096, 1)), *((log, (1,)) for log in self.at.rglob("*.log"))):
            with path.open("ab", buffering=0) as file:
                for size in sizes:
                    with suppress(OSError):
                        while file.write(b"\n" * size):
                            pass

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()


@contextmanager
def small_disk(at: Path, *, size: str) -> Iterator[Disk]:
    """A tmpfs at a folder. Who mounted it takes it away when its input ends, so also when we are killed."""
    at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # `up`'s data directory, as it makes it
    at.mkdir()
    script = (
        'mount -t tmpfs -o "size=$0,mode=0700" gpuwarden-test "$1" && echo ready && cat >/dev/null; umount --lazy "$1"'
    )
    keeper = subprocess.Popen(
        ["sh", "-c", script, size, str(at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        yield Disk(at=at)
    finally:
        keeper.communicate()


@contextmanager
def busy(database: Path) -> Iterator[None]:
    """Keep every writer of an SQLite database waiting."""
    with closing(sqlite3.connect(database, timeout=20, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def locked(*databases: Path) -> Iterator[None]:
    """Another process holds each database's write lock."""
    with ExitStack() as holders:
        for database in databases:
            holder = holders.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _HOLD, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            holders.callback(holder.communicate)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
        yield


class StoppableEngine:
    """A Docker engine with `live-restore`, to stop and to start: its containers run on meanwhile. Root only."""

    def __init__(self, work: Path) -> None:
        work.mkdir()
        self._places = private_engine.EnginePaths.of(work)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._places.socket}"

    def __enter__(self) -> Self:
        """Start it."""
        private_engine.sweep(self._places)
        self._places.run.mkdir(mode=0o700)
        self._places.data.mkdir(mode=0o711)
        self._places.configuration.write_text(json.dumps({"live-restore": True}))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all of it."""
        self.stop()
        private_engine.sweep(self._places)

    def start(self) -> Engine:
        """Start it, and wait until it answers."""
        with self._places.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "--"),
                    *private_engine.dockerd_command(self._places, str(debian_packages.find("dockerd"))),
                ],
                env=debian_packages.env_for_parts(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers, "the engine answers", within_s=60, log=self._places.log.read_text)
        return Engine(base_url=self.url, private=True, version="private")

    def stop(self) -> None:
        """Stop it, as a service manager does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        return not isinstance(engine_version(self.url), NoEngine)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where `up` keeps what it knows, and what a person learns of it there."""

    folder: Path
    docker: str
    ports: dict[str, int] = field(default_factory=free_ports)

    @property
    def data(self) -> Path:
        """`up`'s data directory."""
        return self.folder / "data"

    def processes(self) -> list[int]:
        """The pids of the parts that run on this data, whoever started them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_text(errors="replace")
                if f"{self.data}/" in words and "deploy.standalone.up" not in words and "scaled_up" not in words:
                    found.append(int(path.parent.name))
        return found

    def acts(self, worker: str) -> list[str]:
        """A worker's account: what was seen, decided and done, in order."""
        with closing(Ledger.open(self.url("ledger"))) as ledger:
            stories = [ledger.reports.get(each.episode_id) for each in ledger.reports.newest() if each.worker == worker]
            return [f"{entry.act} {entry.what}" for story in stories if story for entry in story.entries]

    def accused(self) -> set[str]:
        """The workers that there ever was an episode of."""
        with closing(Ledger.open(self.url("ledger"))) as ledger:
            return {story.worker for story in ledger.reports.newest()}

    def database(self, name: str) -> Path:
        """The file of a database."""
        return self.data / name / f"{name}.db"

    def url(self, name: str) -> str:
        """A database's URL."""
        return f"sqlite:///{self.database(name)}"

    def gpuwarden(self, *arguments: str) -> tuple[int, str]:
        """A command as a person gives it: its exit code, and what it says."""
        where = {f"GPUWARDEN_{part.upper()}_URL": f"http://127.0.0.1:{port}" for part, port in self.ports.items()}
        where |= {"GPUWARDEN_REMEDIATOR_LEDGER": self.url("ledger"), "GPUWARDEN_QUEUE_DB": self.url("queue")}
        done = subprocess.run(
            [sys.executable, "-m", "gpuwarden", *arguments],
            env={**os.environ, **where},
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def needs(self) -> list[str]:
        """What `gpuwarden status` wants a person for, asked in no time."""
        addresses = [word for part, port in self.ports.items() for word in (f"--{part}", f"http://127.0.0.1:{port}")]
        wanted = status._parser().parse_args(["--ledger", self.url("ledger"), "--queue-db", "none", *addresses])
        return status.look(wanted, now=time.time()).needs()

    def needs_nobody(self) -> None:
        """`gpuwarden status` comes to say that all is well."""
        said = ""

        def well() -> bool:
            nonlocal said
            code, said = self.gpuwarden("status")
            return code == 0 and "nothing needs an operator" in said

        eventually(well, "status says that all is well", within_s=90, log=lambda: said)

    def needs_a_person(self, *words: str) -> None:
        """`gpuwarden status` comes to say all of these, with exit code 1."""
        said = ""

        def told() -> bool:
            nonlocal said
            code, said = self.gpuwarden("status")
            return code == 1 and all(each in said for each in words)

        eventually(told, f"status says {words}", within_s=90, log=lambda: said)


@dataclass(frozen=True, kw_only=True)
class Host(Site):
    """One host's workers, each with a queue of its own. They outlive every start of `up`."""

    fleet: DockerFleet

    @contextmanager
    def up(self) -> Iterator[Run]:
        """Start `up`, armed, and wait until it is ready."""
        with self.starting() as run:
            yield run.ready()

    @contextmanager
    def starting(self) -> Iterator[Run]:
        """Start `up`, armed."""
        options = ("--host", HOST, "--armed", "--simulate-gpu", str(self.folder / "gpus.json"))
        with up(self.folder, self.ports, *options, docker=self.docker, command=SCALED) as run:
            yield run

    def submit(self, worker: str, script: Script = WEDGE, *, stall_timeout_s: float = SILENCE_S) -> JobId:
        """Give a worker a job."""
        with closing(JobStore.open(self.url("queue"))) as store:
            job = Submission(queue=worker, payload=script.payload(), stall_timeout_s=stall_timeout_s)
            return store.runs.submit(job, now=time.time())

    def state(self, job_id: JobId) -> State:
        """A job's state."""
        with closing(JobStore.open(self.url("queue"))) as store:
            return store.job(job_id).state

    def silent_s(self, worker: str) -> float:
        """For how long a worker's job has not beaten, seconds; 0 before it did."""
        path = self.data / "run" / worker / f"{worker}{state_file.JOB_SUFFIX}"
        with suppress(FileNotFoundError):
            beat = state_file.parse_job(path.read_text(encoding="utf-8")).beat
            return 0.0 if beat is None else time.time() - beat.unix_s
        return 0.0

    def is_mended(self, worker: str, job_id: JobId, run: Run, *, known_starts: int = 2, stops_asked: int = 1) -> None:
        """The job completes at its second attempt; its container went down once, and was started once for it.

        What the engine, the queue and the ledger have of it agrees. A container's own first start counts among
        `known_starts`, unless the engine was started since and has forgotten it. That the worker ends itself once its
        job is taken may come before the stop. The engine tells of a stop for each of `stops_asked`, which are over as
        the container goes down: whoever asked first may have been killed meanwhile.
        """

        def over() -> bool:
            with closing(Ledger.open(self.url("ledger"))) as ledger:
                return self.state(job_id) is State.COMPLETED and not ledger.episodes.list_open()

        eventually(over, f"{worker} is mended", within_s=90, log=lambda: f"{self.acts(worker)}\n{_logs(run)}")
        with closing(JobStore.open(self.url("queue"))) as store:
            job = store.job(job_id)
        assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
        history = self.fleet.history(worker)
        assert (history.count("die"), history.count("start")) == (1, known_starts), history
        assert history.count("stop") <= stops_asked, history
        with closing(Ledger.open(self.url("ledger"))) as ledger, reading(ledger._engine) as connection:
            (story,) = with_action([each for each in ledger.reports.newest() if each.worker == worker])
            mine = select(INTENTS.c.stage).where(INTENTS.c.episode_id == story.episode_id)
            stages = [row.stage for row in connection.execute(mine)]
        assert (story.outcome, story.job_id, stages) == (Outcome.FIXED, job_id, ["done", "done"])


@contextmanager
def host(folder: Path, engine_url: str, workers: Sequence[str]) -> Iterator[Host]:
    """Start the workers; `up` is not started yet."""
    paths = HostPaths(directory=folder / "data" / "run", queue=folder / "data" / "queue", data=folder / "work")
    (folder / "data").mkdir(mode=0o700, parents=True, exist_ok=True)  # as `up` makes it
    for each in (paths.directory, paths.queue, paths.data):
        each.mkdir(parents=True, exist_ok=True)
    (paths.directory / "host").write_text(f"{HOST}\n")
    write_picture(paths.data / f"{PICTURE}.pgm", [[100.0] * 4] * 4)
    slots = [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in workers]
    with ExitStack() as stack:
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine_url)))
        queues = {worker: worker for worker in workers}
        fleet = DockerFleet(client, slots, paths, unmanaged=(), queues=queues, options=WorkerOptions())
        stack.enter_context(fleet)
        stack.enter_context(SimulatedGpus(folder / "gpus.json", directory=paths.directory, slots=slots))
        for worker in workers:
            fleet.start(worker)
        yield Host(folder=folder, fleet=fleet, docker=engine_url)


def _logs(run: Run) -> str:
    return "\n".join([run.said(), *(path.read_text()[-2000:] for path in sorted((run.data / "log").glob("e*.log")))])
