"""Find programs, and unpack them from Debian packages."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.standalone import debian_packages
from tests.nvml import driver as nvidia

CHECKOUT = Path(debian_packages.__file__).resolve().parents[2]
FIND_SHELLCHECK = (
    "import sys; from pathlib import Path; from deploy.standalone import debian_packages as parts;"
    " print(parts.find('shellcheck', parts_dir=Path(sys.argv[1])))"
)


def start_find(parts_dir: Path) -> subprocess.Popen[str]:
    """Another process that finds shellcheck on the test's PATH."""
    return subprocess.Popen(
        [sys.executable, "-c", FIND_SHELLCHECK, str(parts_dir)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def program(folder: Path, name: str, script: str = "#!/bin/sh\n") -> Path:
    """An executable file."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.unlink(missing_ok=True)
    file.write_text(script)
    file.chmod(0o755)
    return file


def left_in(parts_dir: Path) -> set[str]:
    return {path.name for path in parts_dir.iterdir()} - {"apt", ".lock"}


@pytest.mark.parametrize("name", ["alertmanager", "prometheus-alertmanager"])
def test_program_on_path_is_found_by_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = program(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", str(on_path.parent))

    assert debian_packages.find("alertmanager", parts_dir=tmp_path / "parts") == on_path
    assert not (tmp_path / "parts").exists()


def test_unpacked_program_is_found_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    (tmp_path / "prometheus/usr").mkdir(parents=True)
    unpacked = program(tmp_path / "prometheus/usr/bin", "promtool")

    assert debian_packages.find("promtool", parts_dir=tmp_path) == unpacked


def test_newest_installed_version_outside_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    monkeypatch.setattr(debian_packages, "SYSTEM", tmp_path / "system")
    for version in ("9.6", "15", "100"):
        (tmp_path / "system/usr/lib/postgresql" / version).mkdir(parents=True)
    program(tmp_path / "system/usr/lib/postgresql/9.6/bin", "initdb")
    newest = program(tmp_path / "system/usr/lib/postgresql/15/bin", "initdb")
    program(tmp_path / "system/usr/lib/postgresql/100/bin", "psql")

    assert debian_packages.find("initdb", parts_dir=tmp_path / "parts") == newest
    assert not (tmp_path / "parts").exists()


def test_programs_of_one_folder_are_unpacked_the_same_way() -> None:
    by_room = {part.room: part for part in debian_packages.PARTS.values()}

    for part in debian_packages.PARTS.values():
        other = by_room[part.room]
        assert (part.packages, part.libraries, part.without, part.finish) == (
            *(other.packages, other.libraries, other.without, other.finish),
        )


@pytest.mark.parametrize(
    ("wanted", "advice"),
    [
        ("promtool", "apt-get install prometheus"),
        ("amtool", "apt-get install prometheus-alertmanager"),
        ("dockerd", "apt-get install docker.io containerd runc tini"),
        ("initdb", "apt-get install postgresql"),
    ],
)
def test_missing_program_is_named_with_advice_without_apt_get(
    wanted: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    monkeypatch.setattr(debian_packages, "SYSTEM", tmp_path)

    with pytest.raises(debian_packages.PartMissing) as missing:
        debian_packages.find(wanted, parts_dir=tmp_path / "parts")

    assert advice in str(missing.value)
    assert "apt-get is needed" in str(missing.value)
    assert str(tmp_path / "parts") in str(missing.value)


def test_unknown_program_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(debian_packages.PartMissing, match=r"unknown program 'promtol'; known: .*promtool"):
        debian_packages.find("promtol")


def test_folder_without_the_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    (tmp_path / "prometheus").mkdir()

    with pytest.raises(debian_packages.PartMissing, match=r"not in the packages prometheus "):
        debian_packages.find("promtool", parts_dir=tmp_path)


@pytest.mark.needs_parts
@pytest.mark.usefixtures("bare_path")
def test_downloaded_program_runs_with_its_libraries(parts_dir: Path) -> None:
    found = debian_packages.find("shellcheck", parts_dir=parts_dir)

    said = subprocess.run(
        [found, "--version"],
        env=debian_packages.env_for_parts(parts_dir=parts_dir),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.is_relative_to(parts_dir)
    assert "ShellCheck" in said.stdout
    assert left_in(parts_dir) == {"shellcheck"}


@pytest.mark.needs_parts
@pytest.mark.usefixtures("bare_path")
def test_tcc_from_debian_compiles_a_library_that_loads(parts_dir: Path, tmp_path: Path) -> None:
    compiler = debian_packages.find("cc", parts_dir=parts_dir)
    driver = nvidia.Driver(nvidia.compile_library(tmp_path, compiler=compiler), tmp_path / "script")
    driver.answer(nvidia.Card(name="Made by tcc"))

    asks = "import pynvml as p; p.nvmlInit(); print(p.nvmlDeviceGetName(p.nvmlDeviceGetHandleByIndex(0)))"
    said = subprocess.run(
        [sys.executable, "-c", asks], env=os.environ | driver.environment, capture_output=True, text=True, check=True
    )
    assert compiler == parts_dir / "tcc/usr/bin/tcc"
    assert said.stdout == "Made by tcc\n"


@pytest.mark.needs_parts
def test_unknown_package_leaves_no_folder(parts_dir: Path) -> None:
    with pytest.raises(debian_packages.PartMissing, match="Unable to locate package gpuwarden-no-such-package"):
        debian_packages.unpack("room", ["gpuwarden-no-such-package"], parts_dir=parts_dir)

    assert left_in(parts_dir) == set()


@pytest.mark.needs_parts
def test_killed_download_leaves_no_folder_and_the_next_one_succeeds(parts_dir: Path, bare_path: Path) -> None:
    real = (bare_path / "dpkg-deb").readlink()
    began = parts_dir.parent / "began"
    hang = f'#!/bin/sh\n{real} "$@"\n: > {began}\nexec {shutil.which("sleep", path=os.defpath)} 60\n'
    program(bare_path, "dpkg-deb", hang)
    fetch = start_find(parts_dir)
    give_up = time.monotonic() + 60
    while not began.exists():
        assert fetch.poll() is None, fetch.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.02)

    os.killpg(fetch.pid, signal.SIGKILL)
    fetch.communicate()

    abandoned = left_in(parts_dir)
    assert [name for name in abandoned if not name.startswith(".tmp-")] == []
    assert abandoned, "the download must be killed half-way"
    (bare_path / "dpkg-deb").unlink()
    (bare_path / "dpkg-deb").symlink_to(real)
    assert debian_packages.find("shellcheck", parts_dir=parts_dir).exists()
    assert left_in(parts_dir) == {"shellcheck"}


@pytest.mark.needs_parts
@pytest.mark.usefixtures("bare_path")
def test_parallel_downloads_download_once(parts_dir: Path) -> None:
    both = [start_find(parts_dir), start_find(parts_dir)]

    answers = [fetch.communicate(timeout=120) for fetch in both]

    assert [fetch.returncode for fetch in both] == [0, 0], answers
    assert len({found for found, _ in answers}) == 1
    assert sum(progress.count("parts: fetching shellcheck") for _, progress in answers) == 1


def test_downloaded_programs_are_last_on_path_and_the_current_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    library = tmp_path / "shellcheck/usr/lib/x86_64-linux-gnu/libgmp.so.10"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "shellcheck/usr/bin").mkdir()
    # A separate folder: its libraries are only for PostgreSQL.
    closed = tmp_path / "postgresql/usr/lib/x86_64-linux-gnu/libssl.so.3"
    closed.parent.mkdir(parents=True)
    closed.touch()

    env = debian_packages.env_for_parts(parts_dir=tmp_path)

    assert env["PATH"].split(":") == ["/usr/bin", "/usr/sbin", "/sbin", str(tmp_path / "shellcheck/usr/bin")]
    assert env["LD_LIBRARY_PATH"] == str(library.parent)


def test_command_prints_paths_and_fails_for_a_missing_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path = program(tmp_path / "bin", "promtool")
    monkeypatch.setenv("PATH", str(on_path.parent))

    assert debian_packages.main(["promtool"]) == 0
    assert capsys.readouterr().out.split() == ["promtool", str(on_path)]
    assert debian_packages.main(["promtool", "nonsense"]) == 1
    assert "unknown program 'nonsense'" in capsys.readouterr().err
