"""What changes among an engine's containers, told by the engine as it happens: who listens need not ask so often."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import docker
from docker.types import CancellableStream

RETRY_S: Final = 30.0
"""How long after events were begun to be followed they are begun to be again, where the engine tells none, seconds."""

CLOSE_S: Final = 5.0
"""How long it may take to end once the stream is cut, seconds; its thread ends with the program at the latest."""

OF: Final = ("create", "start", "restart", "die", "destroy", "rename", "pause", "unpause")
"""What changes a listing (Docker Engine API, SystemEvents). A health check's command is an event, too, and not here."""


class Events:
    """Follows them in a thread of its own, by a connection of its own that `connect` makes.

    `news` is set by each, and when there are to be no more.
    """

    def __init__(self, connect: Callable[[], docker.APIClient]) -> None:
        self._connect = connect
        self._stream: CancellableStream[str] | None = None
        self._thread: threading.Thread | None = None
        self._begun_s = -RETRY_S
        self._closed = False
        self.news = threading.Event()

    def followed(self) -> bool:
        """Whether all that changes from now on sets `news`; where not, begins to follow, which takes a moment."""
        if self._thread is None or not self._thread.is_alive():
            if not self._closed and time.monotonic() - self._begun_s >= RETRY_S:
                self._begun_s = time.monotonic()
                self._thread = threading.Thread(target=self._follow, name="docker-events", daemon=True)
                self._thread.start()
            return False
        return self._stream is not None

    def close(self) -> None:
        """Follow no more."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError, AttributeError):  # it has ended by itself meanwhile
                stream.close()
        self.news.set()
        if self._thread is not None and stream is not None:
            self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        # Who tells no events, in whichever way, is asked each second, as ever.
        with contextlib.suppress(Exception), contextlib.closing(self._connect()) as client:
            # The stream does not show its answer's headers; a hook of requests does, of which its clients are sessions.
            encodings: list[str | None] = []
            client.hooks["response"].append(lambda its, **_: encodings.append(its.headers.get("Transfer-Encoding")))
            stream = client.events(filters={"type": ["container"], "event": list(OF)})
            # What does not come in chunks docker-py reads to its end, however long that takes, before it tells of any.
            if encodings[-1:] != ["chunked"]:
                stream.close()
                return
            self._stream = stream
            if self._closed:
                stream.close()
            for _ in stream:
                self.news.set()
        self._stream = None
        self.news.set()
