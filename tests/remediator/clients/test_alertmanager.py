"""Silences hold actions: with a real Alertmanager and with misbehaving servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from gpuwarden.cli.main import main
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.clients import alertmanager as silences
from remediator.clients.alertmanager import Silences
from remediator.executor import stages
from remediator.executor.executor import Executor
from remediator.ledger.ledger import Ledger
from remediator.remedies.guards import Act, Order
from tests.asking import PLAIN
from tests.remediator.alertmanager import alertmanager, expire, send_alerts, silence
from tests.remediator.builders import HOST, LABELS, alert
from tests.remediator.executor.builders import BOUNDLESS, PACE, executor, history, journal, running, to_the_end, turn
from tests.remediator.executor.test_runs import faulty_worker
from tests.remediator.webhook.test_reconcile import NOWHERE, Server
from tests.remediator.world import Box, World
from tests.waiting import eventually

CLOSED_PORT = "http://ann:secret@127.0.0.1:9"


@pytest.fixture(scope="module")
def shared_alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with alertmanager(tmp_path_factory.mktemp("silences") / "alertmanager", url=NOWHERE) as url:
        yield url


@pytest.fixture
def real(shared_alertmanager: str) -> Iterator[str]:
    """A real Alertmanager without silences."""
    yield shared_alertmanager
    for each in httpx.get(f"{shared_alertmanager}/api/v2/silences", trust_env=False, verify=PLAIN).json():
        expire(shared_alertmanager, each["id"])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache no answer, so that a test does not wait."""
    monkeypatch.setattr(silences, "FRESH_S", 0.0)


@contextmanager
def silences_of(*urls: str) -> Iterator[Silences]:
    asks = Silences(urls)
    try:
        yield asks
    finally:
        asks.close()


@contextmanager
def serving_http(answers: Callable[[], tuple[int, bytes]]) -> Iterator[Server]:
    """A server with these answers."""
    found = Server(answers)
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        found.free.set()
        found.http.shutdown()
        thread.join()
        found.http.server_close()


def send_alert(url: str, **labels: Any) -> str:
    """Send an alert to an Alertmanager. Returns its fingerprint there."""
    send_alerts(url, {**LABELS, **labels})
    names = {**LABELS, **labels}

    def found() -> Any:
        alerts = httpx.get(f"{url}/api/v2/alerts", trust_env=False, verify=PLAIN).json()
        return next((each["fingerprint"] for each in alerts if each["labels"] == names), None)

    return str(eventually(found, "the alert is listed"))


def delivered(ledger: Ledger, store: JobStore, url: str, worker: str) -> World:
    """A stalled job of this worker whose alert came from this Alertmanager."""
    job_id = running(store, worker=worker)
    labels: dict[str, Any] = {"worker": worker, "job_id": str(job_id)}
    ledger.inbox.accept([alert(send_alert(url, **labels), **labels)], [], now=time.time())
    return World(Box(worker=worker, job_id=job_id))


def with_silences(
    ledger: Ledger, store: JobStore, world: World, asks: Silences, *, unknown_holds: bool = False
) -> Executor:
    pace = replace(PACE, safety_limits=replace(BOUNDLESS, unknown_holds=unknown_holds))
    return executor(ledger, store, world, settings=pace, silences=asks)


# --- a real Alertmanager


@pytest.mark.needs_parts
def test_silence_holds_until_its_end_and_is_named(ledger: Ledger, store: JobStore, real: str) -> None:
    world = delivered(ledger, store, real, "w1")
    made = silence(real, worker="w1", comment="a new driver\nat ten")
    with silences_of(real) as asks:
        works = with_silences(ledger, store, world, asks)

        turn(works, ledger)
        turn(works, ledger)
        assert journal(ledger)[-1] == "decided wait: silenced"
        assert journal(ledger).count("decided wait: silenced") == 1
        reason = history(ledger).entries[-1].message
        assert reason.startswith(
            f"silenced in Alertmanager: {made} by ann: a new driver\nat ten; continues when the silence ends"
        )
        assert (world.boxes["w1"].calls, store.job(1).state) == ([], State.RUNNING)
        assert ledger.episodes.list_open()[0].free is None

        expire(real, made)
        to_the_end(works, ledger)
        assert (history(ledger).outcome, world.boxes["w1"].calls) == ("fixed", ["stop", "start"])


