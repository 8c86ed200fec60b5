"""Read processes before their stop. A separate program, so that it can be killed if it hangs.

    python -IS probe.py REQUEST

It uses the standard library and writes JSON lines, cheap ones first. REQUEST is a JSON object:

    - until_s        when it must end, monotonic clock seconds
    - pids           the processes
    - worker_pid     is read first, then the oldest; or null
    - cgroup         the cgroup folder that they must be in, or null
    - process_group  the process group that they must be in, or null
    - py_spy         path of py-spy; null without it
    - log_files      log files; the first one that exists is read, else the engine's log
    - container      its full id, or null
    - engine         the engine's socket, as unix:///path

Kinds of lines; a field that could not be read is null:

    - process        pid, name, state (a letter of proc_pid_stat(5)), threads (their number)
    - thread         pid, tid, name, state, cpu_ticks, wchan (kernel function it waits in), stack (innermost first)
    - python         pid, tid, name, owns_gil, frames (innermost first: function, file, line), frames_cut
    - log            source, lines
    - note           text: a reason for a missing part
    - over           the last line of a complete run

Sources: proc_pid_stat(5), proc_pid_task(5), proc_pid_wchan(5); `py-spy dump --json`; Docker's "Get container logs".
"""

import contextlib
import http.client
import json
import math
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROCESSES_MAX: Final = 32
THREADS_MAX: Final = 256
"""Threads of all processes together."""

STACK_MAX: Final = 24
FRAMES_MAX: Final = 64

LOG_LINES_MAX: Final = 100
LOG_MAX_BYTES: Final = 16 * 2**10
LOG_READ_MAX_BYTES: Final = 4 * 2**20

ENGINE_S: Final = 1.0
"""Timeout of each read, seconds."""

MEMORY_MAX_BYTES: Final = 2**30
"""For this program and py-spy: py-spy reads memory of the target, which may be corrupt."""

OUTPUT_MAX_BYTES: Final = 4 * 2**20

CONTAINER_LOG: Final = "the container's log"

_PROC: Final = Path("/proc")
_LOG_WRITER: Final = b"/gpuwarden/worker/log_writer.py"
"""It keeps a job's output."""
_ADDRESS: Final = re.compile(r"^\[<[0-9a-f]*>\] ")


def main(argv: list[str]) -> int:
    """Run one request."""
    request: dict[str, Any] = json.loads(argv[1])
    until_s: float = request["until_s"]
    signal.setitimer(signal.ITIMER_REAL, max(0.0, until_s - time.monotonic()) + 1.0)  # in case the parent died
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_MAX_BYTES, OUTPUT_MAX_BYTES))
    pids = sorted(request["pids"], key=lambda pid: (pid != request["worker_pid"], _started(pid), pid))
    if len(pids) > PROCESSES_MAX:
        _note(f"{len(pids) - PROCESSES_MAX} of {len(pids)} processes were not read")
    seen = _processes(pids[:PROCESSES_MAX], request["cgroup"], request["process_group"])
    _log(request["log_files"], request["engine"], request["container"])
    if request["py_spy"] is None:
        _note("no Python stacks: py-spy is not installed (pip install py-spy)")
    else:
        for pid, started in seen.items():
            try:
                _python(request["py_spy"], pid, started, until_s=until_s)
            except (OSError, ValueError) as error:
                _note(f"no Python stacks of process {pid}: {_why(error)}")
    _write("over")
    return 0


def _write(kind: str, **line: Any) -> None:
    os.write(1, json.dumps({"kind": kind, **line}).encode() + b"\n")


def _note(text: str) -> None:
    _write("note", text=text)


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


# --- the kernel


