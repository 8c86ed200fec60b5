"""The webhook: the real application behind uvicorn, in a separate process or in a thread of this one."""

import gzip
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url, text

import gpuwarden
import remediator.webhook.app
from deploy.standalone import debian_packages
from gpuwarden.db import engine as db_engine
from gpuwarden.db.transactions import writing
from gpuwarden.http.serving import Server, bind
from gpuwarden.http.web_config import WebConfig
from remediator.ledger.ledger import Ledger
from remediator.plan import Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from remediator.webhook import readiness
from remediator.webhook.app import create_app
from testbed.postgres import Postgres
from tests.asking import PLAIN
from tests.gpuwarden.http.test_web_config import users
from tests.remediator.builders import HOST, payload, sent
from tests.waiting import eventually, together

TOKEN = "0123456789abcdef-token"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BODY_MAX_BYTES = 64 * 1024
ALERTS_MAX = 20
ALERTS = "/api/v1/alerts"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running webhook at `url`, with its ledger."""

    url: str
    ledger: Ledger
    file: Path
    log: Path

    def post(
        self, body: Any = None, *, content: Any = None, headers: Mapping[str, str | bytes] = AUTHORIZED
    ) -> httpx.Response:
        content = json.dumps(body).encode() if content is None else content
        raw = {name: value if isinstance(value, bytes) else value.encode() for name, value in headers.items()}
        sent_headers = [(name.encode(), value) for name, value in raw.items()]
        return httpx.post(
            f"{self.url}{ALERTS}", content=content, headers=sent_headers, timeout=20, trust_env=False, verify=PLAIN
        )

    def count(self, series: str, **labels: str) -> float | None:
        page = httpx.get(f"{self.url}/metrics", trust_env=False, verify=PLAIN).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"gpuwarden_remediator_{series}" and sample.labels == labels:
                    return sample.value
        return None

    def asked(self, probe: str) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}/-/{probe}", timeout=20, trust_env=False, verify=PLAIN)
        return answer.status_code, answer.text

    def kept(self) -> int:
        with closing(sqlite3.connect(self.file)) as connection:
            kept: int = connection.execute("SELECT count(*) FROM alerts").fetchone()[0]
        return kept


def runtime_options(folder: Path, *, web: str = "") -> list[str]:
    """Write the runtime folder, the token and a web configuration with `web`. Returns the options for them."""
    folder.mkdir(exist_ok=True)
    (folder / "host").write_text(f"{HOST}\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "web.yml").write_text(f"bearer_token_file: token\n{web}")
    return [
        *("--runtime-dir", str(folder), "--web-config-file", str(folder / "web.yml")),
        *("--ledger", f"sqlite:///{folder}/ledger.db", "--body-max-bytes", str(BODY_MAX_BYTES)),
        *("--alerts-max", str(ALERTS_MAX)),
    ]


def gpuwarden_remediator(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", "remediator", *arguments]


def port_of(log: Path) -> int | None:
    for line in log.read_text().splitlines():
        if line.startswith("{") and json.loads(line)["event"] == "remediator ready":
            port: int = json.loads(line)["port"]
            return port
    return None


@contextmanager
def serving(folder: Path, *more: str, web: str = "") -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    options, log = runtime_options(folder, web=web), folder / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(gpuwarden_remediator("serve", "--port", "0", *options, *more), stderr=stderr)
    try:
        eventually(lambda: port_of(log) or process.poll() is not None, "the webhook listens")
        url = f"http://127.0.0.1:{port_of(log)}"
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
        try:
            yield Served(url=url, ledger=ledger, file=folder / "ledger.db", log=log), process
        finally:
            ledger.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One process for tests that do not stop it."""
    with serving(tmp_path_factory.mktemp("serve")) as (found, process):
        yield found
        assert process.poll() is None, found.log.read_text()


@pytest.fixture(params=["separate process", "this process"])
def webhook(request: pytest.FixtureRequest) -> Served:
    """The webhook in both ways. Coverage counts the second."""
    found: Served = request.getfixturevalue("served" if request.param == "separate process" else "in_process")
    return found


@pytest.fixture
def in_process(ledger: Ledger, ledger_file: Path) -> Iterator[Served]:
    """The application in a thread, so that a test can change its constants."""
    with served_here(ledger, ledger_file) as found:
        yield found


