"""HTTP probes over real sockets: servers that answer, refuse, hang, drip, flood and redirect; many servers."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from exporter.evidence.server_health import ProbeState
from exporter.model.container import Container
from exporter.sources.servers import http_probe
from exporter.sources.servers.http_probe import BODY_MAX, Prober
from gpuwarden import clock
from tests.exporter import builders as build
from tests.waiting import eventually, within

Behaviour = Callable[[socket.socket], None]


class Peer:
    """A server with a given behaviour for each connection, which records requests."""

    def __init__(self) -> None:
        self.behaves: Behaviour = answers(b"HTTP/1.1 200 OK\r\n\r\n")
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self.asked.append(connection.recv(4096))
            self.behaves(connection)


def answers(text: bytes) -> Behaviour:
    return lambda connection: connection.sendall(text)


def hangs(peer: Peer) -> Behaviour:
    def hang(_: socket.socket) -> None:
        peer.closing.wait(60)

    return hang


def ask(peer: Peer, target: str = "/", *, within_s: float = 20.0) -> tuple[bool, str]:
    """One probe."""
    return asyncio.run(http_probe.ask("127.0.0.1", peer.port, target, within_s=within_s))


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.close()


def test_probe_is_one_get_without_a_name_lookup(peer: Peer) -> None:
    assert ask(peer, "/v1/health?x=1") == (True, "")

    (request,) = peer.asked
    assert request.startswith(f"GET /v1/health?x=1 HTTP/1.1\r\nHost: localhost:{peer.port}\r\n".encode())
    assert request.endswith(b"Connection: close\r\n\r\n")


def test_redirect_is_an_answer_and_is_not_followed(peer: Peer) -> None:
    other = Peer()
    peer.behaves = answers(f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{other.port}/\r\n\r\n".encode())

    assert ask(peer) == (True, "")

    other.close()
    assert (len(peer.asked), other.asked) == (1, [])


def test_server_error_is_a_failure(peer: Peer) -> None:
    peer.behaves = answers(b"HTTP/1.1 503 Service Unavailable\r\n\r\nloading")

    assert ask(peer) == (False, "HTTP status 503")


def test_closed_port_is_a_failure(peer: Peer) -> None:
    peer.close()

    answered, message = ask(peer)

    assert not answered
    assert message == "connection failed: Connection refused"


def test_silent_server_times_out(peer: Peer) -> None:
    peer.behaves = hangs(peer)

    started_s = time.monotonic()
    answered, message = ask(peer, within_s=0.3)

    assert (answered, message) == (False, "no answer within 0.3 s")
    assert time.monotonic() - started_s < 30


def test_server_that_drips_bytes_times_out(peer: Peer) -> None:
    def drip(connection: socket.socket) -> None:
        while not peer.closing.wait(0.02):
            connection.sendall(b"H")

    peer.behaves = drip

    answered, message = within(30, lambda: ask(peer, within_s=0.3))

    assert (answered, message) == (False, "no answer within 0.3 s")


def test_endless_first_line_is_not_read_to_its_end(peer: Peer) -> None:
    sent = [0]

    def flood(connection: socket.socket) -> None:
        while not peer.closing.is_set():
            sent[0] += connection.send(b"x" * 4096)

    peer.behaves = flood

    answered, message = within(30, lambda: ask(peer))

    assert (answered, message) == (False, "the response is not HTTP/1")
    assert sent[0] < 64 * 2**20


def test_endless_body_is_an_answer_and_little_of_it_is_read(peer: Peer) -> None:
    taken = [0]

    def stream(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not peer.closing.is_set():
            taken[0] += connection.send(b"x" * 1024)

    peer.behaves = stream

    assert within(30, lambda: ask(peer)) == (True, "")
    assert taken[0] < BODY_MAX + 32 * 2**20


def test_missing_body_delays_an_answer_at_most_by_the_timeout(peer: Peer) -> None:
    def hold(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        peer.closing.wait(60)

    peer.behaves = hold

    assert within(30, lambda: ask(peer, within_s=0.3)) == (True, "")


# Many servers


@pytest.fixture
def prober() -> Iterator[Prober]:
    found = Prober(interval_s=0.05, answer_s=0.3)
    yield found
    found.close()


def server(peer: Peer, name: str = "llm", *, paused: bool = False) -> Container:
    known = build.server(probe=build.probe(port=peer.port))
    return build.container(name=name, incarnation=f"{name}@1", server=known, paused=paused)


def probe_failing_s(prober: Prober, name: str = "llm") -> float | None:
    return prober.state(f"{name}@1").probe_failing_s(now_s=clock.boottime_s(), fresh_s=prober.fresh_s)


def test_unanswered_time_grows_until_the_server_answers(peer: Peer, prober: Prober) -> None:
    prober.set_servers([server(peer)])
    eventually(lambda: probe_failing_s(prober) == 0.0, "it answers")
    peer.behaves = answers(b"")

    eventually(lambda: (probe_failing_s(prober) or 0) > 0.5, "it does not answer")

    asking = prober.state("llm@1")
    assert asking.answered
    word = "the connection closed without a response"
    eventually(lambda: prober.state("llm@1").message == word, "the reason is that of the newest probe")
    peer.behaves = answers(b"HTTP/1.1 204 No Content\r\n\r\n")
    eventually(lambda: probe_failing_s(prober) == 0.0, "it answers again")


def test_hanging_servers_delay_no_other(peer: Peer, prober: Prober) -> None:
    hanging = Peer()
    hanging.behaves = hangs(hanging)

    prober.set_servers([*(server(hanging, f"hangs{number}") for number in range(20)), server(peer)])

    eventually(lambda: len(peer.asked) >= 5, "the other is probed at its interval")
    hanging.close()


def test_server_is_probed_at_its_interval(peer: Peer) -> None:
    with closing(Prober(interval_s=0.3, answer_s=0.3)) as prober:
        started_s = time.monotonic()
        prober.set_servers([server(peer)])
        eventually(lambda: len(peer.asked) >= 4, "it is probed repeatedly")

        assert time.monotonic() - started_s > 0.85


def test_paused_server_is_not_probed_and_stays_armed(peer: Peer, prober: Prober) -> None:
    prober.set_servers([server(peer)])
    eventually(lambda: probe_failing_s(prober) == 0.0, "it answers")

    prober.set_servers([server(peer, paused=True)])
    eventually(lambda: probe_failing_s(prober) is None, "it is unknown")

    asked = len(peer.asked)
    assert prober.state("llm@1").answered
    assert not threading.Event().wait(0.2)
    assert len(peer.asked) - asked <= 1
    prober.set_servers([server(peer)])
    eventually(lambda: probe_failing_s(prober) == 0.0, "it is probed again")


def test_probe_that_failed_during_a_pause_does_not_count(peer: Peer, prober: Prober) -> None:
    def pause(_: socket.socket) -> None:
        prober.set_servers([server(peer, paused=True)])

    prober.set_servers([server(peer)])
    eventually(lambda: probe_failing_s(prober) == 0.0, "it answers")
    peer.behaves = pause

    eventually(lambda: probe_failing_s(prober) is None, "it is unknown")

    assert prober.state("llm@1").answered


def test_new_incarnation_is_not_armed_and_the_old_one_is_not_probed(peer: Peer, prober: Prober) -> None:
    prober.set_servers([server(peer)])
    eventually(lambda: probe_failing_s(prober) == 0.0, "it answers")
    peer.behaves = answers(b"")

    prober.set_servers([replace(server(peer), incarnation="llm@2")])

    eventually(lambda: prober.state("llm@2").last_probe_s, "it is asked")
    assert not prober.state("llm@2").answered
    assert prober.state("llm@1") == ProbeState()


def test_every_server_is_probed_even_if_many_hang(peer: Peer) -> None:
    hanging = Peer()
    hanging.behaves = hangs(hanging)
    dummies = [server(hanging, f"dummy{number}") for number in range(6)]

    with closing(Prober(interval_s=0.05, answer_s=0.3, at_once_max=2)) as prober:
        prober.set_servers(dummies)
        prober.set_servers([*dummies, server(peer)])

        eventually(lambda: len(peer.asked) >= 2, "the last server is probed", within_s=10)
        eventually(
            lambda: all((probe_failing_s(prober, each.name) or 0) > 0 for each in dummies),
            "every server is probed",
            within_s=10,
        )
        assert prober.round_s == pytest.approx(7 * 0.3 / 2)
    hanging.close()


def test_number_of_concurrent_probes_is_bounded() -> None:
    hanging = Peer()
    now, most = [0], [0]

    def count(_: socket.socket) -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        hanging.closing.wait(0.05)
        now[0] -= 1

    hanging.behaves = count

    with closing(Prober(interval_s=0.05, answer_s=20.0, at_once_max=3)) as prober:
        prober.set_servers([server(hanging, f"server{number}") for number in range(9)])
        eventually(lambda: len(hanging.asked) >= 18, "each is probed twice")

    assert most[0] == 3
    hanging.close()


def test_one_thread_probes_all_servers_and_ends_with_the_prober(peer: Peer) -> None:
    before = set(threading.enumerate())

    def own() -> list[str]:
        return [each.name for each in set(threading.enumerate()) - before if each.name.startswith("probe")]

    with closing(Prober(interval_s=0.05, answer_s=0.3)) as prober:
        prober.set_servers([server(peer, f"server{number}") for number in range(20)])
        eventually(lambda: len(peer.asked) >= 40, "they are asked")
        during = own()

    assert (during, own()) == (["probes"], [])


def test_thread_that_failed_to_start_starts_later(peer: Peer, prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            prober.set_servers([server(peer)])

    prober.set_servers([server(peer)])

    eventually(lambda: probe_failing_s(prober) == 0.0, "it is asked")
