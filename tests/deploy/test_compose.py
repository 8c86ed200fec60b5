"""deploy/compose: its files against the Compose specification, and its commands and mounts with the real programs."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import compose_spec
import pytest
import yaml

from deploy.standalone import debian_packages
from deploy.standalone.ports import free_ports
from deploy.standalone.stack import RESEND_S
from tests.waiting import eventually

FOLDER = Path(debian_packages.__file__).resolve().parents[1] / "compose"
FILES = ("compose.yaml", "compose.gpu.yaml")
PROGRAMS = {"prometheus": "prometheus", "alertmanager": "alertmanager"}
OURS = ("exporter", "remediator", "executor")
SLACK = "https://hooks.slack.com/services/T0/B0/abc"
PORTS = {"exporter": 29835, "remediator": 9836, "prometheus": 9090, "alertmanager": 9093}


def read(name: str) -> dict[str, Any]:
    """A file with the defaults of its variables."""
    text = re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", (FOLDER / name).read_text())
    found: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return found


@pytest.mark.parametrize("name", FILES)
def test_file_follows_the_specification(name: str) -> None:
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(read(name)))


def test_a_misspelt_key_is_found() -> None:
    wrong = read("compose.yaml")
    wrong["services"]["exporter"]["cgruop"] = wrong["services"]["exporter"].pop("cgroup")

    with pytest.raises(ValueError, match="cgruop"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(wrong))


def test_what_services_name_exists() -> None:
    whole = read("compose.yaml")
    named = {"secrets": set[str](), "volumes": set[str](), "services": set[str]()}
    for service in whole["services"].values():
        named["secrets"] |= {each if isinstance(each, str) else each["source"] for each in service.get("secrets", ())}
        named["volumes"] |= {each.partition(":")[0] for each in service.get("volumes", ()) if each[0] not in "./"}
        named["services"] |= {*service.get("depends_on", ())}

    assert named["secrets"] == {*whole["secrets"]}
    assert named["volumes"] == {*whole["volumes"]}
    assert named["services"] <= {*whole["services"]}
    assert {*read("compose.gpu.yaml")["services"]} <= {*whole["services"]}


def test_services_come_back_and_say_whether_they_are_well() -> None:
    services = {name: each for name, each in read("compose.yaml")["services"].items() if name != "init"}

    assert {each["restart"] for each in services.values()} == {"unless-stopped"}
    assert [name for name, each in services.items() if "test" not in each["healthcheck"]] == ["executor"]
    assert {name for name, each in services.items() if each.get("pid") == "host"} == {"exporter", "executor"}
    docker = {name: mount for name, each in services.items() for mount in each["volumes"] if "docker.sock" in mount}
    assert {name: mount.endswith(":ro") for name, mount in docker.items()} == {"exporter": True, "executor": False}
    assert f"--rules.alert.resend-delay={RESEND_S}s" in services["prometheus"]["command"]


def test_the_remediator_may_write_the_queue_whose_events_it_acknowledges() -> None:
    mounts = {each for each in read("compose.yaml")["services"]["remediator"]["volumes"] if "/queue" in each}
    unit = (FOLDER.parent / "templates/gpuwarden-remediator.service").read_text()

    assert mounts == {"/var/lib/gpuwarden/queue:/var/lib/gpuwarden/queue"}
    assert "\nReadWritePaths=$data_dir/ledger $data_dir/queue\n" in unit


def test_grafana_is_provisioned_with_the_dashboards() -> None:
    (source,) = yaml.safe_load((FOLDER / "grafana/datasources.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((FOLDER / "grafana/dashboards.yaml").read_text())["providers"]
    mounts = dict(each.split(":")[:2] for each in read("compose.yaml")["services"]["grafana"]["volumes"])
    dashboards = [json.loads(each.read_text()) for each in FOLDER.parents[1].glob("dashboards/*.json")]

    assert source["url"] == "http://127.0.0.1:9090"
    assert mounts["./files/gpuwarden/dashboards"] == provider["options"]["path"]
    assert {mounts[f"./grafana/{name}.yaml"] for name in ("datasources", "dashboards")} == {
        f"/etc/grafana/provisioning/{name}/gpuwarden.yaml" for name in ("datasources", "dashboards")
    }
    for each in dashboards:  # a variable selects the default data source
        assert {"prometheus"} == {its["query"] for its in each["templating"]["list"] if its["type"] == "datasource"}


class Host:
    """The services as processes: each path of a container is that of its mount, below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.services: dict[str, Any] = read("compose.yaml")["services"]
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.secrets = {name: each["file"] for name, each in read("compose.yaml")["secrets"].items()}

    def here(self, path: str) -> str:
        """A path of the host."""
        return str(self.root / path.lstrip("./"))

    def placed(self, service: str, text: str) -> str:
        """A text with paths of this service's container, and the ports."""
        its = self.services[service]
        mounts = {target: source for source, target in (each.split(":")[:2] for each in its.get("volumes", ()))}
        for each in its.get("secrets", ()):
            mounts[each["target"]] = self.secrets[each["source"]]
        for target in sorted(mounts, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(target)}(?![\w-])", self.here(mounts[target]), text)
        return self.with_ports(text)

    def with_ports(self, text: str) -> str:
        """A text with the ports of this test."""
        for name, port in PORTS.items():
            text = re.sub(rf"\b{port}\b", str(self.ports[name]), text)
        return text

    def port_options(self) -> str:
        """The options of `gpuwarden init` for these ports."""
        return " ".join(f"--{name}-port {port}" for name, port in self.ports.items())

    def init(self, *more: str) -> None:
        """Run the service `init`."""
        (self.root / "files").mkdir(exist_ok=True)
        (script,) = self.services["init"]["command"]
        options = f"--host box1 --docker none --config-dir {self.root}/files/gpuwarden {self.port_options()}"
        options += f" --data-dir {self.here('/var/lib/gpuwarden')} {' '.join(more)}"
        script = self.placed("init", script).replace("python3", shlex.quote(sys.executable))
        if os.geteuid() != 0:
            script = re.sub(r"^ch(own|grp) .*$", "", script, flags=re.MULTILINE)
        subprocess.run(
            [*self.services["init"]["entrypoint"], script], check=True, env=os.environ | {"GPUWARDEN_INIT": options}
        )

    def argv(self, service: str) -> list[str]:
        """The service's command."""
        command = [self.placed(service, each) for each in self.services[service]["command"]]
        if service in PROGRAMS:
            return [str(debian_packages.find(PROGRAMS[service])), *command]
        return [sys.executable, "-m", "gpuwarden", *command]

    def environment(self, service: str) -> Mapping[str, str]:
        """The service's variables."""
        if service in PROGRAMS:
            return debian_packages.env_for_parts()
        (file,) = self.services[service]["env_file"]
        lines = [each for each in Path(self.here(file)).read_text().splitlines() if each and each[0] != "#"]
        its = self.services[service].get("environment", {})
        given = {name: self.placed(service, value) for name, value in its.items()}
        own = {name: value for name, value in os.environ.items() if not name.startswith("GPUWARDEN_")}
        return own | dict(each.split("=", 1) for each in lines) | given

    def is_healthy(self, service: str) -> bool:
        """Ask the address of the service's health check."""
        test = self.placed(service, " ".join(self.services[service]["healthcheck"]["test"]))
        (url,) = re.findall(r"http://[\w.:/-]+", test)
        try:
            with urlopen(url, timeout=4) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host whose files are written. The remediator sends to one of its addresses."""
    found = Host(tmp_path)
    found.init("--notify", "ntfys://ntfy.example.com/ops", "--notify", SLACK)
    return found


@pytest.mark.needs_parts
def test_init_writes_files_that_promtool_and_amtool_accept(host: Host) -> None:
    for tool, command, file in (
        ("promtool", ["check", "config"], "files/prometheus.yml"),
        ("amtool", ["check-config"], "files/alertmanager.yml"),
    ):
        checked = subprocess.run(
            [str(debian_packages.find(tool)), *command, str(host.root / file)],
            env=debian_packages.env_for_parts(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout + checked.stderr
    secrets = "alertmanager.yml", "gpuwarden/token", "gpuwarden/notify.toml", "gpuwarden/notify-2"
    modes = {name: (host.root / "files" / name).stat() for name in secrets}
    assert {each.st_mode & 0o777 for each in modes.values()} == {0o640}
    if os.geteuid() == 0:
        assert {each.st_gid for each in modes.values()} == {65532}
        queue = host.root / "var/lib/gpuwarden/queue"
        assert [(each.stat().st_gid, each.stat().st_mode & 0o777) for each in (queue, queue / "queue.db")] == [
            (65532, 0o770),
            (65532, 0o660),
        ]
    kept = [(host.root / "files" / name).read_text() for name in ("gpuwarden/token", "grafana-password")]
    host.init()
    assert kept == [(host.root / "files" / name).read_text() for name in ("gpuwarden/token", "grafana-password")]


def test_files_that_settings_name_are_mounted_in_the_service_that_reads_them(host: Host) -> None:
    text = (host.root / "files/gpuwarden/gpuwarden.env").read_text()
    named = dict(re.findall(rf"^(GPUWARDEN_\w+)={re.escape(host.here('files/gpuwarden'))}/(\S+)$", text, re.MULTILINE))

    assert named["GPUWARDEN_REMEDIATOR_NOTIFY_FILE"] == "notify.toml"
    for name in (*named.values(), "token", "remediator-web.yml"):
        assert host.placed("remediator", f"/etc/gpuwarden/{name}") == host.here(f"files/gpuwarden/{name}")


@pytest.mark.needs_parts
@pytest.mark.slow
def test_programs_start_with_these_files_and_find_each_other(host: Host) -> None:
    with ExitStack() as running:
        logs = {name: host.root / f"{name}.log" for name in (*OURS, *PROGRAMS)}
        for name, log in logs.items():
            for each in host.services[name]["volumes"]:
                if not each.startswith("./files"):
                    Path(host.here(each.partition(":")[0])).mkdir(parents=True, exist_ok=True)
            process = subprocess.Popen(
                host.argv(name), env=host.environment(name), cwd=host.root,
                stdout=running.enter_context(log.open("wb")), stderr=subprocess.STDOUT,
            )  # fmt: skip
            running.callback(process.wait)
            running.callback(process.terminate)

        def said() -> str:
            return "\n".join(f"{name}:\n{log.read_text()[-1500:]}" for name, log in logs.items())

        for name in (*OURS[:2], *PROGRAMS):
            eventually(partial(host.is_healthy, name), f"{name} is healthy", log=said)

        def run_there(word: str) -> subprocess.CompletedProcess[str]:
            """Run a command as in the executor's container."""
            argv, env = [sys.executable, "-m", "gpuwarden", word], host.environment("executor")
            return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)

        def is_well() -> bool:
            ran = run_there("doctor")
            return ran.returncode == 0 and re.search(r"^ok +watchdog +arrived", ran.stdout, re.MULTILINE) is not None

        eventually(is_well, "no link is broken, and the watchdog alert has arrived", log=said)
        drill = run_there("drill")
        assert drill.returncode == 0, drill.stdout + drill.stderr
