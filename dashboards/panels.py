"""Panels, and the Grafana builders made from them.

Panels are laid out in reading order. The widths of a line add up to 24.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, assert_never

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

HEIGHTS: Final[Mapping[str, int]] = {"number": 4, "lines": 8, "states": 8, "table": 8}
"""Height of each kind of panel, grid rows."""

Builder = stat.Panel | timeseries.Panel | statetimeline.Panel | table.Panel


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query; `limit` draws its series dashed."""

    expr: str
    legend: str
    limit: bool = False


@dataclass(frozen=True, kw_only=True)
class ValueText:
    """Text and colour of one value."""

    text: str
    color: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    `number` and `table` show only the current value. `lines` and `states` leave a gap where a value was unknown.

    Args:
        unit: a Grafana unit id.
        width: columns out of 24.
        levels: colour from each value on; green below the first.
        top: maximum of the axis, if it has one.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["number", "lines", "states", "table"] = "lines"
    width: int = 8
    levels: Mapping[float, str] = field(default_factory=dict)
    meanings: Mapping[str, ValueText] = field(default_factory=dict)
    top: float | None = None


def build(panel: Panel, *, panel_id: int) -> Builder:
    """Build one panel without its position."""
    builder = _empty_builder(panel)
    builder.id(panel_id).title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.unit(panel.unit).span(panel.width).height(HEIGHTS[panel.kind])
    for number, query in enumerate(panel.queries):
        builder.with_target(_target(query, panel, ref_id=chr(ord("A") + number)))
    builder.thresholds(
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                models.Threshold(value=None, color="green"),
                *(models.Threshold(value=value, color=color) for value, color in panel.levels.items()),
            ]
        )
    )
    if panel.meanings:
        builder.mappings(_mappings(panel.meanings))
    return builder


def _empty_builder(panel: Panel) -> Builder:
    match panel.kind:
        case "number":
            return _number()
        case "lines":
            return _lines(panel)
        case "states":
            return _states()
        case "table":
            return _table()
        case _:
            assert_never(panel.kind)


def _number() -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
        .text_mode(options.BigValueTextMode.VALUE_AND_NAME)
        .no_value("unknown")
    )


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(5)
        .show_points(options.VisibilityMode.AUTO)
        .span_nulls(span_nulls=False)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
    )
    if panel.top is not None:
        builder.max(panel.top)
    if panel.levels:
        builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED))
    for number, query in enumerate(panel.queries):
        if query.limit:
            dashes = models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 10]})
            unfilled = models.DynamicConfigValue(id_val="custom.fillOpacity", value=0)
            builder.override_by_query(chr(ord("A") + number), [dashes, unfilled])
    return builder


def _states() -> statetimeline.Panel:
    return (
        statetimeline.Panel()
        .merge_values(merge_values=True)
        .show_value(options.VisibilityMode.AUTO)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    )


def _table() -> table.Panel:
    hidden = {"Time": True}
    renamed = {"Value": "elapsed"}
    return (
        table.Panel()
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize", options={"excludeByName": hidden, "renameByName": renamed, "indexByName": {}}
            )
        )
        .filterable(filterable=True)
    )


def _target(query: Query, panel: Panel, *, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).datasource(DATASOURCE)
    if panel.kind == "table":
        return target.instant().format(PromQueryFormat.TABLE)
    return target.instant() if panel.kind == "number" else target.range()


def _mappings(meanings: Mapping[str, ValueText]) -> list[models.ValueMapping]:
    results = {
        value: models.ValueMappingResult(text=meaning.text, color=meaning.color, index=index)
        for index, (value, meaning) in enumerate(meanings.items())
    }
    return [models.ValueMap(options=results)]
