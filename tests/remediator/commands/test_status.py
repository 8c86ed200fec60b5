"""`gpuwarden status`: the state of each part, what needs an operator, and exit codes."""

import json
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.cli.main import main
from gpuwarden.db import engine as db_engine
from gpuwarden.db.clock import DatabaseClock
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import writing
from gpuwarden.queue import JobStore
from gpuwarden.queue.claims import LOCKED_BY_ERRORS
from remediator.commands import open_ledger, status
from remediator.commands.addresses import ADDRESSES
from remediator.ledger.chain import INTERRUPTED, decide
from remediator.ledger.health import Health
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from tests.certificates import authority
from tests.exporter.http.test_server import live, served
from tests.gpuwarden.http.test_web_config import tls, users
from tests.remediator.builders import HOST, alert
from tests.remediator.ledger.test_ledger import accept

RULE: dict[str, Any] = {"name": "GpuwardenJobStalled", "labels": {"remedy": "restart_worker"}, "health": "ok"}


class Parts:
    """All parts that are checked over HTTP, at one address. Tests change `pages`."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str]] = {
            "/metrics": (200, 'gpuwarden_collector_success{collector="source_docker"} 1\n'),
            "/-/ready": (200, "ready"),
            "/api/v1/rules": (200, rules(RULE)),
            "/api/v1/query": (200, scraped(HOST)),
            "/api/v1/alertmanagers": (200, json.dumps({"data": {"activeAlertmanagers": [{"url": "u"}]}})),
        }
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = pages[self.path.partition("?")[0]]
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def scraped(*hosts: str) -> str:
    return json.dumps({"data": {"result": [{"metric": {"host": host}, "value": [0, "1"]} for host in hosts]}})


def rules(*its: dict[str, Any]) -> str:
    return json.dumps({"data": {"groups": [{"rules": [{"name": "Other", "labels": {}}, *its]}]}})


@pytest.fixture
def parts() -> Iterator[Parts]:
    found = Parts()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


Said = tuple[int, list[str]]


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that ages are exact."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(DatabaseClock, "now", lambda _: now)


@pytest.fixture
def ask(
    ledger: Ledger, ledger_url: str, parts: Parts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """Run `gpuwarden status` with healthy parts. Returns its exit code and its lines."""
    for name in ("EXPORTER", "PROMETHEUS", "ALERTMANAGER"):
        monkeypatch.setenv(f"GPUWARDEN_REMEDIATOR_{name}", parts.url)
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_PORT", parts.url.rpartition(":")[2])
    for name in ("GPUWARDEN_QUEUE_DB", "GPUWARDEN_QUEUE_DB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/nowhere"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    beat(ledger)

    def asked(*argv: str) -> Said:
        capsys.readouterr()
        code = main(["status", "--ledger", ledger_url, *argv])
        return code, capsys.readouterr().out.splitlines()

    return asked


def line_with(lines: list[str], *words: str) -> bool:
    """Whether one of the lines has all these words."""
    return any(all(word in line for word in words) for line in lines)


def beat(ledger: Ledger, *, host: str = HOST, ago_s: float = 0.0, errors: int = 0, for_s: float = 99.0) -> None:
    now = time.time()
    ledger.executors.beat(
        host=host, pid=7, armed=False, started_at=now - for_s, errors=errors, now=now - ago_s, workers=4
    )


def test_space_follows_a_long_name_of_a_host(ask: Callable[..., Said], ledger: Ledger) -> None:
    beat(ledger, host="node-1.example")

    _, lines = ask()

    assert "executor node-1.example ok        alive, pid 7, sees 4 workers" in lines
    assert line_with(lines, "ledger                  ok        readable")


def test_last_watchdog_and_last_drill_are_shown(ask: Callable[..., Said], ledger: Ledger) -> None:
    ledger.chain.mark_watchdog()
    drill = ledger.chain.start([HOST], who="ann", timeout_s=9.0)[0]
    ledger.chain.end({drill.drill_id: "webhook"})

    code, lines = ask()

    assert code == 1
    assert "watchdog      ok        last one 0 s ago" in lines
    assert "drill         DOWN      drill of box1 0 s ago ended at webhook" in lines


def test_interrupted_drill_and_drill_of_a_removed_host_hide_no_result(ask: Callable[..., Said], ledger: Ledger) -> None:
    beat(ledger, host="old", ago_s=30 * 86400)
    passed, interrupted, removed = ledger.chain.start([HOST, HOST, "old"], who="ann", timeout_s=9.0)
    with writing(ledger._engine) as connection:
        decide(connection, [({"remedy": "drill", "drill": str(passed.drill_id)}, 1.0)], host=HOST, now=time.time())
    ledger.chain.end({passed.drill_id: None, interrupted.drill_id: INTERRUPTED, removed.drill_id: "webhook"})

    code, lines = ask()

    assert code == 0
    assert "drill         ok        last one passed 0 s ago on 1 host" in lines


def test_watchdog_that_stopped_needs_an_operator(
    ask: Callable[..., Said], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ledger.chain._clock, "now", lambda: time.time() - 400.0)
        ledger.chain.mark_watchdog()

    code, lines = ask()

    assert code == 1
    assert line_with(lines, "watchdog", "DOWN", "last one 6 min 40 s ago")
    assert line_with(lines, "run `gpuwarden drill`")


def test_watchdog_that_never_arrived_needs_an_operator(ask: Callable[..., Said], ledger: Ledger) -> None:
    beat(ledger, for_s=400.0)

    code, lines = ask()

    assert code == 1
    assert line_with(lines, "watchdog", "DOWN", "none in 6 min 40 s")


def test_healthy_pipeline_needs_no_operator(ask: Callable[..., Said], parts: Parts) -> None:
    code, lines = ask()

    assert code == 0
    assert lines == [
        "ledger        ok        readable and writable",
        "executor box1 ok        alive, pid 7, sees 4 workers",
        "alerts        -         none yet",
        "watchdog      -         none yet",
        "drill         -         none yet",
        "notifications ok        0 waiting",
        f"remediator    ok        ready at {parts.url}",
        f"exporter      ok        ready at {parts.url}",
        f"alertmanager  ok        ready at {parts.url}",
        f"prometheus    ok        ready at {parts.url}, evaluates 1 acting rule",
        "",
        "watched   box1: 0 GPUs, 0 workers",
        "dry run   every remedy on box1, no order yet",
        "0 open episodes",
        "",
        "nothing needs an operator",
    ]


def test_remedies_of_one_order_share_a_line(ledger: Ledger, ask: Callable[..., Said]) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="ann", reason="", host=HOST, remedy="restart_worker"))

    modes = [line for line in ask()[1] if line.startswith(("ARMED", "dry run"))]

    assert [line.partition(" on ")[0] for line in modes] == [
        "dry run   hold_lost_host, recycle_container, restart_container, scale_tenant, taint_node, wrangle",
        "ARMED     restart_worker",
    ]


@pytest.mark.usefixtures("stopped_clock")
def test_status_lists_armed_paused_and_held(ledger: Ledger, ask: Callable[..., Said]) -> None:
    now = time.time()
    ledger.orders.give(Order(act=Act.ARM, at=now, who="ann", reason=""))
    ledger.orders.give(Order(act=Act.PAUSE, at=now, who="bob", reason="a drill", until=now + 3600))
    accept(ledger, alert(worker="w\x1b1"))
    ledger.journal.wait(1, Wait(reason=Reason.PAUSED, message="paused: by bob"), now=now - 61)

    code, lines = ask()

    assert code == 0, "a pause ends without an operator"
    assert any(line.startswith("ARMED     every remedy on box1, armed by ann at ") for line in lines)
    assert any(
        line.startswith("paused    pause 2 on every host from ") and line.endswith(": a drill") for line in lines
    )
    assert "  1: w\\x1b1 on box1, paused for 1 min 1 s: paused: by bob" in lines


def test_status_lists_current_and_planned_pauses(ledger: Ledger, ask: Callable[..., Said]) -> None:
    now = time.time()
    pause = Order(act=Act.PAUSE, at=now, who="bob", reason="driver", host=HOST, until=now + 3600)
    ledger.orders.give(pause)
    ledger.orders.give(replace(pause, host=None, since=now + 60))

    _, lines = ask()

    assert any(line.startswith("paused    pause 1 on box1 from ") and line.endswith(": driver") for line in lines)
    assert any(line.startswith("planned   pause 2 on every host from ") for line in lines)


@pytest.mark.parametrize(
    ("path", "answer", "says"),
    [
        ("/-/ready", (503, "no recent sample of this host"), "exporter: status 503 at http"),
        (
            "/metrics",
            (200, 'gpuwarden_collector_success{collector="source_docker"} 0\n'),
            "are unknown and are not acted on; check that Docker runs; see its log",
        ),
        ("/-/ready", (503, "starting"), "alertmanager: status 503 at"),
        ("/-/ready", (503, "starting"), "prometheus: status 503 at"),
        ("/api/v1/rules", (200, rules()), "calls the remediator; add alerts/*.rules.yaml"),
        (
            "/api/v1/rules",
            (200, rules({**RULE, "health": "err", "lastError": "many-to-many"})),
            "cannot evaluate GpuwardenJobStalled: many-to-many",
        ),
        ("/api/v1/query", (200, scraped()), "no alert fires for it; check its targets"),
        (
            "/api/v1/alertmanagers",
            (200, json.dumps({"data": {"activeAlertmanagers": []}})),
            "no Alertmanager configured",
        ),
        ("/api/v1/rules", (200, "<html>a proxy</html>"), "prometheus: Prometheus is unreachable"),
        ("/api/v1/rules", (200, "{}"), "prometheus: Prometheus is unreachable"),
    ],
    ids=[
        "exporter not ready",
        "a source fails",
        "Alertmanager not ready",
        "Prometheus not ready",
        "no acting rules",
        "a rule fails",
        "exporter not scraped",
        "no Alertmanager",
        "HTML answer",
        "empty answer",
    ],
)
def test_unhealthy_part_is_named_with_what_to_do(
    ask: Callable[..., Said], parts: Parts, path: str, answer: tuple[int, str], says: str
) -> None:
    parts.pages[path] = answer

    code, lines = ask()

    assert code == 1
    needs = lines[lines.index("needs an operator:") :]
    assert any(says in line for line in needs), lines


def test_tls_and_password_are_used_for_the_exporter(
    ask: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = authority(tmp_path / "ours")
    config, secret = tmp_path / "web.yml", tmp_path / "secret"
    config.write_text(tls(ours) + users(person="correct horse"))
    secret.write_text("person:correct horse\n")
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_EXPORTER_CA_FILE", str(ours.own.cert))
    with served(live(), web_config_file=config) as port:
        url = f"https://127.0.0.1:{port}"

        _, without = ask("--exporter", url)
        _, known = ask("--exporter", url, "--exporter-basic-auth-file", str(secret))
        _, named = ask(
            "--exporter", url, "--exporter-basic-auth-file", str(secret), "--exporter-server-name", "box-2.test"
        )

    assert any(line.startswith(f"exporter      DOWN      status 401 at {url}") for line in without)
    assert f"exporter      ok        ready at {url}" in known
    assert any("not valid for 'box-2.test'" in line for line in named)


def test_unreachable_part_is_named_and_an_excluded_one_not_checked(ask: Callable[..., Said]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed_port = f"http://127.0.0.1:{probe.getsockname()[1]}"

    code, lines = ask("--prometheus", closed_port, "--alertmanager", "none")

    assert code == 1
    assert "alertmanager  -         not checked" in lines
    (need,) = lines[lines.index("needs an operator:") + 1 :]
    assert [each for each in ("- prometheus: ", closed_port, "--prometheus none") if each not in need] == []


def stale(ledger: Ledger) -> None:
    beat(ledger, ago_s=90.0)


def breaker_open(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.BREAKER, at=time.time(), who="e", reason="4 at once"))


def asked(ledger: Ledger) -> None:
    accept(ledger, alert())
    ledger.journal.wait(
        1, Wait(reason=Reason.APPROVAL, message="a person is asked: `gpuwarden approve 1`", asks="k"), now=time.time()
    )


def unarmed(ledger: Ledger) -> None:
    accept(ledger, alert())
    ledger.journal.wait(1, Wait(reason=Reason.DRY_RUN, message="dry run"), now=time.time())


def abandoned(ledger: Ledger) -> None:
    accept(ledger, alert())
    ledger.episodes.close(1, Outcome.PARTLY, Reason.DONE, "free abandoned", now=time.time())


def refused(ledger: Ledger) -> None:
    accept(ledger, alert())
    ledger.episodes.close(1, Outcome.REFUSED, Reason.DONE, "container w1 did not opt in", now=time.time())


def waiting(ledger: Ledger) -> None:
    now = time.time()
    ledger.inbox.accept([alert()], [], now=now - 1000)
    ledger.inbox.take_new(HOST, now=now - 1000)
    ledger.journal.wait(1, Wait(reason=Reason.NO_CONTAINER, message="the worker's container is unknown"), now=now)


def long_silent(ledger: Ledger) -> None:
    beat(ledger, ago_s=8 * 86400.0)


def silent_with_an_episode(ledger: Ledger) -> None:
    accept(ledger, alert())
    beat(ledger, ago_s=8 * 86400.0)
    beat(ledger, host="box2")


def test_many_episodes_are_counted_by_reason_and_those_without_evidence_come_last(
    ledger: Ledger, ask: Callable[..., Said]
) -> None:
    ledger.inbox.accept([alert(f"f{each}", worker=f"w{each}") for each in range(50)], [], now=time.time())
    ledger.inbox.take_new(HOST, now=time.time())
    for number in range(1, 50):
        ledger.journal.wait(number, Wait(reason=Reason.NO_EVIDENCE, message="nothing known"), now=time.time())

    _, lines = ask()[:2]

    listed = [line for line in lines if " on box1, " in line and line.startswith("  ")]
    assert "50: w49 on box1, running" in listed[0]
    assert len(listed) == 20
    assert "  and 30 more: 30 no_evidence" in lines
    assert any(line.endswith("more: see `gpuwarden status --json`") for line in lines)
    assert len(lines) < 60


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize(
    ("done", "names"),
    [
        pytest.param(refused, ("episode 1 of w1 on box1", "container w1 did not opt in"), id="refused"),
        pytest.param(
            waiting,
            ("episode 1 of w1 on box1", "16 min 40 s", "container is unknown", "`gpuwarden ledger show 1`"),
            id="waiting for long",
        ),
        pytest.param(long_silent, ("executor box1: ", "8 d"), id="only executor silent for days"),
        pytest.param(stale, ("executor box1: ", "1 min 30 s"), id="executor silent"),
        pytest.param(breaker_open, ("4 at once", "`gpuwarden breaker reset`"), id="breaker open"),
        pytest.param(asked, ("episode 1 of w1 on box1", "`gpuwarden approve 1`"), id="approval needed"),
        pytest.param(unarmed, ("1 episode in dry run", "`gpuwarden arm`"), id="not armed"),
        pytest.param(
            abandoned,
            ("episode 1 of w1 on box1", "free abandoned", "`gpuwarden ledger show 1`"),
            id="abandoned",
        ),
    ],
)
def test_episode_that_needs_an_operator_is_named_with_what_to_do(
    ledger: Ledger, ask: Callable[..., Said], done: Callable[[Ledger], None], names: tuple[str, ...]
) -> None:
    done(ledger)

    code, lines = ask()

    assert code == 1
    (need,) = lines[lines.index("needs an operator:") + 1 :]
    need = re.sub(r"( min \d)\d s", r"\g<1>0 s", need)  # the command takes a second or two
    assert [each for each in names if each not in need] == []


@pytest.mark.parametrize("reason", [each for each in Reason if each.needs_operator and each not in status.OTHER_WAITS])
def test_episode_that_only_an_operator_can_end_is_named_at_once(
    ledger: Ledger, ask: Callable[..., Said], reason: Reason
) -> None:
    accept(ledger, alert())
    ledger.journal.wait(1, Wait(reason=reason, message="no actuator for processes"), now=time.time())

    code, lines = ask()

    assert code == 1
    (need,) = lines[lines.index("needs an operator:") + 1 :]
    advice = f"; {reason.advice[0].lower()}{reason.advice[1:].rstrip('.')}; see `gpuwarden ledger show 1`"
    assert need.startswith("  - episode 1 of w1 on box1 open for ")
    assert need.endswith(f": no actuator for processes{advice}")


@pytest.mark.parametrize("reason", [Reason.ACKNOWLEDGED, Reason.STARTED_ELSEWHERE])
def test_restart_that_was_given_up_needs_no_operator_after_its_end(
    ledger: Ledger, ask: Callable[..., Said], reason: Reason
) -> None:
    accept(ledger, alert())
    ledger.episodes.close(1, Outcome.PARTLY, reason, "its target runs", now=time.time())

    assert ask()[0] == 0


def test_status_lists_hosts_gpus_and_workers(ask: Callable[..., Said], parts: Parts) -> None:
    def series(name: str, value: str, **labels: str) -> dict[str, Any]:
        return {"metric": {"__name__": f"gpuwarden_{name}", "host": HOST, **labels}, "value": [0, value]}

    job = {"worker": "w1", "container": "c1"}
    result = [
        *(series("gpu_info", "1", gpu=f"GPU-{n}") for n in range(2)),
        series("worker_alive", "1", **job),
        series("job_id", "7", attempt="1", incarnation="i", **job),
        series("job_info", "1", job_class="gpu", **job),
        series("job_phase", "1", phase="step", **job),
        series("job_step_beat_age_seconds", "156", **job),
        series("worker_alive", "1", worker="w2", container=""),
        series("job_id", "8", attempt="1", incarnation="i", worker="w2", container=""),
        series("job_phase", "1", phase="load", worker="w2", container=""),
        series("job_info", "1", job_class="cpu", worker="w2", container=""),
        series("job_step_beat_age_seconds", "NaN", worker="w2", container=""),
        series("worker_alive", "1", worker="w3", container=""),
        series("worker_alive", "0", worker="w4", container=""),
        series("worker_info", "1", worker="w5\x1b", container=""),
        {"metric": {"__name__": "gpuwarden_gpu_info", "host": "box2", "gpu": "GPU-9"}, "value": [0, "1"]},
    ]
    parts.pages["/api/v1/query"] = (200, json.dumps({"data": {"result": result}}))

    lines = ask()[1]
    (kept,) = json.loads(ask("--host", HOST, "--json")[1][0])["watched"]

    start = lines.index("watched   box1: 2 GPUs, 5 workers")
    assert lines[start + 1 : start + 7] == [
        "  w1 running, job 7, phase step, last step beat 2 min 36 s ago",
        "  w2 running, job 8, phase load, no step beat yet, no GPU used: only its budget ends it",
        "  w3 idle",
        "  w4 dead",
        "  w5\\x1b unknown",
        "watched   box2: 1 GPU, 0 workers",
    ]
    assert (kept["host"], kept["gpus"], kept["workers"][0]["step_beat_age_s"]) == (HOST, 2, 156.0)


def test_status_lists_at_most_some_workers(
    ask: Callable[..., Said], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.commands.watched.LISTED_MAX", 2)
    alive = [
        {"metric": {"__name__": "gpuwarden_worker_alive", "host": HOST, "worker": f"w{n}"}, "value": [0, "1"]}
        for n in range(5)
    ]
    parts.pages["/api/v1/query"] = (200, json.dumps({"data": {"result": alive}}))

    lines = ask()[1]

    start = lines.index("watched   box1: 0 GPUs, 5 workers")
    assert lines[start + 1 : start + 4] == ["  w0 idle", "  w1 idle", "  3 more workers: see --json"]


def test_silent_host_with_an_open_episode_is_listed(ledger: Ledger, ask: Callable[..., Said], parts: Parts) -> None:
    parts.pages["/api/v1/query"] = (200, scraped(HOST, "box2"))
    silent_with_an_episode(ledger)

    code, lines = ask()

    assert code == 1
    assert any(line.startswith("executor box1 DOWN      no heartbeat for 8 d") for line in lines)


def test_quarantined_gpu_needs_an_operator(store: JobStore, queue_url: str, ask: Callable[..., Said]) -> None:
    store.gpu_quarantine.quarantine(["GPU-0"], host=HOST, worker="w1", reason="it cannot be stopped", now=store.now())
    assert ask()[0] == 0, "without a queue"

    code, lines = ask("--queue-db", queue_url)

    assert code == 1
    assert "`gpuwarden gpu release GPU-0`" in lines[-1]
    assert "queue         ok        readable and writable" in lines


@pytest.mark.parametrize(
    ("who", "needs"),
    [
        (LOCKED_BY_ERRORS, True),
        ("the executor of box1, episode 7", True),
        ("ann@box1", False),
    ],
)
def test_worker_that_gpuwarden_locked_needs_an_operator(
    store: JobStore, queue_url: str, ask: Callable[..., Said], who: str, needs: bool
) -> None:
    store.claims.register("gpu", host=HOST, worker="w1", incarnation="i", now=store.now())
    store.admin.lock(host=HOST, worker="w1", who=who, reason="3 fatal errors", now=store.now())

    code, lines = ask("--queue-db", queue_url)

    assert code == int(needs)
    says = "worker w1 of box1 is locked: 3 fatal errors; run `gpuwarden worker unlock w1 --host box1` once it works"
    assert (lines[-1] == f"  - {says}") is needs
    assert ask("--queue-db", queue_url, "--host", "box2")[1][-1] != f"  - {says}"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///{}/qeue.db", "no queue database at"),
        ("sqlite:///{}", "is not a regular file"),
        ("queue.db", "invalid database URL"),
    ],
)
def test_invalid_queue_is_named_and_not_created(ask: Callable[..., Said], tmp_path: Path, url: str, says: str) -> None:
    code, lines = ask("--queue-db", url.format(tmp_path))

    assert code == 1
    assert says in lines[-1]
    assert "check --queue" in lines[-1]
    assert not (tmp_path / "qeue.db").exists()


def test_executor_that_never_ran_differs_from_a_removed_one(ledger: Ledger, ask: Callable[..., Said]) -> None:
    beat(ledger, host="box2", ago_s=8 * 86400.0)
    beat(ledger, errors=2)

    code, lines = ask()
    assert code == 0
    assert line_with(lines, "executor box2 -", "8 d")
    assert line_with(lines, "executor box1 ok", "pid 7", "4 workers", "2 unexpected errors")

    code, lines = ask("--host", "box3")
    assert code == 1
    assert line_with(lines[-1:], "executor:", "box3", "`gpuwarden up`")


@pytest.mark.parametrize("name", ["ledger", "queue"])
def test_locked_database_is_reported(
    ledger_file: Path,
    tmp_path: Path,
    ask: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.05)
    queue = tmp_path / "the-queue.db"
    JobStore.open(f"sqlite:///{queue}").close()
    file = {"ledger": ledger_file, "queue": queue}[name]
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        code, lines = ask("--queue-db", f"sqlite:///{queue}")

    assert code == 1
    (need,) = lines[lines.index("needs an operator:") + 1 :]
    assert [each for each in (f"- {name}: ", "write lock", f"`fuser {file}`") if each not in need] == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("database or disk is full", "disk full: nothing is recorded or done"),
        ("attempt to write a readonly database", "this user may only read it"),
        ("unable to open database file", "it cannot be opened"),
        ("the server closed the connection", "check --ledger and its database"),
    ],
)
def test_ledger_error_is_reported_with_what_to_do(
    ask: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, error: str, says: str
) -> None:
    def refuse(_: Health) -> None:
        raise DatabaseError(f"sqlite:///l.db: {error}")

    monkeypatch.setattr(Health, "check_writable", refuse)

    code, lines = ask()

    assert code == 1
    assert says in lines[-1]


def test_almost_full_disk_is_reported(ask: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "DISK_FREE_MIN", 2**62)

    code, lines = ask()

    assert code == 1
    assert "MiB free on the disk of" in lines[-1]


def test_missing_ledger_costs_only_its_lines(tmp_path: Path, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [option for name in ADDRESSES for option in (f"--{name}", parts.url)]

    code = main(["status", "--ledger", f"sqlite:///{tmp_path}/ledgr.db", "--queue-db", "none", *urls])

    said = capsys.readouterr().out
    assert code == 1
    assert "no ledger at" in said
    assert f"prometheus    ok        ready at {parts.url}" in said


def test_json_has_the_operator_needs(ledger: Ledger, ask: Callable[..., Said]) -> None:
    accept(ledger, alert())
    ledger.journal.wait(1, Wait(reason=Reason.DRY_RUN, message="dry run"), now=time.time())

    code, (line,) = ask("--json")

    output = json.loads(line)
    assert (code, output["ok"], len(output["needs"])) == (1, False, 1)
    assert output["armed"] == [
        {"host": HOST, "remedy": remedy, "armed": False, "approval": False, "by": None}
        for remedy in (
            "hold_lost_host",
            "recycle_container",
            "restart_container",
            "restart_worker",
            "scale_tenant",
            "taint_node",
            "wrangle",
        )
    ]
    assert output["episodes"][0]["reason"] == "dry_run"
    assert {part["name"] for part in output["parts"]} >= {"ledger", "executor box1", "prometheus"}


def test_unknown_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--ledger", "sqlite:////l.db", "--what"])

    assert ended.value.code == 2
    assert "unknown argument --what" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "kept"), [("ledger", True), ("queue", True), ("ledger", False)])
def test_databases_of_up_are_found_by_default(tmp_path: Path, *, name: str, kept: bool) -> None:
    file = tmp_path / "gpuwarden" / name / f"{name}.db"
    if kept:
        file.parent.mkdir(parents=True)
        file.touch()
    env = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 1000)
        found = {"ledger": open_ledger.ledger_url, "queue": open_ledger.queue_url}[name](env)

    assert found == (f"sqlite:///{file}" if kept else None)


@pytest.mark.parametrize("said", [["status"], ["ledger", "list"], ["arm"], ["breaker", "reset"]], ids=" ".join)
def test_missing_ledger_setting_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delenv("GPUWARDEN_REMEDIATOR_LEDGER", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    with pytest.raises(SystemExit) as ended:
        main(said)

    assert ended.value.code == 2
    output = "no ledger found: start `gpuwarden up`, or set --ledger or"
    assert f"{output} $GPUWARDEN_REMEDIATOR_LEDGER" in capsys.readouterr().err
