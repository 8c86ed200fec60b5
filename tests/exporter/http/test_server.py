"""The exporter's pages from a real server, and the whole program as a separate process."""

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
from urllib.parse import quote

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
from gpuwarden.evidence import GpuMemoryFacts, ServerFacts, VramShareFacts, WorkerFacts
from gpuwarden.http.web_config import WebConfig
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build
from tests.exporter.conftest import StartWorker
from tests.hostile import HOSTILE, raw_lines
from tests.served import get, served_app
from tests.waiting import eventually


def app(latest: Callable[[], Snapshot | None], config: WebConfig, *, host: str = "box-1") -> Starlette:
    """The application for this snapshot."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(latest, host="box-1", thresholds=Thresholds()))
    return web.create_app(registry, latest, host=host, web=config)


@contextmanager
def served(
    latest: Callable[[], Snapshot | None], *, web_config_file: Path | None = None, listen: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve this snapshot on the returned port."""
    config = WebConfig(web_config_file)
    with served_app(app(latest, config), config, listen=listen) as port:
        yield port


def now(snapshot: Snapshot) -> Snapshot:
    """The snapshot as if it were taken now on this boot."""
    return replace(snapshot, taken=clock.stamp())


def live(*sightings: Any, **changes: Any) -> Callable[[], Snapshot]:
    return lambda: now(build.snapshot(*sightings, **changes))


# Pages


def test_metrics_are_what_prometheus_reads() -> None:
    with served(live(build.sighting())) as port:
        status, text, headers = get(port, "/metrics")

    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    assert "gpuwarden_worker_alive" in {family.name for family in text_string_to_metric_families(text)}


def test_page_is_compressed_on_request() -> None:
    workers = (build.sighting(worker=build.worker_file(worker=f"w{number}")) for number in range(3))
    snapshot = now(build.snapshot(*workers))
    with served(lambda: snapshot) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "GZIP"})
        answer = connection.getresponse()
        packed = answer.read()
        connection.close()
        _, plain, headers = get(port, "/metrics", headers={"Accept-Encoding": "identity"})

    assert answer.getheader("Content-Encoding") == "gzip"
    assert answer.getheader("Vary") == headers["Vary"] == "Accept-Encoding"
    assert "Content-Encoding" not in headers
    assert len(packed) * 4 < len(plain)
    unpacked = gzip.decompress(packed).decode()
    assert names(text_string_to_metric_families(unpacked)) == names(text_string_to_metric_families(plain))


