"""`gpuwarden doctor` on a whole chain: everything works, and a broken link is the only one named."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from deploy.doctor import command
from deploy.doctor.finding import Verdict
from deploy.doctor.links import LINKS, diagnose
from deploy.doctor.read import read
from deploy.doctor.sources.addresses import Addresses, find
from deploy.standalone import debian_packages, up
from deploy.standalone.config_files import DIRECT, Intervals
from deploy.standalone.stack import Chain, Plan
from gpuwarden.cli.main import main
from gpuwarden.db import running_up
from gpuwarden.reporter import Reporter
from remediator.commands.notify import FILE_ENV
from remediator.ledger.ledger import Ledger
from testbed.gpu_simulator import SimulatedGpus, Slot
from tests.json_server import json_server
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.needs_parts]

HOST = "box1"
EVERY = {link.name for link in LINKS}


@dataclass
class Patient:
    """A running chain with one worker, found as a user's command finds it."""

    chain: Chain
    environment: dict[str, str]
    reporter: Reporter

    def addresses(self, *argv: str) -> Addresses:
        return find(command._parser().parse_args(list(argv)), self.environment)

    def named(self, addresses: Addresses | None = None, *, ahead_s: float = 0.0) -> dict[str, str]:
        """Links with a finding of their own, each with its message and repair."""
        found = diagnose(read(addresses or self.addresses(), now=lambda: time.time() + ahead_s))
        assert found.keys() == EVERY
        return {
            name: f"{each.verdict}: {each.says}; {each.fix}"
            for name, each in found.items()
            if each.verdict is not Verdict.OK and not each.says.startswith("not checked: depends on")
        }

    def reload(self, part: str, file: Path, text: str) -> None:
        file.write_text(text)
        self.chain.signal(part, signal.SIGHUP)

    @contextmanager
    def changed(self, part: str, name: str, change: Callable[[str], str]) -> Iterator[None]:
        """Another configuration of a part."""
        file = self.chain.plan.work / name
        before = file.read_text()
        assert change(before) != before
        self.reload(part, file, change(before))
        yield
        self.reload(part, file, before)

    @contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        self.chain.stop(part)
        yield
        self.chain.start(part)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    try:
        debian_packages.find("prometheus")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))
    work = tmp_path_factory.mktemp("doctor")
    environment = {"XDG_STATE_HOME": str(work / "state")}
    with ExitStack() as stack:
        administrator, _ = stack.enter_context(json_server())
        plan = Plan(
            work=work / "data",
            host=HOST,
            docker=None,
            simulate_gpu=work / "gpus.json",
            intervals=Intervals(scrape_s=1),
            notify=["mailto://127.0.0.1:9?from=a@example.com&to=b@example.com", administrator],
        )
        chain = Chain(plan)
        stack.enter_context(
            SimulatedGpus(work / "gpus.json", directory=chain.directory, slots=[Slot(worker="w0", gpus=("GPU-0",))])
        )
        reporter = stack.enter_context(Reporter(chain.directory, worker="w0", queue="own"))
        stack.enter_context(running_up.published(up._variables(chain), environment))
        stack.enter_context(chain)
        found = Patient(chain=chain, environment=environment, reporter=reporter)
        eventually(lambda: not found.named(), "every link works", log=lambda: str(found.named()))
        yield found


@pytest.fixture(autouse=True)
def healthy_again(patient: Patient) -> Iterator[None]:
    yield
    eventually(lambda: not patient.named(), "every link works again", log=lambda: str(patient.named()))


def _without_webhook_route(text: str) -> str:
    config = yaml.safe_load(text)
    config["route"]["routes"] = [each for each in config["route"]["routes"] if each["receiver"] != "gpuwarden"]
    return yaml.safe_dump(config, sort_keys=False)


def _without_alertmanager(text: str) -> str:
    return yaml.safe_dump({name: each for name, each in yaml.safe_load(text).items() if name != "alerting"})


def _with_gateway_down(text: str) -> str:
    config = yaml.safe_load(text)
    down = {"targets": ["127.0.0.1:9"], "labels": {"host": HOST}}
    config["scrape_configs"].append({"job_name": "gpuwarden-gateway-host", "static_configs": [down]})
    return yaml.safe_dump(config, sort_keys=False)


def _without_contact(text: str) -> str:
    config = yaml.safe_load(text)
    (direct,) = (each for each in config["receivers"] if each["name"] == DIRECT)
    del direct["email_configs"]
    return yaml.safe_dump(config, sort_keys=False)


