"""The front door with one bug each: what the machine of `notifications` must find, and by which rule."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import pytest
from sqlalchemy import select, update

from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.transactions import writing
from remediator import alert as alerts
from remediator.alert import Alert, Refusal
from remediator.ledger import inbox
from remediator.ledger.schema import ALERTS
from remediator.webhook.intake import Inbox as Intake
from remediator.webhook.reconcile import Reconciler
from tests.races import judge, notifications
from tools.mutation.race_bugs import Mutant, resolved_taken_for_recovery


def said_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload is answered at once and written with the next one."""
    accept = inbox.Inbox.accept

    def later(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        for each in vars(self).pop("waiting", []):
            accept(self, *each, now=now)
        vars(self)["waiting"] = [(found, refusals)]

    monkeypatch.setattr(inbox.Inbox, "accept", later)


def kept_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alert of a payload is written by a transaction of its own."""
    accept = inbox.Inbox.accept

    def one_by_one(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        for each in found:
            accept(self, [each], [], now=now)
        for refusal in refusals:
            accept(self, [], [refusal], now=now)

    monkeypatch.setattr(inbox.Inbox, "accept", one_by_one)


def failure_taken_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that cannot be written is logged, and the answer is 202."""
    accept = inbox.Inbox.accept

    def careless(self: inbox.Inbox, found: Sequence[Alert], refusals: Sequence[Refusal], *, now: float) -> None:
        with suppress(DatabaseError):
            accept(self, found, refusals, now=now)

    monkeypatch.setattr(inbox.Inbox, "accept", careless)


def tied_in_two_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert is tied to its episode first, and taken out of the inbox by another transaction."""
    take_new = inbox.Inbox.take_new

    def in_two(self: inbox.Inbox, host: str, *, now: float) -> int:
        waiting = select(ALERTS.c.alert_id).where(ALERTS.c.state == "new", ALERTS.c.host == host)
        with writing(self._engine) as connection:
            found = list(connection.scalars(waiting))
        taken = take_new(self, host, now=now)
        with writing(self._engine) as connection:
            again = update(ALERTS).where(ALERTS.c.alert_id.in_(found), ALERTS.c.state == "linked")
            connection.execute(again.values(state="new"))
        return take_new(self, host, now=now) and taken

    monkeypatch.setattr(inbox.Inbox, "take_new", in_two)


def hosts_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert for a host that nobody here works for is taken for this one's, whose worker is called the same."""
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


def every_hosts_alerts_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor takes the alerts of all hosts from the inbox."""
    take_new = inbox.Inbox.take_new

    def all_of_them(self: inbox.Inbox, host: str, *, now: float) -> int:
        return sum(take_new(self, each, now=now) for each in (host, *sorted({"box1", "box2"} - {host})))

    monkeypatch.setattr(inbox.Inbox, "take_new", all_of_them)


def left_out_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Alertmanager left out of a call is counted and asked for by nobody."""
    monkeypatch.setattr(Reconciler, "left_out", lambda self, count, _: self._left_out.inc(count))


def status_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's status counts, and not each alert's own."""
    parse = alerts.parse

    def by_group(payload: Mapping[str, Any], **how: Any) -> Any:
        told = payload.get("status", "firing")
        return parse({**payload, "alerts": [{**each, "status": told} for each in payload["alerts"]]}, **how)

    monkeypatch.setattr(alerts, "parse", by_group)


MUTANTS: Final[Mapping[str, Mutant]] = {
    "said_before_it_is_kept": Mutant(plant=said_before_it_is_kept, rules=[judge.LOST]),
    "failure_taken_for_success": Mutant(plant=failure_taken_for_success, rules=[judge.LOST]),
    "kept_one_by_one": Mutant(plant=kept_one_by_one, rules=[notifications.WHOLE]),
    "tied_in_two_transactions": Mutant(plant=tied_in_two_transactions, rules=[judge.ONCE]),
    "hosts_not_told_apart": Mutant(plant=hosts_not_told_apart, rules=[notifications.ADDRESSED, notifications.WHOLE]),
    "every_hosts_alerts_taken": Mutant(plant=every_hosts_alerts_taken, rules=[notifications.ADDRESSED]),
    "left_out_is_lost": Mutant(plant=left_out_is_lost, rules=[notifications.ASKED_FOR]),
    "status_of_the_group": Mutant(plant=status_of_the_group, rules=[notifications.WHOLE]),
    "resolved_taken_for_recovery": Mutant(plant=resolved_taken_for_recovery, rules=[judge.LOST], ends=True),
}
