"""What an attacker does in a stolen worker container: root, its own folder, its socket, and Python.

`python3 stolen.py PHASE FACTS` prints one JSON line. FACTS are what the attacker could learn at most: other workers'
names, jobs, incarnations and processes.
"""

import fcntl
import http.client
import itertools
import json
import os
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path("/run/gpuwarden/stolen")
SOCKET = FOLDER / "queue.sock"
AFTER_S = 10.0


class Door(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(40)
        self.sock.connect(str(SOCKET))


def ask(method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, Any]:
    door = Door("localhost")
    try:
        door.request(method, path, body, headers)
        answer = door.getresponse()
        text = answer.read()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode("latin-1")
    finally:
        door.close()


def value_of(name: str, schema: Any, facts: Any) -> Any:
    """A valid value of a field, of another worker if there is one."""
    for each in schema.get("anyOf", [schema]):
        if name in facts:
            return facts[name]
        kind = each.get("type")
        if kind == "string":
            return "stolen"
        if kind in ("integer", "number"):
            return 1
        if kind == "array":
            return []
        if kind == "boolean":
            return True
    return None


def operations(facts: Any) -> list[Any]:
    """Each operation with each name, job and queue, and with headers of another host."""
    document = ask("GET", "/openapi.json", None, {})[1]
    done = []
    for path, methods in document["paths"].items():
        for method, its in methods.items():
            fields = its["requestBody"]["content"]["application/json"]["schema"]["properties"]
            queues = facts["queues"] if "queue" in fields else [None]
            for worker, queue in itertools.product(facts["names"], queues):
                for job in facts["jobs"]:
                    known = {**facts["fields"], **job, "queue": queue}
                    body = {name: value_of(name, schema, known) for name, schema in fields.items()}
                    body |= {"worker": worker, "host": "box2", "timeout_s": 0}
                    headers = {"Gpuwarden-Host": "box2", "Authorization": "Bearer " + facts["token"]}
                    status, answer = ask(method.upper(), path, json.dumps(body), headers)
                    job_id = job["job_id"] if "job_id" in fields else None
                    its_own = {"path": path, "worker": worker, "queue": queue, "job": job_id}
                    done.append({**its_own, "status": status, "answer": answer})
    others = ("/v1/submit", "/v1/../v1/claim", "/metrics", "/api/v1/report_gpu/", "/-/healthy", "/v1/cancel")
    tried = [(path, method) for path in others for method in ("GET", "POST", "DELETE")]
    done += [{"path": path, "worker": "", "status": ask(method, path, "{}", {})[0]} for path, method in tried]
    return done


def is_back() -> bool:
    """Whether the gateway's socket is there again."""
    try:
        return (
            stat.S_ISSOCK(SOCKET.lstat().st_mode)
            and ask("POST", "/v1/quarantine", '{"worker": "stolen"}', {})[0] == 200
        )
    except OSError:
        return False


def clear() -> None:
    if SOCKET.is_dir() and not SOCKET.is_symlink():
        for each in SOCKET.iterdir():
            each.unlink()
        SOCKET.rmdir()
    elif os.path.lexists(SOCKET):
        SOCKET.unlink()


def own_socket() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(SOCKET))


def hard_link() -> None:
    (FOLDER / "own").write_text("own")
    os.link(FOLDER / "own", SOCKET)


def folder() -> None:
    SOCKET.mkdir()
    (SOCKET / "inside").write_text("kept")


