"""`gpuwarden status`: health of the pipeline, watched workers, held actions, and what needs an operator. Read only.

Exit codes: 0 nothing needs an operator; 1 something does; 2 usage error.
"""

import argparse
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gpuwarden.cli.columns import wrapped
from gpuwarden.cli.watch import watch
from gpuwarden.db.errors import DatabaseError
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, count_of, format_duration, format_time, json_line, printable, show
from gpuwarden.notify.address import shown
from gpuwarden.queue import JobStore, Quarantine, WorkerRow
from remediator.alert import DRILL
from remediator.commands.addresses import ACCESS, ADDRESSES, NONE, add_sources
from remediator.commands.open_ledger import existing
from remediator.commands.orders import span
from remediator.commands.watched import QUERY, WatchedHost, list_watched, read_watched
from remediator.ledger.chain import DEAD_S, INTERRUPTED, ExecutorHeartbeat
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import HeldEpisode
from remediator.plan import Outcome
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, Orders, SafetyLimits, begins_s

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 3.0
"""Timeout of each part, seconds."""

WATCH_S: Final = 2.0
"""Time between two pages of `--watch`, seconds."""

BEAT_MAX_S: Final = 15.0
"""Maximum age of a live executor's heartbeat, seconds. It writes one a second."""

GONE_S: Final = 7 * 86400.0
"""A host whose executor has no heartbeat for longer counts as removed, seconds."""

DISK_FREE_MIN: Final = 100 * 2**20
"""Minimum free disk space for an SQLite ledger or queue, bytes."""

LISTED_MAX: Final = 20
"""Maximum open episodes, and needs, on a page."""

LATELY_S: Final = 86400.0
"""How long an episode that failed is shown, seconds."""

FAILING_S: Final = 600.0
"""Messages that fail for longer need an operator, seconds."""

UNSENT_S: Final = 7200.0
"""A notice that waits for longer needs an operator, seconds. Rate limits delay it by less."""

LONG_S: Final = 900.0
"""An episode open for longer needs an operator, even if its reason asks for none, seconds."""

OTHER_WAITS: Final = frozenset(
    {
        *(Reason.DRY_RUN, Reason.PAUSED, Reason.CIRCUIT_BREAKER, Reason.COOLDOWN, Reason.APPROVAL, Reason.DECLINED),
        *(Reason.SILENCED, Reason.GRACE_PERIOD, Reason.CONTAINER_GONE),
        *(Reason.EXECUTOR_ALIVE, Reason.OBSERVATION_TOO_SHORT, Reason.WORKERS_ALIVE, Reason.NO_JOBS),
    }
)
"""Waits that are listed separately or end without an operator."""

_DONE: Final = {Act.ARM: "armed", Act.ASK: "armed with approval", Act.DISARM: "disarmed"}

SOURCES: Final = {
    "source_docker": "check that Docker runs",
    "source_podman": "check Podman (systemctl status podman.socket)",
    "source_kubernetes": "check the Kubernetes API and /var/log/containers",
    "source_node": "allow the exporter's account to get nodes",
    "source_pod_resources": "check that the kubelet runs",
    "source_gpu": "check the GPU driver (`nvidia-smi`)",
    "source_drm": "check that the exporter can read /proc and /sys (docs/reference/gpus.md)",
}
"""What to check first if a collector fails."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the pipeline. `ok` is `None` if not checked. `todo` says what to do if it is down."""

    name: str
    ok: bool | None
    says: str
    todo: str = ""


@dataclass(frozen=True, kw_only=True)
class Armed:
    """Whether a remedy is armed on a host, and by whose order."""

    host: str
    remedy: str
    armed: bool
    approval: bool
    by: str | None


