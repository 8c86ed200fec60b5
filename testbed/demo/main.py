"""The demo: two hung jobs and a slow one, with real programs. Exit code 0 only if every check passes."""

import argparse
import io
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pynvml
from docker.errors import DockerException
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.standalone import debian_packages
from deploy.standalone.stack import CHECKOUT, ChainError
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import FINAL
from remediator.commands import ledger
from testbed.demo import verdict
from testbed.demo.job_body import Script
from testbed.demo.narration import Event, Watcher, follow
from testbed.demo.verdict import Case, Link
from testbed.docker_engine import Engine, EngineNotStopped, NoEngine, docker_engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage

SILENCE_S: Final = 6.0
TIMEOUT_S: Final = 150.0
SLOTS: Final = tuple(Slot(worker=f"gpuwarden-demo-{name}", gpus=(f"GPU-sim-{name}",)) for name in "abc")
JOBS: Final = (
    ("hangs at step 5", Script(picture="first", steps=10, wedge_attempts=1, wedge_after_step=5), True),
    ("hangs after its load", Script(picture="second", wedge_attempts=1, wedge_with_gil=False), True),
    ("slow, GPU busy", Script(picture="third", steps=6, slow_step=4, slow_s=18.0), False),
)
TONES: Final = {"good": "green", "bad": "red", "watch": "yellow", "act": "bold cyan"}


class NoGpuError(Exception):
    """No GPU can be used. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the workers run. `gpu` is the name of a real GPU."""

    engine: Engine | NoEngine
    slots: tuple[Slot, ...]
    gpu: str | None = None


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Returns 0 if every check passes."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--keep", action="store_true", help="keep the work folder with logs, databases and configuration"
    )
    parser.add_argument(
        "--gpu",
        choices=("simulated", "nvml"),
        default="simulated",
        help="nvml: jobs share the first NVIDIA GPU of this host, and workers are processes (default: simulated)",
    )
    parser.add_argument("--svg", type=Path, help="save the result as a picture")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder = CHECKOUT / ".work"
    folder.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="demo-", dir=folder))
    try:
        with _where(work, real_gpu=arguments.gpu == "nvml") as where:
            return _play(work, console, where, arguments.svg)
    except (
        debian_packages.PartMissing,
        ChainError,
        EngineNotStopped,
        NoGpuError,
        GpuwardenError,
        DockerException,
    ) as error:
        console.print(f"[red]demo failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all programs are stopped")
        return 130
    finally:
        if arguments.keep:
            console.print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _where(work: Path, *, real_gpu: bool) -> Iterator[Where]:
    """Fetch the programs and find an engine or a GPU. Raises NoGpuError."""
    for program in ("prometheus", "alertmanager"):
        debian_packages.find(program)
    if not real_gpu:
        with docker_engine(work) as engine:
            yield Where(engine=engine, slots=SLOTS)
        return
    uuid, name = _first_gpu()
    slots = tuple(replace(slot, gpus=(uuid,)) for slot in SLOTS)
    yield Where(engine=NoEngine(reason="they use this host's GPU"), slots=slots, gpu=name)


def _first_gpu() -> tuple[str, str]:
    """UUID and name of the NVIDIA driver's first GPU. Raises NoGpuError."""
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            return pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"no NVIDIA GPU can be used: {error}") from error


def _play(work: Path, console: Console, where: Where, svg: Path | None) -> int:
    _introduce(console, where)
    with stage(work, where.engine, where.slots, armed=True, real_gpus=where.gpu is not None) as scene:
        before = scene.start_workers()
        cases = _submit(scene)
        watcher = Watcher(scene, {case.job_id: case.title for case in cases})
        finished = _follow(scene, watcher, console)
        found = list(verdict.check_links(scene, cases, before))
        _conclude(console, scene, found, finished=finished, elapsed_s=watcher.elapsed_s)
        if svg is not None:
            picture = Console(record=True, file=io.StringIO(), width=150, force_terminal=True)
            _conclude(picture, scene, found, finished=finished, elapsed_s=watcher.elapsed_s)
            svg.write_text(_without_web_fonts(picture.export_svg(title="make demo")), encoding="utf-8")
    return 0 if finished and all(link.ok for link in found) else 1