def sockets(facts: Any) -> dict[str, bool]:
    """Put other things in the place of the socket. Returns whether the socket came back after each."""
    tricks = {
        "link to another's socket": lambda: SOCKET.symlink_to(facts["folder"] + "/w2/queue.sock"),
        "link to a secret": lambda: SOCKET.symlink_to(facts["secret"]),
        "link to itself": lambda: SOCKET.symlink_to("queue.sock"),
        "link to the folder of another": lambda: SOCKET.symlink_to("../w2"),
        "named pipe": lambda: os.mkfifo(SOCKET),
        "own socket": own_socket,
        "hard link": hard_link,
        "device": lambda: os.mknod(SOCKET, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
        "folder": folder,
    }
    found = {}
    for name, trick in tricks.items():
        clear()
        try:
            trick()
        except PermissionError:  # this engine lets no container make a device
            continue
        time.sleep(1.5)
        if name == "folder":
            clear()
        until = time.monotonic() + AFTER_S
        while not is_back() and time.monotonic() < until:
            time.sleep(0.1)
        found[name] = is_back()
    for _ in range(20):  # a new socket has no new bounds
        clear()
        time.sleep(0.25)
    until = time.monotonic() + AFTER_S
    while not is_back() and time.monotonic() < until:
        time.sleep(0.1)
    return found


class Flood:
    """Requests until an end, and the statuses of their answers."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.statuses: dict[str, int] = {}

    def ask(self, body: str, pause_s: float) -> None:
        while time.monotonic() < self.until:
            try:
                status = str(ask("POST", "/v1/claim", body, {})[0])
            except (OSError, http.client.HTTPException):  # it is refused before it is sent
                status = "closed"
            self.statuses[status] = self.statuses.get(status, 0) + 1
            time.sleep(pause_s)

    def wait(self) -> None:
        """Send waits until one is refused."""
        waits = []
        until = time.monotonic() + 60
        while "429" not in self.statuses and time.monotonic() < until:
            waits += [opened(wait_for(f"q{number}")) for number in range(20)]
            status = str(ask("POST", "/v1/quarantine", '{"worker": "stolen"}', {})[0])
            self.statuses[status] = self.statuses.get(status, 0) + 1
        for each in waits:
            each.close()

    def hold(self) -> None:
        """Waits that are abandoned, and requests that never end."""
        held: list[socket.socket] = []
        half = HEAD % (b"claim", 120_000) + b"{" + b" " * 110_000
        number = 0
        while time.monotonic() < self.until:
            number += 1
            held += [opened(wait_for(f"q{number % 20}")), opened(half), opened(b"POST /v1")]
            while len(held) > 600:
                held.pop(0).close()


HEAD = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def wait_for(queue: str) -> bytes:
    body = json.dumps({"worker": "stolen", "queue": queue, "timeout_s": 30}).encode()
    return HEAD % (b"wait", len(body)) + body


def opened(data: bytes) -> socket.socket:
    """A connection that has sent this."""
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5)
    with suppress(OSError):
        made.connect(str(SOCKET))
        made.sendall(data)
    return made


def together(*acts: threading.Thread) -> None:
    for each in acts:
        each.start()
    for each in acts:
        each.join()


def flood(facts: Any) -> list[dict[str, int]]:
    """Requests and megabytes, then waits, and then connections that are held."""
    first = Flood(facts["seconds"] / 2)
    together(*(threading.Thread(target=first.ask, args=("x" * 10, 0.0)) for _ in range(8)),
             threading.Thread(target=first.ask, args=("[" * (1 << 20), 0.1)))  # fmt: skip
    then = Flood(facts["seconds"] / 2)
    then.wait()
    last = Flood(facts["seconds"] / 2)
    together(threading.Thread(target=last.hold), threading.Thread(target=last.ask, args=("x" * 10, 0.01)))
    return [each.statuses for each in (first, then, last)]


def files(facts: Any) -> None:
    """State files of another worker, and of a process of the host."""
    for name, text in facts["files"].items():
        path = FOLDER / name
        if os.path.lexists(path):
            path.unlink()
        path.write_text(text)
    locks = [(FOLDER / name).open("w") for name in facts["locks"]]
    for each in locks:
        fcntl.lockf(each, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("held", flush=True)
    time.sleep(600)


PHASES = {"operations": operations, "sockets": sockets, "flood": flood, "files": files}
if __name__ == "__main__":
    print(json.dumps(PHASES[sys.argv[1]](json.loads(sys.argv[2]))))
