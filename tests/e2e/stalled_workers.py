"""Workers that stall in real containers, each with its job, queue and ledger, and executors that restart them.

One exporter samples all of them. The result is read from the engine's events, the queue and the ledger.
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
from remediator.clients.exporter import ExporterClient
from remediator.clients.exporter_access import ExporterError
from remediator.ledger.captures import SavedCapture
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.ledger.schema import INTENTS
from remediator.remedies.job_conditions import confirm
from testbed.demo.job_body import Script, write_picture
from testbed.docker_engine import Engine
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.workers import QUEUE, STAGE_LABEL, DockerFleet, HostPaths, WorkerOptions
from tests.e2e.crashing import CrashingProcess
from tests.waiting import eventually

HOST: Final = "killed"
RUN: Final = "run"
JOB: Final = JobId(1)
SIBLING: Final = JobId(2)
"""A job of the same run, in a queue without a worker."""

SILENCE_S: Final = 2.0
SCRIPT: Final = Script(
    picture="small", load_s=0.0, load_mib=1, steps=2, step_s=0.1, wedge_attempts=1, wedge_after_step=1
)
"""Stalls at its first attempt. The second completes at once."""

CHECK_INTERVAL_S: Final = 0.2
"""Pause between two checks of one worker, seconds. Many tests wait at once, and checks must not use up the CPU."""

DEATH_TIMEOUT_S: Final = 20.0
"""How long an executor may run after the last action before it dies, seconds."""

DIE_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "TERM", "--")
"""Ends an executor together with its test."""


@dataclass(frozen=True, kw_only=True)
class FinalState:
    """The state after the last executor.

    Args:
        history: the engine's events of the container; a signal has its number.
        incarnations: container id and StartedAt, when it had stalled and now.
        restarts: how often the engine restarted the container by its policy.
        job: the job that stalled.
        sibling: the other job of its run.
        run_state: state of the run.
        events: dispatch events of the job.
        intents: kind and stage of each intent.
        episodes: all episodes, newest first.
        journal: entries of the first episode, without waits.
        captures: captures of the first episode.
    """

    history: Sequence[str]
    incarnations: Sequence[str]
    restarts: int
    job: Job
    sibling: Job
    run_state: str | None
    events: Sequence[str]
    intents: Sequence[tuple[str, str]]
    episodes: Sequence[EpisodeHistory]
    journal: Sequence[str]
    captures: Sequence[SavedCapture]


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """What all the workers share: an engine and its events, an exporter, a folder."""

    engine: Engine
    chain: Chain
    events: list[dict[str, Any]]
    work: Path
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    """To open databases, which threads cannot do at the same time, and to create containers, which lists the others."""


@contextmanager
def shared_parts(work: Path, engine: Engine, workers: Sequence[str]) -> Iterator[SharedParts]:
    """Start what the workers share. The workers themselves are created later."""
    _create_initial_state(work / "new", SCRIPT)
    (work / "data").mkdir()
    write_picture(work / "data" / f"{SCRIPT.picture}.pgm", [[100.0] * 4] * 4)
    simulation = work / "gpus.json"
    with ExitStack() as stack:
        chain = Chain(Plan(work=work, host=HOST, docker=engine.base_url, simulate_gpu=simulation, ram_idle_mib=24))
        stack.push(chain)
        slots = [_slot(worker) for worker in workers]
        stack.enter_context(SimulatedGpus(simulation, directory=chain.directory, slots=slots))
        chain.start_exporter()
        yield SharedParts(engine=engine, chain=chain, events=stack.enter_context(container_events(engine)), work=work)


@dataclass(frozen=True, kw_only=True)
class StalledWorker:
    """One worker that stalls, with its job, its queue and its ledger."""

    shared_parts: SharedParts
    worker: str
    folder: Path
    fleet: DockerFleet
    store: JobStore
    ledger: Ledger
    exporter: ExporterClient
    retries_max: int

    def post_alert(self) -> None:
        """Wait until the exporter confirms the stall, then put the alert of the real rule into the inbox."""
        facts = eventually(self._read_stalled, f"{self.worker} is stalled", within_s=60)
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
        """Run an armed executor; SIGTERM at the end of the block."""
        argv = [*DIE_WITH_PARENT, sys.executable, "-m", "gpuwarden", *self._arguments(options)]
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
    def crashing_executor(self, at: str, *, number: int, options: Sequence[str] = ()) -> Iterator[CrashingProcess]:
        """Run an armed executor that dies at a point, or never; SIGTERM at the end of the block."""
        process = CrashingProcess(
            at, self._notes(number), self._arguments(options), env=debian_packages.env_for_parts(), log=self._log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def reached(self, number: int) -> list[str]:
        """The points that the crashing executor of this number reached."""
        return self._notes(number).read_text(encoding="ascii").splitlines()

    def await_death(self, executor: CrashingProcess) -> int:
        """Wait until an executor has died, and return its exit code. Fails when it has nothing left to do."""
        eventually(
            lambda: self._rest() and (executor.poll() is not None or self.is_over()),
            "the executor dies",
            within_s=120,
            log=self.log,
        )
        try:
            return executor.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the executor has nothing left to do and did not die\n{self.log()}")

    def await_ready(self, executors: int) -> None:
        """Wait until so many executors in all are ready."""
        eventually(
            lambda: self.log().count("executor ready") >= executors, "the executor is ready", within_s=60, log=self.log
        )

    def await_capture(self) -> None:
        """Wait until the capture of the worker is saved."""
        eventually(lambda: bool(self.ledger.captures.of_episode(1)), "the capture is saved", within_s=60, log=self.log)

    def await_fixed(self) -> None:
        """Wait until the episode is closed and the jobs have ended."""
        eventually(lambda: self._rest() and self.is_over(), f"{self.worker} is fixed", within_s=90, log=self.log)

    def is_over(self) -> bool:
        """Whether the episode is closed, and the jobs that depend on it have ended."""
        if not self.ledger.reports.newest() or self.ledger.episodes.list_open():
            return False
        return self.store.job(JOB).state in FINAL and (self.retries_max > 0 or self.store.job(SIBLING).state in FINAL)

    def log(self) -> str:
        """The log of its executors."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def incarnation(self) -> str:
        """Container id and StartedAt."""
        return self.fleet.incarnation(self.worker)

    def read_final_state(self, first_incarnation: str) -> FinalState:
        """Read the state now."""
        with reading(self.ledger._engine) as connection:
            intents = connection.execute(select(INTENTS.c.kind, INTENTS.c.stage).order_by(INTENTS.c.kind)).all()
        episode = self.ledger.reports.get(1)
        lines = [f"{entry.act} {entry.what}" for entry in episode.entries] if episode else []
        return FinalState(
            history=self._history(),
            incarnations=(first_incarnation, self.incarnation()),
            restarts=self.fleet.container(self.worker).attrs["RestartCount"],
            job=self.store.job(JOB),
            sibling=self.store.job(SIBLING),
            run_state=self.store.runs.state(RUN),
            events=self.store.outbox.events_of(JOB),
            intents=[(kind, stage) for kind, stage in intents],
            episodes=self.ledger.reports.newest(),
            captures=self.ledger.captures.of_episode(1),
            journal=[line for line in lines if not line.startswith("decided wait")],
        )

    def _arguments(self, options: Sequence[str]) -> list[str]:
        return [
            *("remediator", "execute", "--armed"),
            *(
                "--runtime-dir",
                str(self.shared_parts.chain.directory),
                "--exporter",
                self.shared_parts.chain.exporter_url,
            ),
            *("--ledger", _url(self.folder, "ledger"), "--queue-db", _url(self.folder, "queue")),
            *("--docker", self.shared_parts.engine.base_url, "--stop-grace-s", "1", "--capture-s", "20"),
            *("--retries-max", str(self.retries_max)),
            *options,
        ]

    def _notes(self, number: int) -> Path:
        return self.folder / f"points-{number}"

    @property
    def _log(self) -> Path:
        return self.folder / "execute.log"

    def _read_stalled(self) -> WorkerFacts | None:
        self._rest()
        with suppress(ExporterError):
            facts = self.exporter.worker_evidence(self.worker, host=HOST)
            return facts if confirm(facts, Condition.STALL).confirmed else None
        return None

    def _rest(self) -> bool:
        """Rest, so that other threads can run."""
        return not threading.Event().wait(CHECK_INTERVAL_S)

    def _history(self) -> list[str]:
        """The engine's events of the container, up to an update that marks the end."""
        container = self.fleet.container(self.worker)
        container.update(cpu_shares=1024)

        def list_events() -> list[str]:
            found = [event for event in list(self.shared_parts.events) if event["Actor"]["ID"] == container.id]
            return [f"{event['Action']} {event['Actor']['Attributes'].get('signal', '')}".rstrip() for event in found]

        eventually(lambda: "update" in list_events(), "the engine has sent its events")
        return list_events()[: list_events().index("update")]


