"""Capture what the processes of a target do right before a stop, with limits of time and bytes.

A subprocess reads them (`probe`). At the deadline it is killed and its output is used. The document is a JSON object:

    - armed             whether a stop was to follow
    - took_s            duration, seconds
    - cut_short         why it is incomplete; null if complete
    - left_out_bytes    bytes over the limit
    - facts             evidence of the host's exporter at that time (gpuwarden.evidence), without `gpu_pids`, or null
    - processes         pid, name, state, threads (their number) and `seen`: the threads, with `python`, their stack
    - logs              the last lines: source, lines
    - curves            metric history from Prometheus: see `prometheus_range.Curve`
    - notes             reasons for missing parts
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from gpuwarden.evidence import ContainerFacts, WorkerFacts
from gpuwarden.worker import job_logs as joblogs
from remediator.capture import probe
from remediator.clients.prometheus_range import Curves, Found
from remediator.ledger.captures import Capture
from remediator.plan import ContainerState, Episode

log: Final = structlog.get_logger("capture")

SHARE: Final = 0.9
"""Part of the time limit after which the probe ends and writes what it skipped."""

REAP_S: Final = 0.2
"""Wait for a killed probe, seconds."""

_LOOK: Final = (sys.executable, "-IS", str(Path(probe.__file__)))

_Line = dict[str, Any]


def find_py_spy() -> Path | None:
    """Find py-spy next to this Python, else on PATH."""
    beside = [Path(sys.executable).parent, Path(__file__).resolve().parents[2] / "bin"]
    found = shutil.which("py-spy", path=os.pathsep.join([*map(str, beside), os.environ.get("PATH", "")]))
    return None if found is None else Path(found).resolve()


class CaptureRunner:
    """Takes captures within a limit of time and of bytes. Safe to share between threads.

    Args:
        for_s: time limit, seconds.
        max_bytes: size limit.
        engines: sockets of the container engines, by kind.
        job_logs: folder of the job logs.
        py_spy: path of py-spy.
        curves: client for metric history.
        look: command of the probe.
    """

    def __init__(
        self,
        *,
        for_s: float,
        max_bytes: int,
        engines: Mapping[str, str] | None = None,
        job_logs: Path | None = None,
        py_spy: Path | None = None,
        curves: Curves | None = None,
        look: Sequence[str] = _LOOK,
    ) -> None:
        self._for_s = for_s
        self._max_bytes = max_bytes
        self._engines = dict(engines or {})
        self._job_logs = job_logs
        self._py_spy = py_spy
        self._curves = curves
        self._look = look

    def capture(
        self, episode: Episode, container: ContainerState, facts: ContainerFacts | None, *, armed: bool, now: float
    ) -> Capture:
        """Capture a container before its stop. Never takes longer than the limit and never fails.

        `armed` says whether a stop follows. `now` is the ledger's time.
        """
        started_s = time.monotonic()
        answer = None
        if self._curves is not None:
            answer = self._curves.begin(episode, facts, now=now, within_s=self._for_s * SHARE)
        lines, cut_short = self._see(self._request(episode, container, facts))
        if answer is not None:
            lines += _drawn(answer, until_s=started_s + self._for_s)
        took_s = time.monotonic() - started_s
        document = {
            "armed": armed,
            "took_s": round(took_s, 3),
            "cut_short": cut_short,
            # gpu_pids lists processes of other containers too.
            "facts": facts and _storable(_without(asdict(facts), "gpu_pids")),
        }
        return Capture(armed=armed, took_s=took_s, document=_assembled(document, lines, max_bytes=self._max_bytes))

    def _request(self, episode: Episode, container: ContainerState, facts: ContainerFacts | None) -> dict[str, Any]:
        log_files = [] if container.log_file is None else [container.log_file]
        if self._job_logs is not None and episode.job_id is not None and episode.attempt is not None:
            log_files.insert(0, str(joblogs.path_of(self._job_logs, episode.job_id, episode.attempt)))
        engine = self._engines.get(container.kind)
        return {
            "until_s": time.monotonic() + self._for_s * SHARE,
            "pids": sorted(container.pids),
            "worker_pid": facts.worker_pid if isinstance(facts, WorkerFacts) else None,
            "cgroup": container.cgroup,
            "process_group": container.process_group,
            "py_spy": None if self._py_spy is None else str(self._py_spy),
            "log_files": log_files,
            "engine": engine,
            "container": None if engine is None else container.handle,
        }

    def _see(self, request: Mapping[str, Any]) -> tuple[list[_Line], str | None]:
        """Run the probe. Returns its lines, and why they are incomplete."""
        # In memory: a disk may be full or hang, and a pipe would need a reader.
        with _memory("capture") as seen, _memory("capture-errors") as errors:
            try:
                look = subprocess.Popen(
                    [*self._look, json.dumps(request)],
                    stdin=subprocess.DEVNULL,
                    stdout=seen,
                    stderr=errors,
                    env={**os.environ, "RUST_BACKTRACE": "0", "LC_ALL": "C.UTF-8"},
                    start_new_session=True,  # so that its children are killed with it
                )
            except OSError as error:
                return [], f"the probe did not start: {error}"
            cut_short = None
            try:
                look.wait(self._for_s)
            except subprocess.TimeoutExpired:
                cut_short = f"cut short after {self._for_s:g} s"
                _kill(look)
            lines = list(_read(os.pread(seen.fileno(), probe.OUTPUT_MAX_BYTES, 0)))
            if cut_short is None and not any(line["kind"] == "over" for line in lines):
                output = os.pread(errors.fileno(), 4096, 0).decode("utf-8", "backslashreplace").split("\n")
                word = _storable(" ".join(output[-2:]).strip()) or "no output"
                cut_short = f"the probe failed ({look.returncode}): {word}"
            return lines, cut_short


def _kill(look: "subprocess.Popen[bytes]") -> None:
    # The probe is not reaped yet, so its pid is not reused.
    with suppress(ProcessLookupError):
        os.killpg(look.pid, signal.SIGKILL)
    try:
        look.wait(REAP_S)
    except subprocess.TimeoutExpired:
        log.warning("capture process still running after SIGKILL", pid=look.pid)


def _drawn(answer: "Future[Found]", *, until_s: float) -> list[_Line]:
    try:
        found, notes = answer.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        answer.cancel()
        found, notes = [], ["no curves: no time left"]
    lines = [
        *({"kind": "curve", **asdict(each)} for each in found),
        *({"kind": "note", "text": each} for each in notes),
    ]
    return [_storable(each) for each in lines]


def _memory(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "rb")


def _read(data: bytes) -> Iterator[_Line]:
    for line in data.split(b"\n"):
        with suppress(ValueError):  # killed while writing a line
            yield _storable(json.loads(line))


_RANKS: Final = ("note", "process", "log", "thread", "curve", "python")
"""Order in which lines are kept if not all fit."""


def _assembled(document: _Line, lines: Sequence[_Line], *, max_bytes: int) -> _Line:
    """Build the document from the lines that fit. Stacks are left out first."""
    kept: dict[str, list[_Line]] = {kind: [] for kind in _RANKS}
    left_bytes, left_out_bytes = max_bytes - _size(document), 0
    for line in sorted((line for line in lines if line["kind"] in kept), key=lambda line: _RANKS.index(line["kind"])):
        size = _size(line)
        if size <= left_bytes:
            left_bytes -= size
            kept[line["kind"]].append(_without(line, "kind"))
        else:
            left_out_bytes += size
    threads = {(each["pid"], each["tid"]): _without(each, "pid") for each in kept["thread"]}
    for each in kept["python"]:
        blank = {"tid": None, "name": "", "state": None, "cpu_ticks": None, "wchan": None, "stack": None}
        threads.setdefault((each["pid"], each["tid"]), blank)["python"] = _without(each, "pid", "tid")
    return document | {
        "left_out_bytes": left_out_bytes,
        "processes": [
            process | {"seen": [thread for (pid, _), thread in threads.items() if pid == process["pid"]]}
            for process in kept["process"]
        ],
        "logs": kept["log"],
        "curves": kept["curve"],
        "notes": [note["text"] for note in kept["note"]],
    }


def _without(line: _Line, *names: str) -> _Line:
    return {name: value for name, value in line.items() if name not in names}


def _size(value: object) -> int:
    return len(json.dumps(value)) + 2


def _storable(value: Any) -> Any:
    """Escape lone surrogates and NUL, which the databases refuse."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    if isinstance(value, dict):
        return {name: _storable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    return value
