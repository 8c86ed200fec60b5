"""What the alert rules cost Prometheus: up to 10,000 workers on 1,250 hosts, with jobs that turn over.

A real Prometheus scrapes the pages of `bench.rules.fleet` and evaluates every rule in `alerts/`. It starts with one
hour of history of `gpuwarden_exporter_info`. Fleets with gangs, and with VRAM budgets and servers, are measured
separately. Durations, series and memory are Prometheus's own metrics; its CPU time is the kernel's.
"""

import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.cost import cpu_s, resident_mib
from bench.figures import BenchError, Figure, Place, figure, progress, wait_until
from bench.rules.fleet import WORKERS, Kind
from deploy.standalone import debian_packages
from deploy.standalone.package_data import rules
from gpuwarden import __version__

HISTORY_S: Final = 3600
UP_S: Final = 180.0
LOOK_S: Final = 0.5
_MISSED: Final = "prometheus_rule_group_iterations_missed_total"
TURNOVER_S: Final = 290.0
GANGS: Final = "gpuwarden_gang"
"""The group that needs gangs."""
TENANTS: Final = ("gpuwarden_vram", "gpuwarden_server")
"""The groups that need VRAM budgets and servers."""
EXPECTED: Final = frozenset({"GpuwardenWatchdog", "GpuwardenPrometheusSelfScrapeMissing"})
"""Alerts that fire in a healthy fleet; this Prometheus does not scrape itself."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Hosts and duration of each round, and job length in the churn round.

    The largest fleet settles for more than the ten minutes that GpuwardenJobSlow looks back.
    """

    hosts: tuple[int, ...] = (125, 312, 625, 1250)
    interval_s: int = 10
    settles_s: float = 40.0
    largest_settles_s: float = 660.0
    watched_s: float = 90.0
    churn_turnover_s: float = TURNOVER_S / 10
    churn_s: float = 360.0


@dataclass(kw_only=True)
class _Evaluations:
    """Evaluation times by group and by rule, seconds, and Prometheus's resources at the end."""

    groups: dict[str, list[float]] = field(default_factory=dict)
    intervals: dict[str, float] = field(default_factory=dict)
    rules: dict[str, list[float]] = field(default_factory=dict)
    missed: float = 0.0
    series: float = 0.0
    created: float = 0.0
    resident_mib: float = 0.0
    cpu_share: float = 0.0


def measure(place: Place, load: Load | None = None) -> Iterator[Figure]:
    """Measure all fleets, the most expensive last, because the machine may be too slow for them.

    Raises:
        BenchError: Prometheus or the fleet did not start, a rule failed or fired, or an evaluation was missed.
    """
    load = load or Load()
    for hosts in load.hosts:
        yield from _measure_fleet(place, load, hosts)
    yield from _measure_groups(place, load, load.hosts[-1], "gangs", f"in gangs of {WORKERS}", (GANGS,))
    yield from _measure_churn(place, load)
    for hosts in load.hosts:
        yield from _measure_groups(place, load, hosts, "tenants", "with tenants and servers", TENANTS)


def _measure_fleet(place: Place, load: Load, hosts: int) -> Iterator[Figure]:
    workers = hosts * WORKERS
    progress(f"rules, {workers:,} workers on {hosts:,} hosts")
    with _prometheus(place.folder / f"rules-{hosts}", load, hosts, turnover_s=TURNOVER_S) as prometheus:
        prometheus.wait_up(hosts)
        time.sleep(load.largest_settles_s if hosts == load.hosts[-1] else load.settles_s)
        seen = prometheus.watch(load.watched_s)
    name = f"{workers:,} workers"
    shares = _shares(seen)
    for group in sorted(shares, key=lambda each: -shares[each])[:3]:
        yield figure("rules", f"{name}: group {group}", "ms", [1000 * took_s for took_s in seen.groups[group]],
                     base=1000 * seen.intervals[group] / 5, against="a fifth of its interval")  # fmt: skip
    rule = max(seen.rules, key=lambda each: statistics.median(seen.rules[each]))
    yield figure("rules", f"{name}: slowest rule, {rule}", "ms", [1000 * took_s for took_s in seen.rules[rule]])
    yield from _totals(name, workers, seen)


def _shares(seen: _Evaluations) -> dict[str, float]:
    """Each group's evaluation time divided by its interval."""
    return {group: statistics.median(took_s) / seen.intervals[group] for group, took_s in seen.groups.items()}


