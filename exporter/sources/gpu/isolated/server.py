"""The child process that calls a driver, for every driver.

A hanging thread ends only with its process. The child reads questions from its standard input and answers on its
output (protocol.py). It ends with its input, and with the thread that started it.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import IO, Final

from exporter.model.gpu import GpuReadings
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import CurrentGpu, DriverError, Failed, Message, Question

Send = Callable[[Message], None]
Read = Callable[[Question], GpuReadings]

_PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

_SEND_LOCK: Final = threading.Lock()


def serve(parent: int, driver: Callable[[Send], Read]) -> int:
    """Answer until the exporter closes the pipe; returns the exit status.

    Args:
        parent: the exporter's pid.
        driver: returns a function that reads the GPUs, given one that sends a message. Reads may raise DriverError or
            OSError.
    """
    # A Ctrl-C, `systemctl stop` or closed terminal reaches both; the exporter decides when this ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # libraries may print
        gc.collect()
        gc.freeze()  # thousands of constants stay
        send = partial(_send, answers)
        read = driver(send)
        answer: Message | None = None
        while not (isinstance(answer, Failed) and answer.over):
            try:
                question = protocol.receive(sys.stdin.buffer)
            except EOFError:
                break
            answer = _look(read, question) if isinstance(question, Question) else Failed(message="no question")
            send(answer)
    return 0


def announce_changes(send: Send) -> Callable[[int | None], None]:
    """Send each change of the GPU in the next call."""
    last: int | None = None

    def announce(place: int | None) -> None:
        nonlocal last
        if place != last:
            last = place
            send(CurrentGpu(place=place))

    return announce


def _send(answers: IO[bytes], message: Message) -> None:
    # Two threads send, and a pipe takes long messages in parts.
    with _SEND_LOCK:
        protocol.send(answers, message)


def _look(read: Read, question: Question) -> Message:
    try:
        return protocol.limit_size(read(question))
    except DriverError as error:
        return protocol.to_failed(error)
    except OSError as error:
        return Failed(message=str(error))
