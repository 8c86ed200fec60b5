"""What a bystander sees of processes that are about to be stopped. A program of its own, which can be killed.

    python -IS bystander.py REQUEST

A read of /proc can hang, and so can py-spy: who starts this puts a deadline to it and kills it there, with what it has
started. So each thing seen is written the moment it is seen, one JSON object a line, those first that cost least. Needs
the standard library alone. REQUEST is a JSON object:

    until_s        until when it may go on, by the monotonic clock, seconds; it stops by itself a little later, whoever
                   waits for it
    pids           the processes, at most PROCESSES_MAX of them are looked at
    cgroup         the directory of the control group that they must be in still; null for any
    session        the session that they must be of still; null for any
    py_spy         the path of py-spy; null where there is none
    native         whether frames of native code may be asked for too, which stops the process meanwhile
    log_files      the files that may hold its last lines: the first that is there is read; else
    container      the full id of the container to ask its engine about; null for none
    kind           what it is a container of: docker, podman or another
    engine         its engine's socket, as unix:///path, where it has one

The lines, by their `kind`; a field that could not be read is null:

    process        pid, name, state (a letter of proc_pid_stat(5)), threads (how many it has)
    thread         pid, tid, name, state, cpu_ticks (user and system, clock ticks since its start), wchan (the kernel
                   function it waits in; null when it runs, or may not be asked), stack (innermost first), syscall
    python         pid, tid (null where it is not told), name, active, owns_gil, frames (innermost first: function,
                   file, line; 0 is unknown), frames_cut
    asked          pid, started (clock ticks since boot): it is about to be stopped for its native frames
    native         as python, with the frames of native code among them
    log            source, lines, cut_bytes (of what was read, not kept)
    note           text: what was not seen, and why, a sentence
    over           the last line, of one that was not cut short

Sources: proc_pid_stat(5), proc_pid_task(5), proc_pid_wchan(5), proc_pid_syscall(5); `py-spy dump --json`;
Docker's API, "Get container logs" and "Inspect a container"; podman-run(1), --log-driver=k8s-file.
"""

import contextlib
import http.client
import json
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
"""Threads looked at, of all processes together."""

STACK_MAX: Final = 24
"""Functions of a kernel stack that are kept, innermost first."""

FRAMES_MAX: Final = 64
"""Frames of a Python stack that are kept, innermost first."""

LOG_LINES_MAX: Final = 100
LOG_MAX_BYTES: Final = 16 * 2**10
LOG_READ_MAX_BYTES: Final = 4 * 2**20
"""What is read of a container's last lines, for them to be so many at most."""

PY_SPY_SHARE: Final = 0.45
"""How much of the whole time py-spy may take over one process; native frames may take what is left of all."""

MEMORY_MAX_BYTES: Final = 2**30
"""Memory that this program may have, and py-spy: what py-spy reads is the target's own, and may lie."""

PODMAN_READ_BYTES: Final = 2**20
"""What is read of the end of Podman's own file: it holds as many bytes of log as are kept, were each a piece by itself
with 46 bytes about it."""

ENGINE_S: Final = 1.0
"""How long the engine may take between two parts of a container's last lines, seconds."""

CONTAINER_LOG: Final = "the container's log"

OUTPUT_MAX_BYTES: Final = 4 * 2**20

NATIVE_NOT_IN: Final = {
    "T": "stopped", "t": "traced by another program", "D": "in a wait that cannot be interrupted", "Z": "dead",
    "X": "dead",
}  # fmt: skip
"""States of a thread in which native frames cannot be had: py-spy fails, or waits for ever."""

_PROC: Final = Path("/proc")


class _Out:
    """Writes each line whole, and no more than there may be."""

    def __init__(self) -> None:
        self._left_bytes = OUTPUT_MAX_BYTES

    def say(self, kind: str, **line: Any) -> None:
        data = json.dumps({"kind": kind, **line}).encode() + b"\n"
        if len(data) <= self._left_bytes:
            self._left_bytes -= len(data)
            os.write(1, data)


