"""GPUs from a file, for demonstrations and tests: `--simulate-gpu FILE`. Always labelled as simulated.

One JSON object, replaced by rename, read in every sample:

    {"gpus": [{"uuid": "GPU-sim-0", "index": 0, "name": "Simulated GPU", "utilization_ratio": 0.93,
               "memory_used_bytes": 2147483648, "memory_size_bytes": 17179869184,
               "processes": [{"pid": 4242, "utilization_ratio": 0.93, "memory_bytes": 2147483648}]}]}

Ratios are 0 to 1, sizes bytes, pids the host's. `null`, or a missing field, is unknown.
"""

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from exporter.model.gpu import Gpu, GpuProcess, GpuReadings
from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from

SOURCE: Final = "simulated"


class SimulationError(GpuwardenError):
    """The simulation file is invalid; every GPU is unknown."""


class _Process(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pid: int = Field(gt=0)
    utilization_ratio: float | None = Field(default=None, ge=0, le=1)
    memory_bytes: int | None = Field(default=None, ge=0)


class _Gpu(BaseModel):
    model_config = ConfigDict(extra="forbid")
    uuid: str = Field(min_length=1, max_length=96)
    index: int = Field(ge=0)
    name: str = "Simulated GPU"
    utilization_ratio: float | None = Field(default=None, ge=0, le=1)
    memory_used_bytes: int | None = Field(default=None, ge=0)
    memory_size_bytes: int | None = Field(default=None, ge=0)
    processes: list[_Process] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    gpus: list[_Gpu]

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: list[_Gpu]) -> list[_Gpu]:
        if len({gpu.uuid for gpu in gpus}) < len(gpus) or len({gpu.index for gpu in gpus}) < len(gpus):
            raise ValueError("two GPUs share one uuid or index")
        return gpus


def read(path: Path) -> GpuReadings:
    """Read the simulated GPUs.

    Raises:
        SimulationError: the file is missing or invalid.
    """
    try:
        found = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SimulationError(f"no simulated GPUs: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SimulationError(f"{path}: {where}: {first['msg']}") from None
    return GpuReadings(source=SOURCE, gpus=tuple(_gpu(gpu) for gpu in found.gpus))


def _gpu(found: _Gpu) -> Gpu:
    processes = found.processes
    used, size = found.memory_used_bytes, found.memory_size_bytes
    return made_from(
        found,
        Gpu,
        memory_free_bytes=None if used is None or size is None else max(0, size - used),
        processes=None if processes is None else tuple(GpuProcess(**process.model_dump()) for process in processes),
        unknown="the simulated driver reports none" if processes is None or found.utilization_ratio is None else None,
    )
