"""One host with workers, a queue and all programs, for demo and end-to-end tests."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Chain, Plan
from gpuwarden.job import JobClass, JobId
from gpuwarden.queue import JobStore, Submission
from remediator.clients.exporter import ExporterClient
from remediator.clients.exporter_access import ExporterError
from remediator.ledger.journal import Entry
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import Outcome
from remediator.settings.settings import ExecuteSettings
from testbed.changed_settings import refuse_unlisted
from testbed.demo import job_body
from testbed.docker_engine import Engine, NoEngine
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.workers import (
    QUEUE,
    Database,
    DockerFleet,
    Fleet,
    HostPaths,
    ProcessFleet,
    Services,
    SystemdFleet,
    WorkerOptions,
)

HOST: Final = "stage"
PICTURE_SIDE: Final = 48
FAST: Final = Intervals(scrape_s=1, evaluate_s=1, group_interval_s=1, repeat_s=3600)
EXECUTE: Final[Mapping[str, float]] = {
    "stop_grace_s": 2,
    "cooldown_s": 0,
    "breaker_targets": 1000,
    "breaker_restarts": 1000,
    "capture_s": 20,
    "capture_range_s": 0,
}
"""Settings of the executor for every stage. `testbed.changed_settings` has the reasons."""
DELIVERED: Final[Mapping[str, Any]] = {name: ExecuteSettings.model_fields[name].default for name in EXECUTE}
"""Their defaults."""
NO_ACTION: Final = frozenset({Outcome.UNCONFIRMED, Outcome.SUPERSEDED})
"""Outcomes of episodes without an action."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The running parts of the host."""

    slots: Sequence[Slot]
    fleet: Fleet
    gpus: SimulatedGpus
    chain: Chain
    store: JobStore
    ledger: Ledger
    witness: ExporterClient
    data: Path

    def submit(
        self,
        script: job_body.Script,
        *,
        now: float,
        stall_timeout_s: float,
        run_id: str | None = None,
        queue: str = QUEUE,
        job_class: JobClass = JobClass.GPU,
        reports_steps: bool = True,
    ) -> JobId:
        """Draw a noisy picture and queue the job that cleans it."""
        self.draw(script)
        return self.store.runs.submit(
            Submission(
                queue=queue,
                job_class=job_class,
                reports_steps=reports_steps,
                model="denoiser",
                payload=script.payload(),
                steps_total=script.steps,
                stall_timeout_s=stall_timeout_s,
                run_id=run_id,
            ),
            now=now,
        )

    def draw(self, script: job_body.Script) -> None:
        """Draw the noisy picture of a job, if missing."""
        path = self.data / f"{script.picture}.pgm"
        if not path.exists():
            draw = random.Random(script.picture)  # noqa: S311 - noise for a picture, not a secret
            side = range(PICTURE_SIDE)
            job_body.write_picture(path, [[60.0 + draw.randrange(140) for _ in side] for _ in side])

    def armed(self, worker: str) -> bool:
        """Whether a worker's job has made its first step beat, by the exporter."""
        try:
            return self.witness.worker_evidence(worker, host=self.chain.plan.host).step_beat_age_s is not None
        except ExporterError:
            return False

    def journal(self, worker: str) -> list[Entry]:
        """Journal entries of a worker's episodes, in order."""
        episodes = [
            self.ledger.reports.get(episode.episode_id)
            for episode in self.ledger.reports.newest()
            if episode.worker == worker
        ]
        return [entry for episode in episodes if episode for entry in episode.entries]

    def start_workers(self) -> dict[str, str]:
        """Start all workers. Returns each incarnation at its start, before any restart."""
        before = {}
        for slot in self.slots:
            self.fleet.start(slot.worker)
            before[slot.worker] = self.fleet.incarnation(slot.worker)
        return before


def with_action(episodes: Sequence[EpisodeHistory]) -> list[EpisodeHistory]:
    """Open episodes and episodes with an action, in order.

    A late scrape can end an alert and start it again. The first episode is then closed as unconfirmed, or a late alert
    as superseded.
    """
    return [episode for episode in episodes if episode.outcome not in NO_ACTION]


