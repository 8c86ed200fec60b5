"""Other exporters see the whole host, and their series are counted."""

import gzip
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bench.exporter import peers, turns
from bench.exporter.host import MARK, Box, Crowd
from bench.exporter.peers import Peer, PeerMissing, Sign, process_groups, running
from bench.exporter.subject import Page, Subject
from bench.exporter.turns import Found, Turns, compared, rotated
from bench.figures import BenchError, Place
from tests.nvml import driver as nvidia

NVITOP = next(peer for peer in peers.PEERS if peer.name == "nvitop-exporter")
PAGE = b"""# HELP node_cpu_seconds_total Seconds the CPUs spent in each mode.
# TYPE node_cpu_seconds_total counter
node_cpu_seconds_total{cpu="0",mode="idle"} 1391.87
node_cpu_seconds_total{cpu="1",mode="idle"} 1393.02

node_load1 0.21
# EOF
"""
HYBRID = """9:name=systemd:/
4:memory:/gpuwarden-bench-7/00ab
2:cpuacct:/
0::/
"""


class Idle(Crowd):
    """A host with one container, which holds this process."""

    def __init__(self, driver: nvidia.Driver) -> None:
        super().__init__(driver, [Path("/nowhere")])
        self.containers.append(Box(number=0, id="00ab", pids=(os.getpid(),), gpus=(0, 1)))
        self.update_driver()


@pytest.mark.needs_compiler
def test_nvitop_exporter_reads_all_of_the_fake_driver(tmp_path: Path) -> None:
    crowd = Idle(nvidia.Driver(nvidia.build(tmp_path), tmp_path / "nvml.script"))

    with running(NVITOP, crowd, tmp_path / "peer") as subject:
        found = subject.page()

    lines = dict(line.rsplit(b" ", 1) for line in found.text.splitlines() if not line.startswith(b"#"))
    of_gpu_0 = {name.partition(b"{")[0]: value for name, value in lines.items() if b'uuid="GPU-0"' in name}
    assert of_gpu_0[b"gpu_temperature_C"] == b"61.0"
    assert of_gpu_0[b"gpu_power_limit_W"] == b"700.0"
    assert of_gpu_0[b"process_gpu_memory_MiB"] == b"256.0"
    unknown = sorted(name for name, value in of_gpu_0.items() if value == b"NaN")
    assert unknown == [
        b"gpu_fan_speed_Percentage",
        *(f"gpu_nvlink_{kind}_{way}_throughput_MiBps".encode() for kind in ("mean", "total") for way in ("rx", "tx")),
    ], "the GPUs have no fan and no NVLink"
    assert found.count(b"gpu_temperature_C{") == 8
    assert b"FunctionNotFound" not in (tmp_path / "peer" / "log").read_bytes()


