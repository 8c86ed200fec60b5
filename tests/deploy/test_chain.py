"""What ties the parts of a chain to the process that started them."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.chain import CHECKOUT

FORK = """\
import os, sys, time
from deploy.chain import _tether
tether, parent = _tether(), os.getpid()
if os.fork():
    os.wait() if sys.argv[1] == "lives" else os._exit(0)
else:
    while sys.argv[1] == "dies" and os.getppid() == parent:
        time.sleep(0.01)
    os.execv(tether[0], [*tether, "touch", sys.argv[2]])
"""
"""A child that comes to its tether when its parent has died, or lives."""


@pytest.mark.parametrize(("parent", "begins"), [("lives", True), ("dies", False)])
def test_a_part_whose_starter_was_killed_before_it_was_tied_to_it_does_not_begin(
    tmp_path: Path, parent: str, begins: bool
) -> None:
    made = tmp_path / "made"

    # Its output ends with the last of the two.
    subprocess.run([sys.executable, "-c", FORK, parent, str(made)], cwd=CHECKOUT, check=True, stdout=subprocess.PIPE)

    assert made.exists() is begins
