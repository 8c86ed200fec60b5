"""Several Alertmanagers, a network between, and several remediators' front doors: the real application of each.

An Alertmanager keeps what it was told and what was acknowledged, as 0.25 does: one pipeline a receiver sends the whole
group when anything of it is news, and is silent about what was acknowledged until its repeat interval is over. It cuts
a group off after `max_alerts` and takes all of it for told. The network loses calls and answers, and holds calls back.
A door is killed at any of its commits. Whatever comes of that, the rules of `Doorkeeper` hold, and the judge's.
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
from tests.races.judge import LOST, ONCE, Acting, Judge
from tests.races.machine import HOSTS, PAUSE_S, SLOTS, Races
from tests.races.points import Killed, Points, Trouble
from tests.races.remediators import fake_time
from tests.races.world import Does
from tests.remediator import builders as build

WHOLE: Final = "a call is accepted whole or not at all"
ADDRESSED: Final = "a host's alerts are its own remediator's"
ASKED_FOR: Final = "what was left out of a call is asked for"

TOKEN: Final = "0123456789abcdef-token"
REPEAT_S: Final = 1200.0
NOBODYS: Final = "box3"
"""A host that no remediator works for; its workers are called as box1's are."""

BOX1: Final = "box1"
AT_A_DOOR: Final = st.none() | st.builds(
    Trouble,
    kind=st.just("write"),
    nth=st.sampled_from([1, 1, 2]),
    harm=st.sampled_from(["killed before", "killed after", "refused", "refused", "unacknowledged", "meanwhile"]),
    meanwhile=st.sampled_from(["others' rounds", "20 s", "silent die", "silent wake"]),
)
Kept = tuple[int, int, int]
Network = Literal["carries it", "loses it", "loses the answer", "holds it back"]
NETWORK: Final = st.sampled_from(["carries it", "carries it", "loses it", "loses the answer", "holds it back"])


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a webhook: what it carries, and the group that it was made of."""

    receiver: str
    group: Sequence[dict[str, Any]]
    payload: dict[str, Any]


@dataclass(eq=False, kw_only=True)
class Alertmanager:
    """One of them: it knows alerts by the fingerprint that its Prometheus' replica label gives them."""

    name: str
    clocks: Clocks
    max_alerts: int = 0
    answers: bool = True
    active: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: dict[str, dict[str, tuple[bool, float]]] = field(default_factory=dict)
    """By receiver and fingerprint: whether it was told as firing, and when."""

    def told(self, firing: Iterable[Alert]) -> None:
        """What its Prometheus finds; what it does not find any more has ended."""
        found = {f"{each.fingerprint}/{self.name}": each for each in firing}
        self.ended |= {name: each for name, each in self.active.items() if name not in found}
        starts_at = f"{self.name} {self.clocks.steady_s}"
        self.active = {
            name: self.active.get(name) or _sent(each, fingerprint=name, starts_at=starts_at)
            for name, each in found.items()
        }
        self.ended = {name: each for name, each in self.ended.items() if name not in found}

    def forget(self) -> None:
        """It is started again without its data."""
        self.active, self.ended, self.acknowledged = {}, {}, {}

    def call(self, receiver: str, *, backwards: bool = False) -> Call | None:
        """What it has to tell a receiver now; `None` for nothing."""
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
        told = group[: self.max_alerts or None]
        payload = build.payload(*told, receiver=receiver, truncatedAlerts=len(group) - len(told))
        return Call(receiver=receiver, group=group, payload=payload)

    def heard(self, call: Call) -> None:
        """It was answered with 202."""
        at_s = self.clocks.steady_s
        self.acknowledged[call.receiver] |= {
            each["fingerprint"]: (each["status"] == "firing", at_s) for each in call.group
        }

    async def listed(self, url: str, _receiver: str) -> bytes:
        """What `GET /api/v2/alerts` answers."""
        if not self.answers:
            raise AnswerError(f"played: {url} does not answer")
        return json.dumps([{**each, "status": {"state": "active"}} for each in self.active.values()]).encode()


