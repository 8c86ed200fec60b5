"""torchrun under `gpuwarden run`: one rank hangs, the other waits. Without torch, a launcher plays torchrun."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import stage, with_action
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow, pytest.mark.nightly]

HAS_TORCH: Final = importlib.util.find_spec("torch") is not None
LAUNCHER: Final = """
import os, subprocess, sys
given = [{**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
started = [subprocess.Popen([sys.executable, *sys.argv[1:]], env=each) for each in given]
raise SystemExit(max(each.wait() for each in started))
"""
TORCH: Final = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train():
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""
WITHOUT: Final = """
def train():
    while (folder / "hung").exists():
        time.sleep(0.1)
"""
LOOP: Final = """
rank, first = int(os.environ["LOCAL_RANK"]), not (folder / "lives").exists()
from gpuwarden.reporter import Reporter
reporter = Reporter()
for step in range(40):
    until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + 1.0
    if rank == 0:
        work = {"busy_until_s": until_s, "ratio": 0.9, "memory_bytes": 2**30}
        (folder / "gpu-work.json").write_text(json.dumps(work))
    if first and rank == 1 and step == 15:
        (folder / "lives").write_text("one")
        (folder / "hung").write_text("")
        time.sleep(1000)
    train()
    reporter.step()
    time.sleep(0.2)
print("rank", rank, "is done", flush=True)
"""


def test_rank_that_hangs_ends_and_restarts_the_gang(tmp_path: Path) -> None:
    with stage(
        tmp_path, NoEngine(reason="a test"), [Slot(worker="ranks", gpus=("GPU-sim",))], armed=True, stop_grace_s=1.0
    ) as scene:
        script, folder = tmp_path / "train.py", scene.chain.directory / "ranks"
        begins = f"import json, os, pathlib, time\nfolder = pathlib.Path({str(folder)!r})\n"
        begins += "if (folder / 'lives').exists():\n    (folder / 'hung').unlink(missing_ok=True)\n"
        script.write_text(begins + (TORCH if HAS_TORCH else WITHOUT) + LOOP)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if HAS_TORCH else ["-c", LAUNCHER]
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuwarden", "run", "--name", "ranks", "--stall-timeout-s", "30", "--"),
                *(sys.executable, *launcher, str(script)),
            ],
            env={
                **os.environ,
                "GPUWARDEN_RUNTIME_DIR": str(scene.chain.directory),
                "NVIDIA_VISIBLE_DEVICES": "GPU-sim",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            eventually(lambda: run.poll() is not None, "the run ends", within_s=200)
        finally:
            run.terminate()
            said = run.communicate(timeout=30)[0]
        assert run.returncode == 0, said
        (episode,) = with_action(scene.ledger.reports.newest())

    assert (episode.remedy, episode.condition, episode.outcome) == ("restart_worker", "stall", "fixed")
    assert "gpuwarden ends the command: stall" in said
    assert ", rank 1" in said
    assert said.count("is done") == 2
