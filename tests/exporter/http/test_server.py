"""The exporter's pages, by a real server; and the whole program, as a process of its own."""

import asyncio
import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email import message_from_bytes
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from exporter.collectors.registry import SnapshotCollector
from exporter.http import evidence
from exporter.http import server as web
from exporter.model.container import RamUse
from exporter.model.gpu import GpuFigures
from exporter.model.snapshot import Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden import __version__, clock
from gpuwarden import evidence as facts
from gpuwarden.evidence import CardFacts, ServerFacts, TenantFacts, WorkerFacts
from gpuwarden.http.web_config import WebConfig
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.served import get, served_app
from tests.waiting import eventually


def app(latest: Callable[[], Snapshot | None], config: WebConfig) -> Starlette:
    """The pages of this snapshot."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(latest, host="box-1", thresholds=Thresholds()))
    return web.create_app(registry, latest, host="box-1", web=config)


@contextmanager
def served(
    latest: Callable[[], Snapshot | None], *, web_config_file: Path | None = None, listen: str = "127.0.0.1"
) -> Iterator[int]:
    """The port of a server of this snapshot."""
    config = WebConfig(web_config_file)
    with served_app(app(latest, config), config, listen=listen) as port:
        yield port


def now(snapshot: Snapshot) -> Snapshot:
    """The snapshot as if it were taken now, its stamps of this boot."""
    return replace(snapshot, taken=clock.stamp())


def live(*sightings: Any, **changes: Any) -> Callable[[], Snapshot]:
    return lambda: now(build.snapshot(*sightings, **changes))


# Pages


def test_metrics_are_what_prometheus_reads() -> None:
    with served(live(build.sighting())) as port:
        status, text, headers = get(port, "/metrics")

    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert "gpuwarden_worker_alive" in {family.name for family in text_string_to_metric_families(text)}


def test_a_page_is_packed_for_who_takes_it() -> None:
    workers = (build.sighting(worker=build.worker_file(worker=f"w{number}")) for number in range(3))
    snapshot = now(build.snapshot(*workers))
    with served(lambda: snapshot) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        packed = answer.read()
        connection.close()
        _, plain, headers = get(port, "/metrics", headers={"Accept-Encoding": "identity"})

    assert answer.getheader("Content-Encoding") == "gzip"
    assert "Content-Encoding" not in headers
    assert len(packed) * 4 < len(plain)
    unpacked = gzip.decompress(packed).decode()
    assert names(text_string_to_metric_families(unpacked)) == names(text_string_to_metric_families(plain))


def names(families: Iterable[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def test_the_front_page_tells_how_every_source_did_and_nothing_of_it_is_markup() -> None:
    sources = (
        SourceHealth(source="gpu", success=True, duration_s=0.0015),
        SourceHealth(source="docker", success=False, duration_s=5.0, because="no <socket> & no answer"),
    )
    with served(live(sources=sources)) as port:
        _, text, headers = get(port, "/")

    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert f"Version {__version__}, on box-1. The last sample is 0." in text
    assert "<td>gpu<td>ok, in 1.5 ms" in text
    assert "<td>docker<td>failed: no &lt;socket&gt; &amp; no answer" in text


def test_the_front_page_names_a_file_that_cannot_be_trusted() -> None:
    sources = tuple(SourceHealth(source=name, success=True, duration_s=0.0015) for name in ("workers", "tasks"))
    snapshot = build.snapshot(build.sighting(), sources=sources)
    assert snapshot.workers
    refused = {"not_json": "/run/gpuwarden/<b>/w0.worker.json: not whole JSON"}
    snapshot = replace(snapshot, workers=replace(snapshot.workers, errors={"not_json": 1}, first_errors=refused))
    with served(lambda: now(snapshot)) as port:
        _, text, _ = get(port, "/")

    assert "<td>workers<td>in 1.5 ms, invalid files: /run/gpuwarden/&lt;b&gt;/w0.worker.json: not whole JSON\n" in text
    assert "<td>tasks<td>ok, in 1.5 ms\n" in text


def test_the_front_page_says_not_well_of_a_source_whose_driver_refuses_a_gpu() -> None:
    sources = tuple(SourceHealth(source=name, success=True, duration_s=0.0015) for name in ("gpu", "drm"))
    refused = build.gpu(1, unknown="Insufficient <Permissions>", figures=GpuFigures(unknown={"gpu": "no_permission"}))
    with served(live(sources=sources, gpus=build.gpus(build.gpu(0), refused))) as port:
        _, text, _ = get(port, "/")

    assert "<td>gpu<td>in 1.5 ms, unknown: GPU-1: Insufficient &lt;Permissions&gt;\n" in text
    assert "<td>drm<td>ok, in 1.5 ms\n" in text


def test_before_the_first_look_the_front_page_and_health_answer_all_the_same() -> None:
    with served(lambda: None) as port:
        assert "No sample yet." in get(port, "/")[1]
        assert get(port, "/-/healthy")[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        pytest.param("/evidence?worker=w0", 200, '"worker": "w0"', id="a worker"),
        pytest.param("/evidence?worker=nobody", 404, "no such worker", id="a worker that is not seen"),
        pytest.param("/evidence", 400, "name one worker", id="nobody"),
        pytest.param("/evidence?worker=", 400, "name one worker", id="an empty name"),
        pytest.param("/evidence?worker=w0&worker=w1", 400, "name one worker", id="two workers"),
        pytest.param("/evidence?container=worker-0", 200, '"container_incarnation": "ab', id="a container"),
        pytest.param("/evidence?container=none", 200, '"container_incarnation": null', id="one that does not run"),
        pytest.param("/evidence?container=w0&worker=w0", 400, "name one worker", id="a worker and a container"),
        pytest.param("/evidence?gpu=0", 400, "or one server", id="something else"),
        pytest.param("/-/healthy", 200, "ok", id="health"),
        pytest.param("/-/ready", 200, "ok", id="readiness"),
        pytest.param("/", 200, "/metrics", id="the front page"),
        pytest.param("/nowhere", 404, "no such page: /, /metrics, ", id="no page"),
    ],
)
def test_a_page_answers(path: str, status: int, says: str) -> None:
    with served(live(build.sighting())) as port:
        found, text, _ = get(port, path)

    assert found == status
    assert says in text


def test_a_server_that_cannot_be_told_of_is_called_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "server_evidence", lambda *_, **__: None)

    with served(live(build.sighting())) as port:
        found, text, _ = get(port, "/evidence?container=llm")

    assert (found, text) == (404, "no such server on this host\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_get_and_head_is_answered(method: str) -> None:
    with served(live(build.sighting())) as port:
        for path in ("/metrics", "/evidence?worker=w0", "/-/healthy", "/-/ready", "/"):
            status, _, headers = get(port, path, method=method)

            assert (path, status, headers["Allow"]) == (path, 405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/metrics", "/evidence?worker=w0", "/evidence", "/-/healthy", "/-/ready", "/", "/nothing"]
)
def test_head_is_answered_as_get_without_the_page(path: str) -> None:
    with served(live(build.sighting())) as port:
        expected, page, headers = get(port, path)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
            status, _, rest = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n")

    head, _, body = rest.partition(b"\r\n\r\n")
    told = message_from_bytes(head)
    assert int(status.split()[1]) == expected
    assert body == b""
    assert told["Content-Type"] == headers["Content-Type"]
    assert int(told["Content-Length"]) == pytest.approx(len(page.encode()), abs=100)  # durations differ in digits


def stale() -> Snapshot:
    taken = clock.stamp()
    return build.snapshot(build.sighting(), taken=replace(taken, boottime_s=taken.boottime_s - 5.5))


@pytest.mark.parametrize(
    ("latest", "path"),
    [
        pytest.param(lambda: None, "/evidence?worker=w0", id="evidence before the first look"),
        pytest.param(lambda: None, "/-/ready", id="readiness before the first look"),
        pytest.param(stale, "/evidence?worker=w0", id="evidence of a look long ago"),
        pytest.param(stale, "/-/ready", id="readiness of a look long ago"),
        pytest.param(live(workers=None), "/evidence?worker=w0", id="evidence while the worker source fails"),
    ],
)
def test_without_a_fresh_look_there_is_no_answer(latest: Callable[[], Snapshot | None], path: str) -> None:
    with served(latest) as port:
        status, text, _ = get(port, path)

    assert (status, text) == (503, "no recent sample of this host\n")


@pytest.mark.parametrize(
    ("address", "status"), [("127.0.0.1", 200), ("127.8.9.10", 200), ("::1", 200), ("10.0.0.7", 403)]
)
def test_evidence_is_given_to_this_host_alone(address: str, status: int) -> None:
    pages = httpx.ASGITransport(app(live(build.sighting()), WebConfig(None)), client=(address, 50000))

    async def asked() -> int:
        async with httpx.AsyncClient(transport=pages, base_url="http://box-1") as caller:
            return (await caller.get("/evidence?worker=w0")).status_code

    assert asyncio.run(asked()) == status


# Testimony


def told_of(snapshot: Snapshot) -> WorkerFacts:
    """The facts about w0, two seconds after the look."""
    found = evidence.worker_evidence("w0", snapshot, now=build.ago(-2))
    assert found is not None
    return found


def test_the_facts_about_a_worker_its_attempt_and_its_container_survive_the_wire() -> None:
    seen = build.evidence(gpu_idle_s=130.0, ram_idle_s=140.0)
    gpus = build.gpus(build.gpu(0, build.process(4001), build.process(12)), build.gpu(1, build.process(4001)))

    told = told_of(build.snapshot(build.sighting(), containers=(seen,), gpus=gpus))

    assert told == WorkerFacts(
        host="box-1", worker="w0", sample_age_s=2.0, alive=True, worker_incarnation="inc-w0", heartbeat_age_s=2.0,
        worker_pid=4001, cpu_idle_s=1.0, dead_s=None, dead_after_s=30.0,
        container_kind="docker", container="worker-0", container_id=build.DOCKER_ID,
        container_incarnation=build.container().incarnation, container_workers=1,
        job_id=7, attempt=1, phase="step", phase_age_s=200.0, step=12,
        elapsed_s=300.0, budget_s=8100.0, stall_timeout_s=120.0, step_beat_age_s=3.0,
        health_window_s=300.0, health_grace_s=60.0, gpus=["GPU-0"], gpu_simulated=False,
        gpu_idle_s=130.0, gpu_unknown=None, ram_bytes=2048 * build.MIB, ram_idle_s=140.0, ram_unknown=None,
        io_idle_s=400.0, page_fault_idle_s=300.0, container_cpu_idle_s=200.0, work_unknown=None,
        gpu_pids={"GPU-0": [12, 4001], "GPU-1": [4001]}, lost_gpus_s={},
    )  # fmt: skip
    assert facts.parse(facts.render(told)) == told


def test_unknown_facts_are_null_and_explained() -> None:
    seen = build.evidence(
        gpu_idle_s=None,
        gpu_unknown=Unknown(reason="not_listed", because="GPU-0: GPU is lost"),
        ram=RamUse(usage_bytes=None),
        ram_idle_s=None,
        ram_unknown=Unknown(reason="unreadable", because="gone"),
    )

    told = told_of(
        build.snapshot(
            build.sighting(job=None), containers=(seen,), gpus=build.gpus(build.gpu(0), build.gpu(1, processes=None))
        )
    )

    assert (told.gpu_idle_s, told.gpu_unknown) == (None, "GPU-0: GPU is lost")
    assert (told.ram_idle_s, told.ram_unknown) == (None, "gone")
    assert (told.job_id, told.attempt, told.step_beat_age_s) == (None, None, None)
    assert told.gpu_pids == {"GPU-0": [], "GPU-1": None}
    assert facts.parse(facts.render(told)) == told


def test_a_dead_worker_has_facts_without_a_container() -> None:
    told = told_of(build.snapshot(build.sighting(alive=False, pid=None, container_id=None), gpus=None))

    assert (told.alive, told.container, told.gpus, told.gpu_idle_s) == (False, None, None, None)
    assert (told.gpu_simulated, told.gpu_pids) == (None, None)
    assert facts.parse(facts.render(told)) == told


@pytest.mark.parametrize(
    ("snapshot", "at"),
    [
        pytest.param(build.snapshot(), build.ago(0), id="a worker that is not seen"),
        pytest.param(build.snapshot(workers=None), build.ago(0), id="no worker source"),
        pytest.param(build.snapshot(build.sighting()), build.ago(0, boot_id="another"), id="a look of another boot"),
    ],
)
def test_there_are_no_facts_of(snapshot: Snapshot, at: Stamp) -> None:
    assert evidence.worker_evidence("w0", snapshot, now=at) is None


def test_the_facts_about_a_server_survive_the_wire() -> None:
    seen = build.evidence(gpu_idle_s=130.0, ram_idle_s=140.0)
    asked = build.server_evidence(unanswered_s=121.5)

    told = evidence.server_evidence("worker-0", build.snapshot(containers=(seen,), servers=(asked,)), now=build.ago(-2))

    assert told == ServerFacts(
        host="box-1", sample_age_s=2.0, container_kind="docker", container="worker-0", container_id=build.DOCKER_ID,
        container_incarnation=build.container().incarnation, gpus=["GPU-0"], gpu_simulated=False,
        gpu_idle_s=130.0, gpu_unknown=None, ram_bytes=2048 * build.MIB, ram_idle_s=140.0, ram_unknown=None,
        io_idle_s=400.0, page_fault_idle_s=300.0, container_cpu_idle_s=200.0, work_unknown=None, gpu_pids={"GPU-0": []},
        probe="http", workers=0, answered=True, unanswered_s=121.5, silence_allowed_s=120.0, probe_unknown=None,
        cards=[CardFacts(
            gpu="GPU-0", size_bytes=16384 * build.MIB, free_bytes=None, floor_bytes=1536 * build.MIB,
            tie_bytes=256 * build.MIB, returning_bytes=0, tenants=[TenantFacts(
                container="worker-0", incarnation=seen.container.incarnation, used_bytes=None, budget_bytes=None,
                recyclable=False,
            )],
        )],
        unseen=[], lost_gpus_s={}, nameless_gpus=[],
    )  # fmt: skip
    assert facts.parse_server(facts.render(told)) == told


def server_told(**snapshot: Any) -> ServerFacts:
    told = evidence.server_evidence("worker-0", build.snapshot(**snapshot), now=build.ago(0))
    assert told is not None
    assert facts.parse_server(facts.render(told)) == told
    return told


def test_a_container_that_does_not_run_has_facts_of_its_host_alone() -> None:
    told = server_told(containers=())

    assert (told.container, told.container_id, told.container_incarnation) == ("worker-0", None, None)
    assert (told.probe, told.workers, told.answered, told.unanswered_s) == (None, None, None, None)
    assert told.gpu_pids == {"GPU-0": []}


def test_a_container_that_is_no_server_is_told_without_a_probe() -> None:
    told = server_told()

    assert told.container_id == build.DOCKER_ID
    assert (told.probe, told.silence_allowed_s, told.probe_unknown) == (None, None, None)


def test_a_server_that_cannot_be_asked_or_was_not_says_why() -> None:
    problem = Unknown(reason="other_host", because="no other place is called")
    paused = Unknown(reason="paused", because="the container is paused")

    wrong = server_told(servers=(build.server_evidence(probe=problem, answered=None, unanswered_s=None),))
    asleep = server_told(servers=(build.server_evidence(unanswered_s=None, unknown=paused),))

    assert (wrong.probe, wrong.probe_unknown) == (None, "no other place is called")
    assert (asleep.probe, asleep.unanswered_s, asleep.probe_unknown) == ("http", None, "the container is paused")


@pytest.mark.parametrize(
    ("snapshot", "at"),
    [
        pytest.param(build.snapshot(servers=None), build.ago(0), id="containers that cannot be listed"),
        pytest.param(build.snapshot(), build.ago(0, boot_id="another"), id="a look of another boot"),
    ],
)
def test_there_are_no_facts_about_servers_of(snapshot: Snapshot, at: Stamp) -> None:
    assert evidence.server_evidence("worker-0", snapshot, now=at) is None


def test_without_a_listing_of_containers_there_is_no_answer_about_one() -> None:
    with served(live(servers=None)) as port:
        assert get(port, "/evidence?container=worker-0")[0] == 503


# The program


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """`gpuwarden exporter` as a process of its own."""

    process: subprocess.Popen[str]
    port: int

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit status and the rest of its log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=20)
        return self.process.returncode, log


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", "exporter", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of ours that a developer may have in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")} | more


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and standard error of an exporter that is to end by itself."""
    done = subprocess.run(
        command(*arguments), env=environment(**(env or {})), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def simulation(tmp_path: Path) -> Path:
    path = tmp_path / "gpus.json"
    gpu = {"uuid": "GPU-sim-0", "index": 0, "utilization_ratio": 0.0, "processes": []}
    path.write_text(json.dumps({"gpus": [gpu]}))
    return path


@pytest.fixture
def program(house: Path, simulation: Path) -> Iterator[Exporter]:
    """An exporter without Docker and with a simulated GPU, ready."""
    with running(house, simulation) as found:
        yield found


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Its log line that says it is ready. A program that ends before that fails the test with all that it wrote."""
    assert process.stderr
    written: list[str] = []
    for line in process.stderr:
        written.append(line)
        if '"event": "exporter ready"' in line:
            found: dict[str, Any] = json.loads(line)
            return found
    pytest.fail(f"the exporter ended with {process.wait()} before it was ready:\n{''.join(written)}")


@contextmanager
def running(house: Path, simulation: Path, *more: object) -> Iterator[Exporter]:
    process = subprocess.Popen(
        command("--runtime-dir", house, "--docker", "none", "--simulate-gpu", simulation, "--port", 0,
                "--sample-interval-s", 0.05, *more),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr
    entry = ready(process)
    yield Exporter(process=process, port=entry["port"])
    if process.returncode is None:
        process.kill()
        process.communicate()


def test_the_rules_read_the_bounds_that_are_set(house: Path, simulation: Path) -> None:
    with running(
        house,
        simulation,
        "--gpu-lost-s",
        7,
        "--not-ready-s",
        90,
        "--server-page-after-ratio",
        4,
        "--slow-ratio",
        1.5,
        "--xids-fatal",
        "79, 154",
    ) as exporter:
        told = get(exporter.port, "/metrics")[1].splitlines()

    assert "gpuwarden_gpu_lost_threshold_seconds 7.0" in told
    assert "gpuwarden_server_not_ready_threshold_seconds 90.0" in told
    assert "gpuwarden_server_page_after_ratio 4.0" in told
    assert "gpuwarden_job_slow_threshold_ratio 1.5" in told
    assert [line for line in told if line.startswith("gpuwarden_gpu_xid_fatal_info")] == [
        'gpuwarden_gpu_xid_fatal_info{xid="79"} 1.0',
        'gpuwarden_gpu_xid_fatal_info{xid="154"} 1.0',
    ]


def test_the_program_publishes_a_worker_and_testifies_about_it(program: Exporter, start_worker: StartWorker) -> None:
    worker = start_worker("w0", job_id=7)

    def answer() -> WorkerFacts | None:
        status, text, _ = get(program.port, "/evidence?worker=w0")
        found = facts.parse(text) if status == 200 else None
        return found if found and found.job_id is not None else None  # a look may fall between its two files

    told = eventually(answer)
    _, text, _ = get(program.port, "/metrics")

    assert (told.host, told.alive, told.job_id, told.gpu_simulated) == ("box-1", True, 7, True)
    assert told.worker_incarnation == worker.incarnation
    assert 'gpuwarden_worker_alive{container="w0",worker="w0"} 1.0' in text
    info = 'attribution="process",gpu="GPU-sim-0",index="0",name="Simulated GPU",source="simulated"'
    assert f"gpuwarden_gpu_info{{{info}}} 1.0" in text
    assert f'gpuwarden_exporter_info{{nodename="box-1",version="{__version__}"}} 1.0' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_ends_in_good_order_on(number: signal.Signals, program: Exporter) -> None:
    status, log = program.stop(number)

    assert status == 0
    assert json.loads(log.splitlines()[-1])["event"] == "exporter stopped"


def test_sighup_ends_nothing_and_tells_what_is_in_force(program: Exporter) -> None:
    program.process.send_signal(signal.SIGHUP)
    assert program.process.stderr
    told = json.loads(program.process.stderr.readline())

    assert told["event"] == "SIGHUP: what changed in files is in force; options want a restart"
    assert get(program.port, "/-/healthy")[0] == 200


def test_sighup_while_it_starts_ends_nothing(house: Path) -> None:
    key = house / "host"
    name = key.read_bytes()
    key.unlink()
    os.mkfifo(key)
    process = subprocess.Popen(
        command("--runtime-dir", house, "--docker", "none", "--nvml", "off", "--port", 0), env=environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    starting = Exporter(process=process, port=0)

    def reads() -> int | None:
        try:
            return os.open(key, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody has it open
            return None

    try:
        written = eventually(reads, "it reads the host's name")
        process.send_signal(signal.SIGHUP)
        os.write(written, name)
        os.close(written)
        assert process.stderr
        events: list[str] = []
        while not events or events[-1] != "exporter ready":
            line = process.stderr.readline()
            assert line, process.wait()
            events.append(json.loads(line)["event"])
        assert starting.stop()[0] == 0
    finally:
        process.kill()
        process.communicate()


def test_a_web_configuration_that_will_not_do_ends_the_program_with_one_line(house: Path, tmp_path: Path) -> None:
    config = tmp_path / "web.yml"
    config.write_text("basic_auth_users: {prom: plain}\n")

    status, error = run("--runtime-dir", house, "--docker", "none", "--port", 0, "--web-config-file", config)

    assert status == 1
    assert error == (
        f"gpuwarden exporter: the web configuration file {config}: basic_auth_users: user 1 has no bcrypt hash, as "
        '`htpasswd -nBC 10 ""` prints it after the colon\n'
    )


def test_a_bad_simulation_file_makes_gpus_unknown_until_it_is_whole(program: Exporter, simulation: Path) -> None:
    whole = simulation.read_text()

    def gpu_source_is(success: bool) -> bool:
        text = get(program.port, "/metrics")[1]
        flag = f'gpuwarden_collector_success{{collector="source_gpu"}} {float(success)}' in text
        return flag and ("gpuwarden_gpu_info{" in text) == success

    eventually(lambda: gpu_source_is(True))
    simulation.write_text(whole[:10])
    eventually(lambda: gpu_source_is(False))
    simulation.write_text(whole)
    eventually(lambda: gpu_source_is(True))

    assert program.stop()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        pytest.param(["--nonsense"], {}, "usage: gpuwarden exporter", id="an option that is none"),
        pytest.param(["--port", "abc"], {}, "'abc' will not do for --port", id="a port that is no number"),
        pytest.param(["--port", "70000"], {}, "'70000' will not do for --port", id="a port past the last"),
        pytest.param(["--log-level", "loud"], {}, "'loud' will not do for --log-level", id="an unknown level"),
        pytest.param(
            ["--gpu-idle-ratio", "5"], {}, "'5' will not do for --gpu-idle-ratio", id="a percentage for a ratio"
        ),
        pytest.param(
            ["--sample-interval-s", "5"], {}, "will not do for --sample-interval-s", id="so long that nothing adds up"
        ),
        pytest.param(
            ["--docker", "/run/d.sock"],
            {},
            "'/run/d.sock' will not do for --docker (or GPUWARDEN_EXPORTER_DOCKER): wanted is "
            "unix:///run/d.sock, or 'none', or 'auto'\n",
            id="a file for a socket's address",
        ),
        pytest.param(
            [], {"GPUWARDEN_EXPORTER_PORT": "x"}, "(or GPUWARDEN_EXPORTER_PORT)", id="a bad environment variable"
        ),
    ],
)
def test_a_wrong_call_ends_with_2_and_names_what_is_wrong(arguments: list[str], env: dict[str, str], says: str) -> None:
    status, error = run(*arguments, env=env)

    assert status == 2
    assert says in error
    assert "Traceback" not in error


def test_a_misspelt_variable_is_told_in_the_log(tmp_path: Path) -> None:
    _, error = run("--runtime-dir", tmp_path / "nowhere", env={"GPUWARDEN_EXPORTER_VRAM_FLOR_MIB": "2048"})

    told = json.loads(error.splitlines()[0])
    assert (told["level"], told["variable"]) == ("warning", "GPUWARDEN_EXPORTER_VRAM_FLOR_MIB")


def test_a_missing_directory_is_named_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"

    assert run("--runtime-dir", missing) == (
        1,
        f"gpuwarden exporter: {missing} does not exist: create it, with this host's name in {missing}/host\n",
    )


def test_the_directory_is_the_one_that_workers_are_told(tmp_path: Path) -> None:
    status, error = run(env={"GPUWARDEN_RUNTIME_DIR": str(tmp_path / "nowhere")})

    assert status == 1
    assert f"{tmp_path}/nowhere does not exist" in error


def test_a_missing_host_key_is_named_in_one_line(tmp_path: Path) -> None:
    status, error = run("--runtime-dir", tmp_path)

    assert status == 1
    assert error.startswith(f"gpuwarden exporter: no host key at {tmp_path}/host")
    assert error.count("\n") == 1


def test_a_port_in_use_ends_the_program_with_one_line(house: Path) -> None:
    with served(live()) as port:
        status, error = run("--runtime-dir", house, "--docker", "none", "--port", port)

    assert status == 1
    assert error == (
        f"gpuwarden exporter: cannot listen on 127.0.0.1:{port} (Address already in use): stop what listens there, or "
        "give another --port\n"
    )
