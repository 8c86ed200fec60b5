"""State files: round trips, invalid files, ages, and a shell script as writer."""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import clock
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import (
    SIZE_MAX_BYTES,
    JobFile,
    LongStep,
    Stamp,
    StateFileError,
    TaskFile,
    WorkerFile,
    check_name,
    parse_job,
    parse_task,
    parse_worker,
    render,
)

pytestmark = pytest.mark.pure

THEN = Stamp(boottime_s=100.5, boot_id="boot-a", unix_s=1_700_000_000.25)

WORKER = WorkerFile(worker="w1", incarnation="i1", queue="gpu", pid=42, started=THEN, heartbeat=THEN, loop=THEN)

JOB = JobFile(
    job_id=7,
    attempt=2,
    worker="w1",
    incarnation="i1",
    job_class=JobClass.GPU,
    model="sd-xl",
    budget_s=8100.0,
    stall_timeout_s=120.0,
    started=THEN,
    phase=Phase.STEP,
    phase_started=THEN,
    step_beat=THEN,
    step=3,
    steps_total=20,
    step_mean_s=1.5,
    step_max_s=2.0,
    items_done=1,
    items_failed=0,
)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), min_size=1, max_size=256)
counts = st.integers(0, 2**63 - 1)
durations = st.floats(0, 1e12, exclude_max=True)
stamps = st.builds(Stamp, boottime_s=durations, boot_id=texts, unix_s=durations)
workers = st.builds(
    WorkerFile,
    worker=names, incarnation=texts, queue=texts, pid=counts, started=stamps, heartbeat=stamps, loop=stamps,
    start_ticks=st.none() | counts, pid_namespace=st.none() | counts,
)  # fmt: skip
long_steps = st.lists(
    st.builds(LongStep, took_s=durations, began_s=st.none() | durations), max_size=16
).map(tuple)  # fmt: skip
jobs = st.builds(
    JobFile,
    job_id=st.integers(0, 2**53 - 1), attempt=counts, worker=names, incarnation=texts,
    job_class=st.sampled_from(JobClass),
    model=st.none() | texts, budget_s=durations, stall_timeout_s=durations, started=stamps,
    phase=st.sampled_from(Phase), phase_started=stamps, step_beat=st.none() | stamps, step=counts,
    steps_total=st.none() | counts, step_mean_s=st.none() | durations, step_max_s=st.none() | durations,
    items_done=counts, items_failed=counts, timeout_s=st.none() | durations.filter(bool), ranks=counts,
    gang=st.none() | texts, rank=counts, longest=long_steps, stays=long_steps,
    health_window_s=st.none() | durations.filter(bool), health_acts=st.booleans(), after_gpu_use=st.booleans(),
    local_rank=counts, local_ranks=counts, process=st.none() | st.tuples(st.integers(1, 2**22), st.integers(1, 2**60)),
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(workers)
def test_worker_file_round_trips(worker: WorkerFile) -> None:
    assert parse_worker(render(worker)) == worker


@given(jobs)
def test_job_file_round_trips(job: JobFile) -> None:
    assert parse_job(render(job)) == job


@given(workers | jobs)
def test_file_is_one_line_within_its_size_limit(value: WorkerFile | JobFile) -> None:
    text = render(value)

    assert text.count("\n") == 1
    assert len(text.encode()) <= SIZE_MAX_BYTES


@given(st.text())
def test_any_file_content_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_worker, parse_job):
        with pytest.raises(StateFileError):
            parse(text)


@given(st.sampled_from(sorted(json.loads(render(JOB)))), json_values)
def test_any_field_value_is_parsed_or_refused(field: str, value: object) -> None:
    text = json.dumps({**json.loads(render(JOB)), field: value})

    try:
        read = parse_job(text)
    except StateFileError:
        return
    assert parse_job(render(read)) == read


