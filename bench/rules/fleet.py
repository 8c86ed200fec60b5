"""The pages of a fleet of hosts with workers that run one job after another.

The exporter's collectors render the host of `host.yaml` once while its jobs load and once while they step. Each scrape
fills in the values that change. Workers start at different times in their first job of `turnover_s`. With gangs, the
workers of a host are the ranks of one gang. With tenants, each GPU also has a tenant and each host two servers.
"""

import math
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from bench.corpus import scenario_file
from bench.corpus.host import Host, remediator
from exporter.collectors import COLLECTORS
from exporter.collectors.registry import SnapshotCollector
from exporter.http.exposition import render
from exporter.model.gpu import GpuFigures
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.sources.gpu.nvml.pcie import FIELDS
from gpuwarden import clock

Kind = Literal["workers", "gangs", "tenants"]

WORKERS: Final = 8
"""Per host."""

LOAD_S: Final = 30
"""Load time of a job in `host.yaml`, seconds."""

STEP_S: Final = 2
LOADING_S: Final = 20
STEPPING_S: Final = 240
"""Times of the two pages, seconds."""

FIGURES: Final = GpuFigures(
    temperature_celsius=61.0,
    power_watts=310.0,
    power_limit_watts=700.0,
    sm_clock_hertz=1.98e9,
    memory_clock_hertz=2.619e9,
    throttled=(),
    ecc_corrected=0,
    ecc_uncorrected=0,
    ecc_lifetime_corrected=2,
    ecc_lifetime_uncorrected=0,
    remapped_rows_corrected=0,
    remapped_rows_uncorrected=0,
    row_remap_pending=False,
    row_remap_failed=False,
    pcie_replays=1,
    pcie_errors=dict.fromkeys(FIELDS, 0),
)

_LINE: Final = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")
_GPU: Final = re.compile(r"GPU-(\d)")
_HOST: Final = "a"

GANG: Final = "g"
"""Name of the gang in the rendered page."""

