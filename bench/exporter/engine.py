"""A stand-in for Docker's API at a Unix socket: it lists the containers of a host, and tells of each.

What it answers is shaped as Docker's (Docker Engine API, ContainerList and ContainerInspect).
"""

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
"""How often it is looked whether there is an event to tell, seconds."""

_ONE: Final = re.compile(r"/v[0-9.]+/containers/([0-9a-f]{64})/json")


class Api:
    """The engine's API: its URL, and what it lists."""

    def __init__(self, crowd: Crowd, folder: Path) -> None:
        self.url = f"unix://{folder / 'd.sock'}"
        self.state = folder / "containers.json"
        self._crowd = crowd
        self.tell()

    def tell(self) -> None:
        """From now on, it lists the containers that the host has now."""
        scratch = self.state.with_suffix(".new")
        scratch.write_text(json.dumps([_inspected(each) for each in self._crowd.containers]), encoding="ascii")
        scratch.replace(self.state)


@contextmanager
def engine(crowd: Crowd) -> Iterator[Api]:
    """It runs in a process of its own, so that its work is in nobody's figures."""
    with TemporaryDirectory(prefix="gw-") as folder:
        api = Api(crowd, Path(folder))
        command: list[str | Path] = [sys.executable, __file__, api.url.removeprefix("unix://"), api.state]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            if not (process.stdout and process.stdout.readline()):
                raise BenchError("the stand-in for Docker's API did not start")
            yield api
        finally:
            process.kill()
            process.communicate()


def _inspected(box: Box) -> dict[str, Any]:
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


def _listed(found: dict[str, Any]) -> dict[str, Any]:
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
    """What the file says, read anew when it is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int] | None = None
        self._changing = threading.Lock()
        self.inspected: dict[str, Any] = {}
        self.listed = b""

    def version(self) -> tuple[int, int]:
        """Another one whenever anything has changed."""
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns

    def now(self) -> "_State":
        """As it is by now."""
        with self._changing:
            version = self.version()
            if self._read != version:
                self._read = version
                self.inspected = {each["Id"]: each for each in json.loads(self._path.read_text(encoding="ascii"))}
                self.listed = json.dumps([_listed(each) for each in self.inspected.values()]).encode()
        return self


def _main(socket: str, path: str) -> None:
    state = _State(Path(path))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            one = _ONE.fullmatch(path)
            now = state.now()
            inspected = now.inspected.get(one.group(1)) if one else {}
            if path.endswith("/events"):
                self._tell_on()
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

        def _tell_on(self) -> None:
            """An event for each change, in chunks, until nobody listens."""
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
            """A line a call would say nothing."""

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
