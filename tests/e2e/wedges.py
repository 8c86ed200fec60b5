"""Workers that wedge in real containers, each with a job, a queue and a ledger of its own, and executors to mend them.

One exporter sees all of them. In the end each part that must know is asked: the engine's own events, the queue, the
ledger.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import docker
import pytest
import yaml
from sqlalchemy import select

from deploy.standalone import debian_packages
from deploy.standalone.stack import CHECKOUT, Chain, Plan
from gpuwarden.db.transactions import reading
from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import FINAL, Condition, JobId
from gpuwarden.queue import Job, JobStore, Submission
from remediator.alert import Alert
from remediator.clients.exporter import ExporterClient, ExporterError
from remediator.ledger.captures import SavedCapture
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.ledger.schema import INTENTS
from remediator.remedies.job_conditions import confirm
from testbed.demo.job_body import Script, write_picture
from testbed.docker_engine import Engine
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.workers import QUEUE, STAGE_LABEL, DockerFleet, HostPaths, WorkerOptions
from tests.e2e.crashing import Doomed
from tests.waiting import eventually

HOST: Final = "killed"
RUN: Final = "run"
JOB: Final = JobId(1)
SIBLING: Final = JobId(2)
"""Of the same run, in a queue that nobody serves."""

SILENCE_S: Final = 2.0
SCRIPT: Final = Script(
    picture="small", load_s=0.0, load_mib=1, steps=2, step_s=0.1, wedge_attempts=1, wedge_after_step=1
)
"""Wedges at its first attempt, and is done in no time at its second."""

LOOK_S: Final = 0.2
"""Between two looks at one worker, seconds: many are waited for at once, and looking must not be what takes time."""

DEATH_S: Final = 20.0
"""How long an executor may take to die that has done all there is to do, seconds."""

TETHER: Final = ("setpriv", "--pdeathsig", "TERM", "--")
"""What makes an executor end when its test does, however that ends."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is found in the end. `lives` are container id and StartedAt when it had wedged, and now.

    `history` is what the engine says has happened to the container, a signal with its number; `restarts` how often the
    engine started it of its own accord. `told` is the ledger's account of the first episode, without what was waited
    for.
    """

    history: Sequence[str]
    lives: Sequence[str]
    restarts: int
    job: Job
    sibling: Job
    run_state: str | None
    events: Sequence[str]
    intents: Sequence[tuple[str, str]]
    stories: Sequence[EpisodeHistory]
    told: Sequence[str]
    captures: Sequence[SavedCapture]


@dataclass(frozen=True, kw_only=True)
class Room:
    """What all the workers share: an engine and what it says has happened, an exporter, a folder."""

    engine: Engine
    chain: Chain
    events: list[dict[str, Any]]
    work: Path
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    """To open databases, which threads cannot at once, and to make containers, for which those there are are listed."""


@contextmanager
def room(work: Path, engine: Engine, workers: Sequence[str]) -> Iterator[Room]:
    """Start what the workers share; none of them is made yet."""
    _first_state(work / "new", SCRIPT)
    (work / "data").mkdir()
    write_picture(work / "data" / f"{SCRIPT.picture}.pgm", [[100.0] * 4] * 4)
    simulation = work / "gpus.json"
    with ExitStack() as stack:
        chain = Chain(Plan(work=work, host=HOST, docker=engine.base_url, simulate_gpu=simulation, ram_idle_mib=24))
        stack.push(chain)
        slots = [_slot(worker) for worker in workers]
        stack.enter_context(SimulatedGpus(simulation, directory=chain.directory, slots=slots))
        chain.start_exporter()
        yield Room(engine=engine, chain=chain, events=stack.enter_context(container_events(engine)), work=work)


@dataclass(frozen=True, kw_only=True)
class Wedge:
    """One worker that wedges, with its job, its queue and its ledger."""

    room: Room
    worker: str
    folder: Path
    fleet: DockerFleet
    store: JobStore
    ledger: Ledger
    witness: ExporterClient
    retries_max: int

    def accuse(self) -> None:
        """Once its host's own exporter confirms that it is wedged, put the real rule's alert into the inbox."""
        facts = eventually(self._wedged, f"{self.worker} is wedged", within_s=60)
        rule = _rule("stall", Condition.STALL)
        labels = rule["labels"] | {
            "alertname": rule["alert"],
            "host": facts.host,
            "worker": facts.worker,
            "container": facts.container,
            "incarnation": facts.worker_incarnation,
            "job_id": str(facts.job_id),
            "attempt": str(facts.attempt),
        }
        alert = Alert(fingerprint="f1", firing=True, labels=labels, annotations={}, starts_at="2026-01-01T00:00:00Z")
        self.ledger.inbox.accept([alert], [], now=time.time())

    @contextmanager
    def executor(self, *, options: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """An armed executor, told to end afterwards."""
        argv = [*TETHER, sys.executable, "-m", "gpuwarden", *self._arguments(options)]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=CHECKOUT,
                env=debian_packages.env_for_parts(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    @contextmanager
    def doomed(self, at: str, *, number: int, options: Sequence[str] = ()) -> Iterator[Doomed]:
        """An armed executor that dies at a point, or never, told to end afterwards; what it reached is in `reached`."""
        process = Doomed(
            at, self._notes(number), self._arguments(options), env=debian_packages.env_for_parts(), log=self._log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def reached(self, number: int) -> list[str]:
        """The points that the doomed executor of this number came to."""
        return self._notes(number).read_text(encoding="ascii").splitlines()

    def await_death(self, executor: Doomed) -> int:
        """Wait until an executor has ended by itself, or never will because it has nothing left to do; how it ended."""
        eventually(
            lambda: self._looked() and (executor.poll() is not None or self.is_over()),
            "it dies",
            within_s=120,
            log=self.log,
        )
        try:
            return executor.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did all there is to do and did not die\n{self.log()}")

    def await_ready(self, executors: int) -> None:
        """Wait until so many executors in all have begun to work."""
        eventually(lambda: self.log().count("executor ready") >= executors, "it is ready", within_s=60, log=self.log)

    def await_capture(self) -> None:
        """Wait until what the worker was doing is kept."""
        eventually(
            lambda: bool(self.ledger.captures.of_episode(1)), "what it was doing is kept", within_s=60, log=self.log
        )

    def await_end(self) -> None:
        """Wait until it is over."""
        eventually(lambda: self._looked() and self.is_over(), f"{self.worker} is mended", within_s=90, log=self.log)

    def is_over(self) -> bool:
        """Whether the episode is closed, and the job and what hangs on it have come to their end."""
        if not self.ledger.reports.newest() or self.ledger.episodes.list_open():
            return False
        return self.store.job(JOB).state in FINAL and (self.retries_max > 0 or self.store.job(SIBLING).state in FINAL)

    def log(self) -> str:
        """What its executors have logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def life(self) -> str:
        """Container id and StartedAt."""
        return self.fleet.incarnation(self.worker)

    def ending(self, first_life: str) -> Ending:
        """What is found now."""
        with reading(self.ledger._engine) as connection:
            intents = connection.execute(select(INTENTS.c.kind, INTENTS.c.stage).order_by(INTENTS.c.kind)).all()
        story = self.ledger.reports.get(1)
        told = [f"{entry.act} {entry.what}" for entry in story.entries] if story else []
        return Ending(
            history=self._history(),
            lives=(first_life, self.life()),
            restarts=self.fleet.container(self.worker).attrs["RestartCount"],
            job=self.store.job(JOB),
            sibling=self.store.job(SIBLING),
            run_state=self.store.runs.state(RUN),
            events=self.store.outbox.dispatch_events(JOB),
            intents=[(kind, stage) for kind, stage in intents],
            stories=self.ledger.reports.newest(),
            captures=self.ledger.captures.of_episode(1),
            told=[line for line in told if not line.startswith("decided wait")],
        )

    def _arguments(self, options: Sequence[str]) -> list[str]:
        return [
            *("remediator", "execute", "--armed"),
            *("--runtime-dir", str(self.room.chain.directory), "--exporter", self.room.chain.exporter_url),
            *("--ledger", _url(self.folder, "ledger"), "--queue-db", _url(self.folder, "queue")),
            *("--docker", self.room.engine.base_url, "--stop-grace-s", "1", "--capture-s", "20"),
            *("--retries-max", str(self.retries_max)),
            *options,
        ]

    def _notes(self, number: int) -> Path:
        return self.folder / f"points-{number}"

    @property
    def _log(self) -> Path:
        return self.folder / "execute.log"

    def _wedged(self) -> WorkerFacts | None:
        self._looked()
        with suppress(ExporterError):
            facts = self.witness.worker_evidence(self.worker, host=HOST)
            return facts if confirm(facts, Condition.STALL).confirmed else None
        return None

    def _looked(self) -> bool:
        """Let the others look."""
        return not threading.Event().wait(LOOK_S)

    def _history(self) -> list[str]:
        """What the engine says has happened to the container, up to an update that we ask for to see the end of it."""
        container = self.fleet.container(self.worker)
        container.update(cpu_shares=1024)

        def so_far() -> list[str]:
            its = [event for event in list(self.room.events) if event["Actor"]["ID"] == container.id]
            return [f"{event['Action']} {event['Actor']['Attributes'].get('signal', '')}".rstrip() for event in its]

        eventually(lambda: "update" in so_far(), "the engine's events have come")
        return so_far()[: so_far().index("update")]


