"""An isolated driver process: what hangs in it, ends it, or cannot be ended.

The rules for waiting, restarts and hung GPUs use a fake process and a fake clock. Tests with a real process, or a
library that hangs like NVIDIA's, follow.
"""

import io
import itertools
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporter.model.gpu import Gpu, GpuFigures, GpuReadings
from exporter.model.snapshot import Timing
from exporter.sources.gpu.isolated import process as driver_process
from exporter.sources.gpu.isolated import processes, protocol
from exporter.sources.gpu.isolated.hung_gpus import HUNG_LONGEST_S, hung_for_s
from exporter.sources.gpu.isolated.process import Answer, ProcessExit
from exporter.sources.gpu.isolated.processes import restart_after_s
from exporter.sources.gpu.isolated.protocol import HUNG, DriverError, Failed, Question, Xid
from exporter.sources.gpu.isolated.supervisor import IsolatedDriver
from exporter.sources.gpu.nvml import library
from exporter.sources.gpu.nvml.gpus import NvmlGpus
from tests.exporter import builders as build
from tests.exporter.sources.gpu.isolated_drivers import Start, answered, asking, refused, starting
from tests.nvml.driver import Card, Driver, Sample
from tests.waiting import eventually

needs_compiler = pytest.mark.needs_compiler

GIB = 2**30
HANGS = "hang - nvmlDeviceGetCount"
"""A call which is about no GPU."""
GAVE_UP = "did not return within"
NONE_YET = "no answer yet from a driver"

ANSWER_S, WAIT_S, SAMPLE_S = 10.0, 2.0, 1.0


# Rules, with a fake process and a fake clock


@dataclass
class FakeDriver:
    """A driver with some GPUs, its processes, and the clock of both."""

    gpus: int = 2
    takes_s: float = 0.01
    hangs: bool = False
    """Hangs in a call which is about no GPU."""
    hangs_in: set[int] = field(default_factory=set)
    fails: Failed | None = None
    unkillable: bool = False
    refuses: OSError | None = None
    now_s: float = 1000.0
    started: list["FakeProcess"] = field(default_factory=list)
    started_s: list[float] = field(default_factory=list)

    def start(self, _: driver_process.Driver, __: "queue.SimpleQueue[Xid]") -> "FakeProcess":
        if self.refuses:
            raise self.refuses
        self.started.append(FakeProcess(self))
        self.started_s.append(self.now_s)
        return self.started[-1]

    def source(self) -> IsolatedDriver:
        driver = driver_process.Driver(who="a driver", program=())
        return IsolatedDriver(driver, answer_s=ANSWER_S, wait_s=WAIT_S, start=self.start, now=lambda: self.now_s)

    def sample(self, source: IsolatedDriver) -> GpuReadings | str:
        """The result of the next sample or the reason for its failure, after one second."""
        self.now_s += SAMPLE_S
        try:
            return source.read()
        except DriverError as error:
            return str(error)

    def until(self, source: IsolatedDriver, unknown: dict[str, str | None]) -> None:
        """Sample until the GPUs have these reasons for being unknown."""
        for _ in range(1000):
            found = self.sample(source)
            if isinstance(found, GpuReadings) and {gpu.uuid: gpu.unknown for gpu in found.gpus} == unknown:
                return
        pytest.fail(f"never {unknown}")


