"""`python -m exporter.sources.nvml_child PARENT`: asks the NVIDIA driver for the exporter, so that it can be killed.

A call into a driver can hang, and a thread that hangs in one ends only with its process. So this process makes all of
them, and nothing else: lines as in `nvml_wire`, on its standard input and output. It ends with its input, and with the
thread that started it: then also in the middle of a call, unless the kernel itself hangs in it.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from typing import IO, Final

from exporter.sources import nvml_wire
from exporter.sources.nvml import NvmlGpus
from exporter.sources.nvml_wire import Failed, NvmlError, Told, Xid

_PR_SET_PDEATHSIG: Final = 1
"""<linux/prctl.h>"""

_TELLING: Final = threading.Lock()


def main() -> int:
    """Answer until there is nobody to ask."""
    # The exporter decides when this ends: not the Ctrl-C or the systemctl stop that both of them are sent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return 1
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a driver's library prints is no answer
        gc.collect()
        gc.freeze()  # the package's thousands of constants stay
        gpus = NvmlGpus(lambda gpu, code: _tell(answers, Xid(gpu=gpu, code=code)))
        for _ in sys.stdin:
            told = _look(gpus)
            _tell(answers, told)
            if isinstance(told, Failed) and told.over:
                return 0
    return 0


def _tell(answers: IO[bytes], told: Told) -> None:
    """Write one line whole: two threads tell, and a pipe takes a long line in parts."""
    with _TELLING:
        answers.write(nvml_wire.line(told))
        answers.flush()


def _look(gpus: NvmlGpus) -> Told:
    try:
        return gpus.read()
    except NvmlError as error:
        return nvml_wire.failed(error)


if __name__ == "__main__":
    sys.exit(main())