@pytest.mark.parametrize(("parse", "value"), [(parse_worker, WORKER), (parse_job, JOB)], ids=["worker", "job"])
def test_truncated_file_is_refused_as_not_json(parse: Callable[[str], object], value: Any) -> None:
    text = render(value)

    for length in range(len(text) - 1):
        with pytest.raises(StateFileError, match="was it replaced by rename") as refused:
            parse(text[:length])
        assert refused.value.reason == "not_json"


def worker_with(**fields: object) -> str:
    return json.dumps({**json.loads(render(WORKER)), **fields})


def worker_without(field: str) -> str:
    found = json.loads(render(WORKER))
    del found[field]
    return json.dumps(found)


def job_with(**fields: object) -> str:
    return json.dumps({**json.loads(render(JOB)), **fields})


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        pytest.param("", "not_json", "not whole JSON", id="empty"),
        pytest.param(worker_with(pad="x" * SIZE_MAX_BYTES), "oversized", "over 65536 bytes", id="oversized"),
        pytest.param(worker_with(pid=float("nan")), "not_json", "NaN is not a JSON number", id="NaN"),
        pytest.param(worker_with(pid=float("inf")), "not_json", "Infinity is not a JSON", id="infinity"),
        pytest.param(worker_with(pid=float("-inf")), "not_json", "-Infinity is not", id="minus infinity"),
        pytest.param('{"format":1,"worker":' + "[" * 20000, "not_json", "not whole JSON", id="nested too deep"),
        pytest.param(worker_with(pid=9).replace("9", "9" * 5000), "not_json", "not whole", id="more digits than read"),
        pytest.param("[1]", "not_object", "a JSON object was wanted, list found", id="a list"),
        pytest.param("null", "not_object", "NoneType found", id="null"),
        pytest.param(worker_with(format=2), "format", "format 2 found, 1 wanted", id="another format"),
        pytest.param(worker_with(format="1"), "format", "format '1' found", id="the format as a string"),
        pytest.param(worker_with(format=True), "format", "format True found", id="the format as a boolean"),
        pytest.param(worker_with(format=[[]]), "format", "format a list found", id="the format as a list"),
        pytest.param(worker_without("format"), "format", "format nothing found", id="no format"),
        pytest.param(worker_without("pid"), "field", "'pid': a whole number from 0 was wanted, nothing", id="no pid"),
        pytest.param(worker_without("loop"), "field", "'loop': an object with boottime_s", id="no stamp"),
        pytest.param(worker_with(pid="42"), "field", "'pid': a whole number .* '42' found", id="a pid as a string"),
        pytest.param(worker_with(pid=True), "field", "'pid': .* True found", id="a boolean for a number"),
        pytest.param(worker_with(pid=4.0), "field", "'pid': .* 4.0 found", id="a pid with a fraction"),
        pytest.param(worker_with(pid=-1), "field", "'pid': .* -1 found", id="a negative pid"),
        pytest.param(worker_with(pid=2**63), "field", "'pid'", id="a pid past 64 bits"),
        pytest.param(worker_with(queue=""), "field", "'queue': a string of 1 to 256", id="an empty string"),
        pytest.param(worker_with(queue="q" * 257), "field", "'queue'", id="a string too long"),
        pytest.param(worker_with(queue="a\nb"), "field", "printable", id="a line break"),
        pytest.param(worker_with(queue="\ud800"), "field", r"'\\ud800' found", id="half a surrogate pair"),
        pytest.param(worker_with(queue={"a": 1}), "field", "an object found", id="an object for a string"),
        pytest.param(worker_with(started=[[[]]]), "field", "a list found", id="a list for a stamp"),
        pytest.param(worker_with(worker="../up"), "name", "'../up' is invalid", id="a name with a parent folder"),
        pytest.param(worker_with(worker="w" * 64), "name", "1 to 63", id="a name too long"),
        pytest.param(
            worker_with(started={"boottime_s": True, "boot_id": "b", "unix_s": 1}),
            "field", "started: field 'boottime_s': seconds", id="a boolean in a stamp",
        ),
        pytest.param(
            worker_with(started={"boottime_s": 1, "unix_s": 1}), "field", "started: field 'boot_id'", id="half a stamp"
        ),
        pytest.param(
            worker_with(started={"boottime_s": 1e999, "boot_id": "b", "unix_s": 1}).replace("Infinity", "1e999"),
            "field", "started: field 'boottime_s': .* inf found", id="a float past every float",
        ),
    ],
)  # fmt: skip
def test_invalid_worker_file_is_refused_with_a_fixed_reason(text: str, reason: str, says: str) -> None:
    with pytest.raises(StateFileError, match=says) as refused:
        parse_worker(text)

    assert refused.value.reason == reason
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(job_with(job_class="gpu2"), "'job_class': one of gpu, gpu_video.* 'gpu2' found", id="class"),
        pytest.param(job_with(phase="STEP"), "'phase': one of load, step.* 'STEP' found", id="phase"),
        pytest.param(
            job_with(job_id=2**53), "'job_id': a whole number from 0 to 9007199254740991", id="an id no float holds"
        ),
        pytest.param(job_with(budget_s=-1), "'budget_s': seconds, a number from 0 .* -1 found", id="budget"),
        pytest.param(job_with(budget_s=False), "'budget_s'.* False found", id="a boolean budget"),
        pytest.param(job_with(step_beat=0), "'step_beat': an object", id="step_beat"),
        pytest.param(job_with(timeout_s=0), "'timeout_s': seconds, a number above 0 .* 0 found", id="timeout 0"),
        pytest.param(job_with(longest={}), "'longest': a list of at most 16 objects .* an object found", id="longest"),
        pytest.param(job_with(longest=[2.5]), "'longest': a list of at most 16 objects", id="longest as numbers"),
        pytest.param(job_with(longest=[{"took_s": 1}] * 17), "'longest': a list of at most 16 objects", id="too many"),
        pytest.param(job_with(longest=[{}]), "longest: field 'took_s': seconds.* nothing found", id="took nothing"),
        pytest.param(job_with(longest=[{"took_s": 1, "began_s": -1}]), "longest: .*'began_s'", id="before the boot"),
        pytest.param(job_with(stays={}), "'stays': a list of at most 16 objects .* an object found", id="stays"),
        pytest.param(
            job_with(stays=[{"took_s": -1}]), "stays: field 'took_s': seconds.* -1 found", id="a stay of -1 s"
        ),
        pytest.param(job_with(process=[1, 0]), "'process': a pid and a start time", id="a process without a start"),
        pytest.param(job_with(health_acts=1), "'health_acts': true or false was wanted, 1 found", id="health_acts"),
        pytest.param(job_with(health_window_s=0), "'health_window_s': seconds, a number above 0", id="health window 0"),
        pytest.param(job_with(timeout_s="9"), "'timeout_s': seconds", id="timeout as text"),
        pytest.param(job_with(steps_total="20"), "'steps_total'", id="steps_total"),
        pytest.param(job_with(model="\ud800"), r"'model': .* '\\ud800' found", id="half a surrogate pair"),
        pytest.param(job_with(model=""), "'model'", id="model"),
    ],
)
def test_invalid_job_file_names_the_field(text: str, says: str) -> None:
    with pytest.raises(StateFileError, match=says) as refused:
        parse_job(text)

    assert refused.value.reason == "field"


