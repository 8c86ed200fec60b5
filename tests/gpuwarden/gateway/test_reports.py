"""Reports of hosts at the central gateway: what is kept, published and refused."""

import gzip
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuwarden.gateway import report_page
from gpuwarden.gateway.app import RefusedError, parsed
from gpuwarden.gateway.report_page import LINE_MAX, PAGE_MAX_BYTES, SERIES_MAX, published, text_page
from gpuwarden.gateway.reports import FRESH_S, OPEN_MAX
from gpuwarden.queue import JobStore
from gpuwarden.queue.hosts.reports import HostReport, Kind
from gpuwarden.queue.hosts.silence import SeenHost
from gpuwarden.queue.hosts.tokens import Scope
from tests.gpuwarden.gateway.builders import CentralDoor, described, documented
from tests.gpuwarden.queue.builders import NOW
from tests.gpuwarden.worker.builders import Spawn
from tests.waiting import eventually

INFO: Final = 'gpuwarden_exporter_info{nodename="box1",version="1"} 1.0\n'
PAGE: Final = f"""# HELP gpuwarden_gpu_utilization_ratio Utilization.
# TYPE gpuwarden_gpu_utilization_ratio gauge
gpuwarden_gpu_utilization_ratio{{gpu="GPU-\\"0\\""}} NaN
process_open_fds 12.0
gpuwarden_remediator_host_lost_after_seconds 1e9
{INFO}"""
OURS: Final = 'host="box1",instance="box1",job="gpuwarden-exporter"'

INDEXED: Final = OURS.replace(",instance", ',index="0",instance')
SHELL_CLIENT: Final = Path(__file__).parent / "client.sh"


@pytest.fixture
def central(spawn: Spawn, tmp_path: Path, url: str) -> CentralDoor:
    return CentralDoor(spawn, tmp_path, url)


@pytest.fixture
def token(store: JobStore) -> str:
    return store.host_tokens.enrol("box1", now=store.now())


# --- what is published


def test_metrics_of_a_central_gateway_are_as_documented(central: CentralDoor) -> None:
    its = documented()
    del its["gpuwarden_gateway_sockets"]

    assert described(central.get("/metrics")) == its


@pytest.mark.both_databases
@pytest.mark.behaviour("D2")
@pytest.mark.behaviour("D9")
def test_page_of_a_host_is_published_with_the_tokens_host(central: CentralDoor, token: str) -> None:
    """Also by a gateway that was restarted, and only with the series of an exporter."""
    assert central.report(PAGE, token).status == 200

    central.process.kill()
    central.process.wait()
    central.start()

    assert central.published() == {
        f'gpuwarden_gpu_utilization_ratio{{gpu="GPU-\\"0\\"",{OURS}}} NaN',
        f'gpuwarden_exporter_info{{{OURS},nodename="box1",version="1"}} 1.0',
        f"up{{{OURS}}} 1.0",
    }


@pytest.mark.both_databases
@pytest.mark.behaviour("D3")
def test_newest_report_counts_and_an_old_one_leaves_its_age(store: JobStore) -> None:
    """Ages are by the receiver's clock, and a revoked host has none."""
    store.host_tokens.enrol("box1", now=NOW)
    store.host_reports.save("box1", Kind.PAGE, b"first", now=NOW)
    store.host_reports.save("box1", Kind.PAGE, b"second", now=NOW + 1)

    def newest(after_s: float) -> list[HostReport]:
        return list(store.host_reports.newest(fresh_s=FRESH_S, now=NOW + 1 + after_s))

    assert newest(FRESH_S) == [HostReport(host="box1", kind=Kind.PAGE, age_s=FRESH_S, page=b"second")]
    assert newest(FRESH_S + 1) == [HostReport(host="box1", kind=Kind.PAGE, age_s=FRESH_S + 1, page=None)]
    store.host_tokens.revoke("box1", now=NOW + 2)
    assert newest(2) == []


def lines(reports: list[HostReport], *hosts: SeenHost) -> list[str]:
    """The published lines."""
    return b"".join(published(reports, hosts, NOW)).decode().splitlines()


def test_silent_host_is_published_as_down() -> None:
    old = HostReport(host="box1", kind=Kind.PAGE, age_s=80.0, page=None)

    assert lines([old]) == [
        f'gpuwarden_report_age_seconds{{{OURS},report="page"}} 80.0',
        f"up{{{OURS}}} 0.0",
    ]