@pytest.fixture
def shared(postgres_url: str, ledger_file: Path) -> Iterator[Served]:
    """The application on a PostgreSQL ledger, which executors of several hosts share."""
    with closing(Ledger.open(postgres_url, host=HOST)) as ledger, served_here(ledger, ledger_file) as found:
        yield found


@contextmanager
def served_here(
    ledger: Ledger, ledger_file: Path, *, alertmanagers: Sequence[str] = (), listener: socket.socket | None = None
) -> Iterator[Served]:
    ledger_file.with_name("token").write_text(TOKEN)
    config = ledger_file.with_name("web.yml")
    config.write_text("bearer_token_file: token\n")
    web = WebConfig(config, credentials_required=True)
    app = create_app(
        ledger=ledger,
        host=HOST,
        web=web,
        body_max_bytes=BODY_MAX_BYTES,
        alerts_max=ALERTS_MAX,
        alertmanagers=alertmanagers,
    )
    server = Server(app, web)
    listener = listener or bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Served(url=url, ledger=ledger, file=ledger_file, log=ledger_file)
    finally:
        server.stop()
        thread.join(10)
        listener.close()


# --- accepted


def test_valid_alerts_are_saved_before_202_is_returned(webhook: Served) -> None:
    before = webhook.kept()

    answer = webhook.post(payload(sent("a"), sent("b", status="resolved")))

    assert (answer.status_code, answer.json()) == (202, {"accepted": 2, "refused": 0})
    assert webhook.kept() == before + 2


def test_empty_group_is_accepted(served: Served) -> None:
    assert served.post(payload()).status_code == 202


def test_refused_alerts_are_recorded_and_the_others_accepted(served: Served) -> None:
    bad = [sent("x", host="box2"), sent("y", remedy="reboot"), {"status": "firing"}]
    before = [served.count("alerts_total", outcome="refused", reason="other_host") or 0, served.kept()]

    answer = served.post(payload(sent("good"), *bad))

    assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "refused": 3})
    assert served.count("alerts_total", outcome="refused", reason="other_host") == before[0] + 1
    assert served.count("alerts_total", outcome="refused", reason="unknown_remedy") == 1
    assert served.count("alerts_total", outcome="refused", reason="malformed") == 1
    assert served.kept() == before[1] + 4
    assert {"malformed", "other_host", "unknown_remedy"} <= {
        reason for _, reason, _, _ in served.ledger.inbox.refused()
    }
    assert '"reason": "other_host"' in served.log.read_text()


@pytest.mark.parametrize("text", ["$(touch owned) `id`", "'; DROP TABLE alerts; --", "🙈"])
def test_hostile_labels_are_saved_unchanged(served: Served, text: str) -> None:
    assert served.post(payload(sent(worker=text))).status_code == 202

    while served.ledger.inbox.take_new(HOST, now=1.0):
        pass
    assert text in [episode.worker for episode in served.ledger.episodes.list_open()]


def test_half_a_surrogate_refuses_only_its_own_alert(webhook: Served) -> None:
    body = json.dumps(payload(sent("good"), sent("bad", worker="w\ud800"))).encode()
    assert b"\\ud800" in body

    answer = webhook.post(content=body)

    assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "refused": 1})
    while webhook.ledger.inbox.take_new(HOST, now=1.0):
        pass
    assert webhook.ledger.episodes.list_open()


WATCHDOG = {**sent(), "labels": {"alertname": "GpuwardenWatchdog", "severity": "none"}}


def test_limits_are_published_for_the_rules(tmp_path: Path) -> None:
    options = ["--wrangle-activation=2", "--executor-down-s=7", "--intent-overdue-s=70"]

    with serving(tmp_path / "run", *options) as (webhook, _):
        assert webhook.count("wrangle_activation_items") == 2
        assert webhook.count("executor_down_after_seconds") == 7
        assert webhook.count("intent_overdue_after_seconds") == 70


def test_watchdog_alert_updates_its_timestamp_and_is_not_saved(in_process: Served) -> None:
    served = in_process
    assert served.count("watchdog_timestamp_seconds") is None
    before = time.time()

    answer = served.post(payload(WATCHDOG))

    assert (answer.status_code, answer.json()) == (202, {"accepted": 0, "refused": 0})
    assert before <= (served.count("watchdog_timestamp_seconds") or 0) <= time.time()
    assert served.kept() == 0
    assert served.post(payload(WATCHDOG, sent())).json() == {"accepted": 1, "refused": 0}
    assert served.kept() == 1


