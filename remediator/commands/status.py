"""`gpuwarden status`: is the chain alive, what does it do, what waits, and what needs a person. It only reads.

Exit codes: 0 nothing needs a person; 1 something does, and each such thing says what to do; 2 it was called wrongly.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.db.engine import DatabaseError
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import ago, plain, when
from gpuwarden.queue import JobStore, Quarantine
from remediator.clients import exporter
from remediator.clients import http as answers
from remediator.clients.exporter import Access
from remediator.commands.open_ledger import add_ledger, existing, queue_url
from remediator.commands.orders import span
from remediator.ledger.executors import ExecutorHeartbeat
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import HeldEpisode
from remediator.plan import Outcome
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, Orders, Safeguards, begins_s

TIMEOUT_S: Final = 3.0
"""How long each part may take to answer, seconds."""

BEAT_MAX_S: Final = 15.0
"""An executor whose last sign of life is older does not go round, seconds; it gives one every second."""

GONE_S: Final = 7 * 86400.0
"""A host whose executor has shown no life for longer is taken for one that was given up, seconds."""

DISK_FREE_MIN: Final = 100 * 2**20
"""Less room than this for a ledger or a queue in a file is too little, bytes."""

LATELY_S: Final = 86400.0
"""For how long an episode that ended without a mend asks for a person, seconds."""

LONG_S: Final = 900.0
"""An episode that is open for longer asks for a person, unless it waits for what ends by itself, seconds."""

_PASSES: Final = frozenset(
    {
        *(Reason.DRY_RUN, Reason.PAUSED, Reason.CIRCUIT_BREAKER, Reason.COOLDOWN, Reason.APPROVAL, Reason.DECLINED),
        *(Reason.SILENCED, Reason.GRACE_PERIOD),
        *(Reason.EXECUTOR_ALIVE, Reason.OBSERVATION_TOO_SHORT, Reason.WORKERS_ALIVE, Reason.NO_JOBS),
    }
)
"""Waits that are told by themselves, or end by themselves."""

_DONE: Final = {Act.ARM: "armed", Act.ASK: "armed with approval", Act.DISARM: "disarmed"}

NONE: Final = "none"

ADDRESSES: Final = {
    "remediator": ("http://127.0.0.1:9836", "the webhook of `gpuwarden remediator serve`"),
    "exporter": ("http://127.0.0.1:29835", "this host's exporter"),
    "prometheus": ("http://127.0.0.1:9090", "Prometheus"),
    "alertmanager": ("http://127.0.0.1:9093", "Alertmanager"),
}


ACCESS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "ca_file": ("authorities in PEM, where the exporter serves HTTPS", Path),
    "server_name": ("the name in its certificate, where it is not the one in its URL", str),
    "cert_file": ("our own certificate in PEM, where it wants one", Path),
    "key_file": ("that certificate's key in PEM", Path),
    "basic_auth_file": ("file with one line `user:password`, where it wants them", Path),
}
"""What an exporter may want of who asks it (`witness.Access`), as `gpuwarden remediator execute` is told it too."""

SOURCES: Final = {
    "source_docker": "does the Docker engine run?",
    "source_podman": "does Podman's service run (systemctl status podman.socket)?",
    "source_kubernetes": "does the Kubernetes API answer, or are the kubelet's links in /var/log/containers?",
    "source_pod_resources": "does the kubelet run?",
    "source_gpu": "does the GPU's driver answer (`nvidia-smi`)?",
    "source_drm": "can the exporter read /proc and /sys (docs/amd-intel.md)?",
}
"""What to ask first where a source of the exporter's fails."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the chain: `ok` is `None` where it was not asked. `todo` is for a person, where it is not well."""

    name: str
    ok: bool | None
    says: str
    todo: str = ""


@dataclass(frozen=True, kw_only=True)
class Armed:
    """Whether one remedy acts on one host, if only on what is approved, and by whose order."""

    host: str
    remedy: str
    armed: bool
    approval: bool
    by: str | None


