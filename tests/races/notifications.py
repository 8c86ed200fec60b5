"""Simulated Alertmanagers and a faulty network in front of the real webhook application of each remediator.

An Alertmanager behaves like version 0.25. For each receiver it sends the whole group when an alert is new or resolved,
or when the repeat interval is over. It truncates a group to `max_alerts` and counts the whole group as sent.
The network loses calls and answers, and delays calls. A webhook is killed at any of its commits. The rules of
`NotificationJudge` must hold.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from unittest.mock import patch

import httpx
from fastapi import FastAPI
from hypothesis import strategies as st
from hypothesis.stateful import rule

from gpuwarden.http.web_config import WebConfig
from remediator.alert import Alert
from remediator.clients.http import AnswerError
from remediator.ledger.ledger import Ledger
from remediator.webhook.app import create_app
from tests.races.clocks import Clocks
from tests.races.judge import LOST, ONCE, Judge, RemediatorState
from tests.races.machine import HOSTS, PAUSE_S, SLOTS, Races
from tests.races.points import Killed, Points, Trouble
from tests.races.remediators import fake_time
from tests.races.world import Does
from tests.remediator import builders as build

WHOLE: Final = "a call is accepted whole or not at all"
ADDRESSED: Final = "only the remediator of a host takes its alerts"
ASKED_FOR: Final = "truncated alerts are queried"

TOKEN: Final = "0123456789abcdef-token"


def web_config_in(folder: Path) -> Path:
    """A web configuration file of the doors, which asks for the token."""
    (folder / "token").write_text(TOKEN)
    file = folder / "web.yml"
    file.write_text("bearer_token_file: token\n")
    return file


REPEAT_S: Final = 1200.0
FOREIGN_HOST: Final = "box3"
"""A host without a remediator. Its workers have the names of those of box1."""

BOX1: Final = "box1"
WEBHOOK_TROUBLE: Final = st.none() | st.builds(
    Trouble,
    kind=st.just("write"),
    nth=st.sampled_from([1, 1, 2]),
    harm=st.sampled_from(["killed before", "killed after", "refused", "refused", "unacknowledged", "meanwhile"]),
    meanwhile=st.sampled_from(["others' rounds", "20 s", "silent die", "silent wake"]),
)
AlertCounts = tuple[int, int, int]
Network = Literal["delivers", "loses the call", "loses the answer", "delays"]
NETWORK: Final = st.sampled_from(["delivers", "delivers", "loses the call", "loses the answer", "delays"])


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a webhook: its payload, and the whole group."""

    receiver: str
    group: Sequence[dict[str, Any]]
    payload: dict[str, Any]


@dataclass(eq=False, kw_only=True)
class Alertmanager:
    """A simulated Alertmanager. Its name is part of the fingerprints, as the replica label of its Prometheus is."""

    name: str
    clocks: Clocks
    max_alerts: int = 0
    answers: bool = True
    active: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: dict[str, dict[str, tuple[bool, float]]] = field(default_factory=dict)
    """Whether an alert was sent as firing, and when, by receiver and fingerprint."""

    def set_firing(self, firing: Iterable[Alert]) -> None:
        """Set the alerts that fire in its Prometheus; the others are resolved."""
        found = {f"{each.fingerprint}/{self.name}": each for each in firing}
        self.ended |= {name: each for name, each in self.active.items() if name not in found}
        starts_at = f"{self.name} {self.clocks.steady_s}"
        self.active = {
            name: self.active.get(name) or _sent(each, fingerprint=name, starts_at=starts_at)
            for name, each in found.items()
        }
        self.ended = {name: each for name, each in self.ended.items() if name not in found}

    def forget(self) -> None:
        """Restart without data."""
        self.active, self.ended, self.acknowledged = {}, {}, {}

    def call(self, receiver: str, *, backwards: bool = False) -> Call | None:
        """The next call for a receiver; `None` without a change."""
        known, now_s = self.acknowledged.setdefault(receiver, {}), self.clocks.steady_s
        over = {name: each for name, each in self.ended.items() if known.get(name, (False, 0.0))[0]}
        is_news = any(
            not firing or now_s - at_s >= REPEAT_S
            for firing, at_s in (known.get(name, (False, 0.0)) for name in self.active)
        )
        if not over and not is_news:
            return None
        group = [*self.active.values(), *({**each, "status": "resolved"} for each in over.values())]
        group = group[::-1] if backwards else group
        sent = group[: self.max_alerts or None]
        payload = build.payload(*sent, receiver=receiver, truncatedAlerts=len(group) - len(sent))
        return Call(receiver=receiver, group=group, payload=payload)

    def acknowledge(self, call: Call) -> None:
        """Record that a call was answered with 202."""
        at_s = self.clocks.steady_s
        self.acknowledged[call.receiver] |= {
            each["fingerprint"]: (each["status"] == "firing", at_s) for each in call.group
        }

    async def list_alerts(self, url: str, _receiver: str) -> bytes:
        """The answer of `GET /api/v2/alerts`."""
        if not self.answers:
            raise AnswerError(f"played: {url} does not answer")
        return json.dumps([{**each, "status": {"state": "active"}} for each in self.active.values()]).encode()


