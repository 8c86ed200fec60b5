"""Fixtures of all tests, groups of tests for xdist, and `--no-skips`."""

import functools
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import docker
import hypothesis
import pytest
import sqlalchemy
from sqlalchemy.util import LRUCache

from gpuwarden.cli.main import main
from testbed import network_namespaces
from testbed.docker_engine import Engine, NoEngine, docker_engine
from testbed.kubernetes import helm, programs
from testbed.kubernetes.cluster import Cluster, NoCluster, kubernetes_cluster
from testbed.network_namespaces import Network, NoNetwork
from testbed.postgres import NoPostgres, Postgres
from testbed.postgres import postgres as postgres_server

# A slow machine must not fail tests: only bench/ measures times.
hypothesis.settings.register_profile("day", deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("day"), max_examples=200)
hypothesis.settings.load_profile("day")

# Programs that tests start import this checkout.
CHECKOUT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])

Cli = Callable[..., tuple[int, str, str]]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Set by a shell for background jobs. Programs that tests start would ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _CompiledStatements(LRUCache[Any, Any]):
    """Compiled SQL of all databases of one kind: each test opens its own, and would compile each statement again."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Find a statement by the name of its dialect instead of the dialect itself."""
        return super().get((key[0].name, *key[1:]), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        """Keep a statement."""
        super().__setitem__((key[0].name, *key[1:]), compiled)


@pytest.fixture(scope="session", autouse=True)
def compiled_statements() -> Iterator[None]:
    """Share compiled SQL among the databases of this process."""
    shared, original = _CompiledStatements(2000), sqlalchemy.Engine.__init__

    def with_shared(engine: sqlalchemy.Engine, *given: Any, **options: Any) -> None:
        original(engine, *given, **options)
        engine._compiled_cache = shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlalchemy.Engine, "__init__", with_shared)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped, except tests marked `gpu`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-skips"):
        config.pluginmanager.register(_NoSkips())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests from garbage collection, which takes a third of the collection time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests of a module in one process if they share a module fixture or names of containers.

    Tests on a cluster share one process. Those that need a newer one, or have none, are not selected. Nor are tests of
    Helm where it is missing.
    """
    version = _kubernetes_version()
    selected: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kube = item.get_closest_marker("kube")
        has_helm = item.get_closest_marker("helm") is None or _helm() is not None
        selected[has_helm and (kube is None or _wanted_version(kube) <= version)].append(item)
    config.hook.pytest_deselected(items=selected[False])
    items[:] = selected[True]
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if item.get_closest_marker("kube"):
            item.add_marker(pytest.mark.xdist_group("kubernetes"))
        elif item.get_closest_marker("needs_docker") or any(each[-1].scope == "module" for each in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def _wanted_version(kube: pytest.Mark) -> tuple[int, ...]:
    return tuple(map(int, kube.args[0].split("."))) if kube.args else (1, 0)


@functools.cache
def _kubernetes_version() -> tuple[int, int]:
    try:
        return programs.find().version
    except programs.NoClusterError:
        return 0, 0


@functools.cache
def _helm() -> Path | None:
    try:
        return helm.find()
    except programs.NoClusterError:
        return None


def pytest_report_header() -> list[str]:
    """Say whether tests on a Kubernetes cluster and those of Helm run."""
    lines = []
    try:
        found = programs.find()
        lines.append(f"Kubernetes: {found.version[0]}.{found.version[1]} in {found.folder}")
    except programs.NoClusterError as missing:
        lines.append(f"Kubernetes: none, its tests are not selected: {missing}")
    try:
        lines.append(f"Helm: {helm.find()}")
    except programs.NoClusterError as missing:
        lines.append(f"Helm: none, its tests are not selected: {missing}")
    return lines


class _NoSkips:
    """Fails a run with skips, also of other xdist processes."""

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
    """Run tests marked `both_databases` on SQLite and on PostgreSQL."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    chooses = any("backend" in (names.split(",") if isinstance(names, str) else names) for names in named)
    if "backend" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_databases") and not chooses:
        both = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs_postgres)]
        metafunc.parametrize("backend", both, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The database; SQLite unless `both_databases` or the test selects another one."""
    kind: str = getattr(request, "param", "sqlite")
    return kind


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A state folder for this process: commands must not find a `gpuwarden up` of this user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """One PostgreSQL for the whole run; tests create separate databases."""
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
    """A client of `engine`."""
    client = docker.DockerClient(base_url=engine.base_url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One Kubernetes cluster for all tests marked `kube`."""
    with kubernetes_cluster(tmp_path_factory.mktemp("kubernetes")) as found:
        if isinstance(found, NoCluster):
            pytest.skip(found.reason)
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace of the cluster, which ends with its pods."""
    name = cluster.new_namespace()
    yield name
    cluster.delete_namespace(name)


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch for hosts that are network namespaces."""
    with network_namespaces.network() as found:
        if isinstance(found, NoNetwork):
            pytest.skip(found.reason)
        yield found


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `gpuwarden` as user ann; returns exit code, stdout and stderr."""
    monkeypatch.setenv("SUDO_USER", "ann")

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