@dataclass(kw_only=True)
class Report:
    """The report. Times are Unix seconds."""

    at: float
    parts: list[Part] = field(default_factory=list)
    armed: list[Armed] = field(default_factory=list)
    episodes: list[HeldEpisode] = field(default_factory=list)
    breaker: Order | None = None
    pauses: list[Order] = field(default_factory=list)
    freed_lately: list[tuple[str, str, float]] = field(default_factory=list)
    quarantined: list[Quarantine] = field(default_factory=list)
    locked: list[WorkerRow] = field(default_factory=list)
    """Workers that gpuwarden locked. Only operators have an @ in their name."""
    not_fixed: list[tuple[int, str, str, str, str]] = field(default_factory=list)
    """Number, worker, host, message, and what to do."""
    hosts: list[str] = field(default_factory=list)
    """Hosts with a live executor."""
    watched: list[WatchedHost] = field(default_factory=list)
    """What Prometheus has; empty if it does not answer."""

    def needs(self) -> list[str]:
        """List what needs an operator, a sentence each."""
        found = [f"{part.name}: {part.says}; {part.todo}" for part in self.parts if part.ok is False]
        if self.breaker is not None:
            found.append(
                f"circuit breaker open since {format_time(self.breaker.at)}: {self.breaker.reason}; "
                "find the cause, then run `gpuwarden breaker reset`"
            )
        dry = sum(each.reason == Reason.DRY_RUN for each in self.episodes)
        if dry:
            found.append(f"{count_of(dry, 'episode')} in dry run: see `gpuwarden arm`")
        found += [
            f"episode {each.episode_id} of {each.worker} on {each.host} needs approval: {each.message}"
            for each in self.episodes
            if each.reason == Reason.APPROVAL
        ]
        found += [
            f"GPU {each.gpu} of {each.host} is quarantined: {each.reason}; run `gpuwarden gpu release {each.gpu}` "
            "once it works"
            for each in self.quarantined
        ]
        found += [
            f"worker {each.worker} of {each.host} is locked: {each.locked_reason}; run `gpuwarden worker unlock "
            f"{each.worker} --host {each.host}` once it works"
            for each in self.locked
        ]
        found += [
            f"episode {number} of {worker} on {host} was not fixed: {message}; {todo}"
            f"see `gpuwarden ledger show {number}`"
            for number, worker, host, message, todo in self.not_fixed
        ]
        found += [
            f"episode {each.episode_id} of {each.worker} on {each.host} open for "
            f"{format_duration(self.at - each.opened_at)}: {each.message or 'running'}; "
            f"{_todo(each.reason)}see `gpuwarden ledger show {each.episode_id}`"
            for each in self.episodes
            if each.reason not in OTHER_WAITS and (_todo(each.reason) or self.at - each.opened_at > LONG_S)
        ]
        return found


def command(argv: list[str]) -> int:
    """`gpuwarden status`."""
    wanted = _parser().parse_args(argv)
    if wanted.watch:
        return watch(
            lambda _: _lines(look(wanted, now=time.time()), wanted),
            lambda: time.sleep(WATCH_S),
            now=time.time,
            in_place=not wanted.json,
        )
    report = look(wanted, now=time.time())
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not wanted.json else None
    for line in map(printable, _lines(report, wanted)):
        show(*wrapped(line, width, _indent(line)))
    return 1 if report.needs() else 0


def _indent(line: str) -> int:
    """Where a line that is too long goes on: below its last column, or deeper than the line of a list."""
    if line.startswith(" "):
        return 4
    columns = re.match(r"(\S+( \S+)* {2,}){0,2}", line)
    return columns.end() if columns else 0


def _lines(report: Report, wanted: argparse.Namespace) -> Iterator[str]:
    if not wanted.json:
        return page(report)
    needs = report.needs()
    return iter((json_line({"ok": not needs, "needs": needs, **asdict(report)}),))


def look(wanted: argparse.Namespace, *, now: float) -> Report:
    """Check every part. A part that does not answer affects only its own line."""
    report = Report(at=now)
    try:
        with closing(existing(wanted.ledger)) as ledger:
            report.at = ledger.now()
            _read_ledger(report, ledger, wanted)
    except GpuwardenError as error:
        report.parts.append(_explain("ledger", wanted.ledger, error))
    for name, ask in (
        ("remediator", partial(_ready, "remediator")),
        ("exporter", _exporter),
        ("alertmanager", partial(_ready, "alertmanager")),
        ("prometheus", partial(_prometheus, report, wanted.host)),
    ):
        url: str = getattr(wanted, name)
        opened = partial(_client, wanted, name, url)
        report.parts.append(_not_checked(name) if url == NONE else _check_http(name, url.rstrip("/"), ask, opened))
    if wanted.queue_db not in (None, NONE):
        report.parts.append(_queue(report, wanted))
    return report


def _todo(reason: str | None) -> str:
    """What an operator does about a reason, as the begin of a phrase; empty if nothing."""
    advice = next((each.advice for each in Reason if each == reason and each.needs_operator), "")
    return advice and f"{advice[0].lower()}{advice[1:].rstrip('.')}; "


