"""The measurement of the remediator in a short mode."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.figures import BenchError, Place
from bench.remediator import Load, measure
from bench.remediator.openloop import at_rate, flat_out, request

SHORT = Load(
    rounds=1,
    rate=50.0,
    steady_s=2.0,
    flat_out=20,
    connections=2,
    burst_rate=10.0,
    burst_s=0.5,
    burst_alerts=5,
    hosts=40,
    waiting=20,
    waiting_s=1.0,
    hangs=2,
)


@pytest.mark.needs_postgres
@pytest.mark.slow
def test_short_mode_measures_everything_and_loses_no_alert(tmp_path: Path) -> None:
    found = {each.what: each for each in measure([Place(name="disk", folder=tmp_path)], SHORT)}

    for name in ("ours, SQLite", "ours, PostgreSQL"):
        assert found[f"1 alert, 50 calls a second, {name}"].count == 100
        assert found[f"1 alert, 2 at a time, {name}: latency"].count == 20
        assert found[f"burst of 50 alerts a second, 5 a call, {name}: alerts lost of 25"].median == 0
        assert found[f"burst of 50 alerts a second, 5 a call, {name}: peak memory of serve"].median > 10
    storm = {what.partition(": ")[2]: each.median for what, each in found.items() if what.startswith("40 hosts")}
    assert storm["begun before the breaker opened"] == 10, "a quarter of them"
    assert storm["held by the breaker"] == 30
    for name in ("SQLite", "PostgreSQL"):
        what = f"20 episodes wait for a person, {name}"
        assert found[f"{what}: CPU of execute"].median < 200
        assert found[f"{what}: a new hang is decided"].count == 2


@contextmanager
def server(answers: bytes, *, slow_first_s: float = 0.0) -> Iterator[int]:
    """Answer every call with these bytes, the first one of each connection late."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            ended.wait(slow_first_s)
            while connection.recv(65536):
                connection.sendall(answers)

    def accept() -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


OK = b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\n{}"


def test_latency_counts_from_the_due_time_of_a_call() -> None:
    with server(OK, slow_first_s=0.5) as port:
        found = at_rate(port, [request(port, "/", b"{}")] * 100, rate=200.0, wanted=202)

    assert len(found.latencies_ms) == 100
    behind = [each for each in found.latencies_ms if each > 100]
    assert len(behind) > 60, "calls due during the stall are late"
    assert found.late > 20, "more calls are due than connections exist"


def test_unexpected_status_ends_the_measurement() -> None:
    with server(OK) as port, pytest.raises(BenchError, match=r"expected status 200: .*202 Accepted"):
        flat_out(port, [request(port, "/", b"{}")], connections=1, wanted=200)
