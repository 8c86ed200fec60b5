"""Decisions of `gpuwarden doctor`: routes, rules, files, disk, clock, dependencies and the printed page."""

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor import command, facts
from deploy.doctor.checks import alerts, databases, exporter, host
from deploy.doctor.checks.prometheus import differences
from deploy.doctor.facts import (
    Disk,
    Facts,
    File,
    Host,
    Offset,
    Page,
    Place,
    Readable,
    Rule,
    Runs,
    Sample,
    Settings,
)
from deploy.doctor.finding import Finding, Unread, Verdict, failed, ok, warning
from deploy.doctor.links import Link, diagnose
from deploy.doctor.read import read
from deploy.doctor.routes import integrations, receivers_of
from deploy.doctor.sources import addresses, local, settings
from deploy.doctor.sources.http import seconds, send_token, shipped_rules
from gpuwarden.cli.main import main
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.migrate import revisions
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Unsent
from remediator.ledger.schema import LEDGER

NOT_READ = Unread(why="not read")
FACTS = Facts(
    host=Host(
        place=Place(runs=Runs.SERVICES, env_file=Path("/etc/gpuwarden/gpuwarden.env")),
        settings=Settings(checked=()),
        key="box1",
        files=(),
        disks=(),
        now_s=1000.0,
    ),
    exporter=NOT_READ,
    prometheus=NOT_READ,
    alertmanager=NOT_READ,
    webhook=NOT_READ,
    token=NOT_READ,
    ledger=NOT_READ,
    queue=Readable(),
    offsets=(),
)


def on_host(**changed: Any) -> Facts:
    return replace(FACTS, host=replace(FACTS.host, **changed))


def exported(*samples: tuple[str, Mapping[str, str], float], age_s: float = 1.0) -> Facts:
    found = [Sample(name="gpuwarden_sample_age_seconds", labels={}, value=age_s)]
    found += [Sample(name=f"gpuwarden_{name}", labels=labels, value=value) for name, labels, value in samples]
    return replace(FACTS, exporter=Page(url="http://e", not_ready="", samples=found))


CONFIG: dict[str, Any] = {
    "route": {
        "receiver": "people",
        "routes": [
            {"receiver": "both", "matchers": ['alertname=~"Lost|Gone"'], "continue": True},
            {"matchers": ['remedy=~".+"', "host!=other"], "routes": [{"receiver": "hook", "match": {"x": "1"}}]},
            {"receiver": "old", "match_re": {"team": "a|b"}},
            {"receiver": "never", "matchers": ["not a matcher!"]},
        ],
    },
    "receivers": [
        {"name": "people"},
        {"name": "hook", "webhook_configs": [{"url": "<secret>"}, {"url": "http://r/api/v1/alerts"}]},
        {"name": "both", "email_configs": [{"to": "a@example.com"}], "slack_configs": []},
    ],
}


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({"alertname": "A"}, ["people"]),
        ({"alertname": "Lost"}, ["both"]),
        ({"alertname": "Lost", "remedy": "r"}, ["both", "people"]),
        ({"alertname": "A", "remedy": "r", "x": "1"}, ["hook"]),
        ({"alertname": "A", "remedy": "r", "x": "1", "host": "other"}, ["people"]),
        ({"alertname": "A", "team": "b"}, ["old"]),
    ],
)
def test_alert_is_routed_as_alertmanager_routes_it(labels: dict[str, str], receivers: list[str]) -> None:
    assert receivers_of(CONFIG, labels) == receivers


def test_receiver_has_its_addresses() -> None:
    assert integrations(CONFIG, "both") == ["email"]
    assert integrations(CONFIG, "people") == integrations(CONFIG, "missing") == []


def sending(url: str, token: str = "") -> dict[str, Any]:
    """A webhook of Alertmanager."""
    return {"url": url, "http_config": {"authorization": {"credentials_file": token}}} if token else {"url": url}


