"""Commands find the ledger, the queue and the addresses of a running `gpuwarden up`."""

import os
from pathlib import Path

import pytest

from gpuwarden.db.running_up import LEDGER_ENV, QUEUE_ENV, published
from gpuwarden.queue import JobStore, Submission
from remediator.ledger.ledger import Ledger
from tests.conftest import Cli
from tests.remediator.builders import HOST, NOW, alert
from tests.remediator.ledger.test_ledger import accept


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (["ledger", "list"], "stall of w1 on box1"),
        (["arm", "--host", HOST, "--yes"], "armed: every remedy"),
        (["job", "list"], "queued"),
        (["queue", "list"], "gpu"),
        (["status"], "unreachable at http://127.0.0.1:1:"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_command_finds_the_running_up(
    said: list[str],
    shown: str,
    ledger: Ledger,
    ledger_url: str,
    store: JobStore,
    queue_url: str,
    command: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in (LEDGER_ENV, QUEUE_ENV):
        monkeypatch.delenv(name, raising=False)
    accept(ledger, alert())
    ledger.executors.beat(host=HOST, pid=7, armed=False, started_at=NOW, errors=0, now=NOW, workers=4)
    store.runs.submit(Submission(queue="gpu"), now=NOW)
    parts = ("EXPORTER", "PROMETHEUS", "ALERTMANAGER")
    variables = {f"GPUWARDEN_REMEDIATOR_{part}": "http://127.0.0.1:1" for part in parts}
    variables |= {LEDGER_ENV: ledger_url, QUEUE_ENV: queue_url, "GPUWARDEN_REMEDIATOR_PORT": "1"}

    before = command(*said)
    with published(variables, os.environ):
        code, out, err = command(*said)

    assert shown not in before[1]
    assert shown in out, err
    assert code == int(said == ["status"])
