"""The GPU driver of a played host."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.corpus.life import MIB, Life
from bench.corpus.scenario import GpuHealth, Process, Scenario, at, gpus_of
from exporter.model.gpu import NO_ATTRIBUTION, NVIDIA_SOURCE, Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.model.snapshot import DriverHealth
from exporter.sources.gpu.nvml import process_samples
from exporter.sources.gpu.nvml.process_samples import Cursor, Listed

GPU_MIB: Final = 15360
"""Memory of every GPU."""
SHARED_RATIO: Final = 0.4


class Driver:
    """One host's driver. Its counters start at `booted_s`, and its exporter listens from `began_s` on."""

    def __init__(self, host: str, scenario: Scenario, lives: Sequence[Life]) -> None:
        self.booted_s = self.began_s = -1
        self._lives = lives
        names = gpus_of(host, [each.program for each in lives], scenario.gpus)
        self._gpus = sorted(names, key=lambda each: [*map(int, each.split(":"))])
        self._conditions = {
            each: scenario.gpus.get(f"{host}/{each}", scenario.gpus.get(each, ())) for each in self._gpus
        }
        self._reports = {each: _reported([one for _, one in timeline]) for each, timeline in self._conditions.items()}
        self._held_on: dict[str, dict[tuple[str, int], float]] = {}  # MiB, by GPU and life
        self._cached: tuple[object, GpuReadings | None] = ((), None)

    @property
    def has_gpus(self) -> bool:
        """Whether the host has a GPU."""
        return bool(self._gpus)

    def readings(self, second: int) -> GpuReadings | None:
        """Return its readings; `None` while it does not answer for some GPU."""
        states = {number: at(each, second, GpuHealth()).state for number, each in self._conditions.items()}
        figures = {number: self._figures(number, second) for number in self._gpus}
        asked = (
            *states.values(),
            *figures.values(),
            *((each.pid, each.doing, each.used.vram_mib) for each in self._lives),
        )
        before, readings = self._cached
        if asked != before:
            readings = None if "unanswered" in states.values() else self._readings(states, figures)
            self._cached = asked, readings
        return readings

    def _figures(self, number: str, second: int) -> GpuFigures:
        """Its errors and throttle reasons, if the scenario has any."""
        timeline, reports = self._conditions[number], self._reports[number]
        found = [each.ecc_uncorrected or 0 for since_s, each in timeline if self.booted_s < since_s <= second]
        throttled = at(timeline, second, GpuHealth()).throttled or ()
        return GpuFigures(
            ecc_uncorrected=sum(found) if "ecc_uncorrected" in reports else None,
            throttled=throttled if "throttled" in reports else None,
        )

    def quarantined(self, second: int) -> list[str]:
        """Its GPUs that are in quarantine."""
        states = {number: at(each, second, GpuHealth()) for number, each in self._conditions.items()}
        return [f"GPU-{number}" for number, each in states.items() if each.quarantined]

    def health(self, second: int) -> Mapping[str, DriverHealth]:
        """XIDs since `began_s`."""
        found = Counter(
            (f"GPU-{number}", each.xid)
            for number, timeline in self._conditions.items()
            for since_s, each in timeline
            if each.xid is not None and self.began_s < since_s <= second
        )
        reported = any("xid" in reports for reports in self._reports.values())
        return {NVIDIA_SOURCE: DriverHealth(xids=found)} if reported else {}

    def _readings(self, states: Mapping[str, str], figures: Mapping[str, GpuFigures]) -> GpuReadings:
        listed: list[Gpu] = []
        for number, state in states.items():
            parent, _, part = number.partition(":")
            if state == "vanished" or (part and states[parent] in ("lost", "vanished")):
                continue
            if part:
                listed.append(self._instance(number, state))
            elif parts := [each for each in self._gpus if each.startswith(f"{number}:")]:
                listed.append(self._partitioned(number, state, parts, figures[number]))
            else:
                listed.append(replace(self._gpu(number, state), figures=figures[number]))
        return GpuReadings(
            source="nvml",
            gpus=tuple(replace(each, xids_watched="xid" in self._reports[each.number]) for each in listed),
        )

    def _partitioned(self, number: str, state: str, parts: Sequence[str], figures: GpuFigures) -> Gpu:
        """A GPU in MIG mode, whose processes are listed by its instances."""
        used_mib = sum(
            self._used_mib(each, [life for life in self._lives if life.runs and each in life.program.gpus])
            for each in parts
        )
        return replace(
            self._gpu(number, state), figures=figures, utilization_ratio=None, processes=None,
            attribution=NO_ATTRIBUTION,
            memory_used_bytes=None if state == "lost" else int(used_mib * MIB),
            memory_free_bytes=None if state == "lost" else int((GPU_MIB - used_mib) * MIB),
        )  # fmt: skip

    def _instance(self, number: str, state: str) -> Gpu:
        """A MIG instance, whose utilisation is unknown."""
        parent, _, part = number.partition(":")
        size = int(GPU_MIB * MIB / sum(each.startswith(f"{parent}:") for each in self._gpus))
        lives = [each for each in self._lives if each.runs and number in each.program.gpus]
        listed = {each.works_in: Listed(each.works_in, int(each.used.vram_mib * MIB)) for each in lives}
        used = int(self._used_mib(number, lives, holds_on=state == "holds on") * MIB)
        return Gpu(
            uuid=f"MIG-{number}", index=int(parent), name="NVIDIA A100 MIG", utilization_ratio=None,
            memory_used_bytes=used, memory_size_bytes=size, memory_free_bytes=size - used,
            processes=None if state == "unlisted" else process_samples.measure(listed, None, Cursor()),

            attribution=NO_ATTRIBUTION,
            mig=MigInstance(parent=f"GPU-{parent}", number=int(part), gpu_instance=int(part) + 1, compute_instance=0),
        )  # fmt: skip

    def _gpu(self, number: str, state: str) -> Gpu:
        """A whole GPU."""
        lives = [each for each in self._lives if each.runs and number in each.program.gpus]
        ratios = [None if state == "unmeasured" else self._ratio(each, number) for each in lives]
        used_mib = self._used_mib(number, lives, holds_on=state == "holds on")
        unlisted_ratio = SHARED_RATIO if state == "shared" else 0.0
        known = state not in ("lost", "unmeasured")
        return Gpu(
            uuid=f"GPU-{number}",
            index=int(number),
            name="NVIDIA T4",
            utilization_ratio=min(1.0, unlisted_ratio + sum(each or 0.0 for each in ratios)) if known else None,
            memory_used_bytes=None if state == "lost" else int(used_mib * MIB),
            memory_size_bytes=GPU_MIB * MIB,
            memory_free_bytes=None if state == "lost" else int((GPU_MIB - used_mib) * MIB),
            processes=None
            if state in ("lost", "unlisted")
            else tuple(
                GpuProcess(pid=each.works_in, utilization_ratio=ratio, memory_bytes=int(each.used.vram_mib * MIB))
                for each, ratio in zip(lives, ratios, strict=True)
            ),
            unknown="the GPU is lost" if state == "lost" else None,
            lost=state == "lost",
        )

    def _used_mib(self, number: str, lives: Sequence[Life], *, holds_on: bool = False) -> float:
        """Memory in use; while the driver `holds on`, also that of ended processes."""
        held = {(each.program.name, each.pid): each.used.vram_mib for each in lives}
        self._held_on[number] = {**self._held_on.get(number, {}), **held} if holds_on else held
        return sum(self._held_on[number].values())

    def _ratio(self, life: Life, number: str) -> float | None:
        if life.doing.process is not Process.WORKS:
            return 0.0
        ratios = life.doing.gpu_ratio
        return ratios[0] if len(ratios) == 1 else ratios[life.program.gpus.index(number)]


def _reported(conditions: Iterable[GpuHealth]) -> frozenset[str]:
    """Parts of `GpuHealth` that the driver reports."""
    parts = ("xid", "ecc_uncorrected", "throttled")
    return frozenset(part for each in conditions for part in parts if getattr(each, part) is not None)
