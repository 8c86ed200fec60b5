"""The rules' own tests on the Prometheus of this release, and on the newest that Debian has. For `python -m bench`.

What the newest is changes from week to week, so that this is no test: a rule that it judges otherwise is said here.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.figures import BenchError, Figure, figure, progress
from deploy import parts
from deploy.chain import CHECKOUT
from deploy.check import TESTS_GLOB

TIMEOUT_S: Final = 1800
"""For one run of all tests, which ends a program that hangs. It is minutes on a machine with other work to do."""


def measure() -> Iterator[Figure]:
    """For each Prometheus, how long all tests of the rules take.

    Raises:
        BenchError: a test that passes on one of them fails on the other, or one of them did not come to an end.
        PartMissing: one of them cannot be had.
    """
    tests = sorted(CHECKOUT.glob(TESTS_GLOB))
    for promtool in (parts.find("promtool"), parts.find_newer("promtool", "promtool")):
        version = _version(promtool)
        progress(f"versions, {len(tests)} files of tests on {version}")
        started_s = time.monotonic()
        done = _run(promtool, "test", "rules", *map(str, tests))
        if done.returncode:
            raise BenchError(f"on {version}:\n{done.stdout}{done.stderr}")
        yield figure("versions", f"{version}: all tests of the rules pass", "s", [time.monotonic() - started_s])


def _version(promtool: Path) -> str:
    said = _run(promtool, "--version")
    found = re.search(r"version ([0-9.]+)", said.stdout + said.stderr)
    if found is None:
        raise BenchError(f"{promtool} does not say its version: {said.stdout}{said.stderr}")
    return f"Prometheus {found[1]}"


def _run(promtool: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [promtool, *arguments],
            env=parts.env_for_parts(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise BenchError(
            f"{promtool} did not end within {TIMEOUT_S} s and was killed; run this with less beside it"
        ) from late