@dataclass(kw_only=True)
class NotificationJudge(Judge):
    """Also checks the inbox after each commit and after each call."""

    hosts: Sequence[str] = ("box1", "box2")
    """The hosts whose executors use the ledger."""

    new: dict[int, str] = field(default_factory=dict)
    linked: dict[int, int] = field(default_factory=dict)
    """The episode of each linked alert."""

    entry_id: int = 0

    def check_ledger_commit(self, actor: Any) -> None:
        """Also compare the new alerts in the inbox with those before this commit."""
        super().check_ledger_commit(actor)
        see, must = self.databases.see_ledger, self.must
        now = dict(see.execute("SELECT alert_id, host FROM alerts WHERE state = 'new'").fetchall())
        before, self.new = self.new, now
        lines = see.execute(
            f"SELECT entry_id, act, step FROM journal WHERE entry_id > {self.entry_id}"  # noqa: S608 - an integer
        ).fetchall()
        self.entry_id = max((line[0] for line in lines), default=self.entry_id)
        for alert_id in now.keys() & self.linked.keys():
            open_still = see.execute(
                f"SELECT 1 FROM episodes WHERE closed_at IS NULL AND episode_id = {self.linked.pop(alert_id)}"  # noqa: S608 - an integer
            ).fetchone()
            must(not open_still, ONCE, f"alert {alert_id} is in the inbox again, and its episode is open")
        recorded = sum((act, step) == ("saw", "alert") for _, act, step in lines)
        linked = 0
        for alert_id in before.keys() - now.keys():
            must(isinstance(actor, RemediatorState), LOST, f"alert {alert_id} was taken from the inbox by {actor}")
            if isinstance(actor, RemediatorState):
                must(actor.host == before[alert_id], ADDRESSED, f"{actor.host} took alert {alert_id} of {before}")
            state, firing, episode_id = see.execute(
                f"SELECT state, firing, episode_id FROM alerts WHERE alert_id = {alert_id}"  # noqa: S608 - an integer
            ).fetchone()
            must(state == "linked" or not firing, LOST, f"alert {alert_id} fires, and is {state}")
            if state == "linked":
                linked += 1
                self.linked[alert_id] = episode_id
        must(
            recorded == linked, ONCE, f"{linked} alerts are linked, and the journal has {recorded} of them, by {actor}"
        )
        self.counts["linked"] += linked

    def count_alerts(self) -> AlertCounts:
        """Count the alerts that were accepted as firing, accepted as resolved, and refused."""
        rows = self.databases.see_ledger.execute("SELECT state, firing FROM alerts").fetchall()
        refused = sum(state == "refused" for state, _ in rows)
        firing = sum(state != "refused" and bool(fires) for state, fires in rows)
        return firing, len(rows) - refused - firing, refused

    def check_call(self, before: AlertCounts, payload: Mapping[str, Any], answer: httpx.Response | None) -> None:
        """Check a call that was answered, or whose webhook was killed; `before`: the counts before it."""
        after = self.count_alerts()
        added = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
        ours = [each["status"] == "firing" for each in payload["alerts"] if each["labels"].get("host") in self.hosts]
        refused = len(payload["alerts"]) - len(ours)
        expected = (sum(ours), len(ours) - sum(ours), refused)
        must, text = self.must, f"of {expected} firing, resolved and refused {added} are stored"
        must(added in ((0, 0, 0), expected), WHOLE, text)
        if answer is None:
            self.counts["webhook killed"] += 1
        elif answer.status_code == httpx.codes.ACCEPTED:
            self.counts["accepted"] += 1
            self.counts["refused by webhook"] += refused
            must(added == expected, LOST, f"{text}, and the answer was 202")
            counts = answer.json()
            must(
                (counts["accepted"], counts["refused"]) == (len(ours), refused), ADDRESSED, f"{counts}, not {expected}"
            )
        else:
            self.counts["503"] += 1
            must(answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, WHOLE, f"answered {answer.status_code}")

    def check_reconcile(self, sender: Alertmanager) -> None:
        """Check that an Alertmanager that answers was queried for the truncated alerts."""
        self.counts["reconciled"] += 1
        found = self.databases.see_ledger.execute("SELECT DISTINCT fingerprint FROM alerts").fetchall()
        missing = sender.active.keys() - {name for (name,) in found}
        self.must(not missing, ASKED_FOR, f"{missing} of {sender.name}")


