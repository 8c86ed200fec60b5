"""`gpuwarden top`: a page of any size, what cannot be read, and keys at a terminal."""

import json
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import JobClass
from gpuwarden.queue import JobStore, Submission
from gpuwarden.reporter import Reporter
from remediator.commands.top_page import HostView, JobView, View, WorkerView, page
from remediator.commands.watched_gpus import Tenant, WatchedGpu, read_gpus
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import HeldEpisode
from tests.conftest import Cli
from tests.remediator.builders import NOW
from tests.terminal import at_terminal
from tests.waiting import eventually

NOWHERE = [f"--{name}=none" for name in ("remediator", "alertmanager", "prometheus")]
GIB = 2**30
GPU = "GPU-11111111-0000-0000-0000-000000000000"


def view(number: int) -> View:
    """A farm with this many of everything."""
    tenants = [
        Tenant(container="tenant-a", memory_bytes=30 * GIB, budget_bytes=24 * GIB),
        Tenant(container="tenant-b", memory_bytes=10 * GIB, budget_bytes=16 * GIB),
        *(Tenant(container=f"other-{each}", memory_bytes=GIB, budget_bytes=None) for each in range(8)),
    ]
    its: dict[str, Any] = {
        "progress": True,
        "phase": "step",
        "steps": 12,
        "steps_planned": 400,
        "step_beat_age_s": 93.0,
    }
    each = range(number)
    return View(
        at=NOW,
        problems=["alertmanager: Alertmanager is unreachable at http://127.0.0.1:9093: [Errno 111] Connection refused"],
        hosts=[HostView(host=f"box{n}", executor="alive", mode="all armed", gpus=1, workers=1) for n in each],
        gpus=[
            WatchedGpu(
                host=f"box{n}", gpu=GPU, index="0", name="NVIDIA A100-SXM4-80GB", lost=n == 1, busy_ratio=0.97,
                memory_used_bytes=48 * GIB, memory_size_bytes=80 * GIB, other_bytes=GIB, tenants=tenants,
            ) for n in each
        ],
        workers=[
            WorkerView(host=f"box{n}", worker="worker-0", state="running", queue="gpu", job=n, **its) for n in each
        ],
        jobs=[
            JobView(job=n, state="running", task="train_a_model.py", queue="gpu", host=f"box{n}", worker="worker-0",
                    age_s=4000, **its) for n in each
        ],
        counts={"queued": 12, "running": number},
        episodes=[
            HeldEpisode(episode_id=n, host=f"box{n}", worker="worker-0", remedy="restart_worker", opened_at=NOW - 600,
                        reason="approval", message="would restart the container: " + "x" * 300, since=NOW - 60)
            for n in each
        ],
    )  # fmt: skip


@pytest.mark.parametrize("rows", [24, 50])
@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("number", [1, 40])
def test_page_fits_and_counts_what_it_leaves_out(number: int, width: int, rows: int) -> None:
    lines = list(page(view(number), width=width, rows=rows))

    assert len(lines) <= rows
    assert max(map(len, lines)) <= width
    left_out = [int(each) for each in re.findall(r"… and (\d+) more$", "\n".join(lines), re.MULTILINE)]
    assert bool(left_out) == (number == 40)
    assert {"hosts: 1", "hosts: 40"} & set(lines)
    assert (GPU in "\n".join(lines)) == (width == 200)


def test_memory_of_tenants_stands_against_their_budgets() -> None:
    lines = list(page(view(2), width=80, rows=None))

    assert "    tenant-a: 30.0 of 24.0 GiB, OVER by 6.0 GiB" in lines
    assert "    tenant-b: 10.0 of 16.0 GiB" in lines
    assert "    … and 2 more tenants" in lines
    (first, lost) = (line for line in lines if "of 80.0 GiB" in line)
    assert " 97% " in first
    assert "██████░░░░ 48.0 of 80.0 GiB" in first
    assert " LOST " in lost
    assert lost.style == "bold red"


def test_unknown_is_never_zero() -> None:
    its = {"host": "box1", "gpu": GPU, "index": "3"}
    info, busy = ({"__name__": f"gpuwarden_{name}", **its} for name in ("gpu_info", "gpu_utilization_ratio"))
    (gpu,) = read_gpus([{"metric": info, "value": [0, "1"]}, {"metric": busy, "value": [0, "NaN"]}])

    assert (gpu.busy_ratio, gpu.memory_used_bytes, gpu.other_bytes) == (None, None, None)
    text = "\n".join(page(View(at=NOW, gpus=[gpu]), width=None, rows=None))
    assert "unknown  unknown" in text
    assert "other processes: unknown" in text


