"""Errors that a worker's process cannot survive.

After some errors of CUDA or HIP every later call of the process fails, so it would fail every job that it claims.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import structlog

from gpuwarden.errors import WorkerStopping
from gpuwarden.format import error_text, text_of
from gpuwarden.job import JobId

Hook: TypeAlias = Callable[[BaseException], bool] | None
"""The owner's answer: whether the process cannot survive this error."""

FAST_S: Final = 10.0
"""A job that fails within this time of its claim fails fast, seconds."""

FAST_JOBS_MAX: Final = 3
"""Different jobs in a row that fail fast until the worker is suspected."""

COMPLETED_S: Final = 600.0
"""How long another worker's completed job speaks against this worker, seconds."""

_CHAIN_MAX: Final = 20

log: Final = structlog.get_logger("worker")

_FATAL: Final = re.compile(
    r"(?<![a-z])(?:cuda|hip)"
    r"(?:"
    r".{0,300}?(?:"
    r"device-side assert"
    r"|illegal (?:memory access|address|instruction)|misaligned address|invalid program counter|hardware stack error"
    r"|unspecified launch failure|launch timed out|uncorrectable (?:ecc|nvlink) error"
    r"|devices? (?:is|are) busy or unavailable|device\(s\) is/are busy or unavailable"
    r"|no (?:cuda|rocm)-capable device is detected|mps client .{0,80}terminated"
    r")"
    r"|[^\n]{0,60}error: unknown error"
    # The names of the driver's and the runtime's codes.
    r"|_error_(?:illegal_address|illegal_instruction|misaligned_address|invalid_pc|invalid_address_space)"
    r"|_error_(?:hardware_stack_error|launch_failed|launch_timeout|assert|unknown|ecc_uncorrectable|nvlink_uncorrectable)"
    r"|error(?:illegaladdress|illegalinstruction|misalignedaddress|invalidpc|invalidaddressspace|hardwarestackerror)"
    r"|error(?:launchfailure|launchtimeout|assert|unknown|eccuncorrectable|eccnotcorrectable|nvlinkuncorrectable)"
    r")",
    re.IGNORECASE | re.DOTALL,
)

_OUT_OF_MEMORY: Final = re.compile(r"out.?of.?memory|resource_exhausted", re.IGNORECASE)


def is_fatal(error: BaseException, hook: Hook = None) -> bool:
    """Whether CUDA or HIP raised an error that makes the GPU unusable for this process, or the hook says so."""
    if any(_FATAL.search(text) for text in _texts(error)):
        return True
    try:
        return hook is not None and bool(hook(error))
    except WorkerStopping:
        raise
    except BaseException as unexpected:  # noqa: BLE001 - foreign code
        log.warning("hook `fatal` failed", reason=error_text(unexpected))
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory was short."""
    return any(isinstance(each, MemoryError) for each in _chain(error)) or any(
        _OUT_OF_MEMORY.search(text) for text in _texts(error)
    )


def _texts(error: BaseException) -> Iterator[str]:
    for each in _chain(error):
        yield f"{type(each).__name__}: {text_of(each)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it came from."""
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


class FastFailures:
    """The jobs that failed fast since the last other outcome."""

    def __init__(self) -> None:
        self._jobs: set[JobId] = set()

    def failed(self, job_id: JobId, error: BaseException, *, after_s: float) -> bool:
        """Add a failed job; whether the worker is suspected now."""
        if after_s > FAST_S or is_out_of_memory(error):
            self.clear()
            return False
        self._jobs.add(job_id)
        return len(self._jobs) >= FAST_JOBS_MAX

    def clear(self) -> None:
        """Start a new row."""
        self._jobs.clear()