def alertmanager_of(people: list[dict[str, Any]], remediator: list[dict[str, Any]], *, acting: str) -> Facts:
    """Routes the watchdog to `remediator`, alerts with a remedy to `acting`, and others to `people`."""
    watchdog = {"receiver": "remediator", "matchers": ["alertname=GpuwardenWatchdog"]}
    config = {
        "route": {"receiver": "people", "routes": [watchdog, {"receiver": acting, "matchers": ['remedy=~".+"']}]},
        "receivers": [
            {"name": "people", "webhook_configs": people},
            {"name": "remediator", "webhook_configs": remediator},
        ],
    }
    acts = replace(RULE, labels={"remedy": "restart_worker"})
    offset = Offset(of="Prometheus", ahead_s=0)
    prometheus = facts.Prometheus(
        url="http://p", exporters=(), down=(), alertmanagers=(), loaded=(), shipped=[acts], offset=offset
    )
    return replace(FACTS, alertmanager=facts.Alertmanager(url="http://a", config=config), prometheus=prometheus)


SECRET = "<secret>"


@pytest.mark.parametrize(
    ("people", "remediator", "acting", "verdict"),
    [
        ([], [sending("http://r/api/v1/alerts")], "remediator", Verdict.OK),
        ([], [sending(SECRET)], "remediator", Verdict.OK),
        ([sending(SECRET)], [sending(SECRET)], "people", Verdict.FAILED),
        ([sending(SECRET)], [sending("http://r/api/v1/alerts")], "people", Verdict.FAILED),
        ([], [sending("http://r/other")], "remediator", Verdict.FAILED),
        ([], [], "remediator", Verdict.FAILED),
    ],
)
def test_alerts_with_a_remedy_need_the_receiver_of_the_watchdog(
    people: list[dict[str, Any]], remediator: list[dict[str, Any]], acting: str, verdict: Verdict
) -> None:
    finding = alerts.route(alertmanager_of(people, remediator, acting=acting))

    assert finding is not None
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("people", "remediator", "verdict"),
    [
        ([sending("http://chat/hook")], [sending("http://r/api/v1/alerts", "token")], Verdict.OK),
        ([sending(SECRET)], [sending(SECRET, "token")], Verdict.OK),
        ([sending("http://r/api/v1/notifications")], [sending("http://r/api/v1/alerts")], Verdict.WARNING),
        ([sending(SECRET, "token")], [sending(SECRET, "token")], Verdict.WARNING),
        ([sending("http://r/api/v1/alerts")], [], Verdict.WARNING),
    ],
)
def test_the_remediator_is_no_contact_for_alerts_about_itself(
    people: list[dict[str, Any]], remediator: list[dict[str, Any]], verdict: Verdict
) -> None:
    finding = alerts.contacts(alertmanager_of(people, remediator, acting="remediator"))

    assert finding is not None
    assert finding.verdict is verdict