@pytest.mark.needs_parts
def test_silenced_run_needs_no_approval_until_the_silence_ends(ledger: Ledger, store: JobStore, real: str) -> None:
    labels: dict[str, Any] = {"run": "r1", "worker": "bad", "remedy": "wrangle", "condition": "items"}
    faulty_worker(store)
    ledger.inbox.accept([alert(send_alert(real, **labels), **labels)], [], now=time.time())
    ledger.inbox.take_new(HOST, now=time.time())
    made = silence(real, run="r1", comment="a known driver")
    with silences_of(real) as asks:
        works = with_silences(ledger, store, World(), asks)
        ledger.orders.give(Order(act=Act.ASK, at=time.time(), who="ann", reason="", remedy="wrangle"))

        works.process_episode(*ledger.episodes.list_open(HOST))
        assert journal(ledger)[-1] == "decided wait: silenced"
        assert [each.locked_at for each in store.admin.workers(now=store.now())] == [None, None]

        expire(real, made)
        works.process_episode(*ledger.episodes.list_open(HOST))
        assert journal(ledger)[-1] == "decided wait: approval"
        ledger.orders.answer(1, Act.APPROVE, who="ann", reason="", now=time.time())
        works.process_episode(*ledger.episodes.list_open(HOST))
        assert journal(ledger)[-1] == "did lock"


@pytest.mark.needs_parts
def test_silence_must_cover_every_alert_of_the_episode(ledger: Ledger, store: JobStore, real: str) -> None:
    world = delivered(ledger, store, real, "w4")
    second: dict[str, Any] = {
        "worker": "w4",
        "job_id": "1",
        "alertname": "GpuwardenJobUnhealthy",
        "condition": "health",
    }
    ledger.inbox.accept([alert(send_alert(real, **second), **second)], [], now=time.time())
    silence(real, worker="w44")
    one = silence(real, worker="w4", alertname="GpuwardenJobStalled")
    with silences_of(real) as asks:
        ledger.inbox.take_new(HOST, now=time.time())
        (episode,) = ledger.episodes.list_open()
        assert len(episode.fingerprints) == 2
        assert asks.of(episode.fingerprints, host=HOST).silences == []
        other = silence(real, worker="w4", alertname="GpuwardenJobUnhealthy")
        assert {each.silence_id for each in asks.of(episode.fingerprints, host=HOST).silences} == {one, other}, (
            "the control"
        )
        expire(real, other)

        to_the_end(with_silences(ledger, store, world, asks), ledger)

    assert history(ledger).outcome == "fixed"


@pytest.mark.needs_parts
def test_silences_of_another_host_are_queried_by_its_name(real: str) -> None:
    fingerprint = send_alert(real, host="box9", worker="w9")
    made = silence(real, host="box9")
    with silences_of(real) as asks:
        (found,) = asks.of(frozenset({fingerprint}), host="box9").silences
        assert asks.of(frozenset({fingerprint}), host=HOST).silences == []

    assert found.silence_id == made


@pytest.mark.needs_parts
def test_silenced_action_needs_no_approval(ledger: Ledger, store: JobStore, real: str) -> None:
    world = delivered(ledger, store, real, "w5")
    made = silence(real, worker="w5")
    with silences_of(real) as asks:
        works = with_silences(ledger, store, world, asks)
        ledger.orders.give(Order(act=Act.ASK, at=time.time(), who="ann", reason=""))
        turn(works, ledger)
        assert journal(ledger)[-1] == "decided wait: silenced"

        expire(real, made)
        turn(works, ledger)
        assert journal(ledger)[-1] == "decided wait: approval"


# --- no answer


def stalled(ledger: Ledger, store: JobStore) -> World:
    job_id = running(store)
    ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
    return World(Box(worker="w1", job_id=job_id))


