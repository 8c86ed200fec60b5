"""The overview dashboard: current, parsable, readable, and about existing series."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine

from dashboards import render
from dashboards.queries import PanelQuery, fill_in, panels, queries
from gpuwarden.http.web_config import WebConfig
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from gpuwarden.queue.counts import ClaimableJobs, Failing, FailingWorker, QueueSnapshot, Retries, WorkerCounts
from remediator.ledger.chain import ExecutorHeartbeat
from remediator.ledger.counters import DURATION_BOUNDS_S, DurationHistogram, Totals
from remediator.ledger.database import LedgerDatabase
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import Reports
from remediator.metrics.pending_pods import PendingPodsCollector
from remediator.metrics.queue import Count, Here, QueueCollector
from remediator.pending_pods import PendingPod
from remediator.plan import Subject
from remediator.remedies.guards import Orders
from remediator.webhook.app import create_app
from testbed.check_release import CHECKOUT, RULES_GLOB
from tests.exporter import golden

OVERVIEW: Final[Mapping[str, Any]] = json.loads(render.OVERVIEW_JSON.read_text())
PANELS: Final = list(panels(OVERVIEW))
QUERIES: Final = queries(OVERVIEW, host="the-host", worker="the-worker", rate_interval="7m")

UNITS: Final = {"short", "s", "percentunit", "bytes", "cps"}
RATES: Final = {"rate", "irate", "increase"}

PROMETHEUS: Final[Mapping[str, frozenset[str]]] = {
    "up": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "condition", "worker", "container"}),
}
TARGET: Final = frozenset({"host", "job", "instance"})


@cache
def exporter_series() -> dict[str, frozenset[str]]:
    """Series of the exporter and their labels, from its golden scrape."""
    families = text_string_to_metric_families(golden.PATH.read_text(encoding="utf-8"))
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


class FullReports(Reports):
    """A ledger with a sample of every series."""

    def totals(self, host: str) -> Totals:
        assert host == "h1"
        return Totals(
            alerts={("accepted", ""): 1, ("refused", "host"): 1},
            duplicates=1,
            oldest_new_at=0.0,
            episodes_open=1,
            held={"paused": 1},
            given_up=[(Subject.WORKER, "w1", 0.0)],
            outcomes={("fixed", "stall"): 1},
            took={"fixed": DurationHistogram(within=(1,) * len(DURATION_BOUNDS_S), count=1, sum_s=1.0)},
            intents={("free", "done"): 1},
            owed_since={("free", "stopping"): 0.0},
            quarantines_refused=1,
            steps={("did", "stop"): 1},
            executor=ExecutorHeartbeat(
                host="h1",
                pid=1,
                armed=True,
                started_at=0.0,
                heartbeat_at=0.0,
                errors=1,
                workers=1,
                seats_on=True,
                seats_failures=1,
            ),
            drills=[(1, "h1")],
            drill_passed_at=1.0,
            orders=Orders(),
            now=0.0,
        )


class FullQueue(QueueCollector):
    """A queue with a sample of every series."""

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("gpuwarden_queue_up", "Up.", value=1)
        self._outcomes.jobs["q", "gpu", "failed"] += 1
        self._outcomes.runs["failed"] += 1
        self._outcomes.waited["q"].add(1.0)
        self._outcomes.ran["q", "gpu"].add(1.0)
        snapshot = QueueSnapshot(
            now=2.0,
            at_work={("q", State.RUNNING): 1},
            workers={"q": WorkerCounts(busy=1, by_state={"busy": 1, "idle": 0})},
            retries={"q": Retries(watchdog=1, reclaims=1)},
            dead={"q": 1},
            quarantined=1,
            locked=[("q", "h", "w")],
            lags={"c": 1},
        )
        failing = Failing(workers=(FailingWorker(run_id="r", host="h", worker="w", failed=1, done=0),))
        return iter(
            [
                up,
                *self._families(
                    snapshot,
                    Here([("q", "w")], ["GPU-0"]),
                    (1.0, Count(waiting={"q": ClaimableJobs(jobs=1, oldest_at=1.0)}, failing=failing)),
                ),
            ]
        )


def no_store() -> JobStore:
    raise AssertionError("it is not opened")


@cache
def remediator_series() -> dict[str, frozenset[str]]:
    """Series of the remediator and their labels, from its page."""
    engine = create_engine("sqlite://")
    ledger = Ledger(engine)
    ledger.reports = FullReports(LedgerDatabase(engine, host=None))
    pods = [PendingPod(namespace="n", name="p", since=0.0, wanted_mib=1)]
    pending = PendingPodsCollector(lambda: pods)
    pending.look()
    collectors = [FullQueue(no_store, host="h1"), pending]
    app = create_app(ledger=ledger, host="h1", web=WebConfig(None), body_max_bytes=1, collectors=collectors)

    async def page() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://remediator") as client:
            return (await client.get("/metrics")).text

    families = list(text_string_to_metric_families(asyncio.run(page())))
    assert [family.name for family in families if not family.samples] == []
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


def known_series() -> dict[str, frozenset[str]]:
    return {**exporter_series(), **remediator_series(), **PROMETHEUS}


def nodes(expr: promql.Expr) -> list[promql.Expr]:
    found: list[promql.Expr] = []

    def visit(node: promql.Expr) -> None:
        found.append(node)

    promql.walk(expr, visit)
    return found


def selectors(expr: str) -> list[promql.VectorSelector]:
    return [node for node in nodes(promql.parse(expr)) if isinstance(node, promql.VectorSelector)]


def rates(expr: str) -> Iterator[promql.Call]:
    for node in nodes(promql.parse(expr)):
        if isinstance(node, promql.Call) and node.func.name in RATES:
            yield node


def every_expression() -> list[PanelQuery]:
    """Queries of panels, annotations and variables."""
    values = {"host": "the-host", "worker": "the-worker"}
    annotations = [
        PanelQuery(panel_title=annotation["name"], expr=fill_in(annotation["expr"], values))
        for annotation in OVERVIEW["annotations"]["list"]
    ]
    variables = [
        PanelQuery(panel_title=variable["name"], expr=fill_in(found[1], values))
        for variable in OVERVIEW["templating"]["list"]
        if (found := re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]))
    ]
    return [*QUERIES, *annotations, *variables]


def test_rendered_json_is_current() -> None:
    assert render.main(["--check"]) == 0


def test_outdated_json_is_refused_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lagging = tmp_path / "overview.json"
    lagging.write_text(render.render().replace("Workers alive", "Workers"))

    status = render.main(["--check"], path=lagging)

    assert status == 1
    assert "run python -m dashboards.render" in capsys.readouterr().err


def test_missing_json_is_refused_and_then_written(tmp_path: Path) -> None:
    missing = tmp_path / "overview.json"

    statuses = [render.main(arguments, path=missing) for arguments in (["--check"], [], ["--check"])]

    assert statuses == [1, 0, 0]


def test_queries_name_existing_series_and_labels() -> None:
    known = known_series()
    problems = []
    for query in every_expression():
        asked = selectors(query.expr)
        if len(asked) != max(1, query.expr.count("{")):
            problems.append(f"{query}: {len(asked)} selectors are found")
        for each in asked:
            labels = {matcher.name for matcher in each.matchers.matchers}
            unknown = labels - known.get(each.name or "", frozenset()) - TARGET
            if each.name not in known or unknown:
                problems.append(f"{query}: no series {each.name} with {sorted(labels)}")

    assert problems == []


def test_queries_filter_by_chosen_hosts_and_workers() -> None:
    known = known_series()
    problems = []
    for query in QUERIES:
        for selector in selectors(query.expr):
            chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers if "=~" in str(matcher)}
            worker = "the-worker" if "worker" in known[selector.name or ""] else None
            if chosen.get("host") != "the-host" or chosen.get("worker") != worker:
                problems.append(f"{query}: {selector.name} is chosen by {chosen}")

    assert problems == []


def test_rates_are_of_counters_over_the_rate_interval() -> None:
    problems = []
    for query in QUERIES:
        for call in rates(query.expr):
            (series,) = call.args
            assert isinstance(series, promql.MatrixSelector), query
            counter = (series.vector_selector.name or "").endswith(("_total", "_bucket"))
            if not counter or series.range != promql.parse_duration("7m"):
                problems.append(f"{query}: {series}")

    assert problems == []


def test_there_are_rates() -> None:
    assert [call.func.name for query in QUERIES for call in rates(query.expr)] == ["rate"] * 10


def test_panels_have_title_description_and_unit() -> None:
    problems = [
        panel["title"] or panel["id"]
        for panel in PANELS
        if not panel["title"]
        or not panel["description"].endswith(".")
        or panel["fieldConfig"]["defaults"]["unit"] not in UNITS
    ]

    assert problems == []


def test_panels_use_the_chosen_data_source_and_have_legends() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    problems = [
        panel["title"]
        for panel in PANELS
        if panel["datasource"] != chosen
        or not panel["targets"]
        or any(target["datasource"] != chosen or not target["legendFormat"] for target in panel["targets"])
    ]

    assert problems == []


def test_titles_and_ids_are_unique() -> None:
    titles = Counter(panel["title"] for panel in PANELS)
    ids = Counter(panel["id"] for panel in OVERVIEW["panels"])

    assert titles.most_common(1)[0][1] == 1
    assert ids.most_common(1)[0][1] == 1


def test_no_panel_overlaps_another_or_leaves_the_grid() -> None:
    cells = {
        panel["title"]: {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        for panel in OVERVIEW["panels"]
        if (place := panel["gridPos"])
    }

    assert [(a, b) for a, b in combinations(cells, 2) if cells[a] & cells[b]] == []
    assert {column for taken in cells.values() for column, _ in taken} == set(range(24))


def test_annotations_mark_exactly_the_stall_alerts() -> None:
    (marks,) = OVERVIEW["annotations"]["list"]
    (selector,) = selectors(fill_in(marks["expr"], {"host": ".*", "worker": ".*"}))
    asked = {each.name: each.value for each in selector.matchers.matchers}
    alerts = {
        rule["alert"]: {"alertname": rule["alert"], "alertstate": "firing", **rule["labels"]}
        for file in CHECKOUT.glob(RULES_GLOB)
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }

    marked = [name for name, its in alerts.items() if all(its.get(label, ".*") == asked[label] for label in asked)]

    assert sorted(marked) == sorted(name for name, its in alerts.items() if its.get("condition") == "stall")
    assert {"GpuwardenJobStalled", "GpuwardenJobStuck"} <= set(marked)


def test_simulated_gpus_have_a_panel() -> None:
    (query,) = [query for query in QUERIES if query.panel_title == "Simulated GPUs"]

    assert 'source="simulated"' in query.expr


def test_variable_without_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"variable \$node has no value"):
        fill_in('up{host=~"$host", node="${node:regex}"}', {"host": ".*"})


def test_panels_of_a_collapsed_row_have_queries() -> None:
    inner = {"type": "stat", "title": "inner", "targets": [{"expr": 'up{host=~"${host:regex}"}'}]}

    found = queries({"panels": [{"type": "row", "title": "row", "panels": [inner]}]}, host="h1")

    assert found == [PanelQuery(panel_title="inner", expr='up{host=~"h1"}')]
