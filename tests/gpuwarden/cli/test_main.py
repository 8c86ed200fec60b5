"""The command line: commands, errors, jobs and quarantines."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuwarden import __version__
from gpuwarden.cli import main as cli
from gpuwarden.cli.main import main
from gpuwarden.errors import GpuwardenError
from gpuwarden.queue import JobStore


@pytest.fixture
def url(database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)
    return f"sqlite:///{database}"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_missing_command_prints_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)

    assert (code, out) == (2, "")
    assert "\n\njobs:\n  job " in err
    for command in ("worker", "job", "runs", "queue", "events", "gpu", "host"):
        assert f"\n  {command} " in err


def test_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "wroker")

    assert code == 2
    assert err == "gpuwarden: 'wroker' is unknown; did you mean worker? (see `gpuwarden --help`)\n"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"gpuwarden {__version__}\n", "")


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "job", "submit", "--help")

    assert code == 0
    assert out.startswith("usage: gpuwarden job submit [options] [-- CMD...]\n")


def test_missing_package_names_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "exporting").mkdir()
    (tmp_path / "exporting" / "main.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cli, "commands", lambda: {"exporter": "exporting.main:command"})

    code, _, err = run(capsys, "exporter")

    assert code == 1
    assert err == (
        "gpuwarden exporter: needs the package 'no_such_package': "
        "in a checkout of gpuwarden, pip install '.[exporting]' (or '.[all]')\n"
    )


def test_own_commands_need_extra_worker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gpuwarden.cli.job", raising=False)
    monkeypatch.setitem(sys.modules, "gpuwarden.queue", None)

    code, _, err = run(capsys, "job", "list")

    assert code == 1
    assert "pip install '.[jobs]'" in err


def test_library_does_not_import_the_programs_that_register_commands() -> None:
    look = "import sys; from gpuwarden.cli.main import commands; print(sorted(commands()))\n"
    look += "assert not {'exporter', 'remediator', 'sqlalchemy'} & set(sys.modules)"

    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)

    assert {"exporter", "remediator", "worker", "job"} <= set(json.loads(done.stdout.replace("'", '"')))


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        pytest.param(GpuwardenError("no host key"), 1, "gpuwarden job: no host key\n", id="our own error"),
        pytest.param(KeyboardInterrupt(), 130, "", id="Ctrl-C"),
    ],
)
def test_failed_command_prints_one_line_and_exits_with_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, says: str
) -> None:
    def command(_arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "load", lambda _target: command)

    assert run(capsys, "job") == (code, "", says)


def test_unexpected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "load", lambda _target: command)

    with pytest.raises(ZeroDivisionError):
        main(["job"])


def test_closed_pipe_prints_no_traceback(url: str) -> None:
    for _ in range(2):
        assert main(["job", "submit", "--queue-db", url, "--payload", "{}"]) == 0
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(
        [sys.executable, "-u", "-m", "gpuwarden", "job", "list", "--queue-db", url],
        stdout=write_end, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(write_end)

    assert (done.returncode, done.stderr) == (1, b"")


# --- jobs


def test_submitted_job_is_listed(capsys: pytest.CaptureFixture[str], url: str) -> None:
    options = ["--queue", "video", "--class", "gpu_video", "--model", "svd", "--run", "r1", "--priority", "5"]
    figures = [
        "--steps-total",
        "20",
        "--budget-s",
        "60",
        "--attempts-max",
        "4",
        "--retries-max",
        "3",
        "--payload",
        '{"prompt": "a cat"}',
    ]
    assert run(capsys, "job", "submit", "--queue-db", url, *options, *figures) == (0, "1\n", "")
    assert run(capsys, "job", "submit", "--queue-db", url, "--payload", "{}") == (0, "2\n", "")

    code, out, _ = run(capsys, "job", "list", "--queue-db", url, "--json")

    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert first == {
        "job_id": 1, "run_id": "r1", "queue": "video", "job_class": "gpu_video", "model": "svd",
        "payload": {"prompt": "a cat"}, "budget_s": 60.0, "stall_timeout_s": 0.0, "steps_total": 20,
        "busy_timeout_s": None,
        "state": "queued", "priority": 5, "attempt": 0, "attempts_max": 4, "watchdog_retries": 0, "reclaims": 0,
        "claimed_by": None, "host": None, "worker": None, "lease_expires_at": None, "reason": None,
        "traceback": None, "retries_max": 3, "retries": 0, "retry_at": None,
        "submitted_budget_s": 60.0, "needs": 0, "pending": 0, "gang": None, "rank": 0, "ranks": 1, "inputs": {},
        "claimed_at": None, "ended_at": None, "result": None, "progress": None,
        "submitted_at": pytest.approx(time.time(), abs=60), "queued_at": first["submitted_at"],
    }  # fmt: skip
    assert (second["queue"], second["budget_s"], second["stall_timeout_s"]) == ("gpu", 8100.0, 120.0)
    assert second["attempts_max"] == 20


def test_table_has_one_line_per_job_under_its_heading(capsys: pytest.CaptureFixture[str], url: str) -> None:
    run(capsys, "job", "submit", "--queue-db", url, "--no-steps", "--payload", "{}")

    _, out, _ = run(capsys, "job", "list", "--queue-db", url)

    heading, line = out.splitlines()
    assert heading.split() == [
        "JOB", "STATE", "TASK", "QUEUE", "AGE", "TRY", "WORKER", "PROGRESS", "SILENT", "REASON"
    ]  # fmt: skip
    assert line.split()[:4] == ["1", "queued", "-", "gpu"]
    assert re.fullmatch(r"\d+s", line.split()[4])
    assert line.split()[5:] == ["0", "-", "-", "-"]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_queue_without_jobs_prints_nothing(capsys: pytest.CaptureFixture[str], url: str, options: list[str]) -> None:
    assert run(capsys, "job", "list", "--queue-db", url, *options) == (0, "", "")


def test_queue_url_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", url)

    assert run(capsys, "job", "submit", "--payload", "{}") == (0, "1\n", "")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        pytest.param(["--queue-db", "x", "--payload", "{"], 2, "not JSON", id="payload not JSON"),
        pytest.param(["--queue-db", "x", "--payload", "[1]"], 2, "not a JSON object", id="payload is a list"),
        pytest.param(
            ["--queue-db", "x", "--class", "tpu"], 2, "'tpu' is unknown; did you mean gpu?", id="no such class"
        ),
        pytest.param(["--queue-db", "x", "--payload", "{}"], 1, "invalid database URL 'x'", id="invalid URL"),
        pytest.param(["--queue-db", "x", "--attempts-max", "0"], 1, "attempts_max 0 is invalid", id="no attempts"),
        pytest.param(["--queue-db", "x", "--budget-s", "inf"], 1, "budget_s inf is invalid", id="infinite budget"),
        pytest.param(
            ["--queue-db", "x"],
            1,
            "nothing to do: give a command after --, or the --payload",
            id="no payload and no model",
        ),
        pytest.param(["--queue-db", "x", "--model", "\udcff"], 1, r"model '\udcff' is invalid", id="a model in bytes"),
    ],
)
def test_invalid_submission_gives_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, says: str
) -> None:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)

    ended, out, err = run(capsys, "job", "submit", *options)

    assert (ended, out) == (code, "")
    assert says in err


# --- quarantine


@pytest.fixture
def on_box1(host_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the host key and the runtime folder."""
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(host_dir))