def main(argv: list[str]) -> int:
    """See the module."""
    request: dict[str, Any] = json.loads(argv[1])
    until_s: float = request["until_s"]
    for_s = max(0.0, until_s - time.monotonic())
    signal.setitimer(signal.ITIMER_REAL, for_s + 1.0)  # where nobody is left who would kill it
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    out = _Out()
    pids: list[int] = request["pids"]
    if len(pids) > PROCESSES_MAX:
        out.say("note", text=f"{len(pids) - PROCESSES_MAX} of {len(pids)} processes were not looked at")
    # What costs least first.
    seen = _processes(pids[:PROCESSES_MAX], request["cgroup"], request["session"], out)
    if not any(_file_log(Path(path), out) for path in request["log_files"]) and request["container"] is not None:
        _container_log(request["kind"], request["engine"], request["container"], out)
    py_spy: str | None = request["py_spy"]
    if py_spy is None:
        out.say("note", text="no Python stacks, for py-spy is not installed: pip install 'gpuwarden[evidence]'")
    else:
        for pid, started in seen.items():
            _python(py_spy, pid, started, out, until_s=min(until_s, time.monotonic() + PY_SPY_SHARE * for_s))
    if py_spy is not None and request["native"]:
        for pid, started in seen.items():
            _native(py_spy, pid, started, out, until_s=until_s)
    out.say("over")
    return 0


# --- the kernel


def _processes(pids: list[int], cgroup: str | None, session: int | None, out: _Out) -> dict[int, str]:
    """Each process and its threads; those that were there, each with its start.

    A pid may be somebody else's by now. Whether it is the target's is asked after its start was read: what has the same
    start later is then the target's, too.
    """
    seen: dict[int, str] = {}
    left = THREADS_MAX
    for pid in pids:
        of_it = _PROC / str(pid)
        try:
            name, fields = _stat(of_it)
            tids = sorted((int(entry) for entry in os.listdir(of_it / "task")), key=lambda tid: (tid != pid, tid))  # noqa: PTH208 - names alone
        except (OSError, ValueError, IndexError) as error:
            out.say("note", text=f"process {pid} was not seen: {_why(error)}")
            continue
        if (session is not None and int(fields[3]) != session) or (cgroup is not None and pid not in _members(cgroup)):
            out.say("note", text=f"process {pid} was not looked at: it is not the target's, or not any more")
            continue
        seen[pid] = fields[19]
        out.say("process", pid=pid, name=name, state=fields[0], threads=len(tids))
        for tid in tids[:left]:
            _thread(of_it / "task" / str(tid), pid, tid, out)
        if len(tids) > left:
            out.say("note", text=f"{len(tids) - left} of {len(tids)} threads of process {pid} were not looked at")
        left = max(0, left - len(tids))
    return seen


def _members(cgroup: str) -> set[int]:
    """The processes of a control group and those below it; none of one that is gone."""
    found = set()
    for folder, _, names in os.walk(cgroup):
        if "cgroup.procs" in names:
            with contextlib.suppress(OSError, ValueError):
                found |= {int(pid) for pid in (Path(folder) / "cgroup.procs").read_text(encoding="ascii").split()}
    return found


def _thread(of_it: Path, pid: int, tid: int, out: _Out) -> None:
    try:
        name, fields = _stat(of_it)
    except (OSError, ValueError, IndexError):
        return  # it has ended
    wchan = _text(of_it / "wchan")
    stack = _text(of_it / "stack")
    out.say(
        "thread",
        pid=pid,
        tid=tid,
        name=name,
        state=fields[0],
        cpu_ticks=int(fields[11]) + int(fields[12]),
        wchan=None if wchan in (None, "", "0") else wchan,
        stack=None if stack is None else [_ADDRESS.sub("", line) for line in stack.splitlines()[:STACK_MAX]],
        syscall=_text(of_it / "syscall"),
    )


_ADDRESS: Final = re.compile(r"^\[<[0-9a-f]*>\] ")


def _stat(of_it: Path) -> tuple[str, list[str]]:
    """A name, which may hold brackets and spaces, and the fields after it."""
    before, _, after = (of_it / "stat").read_text(encoding="utf-8", errors="backslashreplace").rpartition(")")
    return before.partition("(")[2], after.split()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace").strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    with contextlib.suppress(OSError, IndexError):
        return _stat(_PROC / str(pid))[1][19]
    return None


def _states(pid: int) -> set[str]:
    found = set()
    for task in (_PROC / str(pid) / "task").glob("*"):
        with contextlib.suppress(OSError, IndexError):
            found.add(_stat(task)[1][0])
    return found


# --- the last lines


def _file_log(path: Path, out: _Out) -> bool:
    """The last lines of a file; whether it is there."""
    try:
        data, _ = _end_of(path, LOG_MAX_BYTES + 1)
    except FileNotFoundError:
        return False
    except OSError as error:
        out.say("note", text=f"no last lines of {path}: {_why(error)}")
    else:
        _say_lines(str(path), data, out)
    return True