@dataclass(kw_only=True)
class Report:
    """The page. Times are Unix seconds."""

    at: float
    parts: list[Part] = field(default_factory=list)
    armed: list[Armed] = field(default_factory=list)
    episodes: list[HeldEpisode] = field(default_factory=list)
    brake: Order | None = None
    pauses: list[Order] = field(default_factory=list)
    freed_lately: list[tuple[str, str, float]] = field(default_factory=list)
    quarantined: list[Quarantine] = field(default_factory=list)
    unmended: list[tuple[int, str, str, str]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """Those whose executors are alive."""

    def needs(self) -> list[str]:
        """What a person is wanted for, a sentence each."""
        found = [f"{part.name}: {part.says}; {part.todo}" for part in self.parts if part.ok is False]
        if self.brake is not None:
            found.append(
                f"the brake is latched since {when(self.brake.at)}: {self.brake.because}; look for the one cause, then "
                "`gpuwarden brake release`"
            )
        dry = sum(each.reason == Reason.DRY_RUN for each in self.episodes)
        if dry:
            found.append(f"{dry} wedged and not armed: `gpuwarden arm` shows them and asks")
        found += [
            f"episode {each.episode_id} of {each.worker} on {each.host} wants a yes or a no: {each.message}"
            for each in self.episodes
            if each.reason == Reason.APPROVAL
        ]
        found += [
            f"GPU {each.gpu} of {each.host} is out of use: {each.because}; `gpuwarden gpu release {each.gpu}` once it "
            "is well"
            for each in self.quarantined
        ]
        found += [
            f"episode {number} of {worker} on {host} ended without a mend: {message}; `gpuwarden ledger show {number}`"
            for number, worker, host, message in self.unmended
        ]
        found += [
            f"episode {each.episode_id} of {each.worker} on {each.host} is open for {ago(self.at - each.opened_at)}: "
            f"{each.message or 'at work'}; `gpuwarden ledger show {each.episode_id}`"
            for each in self.episodes
            if each.reason not in _PASSES and self.at - each.opened_at > LONG_S
        ]
        return found


def command(argv: list[str]) -> int:
    """`gpuwarden status`."""
    wanted = _parser().parse_args(argv)
    report = look(wanted, now=time.time())
    if wanted.json:
        needs = report.needs()
        print(json.dumps({"ok": not needs, "needs": needs, **asdict(report)}))
    else:
        print("\n".join(page(report)))
    return 1 if report.needs() else 0


def look(wanted: argparse.Namespace, *, now: float) -> Report:
    """Ask every part; what does not answer costs its own line only."""
    report = Report(at=now)
    try:
        with closing(existing(wanted.ledger)) as ledger:
            report.at = ledger.now()
            _read_ledger(report, ledger, wanted)
    except GpuwardenError as error:
        report.parts.append(_unwell("ledger", wanted.ledger, error))
    for name, ask in (
        ("remediator", partial(_ready, "remediator")),
        ("exporter", _exporter),
        ("alertmanager", partial(_ready, "alertmanager")),
        ("prometheus", partial(_prometheus, report.hosts)),
    ):
        url: str = getattr(wanted, name)
        opened = partial(_exporters_client, wanted) if name == "exporter" else _client
        report.parts.append(_not_asked(name) if url == NONE else _asked(name, url.rstrip("/"), ask, opened))
    if wanted.queue not in (None, NONE):
        report.parts.append(_queue(report, wanted))
    return report


def page(report: Report) -> Iterator[str]:
    """The report for a person, a line at a time."""
    for part in report.parts:
        mark = {True: "ok", False: "NOT WELL", None: "-"}[part.ok]
        yield f"{part.name:14}{mark:10}{plain(part.says)}"
    yield ""
    for each in report.armed:
        by = f", {plain(each.by)}" if each.by else ", as nobody has armed it"
        mode = "APPROVAL" if each.approval else "ARMED" if each.armed else "dry run"
        yield f"{mode:10}{each.remedy} on {each.host}{by}"
    for order in report.pauses:
        yield f"{'planned' if begins_s(order, report.at) > 0 else 'paused':10}{span(order)}"
    yield f"{len(report.episodes)} open episodes"
    for held in report.episodes:
        since = ago(report.at - held.since)
        why = f": {plain(held.message)}" if held.message else ""
        yield f"  {held.episode_id}: {plain(held.worker)} on {held.host}, {held.reason or 'at work'} for {since}{why}"
    for host, name, at in report.freed_lately:
        yield f"  {plain(name)} on {host} was freed {ago(report.at - at)} ago"
    yield ""
    needs = report.needs()
    yield "nothing needs a person" if not needs else "needs a person:"
    for need in needs:
        yield f"  - {plain(need)}"


def _read_ledger(report: Report, ledger: Ledger, wanted: argparse.Namespace) -> None:
    report.parts.append(_database("ledger", wanted.ledger, ledger.health.check_writable))
    orders, executing = (
        ledger.orders.current(),
        [each for each in ledger.executors.list_all() if wanted.host in (None, each.host)],
    )
    report.episodes = ledger.reports.held(host=wanted.host)
    report.hosts = [each.host for each in executing if report.at - each.beat_at <= BEAT_MAX_S]
    # What it still owes keeps a host from being taken for given up, and so does being the only one.
    owing = {each.host for each in report.episodes} if report.hosts else {each.host for each in executing}
    report.parts += [_executor(each, now=report.at, owing=each.host in owing) for each in executing]
    if not executing:
        host = f" of {wanted.host}" if wanted.host else ""
        todo = "start `gpuwarden up`, or `gpuwarden remediator execute`"
        report.parts.append(Part(name="executor", ok=False, says=f"none{host} has ever run", todo=todo))
    alert_at = ledger.inbox.last_alert_at()
    told = "none yet" if alert_at is None else f"the last came {ago(report.at - alert_at)} ago"
    report.parts.append(Part(name="alerts", ok=None if alert_at is None else True, says=told))
    report.armed = list(_armed(orders, [each.host for each in executing]))
    report.brake, report.pauses = orders.brake(), orders.pauses(host=wanted.host, now=report.at)
    report.freed_lately = ledger.orders.freed_since(report.at - Safeguards().cooldown_s, host=wanted.host)
    report.unmended = [
        (each.episode_id, each.worker, each.host, each.message or "")
        for each in ledger.reports.since(report.at - LATELY_S, host=wanted.host)
        if each.outcome in (Outcome.PARTLY, Outcome.REFUSED)
    ]


def _armed(orders: Orders, hosts: Sequence[str]) -> Iterator[Armed]:
    for host in hosts:
        for remedy in sorted(REMEDIES):
            order = orders.arming(host=host, remedy=remedy)
            by = None if order is None else f"{_DONE[order.act]} by {order.who} at {when(order.at)}"
            armed, asks = orders.armed(host=host, remedy=remedy), orders.asks(host=host, remedy=remedy)
            yield Armed(host=host, remedy=remedy, armed=armed, approval=asks, by=by)


def _database(name: str, url: str, check: Callable[[], None]) -> Part:
    """Whether there is room for it, and nobody keeps its write lock."""
    path = _file(url)
    if path is not None:
        free = shutil.disk_usage(path.parent).free
        if free < DISK_FREE_MIN:
            says = f"only {free / 2**20:.0f} MiB are free on the disk of {path}"
            return Part(name=name, ok=False, says=says, todo="make room: without it nothing is recorded, so done")
    try:
        check()
    except DatabaseError as error:
        return _unwell(name, url, error)
    return Part(name=name, ok=True, says="can be read and written")


def _unwell(name: str, url: str, error: GpuwardenError) -> Part:
    """What the database of ledger or queue says in its own words, and what to do about it."""
    says, path = str(error), _file(url)
    for words, meaning, todo in (
        (
            "locked",
            "another process holds its write lock and does not let go: nothing is recorded, so nothing is done",
            f"find it (`fuser {path}`): a stopped or hung process of ours, or a tool that has the file open",
        ),
        ("full", "the disk is full: nothing is recorded, so nothing is done", "make room; all goes on by itself then"),
        ("readonly", "this account may only read it", "ask as the user that the executor runs as"),
        (
            "unable to open",
            "it cannot be opened",
            f"is --{name} right? If so, ask as the user that the executor runs as",
        ),
    ):
        if words in says:
            return Part(name=name, ok=False, says=f"{meaning} ({says})", todo=todo)
    return Part(name=name, ok=False, says=says, todo=f"is --{name} right, and does its database run?")


def _file(url: str) -> Path | None:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whoever opens it says it better
        return None
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def _queue(report: Report, wanted: argparse.Namespace) -> Part:
    path = _file(wanted.queue)
    if path is not None and not path.exists():  # opened, it would be made
        todo = "is --queue right, and does its database run?"
        return Part(name="queue", ok=False, says=f"there is none at {path}", todo=todo)
    try:
        with closing(JobStore.open(wanted.queue, migrate=False)) as store:
            report.quarantined = [
                each for each in store.gpu_quarantine.quarantined() if wanted.host in (None, each.host)
            ]
            return _database("queue", wanted.queue, store.check_writable)
    except GpuwardenError as error:
        return _unwell("queue", wanted.queue, error)


def _executor(executing: ExecutorHeartbeat, *, now: float, owing: bool) -> Part:
    name, silent_s = f"executor {executing.host}", now - executing.beat_at
    if silent_s > GONE_S and not owing:
        return Part(name=name, ok=None, says=f"silent for {ago(silent_s)}: taken for given up")
    if silent_s > BEAT_MAX_S:
        todo = "does it run, can it write the ledger, is it stopped? Its log says; start it again"
        return Part(name=name, ok=False, says=f"no sign of life for {ago(silent_s)}", todo=todo)
    errors = f", {executing.errors} unexpected errors since its start" if executing.errors else ""
    workers = "" if executing.workers is None else f", sees {executing.workers} workers"
    return Part(name=name, ok=True, says=f"alive, pid {executing.pid}{workers}{errors}")


def _asked(name: str, url: str, ask: Callable[[httpx.Client, str], Part], opened: Callable[[], httpx.Client]) -> Part:
    _, title = ADDRESSES[name]
    try:
        with opened() as client:
            return ask(client, url)
    except (GpuwardenError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        elsewhere = f"start it, or say where it is with --{name} (--{name} none where there is none)"
        return Part(name=name, ok=False, says=f"{title} does not answer at {url}: {error}", todo=elsewhere)


def _client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=answers.authorities())


def _exporters_client(wanted: argparse.Namespace) -> httpx.Client:
    access = Access(**{name: getattr(wanted, f"exporter_{name}") for name in ACCESS})
    return exporter.client(access, timeout_s=TIMEOUT_S)


def _not_asked(name: str) -> Part:
    return Part(name=name, ok=None, says="not asked")


def _exporter(client: httpx.Client, url: str) -> Part:
    """Well, and every source and collector did its work: what one failed to tell is unknown, and never acted on."""
    answer = client.get(f"{url}/-/ready")
    if not answer.is_success:
        return _unready("exporter", url, answer)
    answer = client.get(f"{url}/metrics")
    if not answer.is_success:
        return _unready("exporter", url, answer)
    families = text_string_to_metric_families(answer.text)
    failed = [
        sample.labels["collector"]
        for family in families
        for sample in family.samples
        if sample.name == "gpuwarden_collector_success" and sample.value == 0
    ]
    if not failed:
        return Part(name="exporter", ok=True, says=f"well at {url}")
    says = f"{', '.join(failed)} failed at {url}: what is told by it is unknown, so nothing is done on its account"
    asked = [SOURCES[name] for name in failed if name in SOURCES]
    return Part(name="exporter", ok=False, says=says, todo="; ".join([*asked, "its log says why"]))


def _ready(name: str, client: httpx.Client, url: str) -> Part:
    answer = client.get(f"{url}/-/ready")
    return Part(name=name, ok=True, says=f"ready at {url}") if answer.is_success else _unready(name, url, answer)


def _unready(name: str, url: str, answer: httpx.Response) -> Part:
    says = f"says {answer.status_code} at {url}: {answer.text.strip()[:200]}"
    return Part(name=name, ok=False, says=says, todo="its log says why")


def _prometheus(hosts: Sequence[str], client: httpx.Client, url: str) -> Part:
    """Ready, has our rules, evaluates them, has somebody to tell, and something to tell of: each host's exporter."""
    answer = client.get(f"{url}/-/ready")
    if not answer.is_success:
        return _unready("prometheus", url, answer)
    rules = _acting_rules(client.get(f"{url}/api/v1/rules", params={"type": "alert"}).json())
    if not rules:
        says = f"at {url} has no rule that calls the remediator"
        return Part(name="prometheus", ok=False, says=says, todo="add alerts/*.rules.yaml to its rule_files")
    broken = [rule for rule in rules if rule.get("health") == "err"]
    if broken:
        says = f"cannot evaluate {broken[0]['name']}: {broken[0].get('lastError', '')}"
        return Part(name="prometheus", ok=False, says=says, todo="compare its rules with those of this version")
    told = client.get(f"{url}/api/v1/alertmanagers").json()["data"]["activeAlertmanagers"]
    if not told:
        says = f"at {url} has no Alertmanager to tell"
        return Part(name="prometheus", ok=False, says=says, todo="add one under alerting: in its configuration")
    answer = client.get(f"{url}/api/v1/query", params={"query": "group by (host) (gpuwarden_collector_success)"})
    scraped = {each["metric"].get("host") for each in answer.json()["data"]["result"]}
    if unseen := sorted(set(hosts) - scraped):
        says = f"at {url} has no series of {', '.join(unseen)}, so no rule speaks of it"
        todo = "does it scrape that host's exporter, with the label `host` as its key? See its targets"
        return Part(name="prometheus", ok=False, says=says, todo=todo)
    return Part(name="prometheus", ok=True, says=f"ready at {url}, evaluates {len(rules)} acting rules")


def _acting_rules(answer: Any) -> list[dict[str, Any]]:
    groups = answer["data"]["groups"]
    return [rule for group in groups for rule in group["rules"] if "remedy" in rule.get("labels", {})]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden status",
        description="Whether the chain is alive, what it does, what waits, and what needs a person.",
        epilog="exit codes: 0 nothing needs a person; 1 something does; 2 called wrongly",
    )
    add_ledger(parser)
    parser.add_argument("--host", help="this host only; every host of the ledger when not given")
    parser.add_argument(
        "--queue",
        default=queue_url(os.environ),
        help="the queue's database URL, or $GPUWARDEN_STORE, for GPUs in quarantine; 'none' where there is none; else "
        "the one of `gpuwarden up`",
    )
    for name, (default, title) in ADDRESSES.items():
        env = f"GPUWARDEN_{name.upper()}_URL"
        parser.add_argument(
            f"--{name}",
            metavar="URL",
            default=os.environ.get(env) or default,
            help=f"{title}, or ${env}; 'none' where there is none to ask (default: %(default)s)",
        )
    for name, (title, of) in ACCESS.items():
        env = f"GPUWARDEN_REMEDIATOR_EXPORTER_{name.upper()}"
        option = f"--exporter-{name.replace('_', '-')}"
        parser.add_argument(option, type=of, default=os.environ.get(env) or None, help=f"{title}, or ${env}")
    parser.add_argument("--json", action="store_true", help="one JSON object; times are Unix seconds")
    return parser