def _totals(name: str, workers: int, seen: _Evaluations) -> Iterator[Figure]:
    yield figure("rules", f"{name}: all groups, of the time there is", "%", [100 * sum(_shares(seen).values())])
    yield figure("rules", f"{name}: series in the head", "", [seen.series])
    yield figure("rules", f"{name}: series a worker", "series", [seen.series / workers])
    yield figure("rules", f"{name}: resident memory of Prometheus", "MiB", [seen.resident_mib])
    yield figure("rules", f"{name}: the same, a worker", "KiB", [1024 * seen.resident_mib / workers])
    yield figure("rules", f"{name}: CPU of Prometheus", "% of a core", [100 * seen.cpu_share])


def _measure_groups(
    place: Place, load: Load, hosts: int, kind: Kind, how: str, groups: Sequence[str]
) -> Iterator[Figure]:
    """Measure groups with the kind of fleet that their rules need."""
    workers = hosts * WORKERS
    what = f"{workers:,} workers {how}"
    progress(f"rules, {what}")
    with _prometheus(
        place.folder / f"rules-{kind}-{hosts}", load, hosts, turnover_s=TURNOVER_S, kind=kind
    ) as prometheus:
        prometheus.wait_up(hosts)
        time.sleep(load.settles_s)
        seen = prometheus.watch(load.watched_s)
    for group in groups:
        yield figure("rules", f"{what}: group {group}", "ms", [1000 * took_s for took_s in seen.groups[group]],
                     base=1000 * seen.intervals[group] / 5, against="a fifth of its interval")  # fmt: skip
    yield from _totals(what, workers, seen)


def _measure_churn(place: Place, load: Load) -> Iterator[Figure]:
    """Measure how the head block grows as jobs turn over."""
    hosts = load.hosts[-1]
    workers = hosts * WORKERS
    times = TURNOVER_S / load.churn_turnover_s
    progress(f"rules, {workers:,} workers with jobs of {load.churn_turnover_s:.0f} s")
    with _prometheus(place.folder / "rules-churn", load, hosts, turnover_s=load.churn_turnover_s) as prometheus:
        prometheus.wait_up(hosts)
        time.sleep(load.settles_s)
        before, began_s = prometheus.watch(load.interval_s * 2), time.monotonic()
        time.sleep(load.churn_s)
        after, passed_s = prometheus.watch(load.interval_s * 2), time.monotonic() - began_s
    jobs = passed_s / load.churn_turnover_s * workers
    created = after.created - before.created
    yield figure(
        "rules", f"churn, {workers:,} workers, {jobs:,.0f} jobs: series made, a job", "series", [created / jobs]
    )
    yield figure("rules", "churn: memory grown by", "MiB", [after.resident_mib - before.resident_mib])
    yield figure("rules", "churn: the same, a job", "KiB", [1024 * (after.resident_mib - before.resident_mib) / jobs])
    what = f"churn: as much as {passed_s * times / 60:.0f} min of jobs of {TURNOVER_S:.0f} s; series in the head"
    yield figure("rules", what, "", [after.series], base=before.series, against="the start")
    both = before.groups.keys() & after.groups.keys()  # a group with an interval of 1 min may be missing
    slowest = max(both, key=lambda each: statistics.median(after.groups[each]))
    took_ms, base_ms = (1000 * statistics.median(each.groups[slowest]) for each in (after, before))
    yield figure("rules", f"churn: group {slowest} at the end", "ms", [took_ms], base=base_ms, against="the start")