def _end_of(path: Path, size_bytes: int) -> tuple[bytes, bool]:
    """The last bytes of a file, and whether there are others before them."""
    # Nobody leads us elsewhere by a link, and nothing is waited for that is no file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no file")
        before = max(0, file.seek(0, os.SEEK_END) - size_bytes)
        file.seek(before)
        return file.read(size_bytes), before > 0


class _Socket(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ENGINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ENGINE_S)
        self.sock.connect(self._path)


def _container_log(kind: str, url: str, container: str, out: _Out) -> None:
    if not url.startswith("unix://"):
        out.say("note", text=f"no last lines of the container: its engine at {url} has no socket here")
        return
    if kind == "podman" and _podman_file_log(url, container, out):
        return
    because = ""
    for lines in (LOG_LINES_MAX, 1):  # one of a hundred may be of any length
        try:
            data = _engine_says(url, f"/containers/{container}/logs?stdout=1&stderr=1&tail={lines}")
        except _TooMuchError as error:
            because = f"the last {lines} have more than {error}" if lines > 1 else f"the last one has more than {error}"
        except TimeoutError as error:
            because = _why(error)
        except (OSError, http.client.HTTPException) as error:
            because = _why(error)
            break
        else:
            _say_lines(CONTAINER_LOG, b"".join(_unframed(data)), out)
            if because:
                out.say("note", text=f"of the container's last lines there is only the last: {because}")
            return
    out.say("note", text=f"no last lines of the container: {because}")


def _podman_file_log(url: str, container: str, out: _Out) -> bool:
    """The last lines of Podman's own file, which tells them right; whether it could be read.

    A program that writes a line in two goes, as an unbuffered print() does, has it kept in pieces now and then. Asked
    for the last so many lines, Podman 4.3 puts such a piece behind the line before it, those of one line in reverse,
    and leaves out the first (https://github.com/containers/podman/issues/19545).
    """
    try:
        path = json.loads(_engine_says(url, f"/containers/{container}/json"))["LogPath"]
    except (OSError, http.client.HTTPException, _TooMuchError, ValueError, KeyError, TypeError):
        return False  # it says the same when it is asked for the lines
    if not path:
        return False  # it keeps them elsewhere: in the journal
    try:
        data, cut = _end_of(Path(path), PODMAN_READ_BYTES)
    except (OSError, ValueError, TypeError) as error:
        because = f"{path} cannot be read: {_why(error)}"
        out.say("note", text=f"the container's last lines may be out of order, as Podman 4.3 tells them: {because}")
        return False
    _say_lines(CONTAINER_LOG, b"".join(_joined(data.split(b"\n")[cut:])), out)
    return True


def _joined(kept: list[bytes]) -> Iterator[bytes]:
    """What was written, of a log in pieces: TIME STREAM TAG PIECE, where the tag P says that the line goes on."""
    begun: dict[bytes, list[bytes]] = {}
    for each in kept:
        _, _, rest = each.partition(b" ")
        stream, _, rest = rest.partition(b" ")
        tag, _, piece = rest.partition(b" ")
        begun.setdefault(stream, []).append(piece)
        if tag == b"F":
            yield b"".join([*begun.pop(stream), b"\n"])
    for pieces in begun.values():
        yield from pieces


class _TooMuchError(Exception):
    """An answer has more than is read of one. The message says how much that is."""


def _engine_says(url: str, path: str) -> bytes:
    with contextlib.closing(_Socket(url.removeprefix("unix://"))) as engine:
        engine.request("GET", path)
        answer = engine.getresponse()
        data = answer.read(LOG_READ_MAX_BYTES + 1)
    if answer.status != http.client.OK:
        said = data.decode("utf-8", "backslashreplace").strip()[:200]
        raise http.client.HTTPException(f"its engine says {answer.status}: {said}")
    if len(data) > LOG_READ_MAX_BYTES:
        raise _TooMuchError(f"{LOG_READ_MAX_BYTES} bytes")
    return data


def _unframed(data: bytes) -> Iterator[bytes]:
    """What was written, without the frames that the engine puts around it where there is no terminal."""
    at = 0
    while at < len(data):
        if data[at : at + 1] not in (b"\0", b"\1", b"\2") or data[at + 1 : at + 4] != b"\0\0\0":
            yield data[at:]
            return
        size = int.from_bytes(data[at + 4 : at + 8], "big")
        yield data[at + 8 : at + 8 + size]
        at += 8 + size