@pytest.mark.behaviour("D4")
@pytest.mark.parametrize(("lost_at", "up"), [(NOW, 0.0), (None, 1.0)], ids=["lost", "silent"])
def test_last_report_of_a_lost_host_is_left_out(lost_at: float | None, up: float) -> None:
    last = HostReport(host="box1", kind=Kind.PAGE, age_s=30.0, page=gzip.compress(b"gpuwarden_x{} 1\n"))

    found = lines([last], SeenHost(host="box1", heard_at=NOW - 30, lost_at=lost_at))

    assert ("gpuwarden_x{} 1" in found) == bool(up)
    assert f"up{{{OURS}}} {up}" in found


@pytest.mark.both_databases
@pytest.mark.behaviour("D3")
def test_hosts_are_published_with_their_silence(central: CentralDoor, store: JobStore, token: str) -> None:
    assert central.report(PAGE, token).status == 200
    (heard,) = store.seen_hosts.rows()
    assert abs(store.now() - heard.heard_at) < 10

    page = lines([], SeenHost(host="box1", heard_at=NOW - 201, lost_at=NOW))

    its = [line for line in central.get("/reports").splitlines() if line.startswith("gpuwarden_gateway_host_")]
    assert its[0] == f"gpuwarden_gateway_host_lost{{{OURS}}} 0.0"
    assert its[1].startswith(f"gpuwarden_gateway_host_silent_seconds{{{OURS}}} ")
    assert page == [
        f"gpuwarden_gateway_host_lost{{{OURS}}} 1.0",
        f"gpuwarden_gateway_host_silent_seconds{{{OURS}}} 201.0",
    ]


