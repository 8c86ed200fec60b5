"""What every test run shares: a PostgreSQL, and `--no-skips`, with which a skip is a failure, as in CI."""

import signal
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from deploy.postgres import NoPostgres, Postgres
from deploy.postgres import postgres as postgres_server

# A slow machine fails no test: times are measured in bench/, never asserted.
hypothesis.settings.register_profile("gpuwarden", deadline=None, print_blob=True)
hypothesis.settings.load_profile("gpuwarden")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: what the tests start would inherit it, and no test could interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SKIPPED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail the run when a test is skipped, but for `gpu` tests")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SKIPPED] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        item.config.stash[_SKIPPED].append(f"{item.nodeid}: {report.longrepr}")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    skipped = session.config.stash[_SKIPPED]
    if session.config.getoption("--no-skips") and skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = config.stash[_SKIPPED]
    if config.getoption("--no-skips") and skipped:
        terminalreporter.section("skipped, and so failed (--no-skips)")
        for line in skipped:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """One PostgreSQL for the whole run, started by the first test that asks; each test creates databases of its own."""
    with postgres_server(tmp_path_factory.mktemp("postgres"), durable=False) as found:
        if isinstance(found, NoPostgres):
            pytest.skip(found.because)
        yield found
