"""`gpuwarden run`: an unmodified script, or one with `Reporter()`, that hangs is ended and started again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S = 5

# Uses the simulated GPU, hangs in its first life, and ends in the second.
SCRIPT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["GPUWARDEN_RUNTIME_DIR"]) / sys.argv[1]
lives = pathlib.Path(sys.argv[2])
first = not lives.exists()
lives.write_text("a life")
def work(for_s):
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + for_s
    (folder / "gpu-work.json").write_text(json.dumps({"busy_until_s": until_s, "ratio": 0.9, "memory_bytes": 2**30}))
"""
STEPS = """
from gpuwarden.reporter import Reporter
reporter = Reporter()
for step in range(20):
    work(1.0)
    reporter.step()
    time.sleep(0.3)
    if first and step == 12:
        time.sleep(1000)
print("done")
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    slots = [Slot(worker=name, gpus=(f"GPU-sim-{name}",)) for name in ("steps",)]
    work = tmp_path_factory.mktemp("stage")
    with stage(work, NoEngine(reason="a test"), slots, armed=True, stop_grace_s=1.0) as scene:
        yield scene


@contextmanager
def running(scene: Stage, folder: Path, name: str, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    path = folder / f"{name}.py"
    path.write_text(SCRIPT + script)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuwarden", "run", "--name", name, *options, "--"),
            *(sys.executable, str(path), name, str(folder / "lives")),
        ],
        env={
            **os.environ,
            "GPUWARDEN_RUNTIME_DIR": str(scene.chain.directory),
            "NVIDIA_VISIBLE_DEVICES": f"GPU-sim-{name}",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.kill()


@pytest.mark.behaviour("A18")
def test_script_that_hangs_after_its_steps_is_ended_and_started_again(scene: Stage, tmp_path: Path) -> None:
    with running(scene, tmp_path, "steps", STEPS, "--stall-timeout-s", str(SILENCE_S)) as run:
        eventually(
            lambda: run.poll() is not None,
            within_s=90,
            what="the run ends",
            log=lambda: scene.chain.log_tail("execute"),
        )
        said = run.communicate()[0]

    assert run.returncode == 0, said
    (episode,) = with_action(scene.ledger.reports.newest())
    assert (episode.remedy, episode.condition, episode.outcome) == ("restart_worker", "stall", "fixed")
    assert "gpuwarden ends the command: stall" in said
    assert "started again in 1 s" in said
    assert said.endswith("done\n")