def page(report: Report) -> Iterator[str]:
    """Format the report as lines."""
    width = max(14, *(len(part.name) + 1 for part in report.parts))
    for part in report.parts:
        mark = {True: "ok", False: "DOWN", None: "-"}[part.ok]
        yield f"{part.name:{width}}{mark:10}{part.says}"
    yield ""
    yield from list_watched(report.watched)
    yield from _modes(report.armed)
    for order in report.pauses:
        yield f"{'planned' if begins_s(order, report.at) > 0 else 'paused':10}{span(order)}"
    yield count_of(len(report.episodes), "open episode")
    yield from _list_episodes(report)
    for host, name, at in report.freed_lately:
        yield f"  {name} on {host} restarted {format_duration(report.at - at)} ago"
    yield ""
    needs = report.needs()
    yield "nothing needs an operator" if not needs else "needs an operator:"
    yield from (f"  - {need}" for need in needs[:LISTED_MAX])
    if len(needs) > LISTED_MAX:
        yield f"  - and {len(needs) - LISTED_MAX} more: see `gpuwarden status --json`"


def _list_episodes(report: Report) -> Iterator[str]:
    """List some open episodes and count the rest by reason."""
    for held in report.episodes[:LISTED_MAX]:
        since = format_duration(report.at - held.since)
        why = f": {held.message}" if held.message else ""
        episode = f"{held.episode_id}: {held.worker} on {held.host}"
        yield f"  {episode}, {held.reason or 'running'} for {since}{why}"
    if rest := Counter(each.reason or "running" for each in report.episodes[LISTED_MAX:]):
        counts = ", ".join(f"{count} {reason}" for reason, count in rest.most_common())
        yield f"  and {rest.total()} more: {counts}"


def _modes(armed: Sequence[Armed]) -> Iterator[str]:
    """One line for all remedies of a host which one order set."""
    groups: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in armed:
        mode = "APPROVAL" if each.approval else "ARMED" if each.armed else "dry run"
        by = f", {each.by}" if each.by else ", no order yet"
        groups[each.host, mode, by].append(each.remedy)
    for (host, mode, by), remedies in groups.items():
        names = "every remedy" if len(remedies) == len(REMEDIES) else ", ".join(remedies)
        yield f"{mode:10}{names} on {host}{by}"


def _read_ledger(report: Report, ledger: Ledger, wanted: argparse.Namespace) -> None:
    report.parts.append(_database("ledger", wanted.ledger, ledger.health.check_writable))
    orders, executing = (
        ledger.orders.current(),
        [each for each in ledger.executors.list_all() if wanted.host in (None, each.host)],
    )
    # Those without evidence come last: their targets may not exist.
    report.episodes = sorted(
        ledger.reports.list_held(host=wanted.host), key=lambda each: each.reason == Reason.NO_EVIDENCE
    )
    report.hosts = [each.host for each in executing if report.at - each.heartbeat_at <= BEAT_MAX_S]
    # A host with open episodes, or the only host, does not count as removed.
    owing = {each.host for each in report.episodes} if report.hosts else {each.host for each in executing}
    report.parts += [_executor(each, now=report.at, owing=each.host in owing) for each in executing]
    if not executing:
        host = f" of {wanted.host}" if wanted.host else ""
        todo = "start `gpuwarden up` or `gpuwarden remediator execute`"
        report.parts.append(Part(name="executor", ok=False, says=f"no executor{host} ever ran", todo=todo))
    alert_at = ledger.inbox.last_alert_at()
    says = "none yet" if alert_at is None else f"last one {format_duration(report.at - alert_at)} ago"
    report.parts.append(Part(name="alerts", ok=None if alert_at is None else True, says=says))
    gone = {each.host for each in executing if report.at - each.heartbeat_at > GONE_S}
    living = [each.started_at for each in executing if each.host in report.hosts]
    report.parts += _chain(ledger, wanted.host, gone, began_at=min(living, default=report.at), now=report.at)
    report.parts.append(_notifications(ledger, now=report.at))
    report.armed = list(_armed(orders, [each.host for each in executing]))
    report.breaker, report.pauses = orders.breaker(), orders.pauses(host=wanted.host, now=report.at)
    report.freed_lately = ledger.orders.restarts_since(report.at - SafetyLimits().cooldown_s, host=wanted.host)
    report.not_fixed = [
        (each.episode_id, each.worker, each.host, each.message or "", _todo(each.reason))
        for each in ledger.reports.closed_since(
            report.at - LATELY_S, outcomes=(Outcome.PARTLY, Outcome.REFUSED), host=wanted.host
        )
        if each.reason not in (Reason.ACKNOWLEDGED, Reason.STARTED_ELSEWHERE)
    ]


