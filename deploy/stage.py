"""One host with workers, a queue and the whole chain: what the demonstration and the end-to-end tests play on."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import docker

from deploy.chain import Chain, Plan
from deploy.config import Pace
from deploy.demo import body
from deploy.engine import Engine, NoEngine
from deploy.fleet import QUEUE, DockerFleet, Fleet, Ground, ProcessFleet
from deploy.simulator import SimulatedGpus, Slot
from gpuwarden.job import JobClass, JobId
from gpuwarden.jobstore import JobStore, Submission
from remediator.ledger import Ledger
from remediator.witness import Witness

HOST: Final = "stage"
PICTURE_SIDE: Final = 48
FAST: Final = Pace(scrape_s=1, evaluate_s=1, group_interval_s=1, repeat_s=3600)


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
        script: body.Script,
        *,
        now: float,
        stall_timeout_s: float,
        run_id: str | None = None,
        queue: str = QUEUE,
        job_class: JobClass = JobClass.GPU,
        reports_steps: bool = True,
    ) -> JobId:
        """Draw a noisy picture and queue the job that cleans it."""
        path = self.data / f"{script.picture}.pgm"
        if not path.exists():
            draw = random.Random(script.picture)  # noqa: S311 - noise for a picture, not a secret
            side = range(PICTURE_SIDE)
            body.write_picture(path, [[60.0 + draw.randrange(140) for _ in side] for _ in side])
        return self.store.submit(
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

    def start_workers(self) -> dict[str, str]:
        """Start every worker; the incarnation of each."""
        for slot in self.slots:
            self.fleet.start(slot.worker)
        return {slot.worker: self.fleet.incarnation(slot.worker) for slot in self.slots}


@contextmanager
def stage(
    work: Path,
    engine: Engine | NoEngine,
    slots: Sequence[Slot],
    *,
    armed: bool,
    stop_grace_s: float = 2.0,
    settle_bound_s: float = 60.0,
    ram_delta_mib: int = 24,
    unmanaged: Sequence[str] = (),
    queues: dict[str, str] | None = None,
) -> Iterator[Stage]:
    """Set the stage in a folder, and clear it.

    Args:
        work: an empty folder for everything that is written.
        engine: where the workers run; without one they are supervised processes.
        slots: the workers and their GPUs.
        armed: whether the remediator acts.
        stop_grace_s: between SIGTERM and SIGKILL, seconds.
        settle_bound_s: when a fenced job is settled at the latest, seconds.
        ram_delta_mib: what counts as still, at the small scale of these jobs.
        unmanaged: workers whose containers do not opt in.
        queues: workers that serve another queue than the usual one.
    """
    ground = Ground(directory=work / "run", queue=work / "queue", data=work / "data")
    ground.data.mkdir(parents=True, exist_ok=True)
    simulation = work / "gpus.json"
    commands = work / "workers.toml"
    with ExitStack() as stack:
        plan = Plan(
            work=work,
            host=HOST,
            docker=engine.base_url if isinstance(engine, Engine) else None,
            simulate_gpu=simulation,
            processes=None if isinstance(engine, Engine) else commands,
            armed=armed,
            pace=FAST,
            ram_delta_mib=ram_delta_mib,
            stop_grace_s=stop_grace_s,
            settle_bound_s=settle_bound_s,
        )
        chain = Chain(plan)
        fleet: Fleet
        if isinstance(engine, Engine):
            client = docker.DockerClient(base_url=engine.base_url)
            stack.callback(client.close)
            fleet = DockerFleet(client, slots, ground, unmanaged=unmanaged, queues=queues or {})
        else:
            fleet = ProcessFleet(slots, ground, commands=commands, queues=queues or {})
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