TASK = {"running_log_id": 123, "remote_pid": "4567", "remote_pgid": "4560", "timestamp": "1734220000"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        pytest.param(
            json.dumps(TASK),
            TaskFile(task_id=123, pid=4567, pgid=4560, started_unix_s=1734220000.0),
            id="as documented",
        ),
        pytest.param(
            json.dumps({**TASK, "remote_pgid": ""}),
            TaskFile(task_id=123, pid=4567, pgid=None, started_unix_s=1734220000.0),
            id="empty process group",
        ),
        pytest.param(
            json.dumps({"running_log_id": "0", "remote_pid": 1, "remote_pgid": 4194304, "timestamp": 1734220000.25}),
            TaskFile(task_id=0, pid=1, pgid=2**22, started_unix_s=1734220000.25),
            id="numbers and text the other way round",
        ),
        pytest.param(
            json.dumps({**TASK, "timestamp": "1734220000.125", "host": "a", "format": "v7"}),
            TaskFile(task_id=123, pid=4567, pgid=4560, started_unix_s=1734220000.125),
            id="a fraction as text, and unknown fields",
        ),
    ],
)
def test_task_file_of_another_runner_is_parsed(text: str, read: TaskFile) -> None:
    assert parse_task(text) == read


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        pytest.param("", "not_json", "not whole JSON", id="empty"),
        pytest.param(json.dumps(TASK)[:40], "not_json", "not whole JSON", id="half written"),
        pytest.param(" " * (SIZE_MAX_BYTES + 1), "oversized", "over 65536 bytes", id="oversized"),
        pytest.param("[]", "not_object", "list found", id="a list"),
        pytest.param(json.dumps({**TASK, "remote_pid": None}), "field", "'remote_pid': .* nothing", id="no pid"),
        pytest.param(json.dumps({**TASK, "remote_pid": "0"}), "field", "from 1 to 4194304", id="pid 0, all processes"),
        pytest.param(json.dumps({**TASK, "remote_pid": "-1"}), "field", "'-1' found", id="pid -1, all processes"),
        pytest.param(json.dumps({**TASK, "remote_pgid": 1.5}), "field", "'remote_pgid'", id="a fraction"),
        pytest.param(json.dumps({**TASK, "remote_pgid": True}), "field", "True found", id="a boolean"),
        pytest.param(json.dumps({**TASK, "remote_pid": "4194305"}), "field", "from 1 to", id="a pid past the last"),
        pytest.param(json.dumps({**TASK, "remote_pid": "٤٥"}), "field", "'remote_pid'", id="digits of another script"),
        pytest.param(json.dumps({**TASK, "remote_pid": "9" * 4000}), "field", "'999", id="more digits than a number"),
        pytest.param(
            json.dumps({**TASK, "running_log_id": str(2**63)}), "field", "'running_log_id'", id="over 64 bits"
        ),
        pytest.param(json.dumps({**TASK, "timestamp": "1e9"}), "field", "'timestamp': seconds", id="an exponent"),
        pytest.param(json.dumps({**TASK, "timestamp": False}), "field", "False found", id="a boolean for a time"),
        pytest.param(json.dumps({**TASK, "timestamp": "9" * 13}), "field", "'timestamp'", id="a time in milliseconds"),
        pytest.param(json.dumps({**TASK, "timestamp": {}}), "field", "an object found", id="an object for a time"),
    ],
)
def test_invalid_task_file_is_refused_with_a_fixed_reason(text: str, reason: str, says: str) -> None:
    with pytest.raises(StateFileError, match=says) as refused:
        parse_task(text)

    assert refused.value.reason == reason


