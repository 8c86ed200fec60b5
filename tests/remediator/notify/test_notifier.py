"""Notices of the ledger become messages: once, in one digest, again after a failure, and never with a secret."""

import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import insert

from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import writing
from gpuwarden.format import format_time, operator_name
from gpuwarden.notify.sender import Message, Sender
from gpuwarden.queue import JobStore, Submission
from remediator.alert import DRILL
from remediator.ledger.chain import WATCHDOG, decide
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import GATHER_S, RETRY_S, STORM, STORM_S, Notice
from remediator.ledger.schema import ARRIVALS
from remediator.notify.notifier import Notifier
from remediator.remedies.guards import Act, Order
from tests.json_server import json_server
from tests.mailbox import Mailbox, listening, mail_server, new_mailbox
from tests.remediator.builders import HOST, NOW
from tests.waiting import eventually, together

OPS: Final = "ops@example.com"


class Server:
    """Accepts messages, or not. It stands for Apprise where a test needs hours."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Message]] = []
        self.error: str | None = None

    def __call__(self, url: str, message: Message) -> str | None:
        if self.error is None:
            self.got.append((url, message))
        return self.error


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "notify.toml"
    path.write_text(f'mail_server = "mailtos://u:secret@smtp.example.com"\nadministrators = ["{OPS}"]\n')
    return path


@pytest.fixture
def server() -> Server:
    return Server()


def keep_alive(ledger: Ledger) -> None:
    """A watchdog alert that is newer than every time of a test."""
    with writing(ledger.chain._engine) as connection:
        connection.execute(insert(ARRIVALS).values(name=WATCHDOG, at=NOW + 2 * 365 * 86400))


@pytest.fixture
def notifier(ledger: Ledger, file: Path, server: Server) -> Notifier:
    keep_alive(ledger)
    return Notifier(ledger, file, send=server)


def raise_event(ledger: Ledger, number: int = 1, *, now: float = NOW) -> None:
    text = f"The chain {number} is dead."
    ledger.notices.notify_administrators(
        key=f"chain {number}", kind="chain", title="the chain is dead", text=text, now=now
    )


def turn(notifier: Notifier, now: float) -> None:
    notifier.tick(now)
    notifier.wait_until_sent(30)


@pytest.mark.both_databases
def test_an_event_is_one_message_also_if_it_is_raised_again(ledger: Ledger, notifier: Notifier, server: Server) -> None:
    for at in (0, 1, GATHER_S, 200, 400):
        raise_event(ledger, now=NOW + at)
        turn(notifier, NOW + at)

    ((url, message),) = server.got
    assert url == "mailtos://u:secret@smtp.example.com?to=ops@example.com"
    assert (message.title, message.body) == ("[gpuwarden] the chain is dead", "The chain 1 is dead.")


@pytest.mark.both_databases
def test_two_replicas_send_one_message(ledger: Ledger, ledger_url: str, file: Path, server: Server) -> None:
    raise_event(ledger)
    ledger.notices.expand(1, now=NOW)
    with closing(Ledger.open(ledger_url, host="box2")) as other:
        both = [Notifier(each, file, send=server) for each in (ledger, other)]
        for step in range(5):
            together(*(lambda each=each, at=NOW + GATHER_S + step: turn(each, at) for each in both))

    assert len(server.got) == 1


def test_a_replica_that_knows_fewer_administrators_drops_no_message_to_the_others(
    ledger: Ledger, notifier: Notifier, server: Server, tmp_path: Path
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("administrators = []\n")
    ignorant = Notifier(ledger, other, send=server)
    raise_event(ledger)
    turn(notifier, NOW)
    turn(ignorant, NOW + GATHER_S)
    turn(notifier, NOW + GATHER_S + 1)
    assert len(server.got) == 1

    raise_event(ledger, 2, now=NOW + 100)
    turn(notifier, NOW + 100)
    turn(ignorant, NOW + 100 + RETRY_S)
    assert ledger.notices.unsent().waiting == 0


def test_each_further_message_of_an_hour_waits_a_minute_longer(
    ledger: Ledger, notifier: Notifier, server: Server
) -> None:
    for second in range(0, 3600, 5):
        raise_event(ledger, second, now=NOW + second)
        turn(notifier, NOW + second)

    assert 8 <= len(server.got) <= 11


@pytest.mark.both_databases
def test_the_message_of_a_drill_waits_for_no_rate_limit_and_no_failure(
    ledger: Ledger, notifier: Notifier, server: Server
) -> None:
    def drill(at: float) -> None:
        ledger.notices.notify_administrators(key=f"drill {at}", kind="drill", title="t", text="t", now=at)
        for second in (0, GATHER_S):
            turn(notifier, at + second)

    for second in range(0, 400, 5):
        raise_event(ledger, second, now=NOW + second)
        turn(notifier, NOW + second)
    sent = len(server.got)
    drill(NOW + 400)
    server.error = "connection refused"
    for second in range(1000, 1600, 5):
        raise_event(ledger, second, now=NOW + second)
        turn(notifier, NOW + second)
    server.error = None
    drill(NOW + 1600)

    assert len(server.got) == sent + 2


@pytest.mark.both_databases
def test_nothing_is_lost_while_the_server_is_down_for_ten_minutes(
    ledger: Ledger, notifier: Notifier, server: Server
) -> None:
    server.error = "connection refused"
    for second in range(0, 600, 30):
        raise_event(ledger, second, now=NOW + second)
        turn(notifier, NOW + second)
    server.error = None
    for second in range(600, 1200, 30):
        turn(notifier, NOW + second)

    ((_, message),) = server.got
    assert message.title == "[gpuwarden] 20 events: 20 dead chains"
    assert all(f"The chain {second} is dead." in message.body for second in range(0, 600, 30))


def test_a_notice_is_dropped_after_an_hour_of_failures(
    ledger: Ledger, notifier: Notifier, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = "connection refused"
    raise_event(ledger)
    for second in range(0, int(RETRY_S) + 900, 60):
        turn(notifier, NOW + second)
    lost = ledger.notices.unsent()
    assert (lost.waiting, lost.failing) == (0, ((None, "connection refused"),))
    server.error = None
    raise_event(ledger, 2, now=NOW + RETRY_S + 900)
    turn(notifier, NOW + RETRY_S + 900 + 300)

    ((_, message),) = server.got
    assert "The chain 2" in message.body
    assert "The chain 1" not in message.body
    assert ledger.notices.unsent().failing == ()
    said = capsys.readouterr().out
    assert "notifications fail" in said
    assert "notifications dropped after an hour" in said


@pytest.mark.both_databases
def test_lost_messages_are_reported_for_an_hour_or_three_days_to_administrators(
    ledger: Ledger, notifier: Notifier, server: Server
) -> None:
    server.error = "connection refused"
    raise_event(ledger)
    ledger.notices.add([Notice(key="a", kind="failed", title="t", text="t", at=NOW, address="a@example.com")])
    for second in range(0, int(RETRY_S) + 900, 60):
        turn(notifier, NOW + second)
    reported = []
    for hours in (1.5, 3, 48, 96):
        turn(notifier, NOW + hours * 3600)
        reported.append({address for address, _ in ledger.notices.unsent().failing})

    assert reported == [{None, "a@example.com"}, {None}, {None}, set()]


@pytest.mark.both_databases
def test_administrators_are_sent_to_first_and_addresses_that_fail_last(ledger: Ledger) -> None:
    addresses = [f"{name}@example.com" for name in ("fails", "works")]
    for age_s, address in zip((60, 40), addresses, strict=True):
        ledger.notices.add([Notice(key=address, kind="failed", title="t", text="t", at=NOW - age_s, address=address)])
    failing = ledger.notices.claim(ledger.notices.due(0, now=NOW)[0], now=NOW)
    assert failing is not None
    ledger.notices.mark_failed(failing, "no answer", now=NOW)
    raise_event(ledger, now=NOW + 50)
    ledger.notices.expand(1, now=NOW + 50)

    due = ledger.notices.due(1, now=NOW + 60)
    claimed = [ledger.notices.claim(each, now=NOW + 60) for each in due]

    assert [each and each.address for each in claimed] == [None, "works@example.com", "fails@example.com"]


@pytest.mark.both_databases
def test_a_message_is_sent_after_a_clock_was_a_year_ahead(ledger: Ledger, notifier: Notifier, server: Server) -> None:
    ahead = 365 * 86400.0
    raise_event(ledger, now=NOW + ahead)
    turn(notifier, NOW + ahead + GATHER_S)
    raise_event(ledger, 2, now=NOW + ahead + 10)
    for second in (0, 100, 1000):
        raise_event(ledger, 3 + second, now=NOW + second)
        turn(notifier, NOW + second + GATHER_S)

    assert len(server.got) == 4


def test_a_message_is_not_sent_again_because_the_database_restarts(
    ledger: Ledger, file: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, record = [1, 2], ledger.notices.mark_sent

    def mark_sent(*args: Any, **named: Any) -> None:
        if failures:
            raise DatabaseError(f"no answer {failures.pop()}")
        record(*args, **named)

    monkeypatch.setattr(type(ledger.notices), "mark_sent", lambda _, *args, **named: mark_sent(*args, **named))
    notifier = Notifier(ledger, file, send=server, poll_s=0.01)
    raise_event(ledger)
    for second in (GATHER_S, 200, 400):
        turn(notifier, NOW + second)

    assert len(server.got) == 1


def test_a_sender_that_cannot_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")

    assert Sender()("json://localhost", Message(title="a", body="b")) == (
        "the sending process cannot be started: No such file or directory"
    )


def test_a_corrected_file_reaches_an_administrator_who_waited(
    ledger: Ledger, notifier: Notifier, server: Server, file: Path
) -> None:
    server.error = "wrong password"
    raise_event(ledger)
    turn(notifier, NOW + GATHER_S)
    server.error = None
    file.write_text('administrators = ["ntfys://ntfy.example.com/ops"]\n')
    turn(notifier, NOW + 60)

    assert [url for url, _ in server.got] == ["ntfys://ntfy.example.com/ops"]


def test_an_open_circuit_breaker_is_one_message(ledger: Ledger, notifier: Notifier, server: Server) -> None:
    ledger.orders.give(Order(act=Act.BREAKER, at=NOW, who="gpuwarden", reason="4 workers need a restart"))
    for second in (0, 10, 300, 600):
        turn(notifier, NOW + second)

    ((_, message),) = server.got
    assert message.body == (
        "The circuit breaker is open: gpuwarden begins no action.\n"
        "Reason: 4 workers need a restart\n"
        "Next: find the cause, then run gpuwarden breaker reset"
    )


def test_a_dead_chain_is_one_message_and_its_return_another(
    ledger: Ledger, notifier: Notifier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in (0, 60):
        monkeypatch.setattr(ledger.chain._clock, "now", lambda at=NOW + second: at)
        ledger.chain.mark_watchdog()
    for second in (60, 359, 362, 400, 900):
        turn(notifier, NOW + second)
    assert [message.title for _, message in server.got] == ["[gpuwarden] no alert arrives: the chain is dead"]
    assert "run gpuwarden drill" in server.got[0][1].body
    assert "No drill has ended yet." in server.got[0][1].body

    monkeypatch.setattr(ledger.chain._clock, "now", lambda: NOW + 1200)
    ledger.chain.mark_watchdog()
    for second in (1200, 1300, 1400):
        turn(notifier, NOW + second)

    assert [message.title for _, message in server.got][1:] == ["[gpuwarden] alerts arrive again: the chain works"]


def test_a_chain_without_a_first_alert_is_dead(
    ledger: Ledger, file: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = Notifier(ledger, file, send=server)
    monkeypatch.setattr(ledger.chain._clock, "now", lambda: NOW - 7200)
    (drill,) = ledger.chain.start([HOST], who="ann", timeout_s=60)
    with writing(ledger.chain._engine) as connection:
        decide(connection, [({"remedy": DRILL, "drill": str(drill.drill_id)}, NOW)], host=HOST, now=NOW - 7190)
    for second in (0, 299, 305, 400, 900):
        turn(notifier, NOW + second)

    ((_, message),) = server.got
    assert message.title == "[gpuwarden] no alert arrives: the chain is dead"
    assert message.body.startswith("The alert GpuwardenWatchdog has never arrived. ")
    assert f"The last drill, of {HOST}, began at {format_time(NOW - 7200)}, 2 h 5 min ago, and passed." in message.body


def test_a_started_remediator_waits_for_the_watchdog(
    ledger: Ledger, notifier: Notifier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger.chain._clock, "now", lambda: NOW - 9000)
    ledger.chain.mark_watchdog()

    for second in (0, 100, 299):
        turn(notifier, NOW + second)

    assert server.got == []


def test_the_breaker_is_reported_while_the_queue_is_unreachable(ledger: Ledger, file: Path, server: Server) -> None:
    def unreachable() -> JobStore:
        raise DatabaseError("no answer")

    notifier = Notifier(ledger, file, queue=unreachable, send=server)
    ledger.orders.give(Order(act=Act.BREAKER, at=NOW, who="gpuwarden", reason="4 workers need a restart"))
    for second in (0, 10):
        turn(notifier, NOW + second)

    assert [message.title for _, message in server.got] == ["[gpuwarden] the circuit breaker is open"]


def test_two_errors_that_last_are_logged_once_each(
    ledger: Ledger, file: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable() -> JobStore:
        raise DatabaseError("no answer")

    notifier = Notifier(ledger, file, queue=unreachable, send=server)
    file.write_text("administrators = 1\n")
    for second in range(5):
        turn(notifier, NOW + second)

    said = capsys.readouterr().out
    assert (said.count("events not read"), said.count("old content in use")) == (1, 1)


@pytest.fixture
def job_notifier(ledger: Ledger, queue_url: str, file: Path, server: Server) -> Iterator[Notifier]:
    """A notifier that has read the queue before the first job."""
    keep_alive(ledger)
    with file.open("a") as more:
        more.write('[submitters]\n"*" = "{user}@example.com"\n')
    found = Notifier(ledger, file, queue=partial(JobStore.open, queue_url), send=server)
    turn(found, NOW)
    yield found
    found.close()


def fail(
    store: JobStore,
    submission: Submission,
    *,
    run: str | None = None,
    notify: str | None = None,
    reason: str = "ValueError: no such file",
) -> int:
    """A job that failed."""
    if run is None:
        job_id = store.runs.submit(submission, now=NOW)
    else:
        job_id = store.runs.submit_run(run, {"a": submission}, notify=notify, now=NOW)["a"]
    slot: dict[str, Any] = {"host": HOST, "worker": "w1", "incarnation": f"i{job_id}", "now": NOW}
    store.claims.register(submission.queue, **slot)
    claimed = store.claims.claim(submission.queue, **slot)
    assert claimed is not None
    its: dict[str, Any] = {"attempt": claimed.attempt, "incarnation": f"i{job_id}"}
    assert store.claims.fail_by_worker(job_id, **its, reason=reason, now=NOW)
    return job_id


@pytest.mark.both_databases
def test_a_failed_job_goes_to_its_address_else_its_runs_else_its_submitters(
    store: JobStore, job_notifier: Notifier, server: Server
) -> None:
    own = Submission(queue="gpu", notify="ntfys://ntfy.example.com/own")
    first = fail(store, own, run="r1", notify="ntfys://ntfy.example.com/run")
    second = fail(store, Submission(queue="gpu"), run="r2", notify="ntfys://ntfy.example.com/run")
    third = fail(store, Submission(queue="gpu"))
    for second_s in (1, 10, 100):
        turn(job_notifier, NOW + second_s)

    user = operator_name().partition("@")[0]
    sent = {url: message.title for url, message in server.got}
    assert sent == {
        "ntfys://ntfy.example.com/own": f"[gpuwarden] job {first} failed",
        "ntfys://ntfy.example.com/run": f"[gpuwarden] job {second} failed",
        f"mailtos://u:secret@smtp.example.com?to={user}@example.com": f"[gpuwarden] job {third} failed",
    }
    assert len(server.got) == 3
    assert server.got[0][1].body == (
        f"Job {first} of queue gpu, run r1, failed, attempt 1.\nReason: ValueError: no such file\n"
        f"Next: gpuwarden job show {first}"
    )


@pytest.mark.both_databases
def test_a_job_that_is_blocked_again_is_another_message(
    store: JobStore, job_notifier: Notifier, server: Server
) -> None:
    job_id = store.runs.submit(Submission(queue="gpu", notify="ntfys://ntfy.example.com/own"), now=NOW)
    for second in (0, 1000):
        assert store.admin.block(job_id, reason="blocked by ann", now=NOW + second)
        for later in (1, 10, 100):
            turn(job_notifier, NOW + second + later)
        assert store.admin.unblock(job_id, reason="unblocked", now=NOW + second + 500)

    assert [message.title for _, message in server.got] == [f"[gpuwarden] job {job_id} is blocked"] * 2
    assert server.got[0][1].body.endswith(f"Next: correct the job, then run gpuwarden job unblock {job_id}")


def test_events_before_the_first_start_are_not_reported(
    store: JobStore, ledger: Ledger, queue_url: str, file: Path, server: Server
) -> None:
    fail(store, Submission(queue="gpu", notify="ntfys://ntfy.example.com/own"))
    with closing(Notifier(ledger, file, queue=partial(JobStore.open, queue_url), send=server)) as notifier:
        for second in (0, 10, 100):
            turn(notifier, NOW + second)

    assert server.got == []


def test_a_server_that_does_not_answer_costs_one_timeout() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"mailto://127.0.0.1:{silent.getsockname()[1]}?from=a@example.com&to=b@example.com"
        began_s = time.monotonic()
        error = Sender(timeout_s=2)(url, Message(title="t", body="b"))

    assert error == "no answer within 2 s"
    assert time.monotonic() - began_s < 10


def test_a_message_on_its_way_is_recorded_before_the_process_ends(ledger: Ledger, tmp_path: Path) -> None:
    """A real sender, and a server that answers after a second."""
    path, now = tmp_path / "hook.toml", ledger.now()
    raise_event(ledger, now=now - GATHER_S)
    with json_server(answer_s=1.0) as (url, bodies):
        path.write_text(f'administrators = ["{url}"]\n')
        with Notifier(ledger, path, poll_s=0.05):
            eventually(lambda: bool(bodies), "the server has the message")

    assert [each.state for each in ledger.notices.deliveries("chain 1")] == ["sent"]
    assert len(bodies) == 1


@pytest.mark.slow
@pytest.mark.behaviour("B8")
def test_mail_arrives_after_the_smtp_server_was_down(ledger: Ledger, tmp_path: Path) -> None:
    """A real server and a real sender. The clock is the test's."""
    box = new_mailbox()
    path = tmp_path / "mail.toml"
    path.write_text(f'mail_server = "{box.url}"\nadministrators = ["{OPS}", "second@example.com"]\n')
    keep_alive(ledger)
    notifier = Notifier(ledger, path)
    raise_event(ledger)
    for second in (5, 60, 300):
        turn(notifier, NOW + second)
    assert ledger.notices.unsent().failing[0][1].endswith("Connection refused")
    with listening(box):
        turn(notifier, NOW + 600)
        turn(notifier, NOW + 900)

    assert sorted(each.to for each in box.mails) == [OPS, "second@example.com"]
    assert {each.subject for each in box.mails} == {"[gpuwarden] the chain is dead"}
    assert box.to(OPS)[0].text.strip() == "The chain 1 is dead."


