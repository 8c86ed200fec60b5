"""What CI leaves out of one step because another does it is done there."""

import os
import re
import subprocess
from pathlib import Path

from deploy import check

CHECKOUT = Path(__file__).resolve().parent.parent


def steps() -> list[str]:
    """The commands of `make ci`, none of which is run."""
    # A make that runs these tests hands its own arguments down.
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name and not name.endswith("_ARGS")}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "ci"],
        cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_ci_runs_every_test_but_the_teeth_and_allows_no_skip() -> None:
    (tests,) = (step for step in steps() if "-m pytest " in step and "--cov" not in step and "$(" not in step)

    assert [word for word in tests.split() if word.startswith(("tests", "--ignore", "--deselect", "-k"))] == []
    assert '-m "not teeth"' in tests
    assert "--no-skips" in tests


def test_ci_checks_all_but_what_a_test_does() -> None:
    (checks,) = (step for step in steps() if "deploy.check" in step)

    assert re.findall(r"--but (\S+)", checks) == [check.rules_pass_their_tests.__name__]
