"""The demo's job: reads a noisy picture, removes the noise step by step and writes the result.

The payload is a `Script`. It can make the job hang in a native call, with Python's lock held or released. With `saves`
it saves a checkpoint on SIGUSR1. It needs only the standard library and gpuwarden.

Idempotent: each attempt writes the output atomically.
"""

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from gpuwarden.files import atomic_write
from gpuwarden.job import Phase
from gpuwarden.queue import Job
from gpuwarden.reporter import Reporter

CHUNK_BYTES: Final = 2**20
BUSY_RATIO: Final = 0.93
FOREVER_S: Final = 1e6
REAL_GPU: Final = "GPUWARDEN_DEMO_REAL_GPU"
"""Set where jobs compute on an NVIDIA GPU. Otherwise they leave a file for the simulator."""

Picture = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Script:
    """Behaviour of one job. Times are in seconds.

    `wedge_*` say in how many attempts and where it hangs. `clock_step_s` sets its wall clock after the first step.
    `eval_every` adds an evaluation, for a step's time or for `slow_s` after step `slow_eval`. The rank `spared_rank`
    never hangs.
    """

    picture: str
    load_s: float = 2.0
    load_mib: int = 48
    load_hangs: bool = False
    steps: int = 10
    step_s: float = 0.5
    wedge_attempts: int = 0
    wedge_after_step: int = 0
    wedge_with_gil: bool = True
    wedge_spins: bool = False
    spared_rank: int | None = None
    slow_step: int = 0
    slow_s: float = 0.0
    eval_every: int = 0
    slow_eval: int = 0
    idle_slow: bool = False
    churn_mib: int = 0
    clock_step_s: float = 0.0
    saves: bool = False

    def payload(self) -> dict[str, Any]:
        """The payload for the queue."""
        return asdict(self)


def load(job: Job, report: Reporter) -> Callable[[], None]:
    """Read the picture and allocate memory, as a model load does. Returns the work."""
    script = Script(**job.payload)
    data = Path(os.environ["GPUWARDEN_DEMO_DATA"])
    picture = read_picture(data / f"{script.picture}.pgm")
    weights: list[bytearray] = []
    for _ in range(script.load_mib):
        weights.append(bytearray(os.urandom(CHUNK_BYTES)))
        time.sleep(script.load_s / script.load_mib)
    launch(report, busy_s=0.0, memory_bytes=len(weights) * CHUNK_BYTES)
    if script.saves:
        save_when_warned(lambda: write_picture(data / f"{script.picture}.checkpoint.pgm", picture))
    if script.load_hangs:
        wedge(with_gil=False)

    def work() -> None:
        wedges = job.attempt <= script.wedge_attempts and job.rank != script.spared_rank
        current = picture
        if wedges and script.wedge_after_step == 0:
            wedge(with_gil=script.wedge_with_gil)
        for step in range(1, script.steps + 1):
            kernel_s = script.slow_s if step == script.slow_step else script.step_s
            busy_s = 0.0 if step == script.slow_step and script.idle_slow else kernel_s
            launch(report, busy_s=busy_s, memory_bytes=len(weights) * CHUNK_BYTES)
            current = smooth(current)
            spend(kernel_s, churn_mib=script.churn_mib if step == script.slow_step else 0)
            report.step()
            if step == 1 and script.clock_step_s:
                set_clock(script.clock_step_s)
            evaluates = script.eval_every and step % script.eval_every == 0
            if evaluates:
                report.phase(Phase.EVAL)
            if wedges and step == script.wedge_after_step:
                if script.wedge_spins:
                    deadlock(report, memory_bytes=len(weights) * CHUNK_BYTES)
                wedge(with_gil=script.wedge_with_gil)
            if evaluates:
                eval_s = script.slow_s if step == script.slow_eval else script.step_s
                launch(report, busy_s=eval_s, memory_bytes=len(weights) * CHUNK_BYTES)
                spend(eval_s, churn_mib=0)
                report.phase(Phase.STEP)
        write_picture(data / f"{script.picture}.clean.pgm", current)

    return work


