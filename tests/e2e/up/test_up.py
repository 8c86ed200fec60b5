"""`gpuwarden up`: the whole chain until it is told to stop, kept in one folder, whatever is killed meanwhile."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.standalone import debian_packages
from deploy.standalone.docker_socket import NoEngine, reachable_engine
from deploy.standalone.stack import CHECKOUT, PARTS, PORTS
from deploy.standalone.up import command
from testbed.docker_engine import Engine, docker_engine
from testbed.private_engine import EnginePaths
from tests.e2e.running import READY, Run, ask, free_ports, runbooks_that_do_not_open, runs, up
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]


def test_it_answers_everywhere_stops_cleanly_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ports = free_ports()
    with up(tmp_path, ports, "--host", "box1") as run:
        run.ready()
        eventually(lambda: all(map(run.answers, PORTS)), "all of them answer", log=run.said)
        assert "dry run" in run.said()
        armed = re.findall(r"^gpuwarden_remediator_armed.* (\S+)$", run.get("remediator", "/metrics"), re.MULTILINE)
        assert set(armed) == {"0.0"}
        beat = r"^gpuwarden_remediator_watchdog_timestamp_seconds \d"
        eventually(lambda: re.search(beat, run.get("remediator", "/metrics"), re.MULTILINE), "the watchdog beats")
        assert run.stop(signal.SIGINT) == 0
    token = run.data / "token"
    kept = token.read_text()
    assert (token.stat().st_mode & 0o777, run.data.stat().st_mode & 0o777) == (0o600, 0o700)

    with up(tmp_path, ports) as run:
        run.ready()
        assert "host box1" in run.said()
        assert token.read_text() == kept
        assert run.stop() == 0
    for port in ports.values():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_what_it_is_told_of_podman_and_services_its_parts_are_told(tmp_path: Path) -> None:
    podman = f"unix://{tmp_path}/podman.sock"
    told = ("--podman", podman, "--systemd-unit", "gpu@*.service,other.service", "--systemd-unit", "third.service")
    with up(tmp_path, free_ports(), "--host", "box1", *told, "--restart-timeout-s", "900") as run:
        run.ready()

        assert f"Podman        {podman}" in run.said()
        assert "services      gpu@*.service, other.service, third.service" in run.said()
        log = (run.data / "log" / "execute.log").read_text()
        (ready,) = [json.loads(line) for line in log.splitlines() if "executor ready" in line]
        assert ready["actuators"] == ["podman", "systemd"]
        executor = Path(f"/proc/{run.pids()['execute']}/cmdline").read_text().split("\0")
        assert "--restart-timeout-s=900" in executor
        looks = r'gpuwarden_collector_success\{collector="source_podman"\} 0.0'
        eventually(lambda: re.search(looks, run.get("exporter", "/metrics")), "it looks for Podman")
        assert run.stop() == 0


def test_a_pattern_of_all_services_is_refused(tmp_path: Path) -> None:
    with up(tmp_path, free_ports(), "--systemd-unit", "*.service") as run:
        assert run.process.wait(timeout=90) == 2

    assert "'*.service' names no services: wanted are names as 'gpu-worker@*.service'" in run.said()


@pytest.mark.parametrize("given", ["59", "86401", "nan", "soon"])
def test_a_bad_bound_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--data-dir", str(tmp_path / "data"), "--restart-timeout-s", given])

    assert ended.value.code == 2
    assert f"--restart-timeout-s: invalid time '{given}': expected 60 to 86400 seconds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_told_to_stop_while_it_starts_it_stops(tmp_path: Path) -> None:
    for number in range(5):  # a busy machine may be told to only when it is ready
        (folder := tmp_path / str(number)).mkdir()
        with up(folder, free_ports()) as run:
            eventually((run.data / "parts.json").exists, "the first part is started", log=run.said)

            assert run.stop() == 0
            assert not any(runs(pid) for pid in run.pids().values())
        if READY not in run.said():
            break

    assert READY not in run.said()
    assert "stopped during the start" in run.said()


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    ports = free_ports()
    with socket.create_server(("127.0.0.1", ports["prometheus"])), up(tmp_path, ports) as run:
        assert run.process.wait(timeout=90) == 1

    assert f"port {ports['prometheus']} of prometheus cannot be used" in run.said()
    assert "systemctl disable --now prometheus" in run.said()
    assert "--prometheus-port" in run.said()


def test_a_second_one_on_the_same_data_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with up(tmp_path, free_ports()) as first:
        first.ready()
        with up(tmp_path / "second", free_ports(), data=first.data) as second:
            assert second.process.wait(timeout=90) == 1

        assert f"another `gpuwarden up` (pid {first.process.pid}) runs on {first.data}" in second.said()
        eventually(lambda: all(map(first.answers, PORTS)), "all of the first one's answer", log=first.said)


def test_killed_at_any_moment_it_takes_its_parts_along_and_goes_on_with_all_it_had(tmp_path: Path) -> None:
    ports = free_ports()
    with up(tmp_path, ports, "--host", "box1") as run:
        run.ready()
        ask("job", "submit", "--queue-db", f"sqlite:///{run.data}/queue/queue.db", "--model", "kept")
        episode = eventually(lambda: run.accuse() and episodes(run), "an alert opens an episode", log=run.said)
        sample = eventually(lambda: run.sample(time.time()), "a scrape is stored", within_s=60)
        left = run.pids()
        run.process.kill()
        run.process.wait()
    eventually(lambda: not any(runs(pid) for pid in left.values()), "its parts end too")

    for after_s in (0.2, 0.8, 1.6):
        with up(tmp_path, ports) as run, pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(timeout=after_s)
    with up(tmp_path, ports) as run:
        run.ready()

        assert "host box1" in run.said()
        assert episodes(run) == episode
        assert '"model": "kept"' in ask("job", "list", "--queue-db", f"sqlite:///{run.data}/queue/queue.db", "--json")
        assert run.sample(sample) == sample
        assert run.stop() == 0


def test_a_part_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with up(tmp_path, free_ports(), "--host", "box1") as run:
        run.ready()
        before = run.pids()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)

        for part in PARTS:
            run.says(f"up: {part} restarted")
            run.says(f"up: {part} exited (killed by SIGKILL)")
        after = run.pids()
        assert not set(after.values()) & set(before.values())
        eventually(lambda: all(map(run.answers, PORTS)), "all of them answer", log=run.said)
        assert eventually(lambda: run.accuse() and episodes(run), "an alert still arrives", log=run.said)
        assert run.stop() == 0
    assert not any(runs(pid) for pid in after.values())


def test_docker_may_start_later_stop_and_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start a private Docker engine")
    work = tmp_path / "engine"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{EnginePaths.of(work).socket}")
    assert isinstance(reachable_engine(os.environ), NoEngine)
    with up(tmp_path, free_ports(), docker="auto") as run:
        run.ready()
        assert "no Docker engine" in run.said()
        before = run.pids()

        with docker_engine(work) as engine:
            assert isinstance(engine, Engine)
            eventually(lambda: docker_seen(run) == 1, "it is used", within_s=60, log=run.said)
            assert "found: restarting exporter and execute" in run.said()
        eventually(lambda: docker_seen(run) == 0, "its end is seen", within_s=60, log=run.said)
        with docker_engine(work) as engine:
            eventually(lambda: docker_seen(run) == 1, "it is used again", log=run.said)

        assert "exited (" not in run.said()
        assert {part for part in PARTS if run.pids()[part] != before[part]} == {"exporter", "execute"}
        assert run.stop() == 0


def test_an_installed_package_holds_all_it_needs(tmp_path: Path) -> None:
    site = installed(tmp_path)
    env = {**debian_packages.env_for_parts(), "PYTHONPATH": str(site)}
    with up(tmp_path, free_ports(), command=["-m", "gpuwarden", "up"], cwd=tmp_path, env=env) as run:
        run.ready()
        rules = json.loads(run.get("prometheus", "/api/v1/rules"))["data"]["groups"]
        assert {Path(group["file"]).parent for group in rules} == {run.data / "rules"}
        shipped = {file.name for file in (site / "deploy" / "alerts").iterdir()}
        assert {Path(group["file"]).name for group in rules} == shipped
        assert runbooks_that_do_not_open(rules) == []
        assert run.stop() == 0

    bare = {**env, "PATH": str(tmp_path), "LD_LIBRARY_PATH": ""}
    with up(tmp_path, free_ports(), command=["-m", "gpuwarden", "up"], cwd=tmp_path, env=bare) as run:
        assert run.process.wait(timeout=90) == 1
    assert "apt-get install prometheus\n" in run.said()
    assert "apt-get install prometheus-alertmanager\n" in run.said()
    assert "--fetch-parts" in run.said()


def episodes(run: Run) -> list[tuple[int, str]]:
    """Which episodes the ledger has."""
    told = ask("ledger", "--ledger", f"sqlite:///{run.data}/ledger/ledger.db", "list", "--json")
    rows: list[dict[str, Any]] = [json.loads(line) for line in told.splitlines()]
    return [(row["episode_id"], row["worker"]) for row in rows]


def docker_seen(run: Run) -> float | None:
    """Whether the exporter's Docker source did its work; None where it has none."""
    try:
        found = re.search(
            r'gpuwarden_collector_success\{collector="source_docker"\} (\S+)', run.get("exporter", "/metrics")
        )
    except httpx.HTTPError:
        return None
    return float(found[1]) if found else None


def installed(folder: Path) -> Path:
    """The package as pip unpacks its wheel."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=CHECKOUT, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"
