"""A fake Docker Engine API on a Unix socket: ContainerList, ContainerInspect and events."""

import json
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.exporter import churn
from bench.exporter.host import Box, Crowd
from bench.figures import BenchError

LOOK_EACH_S: Final = 0.1
"""Interval of checks for a new event, seconds."""

_ONE: Final = re.compile(r"/v[0-9.]+/containers/([0-9a-f]{64})/json")


class Api:
    """The URL of the API, and the file with its containers."""

    def __init__(self, crowd: Crowd, folder: Path) -> None:
        self.url = f"unix://{folder / 'd.sock'}"
        self.state = folder / "containers.json"
        self._crowd = crowd
        self.update()

    def update(self) -> None:
        """List the current containers of the host."""
        scratch = self.state.with_suffix(".new")
        scratch.write_text(json.dumps([_inspect_body(each) for each in self._crowd.containers]), encoding="ascii")
        scratch.replace(self.state)


@contextmanager
def engine(crowd: Crowd) -> Iterator[Api]:
    """Run the API in a separate process, whose work is not measured."""
    with TemporaryDirectory(prefix="gw-") as folder:
        api = Api(crowd, Path(folder))
        command: list[str | Path] = [sys.executable, __file__, api.url.removeprefix("unix://"), api.state]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            if not (process.stdout and process.stdout.readline()):
                raise BenchError("the fake Docker API did not start")
            yield api
        finally:
            process.kill()
            process.communicate()


def _inspect_body(box: Box) -> dict[str, Any]:
    gpus = ",".join(f"GPU-{index}" for index in box.gpus)
    return {
        "Id": box.id,
        "Name": f"/{churn.name(box.number)}",
        "State": {"Running": True, "Pid": box.pids[0], "StartedAt": "2026-01-01T00:00:00Z", "Paused": False},
        "Config": {
            "Image": "tenant:1",
            "Env": [f"NVIDIA_VISIBLE_DEVICES={gpus}"],
            "Labels": {"gpuwarden.vram-budget-mib": "1024", "com.example.team": "research"},
        },
        "HostConfig": {"NetworkMode": "none"},
        "NetworkSettings": {"Networks": {}},
        "Mounts": [],
    }


def _list_body(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "Id": found["Id"],
        "Names": [found["Name"]],
        "Image": found["Config"]["Image"],
        "Command": "python serve.py",
        "Created": 1767225600,
        "State": "running",
        "Status": "Up 3 hours",
        "Ports": [],
        "Labels": found["Config"]["Labels"],
        "Mounts": [],
        "HostConfig": found["HostConfig"],
        "NetworkSettings": found["NetworkSettings"],
    }


class _State:
    """Content of the file, read again when it is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int] | None = None
        self._changing = threading.Lock()
        self.inspected: dict[str, Any] = {}
        self.listed = b""

    def version(self) -> tuple[int, int]:
        """Identity of the file."""
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns

    def refresh(self) -> "_State":
        """Read the file if it changed."""
        with self._changing:
            version = self.version()
            if self._read != version:
                self._read = version
                self.inspected = {each["Id"]: each for each in json.loads(self._path.read_text(encoding="ascii"))}
                self.listed = json.dumps([_list_body(each) for each in self.inspected.values()]).encode()
        return self


def _main(socket: str, path: str) -> None:
    state = _State(Path(path))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            one = _ONE.fullmatch(path)
            now = state.refresh()
            inspected = now.inspected.get(one.group(1)) if one else {}
            if path.endswith("/events"):
                self._stream_events()
                return
            if path.endswith("/version"):
                body = b'{"ApiVersion": "1.41"}'
            elif path.endswith("/containers/json"):
                body = now.listed
            else:
                body = json.dumps(inspected or {"message": "No such container"}).encode()
            self.send_response(404 if inspected is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream_events(self) -> None:
            """Send one event per change, until the client disconnects."""
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            version = state.version()
            event = json.dumps({"Type": "container", "Action": "start"}).encode() + b"\n"
            while True:
                time.sleep(LOOK_EACH_S)
                if state.version() != version:
                    version = state.version()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Log nothing."""

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

        def get_request(self) -> tuple[Any, Any]:
            connection, _ = super().get_request()
            return connection, ("local", 0)

    with Server(socket, Handler) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    _main(*sys.argv[1:])