@contextmanager
def webhook_with(token: str) -> Iterator[str]:
    """A webhook that accepts one token."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(202 if self.headers["Authorization"] == f"Bearer {token}" else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("shows_urls", "token", "status"),
    [
        (True, "box2", 202),
        (True, "other", 401),
        (False, "box2", 202),
        (False, "other", 401),
        (False, "missing", None),
    ],
)
def test_of_two_webhooks_the_token_of_this_one_is_tried(
    open_folder: Path, shows_urls: bool, token: str, status: int | None
) -> None:
    """docs/how-to/several-hosts.md: one receiver with the webhook of each host. This host is box2."""
    for name in ("box1", "box2"):
        (open_folder / name).write_text(f"{name}\n")
    with webhook_with(token) as url:
        found = installed(open_folder)
        found = replace(found, urls={**found.urls, "remediator": url})
        box2 = open_folder / ("missing" if token == "missing" else "box2")
        hooks = [
            sending(f"{each}/api/v1/alerts" if shows_urls else SECRET, str(file))
            for each, file in (("https://box1.example:9836", open_folder / "box1"), (url, box2))
        ]
        answer = send_token(found, alertmanager_of([], hooks, acting="remediator").alertmanager)

    assert (answer.status if isinstance(answer, facts.TokenAnswer) else None) == status
    if isinstance(answer, Unread):
        assert f"{box2} of Alertmanager's configuration cannot be read here" in answer.why


RULE = Rule(group="g", name="GpuwardenA", query="a > 1", for_s=10, labels={"remedy": "r"}, annotations={"summary": "s"})
NOTE = replace(RULE, name="GpuwardenB", labels={"severity": "warning"})


@pytest.mark.parametrize(
    ("loaded", "found"),
    [
        ([RULE, NOTE], []),
        ([NOTE], [(True, "rule GpuwardenA is missing")]),
        ([RULE, RULE, NOTE], [(True, "rule GpuwardenA differs from this version's")]),
        ([replace(RULE, query="a > 2"), NOTE], [(True, "rule GpuwardenA differs from this version's")]),
        ([replace(RULE, for_s=20), NOTE], [(True, "rule GpuwardenA differs from this version's")]),
        ([RULE, replace(NOTE, labels={})], [(False, "rule GpuwardenB differs from this version's")]),
        (
            [RULE, replace(NOTE, annotations={"summary": "t"})],
            [(False, "the texts of rule GpuwardenB differ from this version's")],
        ),
        ([RULE, replace(NOTE, annotations={"summary": "s", "runbook_url": "u"})], []),
        ([RULE, NOTE, replace(RULE, name="GpuwardenOld")], [(True, "rule GpuwardenOld is not of this version")]),
        ([RULE, NOTE, replace(RULE, name="Foreign")], []),
    ],
)
def test_loaded_rules_are_compared_with_those_of_this_version(
    loaded: list[Rule], found: list[tuple[bool, str]]
) -> None:
    assert list(differences([RULE, NOTE], loaded)) == found


def test_rules_of_this_version_are_read() -> None:
    assert {each.name for each in shipped_rules() if each.acts} >= {"GpuwardenJobStalled", "GpuwardenHostLost"}
    assert [seconds(each) for each in ("0s", "90s", "1h30m", "500ms")] == [0, 90, 5400, 0.5]


@pytest.mark.parametrize(
    ("read_page", "verdict", "says"),
    [
        (exported(), Verdict.OK, "newest sample 1.0 s old"),
        (exported(age_s=30), Verdict.FAILED, "its newest sample is 30 s old"),
        (exported(age_s=float("nan")), Verdict.FAILED, "its newest sample is nan s old"),
        (
            exported(("collector_success", {"collector": "source_docker"}, 0)),
            Verdict.FAILED,
            "source_docker failed: those metrics are unknown; check that Docker runs",
        ),
        (
            replace(FACTS, exporter=Page(url="http://e", not_ready="", samples=())),
            Verdict.FAILED,
            "http://e is not the exporter",
        ),
        (replace(FACTS, exporter=Page(url="http://e", not_ready="no sample", samples=())), Verdict.FAILED, "no sample"),
    ],
)
def test_exporter_is_fresh_and_complete(read_page: Facts, verdict: Verdict, says: str) -> None:
    found = exporter.exporter(read_page)

    assert found is not None
    assert found.verdict is verdict
    assert says in f"{found.says}; {found.fix}"


WORKER = ("worker_info", {"worker": "w0", "container": "c"}, 1.0)


@pytest.mark.parametrize(
    ("read_page", "verdict", "says"),
    [
        (exported(), Verdict.WARNING, "nothing is watched"),
        (exported(WORKER), Verdict.OK, "1 worker, 0 managed"),
        (exported(WORKER, ("container_managed", {"container": "c"}, 1)), Verdict.OK, "1 worker, 1 managed"),
        (
            exported(WORKER, ("container_managed", {"container": "c"}, 0)),
            Verdict.WARNING,
            "worker w0 is never restarted: its container c has no label",
        ),
        (exported(("container_managed", {"container": "c"}, 0)), Verdict.WARNING, "nothing is watched"),
        (exported(("container_info", {"container": "s", "kind": "systemd"}, 1)), Verdict.OK, "0 workers, 1 managed"),
    ],
)
def test_opt_in_is_checked(read_page: Facts, verdict: Verdict, says: str) -> None:
    found = exporter.watched(read_page)

    assert found is not None
    assert found.verdict is verdict
    assert says in found.says


@pytest.mark.parametrize(
    ("read_page", "verdict", "says"),
    [
        (exported(), Verdict.WARNING, "no GPU is seen"),
        (exported(("gpu_info", {"gpu": "GPU-0"}, 1)), Verdict.OK, "1 GPU, use attributed"),
        (
            exported(
                ("gpu_info", {"gpu": "GPU-0"}, 1),
                ("container_gpu_attribution_missing", {"container": "c", "gpu": "GPU-0"}, 1),
            ),
            Verdict.WARNING,
            "GPU use of c on GPU-0 cannot be attributed",
        ),
    ],
)
def test_gpu_attribution_is_checked(read_page: Facts, verdict: Verdict, says: str) -> None:
    found = exporter.gpus(read_page)

    assert found is not None
    assert found.verdict is verdict
    assert says in found.says


MIB = 2**20


@pytest.mark.parametrize(
    ("free", "size", "free_files", "verdict"),
    [
        (3 * 2**30, 2**40, None, Verdict.OK),
        (2**30, 10 * 2**30, 5, Verdict.OK),
        (2**30, 2**40, 5, Verdict.WARNING),
        (99 * MIB, 200 * MIB, 5, Verdict.FAILED),
        (3 * 2**30, 2**40, 0, Verdict.FAILED),
    ],
)
def test_disk_space_is_checked(free: int, size: int, free_files: int | None, verdict: Verdict) -> None:
    disks = [Disk(path=Path("/data"), free_bytes=free, size_bytes=size, free_files=free_files)]

    assert host.disk(on_host(disks=disks)).verdict is verdict


@pytest.mark.parametrize(
    ("offsets", "verdict"),
    [
        ([Offset(of="Prometheus", ahead_s=0.4)], Verdict.OK),
        ([Offset(of="Prometheus", ahead_s=-2)], Verdict.WARNING),
        ([Offset(of="Prometheus", ahead_s=0), Offset(of="the database", ahead_s=-9)], Verdict.FAILED),
        ([Offset(of="the database", ahead_s=9, uncertain_s=8.5)], Verdict.OK),  # a slow answer proves nothing
        ([], Verdict.UNKNOWN),
    ],
)
def test_clocks_are_compared(offsets: list[Offset], verdict: Verdict) -> None:
    assert host.clock(replace(FACTS, offsets=offsets)).verdict is verdict


@pytest.mark.parametrize(
    ("file", "verdict", "says"),
    [
        (File(path=Path("/x"), what="the token", secret=True), Verdict.OK, ""),
        (File(path=Path("/x"), what="the token", secret=True, others=4), Verdict.FAILED, "chmod o-r /x"),
        (File(path=Path("/x"), what="the ledger", others=4), Verdict.OK, ""),
        (File(path=Path("/x"), what="the ledger", others=6), Verdict.FAILED, "chmod o-w /x"),
        (File(path=Path("/x"), what="the folder", others=7, sticky=True), Verdict.OK, ""),
        (File(path=Path("/x"), what="the ledger", others=None), Verdict.UNKNOWN, "run the command as root"),
        (File(path=Path("/x"), what="Docker socket", missing=True), Verdict.FAILED, "GPUWARDEN_REMEDIATOR_DOCKER in"),
    ],
)
def test_permissions_are_checked(file: File, verdict: Verdict, says: str) -> None:
    found = host.permissions(on_host(files=[file]))

    assert found.verdict is verdict
    assert says in found.fix


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def installed(folder: Path) -> addresses.Addresses:
    """An installation of `gpuwarden init` below one folder."""
    env = folder / "gpuwarden.env"
    env.write_text(
        f"# settings\nGPUWARDEN_RUNTIME_DIR={folder}/run\nGPUWARDEN_REMEDIATOR_LEDGER='sqlite:///{folder}/ledger.db'\n"
        f"GPUWARDEN_QUEUE_DB=sqlite:///{folder}/queue.db\nGPUWARDEN_REMEDIATOR_DOCKER=unix://{folder}/docker.sock\n"
        "GPUWARDEN_REMEDIATOR_EXPORTER=http://127.0.0.1:1\n"
    )
    (folder / "run").mkdir()
    (folder / "run" / "host").write_text("box1\n")
    (folder / "ledger.db").touch(mode=0o660)
    return addresses.find(
        command._parser().parse_args(["--env-file", str(env)]), {"XDG_STATE_HOME": str(folder / "state")}
    )


def test_installation_of_init_is_found_by_its_environment_file(open_folder: Path) -> None:
    found = installed(open_folder)

    assert found.place.runs is Runs.SERVICES
    assert found.ledger == f"sqlite:///{open_folder}/ledger.db"
    assert found.urls["exporter"] == "http://127.0.0.1:1"
    assert found.urls["prometheus"] == "http://127.0.0.1:9090"
    assert found.runtime_dir == open_folder / "run"


def test_rights_of_other_users_are_read(open_folder: Path) -> None:
    found = installed(open_folder)
    token = open_folder / "token"
    token.touch()
    token.chmod(0o644)
    (open_folder / "ledger.db").chmod(0o666)
    (open_folder / "notify-1").write_text("password")
    (open_folder / "notify-1").chmod(0o644)

    rights = {each.path.name: each for each in local.read_files(found, [token])}

    assert rights.keys() == {
        open_folder.joinpath("run").name,
        "host",
        "gpuwarden.env",
        "ledger.db",
        "token",
        "notify-1",
        "docker.sock",
    }
    assert (rights["notify-1"].others, rights["notify-1"].secret) == (4, True)
    assert (rights["token"].others, rights["token"].secret) == (4, True)
    assert rights["ledger.db"].others == 6
    assert rights["docker.sock"].missing
    open_folder.chmod(0o700)
    assert {each.others for each in local.read_files(found, [token])} == {0}


def test_modules_of_http_are_imported_before_threads_use_them() -> None:
    """Threads that import httpcore at the same time find half of it."""
    program = "import sys, deploy.doctor.read; sys.exit('httpcore._sync.http11' not in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@contextmanager
def as_other_user() -> Iterator[None]:
    """Run as another user than root for some time."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_parts_that_this_user_may_not_read_are_unknown(open_folder: Path) -> None:
    found = installed(open_folder)
    for name in ("run/host", "ledger.db"):
        (open_folder / name).chmod(0o600)
    (open_folder / "closed").mkdir(mode=0o700)
    closed = {"GPUWARDEN_REMEDIATOR_NOTIFY_FILE": f"{open_folder}/closed/notify.toml"}
    found = replace(
        found,
        queue=f"sqlite:///{open_folder}/closed/queue.db",
        variables={**found.variables, **closed},
        urls=dict.fromkeys(found.urls, "none"),
    )

    with as_other_user():
        named = diagnose(read(found))

    assert {name: each.verdict for name, each in named.items()} == {
        "installation": Verdict.OK,
        "settings": Verdict.UNKNOWN,
        "host key": Verdict.UNKNOWN,
        "permissions": Verdict.FAILED,  # Docker's socket is missing
        "disk": Verdict.OK,
        "ledger": Verdict.UNKNOWN,
        "queue": Verdict.UNKNOWN,
        "executor": Verdict.UNKNOWN,
    }
    assert named["ledger"].says == f"could not look: this user may not read and write {open_folder}/ledger.db"
    assert named["ledger"].fix == "run the command as root, or as the user of `gpuwarden up`"


