"""Events of Docker's containers. With them the exporter lists containers less often."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import docker
from docker.types import CancellableStream

RETRY_S: Final = 30.0

CLOSE_S: Final = 5.0

OF: Final = ("create", "start", "restart", "die", "destroy", "rename", "pause", "unpause")
"""Events that change a listing (Docker Engine API, SystemEvents). Health checks also send events."""


class Events:
    """Follow events in a thread. `news` is set by each event, and when the stream ends."""

    def __init__(self, connect: Callable[[], docker.APIClient]) -> None:
        self._connect = connect
        self._stream: CancellableStream[str] | None = None
        self._thread: threading.Thread | None = None
        self._begun_s = -RETRY_S
        self._closed = False
        self.news = threading.Event()

    def is_following(self) -> bool:
        """Whether every change now sets `news`; if not, starts to follow."""
        if self._thread is None or not self._thread.is_alive():
            if not self._closed and time.monotonic() - self._begun_s >= RETRY_S:
                self._begun_s = time.monotonic()
                self._thread = threading.Thread(target=self._follow, name="docker-events", daemon=True)
                self._thread.start()
            return False
        return self._stream is not None

    def close(self) -> None:
        """Stop following."""
        self._closed = True
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError, AttributeError):  # it just ended
                stream.close()
        self.news.set()
        if self._thread is not None and stream is not None:
            self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        # Without events the engine is listed every second.
        with contextlib.suppress(Exception), contextlib.closing(self._connect()) as client:
            # The stream does not show its headers. A hook of requests does.
            encodings: list[str | None] = []
            client.hooks["response"].append(lambda its, **_: encodings.append(its.headers.get("Transfer-Encoding")))
            stream = client.events(filters={"type": ["container"], "event": list(OF)})
            # docker-py returns no event of a response that is not chunked before its end.
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