@contextmanager
def wedge(room: Room, worker: str, *, retries_max: int, script: Script = SCRIPT) -> Iterator[Wedge]:
    """Start one worker, which takes its job and wedges."""
    folder = room.work / worker
    if script is SCRIPT:
        shutil.copytree(room.work / "new", folder)
    else:
        _first_state(folder, script)
    (folder / "execute.log").touch()
    paths = HostPaths(directory=room.chain.directory, queue=folder / "queue", data=room.work / "data")
    with ExitStack() as stack:
        with room.one_at_a_time:  # and no look for a proxy, which threads do at one another's expense
            client = stack.enter_context(closing(docker.DockerClient(base_url=room.engine.base_url)))
            client.api.trust_env = False
        fleet = DockerFleet(client, [_slot(worker)], paths, unmanaged=(), queues={}, options=WorkerOptions())
        with room.one_at_a_time:
            store = stack.enter_context(closing(JobStore.open(_url(folder, "queue"))))
            ledger = stack.enter_context(closing(Ledger.open(_url(folder, "ledger"))))
            fleet.__enter__()
        try:
            fleet.start(worker)
            witness = stack.enter_context(closing(ExporterClient(room.chain.exporter_url)))
            yield Wedge(
                room=room,
                worker=worker,
                folder=folder,
                fleet=fleet,
                store=store,
                ledger=ledger,
                witness=witness,
                retries_max=retries_max,
            )
        finally:
            with room.one_at_a_time:
                fleet.__exit__(None, None, None)


