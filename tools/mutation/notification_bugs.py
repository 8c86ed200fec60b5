"""Bugs of the webhook, each with the rule of the `notifications` machine that must find it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import pytest
from sqlalchemy import select, update

from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import writing
from remediator import payload as payloads
from remediator.alert import Alert, Refusal
from remediator.ledger import inbox
from remediator.ledger.schema import ALERTS
from remediator.webhook.intake import Inbox as Intake
from remediator.webhook.reconcile import Reconciler
from tests.races import judge, notifications
from tools.mutation.race_bugs import Mutant, treat_resolved_as_fixed


def answer_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer a payload at once and write it with the next one."""
    accept = inbox.Inbox.accept

    def later(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        for each in vars(self).pop("waiting", []):
            accept(self, *each, now=now)
        vars(self)["waiting"] = [(found, refusals)]

    monkeypatch.setattr(inbox.Inbox, "accept", later)


def commit_each_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each alert of a payload in a separate transaction."""
    accept = inbox.Inbox.accept

    def one_by_one(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        for each in found:
            accept(self, [each], [], now=now)
        for refusal in refusals:
            accept(self, [], [refusal], now=now)

    monkeypatch.setattr(inbox.Inbox, "accept", one_by_one)


def report_failure_as_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer 202 although the ledger cannot be written."""
    accept = inbox.Inbox.accept

    def careless(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        with suppress(DatabaseError):
            accept(self, found, refusals, now=now)

    monkeypatch.setattr(inbox.Inbox, "accept", careless)


def link_in_two_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Link an alert to its episode and remove it from the inbox in two transactions."""
    take_new = inbox.Inbox.take_new

    def in_two(self: inbox.Inbox, host: str, *, now: float, **how: Any) -> int:
        waiting = select(ALERTS.c.alert_id).where(ALERTS.c.state == "new", ALERTS.c.host == host)
        with writing(self._engine) as connection:
            found = list(connection.scalars(waiting))
        taken = take_new(self, host, now=now, **how)
        with writing(self._engine) as connection:
            again = update(ALERTS).where(ALERTS.c.alert_id.in_(found), ALERTS.c.state == "linked")
            connection.execute(again.values(state="new"))
        return take_new(self, host, now=now, **how) and taken

    monkeypatch.setattr(inbox.Inbox, "take_new", in_two)


def ignore_host_of_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat an alert of an unknown host as one of this host."""
    hosts = Intake._hosts
    row = inbox._row

    def everybodys(self: Intake, found: Sequence[Alert]) -> Any:
        return {*hosts(self, found), *(each.labels["host"] for each in found)}

    def as_ours(found: Alert, now: float) -> dict[str, Any]:
        host = found.labels["host"]
        ours = host if host in ("box1", "box2") else "box1"
        return row(found, now) | {"host": ours, "labels": {**found.labels, "host": ours}}

    monkeypatch.setattr(Intake, "_hosts", everybodys)
    monkeypatch.setattr(inbox, "_row", as_ours)


def take_alerts_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the alerts of all hosts from the inbox."""
    take_new = inbox.Inbox.take_new

    def all_of_them(self: inbox.Inbox, host: str, *, now: float, **how: Any) -> int:
        return sum(take_new(self, each, now=now, **how) for each in (host, *sorted({"box1", "box2"} - {host})))

    monkeypatch.setattr(inbox.Inbox, "take_new", all_of_them)


def lose_truncated_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not query alerts that Alertmanager truncated."""
    monkeypatch.setattr(Reconciler, "fetch_left_out", lambda self, count, _: self._left_out.inc(count))


def use_group_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the group's status instead of each alert's."""
    parse = payloads.parse

    def by_group(payload: Mapping[str, Any], **how: Any) -> Any:
        status = payload.get("status", "firing")
        return parse({**payload, "alerts": [{**each, "status": status} for each in payload["alerts"]]}, **how)

    monkeypatch.setattr(payloads, "parse", by_group)


MUTANTS: Final[Mapping[str, Mutant]] = {
    "answer_before_commit": Mutant(plant=answer_before_commit, rules=[judge.LOST]),
    "report_failure_as_success": Mutant(plant=report_failure_as_success, rules=[judge.LOST]),
    "commit_each_alert": Mutant(plant=commit_each_alert, rules=[notifications.WHOLE]),
    "link_in_two_transactions": Mutant(plant=link_in_two_transactions, rules=[judge.ONCE]),
    "ignore_host_of_alert": Mutant(plant=ignore_host_of_alert, rules=[notifications.ADDRESSED, notifications.WHOLE]),
    "take_alerts_of_all_hosts": Mutant(plant=take_alerts_of_all_hosts, rules=[notifications.ADDRESSED]),
    "lose_truncated_alerts": Mutant(plant=lose_truncated_alerts, rules=[notifications.ASKED_FOR]),
    "use_group_status": Mutant(plant=use_group_status, rules=[notifications.WHOLE]),
    "treat_resolved_as_fixed": Mutant(plant=treat_resolved_as_fixed, rules=[judge.LOST], ends=True),
}