_OF_THE_JOB: Final = {
    "gpuwarden_job_elapsed_seconds": "elapsed",
    "gpuwarden_job_phase_age_seconds": "phase",
    "gpuwarden_job_step_beat_age_seconds": "step_beat",
    "gpuwarden_job_steps": "steps",
}
_GROWS: Final = "gpuwarden_container_gpu_busy_seconds_total"
"""The other counters count errors; a healthy fleet has none."""
_BY_THE_CLOCK: Final = ("_timestamp_seconds", "_age_seconds")
_WANDERS: Final = ("_memory_bytes", "_memory_used_bytes", "_memory_free_bytes", "_celsius", "_watts")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a page: `text`, and a value that changes by `kind`."""

    text: str
    value: float
    kind: str


class Fleet:
    """The pages of all hosts."""

    def __init__(self, *, turnover_s: float, kind: Kind = "workers") -> None:
        workers_only, with_tenants = scenario_file.read(Path(__file__).parent)
        played, gangs = with_tenants if kind == "tenants" else workers_only, kind == "gangs"
        if gangs:
            ranks = (replace(each, gang=GANG, rank=rank, ranks=WORKERS) for rank, each in enumerate(played.programs))
            played = replace(played, programs=tuple(ranks))
        self._gangs = gangs
        host = Host("a", played)
        pages: dict[int, list[_Line]] = {}
        for second in range(STEPPING_S + 1):
            host.play(second)
            if second in (LOADING_S, STEPPING_S) and host.snapshot is not None:
                pages[second] = list(_lines(host.snapshot))
        self._loading = _by_worker(pages[LOADING_S])
        self._stepping = _by_worker(pages[STEPPING_S])
        self._rest = [each for each in pages[STEPPING_S] if _worker_of(each) is None]
        self._turnover_s = turnover_s
        self._remediator = render(remediator([host]))
        self._gpus: dict[int, list[str]] = {}

    def page(self, number: int, *, now_s: float) -> bytes:
        """The page of one host at a Unix time."""
        out: list[str] = []
        _write(out, self._rest, now_s, age_s=0.0)
        for worker in range(WORKERS):
            ahead_s = self._offset_s(number, 0 if self._gangs else worker)
            jobs, age_s = divmod(now_s + ahead_s, self._turnover_s)
            lines = (self._loading if age_s < LOAD_S else self._stepping)[f"w{worker}"]
            first = int(jobs) * WORKERS
            _write(out, lines, now_s, age_s=age_s, job_id=first + worker, gang=f"{first}@{number}/night")
        gpus = self._gpus.setdefault(
            number, [f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{number}.{gpu}')}" for gpu in range(WORKERS)]
        )
        text = "".join(out).replace(f'nodename="{_HOST}"', f'nodename="h{number}"')
        return _GPU.sub(lambda found: gpus[int(found[1])], text).encode()

    def remediator_page(self) -> bytes:
        """The page of a remediator without episodes."""
        return self._remediator

    def _offset_s(self, number: int, worker: int) -> float:
        """How far a worker is ahead, spread by the golden ratio."""
        return ((number * WORKERS + worker) * 0.6180339887 % 1.0) * self._turnover_s


def _lines(snapshot: Snapshot) -> Iterator[_Line]:
    gpus = snapshot.gpus
    if gpus is not None:
        gpus = replace(gpus, gpus=tuple(replace(each, figures=FIGURES) for each in gpus.gpus))
    sample = replace(snapshot, gpus=gpus)
    of_the_host = [family for collector in COLLECTORS.values() for family in collector(sample)]
    # Ages of the host date from the snapshot, and the exporter's own metrics need a fresh one.
    collector = SnapshotCollector(lambda: replace(sample, taken=clock.stamp()), host=_HOST, thresholds=Thresholds())
    of_the_exporter = [each for each in collector.collect() if each.name not in {one.name for one in of_the_host}]
    for line in render([*of_the_host, *of_the_exporter]).decode().splitlines():
        found = None if line.startswith("#") else _LINE.fullmatch(line)
        if found is None:
            continue
        text, value = line[: found.start("value")], float(found["value"])
        yield _Line(text, value, _kind(found["name"], value))


def _kind(name: str, value: float) -> str:
    if math.isnan(value):
        return "stays"
    if name in _OF_THE_JOB:
        return _OF_THE_JOB[name]
    if name == "gpuwarden_job_id":
        return "id"
    if name in ("gpuwarden_gang_rank_attempt", "gpuwarden_gang_rank_active_attempt"):
        return "gang"
    if name.endswith(_BY_THE_CLOCK):
        return "clock" if name.endswith("_timestamp_seconds") else "age"
    if name == _GROWS:
        return "counter"
    return "wanders" if name.endswith(_WANDERS) and value else "stays"


def _worker_of(line: _Line) -> str | None:
    found = re.search(r'[{,]worker="(w\d)"', line.text)
    return found[1] if found and line.text.startswith(("gpuwarden_job_", "gpuwarden_gang_")) else None


def _by_worker(lines: list[_Line]) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {f"w{number}": [] for number in range(WORKERS)}
    for each in lines:
        worker = _worker_of(each)
        if worker is not None:
            found[worker].append(each)
    return found


def _write(out: list[str], lines: list[_Line], now_s: float, *, age_s: float, job_id: int = 0, gang: str = "") -> None:
    moves = {
        "elapsed": age_s,
        "phase": age_s - LOAD_S if age_s >= LOAD_S else age_s,
        "step_beat": age_s % STEP_S,
        "steps": float(max(0, int((age_s - LOAD_S) / STEP_S))),
        "id": float(job_id),
        "clock": now_s,
        "age": now_s % 10,
    }
    for each in lines:
        kind = each.kind
        if kind == "stays":
            out.append(f"{each.text}{each.value!r}\n")
        elif kind == "gang":
            out.append(each.text.replace(f'gang="{GANG}"', f'gang="{gang}"') + f"{each.value!r}\n")
        elif kind == "counter":
            out.append(f"{each.text}{each.value + now_s * 0.7!r}\n")
        elif kind == "wanders":
            out.append(f"{each.text}{each.value * (1 + int(now_s / 10) % 7 / 1000)!r}\n")
        else:
            out.append(f"{each.text}{moves[kind]!r}\n")
