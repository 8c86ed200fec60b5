"""The pipeline runs from the files that `gpuwarden init` writes, started as in its units."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.standalone import debian_packages, init
from deploy.standalone.stack import PORTS
from tests.asking import PLAIN
from tests.e2e.running import ALERT_LABELS, find_broken_runbooks, free_ports, run_gpuwarden
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

SCRAPED = ["gpuwarden-exporter", *init.GATEWAYS["both"], "gpuwarden-remediator", "prometheus"]
PARTS = [*PORTS, "gateway-host", "gateway-central"]


def test_pipeline_runs_from_the_written_files(tmp_path: Path) -> None:
    ports, folder = free_ports(PARTS), tmp_path / "files"
    options = [word for part, port in ports.items() for word in (f"--{part}-port", str(port))]
    locations = [word for name in ("data-dir", "runtime-dir") for word in (f"--{name}", str(tmp_path / name))]
    locations += [
        "--gateway",
        "both",
        "--config-dir",
        str(folder / "gpuwarden"),
        "--docker",
        "none",
        "--command",
        sys.executable,
    ]
    assert init.command([str(folder), "--host", "box1", *options, *locations]) == 0
    make(folder / "tmpfiles.d" / "gpuwarden.conf")

    def query_part(part: str, path: str, **query: str) -> httpx.Response | None:
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{ports[part]}{path}", params=query, trust_env=False, verify=PLAIN, timeout=2
            )
        except httpx.HTTPError:
            return None
        return answer if answer.is_success else None

    def alert_arrives() -> bool:
        alert = {"labels": ALERT_LABELS, "annotations": {"summary": "stalled", "description": "d", "runbook": "r"}}
        httpx.post(
            f"http://127.0.0.1:{ports['alertmanager']}/api/v2/alerts", json=[alert], trust_env=False, verify=PLAIN
        )
        return '"w1"' in run_gpuwarden(
            "ledger", "--ledger", f"sqlite:///{tmp_path}/data-dir/ledger/ledger.db", "list", "--json"
        )

    def all_are_scraped() -> bool:
        answer = query_part("prometheus", "/api/v1/query", query='up{host="box1"} == 1')
        found = answer.json()["data"]["result"] if answer is not None else []
        return sorted(row["metric"]["job"] for row in found) == sorted(SCRAPED)

    with running(folder, tmp_path, ports) as logs:
        eventually(all_are_scraped, "Prometheus scrapes all programs and itself", within_s=60, log=logs)
        rules = query_part("prometheus", "/api/v1/rules")
        assert rules is not None
        loaded = {Path(group["file"]).name for group in rules.json()["data"]["groups"]}
        assert loaded == {each.name for each in (folder / "gpuwarden" / "rules").iterdir()}
        assert find_broken_runbooks(rules.json()["data"]["groups"]) == []
        eventually(lambda: query_part("alertmanager", "/-/ready"), "Alertmanager answers", log=logs)
        eventually(alert_arrives, "an alert reaches the ledger", log=logs)


def make(tmpfiles: Path) -> None:
    """Create the files as systemd-tmpfiles does, but owned by the current user."""
    for line in tmpfiles.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, path, mode, _user, _group, _age, *argument = line.split()
            if kind == "d":
                Path(path).mkdir(parents=True)
            else:
                Path(path).write_text("".join(argument))
            Path(path).chmod(int(mode, 8))


def read_unit(unit: Path) -> tuple[list[str], dict[str, str]]:
    """Read the command and the environment of a unit. The command is this interpreter, which runs the package."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    env, credentials = dict(os.environ), ""
    for name, _, value in lines:
        if name == "EnvironmentFile":
            variables = [line.partition("=") for line in Path(value).read_text().splitlines() if line[:1].isalpha()]
            env |= {key: text for key, _, text in variables}
        if name == "LoadCredential":
            credentials = str(Path(value.partition(":")[2]).parent)  # systemd puts them into one folder
    ((program, *arguments),) = [
        shlex.split(value.replace("${CREDENTIALS_DIRECTORY}", credentials))
        for name, _, value in lines
        if name == "ExecStart"
    ]
    return [program, "-m", "gpuwarden", *arguments], env


@contextmanager
def running(folder: Path, work: Path, ports: dict[str, int]) -> Iterator["Logs"]:
    logs = Logs(work / "log")
    env_for_parts = debian_packages.env_for_parts()
    commands = {
        unit: read_unit(folder / "systemd" / f"{unit}.service") for unit in (*init.UNITS, *init.GATEWAYS["both"])
    }
    commands["alertmanager"] = (
        [str(debian_packages.find("alertmanager")), f"--config.file={folder / 'alertmanager.yml'}",
         f"--storage.path={work / 'am'}", f"--web.listen-address=127.0.0.1:{ports['alertmanager']}",
         "--cluster.listen-address="],
        env_for_parts,
    )  # fmt: skip
    commands["prometheus"] = (
        [str(debian_packages.find("prometheus")), f"--config.file={folder / 'prometheus.yml'}",
         f"--storage.tsdb.path={work / 'tsdb'}", f"--web.listen-address=127.0.0.1:{ports['prometheus']}"],
        env_for_parts,
    )  # fmt: skip
    processes = []
    try:
        for name, (command, env) in commands.items():
            with logs.file(name).open("wb") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        yield logs
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=20)


class Logs:
    """The output of the processes, for a test that fails."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def __call__(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.iterdir()))
