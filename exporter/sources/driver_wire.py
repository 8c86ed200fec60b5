"""What a process that asks a GPU's driver tells the exporter: one JSON object a line, each of one key. Pure.

    {"gpus": {…}}      the answer to a look: `GpuReadings`, field by field
    {"failed": {…}}    the answer to a look that failed: `because`, and `over` where this process can do no better
    {"xid": {…}}       unasked: NVIDIA's driver has reported an error `code` of a `gpu`

It is asked for a look by a line of any content, one at a time.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from exporter.readings import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from gpuwarden.errors import GpuwardenError

LINE_BYTES_MAX: Final = 8 * 2**20
"""A longer line is no answer: 64 GPUs with 1000 processes each have half of that."""


class DriverError(GpuwardenError):
    """The driver as a whole does not answer; every GPU is unknown meanwhile.

    Where it is `over`, it will not answer this process any more, but may answer another.
    """

    def __init__(self, because: str, *, over: bool = False) -> None:
        super().__init__(because)
        self.over = over


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why there are no readings; after one that is `over`, another process is needed."""

    because: str
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One error that the driver reported of a GPU, by NVIDIA's number for it."""

    gpu: str
    code: int


def failed(error: DriverError) -> Failed:
    """How an error is told."""
    return Failed(because=str(error), over=error.over)


Told = GpuReadings | Failed | Xid

_KEYS: Final[dict[type, str]] = {GpuReadings: "gpus", Failed: "failed", Xid: "xid"}


def line(told: Told) -> bytes:
    """One line."""
    return json.dumps({_KEYS[type(told)]: told}, default=_by_field, separators=(",", ":")).encode() + b"\n"


def _by_field(part: Any) -> dict[str, Any]:
    """What is told of it: its fields, and not what has been worked out of them meanwhile and is kept beside them."""
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


def parse(text: bytes) -> Told:
    """What a line tells.

    Raises:
        ValueError: it is no such line.
    """
    try:
        ((key, found),) = json.loads(text).items()
        if key == "gpus":
            return GpuReadings(source=found["source"], gpus=tuple(_gpu(**gpu) for gpu in found["gpus"]))
        return (Failed if key == "failed" else Xid)(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no line of the process that asks the driver: {error}") from None


def _gpu(
    *,
    processes: list[dict[str, Any]] | None,
    figures: dict[str, Any],
    mig: dict[str, Any] | None,
    also: list[str],
    **rest: Any,
) -> Gpu:
    return Gpu(
        **rest,
        also=tuple(also),
        mig=None if mig is None else MigInstance(**mig),
        processes=None if processes is None else tuple(GpuProcess(**each) for each in processes),
        figures=GpuFigures(**figures),
    )
