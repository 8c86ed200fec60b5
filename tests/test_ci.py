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


def test_every_test_runs_in_ci_those_of_pure_modules_for_coverage_and_no_skip_is_allowed_in_either() -> None:
    covered, tests = (step.split() for step in steps() if "-m pytest " in step and "$(" not in step)

    files = [word for word in covered if word.startswith("tests/")]
    left_out = [word.removeprefix("--ignore=") for word in tests if word.startswith("--ignore=")]
    assert "--cov" in covered
    assert files == left_out
    assert [file for file in files if not (CHECKOUT / file).is_file()] == []
    assert [word for word in tests if word.startswith("tests")] == []
    assert ["--no-skips" in step for step in (covered, tests)] == [True, True]


def test_ci_checks_all_but_what_a_test_does() -> None:
    (checks,) = (step for step in steps() if "deploy.check" in step)

    assert re.findall(r"--but (\S+)", checks) == [check.rules_pass_their_tests.__name__]
