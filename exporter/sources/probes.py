"""Asks servers over HTTP, from this host: each by a thread of its own, so that none delays another or the sampling.

One asking is a GET that is bounded in time and size; nothing but the status counts, and no redirect is followed. Only
the addresses that Docker gave its containers are called, never a name.
"""

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from exporter.answering import Asking, judge
from exporter.readings import Container, Probe
from gpuwarden import __version__, clock

SERVERS_MAX: Final = 64
"""Servers of one host that are asked; the rest are told as too many."""

LINE_MAX: Final = 1024
"""Bytes within which a server's first line must end."""

BODY_MAX: Final = 64 * 2**10
"""Bytes of an answer that are taken and thrown away, so that a server need not log a broken connection."""

GAP_S: Final = 5.0
"""How much later than planned an asking may begin, or end, before the time in between counts as a gap, seconds."""


class Prober:
    """Asks every server that it was last told of, every `interval_s`, and gives each `answer_s` to answer; seconds."""

    def __init__(self, *, interval_s: float = 5.0, answer_s: float = 3.0) -> None:
        self._interval_s = interval_s
        self._answer_s = answer_s
        self._askers: dict[str, _Asker] = {}
        self.fresh_s = interval_s + answer_s + GAP_S
        """What an asking told is believed for this long, seconds."""

    def tend(self, servers: Iterable[Container]) -> None:
        """Ask these from now on, by incarnation, and no others. One that is paused is not asked, and not forgotten."""
        wanted = {each.incarnation: each for each in servers}
        for incarnation in self._askers.keys() - wanted.keys():
            self._askers.pop(incarnation).close()
        for incarnation, server in wanted.items():
            asker = self._askers.get(incarnation)
            if asker is not None:
                asker.server = server
            elif len(self._askers) < SERVERS_MAX:
                self._askers[incarnation] = _Asker(server, interval_s=self._interval_s, answer_s=self._answer_s)

    def asking(self, incarnation: str) -> Asking | None:
        """What has come of asking one; `None` where it is not asked, for there are too many."""
        asker = self._askers.get(incarnation)
        return None if asker is None else asker.asking

    def close(self) -> None:
        """Ask nobody any more."""
        self.tend(())


class _Asker:
    """The thread that asks one server."""

    def __init__(self, server: Container, *, interval_s: float, answer_s: float) -> None:
        self.server = server
        self.asking = Asking()
        self._interval_s = interval_s
        self._answer_s = answer_s
        self._closing = threading.Event()
        threading.Thread(target=self._go_on, name=f"probe {server.name}", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _go_on(self) -> None:
        next_s = time.monotonic()
        while not self._closing.is_set():
            self._ask()
            next_s = max(next_s + self._interval_s, time.monotonic())
            self._closing.wait(next_s - time.monotonic())

    def _ask(self) -> None:
        server = self.server.server
        if server is None or server.paused or server.address is None or not isinstance(server.probe, Probe):
            self.asking = self.asking.forgotten()
            return
        began_s = clock.boottime_s()
        answered, because = ask(server.address, server.probe.port, server.probe.target, within_s=self._answer_s)
        ended_s = clock.boottime_s()
        now = self.server.server
        if (now is not None and now.paused) or ended_s - began_s > self._answer_s + GAP_S:
            self.asking = self.asking.forgotten()  # paused in the middle, or the machine was suspended
            return
        self.asking = self.asking.then(
            answered, began_s=began_s, ended_s=ended_s, gap_max_s=self._interval_s + GAP_S, because=because
        )


def ask(address: str, port: int, target: str, *, within_s: float) -> tuple[bool, str]:
    """GET `target` at a numeric address; whether that was answered in time, and if not what came instead."""
    deadline_s = time.monotonic() + within_s
    request = (
        f"GET {target} HTTP/1.1\r\nHost: localhost:{port}\r\nUser-Agent: gpuwarden/{__version__}\r\n"
        "Accept: */*\r\nConnection: close\r\n\r\n"
    )
    try:
        with socket.create_connection((address, port), timeout=within_s) as connection:
            _until(connection, deadline_s)
            connection.sendall(request.encode("ascii"))
            line = b""
            while b"\n" not in line and len(line) < LINE_MAX:
                _until(connection, deadline_s)
                part = connection.recv(LINE_MAX)
                if not part:
                    break
                line += part
            _throw_away(connection, deadline_s)
    except TimeoutError:
        return False, f"it does not answer within {within_s:g} s"
    except OSError as error:
        return False, f"it cannot be asked: {error.strerror or error}"
    return judge(line)


def _throw_away(connection: socket.socket, deadline_s: float) -> None:
    left = BODY_MAX
    with suppress(OSError):  # the answer is there already
        while left > 0:
            _until(connection, deadline_s)
            part = connection.recv(min(left, 4096))
            if not part:
                return
            left -= len(part)


def _until(connection: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