@pytest.mark.usefixtures("on_box1")
def test_gpu_is_quarantined_listed_and_released(capsys: pytest.CaptureFixture[str], store: JobStore, url: str) -> None:
    where = ["--queue-db", url]
    store.claims.register("gpu", host="box1", worker="w1", incarnation="i1", now=1, gpus=("GPU-a",))
    store.claims.register("gpu", host="box2", worker="w7", incarnation="i7", now=1)
    assert run(capsys, "gpu", "quarantine", *where, "GPU-a", "--reason", "falls off the bus")[::2] == (0, "")
    assert run(capsys, "gpu", "quarantine", *where, "GPU-b", "--host", "box2", "--worker", "w7")[::2] == (0, "")

    code, table, _ = run(capsys, "gpu", "list", *where)
    listed = [json.loads(line) for line in run(capsys, "gpu", "list", *where, "--json")[1].splitlines()]

    assert code == 0
    assert [line.split()[:3] for line in table.splitlines()] == [
        ["GPU", "HOST", "WORKER"], ["GPU-a", "box1", "-"], ["GPU-b", "box2", "w7"]
    ]  # fmt: skip
    assert table.splitlines()[1].endswith("  falls off the bus")
    since = [each.pop("since") for each in listed]
    assert listed == [
        {"gpu": "GPU-a", "host": "box1", "worker": None, "reason": "falls off the bus"},
        {"gpu": "GPU-b", "host": "box2", "worker": "w7", "reason": "taken out of use by an operator"},
    ]
    assert since == sorted(since)
    assert run(capsys, "gpu", "release", *where, "GPU-a") == (
        0,
        "GPU-a is released: its workers claim jobs again\n",
        "",
    )
    assert len(run(capsys, "gpu", "list", *where, "--json")[1].splitlines()) == 1