def _say_lines(source: str, data: bytes, out: _Out) -> None:
    """The last lines of `data`, each whole but for one that is longer than what is kept: of that one its end."""
    kept = data[-LOG_MAX_BYTES:]
    if len(data) > len(kept) and data[-LOG_MAX_BYTES - 1 : -LOG_MAX_BYTES] != b"\n":
        rest = kept.partition(b"\n")[2]
        if not rest:
            out.say("note", text=f"the last line of {source} is longer than {LOG_MAX_BYTES} bytes: its end is kept")
        kept = rest or kept
    lines = kept.decode("utf-8", "backslashreplace").splitlines()
    last = lines[-LOG_LINES_MAX:]
    cut_bytes = len(data) - len(kept) + sum(len(line.encode()) + 1 for line in lines[: len(lines) - len(last)])
    out.say("log", source=source, lines=last, cut_bytes=cut_bytes)


# --- Python


def _python(py_spy: str, pid: int, started: str, out: _Out, *, until_s: float) -> None:
    found = _dump([py_spy, "dump", "--pid", str(pid), "--nonblocking", "--json"], pid, started, until_s=until_s)
    if isinstance(found, str):
        out.say("note", text=f"no Python stacks of process {pid}: {found}")
    else:
        _say_stacks(found, "python", pid, out)


def _native(py_spy: str, pid: int, started: str, out: _Out, *, until_s: float) -> None:
    """Native frames are had by stopping the process for the moment; of what cannot be stopped there are none.

    Nor in a container: py-spy would look for its libraries here (https://github.com/benfred/py-spy/issues/214).
    """
    if _sees_other_files(pid):
        out.say("note", text=f"no native frames of process {pid}, for py-spy does not find them in a container")
        return
    for state in sorted(_states(pid) & set(NATIVE_NOT_IN)):
        out.say("note", text=f"no native frames of process {pid}, of which a thread is {NATIVE_NOT_IN[state]}")
        return
    out.say("asked", pid=pid, started=started)
    found = _dump([py_spy, "dump", "--pid", str(pid), "--native", "--json"], pid, started, until_s=until_s)
    if isinstance(found, str):
        out.say("note", text=f"no native frames of process {pid}: {found}")
    else:
        _say_stacks(found, "native", pid, out)


def _sees_other_files(pid: int) -> bool:
    try:
        its, ours = (os.readlink(_PROC / each / "ns" / "mnt") for each in (str(pid), "self"))  # noqa: PTH115 - no path
    except OSError:
        return False  # py-spy may look no closer than we, and says so
    return its != ours


def _dump(argv: list[str], pid: int, started: str, *, until_s: float) -> list[dict[str, Any]] | str:
    """What py-spy found, or why it found nothing."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return "no time was left"
    if _started(pid) != started:
        return "it has ended"
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=left_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not come to an end within {left_s:.1f} s"
    except OSError as error:
        return f"py-spy cannot be run: {_why(error)}"
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "backslashreplace").partition("Stack backtrace:")[0]
        return f"py-spy says: {' '.join(said.split())[:300] or f'nothing, and ended with {done.returncode}'}"
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError:
        return "py-spy's answer cannot be read"
    return found


def _say_stacks(found: list[dict[str, Any]], kind: str, pid: int, out: _Out) -> None:
    tids = _tids(pid)
    for thread in found:
        frames = thread["frames"]
        tid = thread["os_thread_id"]
        out.say(
            kind,
            pid=pid,
            tid=tids.get(tid, tid),
            name=thread["thread_name"],
            active=thread["active"],
            owns_gil=thread["owns_gil"],
            frames=[
                {"function": frame["name"], "file": frame["filename"], "line": frame["line"]}
                for frame in frames[:FRAMES_MAX]
            ],
            frames_cut=max(0, len(frames) - FRAMES_MAX),
        )


def _tids(pid: int) -> dict[int, int]:
    """A process's threads by the number that they have in its own pid namespace, which is the one that Python knows."""
    found = {}
    for task in (_PROC / str(pid) / "task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            status = (task / "status").read_text(encoding="utf-8", errors="replace")
            for line in status.splitlines():
                if line.startswith("NSpid:"):
                    found[int(line.split()[-1])] = int(task.name)
    return found


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv))
