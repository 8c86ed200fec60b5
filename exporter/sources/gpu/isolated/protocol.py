"""Messages between the exporter and a driver process, pickled on two pipes. Pure.

The exporter sends one `Question` at a time, and gets `GpuReadings` or `Failed`. Before calls about a GPU the process
sends `CurrentGpu`, so that a hanging call has a known GPU. An `Xid` may come at any time.
"""

import pickle
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from struct import Struct
from typing import IO, Final

from exporter.model.gpu import Gpu, GpuFigures, GpuReadings
from gpuwarden.errors import GpuwardenError

MESSAGE_BYTES_MAX: Final = 8 * 2**20
"""Enough for 64 GPUs with `PROCESSES_MAX` processes."""

_SIZE: Final = Struct(">I")
"""Length of the next message, bytes."""

PROCESSES_MAX: Final = 1024
"""Processes listed per GPU."""

UNLISTED_MAX: Final = 16_384
"""Named pids without readable open files."""

HUNG: Final = "calls about it hang, so it is skipped and retried by another process"
HUNG_FIGURES: Final = GpuFigures(unknown={"gpu": "hung"})
"""One reason for all metrics of a hung GPU."""

TOO_MANY: Final = f"{{count}} processes are on it, more than the limit of {PROCESSES_MAX}"


class DriverError(GpuwardenError):
    """The driver does not answer.

    Args:
        message: why.
        over: another process is needed.
        reloaded: the driver may have renumbered its GPUs.
    """

    def __init__(self, message: str, *, over: bool = False, reloaded: bool = False) -> None:
        super().__init__(message)
        self.over = over
        self.reloaded = reloaded


@dataclass(frozen=True, kw_only=True)
class Question:
    """A read of all GPUs except those `without`, which hang, or of `only` one, by `Gpu.place`."""

    without: AbstractSet[int] = frozenset()
    only: int | None = None

    def is_about(self, place: int | None) -> bool:
        """Whether it includes a GPU; `None` is a GPU without a number."""
        return place not in self.without and self.only in (None, place)


@dataclass(frozen=True, kw_only=True)
class CurrentGpu:
    """The next calls are about the GPU of this number, or none."""

    place: int | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A failed read; flags as of `DriverError`."""

    message: str
    over: bool = False
    reloaded: bool = False


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One NVIDIA error of a GPU."""

    gpu: str
    code: int


Message = Question | GpuReadings | Failed | CurrentGpu | Xid


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message.

    Raises:
        OSError: the other end is closed.
    """
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_SIZE.pack(len(content)) + content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read a message.

    Raises:
        EOFError: the other end is closed.
        ValueError: it is invalid.
    """
    head = pipe.read(_SIZE.size)
    if not head:
        raise EOFError
    (size,) = _SIZE.unpack(head.ljust(_SIZE.size, b"\xff"))
    content = pipe.read(size) if size <= MESSAGE_BYTES_MAX else b""
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes of a message of {size}")
    try:
        found = pickle.loads(content)  # noqa: S301 - our own process wrote it to a private pipe
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, Message):
        raise ValueError(f"a {type(found).__name__}")  # noqa: TRY004 - a value from outside
    return found


def to_failed(error: DriverError) -> Failed:
    """Convert an error to a message."""
    return Failed(message=str(error), over=error.over, reloaded=error.reloaded)


def limit_size(found: GpuReadings) -> GpuReadings:
    """Limit the size of readings: a GPU with too many processes lists none."""
    return replace(
        found,
        gpus=tuple(
            gpu if len(gpu.processes or ()) <= PROCESSES_MAX else _unlisted(gpu, count=len(gpu.processes or ()))
            for gpu in found.gpus
        ),
        unlisted=None if found.unlisted is None or len(found.unlisted) > UNLISTED_MAX else found.unlisted,
    )


def _unlisted(gpu: Gpu, *, count: int) -> Gpu:
    figures = replace(gpu.figures, unknown={**gpu.figures.unknown, "processes": "too_many"})
    return replace(gpu, processes=None, unknown=TOO_MANY.format(count=count), figures=figures)
