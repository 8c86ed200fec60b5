"""The program of `make demo`: it exits with 0 only if every check passes, and it leaves no files."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.standalone import debian_packages
from deploy.standalone.stack import CHECKOUT
from gpuwarden import procfs

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]


def test_demo_passes_every_check_and_prints_the_journal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "testbed.demo"], cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b[" not in done.stdout
    assert re.search(r"All 36 checks passed in \d+ s", done.stdout)
    assert "limits are short" in done.stdout
    assert "armed" in done.stdout
    assert "Ledger" in done.stdout
    assert "episode 2: stall of" in done.stdout


def test_demo_fails_when_a_part_dies_names_it_and_cleans_up() -> None:
    before = _work_folders()
    demo = subprocess.Popen([sys.executable, "-m", "testbed.demo"], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    pid = _descendant(demo.pid, debian_packages.PARTS["alertmanager"].names, within_s=60)
    os.kill(pid, signal.SIGKILL)

    output, _ = demo.communicate(timeout=90)

    assert demo.returncode == 1
    assert "alertmanager exited with code -9" in output
    assert _work_folders() == before


def _work_folders() -> set[Path]:
    return set((CHECKOUT / ".work").glob("demo-*"))


def _descendant(parent: int, programs: tuple[str, ...], *, within_s: float) -> int:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        for entry in procfs.PROC.glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                is_child = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            except (OSError, ValueError):
                continue
            if is_child and any(words[0].split(b"/")[-1].startswith(name.encode()) for name in programs):
                return int(entry.name)
        time.sleep(0.1)
    pytest.fail(f"no process of {programs} started")
