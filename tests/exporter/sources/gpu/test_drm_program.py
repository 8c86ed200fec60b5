"""The whole exporter on AMD and Intel GPUs: a real worker, and folders of the kernel which list it."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from exporter import main
from exporter.settings import Settings
from exporter.sources import processes
from exporter.sources.gpu.drm import gpus
from gpuwarden import procfs
from gpuwarden.errors import GpuwardenError
from tests.exporter.conftest import StartWorker
from tests.exporter.sources.gpu import gpu_tree
from tests.exporter.sources.gpu.gpu_tree import Tree
from tests.nvml.driver import Card
from tests.nvml.driver import Driver as Nvidia
from tests.waiting import eventually

CARD, ARC = "0000:03:00.0", "0000:00:02.0"
CARD_ID = 51706

PROGRAM = """
import sys
from functools import partial
from pathlib import Path
from exporter import main
from exporter.sources.gpu.drm import gpus
from exporter.sources.gpu.nvml import presence
root = Path(sys.argv[1])
gpus.CHILD = "-c", sys.argv[2]
gpus.DrmGpus = partial(gpus.DrmGpus, sys=root / "sys", proc=root / "proc")
presence.NvidiaHost = partial(presence.NvidiaHost, sys=root / "sys", proc=root / "proc")
sys.exit(main.command(sys.argv[3:]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "host")


@contextmanager
def program(
    house: Path, tree: Tree, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int, list[dict[str, Any]]]]:
    """The exporter on that tree: its process, its port, and its log until it was ready."""
    given = ["--runtime-dir", str(house), "--port", "0", "--docker", "none", "--sample-interval-s", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tree.sys.parent), tree.child[1], *given, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        assert process.stderr
        log: list[dict[str, Any]] = []
        while not log or log[-1]["event"] != "exporter ready":
            line = process.stderr.readline()
            assert line, (process.communicate(), log)
            log.append(json.loads(line))
        yield process, log[-1]["port"], log
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