def test_series_count_excludes_comments_and_blank_lines() -> None:
    found = Page(text=PAGE, sent=len(PAGE))

    assert found.series == 3
    assert found.count(b"node_cpu_seconds_total{") == 2


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[Subject]:
    """An exporter that answers every scrape with `body`; its pid is ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Subject(pid=os.getpid(), port=server.server_port)
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("sent", [PAGE, gzip.compress(PAGE)], ids=["plain", "packed"])
def test_gzipped_page_is_unpacked(sent: bytes) -> None:
    with serving(sent) as subject:
        found = subject.page()

    assert found == Page(text=PAGE, sent=len(sent))


def test_error_status_is_no_scrape() -> None:
    with serving(b"An error has occurred", 500) as subject:
        assert not subject.sees(b"node_", at_least=0)
        with pytest.raises(BenchError, match=r"answered 500: b'An error has occurred'"):
            subject.fetch()


def test_process_exporter_groups_by_the_cgroup_of_the_container() -> None:
    assert process_groups(HYBRID, "00ab") == (
        f"process_names:\n  - name: \"{{{{index .Cgroups 1}}}}\"\n    comm: [sleep]\n    cmdline: [' {MARK}$']\n"
    )


def test_process_outside_of_the_container_cgroup_is_an_error() -> None:
    with pytest.raises(BenchError, match="no cgroup names container 00ac"):
        process_groups(HYBRID, "00ac")


def test_missing_and_failing_exporters_are_reported(tmp_path: Path) -> None:
    def missing(_crowd: Crowd, _folder: Path, _port: int) -> list[str]:
        raise PeerMissing("pip install it")

    def ends(_crowd: Crowd, _folder: Path, _port: int) -> list[str]:
        return ["sh", "-c", "echo no such option >&2"]

    def sign(_crowd: Crowd) -> Sign:
        return Sign(begin=b"x", at_least=1)

    crowd = Idle(nvidia.Driver(tmp_path / "none.so", tmp_path / "nvml.script"))
    with pytest.raises(PeerMissing), running(Peer(name="a", command=missing, sign=sign), crowd, tmp_path / "a"):
        pass
    with (
        pytest.raises(BenchError, match="b ended before it was ready: no such option"),
        running(Peer(name="b", command=ends, sign=sign), crowd, tmp_path / "b"),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups need root")
@pytest.mark.needs_compiler
def test_missing_exporter_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_crowd: Crowd, _folder: Path, _port: int) -> list[str]:
        raise PeerMissing("pip install it")

    absent = Peer(name="absent", command=missing, sign=lambda _: Sign(begin=b"x", at_least=1))
    monkeypatch.setattr(turns, "PEERS", (absent, NVITOP))
    monkeypatch.setattr("bench.exporter.SCRAPE_EACH_S", 0.1)
    short = Turns(rounds=2, settle_s=0, idle_s=0.1, scrapes=3, scrape_each_s=0.1, watched_s=0.1, containers=2)

    found = {each.what: each for each in turns.measure(Place(name="disk", folder=tmp_path), short)}

    assert [what for what in found if what.startswith("series, ")] == ["series, ours", "series, nvitop-exporter"]
    assert found["one scrape, ours"].count == found["one scrape, nvitop-exporter"].count == 6
    assert found["CPU with a scrape each 5 s, nvitop-exporter"].count == 2
    assert found["processes on this machine, these containers' among them"].median > 8
    said = [line.partition("bench: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "peers, round 1 of 2: ours",
        "peers, round 1 of 2: absent",
        "absent skipped: pip install it",
        "peers, round 1 of 2: nvitop-exporter",
        "peers, round 2 of 2: nvitop-exporter",
        "peers, round 2 of 2: ours",
    ]


def test_each_exporter_is_first_in_one_round() -> None:
    assert [rotated(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_ratios_compare_with_ours() -> None:
    def found(times: float) -> Found:
        each = [2.0 * times, 1.0 * times, 4.0 * times]
        return Found(
            took_ms=each, scrape_cpu_ms=each, idle_percent=each, watched_percent=each, resident_mib=each,
            page_kib=each, series=[100 * times, 101 * times, 100 * times],
        )  # fmt: skip

    lines = {each.what: each for each in compared({"ours": found(1), "other": found(10), "third": found(30)})}

    assert lines["one scrape, ours"].ratio is None
    assert (lines["one scrape, other"].median, lines["one scrape, other"].ratio) == (20, 10)
    assert lines["one scrape, other"].against == "ours"
    assert lines["one scrape, third"].ratio == 30
    assert (lines["one scrape, a series of it, ours"].median, lines["one scrape, a series of it, ours"].unit) == (
        20,
        "µs",
    )
    assert lines["one scrape, a series of it, other"].ratio == 1
    assert lines["CPU with a scrape each 5 s, 1000 series, ours"].median == 20
    assert lines["resident memory, a series, ours"].median == pytest.approx(20.48)


def test_subject_measures_its_process_tree() -> None:
    with socket.socket(), socket.socket():
        subject = Subject(pid=os.getpid(), port=1)
        open_before = subject.descriptors()
        with socket.socket():
            opened = subject.descriptors() - open_before

    assert opened == 1
    assert subject.threads() >= 1
    assert subject.resident_mib() > 5
