"""Asks servers over HTTP, from this host: by threads of their own, so that none delays another or the sampling.

There are as many threads as servers up to a bound; past it each server has its turn all the same, only later.
One asking is a GET that is bounded in time and size; nothing but the status counts, and no redirect is followed. It is
made by hand because `http.client` bounds each read and not the whole: a server that drips would be waited for. Only the
addresses that Docker gave its containers are called, never a name.
"""

import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from exporter.answering import Asking, judge
from exporter.readings import Container, Probe
from gpuwarden import __version__, clock

THREADS_MAX: Final = 64
"""Servers of one host that are asked at the same time."""

LINE_MAX: Final = 1024
"""Bytes within which a server's first line must end."""

BODY_MAX: Final = 64 * 2**10
"""Bytes of an answer that are taken and thrown away, so that a server need not log a broken connection."""

GAP_S: Final = 5.0
"""How much later than planned an asking may begin, or end, before the time in between counts as a gap, seconds."""


class Prober:
    """Asks every server that it was last told of, every `interval_s`, and gives each `answer_s` to answer; seconds.

    Who is due longest is asked first, and again after everybody else who is due: nobody's servers crowd out another's.
    """

    def __init__(self, *, interval_s: float = 5.0, answer_s: float = 3.0) -> None:
        self._interval_s = interval_s
        self._answer_s = answer_s
        self._askers: dict[str, _Asker] = {}
        self._due: SimpleQueue[_Asker | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._clock: threading.Thread | None = None
        self._changed = threading.Event()
        self._closing = threading.Event()

    @property
    def pace_s(self) -> float:
        """How long it may take to ask each server there is once, seconds: the interval; more if many hang."""
        return max(self._interval_s, len(self._askers) * self._answer_s / THREADS_MAX)

    @property
    def fresh_s(self) -> float:
        """What an asking told is believed for this long, seconds."""
        return self.pace_s + self._answer_s + GAP_S

    def tend(self, servers: Iterable[Container]) -> None:
        """Ask these from now on, by incarnation, and no others. One that is paused is not asked, and not forgotten.

        Raises:
            RuntimeError: no thread can be started; who has one is asked on.
        """
        wanted = {each.incarnation: each for each in servers}
        askers = {each: self._askers.get(each) or _Asker(server) for each, server in wanted.items()}
        for incarnation, server in wanted.items():
            askers[incarnation].server = server
        self._askers = askers  # replaced whole: the clock goes through it meanwhile
        self._changed.set()
        while len(self._threads) < min(THREADS_MAX, len(askers)):
            thread = threading.Thread(target=self._ask_on, name=f"probe {len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if self._clock is None and askers:
            clock_thread = threading.Thread(target=self._call_on, name="probes", daemon=True)
            clock_thread.start()
            self._clock = clock_thread

    def asking(self, incarnation: str) -> Asking:
        """What has come of asking one, up to now."""
        asker = self._askers.get(incarnation)
        return Asking() if asker is None else asker.asking

    def close(self) -> None:
        """Ask nobody any more."""
        self._askers = {}
        self._closing.set()
        self._changed.set()
        for _ in self._threads:
            self._due.put(None)

    def _call_on(self) -> None:
        """Put in line who is due, and sleep until the next one is, or something has changed."""
        while not self._closing.is_set():
            self._changed.clear()
            now_s = time.monotonic()
            idle = [each for each in self._askers.values() if not each.in_line]
            for asker in sorted(idle, key=lambda each: each.due_s):
                if asker.due_s <= now_s:
                    asker.in_line = True
                    self._due.put(asker)
            next_s = min((each.due_s for each in idle if not each.in_line), default=now_s + self._interval_s)
            self._changed.wait(max(0.0, next_s - now_s))

    def _ask_on(self) -> None:
        while (asker := self._due.get()) is not None:
            if self._askers.get(asker.server.incarnation) is asker:
                asker.ask(answer_s=self._answer_s, gap_max_s=self.pace_s + GAP_S)
            asker.due_s = max(asker.due_s + self._interval_s, time.monotonic())
            asker.in_line = False
            self._changed.set()


class _Asker:
    """One server, what has come of asking it, and when it is due again."""

    def __init__(self, server: Container) -> None:
        self.server = server
        self.asking = Asking()
        self.due_s = time.monotonic()
        self.in_line = False

    def ask(self, *, answer_s: float, gap_max_s: float) -> None:
        """Ask it once. Askings further apart than `gap_max_s` prove nothing about the time between."""
        server = self.server.server
        if server is None or self.server.paused or server.address is None or not isinstance(server.probe, Probe):
            self.asking = self.asking.forgotten()
            return
        began_s = clock.boottime_s()
        answered, because = ask(server.address, server.probe.port, server.probe.target, within_s=answer_s)
        ended_s = clock.boottime_s()
        if self.server.paused or ended_s - began_s > answer_s + GAP_S:
            self.asking = self.asking.forgotten()  # paused in the middle, or the machine was suspended
            return
        self.asking = self.asking.then(answered, began_s=began_s, ended_s=ended_s, gap_max_s=gap_max_s, because=because)


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
