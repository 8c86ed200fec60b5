"""What the exporter and a process that asks a GPU's driver send each other: pickled messages on two pipes. Pure.

The exporter sends one `Question` at a time, and the process answers each with `GpuReadings` or `Failed`. Before a call
about a GPU the process sends `Asking`, so that the exporter knows in which GPU a call hangs. It sends an `Xid` unasked.
"""

import pickle
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from struct import Struct
from typing import IO, Final

from exporter.model.gpu import Gpu, GpuFigures, GpuReadings
from gpuwarden.errors import GpuwardenError

MESSAGE_BYTES_MAX: Final = 8 * 2**20
"""What is longer is no message: 64 GPUs with `PROCESSES_MAX` processes each have less."""

_SIZE: Final = Struct(">I")
"""What stands before each message: its length, bytes."""

PROCESSES_MAX: Final = 1024
"""How many processes of one GPU are told: whoever may open a GPU may do so with any number of processes."""

UNLISTED_MAX: Final = 16_384
"""How many pids are named whose open files cannot be listed."""

HUNG: Final = "calls about it do not return: it is left out, and another process asks for it now and then"
HUNG_FIGURES: Final = GpuFigures(unknown={"gpu": "hung"})
"""Of a GPU that is left out nothing is asked: it is counted once for all of them."""

TOO_MANY: Final = f"{{count}} processes are on it, more than the {PROCESSES_MAX} that are listed"


class DriverError(GpuwardenError):
    """The driver as a whole does not answer; every GPU is unknown meanwhile.

    Where it is `over`, it will not answer this process any more, but may answer another. Where it begins `anew`, it is
    loaded again before it answers, or has been, and may number its GPUs otherwise then.
    """

    def __init__(self, because: str, *, over: bool = False, anew: bool = False) -> None:
        super().__init__(because)
        self.over = over
        self.anew = anew


@dataclass(frozen=True, kw_only=True)
class Question:
    """A look: at all GPUs but those `without`, which are told of as hung, or at one `only`; by the driver's numbers.

    Those are `Gpu.place`.
    """

    without: AbstractSet[int] = frozenset()
    only: int | None = None

    def is_about(self, place: int | None) -> bool:
        """Whether a GPU is asked about; `None` is what has no number, and is never left out."""
        return place not in self.without and self.only in (None, place)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The next calls are about the GPU of this number; `None` is none."""

    place: int | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why there are no readings; after one that is `over`, another process is needed, and `anew` is as of the error."""

    because: str
    over: bool = False
    anew: bool = False


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One error that the driver reported of a GPU, by NVIDIA's number for it."""

    gpu: str
    code: int


Message = Question | GpuReadings | Failed | Asking | Xid


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message whole.

    Raises:
        OSError: the other end is closed.
    """
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_SIZE.pack(len(content)) + content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read the next message.

    Raises:
        EOFError: there is none: the other end is closed.
        ValueError: what comes is no message.
    """
    head = pipe.read(_SIZE.size)
    if not head:
        raise EOFError
    (size,) = _SIZE.unpack(head.ljust(_SIZE.size, b"\xff"))
    content = pipe.read(size) if size <= MESSAGE_BYTES_MAX else b""
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes of a message of {size}")
    try:
        found = pickle.loads(content)  # noqa: S301 - a process of our own wrote it, to a pipe that no other can open
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, Message):
        raise ValueError(f"a {type(found).__name__}")  # noqa: TRY004 - a wrong value from outside, no wrong call
    return found


def failed(error: DriverError) -> Failed:
    """How an error is told."""
    return Failed(because=str(error), over=error.over, anew=error.anew)


def bounded(found: GpuReadings) -> GpuReadings:
    """The same, of a bounded size: a GPU with more processes than are told has none listed, and says so."""
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
