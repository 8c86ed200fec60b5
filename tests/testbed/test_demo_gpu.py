"""The demo on a real GPU, with a fake CUDA library."""

import ctypes
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpuwarden.reporter import Reporter
from testbed.demo import cuda, job_body, main


class FakeCuda:
    """The CUDA library: records calls and kernel durations. Every call succeeds except `fails`."""

    def __init__(self, fails: str | None = None) -> None:
        self.calls: list[str] = []
        self.kernels_s: list[float] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuLaunchKernel":
                duration = ctypes.cast(arguments[-2][0], ctypes.POINTER(ctypes.c_uint64))
                self.kernels_s.append(duration.contents.value / 1e9)
            return 700 if name == self._fails else 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    monkeypatch.setenv(job_body.REAL_GPU, "1")
    cuda.gpu.cache_clear()
    return fake


def test_job_allocates_memory_once_and_is_busy_in_each_step(driver: FakeCuda, tmp_path: Path) -> None:
    with Reporter(tmp_path, worker="w0", queue="gpu") as report:
        for busy_s in (0.0, 0.5, 0.5):
            job_body.launch(report, busy_s=busy_s, memory_bytes=2**20)

    assert driver.calls.count("cuMemAlloc_v2") == 1
    assert driver.kernels_s == [cuda.SLICE_S] * 20
    assert not list(tmp_path.rglob("gpu-work.json"))


def test_spinning_job_starts_one_kernel(driver: FakeCuda, tmp_path: Path) -> None:
    with Reporter(tmp_path, worker="w0", queue="gpu") as report:
        job_body.launch(report, busy_s=job_body.FOREVER_S, memory_bytes=0)

    assert driver.kernels_s == [job_body.FOREVER_S]
    assert "cuMemAlloc_v2" not in driver.calls


def test_failed_driver_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeCuda(fails="cuModuleLoadData"))

    with pytest.raises(cuda.CudaError, match="cuModuleLoadData failed with CUDA error 700"):
        cuda.Gpu()


@pytest.mark.needs_parts
def test_demo_without_a_gpu_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    assert main.main(["--gpu", "nvml"]) == 1
    assert "no NVIDIA GPU can be used: NVML Shared Library Not Found" in capsys.readouterr().out
