"""A real Prometheus scrapes a cluster of processes under load; query results are compared with clients and files.

Configuration, rules and dashboards are the committed ones, with windows 40 times shorter. One run serves all tests:
three controllers, a leader, two followers and a consumer service run the load of `load_of_tests`, pause while exact
numbers are compared, and survive a killed leader. Then every expression is queried for the whole run.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kipmesh.cluster import LocalCluster
from tests.monitoring.load_of_tests import (
    ALL_PARTITIONS,
    BROKERS,
    KAFKA_IDLE,
    STALLED,
    TOPIC,
    Exporter,
    HttpReaders,
    Load,
)
from tests.monitoring.prometheus_of_tests import BINARY, INTERVAL_S, MISSING, Prometheus
from tests.monitoring.promql_of_tests import (
    Panel,
    Rule,
    in_grafana,
    needs_tls,
    panels,
    rules,
    selectors,
    unfiltered,
    with_short_windows,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(BINARY is None, reason=MISSING),
]

NODES = 7
STEADY_S = 20.0
AFTERWARDS_S = 12.0
RATE_MARGINS = {"Records in": (0.85, 1.15), "Bytes in": (0.85, 1.35)}
"""Headers add up to a tenth to small batches; a late scrape distorts a rate over 8 s even more."""
FREE_SHARE_MARGIN = 0.02
RATE_INTERVAL = "8s"
"""Grafana uses four scrape intervals; this is twice that, because the machine may be busy."""

PANELS = [panel for panel in panels() if not needs_tls(panel.expr)]
RULES = [rule for rule in rules() if not needs_tls(rule.expr)]


class Numbers(NamedTuple):
    """A number from a client, a node or a file, and the same number from Prometheus."""

    expected: float
    scraped: float

    @property
    def ratio(self) -> float:
        """Scraped by expected number."""
        return self.scraped / self.expected if self.expected else math.nan


class MonitoredRun(NamedTuple):
    """The run of a cluster with Prometheus: begin, end and the compared numbers."""

    prometheus: Prometheus
    begin: float
    end: float
    numbers: dict[str, Numbers]
    fired: frozenset[str]
    """Alerts that fired while the leader was stopped."""
    resolved: frozenset[str]
    """Alerts that were resolved after the leader's restart."""


async def _wait(prometheus: Prometheus, expr: str, value: float) -> float:
    return await asyncio.to_thread(prometheus.wait, expr, lambda scraped: scraped == value)


async def _at_rest(load: Load, prometheus: Prometheus, cluster: LocalCluster, exporter: Exporter) -> dict[str, Numbers]:
    """Compare exact numbers while the load is paused. Each waits for a scrape with the expected number."""
    found: dict[str, Numbers] = {}

    async def compare(name: str, expr: str, expected: float | Callable[[], float]) -> None:
        """Compare a constant, or a function whose value must be the same before and after the query."""
        if not callable(expected):
            found[name] = Numbers(expected, await _wait(prometheus, expr, expected))
            return
        deadline = time.monotonic() + 120
        while True:
            before, scraped = expected(), await asyncio.to_thread(prometheus.value, expr)
            found[name] = Numbers(before, scraped)
            if before == scraped == expected() or time.monotonic() > deadline:
                return
            await asyncio.sleep(INTERVAL_S / 4)

    def read_across() -> float:
        return sum(load.across.fetch_stats.bytes_by_node.values())

    def requested_topics() -> float:
        """Idle topics are refreshed until they are evicted."""
        names = ("metadata_urgent_topics", "metadata_non_urgent_topics")
        return sum(producer.metrics()[name] for producer in load.producers.values() for name in names)

    # Commits of the group are not records of producers: brokers write them to an internal topic.
    records = "sum(kafka_server_brokertopicmetrics_messagesin_total)"
    await compare("records", records, lambda: load.acknowledged)
    flights = sum((await load.across.end_offsets(ALL_PARTITIONS)).values())
    await compare("lag", f'group_topic:kafka_consumergroup_lag:sum{{group="{STALLED}",topic="{TOPIC}"}}', flights)
    across = 'sum(kipmesh_broker_consumer_fetched_bytes_total{rack="cross"})'
    await compare("bytes across racks", across, read_across)
    await compare("requested topics", "sum(kipmesh_producer_metadata_topics_total)", requested_topics)
    found["free share of the disk"] = await asyncio.to_thread(_free_share, cluster, prometheus)
    brokers = sum(node.role.is_broker for node in cluster.nodes)
    await compare("observers", "max(kafka_server_raftmetrics_number_of_observers)", brokers)
    await compare("active controllers", "cluster:kafka_controller_kafkacontroller_activecontrollercount:sum", 1)
    await compare("replicas out of sync", "cluster:kafka_server_replicamanager_underreplicatedpartitions:sum", 0)
    connections = "sum(kafka_server_socket_server_metrics_connection_count)"
    await compare("connections of the Kafka protocol", connections, KAFKA_IDLE * brokers)
    await compare("malformed frames", "sum(kipmesh_wire_malformed_frames_total)", lambda: load.malformed_frames)
    await compare("nodes", 'sum(up{job=~"kipmesh-(controller|leader|follower|consumer)"})', NODES)
    return found


