"""Which container engines are listed: named ones, and those that appear."""

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISSOCK

import pytest
from kubernetes.client import ApiClient

from exporter import main
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.settings import Settings
from exporter.sources.containers.discovery import EngineRegistry, PendingEngine
from exporter.sources.containers.kubernetes import LOGS
from exporter.sources.containers.poller import Listener, Listing
from gpuwarden.kube import api
from tests.exporter import builders as build
from tests.exporter.sources.containers.test_cgroups import ID, Host, scope
from tests.waiting import eventually


class Engine(Listener):
    """Lists no containers while its socket exists."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", failure_prefix="the engine does not answer", refresh_s=0.01, fresh_s=0.1)
        self._path = path
        self.listings = threading.Semaphore(0)

    def list_now(self) -> Listing:
        if not self._path.exists():
            raise FileNotFoundError(self._path)
        self.listings.release()
        return Listing(containers={}, taken_s=time.monotonic(), duration_s=0.0)

    def is_asked(self) -> bool:
        return self._answered.is_set()


@contextmanager
def listened(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        yield
    path.unlink()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


def on(host: Host, engines: EngineRegistry, directory: Path, group: str = scope()) -> Sampler:
    """A sampler of a host with one GPU and a process in a container on it."""
    host.process(41, group)
    gpus = build.gpus(build.gpu(0, build.process(41, 0.4, 6 * build.MIB)))
    return Sampler(
        host="box-1", directory=directory, containers=engines, gpus=lambda: gpus, thresholds=Thresholds(),
        met=engines.met, places=host.places(), unlisted=host.unlisted(),
    )  # fmt: skip


def seen(snapshot: Snapshot) -> tuple[dict[str, bool], list[str], bool]:
    """Success of each engine, the containers, and whether unattributed GPU use is known."""
    sources = {each.source: each.success for each in snapshot.sources if each.source not in ("workers", "gpu")}
    return sources, [each.container.id for each in snapshot.containers], bool(snapshot.unplaced)


def test_containers_are_published_without_an_engine(host: Host, tmp_path: Path, short_path: Path) -> None:
    path = short_path / "e.sock"
    engine = Engine(path)
    engines = EngineRegistry({}, {"docker": PendingEngine(mark=path, is_it=S_ISSOCK, make=lambda: engine)})
    engines.start()
    sampler = on(host, engines, tmp_path)
    try:
        sampler.sample()
        without = seen(sampler.sample())
        with listened(path):
            there = seen(sampler.sample())
        gone = eventually(lambda: found if not (found := seen(sampler.sample()))[0]["docker"] else None)
    finally:
        engines.close()

    assert without == ({}, [ID], True)
    assert there == ({"docker": True}, [ID], True)
    assert gone[0] == {"docker": False}


def test_engine_that_cannot_start_fails(host: Host, tmp_path: Path, short_path: Path) -> None:
    path = short_path / "e.sock"
    engine = Engine(path)
    made: Iterator[Engine | Exception] = iter(
        [OSError(errno.EMFILE, "Too many open files"), ImportError("upgrade in progress"), engine]
    )

    def make() -> Engine:
        found = next(made)
        if isinstance(found, Exception):
            raise found
        return found

    engines = EngineRegistry({}, {"docker": PendingEngine(mark=path, is_it=S_ISSOCK, make=make)})
    sampler = on(host, engines, tmp_path)
    try:
        with listened(path):
            engines.start()
            first = sampler.sample()
            then = seen(sampler.sample())
    finally:
        engines.close()

    message = [each.message for each in first.sources if each.source == "docker"]
    assert message == ["the docker client cannot start: ImportError: upgrade in progress"]
    assert then[0] == {"docker": True}


def test_engine_that_disappears_during_its_start_is_listed_later(host: Host, tmp_path: Path, short_path: Path) -> None:
    path = short_path / "e.sock"
    engine = Engine(path)
    made = iter([None, engine])

    def make() -> Engine:
        found = next(made)
        if found is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return found

    engines = EngineRegistry({}, {"docker": PendingEngine(mark=path, is_it=S_ISSOCK, make=make)})
    try:
        with listened(path):
            engines.start()
        found = seen(on(host, engines, tmp_path).sample())
    finally:
        engines.close()

    assert found[0] == {"docker": False}
    assert engine.is_asked()


@pytest.mark.parametrize(
    ("group", "fails"),
    [
        pytest.param(f"system.slice/docker-{ID}.scope", True, id="Docker"),
        pytest.param(f"docker/{ID}", True, id="Docker with cgroupfs"),
        pytest.param(scope(), False, id="containerd"),
        pytest.param(
            f"user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", False, id="Docker of a user"
        ),
    ],
)
def test_docker_container_shows_that_docker_must_run(
    host: Host, tmp_path: Path, short_path: Path, group: str, fails: bool
) -> None:
    path = short_path / "e.sock"
    engine = Engine(path)
    engines = EngineRegistry({}, {"docker": PendingEngine(mark=path, is_it=S_ISSOCK, make=lambda: engine)})
    engines.start()
    sampler = on(host, engines, tmp_path, group)
    try:
        sampler.sample()
        away = seen(sampler.sample())
        with listened(path):
            back = eventually(lambda: found if (found := seen(sampler.sample()))[0].get("docker") else None)
    finally:
        engines.close()

    assert away == ({"docker": False} if fails else {}, [ID], not fails)
    assert back == ({"docker": True}, [ID], True)


def test_docker_container_does_not_start_a_disabled_docker(host: Host, tmp_path: Path) -> None:
    sampler = on(host, EngineRegistry({}), tmp_path, f"docker/{ID}")
    sampler.sample()

    assert seen(sampler.sample()) == ({}, [ID], True)


def test_named_engine_that_is_missing_fails(tmp_path: Path) -> None:
    engines = EngineRegistry({"docker": Engine(tmp_path / "none.sock")})
    engines.start()
    sampler = on(Host(tmp_path / "host"), engines, tmp_path)
    try:
        found = seen(sampler.sample())
    finally:
        engines.close()

    assert found == ({"docker": False}, [], False)


def test_engine_is_a_socket_and_kubelet_links_are_a_folder(tmp_path: Path, short_path: Path) -> None:
    def there(path: Path) -> tuple[bool, bool]:
        sought = (PendingEngine(mark=path, is_it=each, make=lambda: Engine(path)) for each in (S_ISSOCK, S_ISDIR))
        return tuple(each.is_there() for each in sought)  # type: ignore[return-value]

    file = tmp_path / "file"
    file.touch()
    with listened(short_path / "e.sock"):
        assert there(short_path / "e.sock") == (True, False)
    assert there(tmp_path) == (False, True)
    assert there(file) == there(file / "below") == there(tmp_path / "none") == (False, False)


def test_path_that_cannot_be_read_may_exist(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert PendingEngine(mark=tmp_path / "a", is_it=S_ISSOCK, make=lambda: Engine(tmp_path)).is_there()


@pytest.mark.parametrize(
    ("options", "asked", "sought"),
    [
        ([], [], {"docker": main.DOCKER_SOCKET, "kubernetes": LOGS}),
        (["--docker=unix:///var/run/docker.sock", "--pods=off"], ["docker"], {}),
        (["--docker=none", "--pods=logs"], ["kubernetes"], {}),
        (["--node-name=n"], ["kubernetes"], {"docker": main.DOCKER_SOCKET}),
        (["--podman=unix:///run/p.sock", "--docker=none", "--pods=off"], ["podman"], {}),
    ],
    ids=["default", "named Docker", "kubelet links", "named node", "Podman only"],
)
def test_settings_select_configured_and_pending_engines(
    options: list[str], asked: list[str], sought: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "connect", lambda _: ApiClient())
    settings = Settings(_cli_parse_args=options)

    assert sorted(main.configured_engines(settings)) == asked
    assert {kind: each.mark for kind, each in main.pending_engines(settings).items()} == sought


def test_pending_engines_load_no_client() -> None:
    program = "import sys; from exporter import main; from exporter.settings import Settings\n"
    program += "main.pending_engines(Settings(_cli_parse_args=[])); print(*sys.modules)"

    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)

    assert "docker" not in result.stdout.split()