class FakeProcess:
    """Answers as the driver is at the question."""

    def __init__(self, driver: FakeDriver) -> None:
        self.asked_s: float | None = None
        self.asks_about: int | None = None
        self.asked: list[Question] = []
        self.ended = False
        self._driver = driver
        self._answer: tuple[float, GpuReadings | Failed | ProcessExit] | None = None
        self._known: set[int] = set()

    def ask(self, question: Question) -> None:
        assert self.asked_s is None, "only one question at a time"
        self.asked_s = self._driver.now_s
        self.asked.append(question)
        answer = self._driver.fails or self._readings(question)
        if answer is not None and self._answer is None:
            self._answer = self.asked_s + self._driver.takes_s, answer

    def ends(self, how: str) -> None:
        self._answer = self._driver.now_s, ProcessExit(how=how)

    def answer(self, within_s: float) -> Answer | None:
        until_s = self._driver.now_s + max(0.0, within_s)
        if self._answer is None or self._answer[0] > until_s:
            self._driver.now_s = until_s
            return None
        (came_s, answer), self._answer = self._answer, None
        self._driver.now_s = max(self._driver.now_s, came_s)
        asked_s, self.asked_s = self.asked_s, None
        return Answer(
            message=answer, timing=None if asked_s is None else Timing(asked_s=asked_s, took_s=came_s - asked_s)
        )

    def end(self) -> bool:
        self.ended = not self._driver.unkillable
        return self.ended

    def is_over(self, *, within_s: float) -> bool:
        del within_s
        return self.ended

    def _readings(self, question: Question) -> GpuReadings | None:
        if self._driver.hangs:
            return None
        found: list[Gpu] = []
        for place in range(self._driver.gpus):
            if question.is_about(place):
                self.asks_about = place
                if place in self._driver.hangs_in:
                    return None
                self._known.add(place)
                found.append(build.gpu(place))
            elif place in question.without:
                uuid = f"GPU-{place}" if place in self._known else f"unidentified-{place}"
                figures = GpuFigures(unknown={"gpu": "hung"})
                found.append(replace(build.gpu(place), uuid=uuid, name="", unknown=HUNG, figures=figures))
        self.asks_about = None
        return build.gpus(*found)


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


def single_questions(fake: FakeDriver) -> list[Question]:
    """The questions about a single GPU."""
    return [question for process in fake.started for question in process.asked if question.only is not None]


def test_one_process_answers_sample_after_sample(fake: FakeDriver) -> None:
    source = fake.source()

    samples = [fake.sample(source) for _ in range(3)]

    assert samples == [build.gpus(build.gpu(0), build.gpu(1))] * 3
    assert len(fake.started) == 1
    timing = source.timing()
    assert timing
    assert (timing.asked_s, timing.took_s) == pytest.approx((fake.now_s - fake.takes_s, fake.takes_s))


def test_first_sample_waits_for_the_answer_timeout(fake: FakeDriver) -> None:
    fake.takes_s = ANSWER_S - 1

    assert isinstance(fake.sample(fake.source()), GpuReadings)


def test_late_answer_is_used_by_the_first_sample_that_finds_it(fake: FakeDriver) -> None:
    source = fake.source()
    fake.sample(source)
    fake.takes_s = 4.5
    samples, took_s, timings = [], [], []
    for _ in range(5):
        began_s = fake.now_s + SAMPLE_S
        samples.append(fake.sample(source))
        took_s.append(fake.now_s - began_s)
        timings.append(source.timing())

    assert [isinstance(sample, GpuReadings) for sample in samples] == [False, False, False, True, False]
    assert samples[0] == NONE_YET
    assert took_s == [WAIT_S, 0.0, 0.0, 0.0, WAIT_S], "only a sample with a question waits"
    assert [timing and timing.took_s for timing in timings] == [2.0, 3.0, 4.0, 4.5, 2.0]
    assert (len(fake.started), source.health().killed) == (1, 0)


def test_several_drivers_are_waited_for_in_parallel(fake: FakeDriver) -> None:
    source = fake.source()
    fake.sample(source)
    fake.hangs = True

    source.ask()
    fake.now_s += 1.5  # Another driver used the whole wait.
    began_s = fake.now_s
    with pytest.raises(DriverError):
        source.read()

    assert fake.now_s - began_s == WAIT_S - 1.5


def test_hanging_call_kills_its_process_at_the_deadline_and_another_starts_later(fake: FakeDriver) -> None:
    source = fake.source()
    fake.sample(source)
    fake.hangs = True
    samples = [fake.sample(source) for _ in range(9)]
    killed = (source.health().killed, fake.started[0].ended)
    fake.hangs = False
    back = fake.sample(source)

    assert set(samples[:8]) == {NONE_YET}
    assert str(samples[8]).startswith("a call into a driver did not return within 10 s, and its process was killed: ")
    assert killed == (1, True)
    assert [isinstance(each, GpuReadings) for each in (back, fake.sample(source))] == [False, True]
    assert fake.started_s[1] - fake.started_s[0] == pytest.approx(SAMPLE_S * 10 + WAIT_S, abs=0.1)


