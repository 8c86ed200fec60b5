"""Alerts that Alertmanager left out of a call are fetched, with a real Alertmanager and misbehaving servers."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from remediator.ledger.ledger import Ledger
from remediator.webhook import reconcile
from tests.remediator.alertmanager import alertmanager, send_alerts, silence
from tests.remediator.builders import HOST, LABELS, payload, sent
from tests.remediator.webhook.test_app import ALERTS, ALERTS_MAX, TOKEN, Served, served_here, serving
from tests.waiting import eventually

WORKERS = [{**LABELS, "worker": f"w{number}"} for number in range(5)]
NOWHERE = "http://127.0.0.1:9/"


def taken(served: Served) -> set[str]:
    """The workers of open episodes, after the intake of all accepted alerts."""
    while served.ledger.inbox.take_new(HOST, now=1.0):
        pass
    return {episode.worker for episode in served.ledger.episodes.list_open()}


# --- a real Alertmanager


@pytest.mark.needs_parts
def test_truncated_alerts_are_fetched(ledger: Ledger, ledger_file: Path, tmp_path: Path) -> None:
    http = {"authorization": {"credentials": TOKEN}}
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{ALERTS}"
        with (
            alertmanager(tmp_path / "alertmanager", url=url, max_alerts=2, http_config=http) as its,
            served_here(ledger, ledger_file, alertmanagers=[its], listener=listener) as served,
        ):
            send_alerts(its, *WORKERS)

            eventually(lambda: taken(served) == {each["worker"] for each in WORKERS}, "all five are taken")
            assert served.count("alerts_truncated_total") == 3
            eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "one query")


@pytest.mark.needs_parts
def test_configured_alertmanager_is_queried_for_alerts_of_the_receiver(tmp_path: Path) -> None:
    with alertmanager(tmp_path / "alertmanager", url=NOWHERE) as its:
        send_alerts(its, *WORKERS)
        silence(its, worker="w3")
        with serving(tmp_path / "run", "--alertmanager", its) as (served, _):
            served.post(payload(receiver="another", truncatedAlerts=1))
            eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "one query is done")
            assert taken(served) == set()
        with serving(tmp_path / "again", "--alertmanager", f"{its}/") as (served, _):
            answer = served.post(payload(sent(worker="w0"), receiver=r"gpuwarden \(its own\)", truncatedAlerts=4))

            assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "refused": 0})
            eventually(lambda: taken(served) == {"w0", "w1", "w2", "w4"}, "all but the silenced alert are taken")
            assert served.kept() == 1 + 4


# --- fake servers


class Server:
    """Answers each request with `answers` while `free` is set, and counts requests and their concurrency."""

    def __init__(self, answers: Callable[[], tuple[int, bytes]]) -> None:
        self.asked: list[str] = []
        self.asked_at_s: list[float] = []
        self.free = threading.Event()
        self.free.set()
        self.at_once = self.most_at_once = 0
        lock = threading.Lock()
        its = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    its.asked.append(self.path)
                    its.asked_at_s.append(time.monotonic())
                    its.at_once += 1
                    its.most_at_once = max(its.most_at_once, its.at_once)
                its.free.wait(20)
                with lock:
                    its.at_once -= 1
                code, body = answers()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with suppress(ConnectionError):  # the client closed the connection
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[], tuple[int, bytes]]], Server]]:
    """Start a server with these answers."""
    started: list[tuple[Server, threading.Thread]] = []

    def start(answers: Callable[[], tuple[int, bytes]]) -> Server:
        found = Server(answers)
        thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        started.append((found, thread))
        return found

    yield start
    for found, thread in started:
        found.free.set()
        found.http.shutdown()
        thread.join()
        found.http.server_close()


def listing(*alerts: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps([{**each, "status": {"state": "active"}} for each in alerts]).encode()


def test_one_query_serves_all_calls_received_before_it(
    ledger: Ledger, ledger_file: Path, server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "REST_S", 0.0)
    its = server(lambda: listing(sent(worker="w1")))
    its.free.clear()
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        answers = [served.post(payload(receiver="r", truncatedAlerts=2)) for _ in range(5)]
        assert {answer.status_code for answer in answers} == {202}
        eventually(lambda: len(its.asked) == 1, "it is asked")
        assert served.kept() == 0

        its.free.set()

        eventually(lambda: served.count("reconciliations_total", outcome="done") == 2, "one more query")
        assert (len(its.asked), its.most_at_once) == (2, 1)
        assert its.asked[0] == "/api/v2/alerts?active=true&silenced=false&inhibited=false&receiver=r"
        assert served.count("alerts_truncated_total") == 10
        assert taken(served) == {"w1"}


def test_resolved_alert_stays_resolved(ledger: Ledger, ledger_file: Path, server: Callable[..., Server]) -> None:
    its = server(lambda: listing(sent("before"), sent("meanwhile", worker="w2"), sent("fires", worker="w3")))
    its.free.clear()
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(sent("before", status="resolved"), sent("meanwhile", worker="w2"), truncatedAlerts=3))
        eventually(lambda: len(its.asked) == 1, "it is asked")
        served.post(payload(sent("meanwhile", status="resolved", worker="w2")))

        its.free.set()

        eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "it has answered")
        assert taken(served) == {"w1", "w2", "w3"}
        firing = {each.worker: each.firing for each in ledger.episodes.list_open()}
        assert firing == {"w1": True, "w2": False, "w3": True}, "w1 fired again, or it would not be listed"
        assert served.kept() == 2 + 1 + 2


def test_queries_have_a_minimum_interval(
    ledger: Ledger, ledger_file: Path, server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "REST_S", 1.0)
    its = server(listing)
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(truncatedAlerts=1))
        eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "it is asked")
        served.post(payload(truncatedAlerts=1))
        eventually(lambda: served.count("reconciliations_total", outcome="done") == 2, "it is asked once more")

    first_s, second_s = its.asked_at_s
    assert second_s - first_s >= 1.0


def test_failed_query_is_retried_a_limited_number_of_times(
    ledger: Ledger, ledger_file: Path, server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "REST_S", 0.0)
    monkeypatch.setattr(reconcile, "ATTEMPTS_MAX", 3)
    its = server(lambda: (503, b""))
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(receiver="first", truncatedAlerts=1))
        eventually(lambda: served.count("reconciliations_total", outcome="failed") == 3, "three queries failed")
        served.post(payload(receiver="second", truncatedAlerts=1))
        eventually(lambda: served.count("reconciliations_total", outcome="failed") == 6, "it is asked again")

    assert [path.rpartition("=")[2] for path in its.asked] == ["first"] * 3 + ["second"] * 3


def test_number_of_pending_receivers_is_limited(
    ledger: Ledger, ledger_file: Path, server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "RECEIVERS_MAX", 1)
    its = server(listing)
    its.free.clear()
    with capture_logs() as logged, served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(receiver="asked", truncatedAlerts=1))
        eventually(lambda: len(its.asked) == 1, "it is asked")
        for receiver in ("waits", "lost"):
            served.post(payload(receiver=receiver, truncatedAlerts=7))

    (logged_line,) = [line for line in logged if line["event"] == "alerts left out of a call and lost"]
    assert (logged_line["count"], logged_line["reason"]) == (7, "1 other receivers are pending")


def test_every_alertmanager_is_queried(ledger: Ledger, ledger_file: Path, server: Callable[..., Server]) -> None:
    many = [sent(f"f{number}", worker=f"w{number}") for number in range(2 * ALERTS_MAX + 1)]
    watchdog = {**sent(), "labels": {"alertname": "GpuwardenWatchdog"}}
    bad, good = server(lambda: (500, b"")), server(lambda: listing(*many, {"labels": {}}, watchdog))
    with served_here(ledger, ledger_file, alertmanagers=[bad.url, good.url]) as served:
        served.post(payload(truncatedAlerts=1))

        eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "the second has answered")
        assert served.count("reconciliations_total", outcome="failed") == 1
        assert served.count("alerts_total", outcome="accepted", reason="") == len(many)
        assert served.count("alerts_total", outcome="refused", reason="malformed") == 1
        assert served.kept() == len(many) + 1
        assert served.count("watchdog_timestamp_seconds") is None, "a fetched watchdog does not count"


USELESS: dict[str, tuple[tuple[int, bytes], str]] = {
    "error": ((503, b"starting"), "it returned 503"),
    "redirect": ((302, b""), "it returned 302"),
    "HTML page": ((200, b"<html>a proxy</html>"), "Expecting value"),
    "not UTF-8": ((200, b"\xff\xfe\xfd"), "codec can't decode"),
    "another API": ((200, b'{"data": []}'), "not a list of alerts"),
    "nested too deep": ((200, b"[" * 100_000), "recursion"),
    "too large": ((200, b" " * 2000), "its answer is larger than 1000 bytes"),
}


@pytest.mark.parametrize(("answer", "says"), USELESS.values(), ids=USELESS)
def test_invalid_answer_is_logged_counted_and_retried(
    ledger: Ledger,
    ledger_file: Path,
    server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, bytes],
    says: str,
) -> None:
    monkeypatch.setattr(reconcile, "REST_S", 0.0)
    monkeypatch.setattr(reconcile, "ANSWER_MAX_BYTES", 1000)
    if says == "recursion":
        monkeypatch.setattr(reconcile, "ANSWER_MAX_BYTES", 10**6)
    answers = iter([answer])
    its = server(lambda: next(answers, listing(sent())))
    with (
        capture_logs() as logged,
        served_here(ledger, ledger_file, alertmanagers=[its.url.replace("//", "//ann:secret@")]) as served,
    ):
        served.post(payload(truncatedAlerts=1))

        eventually(lambda: served.count("reconciliations_total", outcome="failed") == 1, "it is counted")
        eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "it is asked again")
        assert served.kept() == 1
    (logged_line,) = [line for line in logged if line["event"] == "left-out alerts not fetched"]
    assert says in logged_line["reason"]
    assert "secret" not in str(logged)


def test_query_without_an_answer_times_out(
    ledger: Ledger, ledger_file: Path, server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "ANSWER_S", 0.2)
    its = server(listing)
    its.free.clear()
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(truncatedAlerts=1))

        eventually(lambda: served.count("reconciliations_total", outcome="failed") == 1, "it timed out")


def test_truncated_alerts_without_an_alertmanager_are_counted_and_logged(ledger: Ledger, ledger_file: Path) -> None:
    with capture_logs() as logged, served_here(ledger, ledger_file) as served:
        assert served.post(payload(sent(), truncatedAlerts=3)).status_code == 202

        assert served.count("alerts_truncated_total") == 3
        assert served.count("reconciliations_total", outcome="done") == 0
    (logged_line,) = [line for line in logged if line["event"] == "alerts left out of a call and lost"]
    assert "set --alertmanager" in logged_line["reason"]


def test_complete_call_starts_no_query(ledger: Ledger, ledger_file: Path, server: Callable[..., Server]) -> None:
    its = server(listing)
    with served_here(ledger, ledger_file, alertmanagers=[its.url]) as served:
        served.post(payload(sent()))
        assert served.count("alerts_truncated_total") == 0
        served.post(payload(truncatedAlerts=1))

        eventually(lambda: served.count("reconciliations_total", outcome="done") == 1, "the truncated call starts one")
        assert len(its.asked) == 1