def _chain(ledger: Ledger, host: str | None, gone: Collection[str], *, began_at: float, now: float) -> Iterator[Part]:
    """When the watchdog alert and the alerts of drills last arrived. Executors have run since `began_at`."""
    arrival, todo = ledger.chain.watchdog(), "run `gpuwarden drill`: it names the broken link"
    if arrival is None:
        late = now - began_at > DEAD_S
        says = f"none in {format_duration(now - began_at)}" if late else "none yet"
        yield Part(name="watchdog", ok=False if late else None, says=says, todo=todo)
    else:
        says = f"last one {format_duration(now - arrival.at)} ago"
        yield Part(name="watchdog", ok=now - arrival.at <= DEAD_S, says=says, todo=todo)
    drills = [each for each in ledger.chain.last(host=host) if each.host not in gone]
    broken = [each for each in drills if each.broken not in (None, INTERRUPTED)]
    passed = [each.decided_at for each in drills if each.decided_at is not None]
    if broken:
        first = broken[0]
        says = f"drill of {first.host} {format_duration(now - first.started_at)} ago ended at {first.broken}"
        yield Part(name="drill", ok=False, says=says, todo="run `gpuwarden drill` again: it names the repair")
    elif passed:
        hosts = count_of(len(passed), "host")
        yield Part(name="drill", ok=True, says=f"last one passed {format_duration(now - min(passed))} ago on {hosts}")
    else:
        yield Part(name="drill", ok=None, says="none yet")


def _notifications(ledger: Ledger, *, now: float) -> Part:
    """The notices that wait. An address is shown without its secrets."""
    unsent, name = ledger.notices.unsent(), "notifications"
    if unsent.failing_since is not None and now - unsent.failing_since > FAILING_S:
        to = ", ".join(sorted({"an administrator" if each is None else shown(each) for each, _ in unsent.failing}))
        since, why = format_duration(now - unsent.failing_since), unsent.failing[0][1]
        unsaid = f"{count_of(unsent.waiting, 'notice')} not sent; " if unsent.waiting else ""
        says = f"{unsaid}messages to {to} fail for {since}: {why}"
        todo = "correct the notify file or the address, then run `gpuwarden drill --notify`"
        return Part(name=name, ok=False, says=says, todo=todo)
    if unsent.oldest_at is not None and now - unsent.oldest_at > UNSENT_S:
        says = f"{count_of(unsent.waiting, 'notice')} not sent for {format_duration(now - unsent.oldest_at)}"
        return Part(name=name, ok=False, says=says, todo="start `gpuwarden remediator serve` with --notify-file")
    return Part(name=name, ok=True, says=f"{unsent.waiting} waiting")


def _armed(orders: Orders, hosts: Sequence[str]) -> Iterator[Armed]:
    for host in hosts:
        for remedy in sorted(REMEDIES):
            order = orders.arming(host=host, remedy=remedy)
            by = None if order is None else f"{_DONE[order.act]} by {order.who} at {format_time(order.at)}"
            armed, asks = orders.armed(host=host, remedy=remedy), orders.needs_approval(host=host, remedy=remedy)
            yield Armed(host=host, remedy=remedy, armed=armed, approval=asks, by=by)


def _database(name: str, url: str, check: Callable[[], None]) -> Part:
    """Check free disk space and the write lock."""
    path = _file(url)
    if path is not None:
        free = shutil.disk_usage(path.parent).free
        if free < DISK_FREE_MIN:
            says = f"only {free / 2**20:.0f} MiB free on the disk of {path}"
            return Part(name=name, ok=False, says=says, todo="free some space: without it nothing is recorded or done")
    try:
        check()
    except DatabaseError as error:
        return _explain(name, url, error)
    return Part(name=name, ok=True, says="readable and writable")


def _explain(name: str, url: str, error: GpuwardenError) -> Part:
    """Explain a database error and what to do about it."""
    says, path = str(error), _file(url)
    for words, meaning, todo in (
        (
            "locked",
            "another process holds the write lock: nothing is recorded or done",
            f"find that process with `fuser {path}`",
        ),
        ("full", "disk full: nothing is recorded or done", "free some space"),
        ("readonly", "this user may only read it", "run the command as the executor's user"),
        (
            "unable to open",
            "it cannot be opened",
            f"check --{name}, or run the command as the executor's user",
        ),
    ):
        if words in says:
            return Part(name=name, ok=False, says=f"{meaning} ({says})", todo=todo)
    return Part(name=name, ok=False, says=says, todo=f"check --{name} and its database")