def save_when_warned(save: Callable[[], None]) -> None:
    """Save in another thread on SIGUSR1. Call this from the main thread.

    A Python handler runs in the main thread, which may hang. The wakeup descriptor is written by the C handler, in any
    thread.
    """
    warned, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)

    def listen() -> None:
        while number := warned.recv(1):
            if number[0] == signal.SIGUSR1:
                save()

    threading.Thread(target=listen, name="checkpoint", daemon=True).start()


def launch(report: Reporter, *, busy_s: float, memory_bytes: int, ratio: float = BUSY_RATIO) -> None:
    """Give the GPU work for `busy_s`. A simulated GPU is busy at this ratio; see testbed.gpu_simulator."""
    if os.environ.get(REAL_GPU):
        from testbed.demo import cuda  # noqa: PLC0415 - not in the worker image

        cuda.gpu().hold(memory_bytes)
        cuda.gpu().occupy(busy_s)
        return
    busy_until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + busy_s
    text = json.dumps({"busy_until_s": busy_until_s, "ratio": ratio, "memory_bytes": memory_bytes})
    path = report.folder / "gpu-work.json"
    atomic_write(path, text)


def spend(seconds: float, *, churn_mib: int) -> None:
    """Wait for the kernel, or stage data: RAM rises and falls by `churn_mib` every second."""
    deadline_s = time.monotonic() + seconds
    held = bytearray()
    while (left_s := deadline_s - time.monotonic()) > 0:
        if churn_mib:
            held = bytearray() if held else bytearray(b"\1") * (churn_mib * CHUNK_BYTES)
        time.sleep(min(1.0, left_s))


def wedge(*, with_gil: bool) -> None:
    """Never return: lock a native mutex twice. Only SIGKILL ends it."""
    libc = ctypes.PyDLL(None) if with_gil else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeroes are PTHREAD_MUTEX_INITIALIZER on Linux
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def deadlock(report: Reporter, *, memory_bytes: int) -> NoReturn:
    """Spin in a collective for ever: the kernel holds the GPU and the thread polls."""
    launch(report, busy_s=FOREVER_S, memory_bytes=memory_bytes, ratio=1.0)
    while True:
        asked_until_s = time.monotonic() + 0.02
        while time.monotonic() < asked_until_s:
            pass
        time.sleep(0.08)


def set_clock(ahead_s: float) -> None:
    """Shift this process's wall clock only."""
    true = time.time
    time.time = lambda: true() + ahead_s


def smooth(picture: Picture) -> Picture:
    """One step: each pixel becomes the mean of its neighbourhood."""
    size = len(picture)

    def mean(row: int, column: int) -> float:
        near = [
            picture[y][x]
            for y in range(max(0, row - 1), min(size, row + 2))
            for x in range(max(0, column - 1), min(size, column + 2))
        ]
        return sum(near) / len(near)

    return [[mean(row, column) for column in range(size)] for row in range(size)]


def noise(picture: Picture) -> float:
    """Mean squared difference of neighbouring pixels."""
    pairs = [(row[x], row[x + 1]) for row in picture for x in range(len(row) - 1)]
    return sum((left - right) ** 2 for left, right in pairs) / len(pairs)


def read_picture(path: Path) -> Picture:
    """Read a square plain PGM (P2)."""
    words = path.read_text(encoding="ascii").split()
    size = int(words[1])
    values = [float(word) for word in words[4:]]
    return [values[start : start + size] for start in range(0, size * size, size)]


def write_picture(path: Path, picture: Picture) -> None:
    """Write a plain PGM atomically."""
    rows = "\n".join(" ".join(str(round(value)) for value in row) for row in picture)
    atomic_write(path, f"P2\n{len(picture)} {len(picture)}\n255\n{rows}\n", many_writers=True)
