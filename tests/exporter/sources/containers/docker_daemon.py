"""A Docker daemon with given answers, and a source that lists it."""

import json
import queue
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from exporter.sources.containers.docker import EngineContainers
from exporter.sources.containers.poller import Listing
from tests.exporter import builders as build


def inspected(
    *,
    running: bool = True,
    pid: int = 4001,
    env: list[str] | None = None,
    requests: list[dict[str, Any]] | None = None,
    devices: tuple[str, ...] | None = None,
    started_at: str = "2024-05-01T10:00:00.000000001Z",
    mounts: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    health: dict[str, Any] | None = None,
    check: dict[str, Any] | None = None,
    mode: str = "default",
    networks: dict[str, Any] | None = None,
    paused: bool = False,
) -> dict[str, Any]:
    """The answer of `docker inspect`, with the fields that matter here (Docker Engine API, ContainerInspect)."""
    return {
        "Id": build.DOCKER_ID,
        "Name": "/worker-0",
        "State": {"Running": running, "Pid": pid, "StartedAt": started_at, "Health": health, "Paused": paused},
        "Config": {"Image": "worker:1", "Env": env, "Labels": labels, "Healthcheck": check},
        "HostConfig": {
            "DeviceRequests": requests,
            "Devices": None
            if devices is None
            else [
                {"PathOnHost": path, "PathInContainer": "/dev/dri/renderD128", "CgroupPermissions": "rwm"}
                for path in devices
            ],
            "NetworkMode": mode,
        },
        "NetworkSettings": {"Networks": networks},
        "Mounts": mounts,
    }


OWN = {"gpuwarden.probe": "docker"}
UNHEALTHY = {
    "Status": "unhealthy",
    "FailingStreak": 4,
    "Log": [
        {"Start": "2024-05-01T10:00:30Z", "End": "2024-05-01T10:00:31Z", "ExitCode": 0, "Output": "ok"},
        {"Start": "2024-05-01T10:01:00Z", "End": "2024-05-01T10:01:01Z", "ExitCode": -1, "Output": "timeout"},
    ],
}


Answer = Callable[[str], Any]

Events = queue.SimpleQueue
"""Events of a daemon, as they happen; `None` ends the stream."""


class UnchunkedEvents(Events[dict[str, Any] | None]):
    """Sent without chunks: only the end of the connection ends the stream."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, answer: Answer) -> None:
        self.answer = answer
        super().__init__(str(path), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        answer = self.server.answer(self.path)
        if isinstance(answer, Events):
            self._send_events(answer)
            return
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        content = json.dumps(body).encode()
        with suppress(BrokenPipeError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _send_events(self, events: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
        framed = not isinstance(events, UnchunkedEvents)
        with suppress(OSError):
            self.send_response(200)
            self.send_header(*("Transfer-Encoding", "chunked") if framed else ("Connection", "close"))
            self.end_headers()
            while (event := events.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line) if framed else line)
            if framed:
                self.wfile.write(b"0\r\n\r\n")

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing to say."""


@contextmanager
def daemon(folder: Path, answer: Answer) -> Iterator[str]:
    """Listen like a Docker daemon and answer a path with `answer(path)`."""
    path = folder / "docker.sock"
    with _Server(path, answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


@contextmanager
def polling(base_url: str, directory: Path | None = None) -> Iterator[EngineContainers]:
    source = EngineContainers(base_url, directory)
    source.start()
    yield source
    source.close()
    assert not source._thread.is_alive()


def listing_of(source: EngineContainers) -> Listing | None:
    with suppress(OSError):
        return source.latest()
    return None


def a_daemon(*rows: dict[str, Any], inspect: Any = None) -> Answer:
    """Answers of a daemon with these containers."""

    def answer(path: str) -> Any:
        if path.endswith("/version"):
            return {"ApiVersion": "1.41", "Version": "20.10.24"}
        if path.partition("?")[0].endswith("/containers/json"):
            return list(rows)
        if path.partition("?")[0].endswith("/events"):
            return 404, {"message": "page not found"}
        return inspect(path.split("/")[-2]) if callable(inspect) else inspect

    return answer


def row(full_id: str = build.DOCKER_ID, name: str = "worker-0", **fields: Any) -> dict[str, Any]:
    return {"Id": full_id, "Names": [f"/{name}"], **fields}


class EventDaemon:
    """A daemon with events: counts its listings, and its followers."""

    def __init__(self, *rows: dict[str, Any], inspect: Any = None) -> None:
        self.listings: list[str] = []
        self.followed: list[str] = []
        self.events: queue.SimpleQueue[dict[str, Any] | None] = Events()
        self._whole = a_daemon(*rows, inspect=inspect)

    def __call__(self, path: str) -> Any:
        if "/events" in path:
            self.followed.append(path)
            return self.events
        if "/containers/json" in path:
            self.listings.append(path)
        return self._whole(path)

    def is_rarely_listed(self) -> bool:
        """Whether no listing is requested for half a second. Without events there would be about twenty."""
        before = len(self.listings)
        time.sleep(0.5)
        return len(self.listings) == before