class Webhook:
    """The webhook of one host, restarted after it was killed. Its loop runs only during a call."""

    def __init__(
        self,
        host: str,
        *,
        ledger: Ledger,
        clocks: Clocks,
        points: Points,
        judge: NotificationJudge,
        web_config_file: Path,
        alertmanagers: Sequence[Alertmanager],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._clocks = clocks
        self._points = points
        self._judge = judge
        self._web_config_file = web_config_file
        self._alertmanagers = alertmanagers
        self._loop: asyncio.Runner | None = None
        self._client: httpx.AsyncClient

    def post(self, payload: Mapping[str, Any], trouble: Trouble | None = None) -> bool:
        """Call the webhook and let its tasks finish; return whether the answer was 202."""
        if self._loop is None:
            self._loop = asyncio.Runner()
            self._client = httpx.AsyncClient(
                transport=httpx.ASGITransport(app=self._app()), base_url="http://door", trust_env=False
            )
        before, answer = self._judge.count_alerts(), None
        with self._points.program("webhook", trouble), self._clocks.of(self._host):
            try:
                answer = self._loop.run(self._call(payload))
                self._judge.check_call(before, payload, answer)
                self._loop.run(_finish_tasks())
            except Killed:
                self.end()
                if answer is None:
                    self._judge.check_call(before, payload, None)
                return answer is not None and answer.is_success
        if answer.is_success and payload["truncatedAlerts"]:
            for each in self._alertmanagers:
                if each.answers:
                    self._judge.check_reconcile(each)
        return answer.is_success

    def end(self) -> None:
        """End the process."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    async def _call(self, payload: Mapping[str, Any]) -> httpx.Response:
        return await self._client.post(
            "/api/v1/alerts", json=payload, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=None
        )

    def _app(self) -> FastAPI:
        return create_app(
            ledger=self._ledger,
            host=self._host,
            web=WebConfig(self._web_config_file),
            body_max_bytes=2**20,
            alertmanagers=[f"http://{each.name}" for each in self._alertmanagers],
        )


async def _finish_tasks() -> None:
    """Wait until the webhook queries no Alertmanager."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


class Notifications(Races):
    """The same hosts and workers, with all alerts through the webhooks.

    `alone`: box1 has a separate ledger and refuses alerts about workers of box2.
    """

    judge_class: ClassVar[type[Judge]] = NotificationJudge
    judge: NotificationJudge
    web_config_file: ClassVar[Path]
    alone: ClassVar[bool] = False

    def _set_up(self, stack: ExitStack) -> None:
        super()._set_up(stack)
        stack.enter_context(patch("remediator.webhook.app.time", fake_time(self.clocks)))
        stack.enter_context(patch("remediator.webhook.reconcile.REST_S", 0.0))
        stack.enter_context(patch("remediator.webhook.reconcile._ask", self._ask))
        self._ending = False
        if self.alone:
            for remediator in self.remediators.values():
                remediator.shared = False
            self.remediators["box2"] = self.remediators[BOX1]
            self.judge.hosts = [BOX1]
        self.alertmanagers = [Alertmanager(name=name, clocks=self.clocks) for name in ("am1", "am2")]
        self.delayed: list[Call] = []
        self.firing: dict[str, dict[str, Any]] = {}
        """Alerts whose last sent state is firing, by fingerprint: the end resolves them."""

        self.webhooks = {host: self._make_webhook(host) for host in self.judge.hosts}
        for remediator in self.remediators.values():
            remediator.round()  # the first heartbeat makes the host known

    # --- rules

    @rule(
        which=st.integers(0, 1),
        at=SLOTS,
        how=st.sampled_from([Does.STALLED, Does.FROZEN]),
        max_alerts=st.sampled_from([0, 1, 1, 2]),
        answers=st.sampled_from([True, True, False]),
        network=NETWORK,
        trouble=WEBHOOK_TROUBLE,
    )
    def incident_is_notified(
        self,
        which: int,
        at: int,
        how: Does,
        max_alerts: int,
        network: Network,
        trouble: Trouble | None,
        *,
        answers: bool,
    ) -> None:
        """A worker stalls, and an Alertmanager notifies every receiver, in calls of limited size."""
        sender = self.alertmanagers[which]
        sender.max_alerts, sender.answers = max_alerts, answers
        self._incident(self.world.slots[at], how)
        sender.set_firing(self._firing())
        self._flush(sender, network, trouble)

    @rule(which=st.integers(0, 1), network=NETWORK, trouble=WEBHOOK_TROUBLE, backwards=st.booleans())
    def prometheus_sends_alerts(
        self, which: int, network: Network, trouble: Trouble | None, *, backwards: bool
    ) -> None:
        """Prometheus sends its alerts, and the Alertmanager notifies every receiver."""
        self.alertmanagers[which].set_firing(self._firing())
        self._flush(self.alertmanagers[which], network, trouble, backwards=backwards)

    @rule(which=st.integers(0, 1), lost=st.booleans(), network=NETWORK)
    def prometheus_or_alertmanager_loses_data(self, which: int, network: Network, *, lost: bool) -> None:
        """Without Prometheus every alert resolves. An Alertmanager without data sends everything again."""
        sender = self.alertmanagers[which]
        if lost:
            sender.forget()
            sender.set_firing(self._firing())
        else:
            sender.set_firing([])
        self._flush(sender, network)

    @rule(nth=st.integers(0, 20), times=st.integers(1, 3), gone=st.booleans(), trouble=WEBHOOK_TROUBLE)
    def withheld_call_arrives(self, nth: int, times: int, trouble: Trouble | None, *, gone: bool) -> None:
        """Deliver a delayed call, in another order and maybe more than once."""
        if self.delayed:
            call = self.delayed.pop(nth % len(self.delayed)) if gone else self.delayed[nth % len(self.delayed)]
            for count in range(times):
                self._post(call.receiver, call.payload, None if count else trouble)

    @rule(at=SLOTS, trouble=WEBHOOK_TROUBLE)
    def alert_of_a_foreign_host(self, at: int, trouble: Trouble | None) -> None:
        """Add an alert of a host without a remediator, with a worker of the same name."""
        foreign = self._alert(self.world.slots[at], "stall")
        labels = {**foreign.labels, "host": FOREIGN_HOST}
        foreign = replace(foreign, fingerprint=f"{foreign.fingerprint}/{FOREIGN_HOST}", labels=labels)
        self._notify([foreign, *self._firing()], trouble)

    @rule(at=SLOTS, host=HOSTS, nth=st.integers(1, 6), count=st.integers(0, 2))
    def incident_and_a_remediator_is_killed_in_its_inbox(self, at: int, host: str, nth: int, count: int) -> None:
        """Kill a remediator at one of the writes of its first round."""
        self._incident(self.world.slots[at], Does.STALLED if at % 2 else Does.FROZEN)
        self.remediators[host].round(Trouble(kind="write", nth=nth, harm="killed after" if count else "killed before"))
        for _ in range(count):
            self._pass(PAUSE_S, kept=True)
            self.remediators[host].round()

    # --- differences from `Races`

    # These rules do not concern notifications.
    submit = worker_turns = worker_finishes = worker_is_frozen_until_another_has_its_job = None  # type: ignore[assignment]
    container_is_replaced_and_its_process_lives_on = clock_is_set = None  # type: ignore[assignment]
    incident_is_overtaken_by_its_lease = incident_happens_again = None  # type: ignore[assignment]
    remediator_ends_and_the_next_is_armed_or_not = None  # type: ignore[assignment]
    remediator_is_armed_or_disarmed_as_it_runs = None  # type: ignore[assignment]

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for webhook in self.webhooks.values():
                webhook.end()

    def _finish_all(self) -> None:
        """Deliver the delayed calls, let everything answer, and end without repeats."""
        for call in self.delayed:
            self._post(call.receiver, call.payload)
        self._ending = True
        for each in self.alertmanagers:
            each.answers = True
        if self.alone:  # no remediator serves box2
            for slot in self.world.slots:
                if slot.host not in self.webhooks:
                    self._wake(slot)
        super()._finish_all()

    def _notify(self, alerts: list[Alert], trouble: Trouble | None = None) -> None:
        """Post alerts outside of the Alertmanagers. At the end flush them, and resolve the rest."""
        hosts = list(self.webhooks)
        if self._ending:
            for each in self.alertmanagers:
                each.set_firing(self._firing())
                self._flush(each, "delivers")
            fires = {name for each in self.alertmanagers for name in each.active}
            fires |= {each.fingerprint for each in self._firing()}
            alerts_over = [each | {"status": "resolved"} for name, each in self.firing.items() if name not in fires]
            if alerts_over:
                self._post(hosts[0], build.payload(*alerts_over))
        elif alerts:
            group = [_sent(each, fingerprint=each.fingerprint, starts_at=each.starts_at) for each in alerts]
            self._post(hosts[len(self.sent) % len(hosts)], build.payload(*group), trouble)
            known = {each.fingerprint for each in self.sent}
            self.sent += [each for each in alerts if each.fingerprint not in known]

    def _post(self, receiver: str, payload: Mapping[str, Any], trouble: Trouble | None = None) -> bool:
        for each in payload["alerts"]:
            if each["status"] == "firing":
                self.firing[each["fingerprint"]] = each
            else:
                self.firing.pop(each["fingerprint"], None)
        return self.webhooks[receiver].post(payload, trouble)

    def _flush(
        self, sender: Alertmanager, network: Network, trouble: Trouble | None = None, *, backwards: bool = False
    ) -> None:
        for receiver in self.webhooks:
            call = sender.call(receiver, backwards=backwards)
            if call is None or network == "loses the call":
                continue
            if network == "delays":
                self.delayed.append(call)
            elif self._post(receiver, call.payload, trouble) and network == "delivers":
                sender.acknowledge(call)

    async def _ask(self, url: str, receiver: str) -> bytes:
        sender = next(each for each in self.alertmanagers if url == f"http://{each.name}")
        answer = await sender.list_alerts(url, receiver)
        self.firing |= sender.active
        return answer

    def _make_webhook(self, host: str) -> Webhook:
        ledger = Ledger(self.databases.ledger, host=host)
        ledger.shared = not self.alone
        return Webhook(
            host, ledger=ledger, clocks=self.clocks, points=self.points, judge=self.judge,
            web_config_file=self.web_config_file, alertmanagers=self.alertmanagers,
        )  # fmt: skip


def _sent(alert: Alert, *, fingerprint: str, starts_at: str) -> dict[str, Any]:
    status = "firing" if alert.firing else "resolved"
    return build.sent(fingerprint, status=status) | {"labels": dict(alert.labels), "startsAt": starts_at}
