"""CI runs every test once, and fails if one step fails."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from testbed import check_release

CHECKOUT = Path(__file__).resolve().parent.parent
MARKS = re.compile(r'pytest.* -m (?:"([^"]*)"|(\w+))')


def steps(target: str = "ci") -> list[str]:
    """Commands of a target, without running them."""
    done = make("--dry-run", target, folder=CHECKOUT)
    assert done.returncode == 0
    return done.stdout.splitlines()


def make(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests passes its arguments on.
    own = {name: value for name, value in os.environ.items() if "MAKE" not in name and not name.endswith("_ARGS")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder, env=own | env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "marks"), [("ci", {"pure", "not nightly and not pure"}), ("nightly", {"pure", "not pure"})]
)
def test_target_runs_all_tests_of_its_marks_without_skips(target: str, marks: set[str]) -> None:
    runs = [step for step in steps(target) if "-m pytest " in step and "--collect-only" not in step]

    assert {quoted or word for run in runs for quoted, word in MARKS.findall(run)} == marks
    for run in runs:
        assert [word for word in run.split() if word.startswith(("tests", "--ignore", "--deselect", "-k"))] == []
        assert "--no-skips" in run


def test_ci_runs_all_checks_except_those_of_tests() -> None:
    (checks,) = (step for step in steps() if "testbed.check_release" in step)

    assert re.findall(r"--but (\S+)", checks) == [check_release.rules_pass_their_tests.__name__]


def test_started_programs_import_this_checkout(tmp_path: Path) -> None:
    program = "import gpuwarden; print(gpuwarden.__file__)"
    # With -S only PYTHONPATH selects the checkout.
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert Path(done.stdout.strip()) == CHECKOUT / "gpuwarden" / "__init__.py"


TOOL = """\
#!/bin/sh
case "$0 $*" in *"$FAILS"*) echo "$FAILS failed"; exit 1;; esac
"""


@pytest.mark.parametrize(
    "step", ["ruff", "mypy", "testbed.check_release", "--collect-only", "--cov ", "coverage report", "--no-skips"]
)
def test_ci_fails_with_each_step_and_names_it(step: str, tmp_path: Path) -> None:
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


BACKEND = """\
import pathlib, shutil

def build_editable(folder, *_):
    return pathlib.Path(shutil.copy("itself-1-py3-none-any.whl", folder)).name
"""


def wheel(name: str, version: str, folder: Path, *, wants: str = "") -> str:
    """Write an empty package; return the sha256 of its wheel."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as whole:
        needs = f"Requires-Dist: {wants}\n" if wants else "Provides-Extra: more\n"
        whole.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        whole.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        whole.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """A checkout that pins `leaf` to an old version; `stem` requires it with an extra."""
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'own'\nbackend-path = ['.']\n"
    )
    (tmp_path / "own.py").write_text(BACKEND)
    wheel("itself", "1", tmp_path)
    stem, leaf = wheel("stem", "1", tmp_path, wants="leaf[more]>=1"), wheel("leaf", "1", tmp_path)
    wheel("leaf", "2", tmp_path)
    (tmp_path / "requirements.lock").write_text(f"leaf==1 --hash=sha256:{leaf}\nstem==1 --hash=sha256:{stem}\n")
    return tmp_path


def set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    return make(
        f"PYTHON={Path(sys.base_prefix, 'bin', 'python3')}", ".venv/.ready",
        folder=checkout, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(checkout), PIP_CONFIG_FILE=os.devnull,
    )  # fmt: skip


@pytest.mark.slow
def test_set_up_installs_the_locked_version(pinned: Path) -> None:
    done = set_up(pinned)

    assert done.returncode == 0, done.stderr
    assert {each.name for each in pinned.glob(".venv/lib/python*/site-packages/*-[12].dist-info")} == {
        "leaf-1.dist-info", "stem-1.dist-info", "itself-1.dist-info",
    }  # fmt: skip


@pytest.mark.slow
def test_set_up_reports_an_incomplete_lock_file(pinned: Path) -> None:
    lock = pinned / "requirements.lock"
    lock.write_text(lock.read_text().partition("\n")[2])

    done = set_up(pinned)

    assert done.returncode != 0
    assert "stem 1 requires leaf, which is not installed" in done.stderr
    assert "make lock" in done.stderr
