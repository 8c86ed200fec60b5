"""What all tests share: PostgreSQL, a Docker engine, commands, groups of tests, and `--no-skips`, by which CI fails."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import docker
import hypothesis
import pytest

from gpuwarden.cli.main import main
from testbed.docker_engine import Engine, NoEngine, docker_engine
from testbed.postgres import NoPostgres, Postgres
from testbed.postgres import postgres as postgres_server

# A slow machine fails no test: times are measured in bench/, never asserted.
hypothesis.settings.register_profile("day", deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("day"), max_examples=200)
hypothesis.settings.load_profile("day")

# What tests start imports this checkout, whichever checkout the virtual environment was made for.
CHECKOUT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])

Cli = Callable[..., tuple[int, str, str]]

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


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share out single tests among the processes; what a module's tests have in common keeps these in one process.

    That is a fixture of the module, which is set up once, and the names of containers on one Docker engine.
    """
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if item.get_closest_marker("needs_docker") or any(each[-1].scope == "module" for each in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `both_databases` on SQLite and on PostgreSQL."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    chooses = any("backend" in (names.split(",") if isinstance(names, str) else names) for names in named)
    if "backend" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_databases") and not chooses:
        both = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs_postgres)]
        metafunc.parametrize("backend", both, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """Which database: SQLite, but for what `both_databases` or the test itself says."""
    kind: str = getattr(request, "param", "sqlite")
    return kind


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """One PostgreSQL for the whole run, started by the first test that asks; each test creates databases of its own."""
    with postgres_server(tmp_path_factory.mktemp("postgres"), durable=False) as found:
        if isinstance(found, NoPostgres):
            pytest.skip(found.reason)
        yield found


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The Docker engine of this host, or a private one."""
    with docker_engine(tmp_path_factory.mktemp("engine")) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.reason)
        yield found


@pytest.fixture
def client(engine: Engine) -> Iterator[docker.DockerClient]:
    """A client of `engine`, closed afterwards."""
    client = docker.DockerClient(base_url=engine.base_url)
    yield client
    client.close()


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
