"""Workers that a user starts in a shell: no engine and no file lists them.

Another such worker of the same queue is the control: it keeps its process, and gets the job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.standalone.stack import CHECKOUT
from gpuwarden import procfs
from gpuwarden.job import JobClass, JobId, State
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import BODY
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

DEAD_AFTER_S: Final = 10.0
NEVER_S: Final = 3600.0
KILLED: Final = Script(
    picture="killed", load_s=0.2, load_mib=4, steps=2, step_s=0.2, wedge_attempts=1, wedge_after_step=1
)
"""The first attempt hangs until it is killed. The second completes at once."""

IN_A_SHELL: Final = 'sleep 3600 >/dev/null & echo $!; exec "$@" >>"$LOG"'
"""The worker gets the process group of the shell, and a child that outlives it."""


class PlainWorker:
    """One worker and its child, in a process group of their own."""

    def __init__(self, scene: Stage, name: str, queue: str) -> None:
        self.name = name
        command = [
            *(sys.executable, "-m", "gpuwarden", "worker", "run", "--name", name, "--queue", queue, "--handler", BODY),
            *("--queue-db", scene.chain.queue_url, "--heartbeat-s", "1"),
        ]
        environment = {
            "GPUWARDEN_RUNTIME_DIR": str(scene.chain.directory),
            "GPUWARDEN_DEMO_DATA": str(scene.data),
            "NVIDIA_VISIBLE_DEVICES": "none",
            "PYTHONPATH": str(CHECKOUT),
            "LOG": str(scene.data / f"{name}.log"),
        }
        self.process = subprocess.Popen(
            ["sh", "-c", IN_A_SHELL, "sh", *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            process_group=0,
            text=True,
        )
        assert self.process.stdout
        with self.process.stdout as output:
            self.child = int(output.readline())

    def kill(self) -> None:
        """Kill the worker alone, as the OOM killer does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """End the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def lives(pid: int) -> bool:
    try:
        return not procfs.has_ended(procfs.stat(pid))
    except OSError:
        return False


class Scene:
    """The stage, and the workers and the job of each case."""

    def __init__(self, stage: Stage, parts: ExitStack) -> None:
        self.stage = stage
        self._parts = parts

    def start(self, name: str, queue: str) -> PlainWorker:
        worker = PlainWorker(self.stage, name, queue)
        self._parts.callback(worker.end)
        eventually(lambda: self.facts(worker), "the exporter sees the worker", within_s=30)
        return worker

    def facts(self, worker: PlainWorker) -> Any:
        with suppress(Exception):
            return self.stage.witness.worker_evidence(worker.name, host=self.stage.chain.plan.host)
        return None

    def hung_job(self, case: str) -> tuple[JobId, PlainWorker, PlainWorker]:
        """A job that hangs on one worker, that worker, and an idle one."""
        worker = self.start(f"{case}-a", case)
        job_id = self.stage.submit(KILLED, now=time.time(), stall_timeout_s=NEVER_S, queue=case, job_class=JobClass.GPU)
        eventually(lambda: self.stage.armed(worker.name), "its job is armed", within_s=30)
        return job_id, worker, self.start(f"{case}-b", case)

    def episodes(self, worker: PlainWorker) -> list[EpisodeHistory]:
        return [each for each in self.stage.ledger.reports.newest() if each.worker == worker.name]

    def await_completed(self, job_id: JobId) -> None:
        eventually(
            lambda: self.stage.store.job(job_id).state is State.COMPLETED,
            "the job is done",
            within_s=DEAD_AFTER_S + 60,
            log=lambda: self.stage.chain.log_tail("execute"),
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    work: Path = tmp_path_factory.mktemp("plain")
    engine, unused = NoEngine(reason="a test"), [Slot(worker="listed", gpus=("GPU-sim-0",))]
    with (
        stage(work, engine, unused, armed=True, stop_grace_s=1.0, dead_after_s=DEAD_AFTER_S) as set_up,
        ExitStack() as parts,
    ):
        yield Scene(set_up, parts)


@pytest.mark.behaviour("A14")
@pytest.mark.parametrize("exporter", ["runs on", "restarted"])
def test_job_of_a_killed_plain_worker_moves_to_another_worker(scene: Scene, exporter: str) -> None:
    job_id, worker, other = scene.hung_job(exporter.replace(" ", "-"))
    if exporter == "restarted":
        scene.stage.chain.kill("exporter")

    worker.kill()

    if exporter == "restarted":
        scene.stage.chain.start("exporter")
    assert lives(worker.child)
    scene.await_completed(job_id)
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    assert not lives(worker.child)
    eventually(lambda: not scene.stage.ledger.episodes.list_open(), "the episode is closed", within_s=30)
    first = with_action(scene.episodes(worker))[0]
    assert (first.outcome, first.condition, first.job_id, first.attempt) == ("fixed", "dead_worker", job_id, 1)
    assert str(worker.child) in "\n".join(each.message for each in scene.stage.journal(worker.name))
    assert worker.process.returncode == -signal.SIGKILL
    assert not scene.facts(worker).alive  # nothing started it again
    assert other.process.poll() is None
    assert lives(other.child)
    assert scene.episodes(other) == []


@pytest.mark.behaviour("A14")
def test_plain_worker_that_comes_back_by_itself_is_left_alone(scene: Scene) -> None:
    job_id, worker, other = scene.hung_job("comes-back")

    worker.kill()
    again = scene.start(worker.name, "comes-back")

    scene.await_completed(job_id)
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 0, 1)
    assert scene.episodes(worker) == []
    assert lives(worker.child)
    os.kill(worker.child, signal.SIGKILL)
    assert (again.process.poll(), other.process.poll()) == (None, None)