@dataclass(kw_only=True)
class Doorkeeper(Judge):
    """Looks besides at what each commit made of the inbox, and at the inbox after each call."""

    hosts: Sequence[str] = ("box1", "box2")
    """Those whose executors work the ledger."""

    new: dict[int, str] = field(default_factory=dict)
    tied: dict[int, int] = field(default_factory=dict)
    """By alert, the episode that it was tied to."""

    entry_id: int = 0

    def promised(self, actor: Any) -> None:
        """Compare what waits in the inbox, too, with what waited before this commit."""
        super().promised(actor)
        see, must = self.databases.see_ledger, self.must
        now = dict(see.execute("SELECT alert_id, host FROM alerts WHERE state = 'new'").fetchall())
        before, self.new = self.new, now
        lines = see.execute(
            f"SELECT entry_id, act, step FROM journal WHERE entry_id > {self.entry_id}"  # noqa: S608 - our own number
        ).fetchall()
        self.entry_id = max((line[0] for line in lines), default=self.entry_id)
        for alert_id in now.keys() & self.tied.keys():
            open_still = see.execute(
                f"SELECT 1 FROM episodes WHERE closed_at IS NULL AND episode_id = {self.tied.pop(alert_id)}"  # noqa: S608 - our own number
            ).fetchone()
            must(not open_still, ONCE, f"alert {alert_id} is in the inbox again, and its episode is open")
        told = sum((act, step) == ("saw", "alert") for _, act, step in lines)
        tied = 0
        for alert_id in before.keys() - now.keys():
            must(isinstance(actor, Acting), LOST, f"alert {alert_id} was taken from the inbox by {actor}")
            if isinstance(actor, Acting):
                must(actor.host == before[alert_id], ADDRESSED, f"{actor.host} took alert {alert_id} of {before}")
            state, firing, episode_id = see.execute(
                f"SELECT state, firing, episode_id FROM alerts WHERE alert_id = {alert_id}"  # noqa: S608 - our own number
            ).fetchone()
            must(state == "linked" or not firing, LOST, f"alert {alert_id} fires, and is {state}")
            if state == "linked":
                tied += 1
                self.tied[alert_id] = episode_id
        must(told == tied, ONCE, f"{tied} alerts were tied to episodes, and {told} lines tell of it, by {actor}")
        self.counts["tied"] += tied

    def kept(self) -> Kept:
        """How many alerts were ever accepted as firing and as resolved, and refused."""
        rows = self.databases.see_ledger.execute("SELECT state, firing FROM alerts").fetchall()
        refused = sum(state == "refused" for state, _ in rows)
        firing = sum(state != "refused" and bool(fires) for state, fires in rows)
        return firing, len(rows) - refused - firing, refused

    def was_called(self, before: Kept, payload: Mapping[str, Any], answer: httpx.Response | None) -> None:
        """A call was answered, or its door was killed over it; `before` is what was kept then."""
        after = self.kept()
        kept = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
        ours = [each["status"] == "firing" for each in payload["alerts"] if each["labels"].get("host") in self.hosts]
        refused = len(payload["alerts"]) - len(ours)
        wanted = (sum(ours), len(ours) - sum(ours), refused)
        must, told = self.must, f"of {wanted} firing, resolved and refused {kept} are kept"
        must(kept in ((0, 0, 0), wanted), WHOLE, told)
        if answer is None:
            self.counts["door killed"] += 1
        elif answer.status_code == httpx.codes.ACCEPTED:
            self.counts["accepted"] += 1
            self.counts["refused at the door"] += refused
            must(kept == wanted, LOST, f"{told}, and the answer was 202")
            said = answer.json()
            must((said["accepted"], said["refused"]) == (len(ours), refused), ADDRESSED, f"{said}, wanted {wanted}")
        else:
            self.counts["503"] += 1
            must(answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, WHOLE, f"answered {answer.status_code}")

    def reconciled(self, sender: Alertmanager) -> None:
        """An Alertmanager that answers was asked for what it left out."""
        self.counts["asked for"] += 1
        found = self.databases.see_ledger.execute("SELECT DISTINCT fingerprint FROM alerts").fetchall()
        missing = sender.active.keys() - {name for (name,) in found}
        self.must(not missing, ASKED_FOR, f"{missing} of {sender.name}")


