"""Shared parts of the dashboards: variables, panels and PromQL expressions.

Expressions of node metrics are filtered by `$cluster` and `$instance`. Rates use `$__rate_interval`, which Grafana
derives from the scrape interval of the data source (`deploy/grafana/provisioning`).
"""

from __future__ import annotations

import functools
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
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


class Row(NamedTuple):
    """A row of panels with a title."""

    title: str
    panels: Sequence[stat.Panel | timeseries.Panel]


def _matchers(where: str) -> str:
    return f"{HERE},{where}" if where else HERE


def now(metric: str, where: str = "") -> str:
    """Return the PromQL selector of a node metric, with the optional matchers `where`."""
    return f"{metric}{{{_matchers(where)}}}"


def total(metric: str, *by: str, where: str = "") -> str:
    """Return the PromQL expression for the sum of a gauge by the labels `by`."""
    return f"sum by ({', '.join(by)}) ({now(metric, where)})"


def rate(metric: str, *by: str, where: str = "") -> str:
    """Return the PromQL expression for the per-second rate of a counter, summed by the labels `by`."""
    return f"sum by ({', '.join(by)}) (rate({now(metric, where)}[$__rate_interval]))"


def all_rate(metric: str, where: str = "") -> str:
    """Return the PromQL expression for the per-second rate of a counter, summed over all series."""
    return f"sum(rate({now(metric, where)}[$__rate_interval]))"


def quantile(share: float, histogram: str, *by: str) -> str:
    """Return the PromQL expression for the quantile `share` (0 to 1) of a histogram, by the labels `by`."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *by, 'le')})"


def of_active(gauge: str) -> str:
    """Return the PromQL expression for a gauge of the active controller, because other controllers may lag."""
    active = now("kafka_controller_kafkacontroller_activecontrollercount")
    return f"max by (cluster) ({now(gauge)} and on (cluster, instance) {active} == 1)"


def by_instance(expr: str) -> Query:
    """Return a query of `expr` whose legend is the node (label `instance`)."""
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
    """Return a panel with the latest value, yellow from `warn` on and red from `bad` on."""
    panel = stat.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(width).height(4)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.color_mode(c.BigValueColorMode.VALUE).graph_mode(c.BigValueGraphMode.AREA)
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(_steps(warn, bad)))
    for target in _targets([query]):
        panel = panel.with_target(target)
    return panel


def must_be_one(title: str, text: str, query: Query, *, width: int = 4) -> stat.Panel:
    """Return a panel with the latest value, green at 1 and red otherwise."""
    steps = [d.Threshold(value=None, color=RED), d.Threshold(value=1, color=GREEN), d.Threshold(value=1.5, color=RED)]
    panel = number(title, text, query, width=width)
    return panel.thresholds(dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(steps))


def graph(
    title: str, text: str, *queries: Query, unit: str = PLAIN, least: float = 0, stacked: bool = False
) -> timeseries.Panel:
    """Return a time series panel of the queries whose vertical axis starts at `least`."""
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


per_second = functools.partial(graph, unit=PER_SECOND)
bytes_per_second = functools.partial(graph, unit=BYTES_A_SECOND)


def _variable(name: str, label: str, values: str) -> dashboard.QueryVariable:
    everything = d.VariableOption(selected=True, text="All", value="$__all")
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(values).current(everything)
    variable = variable.refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(d.VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*")


def make(uid: str, title: str, text: str, rows: Sequence[Row]) -> dashboard.Dashboard:
    """Return a dashboard with the shared variables and links to the other dashboards."""
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