def names(families: Iterable[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def test_front_page_lists_sources_with_escaped_text() -> None:
    sources = (
        SourceHealth(source="gpu", success=True, duration_s=0.0015),
        SourceHealth(source="docker", success=False, duration_s=5.0, message="no <socket> & no answer"),
    )
    with served(live(sources=sources)) as port:
        _, text, headers = get(port, "/")

    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert f"Version {__version__}, on box-1. The last sample is 0." in text
    assert "<td>gpu<td>ok, in 1.5 ms" in text
    assert "<td>docker<td>failed: no &lt;socket&gt; &amp; no answer" in text


def test_no_page_holds_control_characters() -> None:
    health = SourceHealth(source=HOSTILE, success=False, duration_s=5.0, message=HOSTILE)
    asked = quote(HOSTILE)
    latest = live(build.sighting(worker=build.worker_file(worker=HOSTILE)), sources=(health,))
    with served_app(app(latest, WebConfig(None), host=HOSTILE), WebConfig(None)) as port:
        pages = ["/", f"/evidence?worker={asked}", f"/evidence?container={asked}", f"/{asked}", "/-/ready"]
        texts = [get(port, path)[1] for path in pages]

    assert all(texts)
    assert [raw_lines(text) for text in texts] == [[]] * len(pages)
    assert "x\\x1b[2J\\nforged" in texts[0]


def test_front_page_names_an_invalid_file() -> None:
    sources = tuple(SourceHealth(source=name, success=True, duration_s=0.0015) for name in ("workers", "tasks"))
    snapshot = build.snapshot(build.sighting(), sources=sources)
    assert snapshot.workers
    refused = {"not_json": "/run/gpuwarden/<b>/w0.worker.json: not whole JSON"}
    snapshot = replace(snapshot, workers=replace(snapshot.workers, errors={"not_json": 1}, first_errors=refused))
    with served(lambda: now(snapshot)) as port:
        _, text, _ = get(port, "/")

    assert "<td>workers<td>in 1.5 ms, invalid files: /run/gpuwarden/&lt;b&gt;/w0.worker.json: not whole JSON\n" in text
    assert "<td>tasks<td>ok, in 1.5 ms\n" in text


def test_front_page_reports_a_source_with_a_refused_gpu() -> None:
    sources = tuple(SourceHealth(source=name, success=True, duration_s=0.0015) for name in ("gpu", "drm"))
    refused = build.gpu(1, unknown="Insufficient <Permissions>", figures=GpuFigures(unknown={"gpu": "no_permission"}))
    with served(live(sources=sources, gpus=build.gpus(build.gpu(0), refused))) as port:
        _, text, _ = get(port, "/")

    assert "<td>gpu<td>in 1.5 ms, unknown: GPU-1: Insufficient &lt;Permissions&gt;\n" in text
    assert "<td>drm<td>ok, in 1.5 ms\n" in text


def test_front_page_and_health_answer_before_the_first_sample() -> None:
    with served(lambda: None) as port:
        assert "No sample yet." in get(port, "/")[1]
        assert get(port, "/-/healthy")[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        pytest.param("/evidence?worker=w0", 200, '"worker": "w0"', id="worker"),
        pytest.param("/evidence?worker=unknown", 404, "no such worker", id="unknown worker"),
        pytest.param("/evidence", 400, "name one worker", id="no name"),
        pytest.param("/evidence?worker=", 400, "name one worker", id="empty name"),
        pytest.param("/evidence?worker=w0&worker=w1", 400, "name one worker", id="two workers"),
        pytest.param("/evidence?container=worker-0", 200, '"container_incarnation": "ab', id="container"),
        pytest.param(
            "/evidence?container=none", 200, '"container_incarnation": null', id="container that does not run"
        ),
        pytest.param("/evidence?container=w0&worker=w0", 400, "name one worker", id="worker and container"),
        pytest.param("/evidence?tenant=none", 404, "no such tenant", id="unknown tenant"),
        pytest.param("/evidence?gpu=0", 400, "or one server", id="other parameter"),
        pytest.param("/-/healthy", 200, "ok", id="health"),
        pytest.param("/-/ready", 200, "ok", id="readiness"),
        pytest.param("/", 200, "/metrics", id="the front page"),
        pytest.param("/nowhere", 404, "no such page: /, /metrics, ", id="unknown page"),
    ],
)
def test_page_answers(path: str, status: int, says: str) -> None:
    with served(live(build.sighting())) as port:
        found, text, _ = get(port, path)

    assert found == status
    assert says in text


def test_tenant_on_demand_has_the_age_of_the_sample() -> None:
    with served(live(build.sighting(), on_demand=(build.on_demand(),))) as port:
        status, text, _ = get(port, "/evidence?tenant=painter")

    found = facts.parse_on_demand(text)
    assert (status, replace(found, sample_age_s=0.5)) == (200, build.on_demand())
    assert found.sample_age_s < 5


def test_server_without_evidence_is_named_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "server_evidence", lambda *_, **__: None)

    with served(live(build.sighting())) as port:
        found, text, _ = get(port, "/evidence?container=llm")

    assert (found, text) == (404, "no such server on this host\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_rejected(method: str) -> None:
    with served(live(build.sighting())) as port:
        for path in ("/metrics", "/evidence?worker=w0", "/-/healthy", "/-/ready", "/"):
            status, _, headers = get(port, path, method=method)

            assert (path, status, headers["Allow"]) == (path, 405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/metrics", "/evidence?worker=w0", "/evidence", "/-/healthy", "/-/ready", "/", "/nothing"]
)
def test_head_has_the_headers_of_get_and_no_body(path: str) -> None:
    with served(live(build.sighting())) as port:
        expected, page, headers = get(port, path)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
            status, _, rest = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n")

    head, _, body = rest.partition(b"\r\n\r\n")
    found = message_from_bytes(head)
    assert int(status.split()[1]) == expected
    assert body == b""
    assert found["Content-Type"] == headers["Content-Type"]
    assert int(found["Content-Length"]) == pytest.approx(len(page.encode()), abs=100)  # durations differ in digits


def stale() -> Snapshot:
    taken = clock.stamp()
    return build.snapshot(build.sighting(), taken=replace(taken, boottime_s=taken.boottime_s - 5.5))


@pytest.mark.parametrize(
    ("latest", "path"),
    [
        pytest.param(lambda: None, "/evidence?worker=w0", id="evidence before the first sample"),
        pytest.param(lambda: None, "/-/ready", id="readiness before the first sample"),
        pytest.param(stale, "/evidence?worker=w0", id="evidence of an old sample"),
        pytest.param(stale, "/-/ready", id="readiness of an old sample"),
        pytest.param(live(workers=None), "/evidence?worker=w0", id="evidence while the worker source fails"),
    ],
)
def test_page_without_a_recent_sample_is_unavailable(latest: Callable[[], Snapshot | None], path: str) -> None:
    with served(latest) as port:
        status, text, _ = get(port, path)

    assert (status, text) == (503, "no recent sample of this host\n")


@pytest.mark.parametrize(
    ("address", "status"), [("127.0.0.1", 200), ("127.8.9.10", 200), ("::1", 200), ("10.0.0.7", 403)]
)
def test_evidence_is_only_for_this_host(address: str, status: int) -> None:
    pages = httpx.ASGITransport(app(live(build.sighting()), WebConfig(None)), client=(address, 50000))

    async def status_from() -> int:
        async with httpx.AsyncClient(transport=pages, base_url="http://box-1") as caller:
            return (await caller.get("/evidence?worker=w0")).status_code

    assert asyncio.run(status_from()) == status


# Evidence


def evidence_of_worker(snapshot: Snapshot) -> WorkerFacts:
    """Evidence of w0, two seconds after the sample."""
    found = evidence.worker_evidence("w0", snapshot, now=build.ago(-2))
    assert found is not None
    return found


def test_worker_evidence_survives_serialization() -> None:
    seen = build.evidence(gpu_idle_s=130.0, ram_idle_s=140.0)
    gpus = build.gpus(build.gpu(0, build.process(4001), build.process(12)), build.gpu(1, build.process(4001)))

    found = evidence_of_worker(build.snapshot(build.sighting(), containers=(seen,), gpus=gpus))

    assert found == replace(
        found,
        host="box-1", worker="w0", sample_age_s=2.0, alive=True, worker_incarnation="inc-w0", heartbeat_age_s=2.0,
        worker_pid=4001, cpu_idle_s=1.0, dead_s=None, dead_after_s=30.0,
        container_kind="docker", container="worker-0", container_id=build.DOCKER_ID,
        container_incarnation=build.container().incarnation, container_workers=1,
        job_id=7, attempt=1, phase="step", phase_age_s=200.0, step=12,
        elapsed_s=300.0, budget_s=8100.0, stall_timeout_s=120.0, busy_timeout_s=900.0, step_beat_age_s=3.0,
        health_window_s=300.0, health_grace_s=60.0, gpus=["GPU-0"], gpu_simulated=False,
        gpu_idle_s=130.0, gpu_unknown=None, ram_bytes=2048 * build.MIB, ram_idle_s=140.0, ram_unknown=None,
        io_idle_s=400.0, page_fault_idle_s=300.0, container_cpu_idle_s=200.0, heavy_work_idle_s=900.0,
        work_unknown=None, gpu_pids={"GPU-0": [12, 4001], "GPU-1": [4001]}, lost_gpus_s={},
    )  # fmt: skip
    assert facts.parse(facts.render(found)) == found


def test_unknown_evidence_is_null_with_a_reason() -> None:
    seen = build.evidence(
        gpu_idle_s=None,
        gpu_unknown=Unknown(reason="not_listed", message="GPU-0: GPU is lost"),
        ram=RamUse(usage_bytes=None),
        ram_idle_s=None,
        ram_unknown=Unknown(reason="unreadable", message="gone"),
    )

    found = evidence_of_worker(
        build.snapshot(
            build.sighting(job=None), containers=(seen,), gpus=build.gpus(build.gpu(0), build.gpu(1, processes=None))
        )
    )

    assert (found.gpu_idle_s, found.gpu_unknown) == (None, "GPU-0: GPU is lost")
    assert (found.ram_idle_s, found.ram_unknown) == (None, "gone")
    assert (found.job_id, found.attempt, found.step_beat_age_s) == (None, None, None)
    assert found.gpu_pids == {"GPU-0": [], "GPU-1": None}
    assert facts.parse(facts.render(found)) == found


def test_dead_worker_has_evidence_without_a_container() -> None:
    found = evidence_of_worker(build.snapshot(build.sighting(alive=False, pid=None, container_id=None), gpus=None))

    assert (found.alive, found.container, found.gpus, found.gpu_idle_s) == (False, None, None, None)
    assert (found.gpu_simulated, found.gpu_pids) == (None, None)
    assert facts.parse(facts.render(found)) == found


@pytest.mark.parametrize(
    ("snapshot", "at"),
    [
        pytest.param(build.snapshot(), build.ago(0), id="unknown worker"),
        pytest.param(build.snapshot(workers=None), build.ago(0), id="no worker source"),
        pytest.param(build.snapshot(build.sighting()), build.ago(0, boot_id="another"), id="sample from another boot"),
    ],
)
def test_no_evidence_of(snapshot: Snapshot, at: Stamp) -> None:
    assert evidence.worker_evidence("w0", snapshot, now=at) is None


def test_server_evidence_survives_serialization() -> None:
    seen = build.evidence(gpu_idle_s=130.0, ram_idle_s=140.0)
    silent = build.server_evidence(probe_failing_s=121.5)

    found = evidence.server_evidence(
        "worker-0", build.snapshot(containers=(seen,), servers=(silent,)), now=build.ago(-2)
    )

    assert found
    assert found == replace(
        found,
        host="box-1", sample_age_s=2.0, container_kind="docker", container="worker-0", container_id=build.DOCKER_ID,
        container_incarnation=build.container().incarnation, gpus=["GPU-0"], gpu_simulated=False,
        gpu_idle_s=130.0, gpu_unknown=None, ram_bytes=2048 * build.MIB, ram_idle_s=140.0, ram_unknown=None,
        io_idle_s=400.0, page_fault_idle_s=300.0, container_cpu_idle_s=200.0, heavy_work_idle_s=900.0,
        work_unknown=None, gpu_pids={"GPU-0": []},
        probe="http", workers=0, answered=True, probe_failing_s=121.5, restart_after_s=120.0, probe_unknown=None,
        cards=[GpuMemoryFacts(
            gpu="GPU-0", size_bytes=16384 * build.MIB, free_bytes=None, floor_bytes=1536 * build.MIB,
            tie_bytes=256 * build.MIB, reclaiming_bytes=0, tenants=[VramShareFacts(
                container="worker-0", incarnation=seen.container.incarnation, used_bytes=None, budget_bytes=None,
                recyclable=False,
            )],
        )],
        unseen=[], lost_gpus_s={}, nameless_gpus=[],
    )  # fmt: skip
    assert facts.parse_server(facts.render(found)) == found


def evidence_of_server(**snapshot: Any) -> ServerFacts:
    found = evidence.server_evidence("worker-0", build.snapshot(**snapshot), now=build.ago(0))
    assert found is not None
    assert facts.parse_server(facts.render(found)) == found
    return found


def test_stopped_container_has_only_host_evidence() -> None:
    found = evidence_of_server(containers=())

    assert (found.container, found.container_id, found.container_incarnation) == ("worker-0", None, None)
    assert (found.probe, found.workers, found.answered, found.probe_failing_s) == (None, None, None, None)
    assert found.gpu_pids == {"GPU-0": []}


def test_container_without_a_probe_has_evidence() -> None:
    found = evidence_of_server()

    assert found.container_id == build.DOCKER_ID
    assert (found.probe, found.restart_after_s, found.probe_unknown) == (None, None, None)


def test_server_that_was_not_probed_has_a_reason() -> None:
    problem = Unknown(reason="other_host", message="no other place is called")
    paused = Unknown(reason="paused", message="the container is paused")

    wrong = evidence_of_server(servers=(build.server_evidence(probe=problem, answered=None, probe_failing_s=None),))
    asleep = evidence_of_server(servers=(build.server_evidence(probe_failing_s=None, unknown=paused),))

    assert (wrong.probe, wrong.probe_unknown) == (None, "no other place is called")
    assert (asleep.probe, asleep.probe_failing_s, asleep.probe_unknown) == ("http", None, "the container is paused")


@pytest.mark.parametrize(
    ("snapshot", "at"),
    [
        pytest.param(build.snapshot(servers=None), build.ago(0), id="containers cannot be listed"),
        pytest.param(build.snapshot(), build.ago(0, boot_id="another"), id="sample from another boot"),
    ],
)
def test_no_server_evidence(snapshot: Snapshot, at: Stamp) -> None:
    assert evidence.server_evidence("worker-0", snapshot, now=at) is None


def test_container_is_unavailable_without_a_list_of_containers() -> None:
    with served(live(servers=None)) as port:
        assert get(port, "/evidence?container=worker-0")[0] == 503


# The program


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """`gpuwarden exporter` as a separate process."""

    process: subprocess.Popen[str]
    port: int

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Return its exit status and the rest of its log."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=20)
        return self.process.returncode, log


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gpuwarden", "exporter", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process without settings of gpuwarden."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")} | more


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and standard error of an exporter that ends."""
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
    """An exporter with a simulated GPU and without Docker, ready."""
    with running(house, simulation) as found:
        yield found


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the log line of readiness. A program that ends before it fails the test with its output."""
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


def test_settings_of_rules_are_published(house: Path, simulation: Path) -> None:
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
        found = get(exporter.port, "/metrics")[1].splitlines()

    assert "gpuwarden_gpu_lost_threshold_seconds 7.0" in found
    assert "gpuwarden_server_not_ready_threshold_seconds 90.0" in found
    assert "gpuwarden_server_page_after_ratio 4.0" in found
    assert "gpuwarden_job_slow_threshold_ratio 1.5" in found
    assert [line for line in found if line.startswith("gpuwarden_gpu_xid_fatal_info")] == [
        'gpuwarden_gpu_xid_fatal_info{xid="79"} 1.0',
        'gpuwarden_gpu_xid_fatal_info{xid="154"} 1.0',
    ]


def test_program_publishes_a_worker_and_its_evidence(program: Exporter, start_worker: StartWorker) -> None:
    worker = start_worker("w0", job_id=7)

    def answer() -> WorkerFacts | None:
        status, text, _ = get(program.port, "/evidence?worker=w0")
        found = facts.parse(text) if status == 200 else None
        return found if found and found.job_id is not None else None  # a sample may see only one of its two files

    found = eventually(answer)
    _, text, _ = get(program.port, "/metrics")

    assert (found.host, found.alive, found.job_id, found.gpu_simulated) == ("box-1", True, 7, True)
    assert found.worker_incarnation == worker.incarnation
    assert 'gpuwarden_worker_alive{container="w0",worker="w0"} 1.0' in text
    info = 'attribution="process",gpu="GPU-sim-0",index="0",name="Simulated GPU",source="simulated"'
    assert f"gpuwarden_gpu_info{{{info}}} 1.0" in text
    assert f'gpuwarden_exporter_info{{nodename="box-1",version="{__version__}"}} 1.0' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_stops_cleanly_on(number: signal.Signals, program: Exporter) -> None:
    status, log = program.stop(number)

    assert status == 0
    assert json.loads(log.splitlines()[-1])["event"] == "exporter stopped"


def test_sighup_reloads_and_logs_it(program: Exporter) -> None:
    program.process.send_signal(signal.SIGHUP)
    assert program.process.stderr
    found = json.loads(program.process.stderr.readline())

    assert found["event"] == "SIGHUP: files reloaded; options need a restart"
    assert get(program.port, "/-/healthy")[0] == 200


def test_sighup_during_start_does_not_stop_it(house: Path) -> None:
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
        except OSError:  # not open yet
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


def test_invalid_web_configuration_ends_the_program_with_one_line(house: Path, tmp_path: Path) -> None:
    config = tmp_path / "web.yml"
    config.write_text("basic_auth_users: {prom: plain}\n")

    status, error = run("--runtime-dir", house, "--docker", "none", "--port", 0, "--web-config-file", config)

    assert status == 1
    assert error == (
        f"gpuwarden exporter: the web configuration file {config}: basic_auth_users: user 1 has no bcrypt hash, as "
        '`htpasswd -nBC 10 ""` prints it after the colon\n'
    )


def test_invalid_simulation_file_makes_gpus_unknown_until_it_is_valid(program: Exporter, simulation: Path) -> None:
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
        pytest.param(["--nonsense"], {}, "gpuwarden exporter: unknown argument --nonsense", id="unknown option"),
        pytest.param(["--port", "abc"], {}, "'abc' is invalid for --port", id="port is not a number"),
        pytest.param(["--port", "70000"], {}, "'70000' is invalid for --port", id="port out of range"),
        pytest.param(["--log-level", "loud"], {}, "'loud' is invalid for --log-level", id="an unknown level"),
        pytest.param(["--gpu-idle-ratio", "5"], {}, "'5' is invalid for --gpu-idle-ratio", id="percentage for a ratio"),
        pytest.param(["--sample-interval-s", "5"], {}, "is invalid for --sample-interval-s", id="longer than a gap"),
        pytest.param(
            ["--docker", "/run/d.sock"],
            {},
            "'/run/d.sock' is invalid for --docker (or GPUWARDEN_EXPORTER_DOCKER): wanted is "
            "unix:///run/d.sock, or 'none', or 'auto'\n",
            id="file path instead of a socket address",
        ),
        pytest.param(
            [], {"GPUWARDEN_EXPORTER_PORT": "x"}, "(or GPUWARDEN_EXPORTER_PORT)", id="invalid environment variable"
        ),
    ],
)
def test_invalid_call_ends_with_2_and_names_the_problem(arguments: list[str], env: dict[str, str], says: str) -> None:
    status, error = run(*arguments, env=env)

    assert status == 2
    assert says in error
    assert "Traceback" not in error


