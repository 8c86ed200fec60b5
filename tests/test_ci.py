"""What CI leaves out of one step because another does it is done there; and whichever step fails, CI fails."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import check
from tests.conftest import LONGEST, TESTS

CHECKOUT = Path(__file__).resolve().parent.parent


def steps() -> list[str]:
    """The commands of `make ci`, none of which is run."""
    done = make("--dry-run", "ci", folder=CHECKOUT)
    assert done.returncode == 0
    return done.stdout.splitlines()


def make(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests hands its own arguments down.
    own = {name: value for name, value in os.environ.items() if "MAKE" not in name and not name.endswith("_ARGS")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder, env=own | env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_ci_runs_every_test_but_the_teeth_and_allows_no_skip() -> None:
    (tests,) = (step for step in steps() if "-m pytest " in step and "--cov" not in step and "$(" not in step)

    assert [word for word in tests.split() if word.startswith(("tests", "--ignore", "--deselect", "-k"))] == []
    assert '-m "not teeth"' in tests
    assert "--no-skips" in tests


def test_ci_checks_all_but_what_a_test_does() -> None:
    (checks,) = (step for step in steps() if "deploy.check" in step)

    assert re.findall(r"--but (\S+)", checks) == [check.rules_pass_their_tests.__name__]


TOOL = """\
#!/bin/sh
case "$0 $*" in *"$FAILS"*) echo "$FAILS failed"; exit 1;; esac
"""


@pytest.mark.parametrize(
    "step", ["ruff", "mypy", "deploy.check", "--collect-only", "--cov ", "coverage report", "teeth"]
)
def test_ci_fails_with_each_of_its_steps_and_says_with_which(step: str, tmp_path: Path) -> None:
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    for made_of in ("requirements.lock", "pyproject.toml"):
        (tmp_path / made_of).touch()
    (tmp_path / ".venv" / ".ready").touch()
    for name in ("python", "ruff", "mypy", "lint-imports"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)

    whole, broken = (make("ci", folder=tmp_path, FAILS=fails) for fails in ("none of them", step))

    assert whole.returncode == 0, whole.stderr
    assert broken.returncode != 0
    assert f"{step} failed" in broken.stdout


def test_whatever_is_to_start_before_the_others_is_there() -> None:
    assert [name for name in LONGEST if not (TESTS / f"{name}.py").is_file()] == []
