"""A fake NVIDIA driver: tests/nvml/nvml.c as libnvidia-ml.so.1, and the script of its answers."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deploy.standalone import debian_packages

SOURCE: Final = Path(__file__).with_name("nvml.c")
LIBRARY: Final = "libnvidia-ml.so.1"
COMPILE_TIMEOUT_S: Final = 60

SCRIPT_MAX_BYTES: Final = 4 * 2**20
"""What nvml.c reads of a script, bytes."""

NOT_AVAILABLE: Final = "-"

Memory = int | str
"""Bytes, or NOT_AVAILABLE."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Engine use of one process, percent, up to a time of the driver's clock, microseconds."""

    pid: int
    timestamp_us: int
    sm: int | str
    memory: int | str = 0
    encoder: int | str = 0
    decoder: int | str = 0


FIRST_INSTANCE: Final = 100
"""From this number on, devices of the script are instances, not GPUs."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One MIG instance; its list is pid to memory, or to memory and the numbers of both instances."""

    uuid: str
    gpu_instance: int
    compute_instance: int = 0
    number: int = 0
    name: str = "Test GPU MIG 1g.10gb"
    size_bytes: int = 2 * 2**30
    used_bytes: int = 0
    compute: Mapping[int, Memory] = field(default_factory=dict)

    def lines(self, index: int, device: int) -> list[str]:
        """Its lines of the script: a part of GPU `index` with the number `device`."""
        return [
            f"instance {index} {self.number} {device} {self.gpu_instance} {self.compute_instance}",
            f"gpu {device} {self.uuid} {self.size_bytes} {self.used_bytes} 0 {self.name}",
            *(f"compute {device} {pid} {size}" for pid, size in self.compute.items()),
        ]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU; its lists are pid to memory."""

    uuid: str = "GPU-0"
    name: str = "Test GPU"
    size_bytes: int = 16 * 2**30
    used_bytes: int = 0
    reserved_bytes: int = 0
    utilization: int = 0
    mig: bool = False
    instances: tuple[Instance, ...] = ()
    compute: Mapping[int, Memory] = field(default_factory=dict)
    graphics: Mapping[int, Memory] = field(default_factory=dict)
    mps: Mapping[int, Memory] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    gpu_samples: tuple[tuple[int, int], ...] = ()
    """Time of the driver's clock, microseconds, and utilisation up to then, percent."""
    figures: tuple[str, ...] = ()
    """Sensors and error counters: `FUNCTION SELECTOR VALUE…` (see nvml.c)."""

    def lines(self, index: int) -> list[str]:
        """Its lines of the script."""
        lists = {"compute": self.compute, "graphics": self.graphics, "mps": self.mps}
        return [
            f"gpu {index} {self.uuid} {self.size_bytes} {self.used_bytes} {self.utilization} {self.name}",
            *([f"reserved {index} {self.reserved_bytes}"] if self.reserved_bytes else []),
            *([f"mig {index}"] if self.mig else []),
            *(f"{kind} {index} {pid} {size}" for kind, found in lists.items() for pid, size in found.items()),
            *(
                f"sample {index} {each.pid} {each.timestamp_us} {each.sm} {each.memory} {each.encoder} {each.decoder}"
                for each in self.samples
            ),
            *(f"gpu_sample {index} {at_us} {percent}" for at_us, percent in self.gpu_samples),
            *(f"figure {index} {each}" for each in self.figures),
            *(
                line
                for device, each in enumerate(self.instances, start=FIRST_INSTANCE + 10 * index)
                for line in each.lines(index, device)
            ),
        ]


class Driver:
    """A driver with GPUs, errors and delays which a test changes at any time."""

    def __init__(self, library: Path, script: Path) -> None:
        self.library = library
        self.script = script
        self.answer()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that uses this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_SCRIPT": str(self.script)}

    def answer(self, *cards: Card, but: tuple[str, ...] = (), session: int = 1) -> None:
        """Replace the GPUs; `but` has further lines of the script (see nvml.c), such as `error 0 * 15`."""
        lines = [f"session {session}", *(line for index, card in enumerate(cards) for line in card.lines(index)), *but]
        text = "".join(f"{line}\n" for line in lines)
        if len(text) > SCRIPT_MAX_BYTES:
            raise ValueError(f"the script has {len(text)} bytes: nvml.c reads {SCRIPT_MAX_BYTES} at most")
        scratch = self.script.with_suffix(".new")
        scratch.write_text(text, encoding="ascii")
        scratch.replace(self.script)


def compile_library(folder: Path, *, compiler: Path) -> Path:
    """Compile libnvidia-ml.so.1 into `folder`, without headers or libraries."""
    library = folder / LIBRARY
    command: list[str | Path] = [
        compiler,
        "-O2",
        "-shared",
        "-fPIC",
        "-nostdlib",
        f"-Wl,-soname={LIBRARY}",
        "-o",
        library,
        SOURCE,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    return library


def build(folder: Path) -> Path:
    """Compile the library with any C compiler.

    Raises:
        PartMissing: cannot find or download a compiler.
    """
    return compile_library(folder, compiler=debian_packages.find("cc"))
