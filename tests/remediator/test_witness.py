"""The witness against a real HTTP server that answers as an exporter may: rightly, wrongly, late or not at all."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

import remediator.witness
from gpuwarden import facts
from remediator.witness import Witness, WitnessError, WorkerUnseenError
from tests.remediator.builders import HOST, evidence, server


class Exporter(ThreadingHTTPServer):
    """Answers `/evidence` with what a test puts here."""

    status = 200
    body = ""
    asked: list[str]
    hold: threading.Event | None = None

    def handle_error(self, *_: object) -> None:
        """A client that gave up is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.hold:
            self.server.hold.wait(20)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    if server.hold:
        server.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(exporter: Exporter) -> Iterator[Callable[..., facts.WorkerFacts]]:
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}/")
    yield lambda worker="w1": witness.about(worker, host=HOST)
    witness.close()


def test_what_the_exporter_says_of_the_worker_is_passed_on(
    exporter: Exporter, ask: Callable[..., facts.WorkerFacts]
) -> None:
    exporter.body = facts.render(evidence())

    assert ask() == evidence()


def test_a_hostile_name_stays_one_parameter(exporter: Exporter, ask: Callable[..., facts.WorkerFacts]) -> None:
    hostile = "w1&host=box2#?/../ $(x)\n\x00é"
    exporter.body = facts.render(evidence(worker=hostile))

    assert ask(hostile).worker == hostile
    asked = urlsplit(exporter.asked[0])
    assert (asked.path, parse_qs(asked.query)) == ("/evidence", {"worker": [hostile]})


def test_no_such_worker_is_told_apart_from_no_answer(exporter: Exporter, ask: Callable[..., facts.WorkerFacts]) -> None:
    exporter.status, exporter.body = 404, "no such worker is seen on this host\n"

    with pytest.raises(WorkerUnseenError, match="sees no worker 'w1' on this host"):
        ask()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, "no fresh look at this host\n", "says 503: no fresh look at this host"),
        (302, "", "says 302"),
        (200, "", "evidence"),
        (200, "{}", "host"),
        (200, facts.render(evidence(host="box2")), "speaks of box2/w1; box1/w1 was asked for"),
        (200, facts.render(evidence(worker="w2")), "speaks of box1/w2; box1/w1 was asked for"),
        (200, facts.render(evidence()).replace("130.0", "1e999"), "evidence"),
        (500, "x" * 10_000, "says 500: " + "x" * 200 + "$"),
    ],
    ids=[
        "no fresh look",
        "a redirect",
        "nothing",
        "no facts",
        "another host",
        "another worker",
        "no number",
        "a long page",
    ],
)
def test_an_answer_that_is_no_evidence_confirms_nothing(
    exporter: Exporter, ask: Callable[..., facts.WorkerFacts], status: int, body: str, says: str
) -> None:
    exporter.status, exporter.body = status, body

    with pytest.raises(WitnessError, match=says) as raised:
        ask()

    assert not isinstance(raised.value, WorkerUnseenError)


def test_an_exporter_that_does_not_answer_in_time_is_silent(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.hold = threading.Event()
    monkeypatch.setattr(remediator.witness, "TIMEOUT_S", 0.1)
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}")

    with pytest.raises(WitnessError, match="does not answer"):
        witness.about("w1", host=HOST)

    witness.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no url", "http://[::1", "ftp://127.0.0.1"])
def test_an_exporter_that_is_not_there_is_silent(url: str) -> None:
    witness = Witness(url)

    with pytest.raises(WitnessError, match="does not answer"):
        witness.about("w1", host=HOST)

    witness.close()


def test_what_the_exporter_says_of_a_server_is_passed_on(exporter: Exporter) -> None:
    exporter.body = facts.render(server())
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}")

    assert witness.about_server("c1", host=HOST) == server()

    asked = urlsplit(exporter.asked[0])
    assert (asked.path, parse_qs(asked.query)) == ("/evidence", {"container": ["c1"]})
    witness.close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(503, "no fresh look at this host\n", "says 503: no fresh look", id="no fresh look"),
        pytest.param(404, "no such page\n", "says 404", id="an exporter that knows no servers"),
        pytest.param(200, facts.render(evidence()), "lacks 'probe'", id="facts about a worker"),
        pytest.param(200, facts.render(server(host="box2")), "speaks of box2/c1; box1/c1 was asked", id="another host"),
        pytest.param(200, facts.render(server(container="c2")), "speaks of box1/c2; box1/c1", id="another container"),
    ],
)
def test_an_answer_that_is_no_evidence_about_a_server_confirms_nothing(
    exporter: Exporter, status: int, body: str, says: str
) -> None:
    exporter.status, exporter.body = status, body
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}")

    with pytest.raises(WitnessError, match=says):
        witness.about_server("c1", host=HOST)

    witness.close()


ALIVE = 'gpuwarden_worker_alive{container="a",worker="a"} 1.0\n'


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("", 0),
        (ALIVE + 'gpuwarden_worker_alive{container="b",worker="b"} 1.0\n', 2),
        (ALIVE + 'gpuwarden_worker_alive{container="a",worker="b"} 1.0\n', 1),
        (ALIVE + 'gpuwarden_worker_alive{container="b",worker="b"} 0.0\n', 1),
        (ALIVE + 'gpuwarden_worker_alive{container="",worker="b"} 1.0\n', 2),
        (ALIVE + 'gpuwarden_server_info{container="b"} 1.0\n', 2),
        ('gpuwarden_worker_info{container="a",worker="a"} 1.0\n', 0),
    ],
)
def test_the_hosts_workers_and_servers_are_counted_on_the_exporters_page(
    exporter: Exporter, page: str, count: int
) -> None:
    exporter.body = page
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}")

    assert witness.workers() == count

    assert exporter.asked == ["/metrics"]
    witness.close()


def test_workers_that_cannot_be_counted_are_unknown_not_none(exporter: Exporter) -> None:
    witness = Witness(f"http://127.0.0.1:{exporter.server_port}")
    for status, body, says in ((503, "no fresh look", "says 503: no fresh look"), (200, "a{b", "no page of metrics")):
        exporter.status, exporter.body = status, body
        with pytest.raises(WitnessError, match=says):
            witness.workers()
    witness.close()

    nobody = Witness("http://127.0.0.1:1")
    with pytest.raises(WitnessError, match="does not answer"):
        nobody.workers()
    nobody.close()