def _free_share(cluster: LocalCluster, prometheus: Prometheus) -> Numbers:
    """Compare the free share of the disk, to which other processes write; blocks."""
    for _ in range(60):
        usage = shutil.disk_usage(cluster.dir)
        found = Numbers(usage.free / usage.total, prometheus.value("max(logdirectory:kipmesh_disk_free:ratio)"))
        if abs(found.expected - found.scraped) <= FREE_SHARE_MARGIN:
            break
        time.sleep(INTERVAL_S)
    return found


async def _sessions(load: Load, prometheus: Prometheus) -> dict[str, Numbers]:
    """Compare fetch sessions. Clients evict each other: retry until brokers report the same for two seconds."""

    async def reported() -> list[int]:
        brokers = await load.admin.list_fetch_sessions()
        return [
            sum(len(broker.sessions) for broker in brokers),
            sum(session.partitions for broker in brokers for session in broker.sessions),
        ]

    exprs = [
        "sum(kafka_server_fetchsessioncache_numincrementalfetchsessions)",
        "sum(kafka_server_fetchsessioncache_numincrementalfetchpartitionscached)",
    ]
    for _ in range(30):
        expected = await reported()
        await asyncio.sleep(2 * INTERVAL_S)
        scraped = [await asyncio.to_thread(prometheus.value, expr) for expr in exprs]
        if await reported() == expected and scraped == expected:
            break
    return dict(zip(("sessions", "partitions of sessions"), map(Numbers, expected, scraped), strict=True))


def _snapshot(cluster: LocalCluster, prometheus: Prometheus) -> Numbers:
    """Compare the size of a controller's newest snapshot on disk and in its metric; blocks."""
    (directory,) = Path(cluster.node("controller-1").dir).rglob("__cluster_metadata-0")
    expr = 'kafka_controller_kafkacontroller_snapshotsizebytes{instance="controller-1"}'

    def size() -> int:
        """Return 0 if the newest snapshot was deleted meanwhile."""
        try:
            return max(directory.glob("*.checkpoint")).stat().st_size
        except (FileNotFoundError, ValueError):
            return 0

    for _ in range(120):
        newest, scraped = size(), prometheus.value(expr)
        if newest == scraped == size():
            break
        time.sleep(INTERVAL_S / 2)
    return Numbers(newest, scraped)


async def _rates(load: Load, prometheus: Prometheus) -> dict[str, Numbers]:
    """Compare rates of the cluster's dashboard with the load of the producers.

    Pauses of the machine distort a single measurement, so up to five are tried. A wrong expression fails all of them.
    """
    for _ in range(5):
        found = await _rates_once(load, prometheus)
        if all(low <= found[title].ratio <= high for title, (low, high) in RATE_MARGINS.items()):
            break
    return found


