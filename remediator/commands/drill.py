"""`gpuwarden drill`: send a test alert through the real chain, and measure each hop. Nothing is touched.

`serve` publishes the drill, Prometheus scrapes it, the rule GpuwardenDrill fires, Alertmanager calls the webhook, and
the executor of each host takes the alert. With `--notify`, `serve` last sends a message to each administrator.
Exit codes: 0 every hop answered; 1 a hop did not; 2 usage error.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from gpuwarden.db.running_up import LEDGER_ENV, of_up
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, format_duration, operator_name, show, show_json
from remediator.commands.addresses import NONE, add_addresses
from remediator.commands.open_ledger import add_ledger, existing
from remediator.commands.status import BEAT_MAX_S, GONE_S, TIMEOUT_S
from remediator.ledger.chain import INTERRUPTED, Drill
from remediator.ledger.ledger import Ledger
from remediator.ledger.notices import Delivery

POLL_S: Final = 0.1
"""Interval between two looks at a hop, seconds."""

UNREACHABLE_S: Final = 10.0
"""A part that cannot be reached for this long is down, seconds."""

HOP_TIMEOUT_S: Final[Mapping[str, float]] = {
    "serve": 10.0,
    "prometheus": 75.0,  # a scrape interval is at most 60 s
    "rule": 75.0,  # so is an evaluation interval
    "alertmanager": 30.0,
    "webhook": 30.0,
    "executor": 30.0,
}
"""Most seconds that each hop takes after the one before. The hops in their order."""

NOTIFICATION: Final = "notification"
"""The last hop, with `--notify`."""

NOTIFICATION_TIMEOUT_S: Final = 90.0
"""Most seconds of the last hop. The rate limit does not delay it."""

TIMEOUT_MAX_S: Final = sum(HOP_TIMEOUT_S.values()) + NOTIFICATION_TIMEOUT_S

METRIC: Final = "gpuwarden_remediator_drill"
ALERT: Final = "GpuwardenDrill"

FIXES: Final[Mapping[str, str]] = {
    "serve": "start `gpuwarden remediator serve` of this version on this ledger, or set --remediator to its URL",
    "prometheus": "add the remediator to scrape_configs (docs/how-to/prometheus.md), or set --prometheus to its URL",
    "rule": "load chain.rules.yaml of this version (rule_files in prometheus.yml), and see its page /rules",
    "alertmanager": "name it in `alerting:` of prometheus.yml, or set --alertmanager to its URL",
    "webhook": 'correct the route of remedy=~".+", and the URL or token of its receiver; see the log of Alertmanager',
    "executor": "start `gpuwarden remediator execute` there, and see its log",
    NOTIFICATION: "run `gpuwarden notify test`, and see the log of `gpuwarden remediator serve`",
}

LOGS_OF_UP: Final[Mapping[str, str]] = {
    "serve": "serve",
    "prometheus": "prometheus",
    "rule": "prometheus",
    "alertmanager": "alertmanager",
    "webhook": "alertmanager",
    "executor": "execute",
}
"""The part of `gpuwarden up` that a hop needs. `up` writes its files and starts it."""


@dataclass(kw_only=True)
class Hop:
    """One hop. `at_s` is its time since the start; `None` if it did not answer or was not checked."""

    name: str
    passed: bool = False
    at_s: float | None = None
    says: str = ""
    fix: str = ""
    unreachable_since_s: float | None = None

    def fail(self, says: str, *, now_s: float, unreachable: bool = False) -> None:
        """Note why it has not passed yet."""
        self.says = says
        self.unreachable_since_s = (self.unreachable_since_s or now_s) if unreachable else None


@dataclass(kw_only=True)
class Result:
    """The result of a drill. Times are seconds since the start."""

    ok: bool
    took_s: float
    broken: str | None = None
    says: str = ""
    fix: str = ""
    hops: list[dict[str, Any]] = field(default_factory=list)


def command(argv: list[str]) -> int:
    """`gpuwarden drill`."""
    wanted = _parser().parse_args(argv)
    with closing(existing(wanted.ledger)) as ledger:
        result = run(ledger, wanted)
    if wanted.json:
        show_json(asdict(result))
    else:
        show(*page(result))
    return 0 if result.ok else 1


def run(ledger: Ledger, wanted: argparse.Namespace) -> Result:
    """Start a drill of each host, watch it, and end it."""
    hosts = _hosts(ledger, wanted.host)
    began_s = time.monotonic()
    drills = ledger.chain.start(hosts, who=operator_name(), timeout_s=wanted.timeout_s)
    hops = [Hop(name=name) for name in (*HOP_TIMEOUT_S, *([NOTIFICATION] if wanted.notify else []))]
    broken: Hop | None = None
    try:
        with _Watch(ledger, wanted, drills, began_s=began_s) as watch:
            broken = watch.until_over(hops)
    finally:
        passed = all(each.passed for each in hops)
        name = None if passed else INTERRUPTED if broken is None else broken.name
        ledger.chain.end({each.drill_id: name for each in drills})
        if wanted.notify and not passed:
            ledger.notices.withdraw(_key(drills), now=ledger.now())
    return conclude(
        hops, broken, took_s=time.monotonic() - began_s, in_up=fixes_in_up(wanted.ledger, of_up(os.environ))
    )


def fixes_in_up(ledger: str, up: Mapping[str, str]) -> dict[str, str]:
    """The repairs of hops if the running `gpuwarden up` has this ledger."""
    if not ledger or up.get(LEDGER_ENV) != ledger:
        return {}
    file = ledger.removeprefix("sqlite:///")
    logs = Path(file).parent.parent / "log" if file.startswith("/") else Path("DATA_DIR/log")
    return {
        hop: f"read {logs / part}.log; `gpuwarden up` starts a part that exits, and restarting `up` writes its files"
        for hop, part in LOGS_OF_UP.items()
    }


def conclude(
    hops: Sequence[Hop], broken: Hop | None, *, took_s: float, in_up: Mapping[str, str] | None = None
) -> Result:
    """Compute the time of each hop. A hop was not later than the next one, which may have been noticed first.

    `in_up` has the repairs of hops in a chain that `gpuwarden up` runs.
    """
    later_s = took_s
    for hop in reversed(hops):
        if hop.at_s is not None:
            later_s = hop.at_s = min(hop.at_s, later_s)
    result, before_s = Result(ok=broken is None, took_s=later_s if broken else (hops[-1].at_s or took_s)), 0.0
    for hop in hops:
        seconds = None if hop.at_s is None else hop.at_s - before_s
        before_s = before_s if hop.at_s is None else hop.at_s
        result.hops.append({"hop": hop.name, "passed": hop.passed, "seconds": seconds, "says": hop.says})
    if broken is not None:
        result.took_s = took_s
        result.broken, result.says = broken.name, broken.says
        result.fix = broken.fix or (in_up or {}).get(broken.name) or FIXES[broken.name]
    return result


def page(result: Result) -> Iterator[str]:
    """Format the result as lines."""
    yield f"{'hop':14}{'seconds':>8}"
    for hop in result.hops:
        seconds = "-" if hop["seconds"] is None else f"{hop['seconds']:.2f}"
        yield f"{hop['hop']:14}{seconds:>8}  {hop['says']}".rstrip()
        if hop["hop"] == result.broken:
            break
    yield ""
    if result.broken is None:
        yield f"every hop answered within {result.took_s:.1f} s; nothing was touched"
    else:
        yield f"broken at {result.broken}: {result.says}"
        yield f"fix: {result.fix}"


def is_over(hop: Hop, *, since_s: float, now_s: float, until_s: float) -> bool:
    """Whether to wait no longer for a hop."""
    if hop.unreachable_since_s is not None and now_s - hop.unreachable_since_s >= UNREACHABLE_S:
        return True
    most_s = NOTIFICATION_TIMEOUT_S if hop.name == NOTIFICATION else HOP_TIMEOUT_S[hop.name]
    return now_s - since_s >= most_s or now_s >= until_s


def unsent_says(found: Sequence[Delivery], *, now: float) -> str:
    """Why a message for administrators is not sent yet. `now`: Unix seconds."""
    for each in found:
        who = f"administrator {int(each.recipient.rpartition(' ')[2]) + 1}" if " " in each.recipient else ""
        if each.state == "sent":
            continue
        if not who or each.state == "dropped":
            return "no `gpuwarden remediator serve` has administrators in its notify file"
        if each.error is not None:
            return f"{who}: {each.error}"
        if each.next_at > now:
            return f"{who} gets its next message in {format_duration(each.next_at - now)}, by the rate limit"
        return f"the server of {who} did not accept the message yet"
    return "no message was stored"


class _Watch:
    """Looks at each hop of a drill until the last one has passed or one is broken."""

    def __init__(self, ledger: Ledger, wanted: argparse.Namespace, drills: Sequence[Drill], *, began_s: float) -> None:
        import httpx  # noqa: PLC0415 - slow to import

        from remediator.clients.http import authorities  # noqa: PLC0415

        self._ledger = ledger
        self._wanted = wanted
        self._drills = drills
        self._began_s = began_s
        urls = wanted.remediator, wanted.prometheus, wanted.alertmanager
        secure = any(url.lower().startswith("https:") for url in urls)
        self._client: httpx.Client = httpx.Client(
            timeout=TIMEOUT_S, trust_env=False, verify=authorities() if secure else False
        )
        self._numbers = {str(each.drill_id) for each in drills}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def until_over(self, hops: Sequence[Hop]) -> Hop | None:
        """Watch until the last hop has passed. Returns the broken hop, if one is."""
        current, since_s, until_s = "", 0.0, float(self._wanted.timeout_s)
        looks: Mapping[str, tuple[str, Callable[[str], Mapping[str, float | None]]]] = {
            "serve": (self._wanted.remediator, self._published),
            "prometheus": (self._wanted.prometheus, partial(self._query, f"{METRIC}{{{self._matcher()}}}")),
            "rule": (
                self._wanted.prometheus,
                partial(self._query, f'ALERTS{{alertname="{ALERT}",alertstate="firing",{self._matcher()}}}'),
            ),
            "alertmanager": (self._wanted.alertmanager, self._alerts),
        }
        while True:
            self._look_in_ledger(hops)
            waiting = [hop for hop in hops if not hop.passed]
            if not waiting:
                for unseen in (hop for hop in hops if hop.at_s is None and hop.name in looks):
                    self._look(unseen, looks[unseen.name])
                return None
            if (hop := waiting[0]).name in looks:
                self._look(hop, looks[hop.name])
            now_s = self._now_s()
            if hop.name != current:
                current, since_s = hop.name, now_s
            if not hop.passed and is_over(hop, since_s=since_s, now_s=now_s, until_s=until_s):
                self._explain(hop)
                return hop
            _pass_earlier(hops)
            if not hop.passed:
                time.sleep(POLL_S)

    def _look(self, hop: Hop, way: tuple[str, Callable[[str], Mapping[str, float | None]]]) -> None:
        import httpx  # noqa: PLC0415 - slow to import

        url, look = way[0].rstrip("/"), way[1]
        if url == NONE:
            hop.passed, hop.says = True, "not checked"
            return
        now_s = self._now_s()
        try:
            found = look(url)
        except httpx.TransportError as error:
            hop.fail(f"{url} cannot be reached: {error}", now_s=now_s, unreachable=True)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            hop.fail(f"{url} gave no valid answer: {error}", now_s=now_s)
        else:
            if self._numbers <= found.keys():
                times = [at_s for at_s in found.values() if at_s is not None]
                hop.passed, hop.at_s, hop.says = True, max(times, default=self._now_s()), url
            elif not hop.passed:
                missing = self._named(self._numbers - found.keys())
                hop.fail(f"{url} does not have the drill of {missing}", now_s=now_s)

    def _look_in_ledger(self, hops: Sequence[Hop]) -> None:
        webhook, executor = (hop for hop in hops if hop.name in ("webhook", "executor"))
        if executor.passed and hops[-1].name == NOTIFICATION:
            self._look_for_message(hops[-1])
            return
        drills = self._ledger.chain.read([each.drill_id for each in self._drills])
        for hop, done, what in (
            (webhook, {each.drill_id: each.delivered_at for each in drills}, "no alert arrived for"),
            (executor, {each.drill_id: each.decided_at for each in drills}, "the alert was not taken on"),
        ):
            if hop.passed:
                continue
            times = [at for at in done.values() if at is not None]
            if len(times) == len(drills):
                hop.passed, hop.at_s = True, max(0.0, max(times) - drills[0].started_at)
                hop.says = "stored in the ledger" if hop is webhook else f"{_some(drills)} took the alert, did nothing"
            else:
                hop.says = f"{what} {self._named({str(number) for number, at in done.items() if at is None})}"

    def _look_for_message(self, hop: Hop) -> None:
        """Send a message to the administrators, once, and see whether their servers accepted it."""
        notices, now, key = self._ledger.notices, self._ledger.now(), _key(self._drills)
        if not hop.says:
            from remediator.notify.messages import describe  # noqa: PLC0415 - slow to import

            title, text = describe("drill", who=self._drills[0].who, hosts=_some(self._drills))
            notices.notify_administrators(key=key, kind="drill", title=title, text=text, now=now)
        found = notices.deliveries(key)
        hop.passed = bool(found) and all(each.state == "sent" for each in found)
        hop.says = (
            f"accepted for {count_of(len(found), 'administrator')}" if hop.passed else unsent_says(found, now=now)
        )
        hop.at_s = self._now_s() if hop.passed else None

    def _explain(self, hop: Hop) -> None:
        """Add the cause of the failure, if it is known."""
        if hop.name == "webhook":
            refused = [row for row in self._ledger.inbox.refused() if row[3].get("drill") in self._numbers]
            if refused:
                hop.says += f": refused: {refused[0][2]}"
                hop.fix = f"load this version's rules unchanged: {ALERT} was refused for its labels"
            else:
                self._explain_suppressed(hop)
        elif hop.name == "executor":
            beats, now = self._ledger.executors.last_beats(), self._ledger.now()
            silent = {each.host: now - beats[each.host] for each in self._drills if each.host in beats}
            late = [f"{host} for {format_duration(age_s)}" for host, age_s in silent.items() if age_s > BEAT_MAX_S]
            hop.says += f"; no heartbeat of {', '.join(late)}" if late else ""

    def _explain_suppressed(self, hop: Hop) -> None:
        """Add why Alertmanager does not send the alert, if it says so."""
        import httpx  # noqa: PLC0415 - slow to import

        try:
            found = self._listed(self._wanted.alertmanager.rstrip("/"))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            return
        silences = sorted({each for alert in found for each in alert["status"]["silencedBy"]})
        receivers = sorted({each["name"] for alert in found for each in alert["receivers"]})
        if silences:
            hop.says += f": silenced by {', '.join(silences)}"
            hop.fix = f"run `amtool silence expire {' '.join(silences)}`, or wait until it ends"
        elif any(alert["status"]["inhibitedBy"] for alert in found):
            hop.says += ": inhibited by another alert"
            hop.fix = f"correct inhibit_rules of alertmanager.yml: none may match {ALERT}"
        elif receivers:
            hop.says += f": Alertmanager has it for {', '.join(receivers)}"

    def _published(self, url: str) -> Mapping[str, float | None]:
        answer = self._client.get(f"{url}/metrics").raise_for_status()
        lines = [line for line in answer.text.splitlines() if line.startswith(f"{METRIC}{{")]
        return {number: None for number in self._numbers if any(f'drill="{number}"' in line for line in lines)}

    def _query(self, query: str, url: str) -> Mapping[str, float | None]:
        answer = self._client.get(f"{url}/api/v1/query", params={"query": query}).raise_for_status()
        return {each["metric"]["drill"]: None for each in answer.json()["data"]["result"]}

    def _alerts(self, url: str) -> Mapping[str, float | None]:
        """When Alertmanager got the alerts, by its own clock: the webhook has them a moment later."""
        began_at = self._drills[0].started_at
        got = {each["labels"]["drill"]: datetime.fromisoformat(each["updatedAt"]) for each in self._listed(url)}
        return {number: max(0.0, at.timestamp() - began_at) for number, at in got.items()}

    def _listed(self, url: str) -> list[Any]:
        params = {"filter": f'alertname="{ALERT}"'}
        answer = self._client.get(f"{url}/api/v2/alerts", params=params).raise_for_status()
        return [each for each in answer.json() if each["labels"].get("drill") in self._numbers]

    def _matcher(self) -> str:
        return f'drill=~"{"|".join(sorted(self._numbers))}"'

    def _named(self, numbers: set[str]) -> str:
        return _some([each for each in self._drills if str(each.drill_id) in numbers])

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s


def _key(drills: Sequence[Drill]) -> str:
    """The key of the notice for administrators."""
    return f"drill {drills[0].drill_id} {drills[0].started_at}"


def _pass_earlier(hops: Sequence[Hop]) -> None:
    """A hop before one that passed has passed too, if it was not seen from here."""
    last = max((number for number, hop in enumerate(hops) if hop.passed and hop.at_s is not None), default=0)
    for hop in hops[:last]:
        if not hop.passed:
            hop.passed, hop.says = True, f"passed, not seen from here: {hop.says}" if hop.says else "passed"


def _some(drills: Sequence[Drill]) -> str:
    """The first hosts of some drills."""
    names = ", ".join(each.host for each in drills[:5])
    return names if len(drills) <= 5 else f"{names} and {count_of(len(drills) - 5, 'more host')}"


def _hosts(ledger: Ledger, wanted: str | None) -> list[str]:
    beats, now = ledger.executors.last_beats(), ledger.now()
    hosts = [host for host, at in beats.items() if wanted in (None, host) and (wanted or now - at < GONE_S)]
    if not hosts:
        of = f" of {wanted}" if wanted else ""
        raise GpuwardenError(
            f"no executor{of} ever ran on this ledger: start `gpuwarden up` or `gpuwarden remediator execute`"
        )
    return hosts


def _timeout_s(given: str) -> float:
    try:
        if 1 <= (timeout_s := float(given)) <= TIMEOUT_MAX_S:
            return timeout_s
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"invalid time {given!r}: expected 1 to {TIMEOUT_MAX_S:g} seconds")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden drill",
        description="Send a test alert through Prometheus, Alertmanager and webhook to the executor of each host, and "
        "measure each hop. Nothing is touched.",
        epilog="exit codes: 0 every hop answered; 1 a hop did not, and the command names it; 2 usage error",
    )
    add_ledger(parser)
    parser.add_argument("--host", help="only this host; default: every host of the ledger")
    parser.add_argument(
        "--notify", action="store_true", help="last send a message to each administrator of the notify file of `serve`"
    )
    parser.add_argument(
        "--timeout-s",
        type=_timeout_s,
        default=TIMEOUT_MAX_S,
        help="most seconds for all hops; each has its own limit too (default: %(default)g)",
    )
    add_addresses(parser, ("remediator", "prometheus", "alertmanager"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