def _with_the_remediator_as_contact(text: str) -> str:
    config = yaml.safe_load(text)
    config["route"]["routes"] = [each for each in config["route"]["routes"] if each["receiver"] != DIRECT]
    del config["receivers"][0]["email_configs"]
    return yaml.safe_dump(config, sort_keys=False)


def test_everything_works_and_the_command_finds_it(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in patient.environment.items():
        monkeypatch.setenv(name, value)

    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"all {len(LINKS)} links work"
    assert [line.split("  ")[0] for line in lines[:-2]] == ["ok"] * len(LINKS)

    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert [each["link"] for each in report["checks"]] == [link.name for link in LINKS]


@pytest.mark.parametrize(
    ("part", "link", "repair"),
    [
        ("exporter", "exporter", "exporter.log"),
        ("prometheus", "prometheus", "prometheus.log"),
        ("alertmanager", "alertmanager", "alertmanager.log"),
        ("serve", "webhook", "serve.log"),
    ],
)
def test_stopped_part_is_the_only_link_named(patient: Patient, part: str, link: str, repair: str) -> None:
    with patient.stopped(part):
        named = patient.named()

    assert named.keys() == {link}
    assert "refused" in named[link]
    assert repair in named[link]


def test_stopped_executor_is_the_only_link_named(patient: Patient) -> None:
    with patient.stopped("execute"), closing(Ledger.open(patient.chain.ledger_url, migrate=False)) as ledger:
        ledger.executors.beat(host=HOST, pid=7, armed=False, started_at=0, errors=0, now=time.time() - 60)
        named = patient.named()

    assert named.keys() == {"executor"}
    assert "no heartbeat for 1 min: nothing is repaired" in named["executor"]


@pytest.mark.parametrize(
    ("part", "file", "change", "link", "says"),
    [
        pytest.param(
            "prometheus", "prometheus.yml", lambda text: text.replace(f"host: {HOST}", "host: other"),
            "host label", 'failed: the exporter is scraped as host="other", but the host key is box1', id="host-label",
        ),
        pytest.param(
            "prometheus", "rules/health.rules.yaml", lambda text: text.replace("gpuwarden_job_inactive_seconds",
                                                                              "10 + gpuwarden_job_inactive_seconds", 1),
            "rules", "failed: rule GpuwardenJobUnhealthy differs from this version's", id="altered-rule",
        ),
        pytest.param(
            "prometheus", "prometheus.yml", lambda text: "\n".join(line for line in text.splitlines()
                                                                   if "stall.rules" not in line),
            "rules", "failed: rule GpuwardenJobStalled is missing", id="missing-rule-file",
        ),
        pytest.param(
            "prometheus", "prometheus.yml", _without_alertmanager,
            "prometheus", "failed: it sends alerts to no Alertmanager", id="no-alertmanager",
        ),
        pytest.param(
            "prometheus", "prometheus.yml", _with_gateway_down,
            "targets", "failed: Prometheus cannot scrape gpuwarden-gateway-host of box1", id="target",
        ),
        pytest.param(
            "alertmanager", "alertmanager.yml", _without_webhook_route,
            "route", "goes to 'people', and not to the webhook", id="route",
        ),
        pytest.param(
            "alertmanager", "alertmanager.yml", lambda text: text.replace("/token", "/wrong-token"),
            "token", "failed: the webhook refuses Alertmanager's token", id="token",
        ),
        pytest.param(
            "alertmanager", "alertmanager.yml", _without_contact,
            "contacts", f"warning: nobody: Alertmanager's receiver '{DIRECT}' has no address", id="contacts",
        ),
        pytest.param(
            "alertmanager", "alertmanager.yml", _with_the_remediator_as_contact,
            "contacts", "warning: nobody: Alertmanager's receiver 'people' has no address", id="contact-is-remediator",
        ),
    ],
)  # fmt: skip
def test_changed_configuration_is_the_only_link_named(
    patient: Patient, part: str, file: str, change: Callable[[str], str], link: str, says: str
) -> None:
    (patient.chain.plan.work / "wrong-token").write_text("0123456789abcdef0123")

    with patient.changed(part, file, change):
        eventually(lambda: link in patient.named(), f"{link} is named", log=lambda: str(patient.named()))
        named = patient.named()

    assert named.keys() == {link}
    assert says in named[link]


def test_administrators_are_those_of_the_running_serve(patient: Patient, tmp_path: Path) -> None:
    file, of_caller = patient.chain.notify_file, tmp_path / "notify.toml"
    assert file is not None
    before = file.read_text()
    of_caller.write_text(before)
    patient.environment[FILE_ENV] = str(of_caller)
    file.write_text("administrators = []\n")
    try:
        eventually(lambda: "notifications" in patient.named(), "it is named", log=lambda: str(patient.named()))
        named = patient.named()
    finally:
        file.write_text(before)
        del patient.environment[FILE_ENV]

    assert named.keys() == {"notifications"}
    assert "warning: no administrator is notified of locked workers" in named["notifications"]


def test_host_without_workers_has_a_warning(patient: Patient) -> None:
    patient.reporter.close()
    try:
        eventually(patient.named, "the worker is gone")
        named = patient.named()
    finally:
        patient.reporter = Reporter(patient.chain.directory, worker="w0", queue="own").open()

    assert named.keys() == {"watched"}
    assert "warning: nothing is watched" in named["watched"]


def test_unknown_key_and_invalid_value_are_named_with_the_setting(patient: Patient) -> None:
    patient.environment["GPUWARDEN_EXPORTER_SAMPLE_INTERVAL"] = "2"
    try:
        named = patient.named()
        patient.environment["GPUWARDEN_EXPORTER_SAMPLE_INTERVAL_S"] = patient.environment.pop(
            "GPUWARDEN_EXPORTER_SAMPLE_INTERVAL"
        ).replace("2", "soon")
        also = patient.named()
    finally:
        patient.environment.pop("GPUWARDEN_EXPORTER_SAMPLE_INTERVAL_S", None)

    assert named.keys() == also.keys() == {"settings"}
    assert "did you mean GPUWARDEN_EXPORTER_SAMPLE_INTERVAL_S?" in named["settings"]
    assert "'soon' is invalid" in also["settings"]


def test_host_key_that_cannot_be_read_is_the_only_link_named(patient: Patient) -> None:
    file = patient.chain.directory / "host"
    file.rename(file.with_name("kept"))
    try:
        named = patient.named()
    finally:
        file.with_name("kept").rename(file)

    assert named.keys() == {"host key"}


@pytest.mark.parametrize("ahead_s", [-60.0, 60.0])
def test_wrong_clock_of_the_host_is_the_only_link_named(patient: Patient, ahead_s: float) -> None:
    named = patient.named(ahead_s=ahead_s)

    assert named.keys() == {"clock"}
    assert f"60.0 s {'behind' if ahead_s > 0 else 'ahead of'} this host's" in named["clock"]


def test_full_disk_is_the_only_link_named(patient: Patient, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr}")
    try:
        (tmp_path / "host").write_text(HOST)
        named = patient.named(replace(patient.addresses(), runtime_dir=tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

    assert named.keys() == {"disk"}
    assert f"free at {tmp_path}" in named["disk"]


@pytest.mark.parametrize("option", ["ledger", "queue-db"])
def test_missing_database_is_the_only_link_named_and_not_created(patient: Patient, tmp_path: Path, option: str) -> None:
    named = patient.named(patient.addresses(f"--{option}", f"sqlite:///{tmp_path}/missing.db"))

    assert named.keys() == {option.removesuffix("-db")}
    assert not list(tmp_path.iterdir())


def test_excluded_parts_and_the_links_that_need_them_are_left_out(patient: Patient) -> None:
    found = diagnose(read(patient.addresses("--prometheus", "none", "--alertmanager", "none")))

    assert EVERY - found.keys() == {
        "prometheus", "clock", "host label", "rules", "targets", "alertmanager", "route", "token", "watchdog",
        "contacts",
    }  # fmt: skip
    assert {each.verdict for each in found.values()} == {Verdict.OK}


def test_hung_parts_take_at_most_ten_seconds(patient: Patient) -> None:
    with _hung() as url:
        parts = ("exporter", "remediator", "prometheus", "alertmanager")
        addresses = patient.addresses(*(each for part in parts for each in (f"--{part}", url)))
        began_s = time.monotonic()
        named = patient.named(addresses)
        took_s = time.monotonic() - began_s

    assert named.keys() == {"exporter", "webhook", "prometheus", "alertmanager"}
    assert took_s < 10


def test_hung_database_takes_at_most_ten_seconds_and_its_password_is_hidden(patient: Patient) -> None:
    with _hung() as url:
        database = f"postgresql://user:password@{url.removeprefix('http://')}/gpuwarden"
        began_s = time.monotonic()
        named = patient.named(patient.addresses("--ledger", database, "--queue-db", database))
        took_s = time.monotonic() - began_s

    assert named.keys() == {"ledger", "queue"}
    assert took_s < 10
    assert ":password@" not in str(named)


@contextmanager
def _hung() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