async def _rates_once(load: Load, prometheus: Prometheus) -> dict[str, Numbers]:
    await asyncio.sleep(STEADY_S / 2)
    begin, bytes_before, records_before = time.time(), load.sent_bytes, load.acknowledged
    await asyncio.sleep(STEADY_S)
    end, written, records = time.time(), load.sent_bytes - bytes_before, load.acknowledged - records_before
    found = {}
    for title, expected in (("Bytes in", written), ("Records in", records)):
        (expr,) = [each.expr for each in panels() if (each.dashboard, each.title) == ("mesh", title)]
        series = await asyncio.to_thread(prometheus.over, f"sum({in_grafana(expr, RATE_INTERVAL)})", begin + 8, end)
        rates = [rate for each in series for _, rate in each.samples]
        found[title] = Numbers(expected / (end - begin), sum(rates) / max(len(rates), 1))
    return found


def _firing(prometheus: Prometheus) -> frozenset[str]:
    return frozenset(series.labels["alertname"] for series in prometheus.now('ALERTS{alertstate="firing"}'))


def _restart_leader(cluster: LocalCluster, prometheus: Prometheus) -> tuple[frozenset[str], frozenset[str]]:
    """Kill the leader until its alerts fire, start it until they are resolved, and return both sets; blocks."""
    expected = {"KipmeshNodeDown", "KipmeshUnderReplicatedPartitions"}
    cluster.kill("leader-1")
    deadline = time.monotonic() + 180
    fired: frozenset[str] = frozenset()
    while not expected <= fired and time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 2)
        fired |= _firing(prometheus)
    cluster.start("leader-1")
    deadline = time.monotonic() + 180
    while (still := _firing(prometheus)) & expected and time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 2)
    return fired, frozenset(expected - still)


async def _monitor(cluster: LocalCluster, prometheus: Prometheus, exporter: Exporter) -> MonitoredRun:
    begin = time.time()
    await _wait(prometheus, "sum(up)", NODES + 1)
    http = HttpReaders(str(cluster.node("consumer-1").http))
    try:
        assert cluster.kafka_bootstrap is not None
        async with Load(cluster.bootstrap, cluster.kafka_bootstrap, exporter) as load:
            await load.admin.alter_group_offsets(STALLED, dict.fromkeys(ALL_PARTITIONS, 0))
            numbers = await _rates(load, prometheus)
            numbers["snapshot bytes"] = await asyncio.to_thread(_snapshot, cluster, prometheus)
            load.pause()
            http.pause()
            await load.flush()
            numbers |= await _at_rest(load, prometheus, cluster, exporter)
            numbers |= await _sessions(load, prometheus)
            load.resume()
            http.resume()
            fired, resolved = await asyncio.to_thread(_restart_leader, cluster, prometheus)
            await asyncio.sleep(AFTERWARDS_S)
            return MonitoredRun(prometheus, begin, time.time(), numbers, fired, resolved)
    finally:
        await asyncio.to_thread(http.close)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredRun]:
    """The run of this module; Prometheus serves queries until the last test."""
    exporter = Exporter()
    try:
        with LocalCluster(controllers=3, leaders=1, followers=2, consumers=1, config=BROKERS) as cluster:
            prometheus = Prometheus(tmp_path_factory.mktemp("prometheus") / "server", cluster.nodes, exporter.address)
            with prometheus:
                run = asyncio.run(_monitor(cluster, prometheus, exporter))
                cluster.down()
                yield run
    finally:
        exporter.close()


def _without_data(run: MonitoredRun, exprs: list[str]) -> list[str]:
    return [expr for expr in exprs if not run.prometheus.over(expr, run.begin, run.end)]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel.dashboard}-{panel.title}".replace(" ", "-"))
def test_every_panel_has_data(monitored: MonitoredRun, panel: Panel) -> None:
    expr = in_grafana(panel.expr, RATE_INTERVAL)
    assert _without_data(monitored, [expr, *selectors(expr)]) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_data(monitored: MonitoredRun, rule: Rule) -> None:
    """Check all series that an alert compares, and the recorded series of a recording rule."""
    expr = with_short_windows(rule.expr)
    wanted = [unfiltered(expr)] if rule.is_alert else [expr, rule.name]
    assert _without_data(monitored, [*wanted, *selectors(expr)]) == []


