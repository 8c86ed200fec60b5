"""Log lines for differences between two snapshots: invalid files, suspected jobs (A4)."""

from dataclasses import replace
from pathlib import Path

from structlog.testing import LogCapture

from exporter.model.gpu import GpuProcess
from exporter.sources.tasks import Tasks
from gpuwarden import clock, state_file
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker, Worker
from tests.exporter.test_sampler import sampler


def report_job(worker: Worker, *, step_beat_age_s: float) -> None:
    """Write a job file for the worker, with a step beat of this age."""
    now = clock.stamp()

    def ago(seconds: float) -> Stamp:
        return replace(now, boottime_s=now.boottime_s - seconds, unix_s=now.unix_s - seconds)

    job = build.job_file(
        worker="w0",
        incarnation=worker.incarnation,
        started=ago(300),
        phase_started=ago(300),
        step_beat=ago(step_beat_age_s),
    )
    (worker.folder / "w0.job.json").write_text(state_file.render(job))


def test_suspected_job_is_logged_once(house: Path, start_worker: StartWorker, logged: LogCapture) -> None:
    worker = start_worker("w0")
    busy = GpuProcess(pid=worker.pid, utilization_ratio=0.9, memory_bytes=0)
    look = sampler(house, gpus=lambda: build.gpus(build.gpu(0, busy)))

    report_job(worker, step_beat_age_s=200)
    look.sample()
    look.sample()
    report_job(worker, step_beat_age_s=1)
    look.sample()

    assert [
        {key: each.get(key) for key in ("event", "worker", "job_id", "attempt", "reason")} for each in logged.entries
    ] == [
        {"event": "job silent, not reported as stalled", "worker": "w0", "job_id": 7, "attempt": 1,
         "reason": "GPU was busy or unknown 0 s ago"},
        {"event": "job active again", "worker": "w0", "job_id": None, "attempt": None, "reason": None},
    ]  # fmt: skip


def test_invalid_and_valid_state_files_are_logged(house: Path, logged: LogCapture) -> None:
    bad = house / "slot" / "w0.worker.json"
    bad.parent.mkdir()
    bad.write_text("{")
    look = sampler(house)

    look.sample()
    look.sample()
    bad.unlink()
    look.sample()

    assert [(each["log_level"], each["event"], each.get("invalid")) for each in logged.entries] == [
        ("warning", "invalid state files", {"not_json": 1}),
        ("info", "all state files valid", None),
    ]


def test_log_names_the_first_file_of_each_reason_and_its_error(house: Path, logged: LogCapture) -> None:
    slot = house / "slot"
    slot.mkdir()
    for name in ("w0", "w1"):
        (slot / f"{name}.worker.json").write_text("{")
    worker = build.worker_file(worker="w2")
    (slot / "w2.worker.json").write_text(state_file.render(worker))
    (slot / "w2.lock").touch()
    job = build.job_file(worker="w2", incarnation=worker.incarnation, model="a\nb")
    (slot / "w2.job.json").write_text(state_file.render(job))

    sampler(house).sample()

    said = logged.entries[0]["first_errors"]
    assert said.keys() == logged.entries[0]["invalid"].keys() == {"not_json", "field"}
    assert said["not_json"].startswith(f"{slot}/w0.worker.json: not whole JSON (")
    assert said["field"] == (
        f"{slot}/w2.job.json: field 'model': a string of 1 to 256 printable characters was wanted, 'a\\nb' found"
    )


def test_invalid_and_valid_task_files_are_logged(house: Path, tmp_path: Path, logged: LogCapture) -> None:
    bad = tmp_path / "running_tasks" / "8.json"
    bad.parent.mkdir()
    bad.write_text('{"running_log_id":8,"remote_p')
    look = sampler(house, tasks=Tasks([bad.parent]))

    look.sample()
    look.sample()
    bad.unlink()
    look.sample()

    assert [(each["log_level"], each["event"], each.get("invalid")) for each in logged.entries] == [
        ("warning", "invalid task files", {"not_json": 1}),
        ("info", "all task files valid", None),
    ]
    assert logged.entries[0]["first_errors"]["not_json"].startswith(f"{bad}: not whole JSON (")


def test_two_workers_with_one_name_are_logged(house: Path, logged: LogCapture) -> None:
    for folder in ("a", "b"):
        (house / folder).mkdir()
        (house / folder / "w0.worker.json").write_text(state_file.render(build.worker_file()))
        (house / folder / "w0.lock").touch()

    sampler(house).sample()

    assert logged.entries[0]["invalid"] == {"duplicate": 1}
    assert logged.entries[0]["first_errors"] == {"duplicate": "worker w0 in folders a and b"}