def test_process_that_is_younger_than_its_task_is_another() -> None:
    """Within the slack of a truncated time it is the task's."""
    task = parse_task(json.dumps({**TASK, "timestamp": 1000}))

    assert [task.predates(at) for at in (10.0, 1004.9, 1005.1)] == [False, False, True]


@given(st.text())
def test_any_task_file_content_is_parsed_or_refused(text: str) -> None:
    with suppress(StateFileError):
        parse_task(text)


@given(st.sampled_from(sorted(TASK)), json_values)
def test_any_task_field_value_is_parsed_or_refused(field: str, value: object) -> None:
    with suppress(StateFileError):
        parse_task(json.dumps({**TASK, field: value}))


def test_unknown_fields_are_ignored() -> None:
    assert parse_worker(worker_with(colour="blue", nested={"a": [1]})) == WORKER


def test_last_value_of_a_duplicate_field_counts() -> None:
    assert parse_worker(render(WORKER).replace('"pid": 42', '"pid": "x", "pid": 42')) == WORKER


@pytest.mark.parametrize("field", ["model", "step_beat", "steps_total", "step_mean_s", "step_max_s", "timeout_s"])
def test_unknown_fields_may_be_null_or_absent(field: str) -> None:
    left_out = json.loads(render(JOB))
    del left_out[field]

    assert parse_job(job_with(**{field: None})) == parse_job(json.dumps(left_out))
    assert getattr(parse_job(json.dumps(left_out)), field) is None


