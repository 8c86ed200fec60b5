"""A host with faults for `gpuwarden up`: stalled workers, a stopped engine, a full disk, a locked database.

Each fault is real. It ends with its block, and also when the test process is killed.
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
STALL: Final = Script(
    picture=PICTURE, load_s=0.2, load_mib=1, steps=3, step_s=0.3, wedge_attempts=1, wedge_after_step=2
)
"""The first attempt stalls within two seconds. The second completes as fast."""

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
    """A small disk that is mounted at a folder."""

    at: Path

    @property
    def _filler(self) -> Path:
        return self.at / "filler"

    def fill(self) -> None:
        """Leave no free byte, not even in the last page of a log."""
        for path, sizes in ((self._filler, (2**20, 4096, 1)), *((log, (1,)) for log in self.at.rglob("*.log"))):
            with path.open("ab", buffering=0) as file:
                for size in sizes:
                    with suppress(OSError):
                        while file.write(b"\n" * size):
                            pass

    def free(self) -> None:
        """Free the space again."""
        self._filler.unlink()


@contextmanager
def small_disk(at: Path, *, size: str) -> Iterator[Disk]:
    """Mount a tmpfs. A helper process unmounts it when its input ends, so also when the test is killed."""
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
    """Make every writer of an SQLite database wait."""
    with closing(sqlite3.connect(database, timeout=20, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def locked(*databases: Path) -> Iterator[None]:
    """Hold the write lock of each database in another process."""
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
    """A Docker engine with `live-restore`: its containers run while it is stopped. Root only."""

    def __init__(self, work: Path) -> None:
        work.mkdir()
        self._paths = private_engine.EnginePaths.of(work)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._paths.socket}"

    def __enter__(self) -> Self:
        """Start the engine."""
        private_engine.sweep(self._paths)
        self._paths.run.mkdir(mode=0o700)
        self._paths.data.mkdir(mode=0o711)
        self._paths.configuration.write_text(json.dumps({"live-restore": True}))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engine and remove its files."""
        self.stop()
        private_engine.sweep(self._paths)

    def start(self) -> Engine:
        """Start the engine and wait until it answers."""
        with self._paths.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "--"),
                    *private_engine.dockerd_command(self._paths, str(debian_packages.find("dockerd"))),
                ],
                env=debian_packages.env_for_parts(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers, "the engine answers", within_s=60, log=self._paths.log.read_text)
        return Engine(base_url=self.url, private=True, version="private")

    def stop(self) -> None:
        """Stop the engine as a service manager does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        return not isinstance(engine_version(self.url), NoEngine)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The folder and the ports of one `up`, and what a user reads there."""

    folder: Path
    docker: str
    ports: dict[str, int] = field(default_factory=free_ports)

    @property
    def data(self) -> Path:
        """The data directory of `up`."""
        return self.folder / "data"

    def processes(self) -> list[int]:
        """The pids of all parts that run on this data directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_text(errors="replace")
                if f"{self.data}/" in words and "deploy.standalone.up" not in words and "scaled_up" not in words:
                    found.append(int(path.parent.name))
        return found

    def acts(self, worker: str) -> list[str]:
        """The journal entries of a worker's episodes, in order."""
        with closing(Ledger.open(self.url("ledger"))) as ledger:
            episodes = [
                ledger.reports.get(each.episode_id) for each in ledger.reports.newest() if each.worker == worker
            ]
            return [f"{entry.act} {entry.what}" for episode in episodes if episode for entry in episode.entries]

    def reported_workers(self) -> set[str]:
        """The workers with an episode, open or closed."""
        with closing(Ledger.open(self.url("ledger"))) as ledger:
            return {episode.worker for episode in ledger.reports.newest()}

    def database(self, name: str) -> Path:
        """The file of a database."""
        return self.data / name / f"{name}.db"

    def url(self, name: str) -> str:
        """A database's URL."""
        return f"sqlite:///{self.database(name)}"

    def gpuwarden(self, *arguments: str) -> tuple[int, str]:
        """Run a command as a user does; return its exit code and output."""
        others = {part: port for part, port in self.ports.items() if part != "remediator"}
        where = {f"GPUWARDEN_REMEDIATOR_{part.upper()}": f"http://127.0.0.1:{port}" for part, port in others.items()}
        where["GPUWARDEN_REMEDIATOR_PORT"] = str(self.ports["remediator"])
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
        """What `gpuwarden status` asks an operator to do. Faster than the command."""
        addresses = [word for part, port in self.ports.items() for word in (f"--{part}", f"http://127.0.0.1:{port}")]
        wanted = status._parser().parse_args(["--ledger", self.url("ledger"), "--queue-db", "none", *addresses])
        return status.look(wanted, now=time.time()).needs()

    def await_no_needs(self) -> None:
        """Wait until `gpuwarden status` says that nothing needs an operator."""
        output = ""

        def is_healthy() -> bool:
            nonlocal output
            code, output = self.gpuwarden("status")
            return code == 0 and "nothing needs an operator" in output

        eventually(is_healthy, "status reports no problem", within_s=90, log=lambda: output)

    def await_needs(self, *words: str) -> None:
        """Wait until `gpuwarden status` prints all of these texts and exits with 1."""
        output = ""

        def is_reported() -> bool:
            nonlocal output
            code, output = self.gpuwarden("status")
            return code == 1 and all(each in output for each in words)

        eventually(is_reported, f"status prints {words}", within_s=90, log=lambda: output)


