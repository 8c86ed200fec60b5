"""Run Prometheus or Alertmanager on a free port."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from deploy.standalone import debian_packages
from tests.asking import PLAIN
from tests.waiting import eventually

_LISTENS: Final = re.compile(r'"address":"(127\.0\.0\.1:[1-9]\d*)"')


@contextmanager
def listening(command: Sequence[str], log: Path) -> Iterator[str]:
    """Run the command until the end. Yields its URL, read from its JSON log, once it is ready."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env=debian_packages.env_for_parts(), stdout=stderr, stderr=stderr)
    try:
        found = eventually(lambda: _LISTENS.search(log.read_text()), "it listens", log=log.read_text)
        url = f"http://{found[1]}"
        eventually(
            lambda: httpx.get(f"{url}/-/ready", trust_env=False, verify=PLAIN).is_success,
            "it is ready",
            log=log.read_text,
        )
        yield url
    finally:
        process.kill()
        process.wait()