@contextmanager
def stalled_worker(
    shared_parts: SharedParts, worker: str, *, retries_max: int, script: Script = SCRIPT
) -> Iterator[StalledWorker]:
    """Start one worker, which claims its job and stalls."""
    folder = shared_parts.work / worker
    if script is SCRIPT:
        shutil.copytree(shared_parts.work / "new", folder)
    else:
        _create_initial_state(folder, script)
    (folder / "execute.log").touch()
    paths = HostPaths(directory=shared_parts.chain.directory, queue=folder / "queue", data=shared_parts.work / "data")
    with ExitStack() as stack:
        with shared_parts.one_at_a_time:  # the lookup of a proxy is not safe in threads either
            client = stack.enter_context(closing(docker.DockerClient(base_url=shared_parts.engine.base_url)))
            client.api.trust_env = False
        fleet = DockerFleet(client, [_slot(worker)], paths, unmanaged=(), queues={}, options=WorkerOptions())
        with shared_parts.one_at_a_time:
            store = stack.enter_context(closing(JobStore.open(_url(folder, "queue"))))
            ledger = stack.enter_context(closing(Ledger.open(_url(folder, "ledger"))))
            fleet.__enter__()
        try:
            fleet.start(worker)
            exporter = stack.enter_context(closing(ExporterClient(shared_parts.chain.exporter_url)))
            yield StalledWorker(
                shared_parts=shared_parts,
                worker=worker,
                folder=folder,
                fleet=fleet,
                store=store,
                ledger=ledger,
                exporter=exporter,
                retries_max=retries_max,
            )
        finally:
            with shared_parts.one_at_a_time:
                fleet.__exit__(None, None, None)


@contextmanager
def container_events(engine: Engine) -> Iterator[list[dict[str, Any]]]:
    """Collect the engine's container events as they come. The engine remembers only the last 256."""
    seen: list[dict[str, Any]] = []
    with closing(docker.APIClient(base_url=engine.base_url)) as client:
        stream = client.events(decode=True, filters={"type": "container", "label": STAGE_LABEL})

        def listen() -> None:
            for event in stream:
                seen.append(event)  # noqa: PERF402 - each event must be visible when it comes

        listener = threading.Thread(target=listen, name="engine-events", daemon=True)
        listener.start()
        try:
            yield seen
        finally:
            stream.close()
            listener.join(timeout=5)


def _create_initial_state(folder: Path, script: Script) -> None:
    """Create a queue with the jobs and an empty ledger. Copying them is faster than creating more."""
    for name in ("queue", "ledger"):
        (folder / name).mkdir(parents=True)
    Ledger.open(_url(folder, "ledger")).close()
    with closing(JobStore.open(_url(folder, "queue"))) as store:
        for queue in (QUEUE, "without-worker"):
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