def test_tables_of_another_version_are_named(open_folder: Path) -> None:
    found = installed(open_folder)
    Ledger.open(str(found.ledger)).close()
    assert isinstance(local.read_ledger(found, time.time), facts.Ledger)
    with closing(sqlite3.connect(open_folder / "ledger.db")) as database, database:
        database.execute("UPDATE gpuwarden_ledger_version SET version_num = ?", revisions(LEDGER)[-2:-1])

    with pytest.raises(DatabaseError, match=r"another version"):
        local.read_ledger(found, time.time)


def arrived(at: float | None, *, started_at: float | None = None) -> Facts:
    name = "gpuwarden_remediator_watchdog_timestamp_seconds"
    samples = [] if at is None else [Sample(name=name, labels={}, value=at)]
    sender = facts.Alertmanager(url="http://a", config={}, started_at=started_at)
    return replace(FACTS, alertmanager=sender, webhook=Page(url="http://w", not_ready="", samples=samples))


@pytest.mark.parametrize(
    ("found", "verdict", "says"),
    [
        (arrived(990.0), Verdict.OK, "arrived 10 s ago"),
        (arrived(700.0), Verdict.FAILED, "the last one arrived 5 min ago"),
        (arrived(None, started_at=995.0), Verdict.WARNING, "none has arrived yet: Alertmanager started 5 s ago"),
        (arrived(None, started_at=500.0), Verdict.FAILED, "none has ever arrived"),
        (arrived(None), Verdict.FAILED, "none has ever arrived"),
    ],
)
def test_arrival_of_the_watchdog_alert_is_checked(found: Facts, verdict: Verdict, says: str) -> None:
    finding = alerts.watchdog(found)

    assert finding is not None
    assert finding.verdict is verdict
    assert says in finding.says


