"""The process that asks a driver, here NVIDIA's: what hangs in it, ends it, or cannot be ended."""

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporter.readings import GpuReadings
from exporter.sources import driver_parent, driver_wire, nvml_library
from exporter.sources.driver_parent import Apart, restart_after_s
from exporter.sources.driver_wire import DriverError
from exporter.sources.nvml import NvmlGpus
from tests.nvml.driver import Card, Driver, Sample
from tests.waiting import eventually

needs_compiler = pytest.mark.needs_compiler

GIB = 2**30
RATES = "nvmlDeviceGetUtilizationRates"
HANGS = f"hang 0 {RATES}"
GAVE_UP = "did not return within"


Start = Callable[..., Apart]


@pytest.fixture
def start(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(answer_s=…)`: a source whose processes meet the driver to order, and are not left behind."""
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(driver_parent, "RESTART_FIRST_S", 0.05)
    started: list[Apart] = []

    def begin(*, answer_s: float = 20.0, wait_s: float = 20.0) -> Apart:
        started.append(Apart(nvml_library.DRIVER, answer_s=answer_s, wait_s=wait_s))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def asking(source: Apart) -> int:
    """The pid of the process that asks now."""
    assert source._child
    return source._child.process.pid


def is_over(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def refused(source: Apart) -> str:
    with pytest.raises(DriverError) as error:
        source.read()
    return str(error.value)


def answered(source: Apart) -> GpuReadings | None:
    try:
        return source.read()
    except DriverError:
        return None


def without_xids(found: GpuReadings) -> GpuReadings:
    """The same, by a source that waits for no reports."""
    return replace(
        found,
        gpus=tuple(
            replace(
                gpu,
                xids_watched=False,
                figures=replace(gpu.figures, unknown={k: v for k, v in gpu.figures.unknown.items() if k != "xid"}),
            )
            for gpu in found.gpus
        ),
    )


# What is told


@needs_compiler
@pytest.mark.usefixtures("driver_here")
def test_the_answer_is_that_of_the_driver(start: Start, driver: Driver) -> None:
    driver.answer(
        Card(utilization=40, compute={7: GIB, 8: GIB}, figures=("nvmlDeviceGetTemperature 0 61",)),
        Card(uuid="GPU-1"),
        but=("error 1 * 15",),
    )
    source, here = start(), NvmlGpus()
    assert without_xids(source.read()) == here.read()
    driver.answer(
        Card(utilization=40, compute={7: GIB, 8: GIB}, samples=(Sample(pid=7, timestamp_us=2000, sm=40),)),
        Card(uuid="GPU-1"),
    )

    assert without_xids(source.read()) == here.read()
    assert source.health().killed == 0


@needs_compiler
def test_a_driver_that_refuses_is_told_in_its_words_by_the_same_process(start: Start, driver: Driver) -> None:
    driver.answer(Card(), but=("error - nvmlInitWithFlags 9",))
    source = start()

    assert refused(source) == "the NVIDIA driver does not answer: Driver Not Loaded"
    pid = asking(source)
    driver.answer(Card())

    assert [gpu.uuid for gpu in source.read().gpus] == ["GPU-0"]
    assert asking(source) == pid


# Calls that hang


@needs_compiler
def test_a_call_that_hangs_costs_looks_of_a_bounded_time_then_its_process(start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start(answer_s=2.0, wait_s=0.2)
    eventually(lambda: answered(source))
    pid = asking(source)

    driver.answer(Card(), but=(HANGS,))
    began_s = time.monotonic()
    first = refused(source)
    first_s = time.monotonic() - began_s
    last = eventually(lambda: because if GAVE_UP in (because := refused(source)) else None)

    assert first == "there is no answer yet from the NVIDIA driver"
    assert 0.2 <= first_s < 2.0
    assert last.startswith("a call into the NVIDIA driver did not return within 2 s, and its process was killed")
    assert is_over(pid)
    assert (source.health().killed, source.health().abandoned) == (1, 0)


@needs_compiler
def test_after_a_hang_other_processes_ask_until_one_is_answered(start: Start, driver: Driver) -> None:
    driver.answer(Card(), but=(HANGS,))
    source = start(answer_s=1.5, wait_s=1.5)
    eventually(lambda: answered(source) or source.health().killed == 2)
    failures = source._failures

    driver.answer(Card())
    found = eventually(lambda: answered(source))

    assert failures == 2
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0"]
    assert source._failures == 0


@pytest.mark.parametrize(("failures", "after_s"), [(1, 1.0), (2, 2.0), (4, 8.0), (6, 32.0), (7, 60.0), (10**6, 60.0)])
def test_each_process_in_a_row_that_fails_doubles_the_time_until_the_next(failures: int, after_s: float) -> None:
    assert restart_after_s(failures) == after_s


@needs_compiler
def test_until_the_next_process_is_started_a_look_costs_no_time_and_says_what_was(
    start: Start, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_parent, "RESTART_FIRST_S", 60.0)
    driver.answer(Card(), but=(HANGS,))
    source = start(answer_s=0.3)
    refused(source)

    began_s = time.monotonic()
    because = refused(source)

    assert GAVE_UP in because
    assert time.monotonic() - began_s < 0.1
    assert source.health().killed == 1


@needs_compiler
def test_a_process_that_cannot_start_is_told_with_what_it_said_last(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x >&2\necho >&2\n"
        "echo 'ModuleNotFoundError: No module named exporter' >&2\nexit 1\n"
    )
    broken.chmod(0o700)
    monkeypatch.setattr(driver_parent, "sys", SimpleNamespace(executable=str(broken)))

    because = refused(start())

    assert because.endswith("ended by itself, with 1: ModuleNotFoundError: No module named exporter")


@needs_compiler
def test_an_answer_that_comes_late_is_dropped_and_its_process_is_kept(start: Start, driver: Driver) -> None:
    driver.answer(Card(utilization=10))
    source = start(wait_s=0.3)
    source.read()
    pid = asking(source)
    driver.answer(Card(utilization=20), but=(HANGS,))
    refused(source)

    driver.answer(Card(utilization=20))
    eventually(lambda: source._child is None or not source._child._answers.empty())
    driver.answer(Card(utilization=30))
    source._wait_s = 20.0

    assert source.read().gpus[0].utilization_ratio == 0.3
    assert asking(source) == pid


@needs_compiler
def test_processes_that_no_signal_ends_are_left_behind_and_no_more_than_three(
    start: Start, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging: list[subprocess.Popen[bytes]] = []
    driver.answer(Card(), but=(HANGS,))
    source = start(answer_s=0.3, wait_s=0.3)

    with monkeypatch.context() as unkillable:
        # What hangs in the kernel cannot be had here: these are not sent the signal.
        unkillable.setattr(subprocess.Popen, "kill", lambda process: hanging.append(process))  # noqa: PLW0108 - a method
        enough = eventually(lambda: because if "reboot the host" in (because := refused(source)) else None)
    told = source.health()
    for each in hanging:
        each.kill()
        each.wait()
    driver.answer(Card())
    source._answer_s = 20.0

    assert enough.startswith("3 processes hang in the NVIDIA driver and cannot be killed, so no other is started")
    assert (told.killed, told.abandoned, len(set(hanging))) == (3, 3, 3)
    assert eventually(lambda: answered(source))
    assert source.health().abandoned == 0


# Processes that end


@needs_compiler
def test_a_process_that_is_ended_by_somebody_is_replaced(start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    os.kill(pid, signal.SIGKILL)
    because = refused(source)

    assert because == "the process that asks the NVIDIA driver was ended by SIGKILL"
    assert eventually(lambda: answered(source))
    assert asking(source) != pid
    assert source.health().killed == 0


@needs_compiler
def test_a_library_that_was_replaced_is_loaded_by_another_process(start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    driver.answer(Card(), but=("error - * 18",))
    because = refused(source)
    driver.answer(Card())

    assert "its library and its kernel module are of two versions" in because
    assert eventually(lambda: answered(source))
    assert asking(source) != pid


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_exporter_is_left_to_the_exporter(number: int, start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    os.kill(pid, number)

    assert source.read()
    assert asking(source) == pid
    source.close()
    assert is_over(pid)


ANSWER = driver_wire.line(GpuReadings(source="test", gpus=()))


@pytest.mark.parametrize(
    ("end", "because"),
    [
        ("raise ValueError('a half\\nbroken')", "ended by itself, with 1: broken"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
    ids=["by an error of its own", "by somebody"],
)
def test_why_a_process_that_had_answered_ended_is_told_where_it_knows(end: str, because: str) -> None:
    program = (
        f"import os, sys\nfor n, _ in enumerate(sys.stdin):\n  if n: {end}\n  sys.stdout.buffer.write({ANSWER!r})\n"
        "  sys.stdout.flush()\n  print('warning: a library of the driver says', file=sys.stderr, flush=True)"
    )
    source = Apart(driver_parent.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)
    source.read()

    assert refused(source) == f"the process that asks a driver {because}"
    source.close()


GARBAGE = {
    "what a driver prints": "b'amdgpu: hello\\n'",
    "half a line": 'b\'{"gpus":{"source":\'',
    "no GPU": 'b\'{"gpus":{"source":"drm","gpus":[{}]}}\\n\'',
    "a line without an end": "b' ' * (9 * 2**20)",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_costs_the_process(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_parent, "RESTART_FIRST_S", 0.05)
    program = (
        f"import os, sys\nfor _ in sys.stdin:\n  sys.stdout.buffer.write({said})\n  sys.stdout.flush()\n  os.close(1)"
    )
    source = Apart(driver_parent.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)

    first = refused(source)
    second = eventually(lambda: refused(source) if time.monotonic() >= source._next_start_s else None)
    source.close()

    known = (
        r"the process that asks a driver answered in no known form \(no line of the process that asks the driver: .*\)"
    )
    assert re.fullmatch(known, first)
    assert re.fullmatch(known, second)
    assert (source.health().killed, source.health().abandoned) == (0, 0)


# Errors that the driver reports

BOTH = (Card(), Card(uuid="GPU-1"))


def watched(source: Apart) -> list[str]:
    """The GPUs whose reports are waited for."""
    found = answered(source)
    return [gpu.uuid for gpu in found.gpus if gpu.xids_watched] if found else []


@pytest.fixture
def watching(start: Start, driver: Driver) -> Apart:
    """A source that waits for the reports of GPU-0 and GPU-1; one came before."""
    driver.answer(*BOTH, but=("xid 0 1 13",))
    source = start()
    eventually(lambda: watched(source) == ["GPU-0", "GPU-1"])
    return source


@needs_compiler
def test_errors_are_counted_by_gpu_and_number_from_when_they_are_waited_for(watching: Apart, driver: Driver) -> None:
    driver.answer(*BOTH, but=("xid 0 1 13", "xid 0 2 31", "xid 1 3 79", "xid 0 4 31", "xid 0 5 48"))

    assert eventually(lambda: watching.health().xids if len(watching.health().xids) == 3 else None) == {
        ("GPU-0", 31): 2,
        ("GPU-1", 79): 1,
        ("GPU-0", 48): 1,
    }


@needs_compiler
def test_a_number_that_is_none_of_nvidias_is_counted_as_0(watching: Apart, driver: Driver) -> None:
    driver.answer(*BOTH, but=("xid 0 2 1000", "xid 0 3 -"))

    assert eventually(lambda: watching.health().xids.get(("GPU-0", 0)) == 2)


@needs_compiler
def test_an_error_that_makes_the_driver_hang_is_told_all_the_same(watching: Apart, driver: Driver) -> None:
    watching._wait_s = 0.1
    driver.answer(*BOTH, but=(HANGS,))
    refused(watching)

    driver.answer(*BOTH, but=(HANGS, "xid 0 2 119"))

    assert eventually(lambda: watching.health().xids) == {("GPU-0", 119): 1}
    assert refused(watching) == "there is no answer yet from the NVIDIA driver"


@needs_compiler
def test_a_gpu_that_is_lost_hides_no_report_about_the_others(watching: Apart, driver: Driver) -> None:
    numbers = itertools.count(2)

    def counted(gpu: int, *but: str) -> int | None:
        """How often such an error was counted, which is reported again and again: the wait may just begin anew."""
        driver.answer(*BOTH, but=(*but, f"xid {gpu} {next(numbers)} 31"))
        answered(watching)
        return watching.health().xids.get((f"GPU-{gpu}", 31))

    eventually(lambda: watched(watching) == ["GPU-1"] if counted(0, "error 0 * 15") is None else None)
    assert eventually(lambda: counted(1, "error 0 * 15"))
    assert ("GPU-0", 31) not in watching.health().xids
    assert eventually(lambda: counted(0))


@needs_compiler
def test_counts_outlive_the_driver_and_the_process(watching: Apart, driver: Driver) -> None:
    driver.answer(*BOTH, but=("xid 0 2 31",))
    eventually(lambda: watching.health().xids)

    driver.answer(*BOTH, session=2)
    eventually(lambda: not watched(watching))
    eventually(lambda: watched(watching) == ["GPU-0", "GPU-1"])
    driver.answer(*BOTH, but=("xid 0 3 31",), session=2)
    eventually(lambda: watching.health().xids.get(("GPU-0", 31)) == 2)
    os.kill(asking(watching), signal.SIGKILL)
    eventually(lambda: watched(watching) == ["GPU-0", "GPU-1"])
    driver.answer(*BOTH, but=("xid 0 4 31",), session=2)

    assert eventually(lambda: watching.health().xids.get(("GPU-0", 31)) == 3)


@needs_compiler
@pytest.mark.parametrize(("code", "reason"), [(3, "not_supported"), (4, "no_permission"), (999, "failed")])
def test_a_gpu_whose_reports_cannot_be_had_says_why_and_the_others_are_waited_for(
    code: int, reason: str, start: Start, driver: Driver
) -> None:
    driver.answer(*BOTH, but=(f"error 0 nvmlDeviceRegisterEvents {code}",))
    source = start()

    eventually(lambda: watched(source) == ["GPU-1"])

    found = source.read()
    assert found.gpus[0].figures.unknown["xid"] == reason
    assert "xid" not in found.gpus[1].figures.unknown
