"""A process that asks a GPU's driver for the exporter, so that it can be killed: what is the same for every driver.

A call into a driver can hang, and a thread that hangs in one ends only with its process. So this process makes all of
them, and nothing else. It takes messages of protocol.py on its standard input and answers on its output. It ends with
its input, and with the thread that started it: then also in the middle of a call, unless the kernel itself hangs in it.
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
from exporter.sources.gpu.isolated.protocol import Asking, DriverError, Failed, Message, Question

Tell = Callable[[Message], None]
Read = Callable[[Question], GpuReadings]

_PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

_TELLING: Final = threading.Lock()


def serve(parent: int, driver: Callable[[Tell], Read]) -> int:
    """Answer until the exporter closes the pipe; returns the exit status.

    Args:
        parent: the pid of the process that asks.
        driver: given what sends the exporter a message, what a look at its GPUs is. One that fails raises DriverError
            or OSError.
    """
    # The exporter decides when this ends: not the Ctrl-C, the systemctl stop or the closed terminal that both are sent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a driver's library prints is no answer
        gc.collect()
        gc.freeze()  # the package's thousands of constants stay
        tell = partial(_tell, answers)
        read = driver(tell)
        told: Message | None = None
        while not (isinstance(told, Failed) and told.over):
            try:
                question = protocol.receive(sys.stdin.buffer)
            except EOFError:
                break
            told = _look(read, question) if isinstance(question, Question) else Failed(because="no question")
            tell(told)
    return 0


def announces(tell: Tell) -> Callable[[int | None], None]:
    """What tells the exporter which GPU is asked about, where that has changed."""
    last: int | None = None

    def asks(place: int | None) -> None:
        nonlocal last
        if place != last:
            last = place
            tell(Asking(place=place))

    return asks


def _tell(answers: IO[bytes], message: Message) -> None:
    """Write one message whole: two threads tell, and a pipe takes a long one in parts."""
    with _TELLING:
        protocol.send(answers, message)


def _look(read: Read, question: Question) -> Message:
    try:
        return protocol.bounded(read(question))
    except DriverError as error:
        return protocol.failed(error)
    except OSError as error:
        return Failed(because=str(error))
