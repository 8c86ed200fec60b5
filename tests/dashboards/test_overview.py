"""The overview: current, parsable, about series that exist, and readable by whoever meets it at night."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from exporter.collectors import COLLECTORS
from exporter.collectors.registry import SnapshotCollector
from exporter.model.container import Container, ContainerEvidence, GpuShare, Probe, ServerEvidence, Tenancy
from exporter.model.gpu import Gpu, GpuFigures, GpuProcess, GpuReadings, GpuTotals, MigInstance
from exporter.model.snapshot import DriverHealth, Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import TaskReadings, TaskSighting, WorkerReadings, WorkerSighting
from gpuwarden import clock
from gpuwarden.http.web_config import WebConfig
from gpuwarden.job import JobClass, Phase, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.counts import Crew, Failing, FailingWorker, Look, Retries, Waiting
from gpuwarden.state_file import JobFile, TaskFile, WorkerFile
from remediator.ledger.counters import TOOK_S, Took, Totals
from remediator.ledger.ledger import Ledger
from remediator.metrics.queue import Count, QueueCollector
from remediator.remedies.guards import Orders
from remediator.webhook.app import create_app
from testbed.check_release import CHECKOUT, RULES_GLOB

OVERVIEW: Final[Mapping[str, Any]] = json.loads(render.OVERVIEW_JSON.read_text())
PANELS: Final = list(panels(OVERVIEW))
QUERIES: Final = queries(OVERVIEW, host="the-host", worker="the-worker", rate_interval="7m")

UNITS: Final = {"short", "s", "percentunit", "bytes", "cps"}
RATES: Final = {"rate", "irate", "increase"}

PROMETHEUS: Final[Mapping[str, frozenset[str]]] = {
    "up": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "trip", "worker", "container"}),
}
TARGET: Final = frozenset({"host", "job", "instance"})


def a_snapshot() -> Snapshot:
    """A host of which everything is known, so that every series has a sample."""
    now = clock.stamp()
    worker = WorkerFile(worker="w1", incarnation="i1", queue="default", pid=42, started=now, heartbeat=now, loop=now)
    job = JobFile(
        job_id=1, attempt=1, worker="w1", incarnation="i1", job_class=JobClass.GPU, model="m", budget_s=600.0,
        stall_timeout_s=120.0, started=now, phase=Phase.STEP, phase_started=now, beat=now, step=30, steps_total=40,
        step_mean_s=1.0, step_max_s=2.0, items_done=1, items_failed=1,
    )  # fmt: skip
    process = GpuProcess(pid=42, utilization_ratio=0.5, memory_bytes=10)
    figures = GpuFigures(
        temperature_celsius=60.0, power_watts=300.0, power_limit_watts=700.0, sm_clock_hertz=2e9,
        memory_clock_hertz=2e9, throttled=("sw_power_cap",), ecc_corrected=1, ecc_uncorrected=0,
        ecc_lifetime_corrected=1, ecc_lifetime_uncorrected=0, remapped_rows_corrected=1, remapped_rows_uncorrected=0,
        row_remap_pending=False, row_remap_failed=False, pcie_replays=1, pcie_errors={"fatal": 0},
    )  # fmt: skip
    gpu = Gpu(
        uuid="GPU-0", index=0, name="g", utilization_ratio=0.6, memory_used_bytes=12, memory_size_bytes=2**34,
        processes=(process,), memory_free_bytes=80, figures=figures, xids_watched=True,
    )  # fmt: skip
    part = replace(
        gpu, uuid="MIG-0", mig=MigInstance(parent="GPU-0", number=0, gpu_instance=1, compute_instance=0), processes=()
    )
    tenancy = Tenancy(budget_bytes=9, recyclable=True, invalid=Unknown(reason="bad_budget", because="3 GB"))
    container = Container(
        kind="docker", id="c" * 64, name="c1", incarnation="c@1", pid=42, gpu_request=("0",), image="image",
        tenancy=tenancy,
    )  # fmt: skip
    evidence = ContainerEvidence(
        container=container, gpus=("GPU-0",),
        shares=(GpuShare(gpu="GPU-0", utilization_ratio=0.5, memory_bytes=10, attributed=True, busiest_ratio=0.7),),
        gpu_idle_s=1.0, gpu_lost_s=1.0, gpu_unknown=None, busy_s={"GPU-0": 5.0}, ram_bytes=3, ram_anon_bytes=2,
        ram_working_set_bytes=2, ram_still_s=1000.0, ram_unknown=None, io_still_s=1000.0, fault_still_s=1000.0,
        cpu_still_s=1.0, gpu_pegged_s=1000.0, gpu_not_seen_busy_s=1.0, peak_bytes={"GPU-0": 11},
        oom_kills=1,
    )  # fmt: skip
    sighting = WorkerSighting(worker=worker, job=job, alive=True, pid=42, container_id="c" * 64)
    silent = replace(now, boottime_s=now.boottime_s - 1000)
    rank = WorkerSighting(  # that spins
        worker=replace(worker, worker="w3"), job=replace(job, worker="w3", ranks=2, gang="1/run", beat=silent),
        alive=True, pid=42, container_id="c" * 64,
    )  # fmt: skip
    gone = WorkerSighting(  # nothing is measured of where it was
        worker=replace(worker, worker="w2", pid=43),
        job=replace(job, worker="w2"),
        alive=False,
        pid=None,
        container_id=None,
    )
    server = ServerEvidence(
        container=container, probe=Probe(kind="http", silence_s=120.0), workers=0, answered=True, unanswered_s=1.0
    )
    wrong = replace(server, probe=Unknown(reason="bad_probe", because="no URL"))
    task = TaskFile(task_id=7, pid=44, pgid=44, started_unix_s=1.0)
    return Snapshot(
        host="h1",
        taken=now,
        gpus=GpuReadings(source="simulated", gpus=(gpu, part)),
        drivers={"gpu": DriverHealth(killed=1, abandoned=1, xids={("GPU-0", 31): 1})},
        gpu_totals={"GPU-0": GpuTotals(busy_s=1.0, unknown={("power_watts", "timeout"): 1})},
        workers=WorkerReadings(workers=(sighting, rank, gone), errors={"not_json": 1}, duplicates=1),
        containers=(evidence,),
        servers=(server, wrong),
        sources=(SourceHealth(source="workers", success=True, duration_s=0.01, succeeded_unix_s=1.0),),
        tasks=TaskReadings(tasks=(TaskSighting(task=task, alive=True),), errors={"not_json": 1}),
        unknown={("c1", "gpu", "source_failed"): 1},
        unplaced=(GpuShare(gpu="GPU-0", utilization_ratio=0.1, memory_bytes=1),),
        returning_bytes={"GPU-0": 1},
        gpu_lost_s={"GPU-0": 0.0},
        thresholds=Thresholds(),
        dead_s={"w2": 30.0},
        cpu_still_s={42: 1.0},
        apart={"w1": evidence},
    )


@cache
def exported() -> dict[str, frozenset[str]]:
    """Every series of the exporter and its labels."""
    snapshot = a_snapshot()
    families = list(SnapshotCollector(lambda: snapshot, host="h1", thresholds=Thresholds()).collect())
    families += [family for collect in COLLECTORS.values() for family in collect(snapshot)]
    assert [family.name for family in families if not family.samples] == []
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


class FullLedger(Ledger):
    """A ledger in which everything has happened once, so that every series has a sample."""

    def totals(self, host: str) -> Totals:
        assert host == "h1"
        return Totals(
            alerts={("accepted", ""): 1, ("refused", "host"): 1},
            duplicates=1,
            oldest_new_at=0.0,
            episodes_open=1,
            held={"paused": 1},
            outcomes={("mended", "stall"): 1},
            took={"mended": Took(within=(1,) * len(TOOK_S), count=1, sum_s=1.0)},
            intents={("free", "done"): 1},
            owed_since={("free", "stopping"): 0.0},
            quarantines_refused=1,
            steps={("did", "stop"): 1},
            executor=(True, 0.0, 1),
            orders=Orders(),
            now=0.0,
        )


class FullQueue(QueueCollector):
    """A queue in which everything has happened once."""

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("gpuwarden_queue_up", "Up.", value=1)
        self._tally.ended["q", "gpu", "failed"] += 1
        self._tally.waited["q"].add(1.0)
        self._tally.ran["q", "gpu"].add(1.0)
        look = Look(
            now=2.0,
            at_work={("q", State.RUNNING): 1},
            crews={"q": Crew(busy=1, by_state={"busy": 1, "idle": 0})},
            retries={"q": Retries(watchdog=1, reclaims=1)},
            dead={"q": 1},
            quarantined=1,
            lags={"c": 1},
        )
        failing = Failing(workers=(FailingWorker(run_id="r", host="h", worker="w", failed=1, done=0),))
        return iter(
            [
                up,
                *self._families(
                    look, [("q", "w")], (1.0, Count(waiting={"q": Waiting(jobs=1, oldest_at=1.0)}, failing=failing))
                ),
            ]
        )


def no_store() -> JobStore:
    raise AssertionError("it is not opened")


@cache
def remediated() -> dict[str, frozenset[str]]:
    """Every series of the remediator and its labels, from its own page."""
    ledger = FullLedger(create_engine("sqlite://"))
    app = create_app(
        ledger=ledger, host="h1", web=WebConfig(None), body_max_bytes=1, queue=FullQueue(no_store, host="h1")
    )

    async def page() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://remediator") as client:
            return (await client.get("/metrics")).text

    families = list(text_string_to_metric_families(asyncio.run(page())))
    assert [family.name for family in families if not family.samples] == []
    return {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}


def known_series() -> dict[str, frozenset[str]]:
    return {**exported(), **remediated(), **PROMETHEUS}


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
    """The queries of the panels, the annotations and the variables."""
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


each_query = pytest.mark.parametrize(
    "query", QUERIES, ids=[f"{number} {query.panel_title}" for number, query in enumerate(QUERIES)]
)
each_expression = pytest.mark.parametrize(
    "query",
    every_expression(),
    ids=[f"{number} {query.panel_title}" for number, query in enumerate(every_expression())],
)
each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])


def test_the_rendered_json_is_current() -> None:
    assert render.main(["--check"]) == 0


def test_json_that_lags_is_refused_and_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lagging = tmp_path / "overview.json"
    lagging.write_text(render.render().replace("Workers alive", "Workers"))

    status = render.main(["--check"], path=lagging)

    assert status == 1
    assert "run: python -m dashboards.render" in capsys.readouterr().err


def test_json_that_is_missing_is_refused_and_then_written(tmp_path: Path) -> None:
    missing = tmp_path / "overview.json"

    statuses = [render.main(arguments, path=missing) for arguments in (["--check"], [], ["--check"])]

    assert statuses == [1, 0, 0]


@each_expression
def test_a_query_asks_only_for_series_that_exist_by_labels_they_have(query: PanelQuery) -> None:
    known = known_series()

    asked = [
        (selector.name or "", {matcher.name for matcher in selector.matchers.matchers})
        for selector in selectors(query.expr)
    ]

    assert len(asked) == max(1, query.expr.count("{"))
    assert {name for name, _ in asked} <= set(known)
    assert [(name, labels) for name, labels in asked if not labels <= known[name] | TARGET] == []


@each_query
def test_a_query_keeps_to_the_chosen_hosts_and_workers(query: PanelQuery) -> None:
    known = known_series()

    for selector in selectors(query.expr):
        chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers if "=~" in str(matcher)}
        assert chosen["host"] == "the-host"
        assert chosen.get("worker") == ("the-worker" if "worker" in known[selector.name or ""] else None)


@each_query
def test_a_rate_is_of_a_counter_over_the_rate_interval(query: PanelQuery) -> None:
    for call in rates(query.expr):
        (series,) = call.args
        assert isinstance(series, promql.MatrixSelector)
        assert (series.vector_selector.name or "").endswith(("_total", "_bucket"))
        assert series.range == promql.parse_duration("7m")


def test_there_are_rates_to_judge() -> None:
    assert [call.func.name for query in QUERIES for call in rates(query.expr)] == ["rate"] * 10


@each_panel
def test_a_panel_says_what_it_shows_in_which_unit(panel: Mapping[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS


@each_panel
def test_a_panel_takes_its_data_from_the_chosen_source_and_names_its_series(panel: Mapping[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}

    assert panel["datasource"] == chosen
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == chosen
        assert target["legendFormat"]


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


def test_whatever_trips_as_a_stall_is_marked_and_nothing_else() -> None:
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

    assert sorted(marked) == sorted(name for name, its in alerts.items() if its.get("trip") == "stall")
    assert {"GpuwardenJobStalled", "GpuwardenJobStuck"} <= set(marked)


def test_simulated_gpus_are_told_from_real_ones() -> None:
    (query,) = [query for query in QUERIES if query.panel_title == "Simulated GPUs"]

    assert 'source="simulated"' in query.expr


def test_a_variable_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"variable \$node has no value"):
        fill_in('up{host=~"$host", node="${node:regex}"}', {"host": ".*"})


def test_panels_inside_a_collapsed_row_are_asked_too() -> None:
    inner = {"type": "stat", "title": "inner", "targets": [{"expr": 'up{host=~"${host:regex}"}'}]}

    found = queries({"panels": [{"type": "row", "title": "row", "panels": [inner]}]}, host="h1")

    assert found == [PanelQuery(panel_title="inner", expr='up{host=~"h1"}')]
