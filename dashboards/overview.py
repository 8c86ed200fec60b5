"""The overview dashboard: fleet, jobs, queue, GPUs, RAM, exporters and remediators.

To add a panel, add it to its row in `dashboards/rows`, run `python -m dashboards.render` and commit the JSON.
"""

from collections.abc import Mapping
from itertools import count
from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard as models

from dashboards.expressions import HOST, WORKER
from dashboards.panels import DATASOURCE, Panel, build
from dashboards.rows import glance, hardware, jobs, queue, remediator, watcher

ROWS: Final[Mapping[str, tuple[Panel, ...]]] = {
    "Fleet at a glance": glance.PANELS,
    "Jobs": jobs.PANELS,
    "Queue, by publishing host (worker selection does not apply)": queue.PANELS,
    "GPU and RAM, by host and container (worker selection does not apply)": hardware.PANELS,
    "gpuwarden itself": (*watcher.PANELS, *remediator.PANELS),
}


def overview() -> builders.Dashboard:
    """Build the dashboard."""
    dashboard = (
        builders.Dashboard("gpuwarden: overview")
        .uid("gpuwarden-overview")
        .description("Jobs on GPUs, stalled jobs, and the health of gpuwarden itself.")
        .tags(["gpuwarden", "gpu"])
        .readonly()
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("host", label="Host", values="label_values(gpuwarden_exporter_info, host)"))
        .with_variable(
            _choice("worker", label="Worker", values=f"label_values(gpuwarden_worker_info{{{HOST}}}, worker)")
        )
        .annotation(_stalls())
    )
    ids = count(1)
    for title, panels in ROWS.items():
        dashboard.with_row(builders.Row(title).id(next(ids)))
        for panel in panels:
            dashboard.with_panel(build(panel, panel_id=next(ids)))
    return dashboard


def _choice(name: str, *, label: str, values: str) -> builders.QueryVariable:
    """A multi-value variable. `All` is `.*`, which includes later values and series without the label."""
    return (
        builders.QueryVariable(name)
        .label(label)
        .query(values)
        .datasource(DATASOURCE)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )


def _stalls() -> builders.AnnotationQuery:
    """Marks on every chart while a stall alert fires."""
    return (
        builders.AnnotationQuery()
        .name("Stalls")
        .datasource(DATASOURCE)
        .enable(enable=True)
        .icon_color("red")
        .expr(f'ALERTS{{condition="stall", alertstate="firing", {WORKER}}}')
    )