@contextmanager
def running(house: Path, tree: Tree, *arguments: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The same without an NVIDIA driver: its port, and its log until it was ready."""
    with program(house, tree, "--nvml", "off", *arguments) as (_, port, log):
        yield port, log


def children(process: "subprocess.Popen[str]") -> frozenset[int]:
    return processes.process_tree(process.pid) - {process.pid}


def settings(**given: Any) -> Settings:
    return Settings(**given)


def scrape(port: int) -> str:
    """The known values, without NaN."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(" NaN\n"))


@pytest.mark.behaviour("A19")
def test_amd_worker_is_unknown_at_work_and_idle_at_rest(house: Path, tree: Tree, start_worker: StartWorker) -> None:
    worker = start_worker("w0")
    tree.node(1, gpu_id=CARD_ID, minor=128)
    folder = tree.gpu(128, CARD, "amdgpu", busy_percent=99, vram=(5, 10))
    tree.opens(worker.pid, {5: ("/dev/dri/renderD128", gpu_tree.amdgpu(CARD))})
    tree.computes(worker.pid, vram={CARD_ID: 4096}, queues={0: CARD_ID}, occupied={CARD_ID: 0})
    place = f'{{container="w0",gpu="pci-{CARD}"}}'
    missing = f"gpuwarden_container_gpu_attribution_missing{place}"
    idle = 'gpuwarden_container_gpu_idle_seconds{container="w0"}'

    with running(house, tree) as (port, log):
        busy = eventually(lambda: text if f"{missing} 1.0" in (text := scrape(port)) else None)
        tree.write(folder / "gpu_busy_percent", 0)
        eventually(lambda: f"{missing} 0.0" in (text := scrape(port)) and f"{idle} " in text)

    assert next(line for line in log if line["event"] == "reading GPUs from the kernel")["drivers"] == ["amdgpu"]
    info = f'{{attribution="device",gpu="pci-{CARD}",index="0",name="navi31",source="amdgpu"}}'
    assert f"gpuwarden_gpu_info{info} 1.0" in busy
    assert f"gpuwarden_container_gpu_memory_bytes{place} 77824.0" in busy
    assert 'gpuwarden_collector_success{collector="source_drm"} 1.0' in busy
    assert idle not in busy
    assert f"gpuwarden_container_gpu_utilization_ratio{place}" not in busy


def test_removed_gpu_is_lost_for_its_worker(house: Path, tree: Tree, start_worker: StartWorker) -> None:
    start_worker("w0")
    tree.node(1, gpu_id=CARD_ID, minor=128, unique_id=0x18B7_0C33_A1B2_C3D4)
    tree.gpu(128, CARD, "amdgpu", busy_percent=0)
    whole = 'gpuwarden_gpu_lost_seconds{gpu="GPU-18b70c33a1b2c3d4"}'
    idle, lost = (f'gpuwarden_container_gpu_{what}_seconds{{container="w0"}} ' for what in ("idle", "lost"))

    with running(house, tree) as (port, _):
        before = eventually(lambda: text if idle in (text := scrape(port)) else None)
        tree.take_out(CARD)
        gone = eventually(lambda: text if lost in (text := scrape(port)) else None)

    assert f"{whole} 0.0" in before
    assert lost not in before
    assert whole in gone


@pytest.mark.parametrize(
    ("arguments", "sources"),
    [
        pytest.param((), {"amdgpu", "i915"}, id="auto"),
        pytest.param(("--amd", "on", "--intel", "on"), {"amdgpu", "i915"}, id="on"),
        pytest.param(("--intel", "off"), {"amdgpu"}, id="Intel off"),
        pytest.param(("--amd", "off", "--intel", "off"), set(), id="off"),
    ],
)
def test_vendors_are_selected(arguments: tuple[str, ...], sources: set[str], house: Path, tree: Tree) -> None:
    tree.gpu(128, CARD, "amdgpu", busy_percent=0)
    tree.gpu(129, ARC, "i915")

    with running(house, tree, *arguments) as (port, _):
        text = eventually(lambda: text if "gpuwarden_workers_duplicate 0.0" in (text := scrape(port)) else None)

    assert {name for name in ("amdgpu", "i915") if f'source="{name}"' in text} == sources


@pytest.mark.parametrize(("option", "driver"), [("amd", "i915"), ("intel", "amdgpu")])
def test_required_gpu_must_exist(option: str, driver: str, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.gpu(128, CARD, driver)
    monkeypatch.setattr(gpus, "DrmGpus", partial(gpus.DrmGpus, sys=tree.sys, proc=tree.proc))

    with pytest.raises(GpuwardenError, match=rf"no GPU of the kernel driver .* or set --{option} off"):
        main._drm_source(settings(**{option: "on"}))


@pytest.mark.parametrize("option", ["amd", "intel"])
def test_required_gpu_conflicts_with_a_simulated_one(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=f"--{option} on conflicts with --simulate-gpu"):
        settings(**{option: "on"}, simulate_gpu=tmp_path / "gpus.json")


def test_simulation_reads_no_real_gpu(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.gpu(128, CARD, "amdgpu")
    monkeypatch.setattr(gpus, "DrmGpus", partial(gpus.DrmGpus, sys=tree.sys, proc=tree.proc))

    assert main._drm_source(settings(simulate_gpu=tmp_path / "gpus.json")).read is None
    assert main._drm_source(settings()).read is not None


@pytest.mark.needs_compiler
def test_no_process_reads_the_kernel_without_its_gpus(house: Path, tree: Tree, driver: Nvidia) -> None:
    driver.answer(Card())
    found: list[list[bytes]] = []

    for gpu in (False, True):
        if gpu:
            tree.gpu(128, CARD, "amdgpu", busy_percent=0)
        with program(house, tree, env=driver.environment) as (process, port, _):
            eventually(lambda: 'gpu="GPU-0"' in scrape(port))
            found.append([(procfs.PROC / str(pid) / "cmdline").read_bytes() for pid in children(process)])

    assert [b"nvml.child" in each for each in found[0]] == [True]
    assert sorted(b"gpu.drm" in each for each in found[1]) == [False, True]