@pytest.mark.parametrize(
    ("found", "answer", "verdict", "says"),
    [
        (arrived(990.0), facts.TokenAnswer(status=202, says="", file=None), Verdict.OK, "accepted by the webhook"),
        (arrived(990.0), facts.TokenAnswer(status=401, says="wrong", file=Path("/t")), Verdict.FAILED, "wrong"),
        (arrived(990.0), facts.TokenAnswer(status=503, says="busy", file=None), Verdict.FAILED, "answers 503: busy"),
        # A password in Alertmanager's configuration is hidden: only an arrival shows that it works.
        (arrived(990.0), NOT_READ, Verdict.OK, "accepted 10 s ago, with the watchdog alert"),
        (arrived(700.0), NOT_READ, Verdict.UNKNOWN, "could not look: not read"),
        (arrived(None), NOT_READ, Verdict.UNKNOWN, "could not look: not read"),
    ],
)
def test_token_is_checked(found: Facts, answer: facts.TokenAnswer | Unread, verdict: Verdict, says: str) -> None:
    finding = alerts.token(replace(found, token=answer))

    assert finding is not None
    assert finding.verdict is verdict
    assert says in finding.says


def with_notices(unsent: Unsent, administrators: int | None) -> Facts:
    """A page of `serve` with this number of administrators. The settings that doctor finds name a notify file."""
    name = "gpuwarden_remediator_notification_administrators"
    samples = [] if administrators is None else [Sample(name=name, labels={}, value=administrators)]
    known = on_host(settings=Settings(checked=("notify.toml",)))
    page = Page(url="http://w", not_ready="", samples=samples)
    return replace(known, webhook=page, ledger=facts.Ledger(now_s=10_000.0, executors=(), unsent=unsent))


