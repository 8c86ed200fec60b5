"""The process that asks a driver, here NVIDIA's: what hangs in it, ends it, or cannot be ended."""

import itertools
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporter.model.readings import GpuFigures, GpuReadings
from exporter.sources.gpu.isolated import process as driver_process
from exporter.sources.gpu.isolated import protocol, supervisor
from exporter.sources.gpu.isolated.process import AGE_MAX_S
from exporter.sources.gpu.isolated.protocol import HUNG, DriverError, Question, Xid
from exporter.sources.gpu.isolated.supervisor import Apart, hung_for_s, restart_after_s
from exporter.sources.gpu.nvml import library
from exporter.sources.gpu.nvml.gpus import NvmlGpus
from tests.exporter import builders as build
from tests.exporter.sources.gpu.isolated_drivers import Start, answered, asking, refused, starting
from tests.nvml.driver import Card, Driver, Sample
from tests.waiting import eventually

needs_compiler = pytest.mark.needs_compiler

GIB = 2**30
HANGS = "hang - nvmlDeviceGetCount"
"""Of a call that is about no GPU."""
GAVE_UP = "did not return within"


@pytest.fixture
def start(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(answer_s=…)`: a source whose processes meet the driver to order, and are not left behind."""
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    with starting(library.DRIVER, monkeypatch) as begin:
        yield begin


def is_over(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


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


@needs_compiler
def test_only_the_first_look_that_a_hang_meets_waits_and_none_for_the_processes_after_it(
    start: Start, driver: Driver
) -> None:
    driver.answer(Card())
    source = start(answer_s=4.0, wait_s=(wait_s := 2.0))
    eventually(lambda: answered(source))
    took_s: list[float] = []

    driver.answer(Card(), but=(HANGS,))
    while source.health().killed < 2:
        began_s = time.monotonic()
        refused(source)
        took_s.append(time.monotonic() - began_s)

    assert took_s[0] >= wait_s
    assert max(took_s[1:]) < wait_s


@pytest.mark.parametrize(("failures", "after_s"), [(1, 1.0), (2, 2.0), (4, 8.0), (6, 32.0), (7, 60.0), (10**6, 60.0)])
def test_each_process_in_a_row_that_fails_doubles_the_time_until_the_next(failures: int, after_s: float) -> None:
    assert restart_after_s(failures) == after_s


@needs_compiler
def test_until_the_next_process_is_started_a_look_costs_no_time_and_says_what_was(
    start: Start, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 60.0)
    driver.answer(Card(), but=(HANGS,))
    source = start(answer_s=0.3)
    refused(source)

    took_s = []
    for _ in range(5):  # a busy machine may stop any one of them
        began_s = time.monotonic()
        because = refused(source)
        took_s.append(time.monotonic() - began_s)

    assert GAVE_UP in because
    assert min(took_s) < 0.1
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
    monkeypatch.setattr(driver_process, "sys", SimpleNamespace(executable=str(broken)))

    because = refused(start())

    assert because.endswith("ended by itself, with 1: ModuleNotFoundError: No module named exporter")


@needs_compiler
def test_instead_of_an_answer_that_comes_late_a_newer_one_is_told_by_the_same_process(
    start: Start, driver: Driver
) -> None:
    driver.answer(Card(utilization=10))
    source = start(wait_s=0.3)
    source.read()
    pid = asking(source)
    driver.answer(Card(utilization=20), but=(HANGS,))
    refused(source)

    driver.answer(Card(utilization=20))
    # The late one, and that of the question which is asked as soon as it comes.
    eventually(lambda: source._child is None or source._child._answers.qsize() == 2)
    driver.answer(Card(utilization=30))
    source._wait_s = 20.0

    assert source.read().gpus[0].utilization_ratio == 0.3
    assert asking(source) == pid


STEPS = """
import pathlib, sys, time
steps = pathlib.Path({steps!r})
for n, _ in enumerate(sys.stdin):
    while not (steps / str(n)).exists():
        time.sleep(0.005)
    print((steps / str(n)).read_text(), flush=True)
"""
"""A process that gives its nth answer as soon as that is there."""


class Steps:
    """A source that is asked by such a process: `answers` makes the next answer, of so many GPUs."""

    def __init__(self, folder: Path, *, wait_s: float) -> None:
        self._folder = folder
        self._folder.mkdir()
        self._given = 0
        program = "-c", STEPS.format(steps=str(folder))
        self.source = Apart(driver_process.Driver(who="a driver", program=program), answer_s=20.0, wait_s=wait_s)

    def answers(self, gpus: int) -> None:
        found = build.gpus(*(build.gpu(index) for index in range(gpus)))
        text = self._folder / "next"
        text.write_bytes(protocol.line(found).strip())
        text.rename(self._folder / str(self._given))
        self._given += 1

    def came(self, count: int = 1) -> bool:
        assert self.source._child
        return self.source._child._answers.qsize() >= count


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    steps = Steps(tmp_path / "steps", wait_s=0.2)
    steps.answers(1)
    steps.source.read()
    yield steps
    steps.source.close()


def told(source: Apart) -> int | str:
    """How many GPUs a look has, or why none."""
    try:
        return len(source.read().gpus)
    except DriverError as error:
        return str(error)


NONE_YET = "there is no answer yet from a driver"


def test_a_late_answer_that_has_come_costs_the_next_look_nothing(steps: Steps) -> None:
    missed = told(steps.source)
    steps.answers(2)
    eventually(steps.came)
    steps.answers(3)

    steps.source.ask()
    look = steps.source._look
    eventually(lambda: look and time.monotonic() > look.until_s, "another driver took all of the wait")
    eventually(steps.came)

    assert (missed, told(steps.source)) == (NONE_YET, 3)
    assert steps.source.health().killed == 0


def test_a_driver_that_is_always_late_is_known_by_answers_that_are_young_enough(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [told(steps.source)]
    for number in (2, 3):
        steps.answers(number)
        eventually(steps.came)
        looks += [told(steps.source), told(steps.source)]
    monkeypatch.setattr(driver_process, "AGE_MAX_S", 0.0)
    looks += [told(steps.source)]

    assert looks == [NONE_YET, 2, 2, 3, 3, NONE_YET]


def test_a_late_answer_that_comes_while_the_look_is_made_is_the_looks_and_the_next_is_asked_for(steps: Steps) -> None:
    looks = [told(steps.source)]
    steps.source.ask()
    steps.answers(2)
    steps.source._wait_s = 20.0
    eventually(steps.came)
    looks += [told(steps.source)]
    steps.answers(3)

    eventually(steps.came)
    assert looks == [NONE_YET, 2]


def test_a_driver_that_was_late_once_is_unknown_at_once_when_it_hangs(steps: Steps) -> None:
    looks = [told(steps.source)]
    steps.answers(2)
    steps.answers(3)
    eventually(lambda: steps.came(2), "as the first came late, the next was asked for at once")
    steps.answers(4)
    steps.source._wait_s = 20.0
    looks += [told(steps.source)]
    steps.source._wait_s = 0.2

    assert [*looks, told(steps.source)] == [NONE_YET, 4, NONE_YET]


def test_a_late_answer_that_is_too_old_is_none(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_process, "AGE_MAX_S", 0.1)
    looks = [told(steps.source)]
    steps.answers(2)
    eventually(steps.came)
    looks += [told(steps.source)]
    steps.answers(3)
    steps.answers(4)
    eventually(lambda: steps.came(2))
    steps.answers(5)
    steps.source._wait_s = 20.0

    assert [*looks, told(steps.source)] == [NONE_YET, NONE_YET, 5]


def test_a_late_answer_stands_no_longer_than_the_next_may_take(steps: Steps) -> None:
    told(steps.source)
    steps.answers(2)
    eventually(steps.came)
    stood = told(steps.source)
    steps.source._answer_s = 0.1

    assert stood == 2
    assert eventually(lambda: GAVE_UP in str(told(steps.source)), within_s=AGE_MAX_S / 2)
    assert steps.source.health().killed == 1


def test_of_an_answer_it_is_told_how_long_it_took_and_when_it_was_asked_for_however_many_looks_it_stands_for(
    steps: Steps,
) -> None:
    before_s = time.monotonic()
    told(steps.source)
    waited = steps.source.timing()
    given_s = time.monotonic()
    steps.answers(2)
    eventually(steps.came)
    came_s = time.monotonic()
    late, again = ((told(steps.source), steps.source.timing()) for _ in range(2))

    assert waited
    assert waited.took_s >= 0.2
    assert late == again
    assert late[0] == 2
    assert late[1]
    assert before_s <= late[1].asked_s <= came_s - late[1].took_s
    assert late[1].asked_s + late[1].took_s >= given_s


def test_where_there_is_no_answer_it_is_told_how_long_the_newest_took_or_one_is_waited_for(steps: Steps) -> None:
    steps.answers(2)
    answered_in = (told(steps.source), steps.source.timing())
    os.kill(asking(steps.source), signal.SIGKILL)
    eventually(steps.came)
    ended_in = (told(steps.source), steps.source.timing())
    steps.source._answer_s = 0.3
    killed = eventually(lambda: because if GAVE_UP in (because := str(told(steps.source))) else None)
    killed_in = steps.source.timing()
    refused_in = (told(steps.source), steps.source.timing())

    assert (answered_in[0], ended_in[0]) == (2, "the process that asks a driver was ended by SIGKILL")
    assert ended_in[1] == answered_in[1]
    assert killed_in
    assert killed_in.took_s >= 0.3
    assert refused_in == (killed, killed_in)


def test_a_process_that_was_late_and_has_ended_is_told_at_once(steps: Steps) -> None:
    told(steps.source)
    os.kill(asking(steps.source), signal.SIGKILL)
    eventually(steps.came)
    steps.source._wait_s = 20.0

    began_s = time.monotonic()
    because = told(steps.source)

    took_s = time.monotonic() - began_s
    steps.source._next_start_s = 0.0

    assert because == "the process that asks a driver was ended by SIGKILL"
    assert took_s < 5
    assert told(steps.source) == 1


@pytest.mark.parametrize("thread", ["driver", "driver-stderr"])
def test_where_no_thread_more_can_be_started_no_process_is_left_and_only_this_source_fails(
    thread: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen, start = subprocess.Popen, threading.Thread.start

    def remembered(*args: Any, **given: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*args, **given))
        return started[-1]

    def refused_start(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    steps = Steps(tmp_path / "steps", wait_s=20.0)
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", remembered)
        full.setattr(threading.Thread, "start", refused_start)
        steps.source.ask()
        because = told(steps.source)
    monkeypatch.setattr(supervisor, "restart_after_s", lambda _: 0.0)
    steps.source._next_start_s = 0.0
    steps.answers(1)

    assert because == "the process that asks a driver cannot be started: can't start new thread"
    assert [each.poll() for each in started] == [-signal.SIGKILL]
    assert all(pipe.closed for each in started for pipe in (each.stdin, each.stdout) if pipe)
    assert told(steps.source) == 1
    steps.source.close()


def test_whatever_goes_wrong_as_a_driver_is_asked_is_told_by_reading_it(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Question) -> None:
        raise MemoryError("no memory for a question")

    with monkeypatch.context() as full:
        full.setattr(steps.source._child, "ask", fails)
        steps.source.ask()
    with pytest.raises(MemoryError, match="no memory for a question"):
        steps.source.read()
    steps.answers(2)
    steps.source._wait_s = 20.0

    assert told(steps.source) == 2


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


# GPUs that hang

BOTH = (Card(), Card(uuid="GPU-1"))
ONE_HANGS = "hang 1 nvmlDeviceGetMemoryInfo"


def without_one(source: Apart) -> GpuReadings | None:
    """A look that tells of GPU-0, and leaves out the other."""
    found = answered(source)
    return found if found and [gpu.unknown for gpu in found.gpus] == [None, HUNG] else None


def whole(source: Apart) -> GpuReadings | None:
    """A look at all of them."""
    found = answered(source)
    return found if found and {gpu.unknown for gpu in found.gpus} == {None} else None


@pytest.fixture
def hung(start: Start, driver: Driver) -> Apart:
    """A source of two GPUs, the second of which has just been left out."""
    driver.answer(*BOTH)
    source = start(answer_s=1.5, wait_s=0.5)
    eventually(lambda: whole(source))
    driver.answer(*BOTH, but=(ONE_HANGS,))
    eventually(lambda: without_one(source))
    return source


@needs_compiler
def test_a_gpu_that_hangs_is_told_of_as_hung_and_the_others_as_ever(start: Start, driver: Driver) -> None:
    driver.answer(*BOTH)
    source = start(answer_s=1.5, wait_s=0.5)
    eventually(lambda: whole(source))

    driver.answer(*BOTH, but=(ONE_HANGS,))
    because = eventually(lambda: because if GAVE_UP in (because := refused(source)) else None)
    healthy, left_out = eventually(lambda: without_one(source)).gpus

    assert because.startswith(
        "a call into the NVIDIA driver about GPU 1 did not return within 1.5 s, and its process was killed, and that "
        "GPU is left out until it answers a process of its own"
    )
    assert (healthy.uuid, healthy.utilization_ratio, healthy.processes) == ("GPU-0", 0.0, ())
    assert (left_out.uuid, left_out.index, left_out.name) == ("GPU-1", 1, "Test GPU")
    assert (left_out.utilization_ratio, left_out.memory_used_bytes, left_out.processes) == (None, None, None)
    assert (left_out.lost, dict(left_out.figures.unknown)) == (None, {"gpu": "hung"})


@needs_compiler
def test_while_a_gpu_hangs_it_is_asked_about_by_others_and_no_look_at_the_rest_is_missed(
    hung: Apart, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HUNG_FIRST_S", 0.0)
    hung._hung[1].ask_s = 0.0
    hung._wait_s = 20.0  # a look at the rest takes as long as this busy host needs
    pid, looks = asking(hung), []
    while hung.health().killed < 3:
        looks.append(without_one(hung))
    driver.answer(*BOTH)
    back = eventually(lambda: whole(hung))

    assert all(looks)
    assert [gpu.uuid for gpu in back.gpus] == ["GPU-0", "GPU-1"]
    assert asking(hung) == pid
    assert hung._hung[1].child is None


@pytest.mark.parametrize(("times", "for_s"), [(1, 10.0), (2, 20.0), (5, 160.0), (6, 300.0), (10**6, 300.0)])
def test_each_time_in_a_row_that_a_gpu_hangs_doubles_the_time_until_it_is_asked_about(times: int, for_s: float) -> None:
    assert hung_for_s(times) == for_s


@needs_compiler
def test_a_gpu_that_hangs_again_soon_is_asked_about_later_and_later_and_one_that_was_well_for_long_is_not(
    hung: Apart, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs_again() -> int:
        hung._hung[1].ask_s = 0.0
        driver.answer(*BOTH)
        eventually(lambda: whole(hung))
        driver.answer(*BOTH, but=(ONE_HANGS,))
        eventually(lambda: without_one(hung))
        return hung._hung[1].times

    soon = hangs_again()
    monkeypatch.setattr(supervisor, "HUNG_LONGEST_S", 0.0)

    assert (soon, hangs_again()) == (2, 1)


@needs_compiler
def test_all_gpus_may_hang_one_after_another_and_come_back(hung: Apart, driver: Driver) -> None:
    driver.answer(*BOTH, but=(ONE_HANGS, "hang 0 *"))
    found = eventually(lambda: found if (found := answered(hung)) and found.gpus[0].unknown == HUNG else None)
    driver.answer(*BOTH)
    for each in hung._hung.values():
        each.ask_s = 0.0
    back = eventually(lambda: whole(hung))

    assert [(gpu.uuid, gpu.unknown) for gpu in found.gpus] == [("GPU-0", HUNG), ("GPU-1", HUNG)]
    assert [gpu.uuid for gpu in back.gpus] == ["GPU-0", "GPU-1"]


@needs_compiler
def test_a_gpu_that_hung_before_it_told_who_it_is_goes_by_its_number(start: Start, driver: Driver) -> None:
    driver.answer(*BOTH, but=("hang 1 *",))
    source = start(answer_s=1.5, wait_s=0.5)

    found = eventually(lambda: without_one(source))

    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0", "unidentified-1"]


SLOW = """
import os, pathlib, sys, time
place, folder = int(sys.argv[2]), pathlib.Path({folder!r})
for n, question in enumerate(sys.stdin):
    time.sleep(0.1)
    while 'without' not in question and (folder / 'hangs').exists():
        os.pwrite(place, bytes([2, 0, 0, 0]), 0)
    os.pwrite(place, bytes(4), 0)
    print((folder / ('without' if 'without' in question else 'all')).read_text() + ' ' * (n % 2), flush=True)
"""
"""A process that takes longer for each look than there is between two, and for ever while its second GPU hangs.

No two of its lines that follow each other are the same, as of GPUs that work.
"""


def test_a_gpu_that_hung_and_is_well_comes_back_from_a_driver_of_which_every_look_is_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "HUNG_FIRST_S", 0.0)
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 0.05)
    left_out = replace(build.gpu(1), uuid="unidentified-1", unknown=HUNG, figures=GpuFigures(unknown={"gpu": "hung"}))
    for name, second in (("all", build.gpu(1)), ("without", left_out)):
        (tmp_path / name).write_bytes(protocol.line(build.gpus(build.gpu(0), second)).strip())
    program = "-c", SLOW.format(folder=str(tmp_path))
    source = Apart(driver_process.Driver(who="a driver", program=program, says_where=True), answer_s=1.5, wait_s=0.02)
    names: set[tuple[str, ...]] = set()

    def looks_until(seen: Callable[[Apart], GpuReadings | None]) -> None:
        def look() -> bool:
            found = seen(source)
            names.update([tuple(gpu.uuid for gpu in source._told.gpus)] if source._told else [])
            return found is not None

        eventually(look)

    looks_until(whole)
    (tmp_path / "hangs").touch()
    looks_until(without_one)
    (tmp_path / "hangs").unlink()
    looks_until(whole)
    source.close()

    assert names == {("GPU-0", "GPU-1")}


@needs_compiler
def test_another_driver_knows_of_none_that_hung(hung: Apart, driver: Driver) -> None:
    driver.answer(*BOTH, session=2)

    back = eventually(lambda: whole(hung))

    assert [gpu.uuid for gpu in back.gpus] == ["GPU-0", "GPU-1"]
    assert not hung._left_out()


@needs_compiler
def test_one_that_hung_is_left_out_all_the_same_after_a_look_that_failed(hung: Apart, driver: Driver) -> None:
    hung._hung[1].ask_s = math.inf  # it is not asked about in its turn, however long this takes
    driver.answer(*BOTH, but=("error - nvmlDeviceGetCount 999", ONE_HANGS))
    eventually(lambda: "Unknown Error" in str(told(hung)))
    driver.answer(*BOTH, but=(ONE_HANGS,))

    found = eventually(lambda: answered(hung))

    assert [(gpu.uuid, gpu.unknown) for gpu in found.gpus] == [("GPU-0", None), ("GPU-1", HUNG)]
    assert hung._hung[1].times == 1


@needs_compiler
def test_a_gpu_that_hangs_in_another_driver_too_is_asked_about_later_and_later(hung: Apart, driver: Driver) -> None:
    times, began_s = hung._hung[1].times, time.monotonic()
    driver.answer(*BOTH, but=(ONE_HANGS,), session=2)

    eventually(lambda: without_one(hung) and hung._hung[1].times > times)

    assert hung._hung[1].ask_s > began_s + supervisor.hung_for_s(times + 1)
    assert supervisor.hung_for_s(times + 1) > supervisor.hung_for_s(times)


@needs_compiler
def test_of_the_processes_that_no_signal_ends_a_gpu_has_one(
    hung: Apart, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging: list[subprocess.Popen[bytes]] = []
    hung._hung[1].ask_s = 0.0
    with monkeypatch.context() as unkillable:
        # What hangs in the kernel cannot be had here: these are not sent the signal.
        unkillable.setattr(subprocess.Popen, "kill", lambda process: hanging.append(process))  # noqa: PLW0108 - a method
        eventually(lambda: without_one(hung) and hung.health().abandoned)
        hung._hung[1].ask_s = 0.0
        looks = [without_one(hung) for _ in range(3)]
        asked = hung._hung[1].child
    driver.answer(*BOTH)
    for each in hanging:
        each.kill()
        each.wait()
    back = eventually(lambda: whole(hung))

    assert all(looks)
    assert (asked, len(hanging)) == (None, 1)
    assert [gpu.uuid for gpu in back.gpus] == ["GPU-0", "GPU-1"]


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


ANSWER = protocol.line(GpuReadings(source="test", gpus=()))


@pytest.mark.parametrize(
    ("end", "because"),
    [
        ("raise ValueError('a half\\nbroken')", "ended by itself, with 1: broken"),
        ("os.abort()", "was ended by SIGABRT: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "was ended by SIGBUS: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM"),
        ("break", "ended by itself, with 0"),
    ],
    ids=[
        "by an error of its own",
        "a library aborts",
        "it crashes",
        "a file is cut off",
        "killed",
        "ended",
        "by itself",
    ],
)
def test_why_a_process_that_had_answered_ended_is_told_where_it_knows(end: str, because: str) -> None:
    program = (
        f"import os, signal, sys\nfor n, _ in enumerate(sys.stdin):\n  if n: {end}\n"
        f"  sys.stdout.buffer.write({ANSWER!r})\n  sys.stdout.flush()\n"
        "  print('warning: a library of the driver says', file=sys.stderr, flush=True)"
    )
    source = Apart(driver_process.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)
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
    monkeypatch.setattr(supervisor, "RESTART_FIRST_S", 0.05)
    program = (
        f"import os, sys\nfor _ in sys.stdin:\n  sys.stdout.buffer.write({said})\n  sys.stdout.flush()\n  os.close(1)"
    )
    source = Apart(driver_process.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)

    first = refused(source)
    second = eventually(lambda: refused(source) if time.monotonic() >= source._next_start_s else None)
    source.close()

    known = (
        r"the process that asks a driver answered in no known form \(no line of the process that asks the driver: .*\)"
    )
    assert re.fullmatch(known, first)
    assert re.fullmatch(known, second)
    assert (source.health().killed, source.health().abandoned) == (0, 0)


def test_an_answer_that_says_the_same_is_one_and_the_next_that_says_something_else_another(steps: Steps) -> None:
    looks = []
    for gpus in (2, 2, 3, 2):
        steps.answers(gpus)
        looks.append(steps.source.read())

    assert [len(each.gpus) for each in looks] == [2, 2, 3, 2]
    assert looks[1] is looks[0]


def test_a_line_that_makes_no_sense_is_none_however_often_it_comes_and_what_came_before() -> None:
    lines = ANSWER + b"{}\n" * 2
    program = f"import sys\nfor _ in sys.stdin:\n  sys.stdout.buffer.write({lines!r})\n  sys.stdout.flush()"
    source = Apart(driver_process.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)

    source.read()

    assert "answered in no known form" in refused(source)
    source.close()


def test_an_error_that_is_reported_twice_in_the_same_words_counts_twice() -> None:
    lines = protocol.line(Xid(gpu="GPU-0", code=31)) * 2 + ANSWER
    program = f"import sys\nfor _ in sys.stdin:\n  sys.stdout.buffer.write({lines!r})\n  sys.stdout.flush()"
    source = Apart(driver_process.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)

    source.read()

    assert source.health().xids == {("GPU-0", 31): 2}
    source.close()


# Errors that the driver reports


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


@needs_compiler
def test_a_gpu_of_which_waiting_for_its_reports_hangs_hides_none_of_the_others(start: Start, driver: Driver) -> None:
    numbers = itertools.count(1)
    hangs = "hang 0 nvmlDeviceRegisterEvents"

    def counted(gpu: int, *but: str) -> int | None:
        driver.answer(*BOTH, but=(*but, f"xid {gpu} {next(numbers)} 31"))
        answered(source)
        return source.health().xids.get((f"GPU-{gpu}", 31))

    driver.answer(*BOTH, but=(hangs,))
    source = start()

    assert eventually(lambda: counted(1, hangs))
    found = source.read()
    assert [gpu.figures.unknown.get("xid") for gpu in found.gpus] == ["hung", None]
    assert found.gpus[0].unknown is None
    assert eventually(lambda: counted(0))