@contextmanager
def stage(  # noqa: PLR0913 - named arguments, each with its own meaning
    work: Path,
    engine: Engine | Services | NoEngine,
    slots: Sequence[Slot],
    *,
    armed: bool,
    intervals: Intervals = FAST,
    host_lost_after_s: float = 180.0,
    dead_after_s: float = 30.0,
    ram_idle_mib: int = 24,
    unmanaged: Sequence[str] = (),
    queues: dict[str, str] | None = None,
    options: WorkerOptions | None = None,
    host: str = HOST,
    database: Database | None = None,
    data: Path | None = None,
    real_gpus: bool = False,
    **execute: float,
) -> Iterator[Stage]:
    """Start everything in a folder, and stop and remove it at the end. Times are in seconds.

    Args:
        work: an empty folder.
        engine: where workers run; without an engine or systemd they are supervised processes.
        slots: workers and their GPUs.
        armed: whether the remediator acts.
        intervals: of Prometheus and Alertmanager.
        host_lost_after_s: silence after which a host is lost.
        dead_after_s: time without heartbeat and CPU time after which a worker is dead.
        ram_idle_mib: RAM change that counts as idle.
        unmanaged: workers without the opt-in label.
        queues: queue by worker, if not the default.
        options: options of all workers.
        host: host key. Stages with different keys and folders are different hosts.
        database: shared database of queue and ledger, instead of SQLite.
        data: shared folder of job data.
        real_gpus: read the NVIDIA driver and compute on its GPUs; not for containers.
        execute: settings of the executor in addition to `EXECUTE`.
    """
    paths = HostPaths(
        directory=work / "run",
        queue=work / "queue",
        data=data or work / "data",
        database=database,
        real_gpus=real_gpus,
    )
    paths.data.mkdir(parents=True, exist_ok=True)
    options = options or WorkerOptions()
    simulation = work / "gpus.json"
    with ExitStack() as stack:
        plan = Plan(
            work=work,
            host=host,
            docker=engine.base_url if isinstance(engine, Engine) and engine.kind == "docker" else None,
            podman=engine.base_url if isinstance(engine, Engine) and engine.kind == "podman" else None,
            simulate_gpu=None if real_gpus else simulation,
            systemd_units=_managed_units(slots, unmanaged) if isinstance(engine, Services) else (),
            armed=armed,
            intervals=intervals,
            ram_idle_mib=ram_idle_mib,
            execute={**EXECUTE, **execute},
            dead_after_s=dead_after_s,
            host_lost_after_s=host_lost_after_s,
            database=None if database is None else database.url,
        )
        refuse_unlisted(plan, options, os.environ)
        chain = Chain(plan)
        fleet: Fleet
        if isinstance(engine, Engine):
            client = docker.DockerClient(base_url=engine.base_url)
            stack.callback(client.close)
            fleet = DockerFleet(client, slots, paths, unmanaged=unmanaged, queues=queues or {}, options=options)
        elif isinstance(engine, Services):
            fleet = SystemdFleet(engine, slots, paths, queues=queues or {}, options=options)
        else:
            fleet = ProcessFleet(slots, paths, queues=queues or {}, options=options)
        stack.enter_context(fleet)
        gpus = stack.enter_context(SimulatedGpus(simulation, directory=paths.directory, slots=slots))
        stack.enter_context(chain)
        store = JobStore.open(chain.queue_url)
        stack.callback(store.close)
        ledger = Ledger.open(chain.ledger_url)
        stack.callback(ledger.close)
        witness = ExporterClient(chain.exporter_url)
        stack.callback(witness.close)
        yield Stage(
            slots=slots,
            fleet=fleet,
            gpus=gpus,
            chain=chain,
            store=store,
            ledger=ledger,
            witness=witness,
            data=paths.data,
        )


def _managed_units(slots: Sequence[Slot], unmanaged: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{slot.worker}.service" for slot in slots if slot.worker not in unmanaged)