NOTHING = Unsent(waiting=0, oldest_at=None, failing_since=None)


@pytest.mark.parametrize(
    ("found", "verdict", "says"),
    [
        (with_notices(NOTHING, 2), Verdict.OK, "2 administrators"),
        (with_notices(NOTHING, 0), Verdict.WARNING, "the running `serve` has none; add"),
        (with_notices(NOTHING, None), Verdict.WARNING, "no notify file; write"),
        (with_notices(NOTHING, None), Verdict.WARNING, "gpuwarden.env; systemctl restart gpuwarden-remediator"),
        (replace(with_notices(NOTHING, 2), webhook=NOT_READ), Verdict.UNKNOWN, "not read"),
        (
            with_notices(Unsent(waiting=0, oldest_at=None, failing_since=9_000.0, failing=((None, "refused"),)), 1),
            Verdict.FAILED,
            "messages fail for 16 min 40 s: refused",
        ),
        (with_notices(Unsent(waiting=3, oldest_at=0.0, failing_since=None), None), Verdict.FAILED, "3 notices not"),
    ],
)
def test_notifications_are_checked(found: Facts, verdict: Verdict, says: str) -> None:
    finding = databases.notifications(found)

    assert finding is not None
    assert finding.verdict is verdict
    assert says in f"{finding.says}; {finding.fix}"


