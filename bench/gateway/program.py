"""Programs of gpuwarden that a measurement starts."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from bench.figures import BenchError, wait_until

READY_S: Final = 60.0


@contextmanager
def gateway(its: Sequence[str], log: Path, port: int, environment: Mapping[str, str] = os.environ) -> Iterator[int]:
    """A gateway that answers. Yields its pid."""

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/-/healthy").is_success
        return False

    with running(["gateway", *its, "--port", str(port)], log, environment) as pid:
        wait_until(answers, within_s=READY_S, what=f"the gateway answers, see {log}")
        yield pid


@contextmanager
def running(its: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ) -> Iterator[int]:
    """A program. Yields its pid.

    Raises:
        BenchError: the program has ended early.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-m", "gpuwarden", *its], env=environment, stdout=output, stderr=output
        ) as process,
    ):
        try:
            yield process.pid
            if process.poll() is not None:
                raise BenchError(f"gpuwarden {its[0]} ended, see {log}")
        finally:
            process.terminate()
            process.wait()