def test_unreachable_alertmanager_is_logged_and_does_not_hold(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    structlog.reset_defaults()
    monkeypatch.setattr(stages, "log", structlog.get_logger())  # one that was used keeps its configuration
    world = stalled(ledger, store)
    with capture_logs() as logged, silences_of(CLOSED_PORT) as asks:
        to_the_end(with_silences(ledger, store, world, asks), ledger)

    assert history(ledger).outcome == "fixed"
    (why, *_) = [each["reason"] for each in logged if each["event"].startswith("silences unknown")]
    assert why.startswith("http://127.0.0.1:9 failed: ")


def test_unknown_silences_hold_if_the_setting_says_so(ledger: Ledger, store: JobStore) -> None:
    world = stalled(ledger, store)
    with silences_of(CLOSED_PORT) as asks:
        works = with_silences(ledger, store, world, asks, unknown_holds=True)
        turn(works, ledger)
        assert journal(ledger)[-1] == "decided wait: silences_unknown"
        assert "secret" not in history(ledger).entries[-1].message
        assert world.boxes["w1"].calls == []
    with serving_http(lambda: (200, b"[]")) as server, silences_of(server.url) as asks:
        to_the_end(with_silences(ledger, store, world, asks, unknown_holds=True), ledger)

    assert history(ledger).outcome == "fixed"


@pytest.mark.needs_parts
def test_one_answer_of_two_alertmanagers_is_enough(ledger: Ledger, store: JobStore, real: str) -> None:
    world = delivered(ledger, store, real, "w6")
    silence(real, worker="w6")
    with silences_of(CLOSED_PORT, real) as asks:
        turn(with_silences(ledger, store, world, asks), ledger)

    assert journal(ledger)[-1] == "decided wait: silenced"


def listed(*silenced_by: Any, fingerprint: Any = "f1") -> bytes:
    return json.dumps([{"fingerprint": fingerprint, "status": {"silencedBy": list(silenced_by)}}]).encode()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, b""), "it returned 500"),
        ((302, b""), "it returned 302"),
        ((200, b"nonsense"), "Expecting value"),
        ((200, b"[" * 100_000), "recursion"),
        ((200, b'{"a": 1}'), "its answer is not a list of alerts"),
        ((200, b"7"), "its answer is not a list of alerts"),
        ((200, b'[{"fingerprint": "f1"}]'), "its answer is not a list of alerts"),
        ((200, b'[{"fingerprint": "f1", "status": {"silencedBy": null}}]'), "its answer is not a list of alerts"),
        ((200, b" " * 2000 + b"[]"), "its answer is larger than 1024 bytes"),
    ],
)
def test_invalid_answer_is_unknown(monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes], says: str) -> None:
    if len(answer[1]) < 10_000:
        monkeypatch.setattr(silences, "ANSWER_MAX_BYTES", 1024)
    with serving_http(lambda: answer) as server, silences_of(server.url) as asks:
        heard = asks.of(frozenset({"f1"}), host=HOST)

    assert heard.silences == []
    assert heard.unknown.startswith(f"{server.url} failed: ")
    assert says in heard.unknown


def test_slow_alertmanager_is_unknown_and_not_queried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "ANSWER_S", 0.2)
    monkeypatch.setattr(silences, "FRESH_S", 600.0)
    with serving_http(lambda: (200, b"[]")) as server, silences_of(server.url) as asks:
        server.free.clear()
        began_s = time.monotonic()
        heard = asks.of(frozenset({"f1"}), host=HOST)
        again = asks.of(frozenset({"f2"}), host=HOST)
        took_s = time.monotonic() - began_s
        server.free.set()

    assert "failed: no answer within 0.2 s" in heard.unknown
    assert again == heard
    assert took_s < 10
    assert len(server.asked) == 1


def test_answer_is_cached_for_all_episodes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "FRESH_S", 60.0)
    with serving_http(lambda: (200, listed())) as server, silences_of(f"{server.url}/") as asks:
        for fingerprint in ("f1", "f2"):
            assert asks.of(frozenset({fingerprint}), host=HOST).silences == []

    assert server.asked == ["/api/v2/alerts?filter=host%3D%22box1%22"]


@pytest.mark.parametrize(
    ("silence_id", "details", "by"),
    [
        ("s-1", (200, b'{"createdBy": "ann", "comment": "known"}'), "ann"),
        ("s-1", (404, b""), ""),
        ("s-1", (200, b"[]"), ""),
        ("../../-/quit", (200, b'{"createdBy": "ann", "comment": "known"}'), ""),
    ],
)
def test_silence_without_an_author_counts(silence_id: str, details: tuple[int, bytes], by: str) -> None:
    answers = iter([(200, listed(silence_id)), details])
    with serving_http(lambda: next(answers)) as server, silences_of(server.url) as asks:
        (found,) = asks.of(frozenset({"f1"}), host=HOST).silences

    assert (found.silence_id, found.by) == (silence_id, by)
    assert all(path.startswith(("/api/v2/alerts?", "/api/v2/silence/s-1")) for path in server.asked)


def test_unlisted_alert_is_not_silenced() -> None:
    with serving_http(lambda: (200, listed("s-1", fingerprint="f2"))) as server, silences_of(server.url) as asks:
        assert asks.of(frozenset({"f1"}), host=HOST).silences == []
        assert asks.of(frozenset(), host=HOST).silences == []


def test_host_name_is_quoted_in_the_filter() -> None:
    assert silences._quoted('a"b\\c\n') == r'"a\"b\\c\n"'


@pytest.mark.parametrize("given", ["127.0.0.1:9093", "ftp://h", "http://"])
def test_alertmanager_address_that_is_not_a_url_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    argv = ["remediator", "execute", "--ledger", "sqlite:////nowhere/l.db", "--queue-db", "sqlite:////nowhere/q.db"]
    code = main([*argv, "--runtime-dir", str(tmp_path), "--alertmanager", f"http://a,{given}"])

    assert code == 2
    assert "--alertmanager: URL 2 is invalid; expected one as http://127.0.0.1:9093" in capsys.readouterr().err
