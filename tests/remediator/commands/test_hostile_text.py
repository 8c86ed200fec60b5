"""One hostile text in every text column and argument: no command and no page prints it raw."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from sqlalchemy import JSON, String, Table, update

from gpuwarden.cli.main import HELP
from gpuwarden.db.transactions import writing
from gpuwarden.http.web_config import WebConfig
from gpuwarden.job import JobClass
from gpuwarden.queue import JobStore, QueueSettings, Submission
from gpuwarden.queue.schema import METADATA as QUEUE_TABLES
from gpuwarden.worker.job_logs import path_of
from remediator.ledger.captures import Capture
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import METADATA as LEDGER_TABLES
from remediator.remedies.guards import Act, Order
from remediator.webhook.app import create_app
from tests.conftest import Cli
from tests.hostile import HOSTILE, raw_lines
from tests.remediator.builders import HOST, NOW, alert
from tests.served import get, served_app

NOT_FREE = {
    "act", "condition", "fingerprint", "item_outcomes.outcome", "job_class", "key", "kind", "label_1", "label_2",
    "name", "remedy", "retired", "stage", "state", "subject", "topic", "wait_reason",
}  # fmt: skip
"""Columns of enums, and keys that a command needs."""

NOT_RUN = {
    "up", "init", "exporter", "remediator", "gateway", "completion",  # programs, and a script without data
}  # fmt: skip

PROBES = {"status", "top", "doctor"}
"""Commands that ask the parts over HTTP."""

COMMANDS: Sequence[Sequence[str]] = (
    ["job", "list"], ["job", "show", "1"], ["job", "logs", "1"], ["job", "wait", "1", "--timeout-s", "0"],
    ["job", "block", "1", "--reason", HOSTILE], ["job", "cancel", "1", "--reason", HOSTILE], ["job", "x" + HOSTILE],
    ["job", "requeue", "2"], ["runs", "list"], ["runs", "show", HOSTILE], ["runs", "show", "x" + HOSTILE],
    ["runs", "cancel", HOSTILE], ["wrangle", "list"], ["wrangle", "apply", HOSTILE], ["wrangle", "forgive", HOSTILE],
    ["queue", "list"], ["queue", "set", HOSTILE, "--budget-s", "1"], ["queue", "unset", "x" + HOSTILE],
    ["seats", "show", HOSTILE, "--kubeconfig", HOSTILE], ["notify", "test", HOSTILE],
    ["events", "c"], ["events", HOSTILE], ["gpu", "list"], ["gpu", "release", HOSTILE],
    ["gpu", "quarantine", "GPU-" + HOSTILE], ["worker", "list"], ["worker", "list", "--dead"],
    ["host", "list"], ["host", "show", HOST], ["host", "enrol", HOSTILE], ["host", "rotate", HOST, "--scopes", HOSTILE],
    ["host", "end-task", HOST, "2", "--reason", HOSTILE],
    ["worker", "lock", HOSTILE, "--host", HOSTILE], ["worker", "unlock", HOSTILE, "--host", HOSTILE],
    ["worker", "drain", "x", "--host", HOSTILE], ["status"], ["status", "--host", HOSTILE], ["top"], ["doctor"],
    ["drill", "--host", HOSTILE], ["drill", "--notify", "--host", HOSTILE],
    ["ledger", "list"], ["ledger", "show", "1"], ["ledger", "capture", "1"], ["ledger", "refused"],
    ["ledger", "summary", "--since", "9999d"], ["ledger", "audit", "--since", "9999d"], ["ledger", "export"],
    ["approve", "1"], ["decline", "1"], ["arm", "--host", HOSTILE, "--yes"], ["disarm"],
    ["init-db", "x" + HOSTILE], ["init-db", "sqlite:///x", "--queue", HOSTILE],
    ["pause", "--for", "1h", "--reason", HOSTILE], ["resume"], ["breaker", "reset", "--reason", HOSTILE], [HOSTILE],
    ["run", HOSTILE], ["run", "--name", HOSTILE, "--", "true"], ["run", "--steps-from", "(" + HOSTILE, "--", "true"],
)  # fmt: skip


def _poison(engine: Any, tables: Sequence[Table]) -> None:
    with writing(engine) as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        for table in tables:
            free = [
                column.name
                for column in table.columns
                if isinstance(column.type, String) and not {column.name, f"{table.name}.{column.name}"} & NOT_FREE
            ]
            values: dict[str, Any] = dict.fromkeys(free, HOSTILE)
            values |= {each.name: {HOSTILE: HOSTILE} for each in table.columns
                       if isinstance(each.type, JSON) and each.name in ("payload", "result")}  # fmt: skip
            if values:
                connection.execute(update(table).values(values))


@pytest.fixture
def hostile(
    ledger: Ledger, ledger_url: str, store: JobStore, queue_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A queue and a ledger with one row in most tables, all with the hostile text."""
    run = Submission(queue="gpu", run_id="r")
    store.runs.submit_run("r", {"a": run}, needs={}, wrangled=True, now=NOW)
    store.claims.claim("gpu", host=HOST, worker="w", incarnation="i", now=NOW)
    store.queue_settings.set_queue(
        QueueSettings(queue="gpu", job_class=JobClass.GPU, budget_s=None, lost_hold_s=None, set_at=NOW, set_by="a")
    )
    store.gpu_quarantine.quarantine(["GPU-1"], host=HOST, worker="w", reason="r", now=NOW)
    store.host_tokens.enrol(HOST, now=NOW)
    done = store.runs.submit(Submission(queue="other"), now=NOW)
    store.admin.cancel(done, reason="r", now=NOW)
    ledger.inbox.accept([alert()], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    (episode,) = ledger.episodes.list_open(HOST)
    document = {
        "armed": False, "took_s": 1.0, "cut_short": HOSTILE, "left_out_bytes": 0, "curves": [], "processes": [],
        "facts": {"phase": HOSTILE}, "logs": [{"source": HOSTILE, "lines": [HOSTILE]}], "notes": [HOSTILE],
    }  # fmt: skip
    ledger.captures.save(episode, Capture(armed=False, took_s=1.0, document=document), now=NOW)
    ledger.executors.beat(host=HOST, pid=7, armed=False, started_at=NOW, errors=0, now=NOW, workers=4)
    ledger.orders.give(Order(act=Act.BREAKER, at=NOW, who="a", reason="r"))
    _poison(store._engine, QUEUE_TABLES.sorted_tables)
    _poison(ledger._engine, LEDGER_TABLES.sorted_tables)
    path_of(tmp_path, 1, 1).write_text(f"a\t{HOSTILE}\n")
    monkeypatch.setenv("GPUWARDEN_JOB_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("GPUWARDEN_QUEUE_DB", queue_url)
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_LEDGER", ledger_url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_every_command_is_fed() -> None:
    assert {*HELP} - {each[0] for each in COMMANDS} == NOT_RUN


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("said", COMMANDS, ids=lambda said: ascii(" ".join(said)))
def test_no_command_prints_control_characters(said: Sequence[str], command: Cli) -> None:
    nowhere = (
        ["--exporter", "none", "--prometheus", "none", "--alertmanager", "none"] if said[0] in ("status", "top") else []
    )

    code, out, err = command(*said, *nowhere)

    assert code in ((124,) if "wait" in said else (0, 1, 2))
    assert (out + err).strip() or said[:2] in (["job", "cancel"], ["worker", "list"])
    assert raw_lines(out + err) == []
    if "logs" not in said:  # a log has several lines
        assert "\nforged" not in out + err


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("said", [each for each in COMMANDS if "list" in each], ids=" ".join)
def test_json_holds_the_text_itself(said: Sequence[str], command: Cli) -> None:
    _, out, _ = command(*said, "--json")

    assert out.isascii()
    assert raw_lines(out) == []
    if "--dead" not in said:
        assert HOSTILE in _texts([json.loads(line) for line in out.splitlines()])


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for each in inner for text in _texts(each)]


def remediator_app(ledger: Ledger) -> FastAPI:
    return create_app(ledger=ledger, host=HOST, web=WebConfig(None), body_max_bytes=2**20)


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("path", ["/docs/" + quote(HOSTILE), "/" + quote(HOSTILE), "/-/ready", "/openapi.json"])
def test_no_page_of_the_remediator_holds_control_characters(ledger: Ledger, path: str) -> None:
    with served_app(remediator_app(ledger), WebConfig(None)) as port:
        text = get(port, path)[1]

    assert text
    assert raw_lines(text) == []
