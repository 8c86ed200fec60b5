"""An application behind our HTTP server, in a thread."""

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from typing import Any

from gpuwarden.http.serving import Server, bind
from gpuwarden.http.web_config import WebConfig

Answer = tuple[int, str, Message]
"""Status, body, headers."""


@contextmanager
def served_app(app: Any, config: WebConfig, *, listen: str = "127.0.0.1") -> Iterator[int]:
    """Serve the application; yields the port."""
    listener = bind(listen, 0)
    server = Server(app, config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        thread.join()
        listener.close()


def get(
    port: int, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, host: str = "127.0.0.1"
) -> Answer:
    """Send one request over a new connection."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()
