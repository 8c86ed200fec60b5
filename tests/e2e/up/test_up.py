"""`gpuwarden up` runs the whole pipeline with its data in one folder, and survives when a process is killed."""

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
from tests.e2e.running import READY, Run, command_of, find_broken_runbooks, free_ports, is_running, run_gpuwarden, up
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]


def test_up_answers_everywhere_stops_cleanly_and_keeps_its_data(tmp_path: Path) -> None:
    """Of a person who configures nothing: init, up, status, doctor, drill."""
    run_gpuwarden("init", str(tmp_path / "files"))
    ports = free_ports()
    with up(tmp_path, ports, "--host", "box1") as run:
        run.ready()
        eventually(lambda: all(map(run.answers, PORTS)), "all parts answer", log=run.output)
        assert "dry run" in run.output()
        eventually(lambda: command_of("status").returncode == 0, "status finds all parts", within_s=30, log=run.output)
        said = command_of("status").stdout
        assert all(f"http://127.0.0.1:{port}" in said for port in ports.values())
        for words in (["doctor"], ["drill"], ["init", str(tmp_path / "files")]):
            done = command_of(*words)
            assert done.returncode == 0, done.stdout + done.stderr
        armed = re.findall(r"^gpuwarden_remediator_armed.* (\S+)$", run.get("remediator", "/metrics"), re.MULTILINE)
        assert set(armed) == {"0.0"}
        beat = r"^gpuwarden_remediator_watchdog_timestamp_seconds \d"
        eventually(
            lambda: re.search(beat, run.get("remediator", "/metrics"), re.MULTILINE), "the watchdog series is updated"
        )
        assert run.stop(signal.SIGINT) == 0
    token = run.data / "token"
    content = token.read_text()
    assert (token.stat().st_mode & 0o777, run.data.stat().st_mode & 0o777) == (0o600, 0o700)

    with up(tmp_path, ports) as run:
        run.ready()
        assert "host box1" in run.output()
        assert token.read_text() == content
        assert run.stop() == 0
    for port in ports.values():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_options_of_podman_and_services_reach_the_parts(tmp_path: Path) -> None:
    podman = f"unix://{tmp_path}/podman.sock"
    options = ("--podman", podman, "--systemd-unit", "gpu@*.service,other.service", "--systemd-unit", "third.service")
    with up(tmp_path, free_ports(), "--host", "box1", *options, "--restart-timeout-s", "900") as run:
        run.ready()

        assert f"Podman        {podman}" in run.output()
        assert "services      gpu@*.service, other.service, third.service" in run.output()
        log = (run.data / "log" / "execute.log").read_text()
        (ready,) = [json.loads(line) for line in log.splitlines() if "executor ready" in line]
        assert ready["actuators"] == ["orphans", "podman", "process", "systemd"]
        executor = Path(f"/proc/{run.pids()['execute']}/cmdline").read_text().split("\0")
        assert "--restart-timeout-s=900" in executor
        looked = r'gpuwarden_collector_success\{collector="source_podman"\} 0.0'
        eventually(lambda: re.search(looked, run.get("exporter", "/metrics")), "the exporter looks for Podman")
        assert run.stop() == 0


def test_pattern_of_all_services_is_refused(tmp_path: Path) -> None:
    with up(tmp_path, free_ports(), "--systemd-unit", "*.service") as run:
        assert run.process.wait(timeout=90) == 2

    assert "'*.service' names no services: wanted are names as 'gpu-worker@*.service'" in run.output()


@pytest.mark.parametrize("given", ["59", "86401", "nan", "soon"])
def test_bad_restart_timeout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--data-dir", str(tmp_path / "data"), "--restart-timeout-s", given])

    assert ended.value.code == 2
    assert f"--restart-timeout-s: invalid time '{given}': expected 60 to 86400 seconds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stop_during_start_stops(tmp_path: Path) -> None:
    for number in range(5):  # on a busy machine the signal may arrive too late
        (folder := tmp_path / str(number)).mkdir()
        with up(folder, free_ports()) as run:
            eventually((run.data / "parts.json").exists, "the first part has started", log=run.output)

            assert run.stop() == 0
            assert not any(is_running(pid) for pid in run.pids().values())
        if READY not in run.output():
            break

    assert READY not in run.output()
    assert "stopped during the start" in run.output()


def test_port_in_use_is_reported_with_an_advice(tmp_path: Path) -> None:
    ports = free_ports()
    with socket.create_server(("127.0.0.1", ports["prometheus"])), up(tmp_path, ports) as run:
        assert run.process.wait(timeout=90) == 1

    assert f"port {ports['prometheus']} of prometheus cannot be used" in run.output()
    assert "systemctl disable --now prometheus" in run.output()
    assert "--prometheus-port" in run.output()


def test_second_up_on_the_same_data_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with up(tmp_path, free_ports()) as first:
        first.ready()
        with up(tmp_path / "second", free_ports(), data=first.data) as second:
            assert second.process.wait(timeout=90) == 1

        assert f"another `gpuwarden up` (pid {first.process.pid}) runs on {first.data}" in second.output()
        eventually(lambda: all(map(first.answers, PORTS)), "all parts of the first `up` answer", log=first.output)