def test_unknown_variable_is_logged(tmp_path: Path) -> None:
    _, error = run("--runtime-dir", tmp_path / "nowhere", env={"GPUWARDEN_EXPORTER_VRAM_FLOR_MIB": "2048"})

    found = json.loads(error.splitlines()[0])
    assert (found["level"], found["variable"]) == ("warning", "GPUWARDEN_EXPORTER_VRAM_FLOR_MIB")


def test_missing_directory_is_named_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"

    assert run("--runtime-dir", missing) == (
        1,
        f"gpuwarden exporter: {missing} does not exist: create it, with this host's name in {missing}/host\n",
    )


def test_directory_comes_from_the_variable_of_workers(tmp_path: Path) -> None:
    status, error = run(env={"GPUWARDEN_RUNTIME_DIR": str(tmp_path / "nowhere")})

    assert status == 1
    assert f"{tmp_path}/nowhere does not exist" in error


def test_missing_host_key_is_named_in_one_line(tmp_path: Path) -> None:
    status, error = run("--runtime-dir", tmp_path)

    assert status == 1
    assert error.startswith(f"gpuwarden exporter: no host key at {tmp_path}/host")
    assert error.count("\n") == 1


def test_port_in_use_ends_the_program_with_one_line(house: Path) -> None:
    with served(live()) as port:
        status, error = run("--runtime-dir", house, "--docker", "none", "--port", port)

    assert status == 1
    assert error == (
        f"gpuwarden exporter: cannot listen on 127.0.0.1:{port} (Address already in use): stop what listens there, or "
        "give another --port\n"
    )
