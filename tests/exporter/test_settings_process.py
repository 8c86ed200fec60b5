"""The settings as the process that stays has them: the same, told in the same words, by one that ends with them."""

import os
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic_settings import CliApp

from exporter import settings_process
from exporter.settings import Settings
from exporter.settings_process import SettingsProcessError, passed_over, read
from tests.exporter.test_web import environment
from tests.waiting import eventually

SLOW = "import os, sys, time; open({told!r}, 'x').write(str(os.getpid()) + '\\n'); time.sleep(600)"
"""A process that says who it is, and reads no settings."""

PROGRAM = """
import signal, sys
from exporter import settings_process
from gpuwarden import cli
settings_process.CHILD = "-c", sys.argv[1]
for number in sys.argv[2:]:
    signal.signal(int(number), signal.SIG_IGN)
sys.exit(cli.main(["exporter"]))
"""


@pytest.fixture(autouse=True)
def _no_settings_of_a_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--port", "0", "--idle-ratio=0.5", "--state-dir", "a b", "--task-dir=/a,b", "--task-dir=/c"],
        ["--systemd-unit=a@*.service", "--pods", "api", "--node-name=n", "--docker", "tcp://[::1]:2375"],
    ],
    ids=["none given", "figures and folders", "names"],
)
def test_each_setting_is_what_it_is_where_it_is_read(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_VRAM_TIE_MIB", "7")
    monkeypatch.setenv("GPUWARDEN_DIR", "/srv/gpuwarden")

    found = read(options)

    assert vars(found) == dict(CliApp.run(Settings, cli_args=options))
    assert (found.vram_tie_mib, found.dir) == (7, Path("/srv/gpuwarden"))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOR_MIB", "2048", True, id="misspelt"),
        pytest.param("gpuwarden_exporter_prot", "29835", True, id="misspelt in small letters"),
        pytest.param("GPUWARDEN_EXPORTER_VRAM_FLOOR_MIB", "2048", False, id="a setting"),
        pytest.param("gpuwarden_exporter_port", "29835", False, id="a setting in small letters"),
        pytest.param("GPUWARDEN_REMEDIATOR_PROT", "29836", False, id="another program's"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_HOST", "10.96.7.1", False, id="Kubernetes': where a Service is"),
        pytest.param("GPUWARDEN_EXPORTER_SERVICE_PORT_WEB", "29835", False, id="Kubernetes': its port by name"),
        pytest.param("GPUWARDEN_EXPORTER_PORT_29835_TCP_ADDR", "10.96.7.1", False, id="Kubernetes': each port"),
        pytest.param("GPUWARDEN_EXPORTER_ALL_PORT", "tcp://10.96.7.1:29835", False, id="Kubernetes': another Service"),
    ],
)
def test_a_variable_that_is_called_as_a_setting_and_is_none_is_told(name: str, value: str, told: bool) -> None:
    assert passed_over(Settings.model_fields, {name: value, "PATH": "/bin"}) == ([name] if told else [])


def test_no_setting_changes_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        read([]).port = 1


@pytest.mark.parametrize(
    ("options", "variable", "says"),
    [
        (["--port=x"], None, "error: 'x' will not do for --port (or GPUWARDEN_EXPORTER_PORT): Input should be a valid"),
        ([], "70000", "error: '70000' will not do for --port (or GPUWARDEN_EXPORTER_PORT): Input should be less than"),
        (["--pods=api"], None, "error: --pods api needs --node-name"),
        (["--nonsense"], None, "usage: gpuwarden exporter [-h]"),
    ],
    ids=["an option", "a variable", "two together", "no option"],
)
def test_what_will_not_do_is_told_and_ends_with_2(
    options: list[str],
    variable: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("GPUWARDEN_EXPORTER_PORT", variable)

    with pytest.raises(SystemExit, match=r"^2$"):
        read(options)

    told = capfd.readouterr()
    assert told.out == ""
    assert says in told.err
    assert "gpuwarden exporter: error: " in told.err
    assert "Traceback" not in told.err


def test_who_asks_for_help_has_it_and_no_exporter(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        read(["--help"])

    told = capfd.readouterr()
    assert told.out.startswith("usage: gpuwarden exporter [-h]")
    assert "port to listen on; 0 takes a free one" in told.out
    assert told.err == ""


def test_a_process_that_was_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_process, "CHILD", ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))

    with pytest.raises(SettingsProcessError, match="was ended by SIGKILL: start the exporter anew"):
        read([])


def test_a_process_that_hangs_is_killed_and_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings_process, "CHILD", ("-c", SLOW.format(told=str(tmp_path / "pid"))))
    monkeypatch.setattr(settings_process, "READ_S", 2.0)

    with pytest.raises(SettingsProcessError, match="not read within 2 s"):
        read([])

    assert not alive(whole(tmp_path / "pid"))


def test_a_process_that_cannot_be_started_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_process, "sys", SimpleNamespace(executable="/nowhere/python"))

    with pytest.raises(SettingsProcessError, match=r"no process can be started to read .*/nowhere"):
        read([])


@pytest.mark.parametrize("options", [[], ["--port=x"]], ids=["read", "refused"])
def test_signals_come_afterwards_as_they_did_before(options: list[str]) -> None:
    before = [signal.getsignal(each) for each in settings_process.ENDS], signal.pthread_sigmask(signal.SIG_BLOCK, [])

    try:
        read(options)
    except SystemExit:
        assert options

    after = [signal.getsignal(each) for each in settings_process.ENDS], signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert after == before


@pytest.mark.parametrize("everyone", [False, True], ids=["alone", "with all of its group"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_while_they_are_read_ends_both_as_it_ends_any_program(
    number: signal.Signals, code: int, *, everyone: bool, tmp_path: Path
) -> None:
    process = starting(tmp_path)
    reader = whole(tmp_path / "pid")
    assert alive(reader)

    os.killpg(process.pid, number) if everyone else process.send_signal(number)

    _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (code, "")
    assert not alive(reader)


def test_who_reads_them_is_ended_by_the_exporter_alone_and_tells_nothing_of_it(tmp_path: Path) -> None:
    process = starting(tmp_path)
    reader = whole(tmp_path / "pid")

    status = Path(f"/proc/{reader}/status").read_text()

    process.terminate()
    process.communicate(timeout=20)
    blocked = int(status.partition("SigBlk:")[2].split()[0], base=16)
    assert [bool(blocked >> (each - 1) & 1) for each in settings_process.ENDS] == [True, True]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    process = starting(tmp_path, signal.SIGINT)
    whole(tmp_path / "pid")

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == -signal.SIGTERM
    process.communicate()


def starting(folder: Path, *ignored: int) -> "subprocess.Popen[str]":
    """An exporter whose settings take for ever, the first of a group of its own; its reader is told in `pid`."""
    program = [sys.executable, "-c", PROGRAM, SLOW.format(told=str(folder / "pid")), *map(str, map(int, ignored))]
    return subprocess.Popen(program, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)


def whole(path: Path) -> int:
    """The pid in a file, once it is there in full."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def alive(pid: int) -> bool:
    """Whether there is such a process, be it one that has ended and that nobody has waited for."""
    return Path(f"/proc/{pid}").exists()
