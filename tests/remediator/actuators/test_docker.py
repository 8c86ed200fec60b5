"""The container actuator on real Docker and Podman: stop, start, missing containers and a missing engine."""

import gc
import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import pytest

from exporter.sources.containers.cgroups import ContainerCgroups
from gpuwarden import cgroup, procfs
from remediator.actuators import ENGINES, ActuatorError
from remediator.actuators.docker import LABEL, DockerActuator
from testbed.docker_engine import Engine, NoEngine, docker_engine, podman_engine
from testbed.worker_image import worker_image
from tests.exporter import builders as build
from tests.waiting import eventually

PATIENT = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('ready', flush=True); signal.pause()"
UNKNOWN = "f" * 64
KNOWN = "a" * 64


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(docker_engine, id="docker", marks=pytest.mark.needs_docker),
        pytest.param(podman_engine, id="podman", marks=pytest.mark.needs_podman),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The Docker engine of this host, or a private one; and a private Podman."""
    with request.param(tmp_path_factory.mktemp("engine")) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.reason)
        yield found


@pytest.fixture
def run(engine: Engine) -> Iterator[Callable[..., str]]:
    """Run a container with these labels until it prints `ready`. Returns its full id."""
    client = docker.DockerClient(base_url=engine.base_url)
    started = []

    def start(
        *,
        auto_remove: bool = False,
        restart: str = "no",
        program: str = PATIENT,
        network: str = "none",
        devices: Sequence[str] = (),
        **labels: str,
    ) -> str:
        policy: Any = {"Name": restart}
        container = client.containers.run(
            worker_image(client, extra={}),
            ["python3", "-c", program],
            labels={name.replace("_", "."): value for name, value in labels.items()},
            network_mode=network,
            devices=list(devices),
            detach=True,
            auto_remove=auto_remove,
            restart_policy=policy,
        )
        started.append(container)
        eventually(lambda: b"ready" in container.logs(), "the container is ready", within_s=30)
        return str(container.id)

    yield start
    for container in reversed(started):  # Podman removes a partner last
        container.remove(force=True)
    client.close()


def test_container_whose_only_process_is_a_zombie_runs_without_a_process(
    engine: Engine, run: Callable[..., str]
) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)
    handle = run(gpuwarden_managed="true")
    before = actuator.look(handle)
    assert before is not None
    (pid,) = before.pids
    parent = int(procfs.stat(pid)[1])
    os.kill(parent, signal.SIGSTOP)  # the engine's own process for the container, which does not reap now
    try:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: procfs.is_zombie(pid), "it is a zombie")

        found = actuator.look(handle)
        seen = ContainerCgroups().read(build.container(id=handle, incarnation=f"{handle}@1", pid=pid))
    finally:
        os.kill(parent, signal.SIGCONT)

    assert found is not None
    assert (found.running, found.incarnation, found.pids) == (True, before.incarnation, frozenset())
    assert (seen[0], seen[1].unknown) == (frozenset(), None)


def test_restart_keeps_the_handle_and_changes_the_incarnation(engine: Engine, run: Callable[..., str]) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)
    handle = run(gpuwarden_managed="true")

    up = actuator.look(handle)
    actuator.stop(handle, grace_s=10)
    assert up is not None
    down = actuator.look(handle, cgroup=up.cgroup)
    actuator.stop(handle, grace_s=10)
    actuator.start(handle)
    again = actuator.look(handle)
    actuator.start(handle)

    assert down is not None
    assert again is not None
    assert [each.running for each in (up, down, again)] == [True, False, True]
    assert {each.handle for each in (up, down, again)} == {handle}
    assert up.incarnation == down.incarnation != again.incarnation
    assert (len(up.pids), down.pids, len(again.pids)) == (1, frozenset(), 1)
    assert up.cgroup is not None
    assert handle in up.cgroup
    assert down.cgroup == up.cgroup


@pytest.mark.parametrize(
    ("labels", "managed"),
    [({"gpuwarden_managed": "true"}, True), ({"gpuwarden_managed": "yes"}, False), ({}, False)],
    ids=["label true", "another label value", "no label"],
)
def test_only_the_label_opts_in(
    engine: Engine, run: Callable[..., str], labels: dict[str, str], *, managed: bool
) -> None:
    assert LABEL == "gpuwarden.managed"

    found = DockerActuator(engine.base_url, kind=engine.kind).look(run(**labels))

    assert found is not None
    assert found.managed is managed


@pytest.mark.parametrize("vanishes", [False, True])
def test_container_with_rm_vanishes_at_its_end(engine: Engine, run: Callable[..., str], *, vanishes: bool) -> None:
    found = DockerActuator(engine.base_url, kind=engine.kind).look(run(auto_remove=vanishes))

    assert found is not None
    assert found.vanishes is vanishes


@pytest.mark.parametrize(
    ("restart", "left_down"), [("always", True), ("unless-stopped", True), ("on-failure", False), ("no", False)]
)
def test_stop_overrides_the_restart_policy(
    engine: Engine, run: Callable[..., str], restart: str, *, left_down: bool
) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)
    handle = run(restart=restart)
    up = actuator.look(handle)

    actuator.stop(handle, grace_s=10)

    down = actuator.look(handle)
    assert up is not None
    assert down is not None
    assert (up.left_down, down.left_down) == (False, left_down)


def test_crash_looping_container_is_never_left_down(engine: Engine, run: Callable[..., str]) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)
    handle = run(restart="always", program="import time; print('ready', flush=True); time.sleep(0.2); exit(3)")
    seen = []

    def was_seen_down_and_up() -> bool:
        with suppress(ActuatorError):  # it ends during the look
            seen.append(actuator.look(handle))
        looks = [each for each in seen if each is not None]
        return len({each.incarnation for each in looks}) >= 4 and not all(each.running for each in looks)

    eventually(was_seen_down_and_up, "it was restarted a few times", within_s=60)

    assert not any(each is None or each.left_down for each in seen)


def test_removed_container_is_none_and_rejects_actions(engine: Engine) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)

    assert actuator.look(UNKNOWN) is None
    with pytest.raises(ActuatorError, match=rf"refused: .*{UNKNOWN}"):
        actuator.start(UNKNOWN)
    with pytest.raises(ActuatorError, match=rf"refused: .*{UNKNOWN}"):
        actuator.stop(UNKNOWN, grace_s=0)


def test_processes_left_in_the_cgroup_of_a_removed_container_are_listed(engine: Engine, tmp_path: Path) -> None:
    actuator = DockerActuator(engine.base_url, kind=engine.kind)
    (tmp_path / "cgroup.procs").write_text("4001\n4002\n")

    left = actuator.look(UNKNOWN, cgroup=str(tmp_path))
    (tmp_path / "cgroup.procs").write_text("")
    empty = actuator.look(UNKNOWN, cgroup=str(tmp_path))

    assert left is not None
    assert (left.incarnation, left.running, left.pids) == ("", False, frozenset({4001, 4002}))
    assert empty is None
    assert actuator.look(UNKNOWN, cgroup=str(tmp_path / "gone")) is None


def test_container_whose_network_partner_does_not_run_could_not_start_again(
    engine: Engine, run: Callable[..., str]
) -> None:
    actuator, client = DockerActuator(engine.base_url, kind=engine.kind), docker.DockerClient(base_url=engine.base_url)
    partner = run()
    handle, unmanaged = (
        run(network=f"container:{partner}", gpuwarden_managed="true"),
        run(network=f"container:{partner}"),
    )

    with_partner = actuator.look(handle)
    client.containers.get(partner).stop(timeout=1)
    without, without_label = actuator.look(handle), actuator.look(unmanaged)
    actuator.stop(handle, grace_s=1)
    with suppress(ActuatorError):  # Podman starts the partner too
        actuator.start(handle)
    client.containers.get(partner).start()
    actuator.start(handle)
    again = actuator.look(handle)
    client.close()

    assert with_partner is not None
    assert without is not None
    assert without_label is not None
    assert again is not None
    assert (with_partner.unstartable, again.unstartable, without_label.unstartable) == ("", "", "")
    assert without.unstartable == f"container {partner[:12]}, whose network it shares, does not run"


def test_container_whose_device_is_gone_could_not_start_again(
    engine: Engine, run: Callable[..., str], tmp_path: Path
) -> None:
    """Podman notes a device by its number and starts the container without the file."""
    actuator, device = DockerActuator(engine.base_url, kind=engine.kind), tmp_path / "device"
    is_needed = engine.kind == "docker"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    handle = run(devices=[f"{device}:/dev/ours:rw"], gpuwarden_managed="true")

    before = actuator.look(handle)
    device.unlink()
    after = actuator.look(handle)
    actuator.stop(handle, grace_s=1)
    with pytest.raises(ActuatorError, match=f"{device}.*no such file") if is_needed else nullcontext():
        actuator.start(handle)

    assert before is not None
    assert after is not None
    assert (before.unstartable, after.unstartable) == ("", f"device {device} is gone" if is_needed else "")


MISSING_FOR_START: dict[str, tuple[dict[str, Any], dict[str, tuple[int, str]], str]] = {
    "nothing": ({}, {}, ""),
    "its network partner": (
        {"NetworkMode": f"container:{UNKNOWN}"},
        {f"/containers/{UNKNOWN}/json": (404, f"No such container: {UNKNOWN}")},
        "container ffffffffffff, whose network it shares, is gone",
    ),
    "its image": ({}, {"/images/sha256:77/json": (404, "No such image: sha256:77")}, "its image trainer:1 is gone"),
    "a proxy refuses images": ({}, {"/images/sha256:77/json": (403, "Forbidden")}, ""),
    "a proxy knows no images": ({}, {"/images/sha256:77/json": (404, "page not found")}, ""),
    "the engine has the files of another host": ({"Devices": [{"PathOnHost": "/dev/no-such"}]}, {}, ""),
}


@pytest.mark.parametrize(("host_config", "answers", "missing"), MISSING_FOR_START.values(), ids=MISSING_FOR_START)
def test_what_a_start_would_miss(
    host_config: dict[str, Any], answers: dict[str, tuple[int, str]], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that real ones cannot play: neither removes the image of a running container."""
    monkeypatch.setattr(cgroup, "directory", lambda *_: Path("/sys/fs/cgroup/none"))
    monkeypatch.setattr(cgroup, "processes", lambda _: frozenset({4001}))
    inspected = {
        "Id": KNOWN, "Name": "/c1", "Image": "sha256:77", "HostnamePath": "/no/such/path", "HostConfig": host_config,
        "Config": {"Labels": {LABEL: "true"}, "Image": "trainer:1"},
        "State": {"Running": True, "Pid": 4001, "Status": "running", "StartedAt": "1"},
    }  # fmt: skip
    with engine_that_answers({f"/containers/{KNOWN}/json": (200, inspected), **answers}) as url:
        found = DockerActuator(url).look(KNOWN)

    assert found is not None
    assert found.unstartable == missing