@pytest.fixture
def box(file: Path) -> Iterator[Mailbox]:
    """A real mail server, which the file names."""
    with mail_server() as found:
        file.write_text(f'mail_server = "{found.url}"\nadministrators = ["{OPS}", "second@example.com"]\n')
        yield found


@pytest.fixture
def mailing(ledger: Ledger, queue_url: str, file: Path, box: Mailbox) -> Iterator[Notifier]:
    """A notifier with the real sender, which has read the queue before the first job."""
    assert box.url in file.read_text()
    keep_alive(ledger)
    with closing(Notifier(ledger, file, queue=partial(JobStore.open, queue_url))) as found:
        turn(found, NOW)
        yield found


@pytest.mark.slow
@pytest.mark.both_databases
@pytest.mark.behaviour("B8")
def test_ten_thousand_events_in_a_minute_are_one_digest(
    store: JobStore, ledger: Ledger, mailing: Notifier, box: Mailbox
) -> None:
    job = Submission(queue="gpu", notify="alice@example.com")
    store.runs.submit_run("r1", {str(number): job for number in range(200)}, now=NOW)
    for second in range(50):
        its: dict[str, Any] = {"reason": "every item fails", "now": NOW + second}
        assert len(store.item_failures.block_run("r1", still=lambda _: True, **its)) == 200
        assert store.item_failures.forgive_run("r1", who="ann", **its) == 200
        if second % 2 == 0:
            turn(mailing, NOW + second)
    for second in range(50, 3 * int(STORM_S), 2):
        turn(mailing, NOW + second)

    (mail,) = box.mails
    assert (mail.to, mail.subject) == ("alice@example.com", "[gpuwarden] 10000 events: 10000 blocked jobs")
    assert mail.text.count("is blocked: no worker takes it") == STORM
    assert "And 9980 more" in mail.text
    assert ledger.notices.unsent().waiting == 0