def _introduce(console: Console, on: Where) -> None:
    engine = on.engine
    if on.gpu is not None:
        where = f"supervised processes that share the GPU of this host: {on.gpu}"
    elif isinstance(engine, NoEngine):
        where = f"supervised processes, without a Docker engine: {engine.reason}"
    else:
        where = f"containers of {'a private' if engine.private else 'this host'}'s Docker engine {engine.version}"
        where = where.replace("a private's", "a private")
    console.print(f"[bold]gpuwarden demo[/]: workers are {where}", highlight=False)
    console.print(
        f"Real Prometheus, Alertmanager, exporter and remediator; the GPU is {'real' if on.gpu else 'simulated'}. "
        f"The remediator is [bold]armed[/], and limits are short: stall timeout {SILENCE_S:.0f} s instead of 120 s, "
        "RAM delta 24 MiB instead of 5120, scrape interval 1 s.",
        highlight=False,
    )


def _submit(scene: Stage) -> list[Case]:
    return [
        Case(
            job_id=scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S),
            title=title,
            script=script,
            restarted=restarted,
            stall_timeout_s=SILENCE_S,
        )
        for title, script, restarted in JOBS
    ]


def _follow(scene: Stage, watcher: Watcher, console: Console) -> bool:
    def is_finished() -> bool:
        jobs_done = all(job.state in FINAL for job in scene.store.jobs())
        return jobs_done and not scene.ledger.episodes.list_open()

    live = Live(_fleet(watcher), console=console, transient=True, refresh_per_second=4) if console.is_terminal else None

    def show(events: list[Event]) -> None:
        for event in events:
            tone = TONES.get(event.tone, "")
            text = f"[dim]{event.at_s:6.1f} s[/]  {event.part:12}  {_escape(event.text)}"
            console.print(f"[{tone}]{text}[/]" if tone else text, highlight=False)
        if live is not None:
            live.update(_fleet(watcher))

    if live is None:
        return follow(watcher, until=is_finished, timeout_s=TIMEOUT_S, show=show)
    with live:
        return follow(watcher, until=is_finished, timeout_s=TIMEOUT_S, show=show)


def _fleet(watcher: Watcher) -> Table:
    table = Table(title=f"{watcher.elapsed_s:.0f} s", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("worker", "job", "attempt", "phase", "step", "step beat", "GPU idle", "RAM idle"):
        table.add_column(name, justify="right" if name not in ("worker", "job", "phase") else "left")
    for worker, facts in sorted(watcher.facts.items()):
        table.add_row(
            worker,
            watcher.title(facts.job_id),
            _format(facts.attempt),
            facts.phase or "-",
            _format(facts.step),
            _format(facts.step_beat_age_s),
            _format(facts.gpu_idle_s),
            _format(facts.ram_idle_s),
        )
    return table


def _conclude(console: Console, scene: Stage, found: list[Link], *, finished: bool, elapsed_s: float) -> None:
    table = Table(title="What each program recorded", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("job", "check", "ok", "found"):
        table.add_column(name)
    job = ""
    for link in found:
        if job and link.job != job:
            table.add_row()
        table.add_row(
            link.job if link.job != job else "",
            link.link,
            "[green]yes[/]" if link.ok else "[red]NO[/]",
            _escape(link.shown),
        )
        job = link.job
    console.print(table)
    console.print("[bold]Ledger[/]")
    for summary in scene.ledger.reports.newest():
        history = scene.ledger.reports.get(summary.episode_id)
        for line in ledger.lines(history) if history else []:
            console.print(_escape(line), highlight=False)
    broken = [link for link in found if not link.ok]
    if not finished:
        console.print(f"[red]not finished after {TIMEOUT_S:.0f} s[/]")
    if broken:
        console.print(f"[red]{len(broken)} of {len(found)} checks failed[/]")
        for part in ("execute", "serve", "exporter"):
            console.print(f"end of the log of {part}:\n{_escape(scene.chain.log_tail(part))}", highlight=False)
    elif finished:
        console.print(
            f"[green]All {len(found)} checks passed[/] in {elapsed_s:.0f} s: "
            "two hung jobs were restarted, a slow job was left alone."
        )


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.0f} s"


def _without_web_fonts(svg: str) -> str:
    """Remove web fonts from the picture."""
    return re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
