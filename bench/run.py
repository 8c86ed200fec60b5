"""What `gpuwarden run` and `worker run --processes` cost: the start of a command, and each supervisor's use."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.cost import cpu_s
from bench.figures import BenchError, Figure, Place, figure, progress, wait_until
from gpuwarden import procfs
from gpuwarden.supervisor.files import PROCESS_SUFFIX

STARTED_S: Final = 30.0
RUN: Final = (sys.executable, "-m", "gpuwarden", "run")
POOL: Final = (sys.executable, "-m", "gpuwarden", "worker", "run", "--commands", "--name", "pool")
KINDS: Final[Mapping[str, Sequence[str]]] = {"": (), ", with --steps-from": ("--steps-from", "step [0-9]+")}
"""Kinds of a run by their options."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of `echo`, milliseconds."""

    to_output: float
    to_end: float
    cpu: float
    """CPU time of the supervisor and the command."""


def measure(place: Place, *, rounds: int = 40, watch_s: float = 60.0) -> Iterator[Figure]:
    """Measure starts in turns with the bare command, then a supervisor that has nothing to do."""
    progress(f"run, {rounds} starts")
    runtime = place.folder / "run"
    runtime.mkdir()
    (runtime / "host").write_text("bench\n", encoding="ascii")
    environment = {**os.environ, "GPUWARDEN_RUNTIME_DIR": str(runtime)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has bytecode
    _start([*RUN, "--", "echo", "ready"], environment)
    bare, run = [], []
    for _ in range(rounds):
        bare.append(_start(["echo", "ready"], environment))
        run.append(_start([*RUN, "--", "echo", "ready"], environment))
    pairs = list(zip(bare, run, strict=True))
    yield figure("run", "bare command: first output", "ms", [each.to_output for each in bare])
    yield figure(
        "run", "first output, more than bare", "ms", [ours.to_output - theirs.to_output for theirs, ours in pairs]
    )
    yield figure("run", "end, more than bare", "ms", [ours.to_end - theirs.to_end for theirs, ours in pairs])
    yield figure(
        "run", "CPU time of start and end, more than bare", "ms", [ours.cpu - theirs.cpu for theirs, ours in pairs]
    )
    for kind, options in KINDS.items():
        command = [*RUN, *options, "--", "sleep", "infinity"]
        yield from _watch(kind, command, ["sleep"], environment, watch_s=watch_s)
    names = ["pool-0", "pool-1"]
    pool = [*POOL, "--queue-db", f"sqlite:///{place.folder}/pool.db", "--processes", str(len(names))]
    yield from _watch(", of a pool", pool, names, environment, watch_s=watch_s)


def _watch(
    kind: str, command: Sequence[str], names: Sequence[str], environment: Mapping[str, str], *, watch_s: float
) -> Iterator[Figure]:
    """Measure a supervisor while its processes have nothing to do."""
    progress(f"supervisor{kind}, {watch_s:.0f} s")
    with _supervisor(command, names, environment) as pid:
        before, before_s, began_s = _wake_ups(pid), cpu_s(pid), time.monotonic()
        time.sleep(watch_s)
        took_s = time.monotonic() - began_s
        rate, used = (_wake_ups(pid) - before) / took_s, (cpu_s(pid) - before_s) / took_s
        resident, own = _memory_mib(pid)
    yield figure("run", f"supervisor: memory (RSS){kind}", "MiB", [resident])
    yield figure("run", f"supervisor: its share of memory (PSS){kind}", "MiB", [own])
    yield figure("run", f"supervisor: wake-ups{kind}", "a second", [rate])
    yield figure("run", f"supervisor: CPU{kind}", "% of a core", [100 * used])


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Start:
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        line = process.stdout.readline() if process.stdout else b""
        output_s = time.perf_counter()
        _, status, usage = os.wait4(process.pid, 0)
        end_s = time.perf_counter()
        process.returncode = os.waitstatus_to_exitcode(status)
    if line != b"ready\n" or process.returncode:
        raise BenchError(f"{' '.join(command)} ended with {process.returncode}")
    return Start(
        to_output=(output_s - began_s) * 1000,
        to_end=(end_s - began_s) * 1000,
        cpu=(usage.ru_utime + usage.ru_stime) * 1000,
    )


@contextmanager
def _supervisor(command: Sequence[str], names: Sequence[str], environment: Mapping[str, str]) -> Iterator[int]:
    """Start a supervisor of processes with these names. Yields its pid."""
    runtime = Path(environment["GPUWARDEN_RUNTIME_DIR"])
    published = [runtime / name / f"{name}{PROCESS_SUFFIX}" for name in names]
    for each in published:
        each.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            wait_until(lambda: all(each.exists() for each in published), within_s=STARTED_S, what="it runs")
            time.sleep(1)  # the first tick is over
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def _wake_ups(pid: int) -> int:
    """How often the process has left a sleep (proc_pid_status(5))."""
    return int(_status(pid, "status")["voluntary_ctxt_switches"])


def _memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process, and that divided among the processes that share it, MiB."""
    found = _status(pid, "smaps_rollup")
    return int(found["Rss"].split()[0]) / 1024, int(found["Pss"].split()[0]) / 1024


def _status(pid: int, name: str) -> dict[str, str]:
    lines = (procfs.PROC / str(pid) / name).read_text(encoding="utf-8").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
