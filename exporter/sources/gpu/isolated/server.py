"""A process that asks a GPU's driver for the exporter, so that it can be killed: what is the same for every driver.

A call into a driver can hang, and a thread that hangs in one ends only with its process. So this process makes all of
them, and nothing else: lines as in `driver_wire`, on its standard input and output. It ends with its input, and with
the thread that started it: then also in the middle of a call, unless the kernel itself hangs in it.
"""

import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import IO, Final

from exporter.model.readings import GpuReadings
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import DriverError, Failed, Question, Told

Tell = Callable[[Told], None]
Read = Callable[[Question], GpuReadings]

_PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

_TELLING: Final = threading.Lock()


def serve(parent: int, driver: Callable[[Tell], Read]) -> int:
    """Answer until there is nobody to ask; returns the exit status.

    Args:
        parent: the pid of the process that asks.
        driver: given what tells the exporter something unasked, what a look at its GPUs is. One that fails raises
            DriverError or OSError.
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
        for line in sys.stdin:
            told = _look(read, protocol.question(line))
            tell(told)
            if isinstance(told, Failed) and told.over:
                return 0
    return 0


def keeps_place(place: int) -> Callable[[int | None], None]:
    """What keeps in an open file the number of the GPU that is asked about just now, or that none is (`PLACE`)."""
    os.ftruncate(place, protocol.PLACE.size)
    kept = mmap.mmap(place, protocol.PLACE.size)  # it is kept for hundreds of files a look: a call each would count

    def asks(number: int | None) -> None:
        protocol.PLACE.pack_into(kept, 0, 0 if number is None else number + 1)

    return asks


def _tell(answers: IO[bytes], told: Told) -> None:
    """Write one line whole: two threads tell, and a pipe takes a long line in parts."""
    with _TELLING:
        answers.write(protocol.line(told))
        answers.flush()


def _look(read: Read, question: Question) -> Told:
    try:
        return protocol.bounded(read(question))
    except DriverError as error:
        return protocol.failed(error)
    except OSError as error:
        return Failed(because=str(error))