def test_sample_before_the_next_process_fails_at_once_with_the_last_reason(fake: FakeDriver) -> None:
    source = fake.source()
    fake.hangs = True
    message = fake.sample(source)
    fake.now_s -= SAMPLE_S

    began_s = fake.now_s
    again = fake.sample(source)

    assert GAVE_UP in str(message)
    assert (again, fake.now_s - began_s) == (message, SAMPLE_S)
    assert len(fake.started) == 1


@pytest.mark.parametrize(("failures", "after_s"), [(1, 1.0), (2, 2.0), (4, 8.0), (6, 32.0), (7, 60.0), (10**6, 60.0)])
def test_each_failed_process_in_a_row_doubles_the_restart_delay(failures: int, after_s: float) -> None:
    assert restart_after_s(failures) == after_s


def test_restart_delay_doubles_until_a_process_has_answered(fake: FakeDriver) -> None:
    source = fake.source()
    fake.hangs = True
    while len(fake.started) < 5:
        fake.sample(source)
    gaps_s = [after - before for before, after in itertools.pairwise(fake.started_s)]
    fake.hangs = False
    while not isinstance(fake.sample(source), GpuReadings):
        pass
    fake.started[-1].ends("was ended by SIGKILL")
    ended = fake.sample(source)
    ended_s = fake.now_s
    while not isinstance(fake.sample(source), GpuReadings):
        pass

    assert [each - ANSWER_S for each in gaps_s] == [pytest.approx(after, abs=1.5 * SAMPLE_S) for after in (1, 2, 4, 8)]
    assert ended == "the process for a driver was ended by SIGKILL"
    assert fake.started_s[-1] - ended_s == SAMPLE_S


def test_ended_process_is_reported_at_once_with_the_time_of_the_last_answer(fake: FakeDriver) -> None:
    source = fake.source()
    fake.sample(source)
    source.ask()
    fake.started[0].ends("was ended by SIGKILL")
    fake.started[0].asked_s = None
    before = source.timing()

    began_s = fake.now_s
    with pytest.raises(DriverError, match="the process for a driver was ended by SIGKILL"):
        source.read()

    assert (source.timing(), fake.now_s) == (before, began_s)
    assert source.health().killed == 0


def test_failed_answer_keeps_the_process_unless_another_may_succeed(fake: FakeDriver) -> None:
    source = fake.source()
    fake.fails = Failed(message="Driver Not Loaded")
    first = fake.sample(source)
    fake.fails = Failed(message="of two versions", over=True)
    second = fake.sample(source)
    fake.fails = None

    assert (first, second) == ("Driver Not Loaded", "of two versions")
    assert isinstance(fake.sample(source), GpuReadings)
    assert (len(fake.started), fake.started[0].ended) == (2, True)


def test_at_most_three_unkillable_processes_are_abandoned(fake: FakeDriver) -> None:
    source = fake.source()
    fake.hangs = fake.unkillable = True
    while "reboot the host" not in (enough := str(fake.sample(source))):
        assert fake.now_s < 2000
    health = source.health()
    fake.hangs = fake.unkillable = False
    for process in fake.started:
        process.ended = True

    assert enough.startswith("3 processes hang in a driver and cannot be killed, so no other is started")
    assert (health.killed, health.abandoned, len(fake.started)) == (3, 3, 3)
    fake.until(source, {"GPU-0": None, "GPU-1": None})
    assert source.health().abandoned == 0


def test_process_that_cannot_start_is_reported_and_retried(fake: FakeDriver) -> None:
    source = fake.source()
    fake.refuses = OSError("Cannot allocate memory")
    message = fake.sample(source)
    fake.refuses = None

    assert message == "the process for a driver cannot be started: Cannot allocate memory"
    fake.until(source, {"GPU-0": None, "GPU-1": None})


