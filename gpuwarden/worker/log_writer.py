"""Copies the output of a job to a log of limited size, and passes it on.

A separate process: it runs on while the job's interpreter hangs. `python -I -S log_writer.py LOG BYTES ERRORS` reads
the job's output at 0 and its errors at the descriptor ERRORS. It imports no package, so that it starts fast.
"""

import fcntl
import os
import select
import signal
import sys
from contextlib import suppress

OLDER = ".1"
"""Suffix of the older half of a long log."""

READ_BYTES = 65536


def main(path: str, most_bytes: int, errors: int) -> None:
    """Copy until both ends are closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the job still prints
    log = _Log(path, most_bytes // 2)
    log.add(b"")
    targets = {0: 1, errors: 2}
    gone: set[int] = set()
    while targets:
        for source in select.select(list(targets), [], [])[0]:
            data = os.read(source, READ_BYTES)
            if not data:
                del targets[source]
                continue
            log.add(data)
            if source not in gone:
                try:
                    _write(targets[source], data)
                except OSError:
                    gone.add(source)


class _Log:
    """A log in two halves. The newer one is locked against deletion."""

    def __init__(self, path: str, half_bytes: int) -> None:
        self._path, self._half_bytes = path, half_bytes
        self._file: int | None = None
        self._failed = False
        self._size_bytes = 0

    def add(self, data: bytes) -> None:
        """Write. An error is printed once and ends the log only."""
        if self._failed:
            return
        try:
            if self._file is None or self._size_bytes + len(data) > self._half_bytes:
                self._file = self._next()
            _write(self._file, data)
            self._size_bytes += len(data)
        except OSError as error:
            self._failed = True
            with suppress(OSError):
                _write(2, f"gpuwarden: no more output is kept in {self._path}: {error.strerror}\n".encode())

    def _next(self) -> int:
        if self._file is not None:
            os.close(self._file)
            os.replace(self._path, self._path + OLDER)  # noqa: PTH105 - pathlib is slow to import
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(file).st_size
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file


def _write(to: int, data: bytes) -> None:
    while data:
        data = data[os.write(to, data) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