@contextmanager
def container_events(engine: Engine) -> Iterator[list[dict[str, Any]]]:
    """What the engine says happens to containers, as it happens: it remembers the last 256 events only."""
    seen: list[dict[str, Any]] = []
    with closing(docker.APIClient(base_url=engine.base_url)) as client:
        told = client.events(decode=True, filters={"type": "container", "label": STAGE_LABEL})

        def listen() -> None:
            for event in told:
                seen.append(event)  # noqa: PERF402 - each is to be seen when it comes

        listener = threading.Thread(target=listen, name="engine-events", daemon=True)
        listener.start()
        try:
            yield seen
        finally:
            told.close()
            listener.join(timeout=5)


def _first_state(folder: Path, script: Script) -> None:
    """A queue with the jobs and a ledger without anything, to be copied: to make them takes longer."""
    for name in ("queue", "ledger"):
        (folder / name).mkdir(parents=True)
    Ledger.open(_url(folder, "ledger")).close()
    with closing(JobStore.open(_url(folder, "queue"))) as store:
        for queue in (QUEUE, "served-by-nobody"):
            job = Submission(queue=queue, payload=script.payload(), stall_timeout_s=SILENCE_S, run_id=RUN)
            store.runs.submit(job, now=store.now())


def _url(folder: Path, name: str) -> str:
    return f"sqlite:///{folder / name / name}.db"


def _slot(worker: str) -> Slot:
    return Slot(worker=worker, gpus=(f"GPU-sim-{worker}",))


def _rule(topic: str, condition: Condition) -> dict[str, Any]:
    text = (CHECKOUT / "alerts" / f"{topic}.rules.yaml").read_text(encoding="utf-8")
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    found: dict[str, Any] = next(rule for rule in rules if rule.get("labels", {}).get("condition") == condition)
    return found