class Door:
    """One host's `serve`: begun anew after it was killed. Between two calls its loop stands still."""

    def __init__(
        self,
        host: str,
        *,
        ledger: Ledger,
        clocks: Clocks,
        points: Points,
        keeper: Doorkeeper,
        web_config_file: Path,
        alertmanagers: Sequence[Alertmanager],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._clocks = clocks
        self._points = points
        self._keeper = keeper
        self._web_config_file = web_config_file
        self._alertmanagers = alertmanagers
        self._loop: asyncio.Runner | None = None
        self._client: httpx.AsyncClient

    def post(self, payload: Mapping[str, Any], trouble: Trouble | None = None) -> bool:
        """Call its webhook, and let it do what it does after that; whether the answer was 202."""
        if self._loop is None:
            self._loop = asyncio.Runner()
            self._client = httpx.AsyncClient(
                transport=httpx.ASGITransport(app=self._app()), base_url="http://door", trust_env=False
            )
        before, answer = self._keeper.kept(), None
        with self._points.program("webhook", trouble), self._clocks.of(self._host):
            try:
                answer = self._loop.run(self._call(payload))
                self._keeper.was_called(before, payload, answer)
                self._loop.run(_what_is_left())
            except Killed:
                self.end()
                if answer is None:
                    self._keeper.was_called(before, payload, None)
                return answer is not None and answer.is_success
        if answer.is_success and payload["truncatedAlerts"]:
            for each in self._alertmanagers:
                if each.answers:
                    self._keeper.reconciled(each)
        return answer.is_success

    def end(self) -> None:
        """Its process is over."""
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


async def _what_is_left() -> None:
    """Until the door asks no Alertmanager any more."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


class Notifications(Races):
    """The same hosts and workers; what is told of them comes through the doors alone.

    `alone` is box1 with a ledger of its own: what is told of box2's workers is refused.
    """

    judged_by: ClassVar[type[Judge]] = Doorkeeper
    judge: Doorkeeper
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
        self.held: list[Call] = []
        self.firing: dict[str, dict[str, Any]] = {}
        """What was last told as firing, by fingerprint: in the end somebody tells that it is over."""

        self.doors = {host: self._door(host) for host in self.judge.hosts}
        for remediator in self.remediators.values():
            remediator.round()  # a host is known by its executor's first sign of life

    # --- rules

    @rule(
        which=st.integers(0, 1),
        at=SLOTS,
        how=st.sampled_from([Does.WEDGED, Does.FROZEN]),
        max_alerts=st.sampled_from([0, 1, 1, 2]),
        answers=st.sampled_from([True, True, False]),
        network=NETWORK,
        trouble=AT_A_DOOR,
    )
    def incident_is_told(
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
        """A worker falls silent with a job, and an Alertmanager tells every receiver, in calls of some size."""
        its = self.alertmanagers[which]
        its.max_alerts, its.answers = max_alerts, answers
        self._incident(self.world.slots[at], how)
        its.told(self._true())
        self._flush(its, network, trouble)

    @rule(which=st.integers(0, 1), network=NETWORK, trouble=AT_A_DOOR, backwards=st.booleans())
    def prometheus_tells(self, which: int, network: Network, trouble: Trouble | None, *, backwards: bool) -> None:
        """What fires and what has ended since; the Alertmanager tells every receiver."""
        self.alertmanagers[which].told(self._true())
        self._flush(self.alertmanagers[which], network, trouble, backwards=backwards)

    @rule(which=st.integers(0, 1), lost=st.booleans(), network=NETWORK)
    def prometheus_dies_or_its_alertmanager_loses_its_data(self, which: int, network: Network, *, lost: bool) -> None:
        """Without a Prometheus everything resolves; without its data an Alertmanager tells everything anew."""
        its = self.alertmanagers[which]
        if lost:
            its.forget()
            its.told(self._true())
        else:
            its.told([])
        self._flush(its, network)

    @rule(nth=st.integers(0, 20), times=st.integers(1, 3), gone=st.booleans(), trouble=AT_A_DOOR)
    def what_was_held_back_comes(self, nth: int, times: int, trouble: Trouble | None, *, gone: bool) -> None:
        """Late, in another order, and perhaps more than once."""
        if self.held:
            call = self.held.pop(nth % len(self.held)) if gone else self.held[nth % len(self.held)]
            for count in range(times):
                self._post(call.receiver, call.payload, None if count else trouble)

    @rule(at=SLOTS, trouble=AT_A_DOOR)
    def a_worker_is_accused_of_what_another_host_has(self, at: int, trouble: Trouble | None) -> None:
        """A host that no remediator works for, with a worker of the same name; beside what is true."""
        foreign = self._alert(self.world.slots[at], "stall")
        labels = {**foreign.labels, "host": NOBODYS}
        foreign = replace(foreign, fingerprint=f"{foreign.fingerprint}/{NOBODYS}", labels=labels)
        self._notify([foreign, *self._true()], trouble)

    @rule(at=SLOTS, host=HOSTS, nth=st.integers(1, 6), count=st.integers(0, 2))
    def incident_and_a_remediator_is_killed_as_it_takes_the_inbox(
        self, at: int, host: str, nth: int, count: int
    ) -> None:
        """At one of the writes of its first look."""
        self._incident(self.world.slots[at], Does.WEDGED if at % 2 else Does.FROZEN)
        self.remediators[host].round(Trouble(kind="write", nth=nth, harm="killed after" if count else "killed before"))
        for _ in range(count):
            self._pass(PAUSE_S, kept=True)
            self.remediators[host].round()

    # --- what is otherwise than in `Races`

    # What is not about notifications is left to it.
    submit = worker_turns = worker_finishes = worker_is_frozen_until_another_has_its_job = None  # type: ignore[assignment]
    container_is_replaced_and_its_process_lives_on = clock_is_set = None  # type: ignore[assignment]
    incident_is_overtaken_by_its_lease = incident_happens_again = None  # type: ignore[assignment]
    remediator_ends_and_the_next_is_armed_or_not = None  # type: ignore[assignment]
    remediator_is_armed_or_disarmed_as_it_runs = None  # type: ignore[assignment]

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for door in self.doors.values():
                door.end()

    def _to_the_end(self) -> None:
        """What is held back comes, everything answers, and an Alertmanager tells nothing twice."""
        for call in self.held:
            self._post(call.receiver, call.payload)
        self._ending = True
        for each in self.alertmanagers:
            each.answers = True
        if self.alone:  # nobody mends box2
            for slot in self.world.slots:
                if slot.host not in self.doors:
                    self._wake(slot)
        super()._to_the_end()

    def _notify(self, alerts: list[Alert], trouble: Trouble | None = None) -> None:
        """A call that no Alertmanager keeps a record of; in the end, all that they have to tell, and what is over."""
        hosts = list(self.doors)
        if self._ending:
            for each in self.alertmanagers:
                each.told(self._true())
                self._flush(each, "carries it")
            fires = {name for each in self.alertmanagers for name in each.active}
            fires |= {each.fingerprint for each in self._true()}
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
        return self.doors[receiver].post(payload, trouble)

    def _flush(
        self, sender: Alertmanager, network: Network, trouble: Trouble | None = None, *, backwards: bool = False
    ) -> None:
        for receiver in self.doors:
            call = sender.call(receiver, backwards=backwards)
            if call is None or network == "loses it":
                continue
            if network == "holds it back":
                self.held.append(call)
            elif self._post(receiver, call.payload, trouble) and network == "carries it":
                sender.heard(call)

    async def _ask(self, url: str, receiver: str) -> bytes:
        its = next(each for each in self.alertmanagers if url == f"http://{each.name}")
        answer = await its.listed(url, receiver)
        self.firing |= its.active
        return answer

    def _door(self, host: str) -> Door:
        ledger = Ledger(self.databases.ledger, host=host)
        ledger.shared = not self.alone
        return Door(
            host, ledger=ledger, clocks=self.clocks, points=self.points, keeper=self.judge,
            web_config_file=self.web_config_file, alertmanagers=self.alertmanagers,
        )  # fmt: skip


def _sent(alert: Alert, *, fingerprint: str, starts_at: str) -> dict[str, Any]:
    status = "firing" if alert.firing else "resolved"
    return build.sent(fingerprint, status=status) | {"labels": dict(alert.labels), "startsAt": starts_at}