def test_resolved_watchdog_and_other_alerts_are_no_watchdog_heartbeat(in_process: Served) -> None:
    in_process.post(payload({**WATCHDOG, "status": "resolved"}, sent()))

    assert in_process.count("watchdog_timestamp_seconds") is None
    assert in_process.kept() == 1


def test_watchdog_timestamp_is_updated_while_the_ledger_is_locked(in_process: Served, ledger_file: Path) -> None:
    with closing(sqlite3.connect(ledger_file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")

        assert in_process.post(payload(WATCHDOG)).status_code == 202

        other.execute("ROLLBACK")
    assert in_process.count("watchdog_timestamp_seconds") is not None


def test_watchdog_alert_needs_the_token(in_process: Served) -> None:
    assert in_process.post(payload(WATCHDOG), headers={}).status_code == 401

    assert in_process.count("watchdog_timestamp_seconds") is None


# --- not authenticated

UNAUTHENTICATED = {
    "no token": {},
    "wrong token": {"Authorization": "Bearer 0123456789abcdef-tokem"},
    "prefix of the token": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "longer than the token": {"Authorization": f"Bearer {TOKEN}x"},
    "empty token": {"Authorization": "Bearer"},
    "another scheme": {"Authorization": f"Basic {TOKEN}"},
    "token without a scheme": {"Authorization": TOKEN},
    "another header": {"X-Token": TOKEN},
}


@pytest.mark.parametrize("headers", UNAUTHENTICATED.values(), ids=UNAUTHENTICATED)
def test_call_without_the_token_is_not_read(webhook: Served, headers: dict[str, str]) -> None:
    before = webhook.kept(), webhook.count("webhook_rejected_total", reason="unauthenticated")

    answer = webhook.post(payload(sent()), headers=headers)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert ("no Authorization header" in answer.text) == ("Authorization" not in headers)
    assert webhook.kept() == before[0]
    assert webhook.count("webhook_rejected_total", reason="unauthenticated") == (before[1] or 0) + 1


def test_non_ascii_token_is_wrong(served: Served) -> None:
    answer = served.post(payload(), headers={"Authorization": "Bearer tökén-0123456789abc".encode()})

    assert answer.status_code == 401


def test_scheme_is_case_insensitive(served: Served) -> None:
    assert served.post(payload(), headers={"Authorization": f"bearer {TOKEN}"}).status_code == 202


def test_new_token_is_loaded_at_run_time_and_a_password_accepted(tmp_path: Path) -> None:
    with serving(tmp_path / "run", web=users(ann="0123456789abcdef")) as (served, _):
        new = {"Authorization": f"Bearer new-{TOKEN}"}
        assert (served.post(payload()).status_code, served.post(payload(), headers=new).status_code) == (202, 401)

        (tmp_path / "run" / "token").write_text(f"{TOKEN}\nnew-{TOKEN}\n")

        eventually(lambda: served.post(payload(), headers=new).status_code == 202, "the new token is accepted")
        assert served.post(payload()).status_code == 202
        answer = httpx.post(
            served.url + ALERTS,
            json=payload(),
            auth=("ann", "0123456789abcdef"),
            timeout=20,
            trust_env=False,
            verify=PLAIN,
        )
        assert answer.status_code == 202
        assert TOKEN not in served.log.read_text()


# --- not accepted


def test_oversized_body_is_refused_with_413(webhook: Served) -> None:
    before = webhook.kept(), webhook.count("webhook_rejected_total", reason="oversized")

    answer = webhook.post(content=b" " * (BODY_MAX_BYTES + 1))

    assert answer.status_code == 413
    assert "set max_alerts in Alertmanager" in answer.text
    assert webhook.kept() == before[0]
    assert webhook.count("webhook_rejected_total", reason="oversized") == (before[1] or 0) + 1


def test_oversized_body_without_a_length_is_refused(webhook: Served) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(BODY_MAX_BYTES // 1024 + 1):
            yield b" " * 1024

    assert webhook.post(content=parts()).status_code == 413


def test_body_of_exactly_the_limit_is_read(served: Served) -> None:
    body = json.dumps(payload()).encode()

    assert served.post(content=body + b" " * (BODY_MAX_BYTES - len(body))).status_code == 202


def test_body_with_too_many_alerts_is_refused(webhook: Served) -> None:
    before = webhook.kept(), webhook.count("webhook_rejected_total", reason="too_many")
    many = [sent(f"f{number}") for number in range(ALERTS_MAX + 1)]

    answer = webhook.post(payload(*many))

    assert answer.status_code == 413
    assert f"{ALERTS_MAX + 1} alerts in one payload, maximum {ALERTS_MAX}:" in answer.text
    assert webhook.kept() == before[0]
    assert webhook.count("webhook_rejected_total", reason="too_many") == (before[1] or 0) + 1
    assert webhook.post(payload(*many[1:])).status_code == 202
    assert webhook.kept() == before[0] + ALERTS_MAX


MALFORMED = {
    "empty": b"",
    "not JSON": b"stalled!",
    "truncated": json.dumps(payload(sent())).encode()[:-20],
    "not UTF-8": b'{"alerts": ["\xff"]}',
    "compressed": gzip.compress(json.dumps(payload()).encode()),
    "list": b"[]",
    "no alerts": b"{}",
    "alerts not a list": b'{"alerts": {}}',
    "deep nesting": b'{"alerts": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "number too long for Python": b'{"alerts": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_invalid_payload_is_refused_with_400(webhook: Served, body: bytes) -> None:
    before = webhook.kept(), webhook.count("webhook_rejected_total", reason="malformed")

    answer = webhook.post(content=body)

    assert answer.status_code == 400
    assert "not an Alertmanager payload" in answer.text
    assert webhook.kept() == before[0]
    assert webhook.count("webhook_rejected_total", reason="malformed") == (before[1] or 0) + 1


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_webhook_accepts_only_post(served: Served, method: str) -> None:
    assert (
        httpx.request(method, served.url + ALERTS, headers=AUTHORIZED, trust_env=False, verify=PLAIN).status_code == 405
    )


def test_no_api_documentation_pages_are_served(served: Served) -> None:
    assert [
        httpx.get(served.url + page, trust_env=False, verify=PLAIN).status_code for page in ("/docs", "/redoc")
    ] == [404, 404]


def test_aborted_call_is_counted(served: Served) -> None:
    before = served.kept(), served.count("webhook_rejected_total", reason="incomplete") or 0
    address = served.url.removeprefix("http://").split(":")

    with socket.create_connection((address[0], int(address[1]))) as caller:
        head = f"POST {ALERTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 999\r\n\r\n"
        caller.sendall(head.encode() + b'{"alerts": [')

    eventually(lambda: served.count("webhook_rejected_total", reason="incomplete") == before[1] + 1, "counted")
    assert served.kept() == before[0]
    assert "Traceback" not in served.log.read_text()


def test_call_without_a_body_times_out(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remediator.webhook.app, "BODY_TIMEOUT_S", 0.05)
    address = in_process.url.removeprefix("http://").split(":")

    with socket.create_connection((address[0], int(address[1])), timeout=10) as caller:
        head = f"POST {ALERTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 999\r\n\r\n"
        caller.sendall(head.encode())
        assert b" 408 " in caller.recv(4096).partition(b"\r\n")[0]

    assert in_process.count("webhook_rejected_total", reason="incomplete") == 1


def test_locked_ledger_gives_503_and_a_retry_is_accepted(
    monkeypatch: pytest.MonkeyPatch, ledger_file: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.1)
    served: Served = request.getfixturevalue("in_process")
    with closing(sqlite3.connect(ledger_file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")

        locked = served.post(payload(sent()))

        other.execute("ROLLBACK")
    assert locked.status_code == 503
    assert served.kept() == 0
    assert served.count("webhook_rejected_total", reason="ledger") == 1
    assert served.post(payload(sent())).status_code == 202
    assert served.kept() == 1


# --- metrics


@pytest.mark.needs_parts
def test_promtool_accepts_the_metrics(served: Served) -> None:
    served.post(payload(sent(), sent("b", host="box2")))
    served.ledger.inbox.take_new(HOST, now=1.0)
    served.ledger.executors.beat(host=HOST, pid=1, armed=True, started_at=1.0, errors=0, now=2.0)
    served.ledger.journal.record_dry_run(1, "would", now=3.0)
    page = httpx.get(f"{served.url}/metrics", trust_env=False, verify=PLAIN).text

    checked = subprocess.run(
        [debian_packages.find("promtool"), "check", "metrics"],
        input=page,
        env=debian_packages.env_for_parts(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert "gpuwarden_remediator_executor_heartbeat_age_seconds" in page
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_metrics_have_the_host_the_executor_and_the_ledger(in_process: Served) -> None:
    served = in_process
    beat = partial(served.ledger.executors.beat, host=HOST, pid=1, armed=True, started_at=1.0, now=4_000_000_000.0)
    beat(errors=2)
    served.ledger.orders.give(Order(act=Act.ARM, at=1.0, who="ann", reason="", remedy="restart_worker"))

    assert served.count("ledger_up") == 1
    assert served.count("info", nodename=HOST, version=gpuwarden.__version__) == 1
    assert served.count("armed", remedy="restart_worker") == 1
    assert served.count("executor_heartbeat_age_seconds") == 0
    assert served.count("executor_errors_total") == 2
    assert served.count("seats_on") == 0
    beat(errors=2, seats_on=True, seats_failures=3)
    assert (served.count("seats_on"), served.count("seats_failures_total")) == (1, 3)


def test_metrics_have_held_episodes_the_breaker_and_pauses(in_process: Served) -> None:
    served = in_process
    assert (served.count("circuit_breaker_open"), served.count("paused")) == (0, 0)
    served.post(payload(sent("a"), sent("b", worker="w2"), sent("c", worker="w3")))
    served.ledger.inbox.take_new(HOST, now=1.0)
    for number in (1, 2):
        served.ledger.journal.wait(
            number, Wait(reason=Reason.CIRCUIT_BREAKER, message="the circuit breaker is open"), now=2.0
        )
    served.ledger.orders.give(Order(act=Act.BREAKER, at=3.0, who="the executor", reason="4 at once"))
    served.ledger.orders.give(Order(act=Act.PAUSE, at=3.0, until=4_000_000_000.0, who="ann", reason=""))

    assert served.count("episodes_held", reason="circuit_breaker") == 2
    assert served.count("episodes_open") == 3
    assert (served.count("circuit_breaker_open"), served.count("paused")) == (1, 1)
    served.ledger.orders.give(Order(act=Act.RELEASE, at=4.0, who="ann", reason=""))
    served.ledger.journal.record(1, "decided", "begin", "stalled", now=5.0)
    assert (served.count("circuit_breaker_open"), served.count("episodes_held", reason="circuit_breaker")) == (0, 1)


def test_series_without_an_executor_are_absent_not_zero(in_process: Served) -> None:
    assert in_process.count("armed", remedy="restart_worker") is None
    assert in_process.count("executor_heartbeat_age_seconds") is None
    assert in_process.count("episodes_open") == 0


def test_unreadable_ledger_publishes_ledger_up_0_without_counts(in_process: Served) -> None:
    with closing(sqlite3.connect(in_process.file)) as connection:
        connection.execute("ALTER TABLE episodes RENAME TO lost")

    assert in_process.count("ledger_up") == 0
    assert in_process.count("episodes_open") is None


# --- readiness


def test_ready_with_a_usable_ledger(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "STANDS_S", 0.0)
    assert (in_process.asked("ready"), in_process.asked("healthy")) == ((200, "ready\n"), (200, "healthy\n"))
    with closing(sqlite3.connect(in_process.file)) as connection:
        connection.execute("ALTER TABLE episodes RENAME TO lost")

    code, said = in_process.asked("ready")

    assert (code, "no such table: episodes" in said) == (503, True)
    assert in_process.asked("healthy") == (200, "healthy\n")


def test_locked_ledger_is_not_ready_until_it_is_unlocked(
    monkeypatch: pytest.MonkeyPatch, ledger_file: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(readiness, "STANDS_S", 0.0)
    served: Served = request.getfixturevalue("in_process")
    with closing(sqlite3.connect(ledger_file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        code, said = served.asked("ready")

        assert (code, "database is locked" in said) == (503, True)
        assert served.count("ledger_up") == 1
        other.execute("ROLLBACK")
    assert served.asked("ready") == (200, "ready\n")


def test_slow_ledger_is_not_ready_and_checked_once_for_all_callers(
    ledger_file: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 60.0)  # the check outlasts all calls
    monkeypatch.setattr(readiness, "READY_S", 0.3)
    in_process: Served = request.getfixturevalue("in_process")
    looks: list[float] = []
    look = in_process.ledger.health.check_usable

    def counted() -> None:
        looks.append(time.monotonic())
        look()

    monkeypatch.setattr(in_process.ledger.health, "check_usable", counted)
    with closing(sqlite3.connect(ledger_file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        answers = together(*[lambda: in_process.asked("ready")] * 20)

        assert set(answers) == {(503, "the ledger could not be read and written within 0.3 s\n")}
        assert len(looks) == 1
        other.execute("ROLLBACK")
    eventually(lambda: in_process.asked("ready")[0] == 200, "it is ready again")


def test_readiness_is_cached_for_a_moment(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "STANDS_S", 60.0)
    assert in_process.asked("ready")[0] == 200
    with closing(sqlite3.connect(in_process.file)) as connection:
        connection.execute("ALTER TABLE episodes RENAME TO lost")

    assert in_process.asked("ready")[0] == 200
    monkeypatch.setattr(readiness, "STANDS_S", 0.0)
    assert in_process.asked("ready")[0] == 503


# --- the program


def test_sigterm_exits_0(tmp_path: Path) -> None:
    with serving(tmp_path / "run") as (served, process):
        assert served.asked("ready") == (200, "ready\n")

        process.send_signal(signal.SIGTERM)

        assert process.wait(15) == 0
        assert '"event": "remediator stopped"' in served.log.read_text()


def failing(*arguments: str, **env: str) -> tuple[int, list[str]]:
    """Run a program that does not start. Returns its exit code and the lines that are not log lines."""
    ended = subprocess.run(
        gpuwarden_remediator(*arguments),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, [line for line in ended.stderr.splitlines() if not line.startswith("{")]


def test_port_in_use_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        code, said = failing("serve", *runtime_options(tmp_path / "run"), "--port", str(port))

    assert code == 1
    assert len(said) == 1
    assert said[0].startswith(f"gpuwarden remediator: cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert said[0].endswith("stop what listens there, or give another --port")


def no_host_key(folder: Path) -> None:
    (folder / "host").unlink()


def no_web_config(folder: Path) -> None:
    (folder / "web.yml").unlink()


def no_credentials(folder: Path) -> None:
    (folder / "web.yml").write_text("\n")


def no_token_file(folder: Path) -> None:
    (folder / "token").unlink()


def short_token(folder: Path) -> None:
    (folder / "token").write_text("0123456789abcde\n")


def no_text_in_token(folder: Path) -> None:
    (folder / "token").write_bytes(b"\xff" * 20)


def no_ledger_folder(folder: Path) -> None:
    (folder / "ledger.db").mkdir()


MISSING: dict[str, tuple[Callable[[Path], None], str]] = {
    "no host key": (no_host_key, "no host key at"),
    "no web configuration": (no_web_config, "web.yml cannot be read (No such file"),
    "no credentials": (no_credentials, "is empty"),
    "no token file": (no_token_file, "token cannot be read (No such file"),
    "short token": (short_token, "has 15 characters: use 16 or more"),
    "token not UTF-8": (no_text_in_token, "is not UTF-8 text"),
    "ledger cannot be opened": (no_ledger_folder, "is not a regular file"),
}


@pytest.mark.parametrize(("broken", "says"), MISSING.values(), ids=MISSING)
def test_failed_start_is_one_line_and_exit_1(tmp_path: Path, broken: Callable[[Path], None], says: str) -> None:
    options = runtime_options(tmp_path / "run")
    broken(tmp_path / "run")

    code, said = failing("serve", *options, "--port", "0")

    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("gpuwarden remediator: ")
    assert says in said[0]
    assert TOKEN not in said[0]


def test_invalid_settings_are_one_line_each_and_exit_2(tmp_path: Path) -> None:
    code, said = failing(
        "serve", "--runtime-dir", str(tmp_path), "--port", "70000", GPUWARDEN_REMEDIATOR_LEDGER="sqlite:///x"
    )

    assert code == 2
    assert [line.removeprefix("gpuwarden remediator serve: error: ").partition(": ")[0] for line in said] == [
        "'70000' is invalid for --port (or GPUWARDEN_REMEDIATOR_PORT)",
        "missing --web-config-file (or GPUWARDEN_REMEDIATOR_WEB_CONFIG_FILE)",
    ]


def test_unknown_role_exits_2() -> None:
    code, said = failing("sreve")

    assert code == 2
    assert "'sreve' is unknown; did you mean serve?" in said[-1]


# --- a shared ledger


@pytest.mark.needs_postgres
def test_shared_ledger_accepts_alerts_of_every_host_with_an_executor(shared: Served) -> None:
    shared.ledger.executors.beat(host="box2", pid=1, armed=True, started_at=1.0, errors=0, now=2.0)

    answer = shared.post(payload(sent("a"), sent("b", host="box2"), sent("c", host="box3")))

    assert answer.json() == {"accepted": 2, "refused": 1}
    assert [(reason, labels["host"]) for _, reason, _, labels in shared.ledger.inbox.refused()] == [
        ("other_host", "box3")
    ]
    assert (shared.ledger.inbox.take_new(HOST, now=1.0), shared.ledger.inbox.take_new("box2", now=1.0)) == (1, 1)


def test_ledger_in_a_file_refuses_alerts_of_another_host(in_process: Served) -> None:
    in_process.ledger.executors.beat(host="box2", pid=1, armed=True, started_at=1.0, errors=0, now=2.0)

    assert in_process.post(payload(sent("b", host="box2"))).json() == {"accepted": 0, "refused": 1}


@pytest.mark.needs_postgres
def test_metrics_of_a_shared_ledger_count_the_own_host(shared: Served) -> None:
    for host in (HOST, "box2"):
        shared.ledger.executors.beat(host=host, pid=1, armed=host == HOST, started_at=1.0, errors=0, now=2.0)
    shared.ledger.orders.give(Order(act=Act.ARM, at=1.0, who="ann", reason="", host=HOST))
    shared.post(payload(sent("a"), sent("b", host="box2"), sent("c", host="box3")))
    shared.ledger.inbox.take_new(HOST, now=1.0)
    shared.ledger.inbox.take_new("box2", now=1.0)
    shared.ledger.journal.record_dry_run(1, "would", now=3.0)

    assert shared.count("ledger_up") == 1
    assert shared.count("alerts_total", outcome="accepted", reason="") == 1
    assert shared.count("alerts_total", outcome="refused", reason="other_host") == 1
    assert shared.count("episodes_open") == 1
    assert shared.count("steps_total", act="would", step="act") == 1
    assert shared.count("armed", remedy="restart_worker") == 1


@pytest.mark.needs_postgres
def test_stopped_server_gives_503_and_a_retry_is_accepted(postgres: Postgres, shared: Served) -> None:
    postgres.stop()

    assert shared.post(payload(sent())).status_code == 503
    assert shared.post(payload(sent("b", host="box2"))).status_code == 503
    assert (shared.asked("ready")[0], shared.asked("healthy")[0]) == (503, 200)
    assert shared.count("ledger_up") == 0
    postgres.start()
    assert shared.post(payload(sent())).status_code == 202


@pytest.mark.needs_postgres
def test_read_only_ledger_is_not_ready(postgres_url: str, ledger_file: Path) -> None:
    reader = f"reader_{uuid4().hex}"
    with closing(Ledger.open(postgres_url)) as owner, writing(owner._engine) as connection:
        connection.execute(text(f"CREATE ROLE {reader} LOGIN"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {reader}"))
    url = make_url(postgres_url).set(username=reader).render_as_string(hide_password=False)
    with closing(Ledger.open(url, host=HOST)) as ledger, served_here(ledger, ledger_file) as served:
        code, said = served.asked("ready")

        assert (code, "permission denied for table executors" in said) == (503, True)
        assert served.count("ledger_up") == 1


@pytest.mark.needs_postgres
@pytest.mark.parametrize("text", ["w1\x00", "🙈" * 300], ids=["a NUL", "too long for an index"])
def test_text_that_postgresql_refuses_affects_only_its_own_alert(shared: Served, text: str) -> None:
    answer = shared.post(payload(sent("bad", worker=text), sent("good")))

    assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "refused": 1})
    assert shared.ledger.inbox.take_new(HOST, now=1.0) == 1
    assert [episode.worker for episode in shared.ledger.episodes.list_open()] == ["w1"]