def test_killed_up_ends_its_parts_and_keeps_its_data(tmp_path: Path) -> None:
    ports = free_ports()
    with up(tmp_path, ports, "--host", "box1") as run:
        run.ready()
        run_gpuwarden("job", "submit", "--queue-db", f"sqlite:///{run.data}/queue/queue.db", "--model", "kept")
        episode = eventually(
            lambda: run.post_alert() and read_episodes(run), "an alert opens an episode", log=run.output
        )
        sample = eventually(lambda: run.sample(time.time()), "a scrape is stored", within_s=60)
        parts = run.pids()
        run.process.kill()
        run.process.wait()
    eventually(lambda: not any(is_running(pid) for pid in parts.values()), "its parts end too")

    for after_s in (0.2, 0.8, 1.6):
        with up(tmp_path, ports) as run, pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(timeout=after_s)
    with up(tmp_path, ports) as run:
        run.ready()

        assert "host box1" in run.output()
        assert read_episodes(run) == episode
        assert '"model": "kept"' in run_gpuwarden(
            "job", "list", "--queue-db", f"sqlite:///{run.data}/queue/queue.db", "--json"
        )
        assert run.sample(sample) == sample
        assert run.stop() == 0


def test_killed_part_is_started_again(tmp_path: Path) -> None:
    with up(tmp_path, free_ports(), "--host", "box1") as run:
        run.ready()
        before = run.pids()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)

        for part in PARTS:
            run.await_output(f"up: {part} restarted")
            run.await_output(f"up: {part} exited (killed by SIGKILL)")
        after = run.pids()
        assert not set(after.values()) & set(before.values())
        eventually(lambda: all(map(run.answers, PORTS)), "all parts answer", log=run.output)
        assert eventually(lambda: run.post_alert() and read_episodes(run), "an alert still arrives", log=run.output)
        assert run.stop() == 0
    assert not any(is_running(pid) for pid in after.values())


def test_docker_can_start_later_and_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start a private Docker engine")
    work = tmp_path / "engine"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{EnginePaths.of(work).socket}")
    assert isinstance(reachable_engine(os.environ), NoEngine)
    with up(tmp_path, free_ports(), docker="auto") as run:
        run.ready()
        assert "no Docker engine" in run.output()
        before = run.pids()

        with docker_engine(work) as engine:
            assert isinstance(engine, Engine)
            eventually(lambda: read_docker_success(run) == 1, "Docker is used", within_s=60, log=run.output)
            assert "found: restarting exporter and execute" in run.output()
        eventually(lambda: read_docker_success(run) == 0, "the lost engine is noticed", within_s=60, log=run.output)
        with docker_engine(work) as engine:
            eventually(lambda: read_docker_success(run) == 1, "Docker is used again", log=run.output)

        assert "exited (" not in run.output()
        assert {part for part in PARTS if run.pids()[part] != before[part]} == {"exporter", "execute"}
        assert run.stop() == 0


def test_installed_package_is_complete(tmp_path: Path) -> None:
    site = install_package(tmp_path)
    env = {**debian_packages.env_for_parts(), "PYTHONPATH": str(site)}
    with up(tmp_path, free_ports(), command=["-m", "gpuwarden", "up"], cwd=tmp_path, env=env) as run:
        run.ready()
        rules = json.loads(run.get("prometheus", "/api/v1/rules"))["data"]["groups"]
        assert {Path(group["file"]).parent for group in rules} == {run.data / "rules"}
        shipped = {file.name for file in (site / "deploy" / "alerts").iterdir()}
        assert {Path(group["file"]).name for group in rules} == shipped
        assert find_broken_runbooks(rules) == []
        assert run.stop() == 0

    bare = {**env, "PATH": str(tmp_path), "LD_LIBRARY_PATH": ""}
    with up(tmp_path, free_ports(), command=["-m", "gpuwarden", "up"], cwd=tmp_path, env=bare) as run:
        assert run.process.wait(timeout=90) == 1
    assert "apt-get install prometheus\n" in run.output()
    assert "apt-get install prometheus-alertmanager\n" in run.output()
    assert "--fetch-parts" in run.output()


def read_episodes(run: Run) -> list[tuple[int, str]]:
    """Id and worker of each episode in the ledger."""
    output = run_gpuwarden("ledger", "--ledger", f"sqlite:///{run.data}/ledger/ledger.db", "list", "--json")
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    return [(row["episode_id"], row["worker"]) for row in rows]


def read_docker_success(run: Run) -> float | None:
    """Success of the exporter's Docker source; `None` without that source."""
    try:
        found = re.search(
            r'gpuwarden_collector_success\{collector="source_docker"\} (\S+)', run.get("exporter", "/metrics")
        )
    except httpx.HTTPError:
        return None
    return float(found[1]) if found else None


def install_package(folder: Path) -> Path:
    """Install the package as pip unpacks its wheel."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=CHECKOUT, capture_output=True, check=True,
    )  # fmt: skip
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"