@pytest.mark.behaviour("B8")
def test_a_quarantined_gpu_is_one_mail_to_each_administrator(store: JobStore, mailing: Notifier, box: Mailbox) -> None:
    gpu = "GPU-5f4e3d2c"
    store.gpu_quarantine.quarantine([gpu], host=HOST, worker="w1", reason="XID 79", now=NOW)
    store.gpu_quarantine.quarantine([gpu], host=HOST, worker="w2", reason="XID 79", now=NOW + 1)
    for second in (2, 10, 300, 600):
        turn(mailing, NOW + second)

    assert sorted(each.to for each in box.mails) == [OPS, "second@example.com"]
    assert {each.subject for each in box.mails} == {f"[gpuwarden] GPU {gpu} of {HOST} is quarantined"}
    assert box.mails[0].text.rstrip() == (
        f"GPU {gpu} of {HOST} is quarantined: no worker uses it.\nReason: XID 79\n"
        f"Next: repair it, then run gpuwarden gpu release {gpu}"
    )


@pytest.mark.behaviour("B8")
def test_hostile_text_of_a_job_stays_text_in_its_mail(store: JobStore, mailing: Notifier, box: Mailbox) -> None:
    """The address asks for HTML, so that Apprise converts the text."""
    run, reason = "<b>&'; rm -rf ~;", "a\r\n.\r\nBcc: eve@example.com\r\n\r\n<script>x</script>&amp;\x1b[2J\u202e\x00"
    fail(store, Submission(queue="<i>"), run=run, notify=f"{box.url}&to=alice@example.com&format=html", reason=reason)
    for second in (1, 10):
        turn(mailing, NOW + second)

    (mail,) = box.mails
    assert (mail.to, mail.subject) == ("alice@example.com", "[gpuwarden] job 1 failed")
    assert {"Bcc", "Cc"}.isdisjoint(mail.message.keys())
    text, html = (part.get_content() for part in mail.message.iter_parts())
    said = r"a\r\n.\r\nBcc: eve@example.com\r\n\r\n<script>x</script>&amp;\x1b[2J\u202e"
    assert f"Job 1 of queue <i>, run {run}, failed, attempt 1.\nReason: {said}" in text.replace("\r\n", "\n")
    assert all(each.isprintable() for each in text.split())
    assert not re.findall(r"<(?!br/>)", html)
    assert "&lt;script&gt;x&lt;/script&gt;&amp;amp;" in html
