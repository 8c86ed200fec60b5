"""A runtime folder with real workers, an exporter's log, and a fake NVIDIA driver."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from deploy.standalone import debian_packages
from exporter import change_log, sampler, source_runner
from tests.nvml import driver as nvidia
from tests.waiting import eventually

WORKER = """
import sys
from pathlib import Path
from gpuwarden.job import JobClass
from gpuwarden.reporter import Reporter
directory, worker, subdirectory, job_id = sys.argv[1:]
with Reporter(Path(directory), worker=worker, queue="gpu", subdirectory=subdirectory, heartbeat_s=0.05) as reporter:
    if job_id:
        reporter.start_job(job_id=int(job_id), attempt=1, job_class=JobClass.GPU, model="sdxl", budget_s=8100.0,
                           stall_timeout_s=120.0)
    print(reporter.incarnation, flush=True)
    if sys.stdin.readline():
        sum(range(10**15))  # one call that holds the interpreter lock, so that the heartbeat thread does not run
"""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker in a separate process; it ends cleanly when its standard input is closed."""

    process: subprocess.Popen[str]
    incarnation: str
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process is stopped. It stays alive."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path("/proc") / str(self.pid) / "stat"
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def burn(self) -> None:
        """Compute until it is killed, in a call that holds the interpreter lock."""
        assert self.process.stdin
        self.process.stdin.write("burn\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        self.process.communicate()


StartWorker = Callable[..., Worker]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """$GPUWARDEN_RUNTIME_DIR of a host called box-1."""
    directory = tmp_path / "gpuwarden"
    directory.mkdir()
    (directory / "host").write_text("box-1\n")
    return directory


@pytest.fixture
def start_worker(house: Path) -> Iterator[StartWorker]:
    """Start a worker with the real reporter: `start_worker("w0", folder="w0", job_id=7, env={...})`."""
    started: list[Worker] = []

    def start(
        name: str, *, folder: str | None = None, job_id: int | None = None, env: dict[str, str] | None = None
    ) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(house), name, folder or name, str(job_id or "")],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        worker = Worker(process=process, incarnation=process.stdout.readline().strip(), folder=house / (folder or name))
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.kill()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """The log of the sampler."""
    capture = LogCapture()
    for module in (change_log, sampler, source_runner):
        monkeypatch.setattr(module, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path: the path of a Unix socket has at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVIDIA library, compiled once."""
    try:
        return nvidia.build(tmp_path_factory.mktemp("nvml"))
    except debian_packages.PartMissing as missing:
        pytest.skip(f"no C compiler: {missing}")


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> nvidia.Driver:
    """An NVIDIA driver for a process with its environment."""
    return nvidia.Driver(nvml_library, tmp_path / "nvml.script")


@pytest.fixture
def driver_here(driver: nvidia.Driver, monkeypatch: pytest.MonkeyPatch) -> nvidia.Driver:
    """The same for this process: dlopen(3) finds a loaded library by its name."""
    ctypes.CDLL(str(driver.library))
    monkeypatch.setenv("NVML_SCRIPT", str(driver.script))
    return driver
