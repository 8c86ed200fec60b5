"""What all tests share: PostgreSQL, commands, the order of modules, and `--no-skips`: a skip is a failure, as in CI."""

import gc
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from deploy.postgres import NoPostgres, Postgres
from deploy.postgres import postgres as postgres_server
from gpuwarden.cli import main

# A slow machine fails no test: times are measured in bench/, never asserted.
hypothesis.settings.register_profile("gpuwarden", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gpuwarden")

Cli = Callable[..., tuple[int, str, str]]

TESTS = Path(__file__).parent
LONGEST = (
    *("e2e/test_up_faults", "remediator/test_execute", "e2e/test_vram", "races/test_races"),
    *("e2e/test_conditions", "gpuwarden/test_queue_machine", "e2e/test_up", "bench/test_corpus"),
    *("e2e/test_lost_node", "gpuwarden/test_queue", "e2e/test_killed_executor", "exporter/test_driver_parent"),
    *("e2e/test_queue_chaos", "alerts/test_rules", "e2e/test_held", "remediator/test_docker_actuator"),
    *("e2e/test_races", "remediator/test_ledger_away", "e2e/test_arming", "exporter/test_nvml_program"),
    *("e2e/test_rolling_upgrade", "gpuwarden/test_worker", "e2e/test_servers", "exporter/test_containers_source"),
    *("races/test_notifications", "exporter/test_cgroups", "e2e/test_bad_input", "remediator/test_wrangling"),
)
"""Modules that start before the others: each runs in one process, and whichever comes last is waited for by all.

By turns one of those that mostly wait and one that computes: processes that all wait leave the processors idle, and
later those that all compute wait for these.
"""

SPREAD = 0.8
"""Over how much of the rest of a run the end-to-end tests are spread that are none of those."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: what the tests start would inherit it, and no test could interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail the run when a test is skipped, but for `gpu` tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-skips"):
        config.pluginmanager.register(_NoSkips())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Whatever is made here is kept to the end: to look for garbage in it again and again takes a third of this time.

    And some of every test's, unless it is looked through no more.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    others = sorted({item.path for item in items} - longest.keys())
    waiting = [path for path in others if path.parent.name == "e2e"]
    rest = [path for path in others if path.parent.name != "e2e"]
    # Those that wait are spread among the others, but for the end: they take longer.
    place = {path: number / len(waiting) * SPREAD for number, path in enumerate(waiting)}
    place |= {path: number / len(rest) for number, path in enumerate(rest)}
    items.sort(key=lambda item: (longest.get(item.path, len(longest)), place.get(item.path, 0.0), str(item.path)))


class _NoSkips:
    """From the reports, so that it also sees the skips of the processes that share a run."""

    def __init__(self) -> None:
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
            self._skipped.append(f"{report.nodeid}: {report.longrepr}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped:
            terminalreporter.section("skipped, and so failed (--no-skips)")
            for line in self._skipped:
                terminalreporter.line(line)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """One PostgreSQL for the whole run, started by the first test that asks; each test creates databases of its own."""
    with postgres_server(tmp_path_factory.mktemp("postgres"), durable=False) as found:
        if isinstance(found, NoPostgres):
            pytest.skip(found.because)
        yield found


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `gpuwarden` with arguments, as ann: its exit code, what it printed and what it complained of."""
    monkeypatch.setenv("SUDO_USER", "ann")

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
