"""What the processes of a target were doing, taken right before they are ended, and kept with the episode.

Whatever hangs there delays nobody: a program of its own looks (`bystander`), and is killed at a deadline with all that
it has started. What it had seen until then is kept.

What is kept is a JSON object, its format numbered:

    format            2
    armed             whether a stop was to follow; in a dry run nothing is ever blocked, not even for a moment
    took_s            how long it took, seconds
    cut_short         why it is not whole, as a sentence; null where it is
    left_out_bytes    how much was seen and not kept, as JSON, because that was more than may be kept
    facts             what the host's exporter told at that moment (gpuwarden.facts, without `gpu_pids`); null where it
                      told nothing
    processes         each with pid, name, state and threads (how many it has), and `seen`, its threads one by one:
                      what `bystander` writes of a thread, with `python` and `native`, its stacks, where they were
                      had; a stack whose thread is not known stands by itself, its tid null
    logs              the last lines: source, lines, cut_bytes
    curves            figures over time around the trip, each with metric, gpu (null for what is no GPU's own), source
                      (the Prometheus that has it), at (its first point, Unix seconds by the ledger's clock), step_s
                      and values, of which null was unknown then; one of format 1 has none
    notes             what was not seen, and why, a sentence each
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from gpuwarden import cgroup, joblogs
from gpuwarden.facts import ContainerFacts
from gpuwarden.job import Trip
from remediator import bystander, curves
from remediator.curves import CurvesError, Said, Sought
from remediator.plan import ContainerState, Episode
from remediator.prometheus import Prometheus

log: Final = structlog.get_logger("capture")

SHARE: Final = 0.9
"""What part of the time the bystander is told of: so it says itself what it had no time for."""

REAP_S: Final = 0.2
"""How long a bystander that was killed may take to be gone, seconds; one in the kernel's hands may never be."""

POLL_S: Final = 0.01

LET_GO_S: Final = 0.5
"""For how long it is watched whether one stays stopped from whom no native frames were had, seconds."""

LINGERING_MAX: Final = 4
"""With so many bystanders that do not die, no more are sent."""

FORMAT: Final = 2