def _file(url: str) -> Path | None:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # opening it gives a better error
        return None
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def _queue(report: Report, wanted: argparse.Namespace) -> Part:
    path = _file(wanted.queue_db)
    if path is not None and not path.exists():  # opening would create it
        todo = "check --queue-db and its database"
        return Part(name="queue", ok=False, says=f"no queue database at {path}", todo=todo)
    try:
        with closing(JobStore.open(wanted.queue_db, migrate=False)) as store:
            report.quarantined = [
                each for each in store.gpu_quarantine.quarantined() if wanted.host in (None, each.host)
            ]
            report.locked = [
                each
                for each in store.admin.workers(now=store.now())
                if "@" not in (each.locked_by or "@") and wanted.host in (None, each.host)
            ]
            return _database("queue", wanted.queue_db, store.check_writable)
    except GpuwardenError as error:
        return _explain("queue", wanted.queue_db, error)


def _executor(executing: ExecutorHeartbeat, *, now: float, owing: bool) -> Part:
    name, silent_s = f"executor {executing.host}", now - executing.heartbeat_at
    if silent_s > GONE_S and not owing:
        return Part(name=name, ok=None, says=f"silent for {format_duration(silent_s)}: counts as removed")
    if silent_s > BEAT_MAX_S:
        todo = "check its log, then restart it"
        return Part(name=name, ok=False, says=f"no heartbeat for {format_duration(silent_s)}", todo=todo)
    errors = f", {count_of(executing.errors, 'unexpected error')} since the start" if executing.errors else ""
    workers = "" if executing.workers is None else f", sees {count_of(executing.workers, 'worker')}"
    return Part(name=name, ok=True, says=f"alive, pid {executing.pid}{workers}{errors}")


def _check_http(
    name: str, url: str, ask: Callable[["httpx.Client", str], Part], opened: Callable[[], "httpx.Client"]
) -> Part:
    import httpx  # noqa: PLC0415 - slow to import

    _, title = ADDRESSES[name]
    try:
        with opened() as client:
            return ask(client, url)
    except (GpuwardenError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        todo = f"start it, or set --{name} to its URL (--{name} none without one)"
        return Part(name=name, ok=False, says=f"{title} is unreachable at {url}: {error}", todo=todo)


def _client(wanted: argparse.Namespace, name: str, url: str) -> "httpx.Client":
    """A client for one part. Plain HTTP reads no authorities, which takes 30 ms."""
    import httpx  # noqa: PLC0415 - slow to import

    from remediator.clients.exporter_access import ExporterAuth, connect  # noqa: PLC0415
    from remediator.clients.http import authorities  # noqa: PLC0415

    secure = url.lower().startswith("https:")
    access = ExporterAuth(**{option: getattr(wanted, f"exporter_{option}") for option in ACCESS})
    if name == "exporter" and (secure or access != ExporterAuth()):
        return connect(access, timeout_s=TIMEOUT_S)
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=authorities() if secure else False)


def _not_checked(name: str) -> Part:
    return Part(name=name, ok=None, says="not checked")


def _exporter(client: "httpx.Client", url: str) -> Part:
    """Check the exporter and its collectors. What a failed one reads is unknown and is not acted on."""
    answer = client.get(f"{url}/-/ready")
    if not answer.is_success:
        return _unready("exporter", url, answer)
    answer = client.get(f"{url}/metrics")
    if not answer.is_success:
        return _unready("exporter", url, answer)
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - slow to import

    lines = [line for line in answer.text.splitlines() if line.startswith("gpuwarden_collector_success{")]
    families = text_string_to_metric_families("\n".join(lines))
    failed = [sample.labels["collector"] for family in families for sample in family.samples if sample.value == 0]
    if not failed:
        return Part(name="exporter", ok=True, says=f"ready at {url}")
    says = f"{', '.join(failed)} failed at {url}: their metrics are unknown and are not acted on"
    asked = [SOURCES[name] for name in failed if name in SOURCES]
    return Part(name="exporter", ok=False, says=says, todo="; ".join([*asked, "see its log"]))


