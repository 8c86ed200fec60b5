"""Options `--worker` and `--gpus` of `gpuwarden up`."""

import argparse
import json
import os
from pathlib import Path

import pytest

from deploy.standalone.up import command
from deploy.standalone.worker_pools import WorkerPool, parse, with_gpus
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor.files import ProcessFile, write


@pytest.mark.parametrize(
    ("given", "handler", "count", "name"),
    [
        ("train:2", "train", 2, "train"),
        ("train", "train", 1, "train"),
        ("jobs.train:handle", "jobs.train:handle", 1, "train"),
        ("jobs.train:handle:4", "jobs.train:handle", 4, "train"),
    ],
)
def test_worker_names_a_handler_and_a_number(given: str, handler: str, count: int, name: str) -> None:
    pool = parse(given)

    assert (pool.handler, pool.count, pool.name, pool.part) == (handler, count, name, f"workers-{name}")


@pytest.mark.parametrize("given", ["", ":2", "train:0", "train:257"])
def test_bad_worker_is_refused(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write MODULE:N"):
        parse(given)


def test_each_worker_gets_its_gpu_in_the_order_of_the_options() -> None:
    first, second = with_gpus([parse("train:2"), parse("serve")], "GPU-a, GPU-b,GPU-c")

    assert (first.gpus, second.gpus) == (("GPU-a", "GPU-b"), ("GPU-c",))
    assert first.arguments == [
        *("worker", "run", "train", "--processes", "2", "--name", "train", "--gpus", "GPU-a,GPU-b")
    ]
    assert "--gpus" not in with_gpus([parse("train:2")], "")[0].arguments


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--worker", "train:2", "--gpus", "0"), "--gpus names 1 GPUs for 2 workers of --worker"),
        (("--gpus", "0"), "--gpus names 1 GPUs for 0 workers of --worker"),
        (("--worker", "train", "--worker", "train:2"), "--worker names one module twice"),
        (("--worker", "train:0"), "invalid workers 'train:0'"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--data-dir", str(tmp_path / "data"), *options])

    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_pool_is_started_when_its_supervisor_has_a_worker(tmp_path: Path) -> None:
    pool = WorkerPool(handler="train", count=2)
    own = ProcessId.of(os.getpid())
    before = pool.is_started(tmp_path, own.pid)
    (tmp_path / "train-0").mkdir()
    write(tmp_path / "train-0", "train-0", ProcessFile(process=own, supervisor=own, restarts=True))

    assert (before, pool.is_started(tmp_path, own.pid), pool.is_started(tmp_path, 1)) == (False, True, False)
    (tmp_path / "train-0" / "train-0.process.json").write_text(json.dumps({"process": "?"}))
    assert not pool.is_started(tmp_path, own.pid)