_LOOK: Final = (sys.executable, "-IS", str(Path(bystander.__file__)))


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What was seen before one stop, or one that a dry run would have made. `document` is as the module says."""

    armed: bool
    took_s: float
    document: Mapping[str, Any]

    @property
    def because(self) -> str:
        """In one sentence."""
        threads = [thread for process in self.document["processes"] for thread in process["seen"]]
        python = sum("python" in thread for thread in threads)
        cut, drawn = self.document["cut_short"], len(self.document["curves"])
        return (
            f"{_count(len(self.document['processes']), 'process', 'es')}, {_count(len(threads), 'thread')}, "
            f"Python stacks of {python}"
            + (f", {_count(drawn, 'curve')}" if drawn else "")
            + f"; took {self.took_s:.1f} s"
            + (f"; {cut}" if cut else "")
        )


def find_py_spy() -> Path | None:
    """py-spy as it was installed with this package, else on PATH; `None` where it is not."""
    beside = [Path(sys.executable).parent, Path(__file__).resolve().parent.parent / "bin"]
    for folder in beside:
        if os.access(folder / "py-spy", os.X_OK):
            return folder / "py-spy"
    found = shutil.which("py-spy")
    return None if found is None else Path(found).resolve()


class Captor:
    """Captures, each within its bounds. Safe to share between threads.

    Args:
        for_s: how long one may take, seconds.
        max_bytes: how much is kept of one.
        engines: the sockets of this host's engines, by kind of container.
        job_logs: the folder in which workers keep their jobs' logs; `None` where they keep none.
        py_spy: where py-spy is; `None` where it is not.
        curves_s: how long before and after the trip the curves reach, seconds; 0 is none of them.
        prometheus: who is asked for them; `None` where there is nobody to ask.
        look: the program that looks, before its request.
    """

    def __init__(
        self,
        *,
        for_s: float,
        max_bytes: int,
        engines: Mapping[str, str] | None = None,
        job_logs: Path | None = None,
        py_spy: Path | None = None,
        curves_s: float = 0.0,
        prometheus: Prometheus | None = None,
        look: Sequence[str] = _LOOK,
    ) -> None:
        self._for_s = for_s
        self._max_bytes = max_bytes
        self._engines = dict(engines or {})
        self._job_logs = job_logs
        self._py_spy = py_spy
        self._curves_s = curves_s
        self._prometheus = prometheus
        self._look = look
        self._lingering: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def capture(
        self, episode: Episode, container: ContainerState, facts: ContainerFacts | None, *, armed: bool, now: float
    ) -> Captured:
        """See what is to be stopped; it never takes longer than its bound, and never fails.

        `now` is by the clock by which the episode was opened.
        """
        started_s = time.monotonic()
        around = self._around(episode, facts, now=now)
        lines, cut_short = self._see(self._request(episode, container, armed=armed))
        _let_go_on(lines)
        lines += around(started_s + self._for_s)
        took_s = time.monotonic() - started_s
        document = {
            "format": FORMAT,
            "armed": armed,
            "took_s": round(took_s, 3),
            "cut_short": cut_short,
            "facts": None if facts is None else _told(facts),
        }
        return Captured(armed=armed, took_s=took_s, document=_assembled(document, lines, max_bytes=self._max_bytes))

    def _around(
        self, episode: Episode, facts: ContainerFacts | None, *, now: float
    ) -> Callable[[float], list[dict[str, Any]]]:
        """Begin to ask for the curves; what is returned waits for them until then, and has lines like a bystander's."""
        if not self._curves_s:
            return lambda _: []
        try:
            sought = curves.seek(episode, facts, now=now, around_s=self._curves_s)
        except CurvesError as error:
            note = curves.lacking(["it"], str(error))
            return lambda _: [_note(note)]
        if self._prometheus is None:
            note = curves.lacking(sought.names, "there is no Prometheus to ask (--prometheus)")
            return lambda _: [_note(note)]
        answers = self._prometheus.curves(sought, within_s=self._for_s * SHARE)
        return lambda until_s: _drawn(sought, answers, until_s=until_s)

    def _request(self, episode: Episode, container: ContainerState, *, armed: bool) -> dict[str, Any]:
        log_files = [] if container.log_file is None else [container.log_file]
        if self._job_logs is not None and episode.job_id is not None and episode.attempt is not None:
            log_files.insert(0, str(joblogs.path_of(self._job_logs, episode.job_id, episode.attempt)))
        engine = self._engines.get(container.kind)
        return {
            "until_s": time.monotonic() + self._for_s * SHARE,
            "pids": sorted(container.pids),
            "cgroup": container.cgroup,
            "session": container.session,
            "py_spy": None if self._py_spy is None else str(self._py_spy),
            # They cost the process CPU, and that its CPU stands still is what tells a dead worker.
            "native": armed and Trip.DEAD_WORKER not in {episode.trip, *episode.trips},
            "log_files": log_files,
            "kind": container.kind,
            "engine": engine,
            "container": None if engine is None else container.handle,
        }

    def _see(self, request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        """What the bystander wrote, and why that is not all of it."""
        deadline_s = time.monotonic() + self._for_s
        with self._lock:
            self._lingering = [each for each in self._lingering if each.poll() is None]
            if len(self._lingering) >= LINGERING_MAX:
                return [], f"nothing was looked at: {len(self._lingering)} earlier looks hang still"
        # In memory: a disk that is full or hangs is no reason to see nothing, and nobody has to read it meanwhile.
        with _memory("capture") as seen, _memory("capture-errors") as errors:
            try:
                look = subprocess.Popen(
                    [*self._look, json.dumps(request)],
                    stdin=subprocess.DEVNULL,
                    stdout=seen,
                    stderr=errors,
                    env={**os.environ, "RUST_BACKTRACE": "0", "LC_ALL": "C.UTF-8"},
                    start_new_session=True,  # so that all it has started is killed with it
                )
            except OSError as error:
                return [], f"nothing was looked at: {error}"
            cut_short = None if _ends(look.pid, deadline_s) else f"it was cut short after {self._for_s:g} s"
            self._end(look)
            lines = list(_read(os.pread(seen.fileno(), bystander.OUTPUT_MAX_BYTES, 0)))
            if cut_short is None and not any(line["kind"] == "over" for line in lines):
                said = os.pread(errors.fileno(), 4096, 0).decode("utf-8", "backslashreplace").split("\n")
                word = _storable(" ".join(said[-2:]).strip()) or "no word"
                cut_short = f"the look ended by itself ({look.returncode}): {word}"
            return lines, cut_short

    def _end(self, look: "subprocess.Popen[bytes]") -> None:
        """Kill what is left of it. It is not waited for before: until then its number is nobody else's."""
        with suppress(ProcessLookupError):
            os.killpg(look.pid, signal.SIGKILL)
        try:
            look.wait(REAP_S)
        except subprocess.TimeoutExpired:
            log.warning("a look at what is to be stopped cannot be killed", pid=look.pid)
            with self._lock:
                self._lingering.append(look)


def _drawn(sought: Sought, answers: "Future[Sequence[Said]]", *, until_s: float) -> list[dict[str, Any]]:
    try:
        said = answers.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        answers.cancel()
        return [_note(curves.lacking(sought.names, "no time was left"))]
    found, notes = curves.choose(sought, said)
    return [*(_storable({"kind": "curve", **asdict(each)}) for each in found), *(_note(each) for each in notes)]


def _note(text: str) -> dict[str, Any]:
    return {"kind": "note", "text": _storable(text)}


def _ends(pid: int, deadline_s: float) -> bool:
    """Whether it ends before that; it is left to be waited for."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _let_go_on(lines: Sequence[Mapping[str, Any]]) -> None:
    """Whom a py-spy that was killed had just stopped goes on; the kernel leaves it stopped (ptrace(2), PTRACE_ATTACH).

    Not one that was stopped before: to such a one py-spy is not sent for native frames.
    """
    told = {line["pid"] for line in lines if line["kind"] == "native"}
    left = [line for line in lines if line["kind"] == "asked" and line["pid"] not in told]
    until_s = time.monotonic() + LET_GO_S
    while left:
        left = [line for line in left if not _goes_on(line["pid"], line["started"], last=time.monotonic() >= until_s)]
        time.sleep(POLL_S if left else 0.0)


def _goes_on(pid: int, started: str, *, last: bool) -> bool:
    """Whether a process needs no look more: it was let go, or is gone, or none traces it and time is up."""
    try:
        with _held(pid) as process:
            fields = cgroup.stat(pid)
            if fields[19] != started:
                return True
            if fields[0] == "T":
                signal.pidfd_send_signal(process, signal.SIGCONT)
                return True
    except OSError:
        return True
    return last


@contextmanager
def _held(pid: int) -> Iterator[int]:
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _memory(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "rb")


def _told(facts: ContainerFacts) -> dict[str, Any]:
    """Without what the driver lists on the host's GPUs: that is about everybody."""
    return {name: _storable(value) for name, value in asdict(facts).items() if name != "gpu_pids"}


def _read(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        with suppress(ValueError):  # it was killed in the middle of one
            yield _storable(json.loads(line))


_RANKS: Final = ("note", "process", "log", "thread", "curve", "python", "native")
"""What is kept first where not all of it fits."""


def _assembled(document: dict[str, Any], lines: Sequence[Mapping[str, Any]], *, max_bytes: int) -> dict[str, Any]:
    """All that fits: of what does not, the stacks are left out first."""
    kept: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _RANKS}
    left_bytes, left_out_bytes = max_bytes - _size(document), 0
    for line in sorted((line for line in lines if line["kind"] in kept), key=lambda line: _RANKS.index(line["kind"])):
        size = _size(line)
        if size <= left_bytes:
            left_bytes -= size
            kept[line["kind"]].append({name: value for name, value in line.items() if name != "kind"})
        else:
            left_out_bytes += size
    return document | {
        "left_out_bytes": left_out_bytes,
        "processes": [process | {"seen": list(_threads(process["pid"], kept))} for process in kept["process"]],
        "logs": kept["log"],
        "curves": kept["curve"],
        "notes": [note["text"] for note in kept["note"]],
    }


def _threads(pid: int, kept: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The threads of one process, each with its stacks; a stack whose thread is not known stands by itself."""
    threads = {each["tid"]: _without_pid(each) for each in kept["thread"] if each["pid"] == pid}
    strays = []
    for kind in ("python", "native"):
        for each in kept[kind]:
            if each["pid"] == pid:
                stack = _without_pid(each)
                thread = threads.get(stack.pop("tid"))
                if thread is None:
                    strays.append({"tid": None, kind: stack})
                else:
                    thread[kind] = stack
    yield from threads.values()
    yield from strays


def _without_pid(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "pid"}


def _size(value: object) -> int:
    return len(json.dumps(value)) + 2


def _storable(value: Any) -> Any:
    """As both databases take it: a text may hold half a surrogate pair, or a NUL."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    if isinstance(value, dict):
        return {name: _storable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    return value


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}" + ("" if number == 1 else plural)