def test_expressions_without_data_are_detected(monitored: MonitoredRun) -> None:
    """An unknown metric, an unknown label value, and NaN."""
    wrong = ["kipmesh_broker_fetchs_total", 'up{job="kipmesh-brokers"}', "0 * up / 0"]
    assert _without_data(monitored, ["up", *wrong]) == wrong


def test_all_rules_are_loaded_without_errors(monitored: MonitoredRun) -> None:
    loaded = monitored.prometheus.rules()
    assert {rule["name"] for rule in loaded} == {rule.name for rule in rules()}
    assert [(rule["name"], rule["lastError"]) for rule in loaded if rule["health"] != "ok"] == []


def test_targets_have_labels_of_their_nodes(monitored: MonitoredRun) -> None:
    found = {
        (target["labels"]["job"], target["labels"]["instance"], target["labels"].get("node_rack"))
        for target in monitored.prometheus.targets()
        if target["labels"]["job"] != "kipmesh-producer"
    }
    assert found == {
        ("kipmesh-controller", "controller-1", "rack-a"),
        ("kipmesh-controller", "controller-2", "rack-b"),
        ("kipmesh-controller", "controller-3", "rack-c"),
        ("kipmesh-leader", "leader-1", "rack-a"),
        ("kipmesh-follower", "follower-1", "rack-b"),
        ("kipmesh-follower", "follower-2", "rack-c"),
        ("kipmesh-consumer", "consumer-1", "rack-a"),
    }
    assert {target["labels"]["cluster"] for target in monitored.prometheus.targets()} == {"kipmesh"}


@pytest.mark.parametrize(
    "name",
    [
        "records",
        "lag",
        "requested topics",
        "bytes across racks",
        "sessions",
        "partitions of sessions",
        "snapshot bytes",
        "observers",
        "active controllers",
        "replicas out of sync",
        "connections of the Kafka protocol",
        "malformed frames",
        "nodes",
    ],
)
def test_scraped_numbers_equal_numbers_of_the_cluster(monitored: MonitoredRun, name: str) -> None:
    expected, scraped = monitored.numbers[name]
    print(f"{name}: {expected:g} expected, {scraped:g} scraped")
    assert scraped == expected
    assert expected > 0 or name == "replicas out of sync"


def test_dashboard_rates_equal_rates_of_the_producers(monitored: MonitoredRun) -> None:
    for name, (low, high) in RATE_MARGINS.items():
        print(f"{name}: {monitored.numbers[name].expected:g}/s expected, {monitored.numbers[name].scraped:g}/s scraped")
        assert low <= monitored.numbers[name].ratio <= high


def test_free_space_metric_equals_free_space_of_the_disk(monitored: MonitoredRun) -> None:
    expected, scraped = monitored.numbers["free share of the disk"]
    assert scraped == pytest.approx(expected, abs=FREE_SHARE_MARGIN)


def test_followers_serve_consumers_in_their_racks(monitored: MonitoredRun) -> None:
    """The restarted leader may serve the consumer service in its rack, too, while it is a follower."""
    run = monitored
    near = 'sum by (instance) (kipmesh_broker_consumer_fetched_bytes_total{role="follower",rack="same"})'
    serving = {series.labels["instance"] for series in run.prometheus.over(f"{near} > 0", run.begin, run.end)}
    assert {"follower-1", "follower-2"} <= serving


def test_every_node_writes_snapshots(monitored: MonitoredRun) -> None:
    run = monitored
    written = "kafka_controller_kafkacontroller_gensnapshotlatencyms_count >= 3"
    writers = {series.labels["instance"] for series in run.prometheus.over(written, run.begin, run.end)}
    assert writers >= {"controller-1", "controller-2", "controller-3", "follower-1", "follower-2"}


def test_alerts_fire_for_a_killed_leader_and_are_resolved_by_its_restart(monitored: MonitoredRun) -> None:
    assert {"KipmeshNodeDown", "KipmeshUnderReplicatedPartitions"} <= monitored.fired
    assert monitored.resolved == {"KipmeshNodeDown", "KipmeshUnderReplicatedPartitions"}
