"""One host with workers, a queue and the whole chain: what the demonstration and the end-to-end tests play on."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import docker

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Chain, Plan
from gpuwarden.job import JobClass, JobId
from gpuwarden.queue import JobStore, Submission
from remediator.clients.exporter import Witness, WitnessError
from remediator.ledger.journal import Entry
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import Outcome
from testbed.demo import job_body
from testbed.docker_engine import Engine, NoEngine
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.workers import QUEUE, Database, DockerFleet, Fleet, Ground, Habits, ProcessFleet, Services, SystemdFleet

HOST: Final = "stage"
PICTURE_SIDE: Final = 48
FAST: Final = Intervals(scrape_s=1, evaluate_s=1, group_interval_s=1, repeat_s=3600)
EXECUTE: Final[Mapping[str, float]] = {
    "stop_grace_s": 2, "cooldown_s": 0, "storm_targets": 1000, "storm_frees": 1000, "capture_s": 20, "curves_s": 0
}  # fmt: skip
"""Settings of the executor: tests may hang all workers, and one worker many times; slow machines need longer."""
IDLE: Final = frozenset({Outcome.UNCONFIRMED, Outcome.SUPERSEDED})
"""How an episode closes of which nothing came."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Everything on the stage, running."""

    slots: Sequence[Slot]
    fleet: Fleet
    gpus: SimulatedGpus
    chain: Chain
    store: JobStore
    ledger: Ledger
    witness: Witness
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
        """Draw the noisy picture of a job, if it is not there."""
        path = self.data / f"{script.picture}.pgm"
        if not path.exists():
            draw = random.Random(script.picture)  # noqa: S311 - noise for a picture, not a secret
            side = range(PICTURE_SIDE)
            job_body.write_picture(path, [[60.0 + draw.randrange(140) for _ in side] for _ in side])

    def armed(self, worker: str) -> bool:
        """Whether a worker's job has loaded and given its first beat, as the host's exporter sees it."""
        try:
            return self.witness.about(worker, host=self.chain.plan.host).beat_age_s is not None
        except WitnessError:
            return False

    def account(self, worker: str) -> list[Entry]:
        """Everything on record about a worker's episodes, in order."""
        stories = [
            self.ledger.reports.get(story.episode_id)
            for story in self.ledger.reports.newest()
            if story.worker == worker
        ]
        return [entry for story in stories if story for entry in story.entries]

    def start_workers(self) -> dict[str, str]:
        """Start every worker; the incarnation of each, asked at once: one may be mended before the last is started."""
        before = {}
        for slot in self.slots:
            self.fleet.start(slot.worker)
            before[slot.worker] = self.fleet.incarnation(slot.worker)
        return before


def of_consequence(stories: Sequence[EpisodeHistory]) -> list[EpisodeHistory]:
    """The episodes that are open, or of which something came, in their order.

    One wedge may leave others, which touch nothing. Where a scrape is late its alert ends and comes again, and what was
    not begun by then is closed as unconfirmed; an alert that is delivered when all is over is superseded.
    """
    return [story for story in stories if story.outcome not in IDLE]


@contextmanager
def stage(  # noqa: PLR0913 - named arguments, each with its own meaning
    work: Path,
    engine: Engine | Services | NoEngine,
    slots: Sequence[Slot],
    *,
    armed: bool,
    intervals: Intervals = FAST,
    node_lost_after_s: float = 180.0,
    dead_after_s: float = 30.0,
    ram_delta_mib: int = 24,
    unmanaged: Sequence[str] = (),
    queues: dict[str, str] | None = None,
    habits: Habits | None = None,
    host: str = HOST,
    database: Database | None = None,
    data: Path | None = None,
    real_gpus: bool = False,
    **execute: float,
) -> Iterator[Stage]:
    """Set the stage in a folder, and clear it.

    Args:
        work: an empty folder for everything that is written.
        engine: where the workers run; without one, or a systemd, they are supervised processes.
        slots: the workers and their GPUs.
        armed: whether the remediator acts.
        intervals: how fast Prometheus and Alertmanager turn.
        node_lost_after_s: when a host of which nobody has heard is lost, seconds.
        dead_after_s: when a worker without heartbeat and CPU time is dead, seconds.
        ram_delta_mib: what counts as still, at the small scale of these jobs.
        unmanaged: workers whose containers or services do not opt in.
        queues: workers that serve another queue than the usual one.
        habits: how the workers go about their work.
        host: the host's key. Two stages with keys and folders of their own are two hosts.
        database: where queue and ledger are, instead of in SQLite files: what several hosts share.
        data: what jobs read and write, where several hosts share that too.
        real_gpus: whether the exporter asks the NVIDIA driver and the jobs compute on its GPUs; not for containers.
        execute: more settings of the executor, beside those in `EXECUTE`.
    """
    ground = Ground(
        directory=work / "run",
        queue=work / "queue",
        data=data or work / "data",
        database=database,
        real_gpus=real_gpus,
    )
    ground.data.mkdir(parents=True, exist_ok=True)
    habits = habits or Habits()
    simulation = work / "gpus.json"
    commands = work / "workers.toml"
    with ExitStack() as stack:
        plan = Plan(
            work=work,
            host=host,
            docker=engine.base_url if isinstance(engine, Engine) and engine.kind == "docker" else None,
            podman=engine.base_url if isinstance(engine, Engine) and engine.kind == "podman" else None,
            simulate_gpu=None if real_gpus else simulation,
            processes=commands if isinstance(engine, NoEngine) else None,
            systemd_units=_managed_units(slots, unmanaged) if isinstance(engine, Services) else (),
            armed=armed,
            intervals=intervals,
            ram_delta_mib=ram_delta_mib,
            execute={**EXECUTE, **execute},
            dead_after_s=dead_after_s,
            node_lost_after_s=node_lost_after_s,
            database=None if database is None else database.url,
        )
        chain = Chain(plan)
        fleet: Fleet
        if isinstance(engine, Engine):
            client = docker.DockerClient(base_url=engine.base_url)
            stack.callback(client.close)
            fleet = DockerFleet(client, slots, ground, unmanaged=unmanaged, queues=queues or {}, habits=habits)
        elif isinstance(engine, Services):
            fleet = SystemdFleet(engine, slots, ground, queues=queues or {}, habits=habits)
        else:
            fleet = ProcessFleet(slots, ground, commands=commands, queues=queues or {}, habits=habits)
        stack.enter_context(fleet)
        gpus = stack.enter_context(SimulatedGpus(simulation, directory=ground.directory, slots=slots))
        stack.enter_context(chain)
        store = JobStore.open(chain.queue_url)
        stack.callback(store.close)
        ledger = Ledger.open(chain.ledger_url)
        stack.callback(ledger.close)
        witness = Witness(chain.exporter_url)
        stack.callback(witness.close)
        yield Stage(
            slots=slots,
            fleet=fleet,
            gpus=gpus,
            chain=chain,
            store=store,
            ledger=ledger,
            witness=witness,
            data=ground.data,
        )


def _managed_units(slots: Sequence[Slot], unmanaged: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{slot.worker}.service" for slot in slots if slot.worker not in unmanaged)
