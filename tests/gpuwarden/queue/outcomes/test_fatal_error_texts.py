"""Which errors a worker's process cannot survive."""

import pytest

from gpuwarden.errors import WorkerStopping
from gpuwarden.job import JobId
from gpuwarden.queue.outcomes.fatal_errors import FAST_S, FastFailures, is_fatal, is_out_of_memory

HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1."
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"CUDA error: device-side assert triggered{HINT}", id="PyTorch, assert"),
        pytest.param(f"CUDA error: an illegal memory access was encountered{HINT}", id="PyTorch, address"),
        pytest.param(f"CUDA error: unknown error{HINT}", id="PyTorch, unknown"),
        pytest.param("CUDA error: uncorrectable ECC error encountered", id="PyTorch, ECC"),
        pytest.param("CUDA error: CUDA-capable device(s) is/are busy or unavailable", id="PyTorch, busy"),
        pytest.param("HIP error: an illegal memory access was encountered", id="PyTorch on ROCm"),
        pytest.param("HIP error: unspecified launch failure", id="PyTorch on ROCm, launch"),
        pytest.param("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", id="XLA"),
        pytest.param("INTERNAL: failed to synchronize: CUDA_ERROR_LAUNCH_FAILED", id="XLA, code alone"),
        pytest.param("cudaErrorAssert: device-side assert triggered", id="CuPy"),
        pytest.param("hipErrorLaunchFailure", id="HIP code"),
        pytest.param("[CUDA] Triton Error: misaligned address", id="Triton"),
        pytest.param("CUDA driver error: invalid program counter", id="driver"),
    ],
)
def test_error_of_cuda_or_hip_that_breaks_the_process_is_fatal(text: str) -> None:
    assert is_fatal(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("CUDA out of memory. Tried to allocate 20.00 GiB", id="PyTorch, memory"),
        pytest.param(f"CUDA error: out of memory{HINT}", id="CUDA, memory"),
        pytest.param("HIP out of memory. Tried to allocate 20.00 GiB", id="HIP, memory"),
        pytest.param("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY: out of memory", id="XLA, memory"),
        pytest.param("CUDA error: no kernel image is available for execution on the device", id="wrong build"),
        pytest.param("CUDA error: invalid argument", id="argument"),
        pytest.param("Torch not compiled with CUDA enabled", id="no CUDA"),
        pytest.param("unknown error", id="no CUDA error"),
        pytest.param("ship error: misaligned address of the customer", id="part of a word"),
        pytest.param("device-side assert triggered", id="no GPU named"),
        pytest.param("", id="nothing"),
    ],
)
def test_error_that_leaves_the_process_usable_is_not_fatal(text: str) -> None:
    assert not is_fatal(RuntimeError(text))


def test_error_that_came_from_a_fatal_one_is_fatal() -> None:
    wrapped = ValueError("the job failed")
    wrapped.__cause__ = RuntimeError("CUDA error: device-side assert triggered")
    handled = ValueError("the clean-up failed")
    handled.__context__ = wrapped

    assert is_fatal(handled)


def test_circle_of_errors_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one

    assert not is_fatal(one)


def test_hook_decides_for_other_errors() -> None:
    assert is_fatal(RuntimeError("engine dead"), lambda error: "engine dead" in str(error))
    assert not is_fatal(RuntimeError("no data"), lambda error: "engine dead" in str(error))


def test_failing_hook_is_no_answer() -> None:
    def fails(_error: BaseException) -> bool:
        raise BaseException  # noqa: TRY002 - as a Rust panic

    assert not is_fatal(RuntimeError("no data"), fails)


def test_stop_of_the_worker_passes_the_hook() -> None:
    def stops(_error: BaseException) -> bool:
        raise WorkerStopping

    with pytest.raises(WorkerStopping):
        is_fatal(RuntimeError("no data"), stops)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("tried to allocate"), True),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_out_of_memory_is_known_by_type_or_text(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short


BROKEN = RuntimeError("no such file")


def suspected(*failures: tuple[int, BaseException, float]) -> list[bool]:
    row = FastFailures()
    return [row.failed(JobId(job_id), error, after_s=after_s) for job_id, error, after_s in failures]


def test_third_different_job_in_a_row_that_fails_fast_is_suspect() -> None:
    assert suspected((1, BROKEN, 0), (2, BROKEN, FAST_S), (3, BROKEN, 1), (4, BROKEN, 1)) == [False, False, True, True]


def test_one_job_counts_once() -> None:
    assert suspected((1, BROKEN, 0), (2, BROKEN, 0), (1, BROKEN, 0)) == [False, False, False]


@pytest.mark.parametrize("other", [(3, BROKEN, FAST_S + 0.1), (3, MemoryError(), 0.0)], ids=["slow", "memory"])
def test_slow_failure_and_out_of_memory_start_a_new_row(other: tuple[int, BaseException, float]) -> None:
    assert suspected((1, BROKEN, 0), (2, BROKEN, 0), other, (4, BROKEN, 0), (5, BROKEN, 0)) == [False] * 5


def test_success_starts_a_new_row() -> None:
    row = FastFailures()
    assert not row.failed(JobId(1), BROKEN, after_s=0)
    assert not row.failed(JobId(2), BROKEN, after_s=0)
    row.clear()

    assert not row.failed(JobId(3), BROKEN, after_s=0)