def test_error_of_a_question_is_raised_by_the_read(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake.source()
    fake.sample(source)

    def fails(_: Question) -> None:
        raise MemoryError("no memory for a question")

    with monkeypatch.context() as full:
        full.setattr(fake.started[0], "ask", fails)
        source.ask()
    with pytest.raises(MemoryError, match="no memory for a question"):
        source.read()

    assert isinstance(fake.sample(source), GpuReadings)


# A GPU that hangs, with the same


def hung(fake: FakeDriver) -> IsolatedDriver:
    """A source of two GPUs, and the second has just been skipped."""
    source = fake.source()
    fake.sample(source)
    fake.hangs_in = {1}
    fake.until(source, {"GPU-0": None, "GPU-1": HUNG})
    return source


def test_hung_gpu_costs_one_deadline_and_is_skipped_with_its_name(fake: FakeDriver) -> None:
    source = fake.source()
    fake.sample(source)
    fake.hangs_in = {1}
    samples = []
    while not isinstance(sample := fake.sample(source), GpuReadings):
        samples.append(sample)

    assert set(samples[:-1]) == {NONE_YET}
    assert str(samples[-1]).startswith(
        "a call into a driver about GPU 1 did not return within 10 s, and its process was killed, and that GPU is "
        "skipped until it answers a separate process"
    )
    assert len(samples) == 9
    assert [(gpu.uuid, gpu.name, gpu.unknown) for gpu in sample.gpus] == [
        ("GPU-0", build.gpu(0).name, None),
        ("GPU-1", build.gpu(1).name, HUNG),
    ]
    assert fake.started[1].asked[0] == Question(without=frozenset({1}))


def test_separate_processes_try_a_hung_gpu_and_no_sample_of_the_others_is_lost(fake: FakeDriver) -> None:
    source = hung(fake)
    samples = []
    while source.health().killed < 4:
        samples.append(fake.sample(source))
    fake.hangs_in = set()
    while len(single_questions(fake)) < 4:
        samples.append(fake.sample(source))
    samples += [fake.sample(source), fake.sample(source)]

    assert all(isinstance(sample, GpuReadings) for sample in samples)
    assert single_questions(fake) == [Question(only=1)] * 4
    assert samples[-1] == build.gpus(build.gpu(0), build.gpu(1))
    assert [process.ended for process in fake.started] == [True, False, True, True, True, True]


@pytest.mark.parametrize(("times", "for_s"), [(1, 10.0), (2, 20.0), (5, 160.0), (6, 300.0), (10**6, 300.0)])
def test_each_hang_in_a_row_doubles_the_retry_delay_of_a_gpu(times: int, for_s: float) -> None:
    assert hung_for_s(times) == for_s


def test_gpu_that_still_hangs_is_retried_with_growing_delays(fake: FakeDriver) -> None:
    source = hung(fake)
    while len(single_questions(fake)) < 5:
        fake.sample(source)
    asked_s = fake.started_s[2:]
    gaps_s = [after - before - ANSWER_S for before, after in itertools.pairwise(asked_s)]

    assert gaps_s == [pytest.approx(hung_for_s(times), abs=2 * SAMPLE_S) for times in (2, 3, 4, 5)]


@pytest.mark.parametrize(("well_s", "for_s"), [(5.0, hung_for_s(2)), (HUNG_LONGEST_S + 5, hung_for_s(1))])
def test_retry_delay_restarts_after_a_long_healthy_time(fake: FakeDriver, well_s: float, for_s: float) -> None:
    source = hung(fake)
    fake.hangs_in = set()
    fake.until(source, {"GPU-0": None, "GPU-1": None})
    fake.now_s += well_s
    fake.hangs_in = {1}
    fake.until(source, {"GPU-0": None, "GPU-1": HUNG})
    began_s, before = fake.now_s, len(single_questions(fake))
    while len(single_questions(fake)) == before:
        fake.sample(source)

    assert fake.now_s - began_s == pytest.approx(for_s, abs=2 * SAMPLE_S)


def test_all_gpus_may_hang_in_sequence_and_return(fake: FakeDriver) -> None:
    source = hung(fake)
    fake.hangs_in = {0, 1}
    fake.until(source, {"GPU-0": HUNG, "GPU-1": HUNG})
    fake.hangs_in = set()

    fake.until(source, {"GPU-0": None, "GPU-1": None})


def test_gpu_that_hung_before_its_uuid_was_read_has_its_index(fake: FakeDriver) -> None:
    source = fake.source()
    fake.hangs_in = {1}

    fake.until(source, {"GPU-0": None, "unidentified-1": HUNG})


def test_reloaded_driver_is_read_with_every_gpu_at_once(fake: FakeDriver) -> None:
    source = hung(fake)
    fake.hangs_in = set()
    fake.fails = Failed(message="reloaded", reloaded=True)
    message = fake.sample(source)
    fake.fails = None

    assert message == "reloaded"
    assert fake.sample(source) == build.gpus(build.gpu(0), build.gpu(1))
    assert single_questions(fake) == []


def test_gpu_that_hangs_in_the_reloaded_driver_has_a_longer_delay(fake: FakeDriver) -> None:
    source = hung(fake)
    fake.fails = Failed(message="reloaded", reloaded=True)
    fake.sample(source)
    fake.fails = None
    fake.until(source, {"GPU-0": None, "unidentified-1": HUNG})
    began_s = fake.now_s
    while not single_questions(fake):
        fake.sample(source)

    assert fake.now_s - began_s == pytest.approx(hung_for_s(2), abs=2 * SAMPLE_S)


def test_failed_sample_does_not_end_the_skip_of_a_hung_gpu(fake: FakeDriver) -> None:
    source = hung(fake)
    fake.fails = Failed(message="Unknown Error")
    message = fake.sample(source)
    fake.fails = None
    found = fake.sample(source)

    assert message == "Unknown Error"
    assert isinstance(found, GpuReadings)
    assert [gpu.unknown for gpu in found.gpus] == [None, HUNG]


def test_gpu_has_at_most_one_unkillable_process(fake: FakeDriver) -> None:
    source = hung(fake)
    fake.unkillable = True
    while not source.health().abandoned:
        fake.sample(source)
    asked = len(single_questions(fake))
    samples = [fake.sample(source) for _ in range(1000)]
    fake.unkillable, fake.hangs_in = False, set()
    for process in fake.started[2:]:
        process.ended = True

    assert all(isinstance(sample, GpuReadings) for sample in samples)
    assert (asked, len(fake.started)) == (1, 3)
    fake.until(source, {"GPU-0": None, "GPU-1": None})


def test_only_one_hung_gpu_is_tried_at_a_time(fake: FakeDriver) -> None:
    fake.gpus = 4
    source = fake.source()
    fake.sample(source)
    fake.hangs_in = {0, 1, 2, 3}
    at_once = []
    while fake.now_s < 2000:
        fake.sample(source)
        at_once.append(sum(not each.ended and each.asked[0].only is not None for each in fake.started if each.asked))

    assert max(at_once) == 1
    assert {question.only for question in single_questions(fake)} == {0, 1, 2, 3}


def test_close_ends_every_process(fake: FakeDriver) -> None:
    source = hung(fake)
    while not single_questions(fake):
        fake.sample(source)

    source.close()

    assert all(process.ended for process in fake.started)


# Real processes


@pytest.fixture
def start(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(answer_s=…)`: a source whose processes use the fake NVIDIA driver. They end with the test."""
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
    """The same readings without those of error reports."""
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


@needs_compiler
@pytest.mark.usefixtures("driver_here")
def test_isolated_readings_equal_those_of_the_driver(start: Start, driver: Driver) -> None:
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
def test_failed_start_reports_its_last_line(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(
        "#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x >&2\necho >&2\n"
        "echo 'ModuleNotFoundError: No module named exporter' >&2\nexit 1\n"
    )
    broken.chmod(0o700)
    monkeypatch.setattr(driver_process, "sys", SimpleNamespace(executable=str(broken)))

    message = refused(start())

    assert message.endswith("ended with status 1: ModuleNotFoundError: No module named exporter")


BOTH = (Card(), Card(uuid="GPU-1"))
ONE_HANGS = "hang 1 nvmlDeviceGetMemoryInfo"


def without_one(source: IsolatedDriver) -> GpuReadings | None:
    """A sample with GPU-0 which skips the other."""
    found = answered(source)
    return found if found and [gpu.unknown for gpu in found.gpus] == [None, HUNG] else None


def whole(source: IsolatedDriver) -> GpuReadings | None:
    """A sample of all GPUs."""
    found = answered(source)
    return found if found and {gpu.unknown for gpu in found.gpus} == {None} else None


@needs_compiler
def test_hung_gpu_is_reported_as_hung_and_others_are_read(start: Start, driver: Driver) -> None:
    driver.answer(*BOTH)
    source = start(answer_s=1.5, wait_s=0.5)
    eventually(lambda: whole(source))

    driver.answer(*BOTH, but=(ONE_HANGS,))
    message = eventually(lambda: message if GAVE_UP in (message := refused(source)) else None)
    healthy, left_out = eventually(lambda: without_one(source)).gpus

    assert message.startswith(
        "a call into the NVIDIA driver about GPU 1 did not return within 1.5 s, and its process was killed, and that "
        "GPU is skipped until it answers a separate process"
    )
    assert (healthy.uuid, healthy.utilization_ratio, healthy.processes) == ("GPU-0", 0.0, ())
    assert (left_out.uuid, left_out.index, left_out.name) == ("GPU-1", 1, "Test GPU")
    assert (left_out.utilization_ratio, left_out.memory_used_bytes, left_out.processes) == (None, None, None)
    assert (left_out.lost, dict(left_out.figures.unknown)) == (None, {"gpu": "hung"})


# Processes that end


@needs_compiler
def test_process_that_was_killed_is_replaced(start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    os.kill(pid, signal.SIGKILL)
    message = refused(source)

    assert message == "the process for the NVIDIA driver was ended by SIGKILL"
    assert eventually(lambda: answered(source))
    assert asking(source) != pid
    assert source.health().killed == 0


@needs_compiler
def test_replaced_library_is_loaded_by_another_process(start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    driver.answer(Card(), but=("error - * 18",))
    message = refused(source)
    driver.answer(Card())

    assert "its library and its kernel module have different versions" in message
    assert eventually(lambda: answered(source))
    assert asking(source) != pid


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_stop_the_exporter_are_ignored_by_the_process(number: int, start: Start, driver: Driver) -> None:
    driver.answer(Card())
    source = start()
    source.read()
    pid = asking(source)

    os.kill(pid, number)

    assert source.read()
    assert asking(source) == pid
    source.close()
    assert is_over(pid)


def sent(*messages: protocol.Message) -> bytes:
    """The bytes of these messages."""
    pipe = io.BytesIO()
    for message in messages:
        protocol.send(pipe, message)
    return pipe.getvalue()


ANSWER = sent(GpuReadings(source="test", gpus=()))


def answers(written: str, *, then: str = "") -> IsolatedDriver:
    """A source whose process writes these bytes for each question."""
    program = f"import os, signal, sys\nn = 0\nwhile os.read(0, 65536):\n  os.write(1, {written})\n  {then or 'pass'}"
    driver = driver_process.Driver(who="a driver", program=("-c", program))
    return IsolatedDriver(driver, answer_s=20.0, wait_s=20.0)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raise ValueError('a half\\nbroken')", "ended with status 1: broken"),
        ("os.abort()", "was ended by SIGABRT: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "was ended by SIGBUS: warning: a library of the driver says"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM"),
        ("break", "ended with status 0"),
    ],
    ids=[
        "Python error",
        "abort",
        "segmentation fault",
        "bus error",
        "killed",
        "ended",
        "end of input",
    ],
)
def test_reason_for_the_end_of_a_process_is_reported(end: str, message: str) -> None:
    program = (
        f"import os, signal, sys\nfor n in range(2):\n  os.read(0, 65536)\n  if n: {end}\n  os.write(1, {ANSWER!r})\n"
        "  print('warning: a library of the driver says', file=sys.stderr, flush=True)"
    )
    source = IsolatedDriver(driver_process.Driver(who="a driver", program=("-c", program)), answer_s=20.0, wait_s=20.0)
    source.read()

    assert refused(source) == f"the process for a driver {message}"
    source.close()


GARBAGE = {
    "output of a driver": b"amdgpu: hello\n",
    "half a message": ANSWER[:-9],
    "a question": sent(Question()),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_invalid_answer_ends_the_process(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_FIRST_S", 0.05)
    source = answers(repr(said), then="os.close(1)")

    first = refused(source)
    second = eventually(
        lambda: message if source._processes.failures == 2 and (message := refused(source)) else answered(source)
    )
    source.close()

    known = r"the process for a driver sent (an invalid answer \(.*\)|a question as an answer)"
    assert re.fullmatch(known, first)
    assert re.fullmatch(known, str(second))
    assert (source.health().killed, source.health().abandoned) == (0, 0)


def test_equal_error_reports_count_separately() -> None:
    xid = Xid(gpu="GPU-0", code=31)
    source = answers(repr(sent(xid, xid) + ANSWER))

    source.read()

    assert source.health().xids == {("GPU-0", 31): 2}
    source.close()


@pytest.mark.parametrize("thread", ["driver", "driver-stderr"])
def test_missing_threads_affect_only_this_source(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen, start = subprocess.Popen, threading.Thread.start

    def remembered(*args: Any, **given: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*args, **given))
        return started[-1]

    def refused_start(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(processes, "RESTART_FIRST_S", 0.05)
    source = answers(repr(ANSWER))
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", remembered)
        full.setattr(threading.Thread, "start", refused_start)
        source.ask()
        message = refused(source)

    assert message == "the process for a driver cannot be started: can't start new thread"
    assert [each.poll() for each in started] == [-signal.SIGKILL]
    assert all(pipe.closed for each in started for pipe in (each.stdin, each.stdout) if pipe)
    assert eventually(lambda: answered(source))
    source.close()


# Error reports of the driver


def watched(source: IsolatedDriver) -> list[str]:
    """The GPUs with a wait for error reports."""
    found = answered(source)
    return [gpu.uuid for gpu in found.gpus if gpu.xids_watched] if found else []


@pytest.fixture
def watching(start: Start, driver: Driver) -> IsolatedDriver:
    """A source that waits for the reports of GPU-0 and GPU-1; one came before."""
    driver.answer(*BOTH, but=("xid 0 1 13",))
    source = start()
    eventually(lambda: watched(source) == ["GPU-0", "GPU-1"])
    return source


@needs_compiler
def test_errors_are_counted_by_gpu_and_code(watching: IsolatedDriver, driver: Driver) -> None:
    driver.answer(*BOTH, but=("xid 0 1 13", "xid 0 2 31", "xid 1 3 79", "xid 0 4 31", "xid 0 5 48"))

    assert eventually(lambda: watching.health().xids if len(watching.health().xids) == 3 else None) == {
        ("GPU-0", 31): 2,
        ("GPU-1", 79): 1,
        ("GPU-0", 48): 1,
    }


@needs_compiler
def test_unknown_error_code_is_counted_as_0(watching: IsolatedDriver, driver: Driver) -> None:
    driver.answer(*BOTH, but=("xid 0 2 1000", "xid 0 3 -"))

    assert eventually(lambda: watching.health().xids.get(("GPU-0", 0)) == 2)


@needs_compiler
def test_error_is_reported_while_the_driver_hangs(watching: IsolatedDriver, driver: Driver) -> None:
    watching._wait_s = 0.1
    driver.answer(*BOTH, but=(HANGS,))
    refused(watching)

    driver.answer(*BOTH, but=(HANGS, "xid 0 2 119"))

    assert eventually(lambda: watching.health().xids) == {("GPU-0", 119): 1}
    assert refused(watching) == "no answer yet from the NVIDIA driver"


@needs_compiler
def test_lost_gpu_hides_no_report_of_others(watching: IsolatedDriver, driver: Driver) -> None:
    numbers = itertools.count(2)

    def counted(gpu: int, *but: str) -> int | None:
        """The count of an error which is reported repeatedly, since the wait may just restart."""
        driver.answer(*BOTH, but=(*but, f"xid {gpu} {next(numbers)} 31"))
        answered(watching)
        return watching.health().xids.get((f"GPU-{gpu}", 31))

    eventually(lambda: watched(watching) == ["GPU-1"] if counted(0, "error 0 * 15") is None else None)
    assert eventually(lambda: counted(1, "error 0 * 15"))
    assert ("GPU-0", 31) not in watching.health().xids
    assert eventually(lambda: counted(0))


@needs_compiler
def test_counts_survive_the_driver_and_the_process(watching: IsolatedDriver, driver: Driver) -> None:
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
def test_gpu_without_error_reports_has_a_reason(code: int, reason: str, start: Start, driver: Driver) -> None:
    driver.answer(*BOTH, but=(f"error 0 nvmlDeviceRegisterEvents {code}",))
    source = start()

    eventually(lambda: watched(source) == ["GPU-1"])

    found = source.read()
    assert found.gpus[0].figures.unknown["xid"] == reason
    assert "xid" not in found.gpus[1].figures.unknown


@needs_compiler
def test_hanging_wait_of_one_gpu_hides_no_report_of_others(start: Start, driver: Driver) -> None:
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