def test_scrape_takes_the_memory_of_a_few_hosts_and_fails_if_it_is_not_whole(
    central: CentralDoor, store: JobStore
) -> None:
    page = gzip.compress(b"gpuwarden_x{} 1\n" * (PAGE_MAX_BYTES // 16), compresslevel=1)
    for number in range(40):
        store.host_tokens.enrol(f"box{number}", now=store.now())
        store.host_reports.save(f"box{number}", Kind.PAGE, page, now=store.now() + 60)
    status = Path(f"/proc/{central.process.pid}/status")

    def most_kb() -> int:
        return int(status.read_text().partition("VmHWM:")[2].split()[0])

    central.get("/metrics")
    before_kb = most_kb()

    assert len(central.get("/reports")) > 40 * (PAGE_MAX_BYTES - 16)
    assert most_kb() - before_kb < 50_000

    store.host_reports.save("box39", Kind.PAGE, b"no gzip", now=store.now() + 60)
    with pytest.raises(http.client.IncompleteRead):
        central.get("/reports")


def test_page_of_an_exporter_replaces_reports_in_json() -> None:
    """A host with both would have its GPUs and tasks twice."""
    pages = {kind: gzip.compress(f"gpuwarden_{kind}{{}} 1\n".encode()) for kind in Kind}
    both = [HostReport(host="box1", kind=kind, age_s=1.0, page=page) for kind, page in pages.items()]

    def names(reports: list[HostReport]) -> set[str]:
        return {line.partition("{")[0] for line in lines(reports)}

    assert names(both) == {"gpuwarden_report_age_seconds", "up", "gpuwarden_page"}
    assert names(both[1:]) == {"gpuwarden_report_age_seconds", "up", "gpuwarden_gpu", "gpuwarden_tasks"}


@pytest.mark.behaviour("D2")
def test_numbers_may_be_strings_and_the_senders_clock_does_not_count(central: CentralDoor, token: str) -> None:
    tasks = [{"running_log_id": "123", "remote_pid": "4567", "remote_pgid": 4567}, {"running_log_id": 124}]
    gpu = {"uuid": "GPU-0", "index": 0, "name": "H100", "utilization": "37", "memory_total": 81559, "memory_used": "2"}

    reply = central.post("/api/v1/report_tasks/", {"token": token, "tasks": tasks, "timestamp": "1734220000"})
    assert reply.status == 200
    assert central.post("/api/v1/report_gpu/", {"gpus": [gpu], "timestamp": None}, token).status == 200

    assert central.published() == {
        f'gpuwarden_task_info{{{OURS},pgid="4567",pid="4567",task="123"}} 1.0',
        f'gpuwarden_task_info{{{OURS},pgid="",pid="",task="124"}} 1.0',
        f'gpuwarden_gpu_info{{attribution="device",gpu="GPU-0",{INDEXED},name="H100",source="report"}} 1.0',
        f'gpuwarden_gpu_utilization_ratio{{gpu="GPU-0",{OURS}}} 0.37',
        f'gpuwarden_gpu_memory_size_bytes{{gpu="GPU-0",{OURS}}} {81559 * 2.0**20!r}',
        f'gpuwarden_gpu_memory_used_bytes{{gpu="GPU-0",{OURS}}} {2 * 2.0**20!r}',
        f"up{{{OURS}}} 1.0",
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.behaviour("D1")
@pytest.mark.behaviour("D2")
def test_shell_script_of_ten_lines_can_report(central: CentralDoor, token: str, tmp_path: Path) -> None:
    """Written from the documented format of the source."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU-0, 0, NVIDIA H100, 37, 81559, 2'\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    folder = tmp_path / "tasks"
    folder.mkdir()
    file = '{"running_log_id":123,"remote_pid":"4567","remote_pgid":"4567","timestamp":"1734220000"}'
    (folder / "123.json").write_text(file)

    client: list[str | Path] = ["sh", SHELL_CLIENT, central.url, token, folder]
    subprocess.run(client, check=True, env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, timeout=30)

    assert len(SHELL_CLIENT.read_text().splitlines()) == 10
    found = central.published()
    assert f'gpuwarden_task_info{{{OURS},pgid="4567",pid="4567",task="123"}} 1.0' in found
    assert f'gpuwarden_gpu_utilization_ratio{{gpu="GPU-0",{OURS}}} 0.37' in found


# --- what is refused


def test_report_without_a_valid_token_is_refused_and_counted(central: CentralDoor, store: JobStore) -> None:
    now = store.now()
    for_queue = store.host_tokens.enrol("box1", scopes=[Scope.QUEUE], now=now)
    revoked = store.host_tokens.enrol("box2", now=now)
    store.host_tokens.revoke("box2", now=now)

    for token in (for_queue, revoked, "wrong", ""):
        assert central.report(PAGE, token).status == 401
        assert central.post("/api/v1/report_tasks/", {"token": token, "tasks": []}).status == 401
    for_reports = store.host_tokens.enrol("box3", scopes=[Scope.REPORTS], now=now)
    assert central.post("/v1/quarantine", {"worker": "w1"}, for_reports).status == 401

    assert central.published() == set()
    assert central.refusals() == {("unknown", "token"): 9.0}


def _page(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines) + INFO


REFUSED: Final[dict[str, tuple[Callable[[CentralDoor, str], Any], int, str]]] = {
    "another host in the page": (lambda door, token: door.report(PAGE.replace("box1", "box2"), token), 403, "host"),
    "another host in a label": (
        lambda door, token: door.report(_page('gpuwarden_gpu_lost{host="box2"} 1'), token),
        403,
        "host",
    ),
    "another host in the header": (lambda door, token: door.report(PAGE, token, Gpuwarden_Host="box2"), 403, "host"),
    "another host in JSON": (
        lambda door, token: door.post("/api/v1/report_gpu/", {"token": token, "host": "box2"}),
        403,
        "host",
    ),
    "100 MB": (lambda door, token: door.post("/api/v1/report", b"#" * 100_000_000, token), 413, "size"),
    "gzip of 100 MB": (lambda door, token: door.report("#" * 100_000_000, token), 413, "size"),
    "JSON of 1 MB": (lambda door, token: door.post("/api/v1/report_gpu/", b" " * 1_000_000, token), 413, "size"),
    "half of gzip": (
        lambda door, token: door.post(
            "/api/v1/report", gzip.compress(PAGE.encode())[:-9], token, Content_Encoding="gzip"
        ),
        400,
        "cut",
    ),
    "half a page": (lambda door, token: door.report(PAGE[: -len(INFO)], token), 422, "cut"),
    "half a line": (lambda door, token: door.report(PAGE[:-1], token), 422, "cut"),
    "another version": (lambda door, token: door.post("/api/v0/report", PAGE, token), 404, "version"),
    "another format": (
        lambda door, token: door.report(PAGE, token, Content_Type="application/openmetrics-text"),
        415,
        "version",
    ),
    "no gzip": (lambda door, token: door.post("/api/v1/report", PAGE, token, Content_Encoding="gzip"), 400, "invalid"),
    "no page": (lambda door, token: door.report(_page("gpuwarden_gpu_lost one"), token), 422, "invalid"),
    "a label that ends its line": (
        lambda door, token: door.report(
            _page('gpuwarden_gpu_lost{"x=\\"1\\"} 1\\ngpuwarden_gpu_lost{host=\\"box2"="1"} 1'), token
        ),
        422,
        "invalid",
    ),
    "no UTF-8": (lambda door, token: door.post("/api/v1/report", b"\xff", token), 422, "invalid"),
    "no JSON": (lambda door, token: door.post("/api/v1/report_tasks/", "[" * 10_000, token), 422, "invalid"),
    "no number": (
        lambda door, token: door.post("/api/v1/report_tasks/", {"token": token, "tasks": [{"running_log_id": "x"}]}),
        422,
        "invalid",
    ),
}


def test_hostile_reports_are_refused_and_counted(central: CentralDoor, token: str) -> None:
    """And the gateway answers the next one."""
    for what, (send, status, kind) in REFUSED.items():
        try:
            reply = send(central, token)
        except (BrokenPipeError, ConnectionResetError):  # refused before the whole body was sent
            assert what == "100 MB"
            continue
        assert (reply.status, reply.kind) == (status, kind), what

    assert central.published() == set()
    assert sum(central.refusals().values()) == len(REFUSED)
    assert {reason for _, reason in central.refusals()} == {"host", "size", "cut", "version", "invalid"}


def test_slow_callers_without_a_token_take_no_place_of_others(central: CentralDoor, token: str) -> None:
    with ExitStack() as stack:
        for _ in range(2 * OPEN_MAX):
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", central.port)))
            caller.sendall(b"POST /api/v1/report_gpu/ HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
        eventually(lambda: ("unknown", "busy") in central.refusals(), "they take all their places")

        assert central.report(PAGE, token).status == 200


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2), st.text(max_size=9))
def test_no_label_can_add_a_line(labels: dict[str, str], uuid: str) -> None:
    """Each line that is published is a series of the token's host."""
    quoted = ",".join(
        f"{json.dumps(name, ensure_ascii=False)}={json.dumps(its, ensure_ascii=False)}" for name, its in labels.items()
    )
    gpu = json.dumps({"gpus": [{"uuid": uuid, "name": uuid}]}).encode(errors="surrogatepass")
    makes: dict[Kind, Callable[[], bytes]] = {
        Kind.GPU: lambda: report_page.json_page(parsed(report_page.GpuReport, gpu), "box1"),
        Kind.TASKS: lambda: text_page(_page(f"gpuwarden_x{{{quoted}}} 1").encode(), "box1", packed=False),
    }
    pages = []
    for kind, make in makes.items():
        with suppress(RefusedError):
            pages.append(HostReport(host="box1", kind=kind, age_s=1.0, page=make()))
    for line in b"".join(published(pages, [], 0.0)).decode().split("\n")[:-1]:
        (family,) = text_string_to_metric_families(f"{line}\n")
        assert [each.labels["host"] for each in family.samples] == ["box1"], line


def test_report_of_a_host_that_hangs_up_is_refused_and_counted(central: CentralDoor, token: str) -> None:
    with socket.create_connection(("127.0.0.1", central.port)) as caller:
        head = (
            f"POST /api/v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 999\r\n\r\n"
        )
        caller.sendall(head.encode() + PAGE.encode())

    eventually(lambda: central.refusals() == {("box1", "cut"): 1.0}, "it is counted")
    assert central.report(PAGE, token).status == 200


def test_host_that_reports_too_often_is_refused(central: CentralDoor, token: str) -> None:
    replies = [central.post("/api/v1/report_gpu/", {"token": token, "gpus": []}).status for _ in range(30)]

    assert set(replies) == {200, 429}


@pytest.mark.parametrize(
    "lines",
    [[f'gpuwarden_gpu_lost{{a="{number}"}} 1' for number in range(SERIES_MAX)], ["gpuwarden_a" + " " * LINE_MAX + "1"]],
)
def test_page_has_bounds(lines: list[str]) -> None:
    with pytest.raises(RefusedError, match=r"series|characters"):
        text_page(_page(*lines).encode(), "box1", packed=False)
    assert len("\n".join(lines)) < PAGE_MAX_BYTES


def test_hosts_own_labels_of_the_target_are_replaced() -> None:
    page = text_page(_page('gpuwarden_gpu_lost{job="x",instance="y",host="box1"} 1').encode(), "box1", packed=False)

    assert f"gpuwarden_gpu_lost{{{OURS}}} 1.0" in gzip.decompress(page).decode().splitlines()


def test_task_that_is_named_twice_counts_once() -> None:
    body = json.dumps({"tasks": [{"running_log_id": 1}, {"running_log_id": "1", "remote_pid": 7}]}).encode()
    page = report_page.json_page(parsed(report_page.TasksReport, body), "box1")

    assert gzip.decompress(page).decode() == f'gpuwarden_task_info{{{OURS},pgid="",pid="7",task="1"}} 1.0\n'
