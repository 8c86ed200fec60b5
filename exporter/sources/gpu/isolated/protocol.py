"""What a process that asks a GPU's driver tells the exporter: one JSON object a line, each of one key. Pure.

    {"gpus": {…}}      the answer to a look: `GpuReadings`, field by field; the processes of a GPU are an array for each
                       of their fields, with a figure of each process; `null` is a field that none of them has
    {"failed": {…}}    the answer to a look that failed: `because`; `over` where this process can do no better; `anew`
                       where the driver is loaded anew before there can be another answer, or was
    {"xid": {…}}       unasked: NVIDIA's driver has reported an error `code` of a `gpu`

It is asked for a look by a line, one at a time: `look`, `look without 1 3`, or `look only 1` (`Question`).
"""

import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, Final

from exporter.model.readings import Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from gpuwarden.errors import GpuwardenError

LINE_BYTES_MAX: Final = 8 * 2**20
"""A longer line is no answer: 64 GPUs with `PROCESSES_MAX` processes each have less."""

PROCESSES_MAX: Final = 1024
"""How many processes of one GPU are told: whoever may open a GPU may do so with any number of processes."""

UNLISTED_MAX: Final = 16_384
"""How many pids are named whose open files cannot be listed."""

PLACE: Final = Struct("<I")
"""What a process that asks about one GPU after another keeps in a file: the number of this one, plus 1; else 0."""

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
        """Whether a GPU is asked about; `None` is what has no number, and is left out by nobody."""
        return place not in self.without and self.only in (None, place)

    @property
    def line(self) -> bytes:
        """How it is asked."""
        words = ["without", *map(str, sorted(self.without))] if self.without else []
        return " ".join(["look", *(words if self.only is None else ["only", str(self.only)])]).encode() + b"\n"


def question(text: str) -> Question:
    """What a line asks."""
    match text.split():
        case [_, "only", number]:
            return Question(only=int(number))
        case [_, "without", *numbers]:
            return Question(without=frozenset(map(int, numbers)))
    return Question()


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


def failed(error: DriverError) -> Failed:
    """How an error is told."""
    return Failed(because=str(error), over=error.over, anew=error.anew)


Told = GpuReadings | Failed | Xid

_KEYS: Final[dict[type, str]] = {GpuReadings: "gpus", Failed: "failed", Xid: "xid"}


def bounded(found: GpuReadings) -> GpuReadings:
    """The same, no longer than a line: a GPU with more processes than are told has none listed, and says so."""
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


def line(told: Told) -> bytes:
    """One line."""
    return json.dumps({_KEYS[type(told)]: told}, default=_by_field, separators=(",", ":")).encode() + b"\n"


def _by_field(part: Any) -> dict[str, Any]:
    """What is told of it: its fields, and not what has been worked out of them meanwhile and is kept beside them."""
    found = {name: getattr(part, name) for name in part.__dataclass_fields__}
    if isinstance(part, Gpu):
        found["processes"] = _columns(part.processes)
    return found


def _columns(processes: tuple[GpuProcess, ...] | None) -> list[tuple[Any, ...] | None] | None:
    """A list of hundreds of processes has a few arrays so, instead of hundreds: at each look all of it is told."""
    if processes is None:
        return None
    columns = zip(*processes, strict=True)
    return [None if each.count(None) == len(processes) else each for each in columns]


def _processes(columns: list[Any] | None) -> tuple[GpuProcess, ...] | None:
    if not columns:
        return None if columns is None else ()
    pids, *figures = columns
    none = (None,) * len(pids)
    return tuple(map(GpuProcess._make, zip(pids, *(none if each is None else each for each in figures), strict=True)))


def parse(text: bytes) -> Told:
    """What a line tells.

    Raises:
        ValueError: it is no such line.
    """
    try:
        ((key, found),) = json.loads(text).items()
        if key == "gpus":
            unlisted = found["unlisted"]
            return GpuReadings(
                source=found["source"],
                gpus=tuple(_gpu(**gpu) for gpu in found["gpus"]),
                unlisted=None if unlisted is None else tuple(unlisted),
            )
        return (Failed if key == "failed" else Xid)(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no line of the process that asks the driver: {error}") from None


def _gpu(
    *,
    processes: list[Any] | None,
    figures: dict[str, Any],
    mig: dict[str, Any] | None,
    also: list[str],
    **rest: Any,
) -> Gpu:
    return Gpu(
        **rest,
        also=tuple(also),
        mig=None if mig is None else MigInstance(**mig),
        processes=_processes(processes),
        figures=GpuFigures(**figures),
    )