def test_what_cannot_be_read_is_unknown_with_the_reason(command: Cli, tmp_path: Path) -> None:
    code, out, _ = command(
        "top", "--exporter=http://127.0.0.1:1", *NOWHERE, "--queue-db", f"sqlite:///{tmp_path}/no.db", "--ledger", ""
    )

    assert code == 0
    assert "\x1b" not in out
    assert re.search(r"^hosts: unknown: ", out, re.MULTILINE)
    for section in ("GPUs", "workers"):
        assert re.search(rf"^{section}: unknown: .*unreachable at http://127.0.0.1:1: .*refused", out, re.MULTILINE)
    assert re.search(r"^jobs: unknown: no queue.* at .*no.db", out, re.MULTILINE)
    assert re.search(r"^episodes: unknown: no ledger found", out, re.MULTILINE)


@contextmanager
def host(folder: Path) -> Iterator[list[str]]:
    """A queue, a ledger, an exporter with a simulated GPU, and a worker with a job; the options that name them."""
    (folder / "run").mkdir()
    (folder / "run/host").write_text("box1\n")
    its = {"uuid": GPU, "index": 0, "utilization_ratio": 0.5, "memory_used_bytes": 40 * GIB,
           "memory_size_bytes": 80 * GIB, "processes": []}  # fmt: skip
    (folder / "gpus.json").write_text(json.dumps({"gpus": [its]}))
    queue, ledger = (f"sqlite:///{folder}/{name}.db" for name in ("queue", "ledger"))
    log = folder / "exporter.log"
    options = f"--runtime-dir {folder}/run --simulate-gpu {folder}/gpus.json --docker none --port 0"
    with (
        closing(JobStore.open(queue)) as store,
        closing(Ledger.open(ledger, host="box1")) as box1,
        Reporter(folder / "run", worker="w1", queue="gpu") as reporter,
        log.open("w") as written,
        subprocess.Popen([sys.executable, "-m", "gpuwarden", "exporter", *options.split()], stderr=written) as exporter,
    ):
        try:
            box1.executors.beat(
                host="box1", pid=7, armed=False, started_at=box1.now(), errors=0, now=box1.now(), workers=1
            )
            store.runs.submit(Submission(queue="gpu", payload={"task": "train"}, steps_total=40), now=store.now())
            store.claims.claim("gpu", host="box1", worker="w1", incarnation=reporter.incarnation, now=store.now())
            reporter.start_job(
                job_id=1, attempt=1, job_class=JobClass.GPU, model=None, budget_s=0, stall_timeout_s=0, steps_total=40
            )
            reporter.ready()
            reporter.step()
            port = eventually(lambda: re.search(r'"port": (\d+)', log.read_text()), "it listens", log=log.read_text)
            yield [f"--exporter=http://127.0.0.1:{port[1]}", *NOWHERE, "--queue-db", queue, "--ledger", ledger]
        finally:
            exporter.terminate()


def test_top_of_a_host_without_prometheus(tmp_path: Path, command: Cli) -> None:
    with host(tmp_path) as options:
        found = eventually(lambda: _with_job(command, options), "the exporter shows the job")

        assert [each["gpu"] for each in found["gpus"]] == [GPU]
        assert (found["workers"][0]["state"], found["workers"][0]["steps_planned"]) == ("running", 40)
        assert (found["jobs"][0]["task"], found["jobs"][0]["phase"]) == ("train", "step")
        assert found["unknown"] == {}
        for columns in (80, 200):
            once = [sys.executable, "-m", "gpuwarden", "top", "--once", *options]
            with at_terminal(once, columns=columns) as shown:
                eventually(lambda: shown.process.poll() is not None, "it ends", log=shown.said)
                text = shown.said()
            assert shown.process.returncode == 0
            plain = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
            assert max(map(len, plain)) <= columns
            assert [line for line in plain if line.split()[:3] == ["box1", "w1", "running"]]
            assert [line for line in plain if "40.0 of 80.0 GiB" in line]
            assert "\x1b[1m" in text
        with at_terminal([*once], env={"NO_COLOR": "1"}) as shown:
            eventually(lambda: shown.process.poll() is not None, "it ends", log=shown.said)
            assert re.findall(r"\x1b\[[\d;]*3\d\b[\d;]*m", shown.said()) == []


def _with_job(command: Cli, options: list[str]) -> dict[str, Any] | None:
    found: dict[str, Any] = json.loads(command("top", "--json", *options)[1])
    return found if found["workers"] and found["workers"][0]["step_beat_age_s"] is not None else None


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 130)], ids=["q", "Ctrl-C"])
def test_key_ends_it_and_the_terminal_is_restored(key: str, code: int, tmp_path: Path) -> None:
    empty = [*NOWHERE, "--exporter=none", "--queue-db=none", "--ledger", f"sqlite:///{tmp_path}/none.db"]
    with at_terminal([sys.executable, "-m", "gpuwarden", "top", *empty]) as shown:
        before = shown.modes()
        eventually(lambda: "episodes: unknown" in shown.said(), "the first page", log=shown.said)
        assert not shown.modes()[3] & termios.ECHO
        shown.press(key)
        eventually(lambda: shown.process.poll() is not None, "it ends", log=shown.said)

        assert shown.process.returncode == code
        assert shown.modes() == before
        text = shown.said()
        assert (text.count("\x1b[?1049h"), text.count("\x1b[?1049l")) == (1, 1)
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