def _processes(pids: list[int], cgroup: str | None, group: int | None) -> dict[int, str]:
    """Write each process and its threads. Returns the start times of the processes that were read.

    A pid may be reused, so its start time is read before its membership.
    """
    seen: dict[int, str] = {}
    left = THREADS_MAX
    for pid in pids:
        tasks = _PROC / str(pid) / "task"
        try:
            if any(each.endswith(_LOG_WRITER) for each in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")):
                continue
            name, fields = _stat(_PROC / str(pid))
            tids = sorted((int(each.name) for each in tasks.iterdir()), key=lambda tid: (tid != pid, tid))
        except (OSError, ValueError, IndexError) as error:
            _note(f"process {pid} was not read: {_why(error)}")
            continue
        if (group is not None and int(fields[2]) != group) or (cgroup is not None and pid not in _members(cgroup)):
            _note(f"process {pid} was not read: it does not belong to the target now")
            continue
        seen[pid] = fields[19]
        _write("process", pid=pid, name=name, state=fields[0], threads=len(tids))
        for tid in tids[:left]:
            _thread(tasks / str(tid), pid, tid)
        if len(tids) > left:
            _note(f"{len(tids) - left} of {len(tids)} threads of process {pid} were not read")
        left = max(0, left - len(tids))
    return seen


def _members(cgroup: str) -> set[int]:

    found: set[int] = set()
    for listing in Path(cgroup).rglob("cgroup.procs"):
        with contextlib.suppress(OSError, ValueError):
            found.update(int(pid) for pid in listing.read_text(encoding="ascii").split())
    return found


def _thread(folder: Path, pid: int, tid: int) -> None:
    try:
        name, fields = _stat(folder)
    except (OSError, ValueError, IndexError):
        return  # it has ended
    ticks, wchan, stack = int(fields[11]) + int(fields[12]), _text(folder / "wchan"), _text(folder / "stack")
    _write(
        "thread",
        pid=pid,
        tid=tid,
        name=name,
        state=fields[0],
        cpu_ticks=ticks,
        wchan=None if wchan in (None, "", "0") else wchan,
        stack=None if stack is None else [_ADDRESS.sub("", line) for line in stack.splitlines()[:STACK_MAX]],
    )


def _stat(folder: Path) -> tuple[str, list[str]]:
    # A name may hold brackets and spaces.
    before, _, after = (folder / "stat").read_text(encoding="utf-8", errors="backslashreplace").rpartition(")")
    return before.partition("(")[2], after.split()


def _started(pid: int) -> float:
    try:
        return int(_stat(_PROC / str(pid))[1][19])
    except (OSError, ValueError, IndexError):
        return math.inf


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace").strip()
    except OSError:
        return None


# --- the last lines


def _log(log_files: list[str], engine: str, container: str | None) -> None:

    source = next((path for path in log_files if os.path.lexists(path)), CONTAINER_LOG)
    try:
        if source is not CONTAINER_LOG:
            _write_lines(source, _end_of(source))
        elif container is not None:
            _write_lines(source, b"".join(_unframed(_engine_log(engine, container))))
    except (OSError, http.client.HTTPException) as error:
        _note(f"no last lines of {source}: {_why(error)}")


def _end_of(path: str) -> bytes:
    # We run as root and the job owns the file: follow no link, do not block on a FIFO.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_MAX_BYTES - 1))
        return file.read(LOG_MAX_BYTES + 1)


class _Socket(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ENGINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ENGINE_S)
        self.sock.connect(self._path)


def _engine_log(url: str, container: str) -> bytes:
    if not url.startswith("unix://"):
        raise OSError(f"the engine at {url} has no local socket")
    with contextlib.closing(_Socket(url.removeprefix("unix://"))) as engine:
        engine.request("GET", f"/containers/{container}/logs?stdout=1&stderr=1&tail={LOG_LINES_MAX}")
        answer = engine.getresponse()
        data = answer.read(LOG_READ_MAX_BYTES + 1)
    if answer.status != http.client.OK:
        raise OSError(f"the engine returned {answer.status}: {data[:200].decode('utf-8', 'backslashreplace').strip()}")
    if len(data) > LOG_READ_MAX_BYTES:
        raise OSError(f"the last {LOG_LINES_MAX} lines exceed {LOG_READ_MAX_BYTES} bytes")
    return data


def _unframed(data: bytes) -> Iterator[bytes]:
    """Strip the frame headers that the engine adds for a container without a terminal."""
    at = 0
    while data[at : at + 1] in (b"\0", b"\1", b"\2") and data[at + 1 : at + 4] == b"\0\0\0":
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
        yield data[at + 8 : end]
        at = end
    yield data[at:]


def _write_lines(source: str, data: bytes) -> None:
    """Write the last lines of `data`. If the last line is too long, write its end."""
    kept = data[-LOG_MAX_BYTES:]
    if len(data) > len(kept) and data[-LOG_MAX_BYTES - 1 : -LOG_MAX_BYTES] != b"\n":
        kept = kept.partition(b"\n")[2] or kept
    _write("log", source=source, lines=kept.decode("utf-8", "backslashreplace").splitlines()[-LOG_LINES_MAX:])


# --- Python


def _python(py_spy: str, pid: int, started: str, *, until_s: float) -> None:

    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise OSError("no time left")
    if _stat(_PROC / str(pid))[1][19] != started:
        raise OSError("the process has ended")
    argv = [py_spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]  # never pauses the process
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"py-spy timed out after {left_s:.1f} s") from None
    if done.returncode != 0:
        output = done.stderr.decode("utf-8", "backslashreplace").partition("Stack backtrace:")[0]
        raise OSError(f"py-spy failed: {' '.join(output.split())[:300] or f'exit status {done.returncode}'}")
    tids = _tids(pid)
    for thread in json.loads(done.stdout):
        frames = [
            {"function": each["name"], "file": each["filename"], "line": each["line"]} for each in thread["frames"]
        ]
        its = {"name": thread["thread_name"], "owns_gil": thread["owns_gil"], "frames": frames[:FRAMES_MAX]}
        tid = tids.get(thread["os_thread_id"], thread["os_thread_id"])
        _write("python", pid=pid, tid=tid, frames_cut=max(0, len(frames) - FRAMES_MAX), **its)


def _tids(pid: int) -> dict[int, int]:
    """Thread ids of a process, by their ids in its pid namespace, which Python reports."""
    found = {}
    for task in (_PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            status = (task / "status").read_text(encoding="utf-8", errors="replace")
            names = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            found[int(names.split()[-1])] = int(task.name)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