@dataclass(frozen=True, kw_only=True)
class Host(Site):
    """The workers of one host, each with a separate queue. They outlive every start of `up`."""

    fleet: DockerFleet

    @contextmanager
    def up(self) -> Iterator[Run]:
        """Start `up` with all remedies armed, and wait until it is ready."""
        with self.starting() as run:
            yield run.ready()

    @contextmanager
    def starting(self) -> Iterator[Run]:
        """Start `up` with all remedies armed."""
        options = ("--host", HOST, "--armed", "--simulate-gpu", str(self.folder / "gpus.json"))
        with up(self.folder, self.ports, *options, docker=self.docker, command=SCALED) as run:
            yield run

    def submit(self, worker: str, script: Script = STALL, *, stall_timeout_s: float = SILENCE_S) -> JobId:
        """Submit a job for a worker."""
        with closing(JobStore.open(self.url("queue"))) as store:
            job = Submission(queue=worker, payload=script.payload(), stall_timeout_s=stall_timeout_s)
            return store.runs.submit(job, now=time.time())

    def state(self, job_id: JobId) -> State:
        """A job's state."""
        with closing(JobStore.open(self.url("queue"))) as store:
            return store.job(job_id).state

    def silent_s(self, worker: str) -> float:
        """Seconds since the last step beat of a worker's job; 0 before the first."""
        path = self.data / "run" / worker / f"{worker}{state_file.JOB_SUFFIX}"
        with suppress(FileNotFoundError):
            step_beat = state_file.parse_job(path.read_text(encoding="utf-8")).step_beat
            return 0.0 if step_beat is None else time.time() - step_beat.unix_s
        return 0.0

    def check_fixed(self, worker: str, job_id: JobId, run: Run, *, known_starts: int = 2, stops_asked: int = 1) -> None:
        """Check that the job completes at its second attempt, and that its container stopped once and was started once.

        The engine, the queue and the ledger must agree. The worker may exit before the stop, once its claim is lost.

        Args:
            worker: name of the worker, and of its container.
            job_id: its job.
            run: the `up` that acts.
            known_starts: start events that the engine remembers. It forgets those before its own restart.
            stops_asked: most stop events: one for each executor that asked, since one may be killed after it asked.
        """

        def is_over() -> bool:
            with closing(Ledger.open(self.url("ledger"))) as ledger:
                return self.state(job_id) is State.COMPLETED and not ledger.episodes.list_open()

        eventually(
            is_over, f"the job of {worker} is fixed", within_s=90, log=lambda: f"{self.acts(worker)}\n{_logs(run)}"
        )
        with closing(JobStore.open(self.url("queue"))) as store:
            job = store.job(job_id)
        assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
        history = self.fleet.history(worker)
        assert (history.count("die"), history.count("start")) == (1, known_starts), history
        assert history.count("stop") <= stops_asked, history
        with closing(Ledger.open(self.url("ledger"))) as ledger, reading(ledger._engine) as connection:
            (episode,) = with_action([each for each in ledger.reports.newest() if each.worker == worker])
            mine = select(INTENTS.c.stage).where(INTENTS.c.episode_id == episode.episode_id)
            stages = [row.stage for row in connection.execute(mine)]
        assert (episode.outcome, episode.job_id, stages) == (Outcome.FIXED, job_id, ["done", "done"])


@contextmanager
def host(folder: Path, engine_url: str, workers: Sequence[str]) -> Iterator[Host]:
    """Start the workers, but not `up`."""
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
    return "\n".join([run.output(), *(path.read_text()[-2000:] for path in sorted((run.data / "log").glob("e*.log")))])