@pytest.mark.parametrize("named", ["0", "a", "gpu-a", "", "GPU-a\nb"])
def test_invalid_gpu_uuid_is_refused(capsys: pytest.CaptureFixture[str], store: JobStore, url: str, named: str) -> None:
    code, _, err = run(capsys, "gpu", "quarantine", "--queue-db", url, "--host", "box1", named)

    assert code == 2
    assert f"invalid GPU UUID {named!a}: give GPU-... or MIG-..., as in `nvidia-smi -L`" in err
    assert store.gpu_quarantine.quarantined() == []


@pytest.mark.parametrize("more", [[], ["--worker", "w1"]], ids=["a GPU", "a slot"])
def test_quarantine_of_an_unregistered_gpu_prints_a_warning(
    capsys: pytest.CaptureFixture[str], store: JobStore, url: str, more: list[str]
) -> None:
    command = ["gpu", "quarantine", "--queue-db", url, "--host", "box1", "MIG-a", *more]
    code, _, err = run(capsys, *command)

    assert (code, [each.gpu for each in store.gpu_quarantine.quarantined()]) == (0, ["MIG-a"])
    assert err.startswith("gpuwarden gpu: MIG-a is in quarantine, but no worker has registered it")
    assert err.count("\n") == 1
    store.claims.register("gpu", host="box1", worker="w1", incarnation="i1", now=1, gpus=("MIG-a",))
    assert run(capsys, *command) == (
        0, "MIG-a is in quarantine: its workers on box1 finish their job and claim no other\n", ""
    )  # fmt: skip


@pytest.mark.usefixtures("store")
def test_release_of_a_gpu_outside_quarantine_fails(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, out, err = run(capsys, "gpu", "release", "--queue-db", url, "GPU-a")

    assert (code, out) == (1, "")
    assert err == "gpuwarden gpu: GPU-a is not in quarantine: see `gpuwarden gpu list`\n"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_empty_quarantine_prints_no_rows(capsys: pytest.CaptureFixture[str], url: str, options: list[str]) -> None:
    said = "" if options else "no GPU is in quarantine\n"
    assert run(capsys, "gpu", "list", "--queue-db", url, *options) == (0, "", said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param([], "missing COMMAND: use list, quarantine, release", id="no command"),
        pytest.param(["release", "--queue-db", "x"], "missing UUID", id="no GPU"),
    ],
)
def test_gpu_command_names_its_missing_argument(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.delenv("GPUWARDEN_QUEUE_DB", raising=False)

    code, _, err = run(capsys, "gpu", *arguments)

    assert code == 2
    assert says in err


@pytest.mark.usefixtures("store")
def test_quarantine_needs_a_host_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUWARDEN_RUNTIME_DIR", str(tmp_path / "nowhere"))

    code, _, err = run(capsys, "gpu", "quarantine", "--queue-db", url, "GPU-a")

    assert code == 1
    assert "no host key at" in err
