"""The client of the exporter against a real HTTP server: valid, invalid, late and missing answers."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import structlog
from pydantic import ValidationError
from structlog.testing import LogCapture

import remediator.clients.exporter
from exporter.model.gpu import MigInstance
from exporter.model.snapshot import DriverHealth, SourceHealth
from gpuwarden import evidence as facts
from gpuwarden.errors import GpuwardenError
from remediator.clients.exporter import ExporterClient, GpuHealth, WorkerUnseenError
from remediator.clients.exporter_access import ExporterAuth, ExporterError
from remediator.settings.settings import ExecuteSettings
from tests.certificates import Authority, authority
from tests.exporter import builders as host
from tests.exporter.http.test_server import live, served
from tests.gpuwarden.http.test_web_config import tls, users
from tests.remediator.builders import HOST, evidence, server


class Exporter(ThreadingHTTPServer):
    """Answers every request with `status` and `body`."""

    status = 200
    body = ""
    asked: list[str]
    hold: threading.Event | None = None

    def handle_error(self, *_: object) -> None:
        """Ignore clients that closed the connection."""


class Handler(BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.hold:
            self.server.hold.wait(20)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    if server.hold:
        server.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(exporter: Exporter) -> Iterator[Callable[..., facts.WorkerFacts]]:
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}/")
    yield lambda worker="w1": client.worker_evidence(worker, host=HOST)
    client.close()


def test_evidence_of_a_worker_is_returned(exporter: Exporter, ask: Callable[..., facts.WorkerFacts]) -> None:
    exporter.body = facts.render(evidence())

    assert ask() == evidence()


def test_hostile_name_stays_one_parameter(exporter: Exporter, ask: Callable[..., facts.WorkerFacts]) -> None:
    hostile = "w1&host=box2#?/../ $(x)\n\x00é"
    exporter.body = facts.render(evidence(worker=hostile))

    assert ask(hostile).worker == hostile
    asked = urlsplit(exporter.asked[0])
    assert (asked.path, parse_qs(asked.query)) == ("/evidence", {"worker": [hostile]})


def test_unknown_worker_is_distinguished_from_no_answer(
    exporter: Exporter, ask: Callable[..., facts.WorkerFacts]
) -> None:
    exporter.status, exporter.body = 404, "no such worker on this host\n"

    with pytest.raises(WorkerUnseenError, match="lists no worker 'w1' on this host"):
        ask()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, "no recent sample of this host\n", "returned 503: no recent sample of this host"),
        (302, "", "returned 302"),
        (200, "", "evidence"),
        (200, "{}", "host"),
        (200, facts.render(evidence(host="box2")), "returned box2/w1 for box1/w1"),
        (200, facts.render(evidence(worker="w2")), "returned box1/w2 for box1/w1"),
        (200, facts.render(evidence()).replace("130.0", "1e999"), "evidence"),
        (500, "x" * 10_000, "returned 500: " + "x" * 200 + "$"),
    ],
    ids=[
        "no recent sample",
        "redirect",
        "empty",
        "no facts",
        "another host",
        "another worker",
        "not a number",
        "long page",
    ],
)
def test_invalid_evidence_is_an_error(
    exporter: Exporter, ask: Callable[..., facts.WorkerFacts], status: int, body: str, says: str
) -> None:
    exporter.status, exporter.body = status, body

    with pytest.raises(ExporterError, match=says) as raised:
        ask()

    assert not isinstance(raised.value, WorkerUnseenError)


def test_slow_exporter_is_unreachable(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter.hold = threading.Event()
    monkeypatch.setattr(remediator.clients.exporter, "TIMEOUT_S", 0.1)
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}")

    with pytest.raises(ExporterError, match="is unreachable"):
        client.worker_evidence("w1", host=HOST)

    client.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no url", "http://[::1", "ftp://127.0.0.1"])
def test_missing_exporter_is_unreachable(url: str) -> None:
    client = ExporterClient(url)

    with pytest.raises(ExporterError, match="is unreachable"):
        client.worker_evidence("w1", host=HOST)

    client.close()


def test_evidence_of_a_server_is_returned(exporter: Exporter) -> None:
    exporter.body = facts.render(server())
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}")

    assert client.container_evidence("c1", host=HOST) == server()

    asked = urlsplit(exporter.asked[0])
    assert (asked.path, parse_qs(asked.query)) == ("/evidence", {"container": ["c1"]})
    client.close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(503, "no recent sample of this host\n", "returned 503: no recent sample", id="no recent sample"),
        pytest.param(404, "no such page\n", "returned 404", id="exporter without servers"),
        pytest.param(200, facts.render(evidence()), "lacks 'probe'", id="facts of a worker"),
        pytest.param(200, facts.render(server(host="box2")), "returned box2/c1 for box1/c1", id="another host"),
        pytest.param(200, facts.render(server(container="c2")), "returned box1/c2 for box1/c1", id="another container"),
    ],
)
def test_invalid_evidence_of_a_server_is_an_error(exporter: Exporter, status: int, body: str, says: str) -> None:
    exporter.status, exporter.body = status, body
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}")

    with pytest.raises(ExporterError, match=says):
        client.container_evidence("c1", host=HOST)

    client.close()


ALIVE = 'gpuwarden_worker_alive{container="a",worker="a"} 1.0\n'


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("", 0),
        (ALIVE + 'gpuwarden_worker_alive{container="b",worker="b"} 1.0\n', 2),
        (ALIVE + 'gpuwarden_worker_alive{container="a",worker="b"} 1.0\n', 1),
        (ALIVE + 'gpuwarden_worker_alive{container="b",worker="b"} 0.0\n', 1),
        (ALIVE + 'gpuwarden_worker_alive{container="",worker="b"} 1.0\n', 2),
        (ALIVE + 'gpuwarden_server_info{container="b"} 1.0\n', 2),
        ('gpuwarden_worker_info{container="a",worker="a"} 1.0\n', 0),
    ],
    ids=[
        "none",
        "two containers",
        "two workers in a container",
        "one dead worker",
        "a worker without a container",
        "a server",
        "no liveness",
    ],
)
def test_workers_and_servers_are_counted_on_the_metrics_page(exporter: Exporter, page: str, count: int) -> None:
    exporter.body = page
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}")

    assert client.list_targets().containers == count

    assert exporter.asked == ["/metrics"]
    client.close()


def test_count_without_a_valid_page_is_an_error(exporter: Exporter) -> None:
    client = ExporterClient(f"http://127.0.0.1:{exporter.server_port}")
    for status, body, says in (
        (503, "no recent sample", "returned 503: no recent sample"),
        (200, "a{b", "invalid metrics page"),
    ):
        exporter.status, exporter.body = status, body
        with pytest.raises(ExporterError, match=says):
            client.list_targets()
    client.close()

    unreachable = ExporterClient("http://127.0.0.1:1")
    with pytest.raises(ExporterError, match="is unreachable"):
        unreachable.list_targets()
    unreachable.close()


# --- an exporter with a web configuration


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def guarded(tmp_path: Path, ours: Authority) -> Iterator[int]:
    """The port of an exporter that requires TLS, a client certificate and a password."""
    config = tmp_path / "web.yml"
    requires = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(ours.own.cert)}
    config.write_text(tls(ours, **requires) + users(remediator="correct horse"))
    with served(live(host.sighting()), web_config_file=config) as port:
        yield port


def ask_exporter(url: str, access: ExporterAuth) -> facts.WorkerFacts:
    with closing(ExporterClient(url, access)) as client:
        return client.worker_evidence("w0", host="box-1")


def test_exporter_behind_tls_and_a_password_is_read(guarded: int, ours: Authority, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("remediator:correct horse\n")
    whole = ExporterAuth(
        ca_file=ours.own.cert, cert_file=ours.client.cert, key_file=ours.client.key, basic_auth_file=secret,
        server_name="box-1.test",
    )  # fmt: skip

    assert ask_exporter(f"https://127.0.0.1:{guarded}", whole).worker == "w0"
    with closing(ExporterClient(f"https://127.0.0.1:{guarded}", whole)) as client:
        assert client.list_targets().containers == 1
        secret.write_text("remediator:another\n")
        with pytest.raises(ExporterError, match="returned 401"):
            client.list_targets()
        secret.unlink()
        with pytest.raises(ExporterError, match="secret cannot be read"):
            client.worker_evidence("w0", host="box-1")
        secret.write_text("remediator:correct horse\n")
        assert client.list_targets().containers == 1
    for lacking, says in (
        ({"cert_file": None, "key_file": None}, "is unreachable"),
        ({"ca_file": None}, "CERTIFICATE_VERIFY_FAILED"),
        ({"server_name": "box-2.test"}, "not valid for 'box-2.test'"),
        ({"basic_auth_file": None}, "returned 401"),
    ):
        with pytest.raises(ExporterError, match=says):
            ask_exporter(f"https://127.0.0.1:{guarded}", replace(whole, **lacking))


def test_renewed_certificates_are_used(tmp_path: Path, ours: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    said = LogCapture()
    monkeypatch.setattr(remediator.clients.exporter, "log", structlog.wrap_logger(None, processors=[said]))
    another = authority(tmp_path / "another")
    names = ("ca.pem", "cert.pem", "key.pem")
    ca, cert, key = (tmp_path / name for name in names)

    def renew(path: Path, by: Path) -> None:
        shutil.copy(by, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def requires(by: Authority) -> str:
        return tls(by, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(by.own.cert))

    for path, by in ((ca, ours.own.cert), (cert, ours.client.cert), (key, ours.client.key)):
        renew(path, by)
    config = tmp_path / "web.yml"
    config.write_text(requires(ours))
    access = ExporterAuth(ca_file=ca, cert_file=cert, key_file=key)

    with (
        served(live(host.sighting()), web_config_file=config) as port,
        closing(ExporterClient(f"https://127.0.0.1:{port}", access)) as client,
    ):
        renew(cert, another.client.cert)
        assert [client.list_targets().containers, client.list_targets().containers] == [
            1,
            1,
        ]  # a certificate without its key is not used
        renew(key, another.client.key)
        renew(ca, another.own.cert)
        config.write_text(requires(another))
        assert client.list_targets().containers == 1
        ca.unlink()
        assert client.list_targets().containers == 1

    failed, done = "certificate reload failed, old certificates in use", "certificates reloaded"
    assert [each["event"] for each in said.entries] == [failed, done, failed]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "must have one line"),
        ("hunter2", "must have one line"),
        (":hunter2", "must have one line"),
        ("a:hunter2\nc:d", "must have one line"),
    ],
)
def test_bad_password_file_is_refused_at_the_start(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "secret").write_text(line)

    with pytest.raises(GpuwardenError, match=says) as raised:
        ExporterClient("http://127.0.0.1:1", ExporterAuth(basic_auth_file=tmp_path / "secret"))

    assert "hunter2" not in str(raised.value)


def test_invalid_certificate_is_refused_at_the_start(tmp_path: Path, ours: Authority) -> None:
    for broken in (
        ExporterAuth(ca_file=tmp_path / "none.pem"),
        ExporterAuth(ca_file=ours.own.key),
        ExporterAuth(cert_file=ours.client.cert, key_file=ours.server.key),
    ):
        with pytest.raises(GpuwardenError, match="invalid TLS files for the exporter"):
            ExporterClient("https://127.0.0.1:1", broken)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"exporter_cert_file": "a"}, "or neither", id="certificate without its key"),
        pytest.param({"exporter_ca_file": "a"}, "need --exporter https", id="CA file for plain HTTP"),
    ],
)
def test_settings_without_effect_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ExecuteSettings(ledger="sqlite:////x", queue_db="sqlite:////y", **options)  # type: ignore[arg-type]


@pytest.mark.behaviour("C1")
def test_memory_of_each_gpu_is_known_unless_a_gpu_is_lost() -> None:
    cards = host.gpus(host.gpu(0, memory_size_bytes=15360 * 2**20), host.gpu(1, memory_size_bytes=None), host.gpu(2))
    snapshot = live(gpus=cards, gpu_lost_s={"GPU-0": 0.0, "GPU-2": 5.0, "GPU-3": 60.0})
    with served(snapshot) as port, closing(ExporterClient(f"http://127.0.0.1:{port}")) as client:
        found = client.gpu_sizes()

    assert found == {"GPU-0": 15360 * 2**20, "GPU-1": None, "GPU-2": None, "GPU-3": None}


@pytest.mark.behaviour("C1")
def test_mig_instances_count_instead_of_their_gpu() -> None:
    instances = [
        host.gpu(
            uuid=f"MIG-{each}",
            memory_size_bytes=5 * 2**30,
            mig=MigInstance(parent="GPU-0", number=each, gpu_instance=each, compute_instance=0),
        )
        for each in (1, 2)
    ]
    cards = host.gpus(host.gpu(0, memory_size_bytes=11 * 2**30), *instances, host.gpu(3, memory_size_bytes=8 * 2**30))
    with served(live(gpus=cards)) as port, closing(ExporterClient(f"http://127.0.0.1:{port}")) as client:
        found = client.gpu_sizes()

    assert found == {"MIG-1": 5 * 2**30, "MIG-2": 5 * 2**30, "GPU-3": 8 * 2**30}


@pytest.mark.behaviour("C1")
def test_failed_source_of_gpus_is_not_a_host_without_gpus() -> None:
    failed = SourceHealth(source="drm", success=False, duration_s=0.1, message="as the test says")
    with (
        served(live(sources=(failed,))) as port,
        closing(ExporterClient(f"http://127.0.0.1:{port}")) as client,
        pytest.raises(ExporterError, match="cannot list the GPUs"),
    ):
        client.gpu_sizes()


def test_health_of_a_gpu_is_its_loss_and_its_fatal_xids() -> None:
    cards = host.gpus(host.gpu(0), host.gpu(1))
    drivers = {"gpu": DriverHealth(xids={("GPU-0", 79): 1, ("GPU-0", 31): 2, ("GPU-1", 31): 1})}
    snapshot = live(gpus=cards, gpu_lost_s={"GPU-0": 5.0, "GPU-1": 0.0, "GPU-2": 60.0}, drivers=drivers)
    with served(snapshot) as port, closing(ExporterClient(f"http://127.0.0.1:{port}")) as client:
        found = [client.gpu_health(f"GPU-{number}") for number in range(4)]

    assert all(each.sample_age_s < 5 for each in found)
    assert [replace(each, sample_age_s=0.0) for each in found] == [
        GpuHealth(listed=True, lost_s=5.0, xids=("79",), sample_age_s=0.0),
        GpuHealth(listed=True, lost_s=0.0, xids=(), sample_age_s=0.0),
        GpuHealth(listed=False, lost_s=60.0, xids=(), sample_age_s=0.0),
        GpuHealth(listed=False, lost_s=0.0, xids=(), sample_age_s=0.0),
    ]