def test_settings_are_checked_as_the_services_check_them(open_folder: Path) -> None:
    found = installed(open_folder)
    policy = open_folder / "policy.toml"
    policy.write_text("[restart_worker]\nretry_max = 1\n")
    (open_folder / "remediator-web.yml").write_text("bearer_token_file: missing\n")
    file = {**found.file, "GPUWARDEN_REMEDIATOR_PORTS": "1", "GPUWARDEN_QUEUE_DBS": "x", "GPUWARDEN_GPUS": "0"}
    variables = {**found.variables, **file, "GPUWARDEN_EXPORTER_PORT": "x", "GPUWARDEN_REMEDIATOR_POLICY": str(policy)}

    checked = settings.read(replace(found, file=file, variables=variables))
    says = "\n".join(f"{problem}; {fix}" for problem, fix in checked.problems)

    assert "unknown key GPUWARDEN_REMEDIATOR_PORTS is ignored; did you mean GPUWARDEN_REMEDIATOR_PORT?" in says
    assert "unknown key GPUWARDEN_QUEUE_DBS is ignored; did you mean GPUWARDEN_QUEUE_DB?" in says
    assert f"in {open_folder}/gpuwarden.env" in says
    assert "'x' is invalid for --port (or GPUWARDEN_EXPORTER_PORT)" in says
    assert "retry_max" in says
    assert "missing" in says
    assert len(checked.problems) == 5
    assert "GPUWARDEN_REMEDIATOR_PORTS" not in os.environ


def test_settings_of_init_have_no_problem(open_folder: Path) -> None:
    assert settings.read(installed(open_folder)).problems == []


def test_link_that_needs_a_broken_one_names_the_first_and_is_no_second_failure() -> None:
    bad = failed("down", "start it")
    links = [
        Link(name="a", check=lambda _: bad),
        Link(name="b", check=lambda _: bad, needs=("a",)),
        Link(name="c", check=lambda _: warning("x", "y"), needs=("b",)),
        Link(name="works", check=lambda _: ok("fine"), needs=("a",)),
        Link(name="apart", check=lambda _: bad),
        Link(name="excluded", check=lambda _: None),
        Link(name="needs excluded", check=lambda _: bad, needs=("excluded",)),
    ]

    found = diagnose(FACTS, links)

    depends = Finding(verdict=Verdict.UNKNOWN, says="not checked: depends on a")
    assert found == {"a": bad, "b": depends, "c": depends, "works": ok("fine"), "apart": bad}


def test_page_fits_the_terminal() -> None:
    found = {"a": ok("fine"), "b": failed("it is broken " * 10, "start it again, and then read its log " * 3)}

    lines = list(command.page(found, width=80))

    assert max(map(len, lines)) <= 80
    assert lines[0] == "ok        a             fine"
    assert lines[-1] == "1 ok, 1 failed"
    assert len(list(command.page(found, width=None))) == 5


def test_nothing_installed_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("GPUWARDEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(addresses, "ENV_FILE", tmp_path / "missing")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    parts = [
        each for part in ("exporter", "remediator", "prometheus", "alertmanager") for each in (f"--{part}", "none")
    ]

    assert main(["doctor", *parts]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("failed    installation  no `gpuwarden up` of this user runs")
    assert [line for line in lines if line.startswith("failed")] == lines[:1]


def test_unreadable_environment_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env-file", str(tmp_path / "missing")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_unknown_option_exits_2() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--nope"])