def _ready(name: str, client: "httpx.Client", url: str) -> Part:
    answer = client.get(f"{url}/-/ready")
    return Part(name=name, ok=True, says=f"ready at {url}") if answer.is_success else _unready(name, url, answer)


def _unready(name: str, url: str, answer: "httpx.Response") -> Part:
    says = f"status {answer.status_code} at {url}: {answer.text.strip()[:200]}"
    return Part(name=name, ok=False, says=says, todo="see its log")


def _prometheus(report: Report, host: str | None, client: "httpx.Client", url: str) -> Part:
    """Check that Prometheus evaluates the rules, knows an Alertmanager, and scrapes each host. Read its workers."""
    answer = client.get(f"{url}/-/ready")
    if not answer.is_success:
        return _unready("prometheus", url, answer)
    found = _query(client, url, "group by (host) (gpuwarden_collector_success)")
    scraped = {each["metric"].get("host", "") for each in found}
    watched = [each for each in scraped if host in (None, each)]
    report.watched = read_watched(watched, _query(client, url, QUERY))
    rules = _acting_rules(client.get(f"{url}/api/v1/rules", params={"type": "alert"}).json())
    if not rules:
        says = f"no rule at {url} calls the remediator"
        return Part(name="prometheus", ok=False, says=says, todo="add alerts/*.rules.yaml to its rule_files")
    broken = [rule for rule in rules if rule.get("health") == "err"]
    if broken:
        says = f"cannot evaluate {broken[0]['name']}: {broken[0].get('lastError', '')}"
        return Part(name="prometheus", ok=False, says=says, todo="compare its rules with those of this version")
    targets = client.get(f"{url}/api/v1/alertmanagers").json()["data"]["activeAlertmanagers"]
    if not targets:
        says = f"no Alertmanager configured at {url}"
        return Part(name="prometheus", ok=False, says=says, todo="add one under `alerting:` in its configuration")
    if unseen := sorted(set(report.hosts) - scraped):
        says = f"no series of {', '.join(unseen)} at {url}: no alert fires for it"
        todo = "check its targets: it must scrape that host's exporter with the host's key as label `host`"
        return Part(name="prometheus", ok=False, says=says, todo=todo)
    return Part(name="prometheus", ok=True, says=f"ready at {url}, evaluates {count_of(len(rules), 'acting rule')}")


def _query(client: "httpx.Client", url: str, query: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = client.get(f"{url}/api/v1/query", params={"query": query}).json()["data"]["result"]
    return result


def series(wanted: argparse.Namespace, name: str, names: Collection[str]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Samples of these series (without `gpuwarden_`) from Prometheus or the exporter, or why there are none."""
    url: str = getattr(wanted, name).rstrip("/")
    if url == NONE:
        return (), "not checked"
    import httpx  # noqa: PLC0415 - slow to import

    try:
        with _client(wanted, name, url) as client:
            if name == "prometheus":
                found = _query(client, url, f'{{__name__=~"gpuwarden_({"|".join(names)})"}}')
            else:
                found = _exported(client.get(f"{url}/metrics").raise_for_status().text, names)
    except (GpuwardenError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        return (), f"unreachable at {url}: {error}"
    return found, "" if found else f"no series of a host at {url}"


def _exported(text: str, names: Collection[str]) -> list[dict[str, Any]]:
    """An exporter's page in the shape of Prometheus' answer. The label `host` is added."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - slow to import

    wanted = {f"gpuwarden_{name}" for name in names}
    lines = [line for line in text.splitlines() if _NAME.split(line, 1)[0] in wanted]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    samples = [sample for family in families for sample in family.samples]
    host = next((each.labels["nodename"] for each in samples if each.name == "gpuwarden_exporter_info"), "")
    return [
        {"metric": {"__name__": each.name, "host": host, **each.labels}, "value": [0, str(each.value)]}
        for each in samples
    ]


_NAME: Final = re.compile(r"[{ ]")


def _acting_rules(answer: Any) -> list[dict[str, Any]]:
    groups = answer["data"]["groups"]
    return [rule for group in groups for rule in group["rules"] if rule.get("labels", {}).get("remedy", DRILL) != DRILL]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden status",
        description="Show the health of the pipeline, watched workers, held actions, and what needs an operator.",
        epilog="exit codes: 0 nothing needs an operator; 1 something does; 2 usage error",
    )
    add_sources(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; times are Unix seconds")
    parser.add_argument("--watch", action="store_true", help=f"show it again every {WATCH_S:g} s, until Ctrl-C")
    return parser
