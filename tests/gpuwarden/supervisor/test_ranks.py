"""A command that starts a process for each rank, as torchrun does, under `gpuwarden run`."""

import time
from typing import Final

import pytest

from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources import workers
from gpuwarden.job import Phase
from gpuwarden.state_file import JobFile
from tests.exporter import builders as build
from tests.gpuwarden.supervisor.guarded import NAME, Guarded, python, when_ready
from tests.waiting import eventually

LAUNCHER: Final = """
import os, subprocess, sys
ranks = int(sys.argv[2])
given = [{**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)]
started = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=each) for each in given]
print("ready", flush=True)
for each in started:
    each.wait()
"""
STEPS: Final = """
import os, time
from gpuwarden.reporter import Reporter
rank = int(os.environ["LOCAL_RANK"])
reporter = Reporter()
for step in range(10_000):
    reporter.step()
    time.sleep(0.05)
    if rank == 1 and step == 10:
        time.sleep(1000)
"""


def ranks(guarded: Guarded) -> tuple[JobFile, ...]:
    (found,) = workers.read(guarded.directory).workers
    return found.ranks


def start(guarded: Guarded, script: str, count: int = 2) -> None:
    when_ready(guarded.start(python(LAUNCHER, script, str(count))))


def test_each_rank_reports_its_own_steps(guarded: Guarded) -> None:
    start(guarded, STEPS, 3)

    eventually(lambda: len(ranks(guarded)) == 3 and ranks(guarded)[0].step > 30, "three ranks report")

    found = ranks(guarded)
    assert [each.local_rank for each in found] == [0, 1, 2]
    assert found[1].step < found[2].step
    assert {each.phase for each in found} == {Phase.STEP}
    assert len({each.process for each in found}) == 3


def test_rank_that_never_reports_leaves_the_command_to_be_judged_as_a_whole(guarded: Guarded) -> None:
    start(guarded, STEPS.replace("reporter = Reporter()", "if rank: time.sleep(1000)\nreporter = Reporter()"))
    path = guarded.folder / f"{NAME}.job.json"

    eventually(lambda: '"phase": "step"' in path.read_text(), "rank 0 steps")

    assert ranks(guarded) == ()


def test_ranks_end_with_their_command(guarded: Guarded) -> None:
    start(guarded, STEPS)
    eventually(lambda: len(ranks(guarded)) == 2, "two ranks report")

    for process in guarded.started:
        process.terminate()
        process.communicate(timeout=15)

    assert sorted(each.name for each in guarded.folder.iterdir()) == [f"{NAME}.lock"]


@pytest.mark.behaviour("A5")
@pytest.mark.slow
def test_rank_that_stands_still_decides_while_the_other_spins(guarded: Guarded) -> None:
    spins = STEPS.replace(
        "time.sleep(1000)", "time.sleep(1000)\n    if rank == 0 and step == 12:\n        time.sleep(1000)"
    )
    start(guarded, spins)
    eventually(lambda: len(ranks(guarded)) == 2, "two ranks report")
    first, second = (each.process for each in ranks(guarded))
    assert first is not None
    assert second is not None
    busy = build.gpu(0, build.process(first[0], 1.0, build.MIB)), build.gpu(1, build.process(second[0], 0.0, build.MIB))
    look = Sampler(
        host="h", directory=guarded.directory, containers={}, gpus=lambda: build.gpus(*busy), thresholds=Thresholds()
    )

    def idle() -> dict[str, float | None]:
        return {name: each.gpu_idle_s for name, each in look.sample().worker_evidence.items()}

    idle()
    time.sleep(1)
    assert {name: bool(idle_s) for name, idle_s in idle().items()} == {f"{NAME}/0": False, f"{NAME}/1": True}
    snapshot = look.sample()
    assert snapshot.workers is not None
    assert snapshot.job_evidence.keys() == {NAME}


def test_child_of_a_rank_does_not_replace_its_job(guarded: Guarded) -> None:
    spawns = STEPS.replace(
        "for step", "reporter.step()\nimport subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'from gpuwarden.reporter import Reporter; Reporter()'])\n"
        "open(os.environ['GPUWARDEN_JOB_FILE'] + f'.{rank}.done', 'w')\ntime.sleep(1000)\nfor step",
    )  # fmt: skip
    start(guarded, spawns)

    eventually(lambda: len(list(guarded.folder.glob("*.done"))) == 2, "both started a child")

    assert [each.step for each in ranks(guarded)] == [1, 1]