def test_container_is_gone_only_by_an_answer_that_names_it() -> None:
    named = {f"/containers/{KNOWN}/json": (404, f"No such container: {KNOWN}")}
    with engine_that_answers(named) as url:
        assert DockerActuator(url).look(KNOWN) is None
    with engine_that_answers({}) as url, pytest.raises(ActuatorError, match="refused: page not found"):
        DockerActuator(url).look(KNOWN)


@contextmanager
def engine_that_answers(answers: Mapping[str, tuple[int, Any]]) -> Iterator[str]:
    """An engine's API with these answers by path. It says 404 to others, as a proxy does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/version": (200, {"ApiVersion": "1.41"}), **answers}
            ends = [path for path in known if self.path.endswith(path)]
            default = (200, {}) if "/images/" in self.path else (404, "page not found")
            code, answer = known[ends[0]] if ends else default
            body = json.dumps({"message": answer} if isinstance(answer, str) else answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_unreadable_cgroup_raises(engine: Engine, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    handle = run()

    def unreadable(_: Path) -> frozenset[int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cgroup, "processes", unreadable)

    with pytest.raises(ActuatorError, match="cannot be listed"):
        DockerActuator(engine.base_url, kind=engine.kind).look(handle)


@pytest.mark.parametrize(
    ("error", "says"), [(FileNotFoundError(), "cannot be read"), (None, "is in no cgroup of container")]
)
def test_process_that_ends_during_the_look_is_an_error(
    engine: Engine, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: OSError | None, says: str
) -> None:
    handle = run()

    def gone(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(cgroup, "directory", gone)

    with pytest.raises(ActuatorError, match=says):
        DockerActuator(engine.base_url, kind=engine.kind).look(handle)


def test_engine_refusal_is_reported_verbatim(engine: Engine) -> None:
    client = docker.DockerClient(base_url=engine.base_url)
    container = client.containers.create(worker_image(client, extra={}), ["/no/such/program"], network_mode="none")

    with pytest.raises(ActuatorError, match=rf"{ENGINES[engine.kind]} refused: .*/no/such/program"):
        DockerActuator(engine.base_url, kind=engine.kind).start(str(container.id))

    container.remove(force=True)
    client.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # docker-py leaks its socket
def test_missing_engine_is_an_error(tmp_path: Path) -> None:
    actuator = DockerActuator(f"unix://{tmp_path}/no.sock")

    with pytest.raises(ActuatorError, match="is unreachable"):
        actuator.look(UNKNOWN)
    gc.collect()