@pytest.mark.parametrize("field", ["longest", "stays"])
def test_longest_steps_and_their_starts_are_optional(field: str) -> None:
    left_out = json.loads(render(JOB))
    del left_out[field]
    written = [{"took_s": 9, "began_s": 100.5}, {"took_s": 2.5}, {"took_s": 1.0, "began_s": None}]

    assert parse_job(json.dumps(left_out)) == parse_job(job_with(**{field: None})) == JOB
    assert getattr(parse_job(job_with(**{field: written})), field) == (
        LongStep(took_s=9.0, began_s=100.5),
        LongStep(took_s=2.5, began_s=None),
        LongStep(took_s=1.0, began_s=None),
    )


def test_stall_timeout_is_read_from_the_file() -> None:
    assert parse_job(job_with(timeout_s=2.5)).timeout_s == 2.5


def test_integer_seconds_are_a_duration() -> None:
    assert parse_job(job_with(budget_s=60)).budget_s == 60.0


def test_non_finite_number_is_not_rendered() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render(replace(JOB, budget_s=float("inf")))


@pytest.mark.parametrize("name", ["w1", "GPU-0.a_b", "0", "a" * 63])
def test_valid_name_is_returned(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a\n", "é", "a" * 64])
def test_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(StateFileError, match="subdirectory name") as refused:
        check_name(name, what="subdirectory")

    assert refused.value.reason == "name"


@given(stamps, stamps)
def test_age_is_never_negative_and_unknown_after_a_reboot(then: Stamp, now: Stamp) -> None:
    age_s = then.age_s(now)

    if then.boot_id != now.boot_id:
        assert age_s is None
    else:
        assert age_s is not None
        assert age_s >= 0


def test_age_does_not_follow_clock_changes() -> None:
    now = replace(THEN, boottime_s=THEN.boottime_s + 30, unix_s=THEN.unix_s - 3600)

    assert THEN.age_s(now) == 30


def test_future_stamp_has_age_zero() -> None:
    assert replace(THEN, boottime_s=THEN.boottime_s + 5).age_s(THEN) == 0


def test_stamp_of_another_boot_has_no_age() -> None:
    assert replace(THEN, boot_id="boot-b").age_s(THEN) is None


SHELL_WORKER = """
set -eu
read -r up _ </proc/uptime
read -r boot </proc/sys/kernel/random/boot_id
now=$(printf '{"boottime_s": %s, "boot_id": "%s", "unix_s": %s}' "$up" "$boot" "$(date +%s)")
printf '{"format": 1, "worker": "sh1", "incarnation": "%s-%s", "queue": "gpu", "pid": %s,
 "started": %s, "heartbeat": %s, "loop": %s}\\n' "$boot" "$$" "$$" "$now" "$now" "$now" >"$1/.sh1.new"
mv "$1/.sh1.new" "$1/sh1.worker.json"
"""


def test_shell_script_writes_a_valid_worker_file(tmp_path: Path) -> None:
    subprocess.run(["/bin/sh", "-c", SHELL_WORKER, "sh", str(tmp_path)], check=True)

    worker = parse_worker((tmp_path / "sh1.worker.json").read_text())
    assert worker.worker == "sh1"
    age_s = worker.heartbeat.age_s(clock.stamp())
    assert age_s is not None
    assert age_s < 60
