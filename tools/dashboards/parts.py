"""What all dashboards share: variables, panels in few forms, and the usual expressions.

Every expression of one node's metrics is limited by `$cluster` and `$instance`. Rates are over `$__rate_interval`,
which Grafana makes from the scrape interval of its data source (`deploy/grafana/provisioning`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import units

HERE = 'cluster=~"$cluster",instance=~"$instance"'
CLUSTER = 'cluster=~"$cluster"'
KIPMESH_TARGETS = 'job=~"kipmesh-.*"'
SOURCE = d.DataSourceRef(type_val="prometheus", uid="$datasource")
GREEN, YELLOW, RED = "green", "yellow", "red"

PLAIN, SHARE = units.Short, units.PercentUnit
BYTES, BYTES_A_SECOND = units.BytesIEC, units.BytesPerSecondIEC
SECONDS, MILLISECONDS = units.Seconds, units.Milliseconds
PER_SECOND = units.CountsPerSecond


class Query(NamedTuple):
    """An expression and the legend of its series."""

    expr: str
    legend: str


class Row(NamedTuple):
    """A heading and its panels, from left to right."""

    title: str
    panels: Sequence[stat.Panel | timeseries.Panel]


def _matchers(where: str) -> str:
    return f"{HERE},{where}" if where else HERE


def now(metric: str, where: str = "") -> str:
    """A node's metric as it is."""
    return f"{metric}{{{_matchers(where)}}}"


def total(metric: str, *by: str, where: str = "") -> str:
    """The sum of a gauge."""
    return f"sum by ({', '.join(by)}) ({now(metric, where)})"


def rate(metric: str, *by: str, where: str = "") -> str:
    """How fast a counter grows in a second, in all."""
    return f"sum by ({', '.join(by)}) (rate({now(metric, where)}[$__rate_interval]))"


def all_rate(metric: str, where: str = "") -> str:
    """The same, as one number."""
    return f"sum(rate({now(metric, where)}[$__rate_interval]))"


def quantile(share: float, histogram: str, *by: str) -> str:
    """What `share` of a histogram's observations are below."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *by, 'le')})"


def of_active(gauge: str) -> str:
    """A controller's gauge, of the active one alone: the others may be behind."""
    active = now("kafka_controller_kafkacontroller_activecontrollercount")
    return f"max by (cluster) ({now(gauge)} and on (cluster, instance) {active} == 1)"


def by_instance(expr: str) -> Query:
    """A line for each node."""
    return Query(expr, "{{instance}}")


def _targets(queries: Iterable[Query]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number)).range()
        for number, query in enumerate(queries)
    ]


def _steps(warn: float | None, bad: float | None) -> list[d.Threshold]:
    steps = [d.Threshold(value=None, color=GREEN)]
    if warn is not None:
        steps.append(d.Threshold(value=warn, color=YELLOW))
    if bad is not None:
        steps.append(d.Threshold(value=bad, color=RED))
    return steps


def number(
    title: str,
    text: str,
    query: Query,
    *,
    unit: str = PLAIN,
    warn: float | None = None,
    bad: float | None = None,
    width: int = 4,
) -> stat.Panel:
    """The latest value in large; yellow from `warn`, red from `bad`."""
    panel = stat.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(width).height(4)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.color_mode(c.BigValueColorMode.VALUE).graph_mode(c.BigValueGraphMode.AREA)
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(_steps(warn, bad)))
    for target in _targets([query]):
        panel = panel.with_target(target)
    return panel


def must_be_one(title: str, text: str, query: Query, *, width: int = 4) -> stat.Panel:
    """A number that is green at 1 and red otherwise."""
    steps = [d.Threshold(value=None, color=RED), d.Threshold(value=1, color=GREEN), d.Threshold(value=1.5, color=RED)]
    panel = number(title, text, query, width=width)
    return panel.thresholds(dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps))


def graph(
    title: str, text: str, *queries: Query, unit: str = PLAIN, least: float = 0, stacked: bool = False
) -> timeseries.Panel:
    """Lines over time, from `least`."""
    panel = timeseries.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(8).height(8)
    panel = panel.min(least).line_width(1).fill_opacity(30 if stacked else 5).show_points(c.VisibilityMode.NEVER)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(c.LegendDisplayMode.LIST)
        .placement(c.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(c.SortOrder.DESCENDING))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(c.StackingMode.NORMAL))
    for target in _targets(queries):
        panel = panel.with_target(target)
    return panel


def _variable(name: str, label: str, values: str) -> dashboard.QueryVariable:
    everything = d.VariableOption(selected=True, text="All", value="$__all")
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(values).current(everything)
    variable = variable.refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(d.VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*")


def make(uid: str, title: str, text: str, rows: Sequence[Row]) -> dashboard.Dashboard:
    """A dashboard with the variables of all of them, and links to the others."""
    made = dashboard.Dashboard(title).uid(uid).description(text).tags(["kipmesh"]).readonly()
    made = made.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(d.DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
    made = made.with_variable(_variable("cluster", "cluster", f"label_values(up{{{KIPMESH_TARGETS}}}, cluster)"))
    nodes = f"label_values(up{{{KIPMESH_TARGETS},{CLUSTER}}}, instance)"
    made = made.with_variable(_variable("instance", "node", nodes))
    link = dashboard.DashboardLink("kipmesh").type(d.DashboardLinkType.DASHBOARDS).tags(["kipmesh"])
    made = made.link(link.as_dropdown(True).include_vars(True).keep_time(True))
    panel_id = 0
    for row in rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            panel_id += 1
            made = made.with_panel(panel.id(panel_id))
    return made