@dataclass(frozen=True, kw_only=True)
class _Prometheus:
    url: str
    pid: int
    http: httpx.Client

    def is_ready(self) -> bool:
        """Whether it answers."""
        with suppress(httpx.HTTPError):
            return self.http.get(f"{self.url}/-/ready").is_success
        return False

    def value(self, expression: str) -> float:
        """The value of a query; 0 without a result."""
        answer = self.http.get(f"{self.url}/api/v1/query", params={"query": expression}).json()
        found = answer["data"]["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def wait_up(self, hosts: int) -> None:
        """Wait until every host is scraped."""
        wait_until(lambda: self.value('count(up{job="gpuwarden-exporter"} == 1)') >= hosts, within_s=UP_S,
              what=f"Prometheus scrapes {hosts} hosts")  # fmt: skip

    def watch(self, for_s: float) -> _Evaluations:
        """Record all evaluations for some seconds.

        Raises:
            BenchError: a rule failed or fired, or an evaluation was missed.
        """
        seen = _Evaluations()
        last: dict[str, str] = {}
        before_s, began_s = cpu_s(self.pid), time.monotonic()
        missed = self._metrics()[_MISSED]  # by the first scrape of all hosts
        while time.monotonic() < began_s + for_s:
            for group in self._groups():
                if last.get(group["name"]) == group["lastEvaluation"]:
                    continue
                last[group["name"]] = group["lastEvaluation"]
                seen.intervals[group["name"]] = group["interval"]
                seen.groups.setdefault(group["name"], []).append(group["evaluationTime"])
                for rule in group["rules"]:
                    if rule["health"] != "ok":
                        raise BenchError(f"{rule['name']} is {rule['health']}: {rule.get('lastError')}")
                    if rule.get("alerts") and rule["name"] not in EXPECTED:
                        raise BenchError(f"{rule['name']} has {len(rule['alerts'])} alerts in a healthy fleet")
                    seen.rules.setdefault(rule["name"], []).append(rule["evaluationTime"])
            time.sleep(LOOK_S)
        own = self._metrics()
        seen.cpu_share = (cpu_s(self.pid) - before_s) / (time.monotonic() - began_s)
        seen.missed = own[_MISSED] - missed
        if seen.missed:
            raise BenchError(f"{seen.missed:.0f} evaluations were missed: the machine is too slow for this fleet")
        seen.series = own["prometheus_tsdb_head_series"]
        seen.created = own["prometheus_tsdb_head_series_created_total"]
        seen.resident_mib = resident_mib(self.pid)
        return seen

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.http.get(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        return [each for each in groups if not each["lastEvaluation"].startswith("0001-")]

    def _metrics(self) -> dict[str, float]:
        """Prometheus's own metrics, summed by name."""
        found: dict[str, float] = {}
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = re.sub(r"\{.*\}", "", line).partition(" ")
                found[name] = found.get(name, 0.0) + float(value)
        return found


@contextmanager
def _prometheus(
    work: Path, load: Load, hosts: int, *, turnover_s: float, kind: Kind = "workers"
) -> Iterator[_Prometheus]:
    """Run a Prometheus and the fleet that it scrapes."""
    data = work / "data"
    data.mkdir(parents=True)
    fleet = subprocess.Popen(
        [sys.executable, "-m", "bench.rules.serve", str(turnover_s), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    server = None
    try:
        address = f"127.0.0.1:{(fleet.stdout.readline() if fleet.stdout else '').strip()}"
        config = work / "prometheus.yml"
        config.write_text(json.dumps(_config(address, load, hosts)), encoding="utf-8")
        _write_history(work, data, hosts, every_s=load.interval_s)
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with (work / "log").open("wb") as log:
            program = str(debian_packages.find("prometheus"))
            command = [program, f"--config.file={config}", f"--storage.tsdb.path={data}",
                       f"--web.listen-address=127.0.0.1:{port}", "--log.format=json"]  # fmt: skip
            server = subprocess.Popen(command, env=debian_packages.env_for_parts(), stdout=log, stderr=log)
        with httpx.Client(timeout=60, trust_env=False) as http:
            prometheus = _Prometheus(url=f"http://127.0.0.1:{port}", pid=server.pid, http=http)
            wait_until(prometheus.is_ready, within_s=UP_S, what=f"Prometheus is ready, see {work / 'log'}")
            yield prometheus
    finally:
        for process in (server, fleet):
            if process is not None:
                process.terminate()
                process.communicate()


def _config(address: str, load: Load, hosts: int) -> dict[str, Any]:
    scraped = [
        {
            "job_name": f"gpuwarden-{job}",
            "static_configs": [
                {
                    "targets": [address],
                    "labels": {"__metrics_path__": f"/{number}/{path}", "instance": f"h{number}", "host": f"h{number}"},
                }
                for number in range(hosts)
            ],
        }
        for job, path in (("exporter", "metrics"), ("remediator", "remediator"))
    ]
    return {
        "global": {"scrape_interval": f"{load.interval_s}s", "evaluation_interval": f"{load.interval_s}s"},
        "rule_files": [str(path) for path in rules()],
        "scrape_configs": scraped,
    }


def _write_history(work: Path, data: Path, hosts: int, *, every_s: int) -> None:
    """Write one hour of the series that `alerts/host.rules.yaml` looks back on."""
    text = work / "history"
    now_s = int(time.time())
    labels = f'job="gpuwarden-exporter",version="{__version__}"'
    with text.open("w", encoding="utf-8") as lines:
        lines.write("# TYPE gpuwarden_exporter_info gauge\n")
        for number in range(hosts):
            its = f'host="h{number}",instance="h{number}",nodename="h{number}"'
            series = f"gpuwarden_exporter_info{{{its},{labels}}} 1 "
            lines.writelines(f"{series}{at_s}\n" for at_s in range(now_s - HISTORY_S, now_s - every_s, every_s))
        lines.write("# EOF\n")
    command = [str(debian_packages.find("promtool")), "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)]
    made = subprocess.run(command, env=debian_packages.env_for_parts(), capture_output=True, text=True, check=False)
    text.unlink()
    if made.returncode:
        raise BenchError(f"promtool cannot write the history: {made.stderr.strip()}")
