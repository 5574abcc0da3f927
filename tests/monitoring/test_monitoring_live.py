"""A real Prometheus scrapes a mesh of processes under load; its answers are compared with what clients and files say.

The committed configuration, rules and dashboards are used, with windows 40 times shorter. Once: three controllers, a
leader, two followers and a consumer service, everything at once (`load_of_tests`), a quiet moment in which numbers hold
still, then the leader is killed and comes back. Afterwards every expression is asked for the whole time.
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
from tests.monitoring.load_of_tests import BROKERS, EVERYWHERE, KAFKA_IDLE, STALLED, TOPIC, Exporter, HttpReaders, Load
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
"""Batches of few records have up to a tenth of headers; a scrape that is late moves a rate over 8 s by more."""
FREE_SHARE_MARGIN = 0.02
RATE_INTERVAL = "8s"
"""As Grafana: four times the interval of scrapes, and twice that, for this machine may be busy."""

PANELS = [panel for panel in panels() if not needs_tls(panel.expr)]
RULES = [rule for rule in rules() if not needs_tls(rule.expr)]


class Numbers(NamedTuple):
    """What somebody else says, and what Prometheus says of the same."""

    said: float
    seen: float

    @property
    def ratio(self) -> float:
        """1 where they agree."""
        return self.seen / self.said if self.said else math.nan


class Watched(NamedTuple):
    """One run: from when to when, and the numbers at its quiet moment."""

    prometheus: Prometheus
    begin: float
    end: float
    numbers: dict[str, Numbers]
    fired: frozenset[str]
    """Alerts that fired while the leader was gone."""
    quiet: frozenset[str]
    """Those that fired no more after it had come back."""


async def _wait(prometheus: Prometheus, expr: str, value: float) -> float:
    return await asyncio.to_thread(prometheus.wait, expr, lambda seen: seen == value)


async def _at_rest(load: Load, prometheus: Prometheus, cluster: LocalCluster, exporter: Exporter) -> dict[str, Numbers]:
    """Exact numbers while nothing is written; each waits for a scrape that has it."""
    found: dict[str, Numbers] = {}

    async def compare(name: str, expr: str, said: float | Callable[[], float]) -> None:
        """What still moves for a while is asked for again, until it was the same before and after Prometheus spoke."""
        if not callable(said):
            found[name] = Numbers(said, await _wait(prometheus, expr, said))
            return
        deadline = time.monotonic() + 120
        while True:
            before, seen = said(), await asyncio.to_thread(prometheus.value, expr)
            found[name] = Numbers(before, seen)
            if before == seen == said() or time.monotonic() > deadline:
                return
            await asyncio.sleep(INTERVAL_S / 4)

    def read_across() -> float:
        return sum(load.across.fetch_stats.bytes_by_node.values())

    def topics_asked() -> float:
        """Those that are no longer written are refreshed until they are evicted."""
        urgencies = ("urgent", "non_urgent")
        return sum(each.metrics()[f"metadata_{one}_topics"] for each in load.producers.values() for one in urgencies)

    # What the group and those who come and go read is committed to a topic of the brokers' own, not by producers.
    records = "sum(kafka_server_brokertopicmetrics_messagesin_total)"
    await compare("records", records, lambda: load.acknowledged)
    flights = sum((await load.across.end_offsets(EVERYWHERE)).values())
    await compare("lag", f'group_topic:kafka_consumergroup_lag:sum{{group="{STALLED}",topic="{TOPIC}"}}', flights)
    across = 'sum(kipmesh_broker_consumer_fetched_bytes_total{rack="cross"})'
    await compare("bytes across racks", across, read_across)
    await compare("topics asked for", "sum(kipmesh_producer_metadata_topics_total)", topics_asked)
    found["free share of the disk"] = await asyncio.to_thread(_free_share, cluster, prometheus)
    brokers = sum(node.role.is_broker for node in cluster.nodes)
    await compare("observers", "max(kafka_server_raftmetrics_number_of_observers)", brokers)
    await compare("active controllers", "cluster:kafka_controller_kafkacontroller_activecontrollercount:sum", 1)
    await compare("replicas out of sync", "cluster:kafka_server_replicamanager_underreplicatedpartitions:sum", 0)
    connections = "sum(kafka_server_socket_server_metrics_connection_count)"
    await compare("connections of the Kafka protocol", connections, KAFKA_IDLE * brokers)
    await compare("frames that are no request", "sum(kipmesh_wire_malformed_frames_total)", lambda: load.strangers)
    await compare("nodes", 'sum(up{job=~"kipmesh-(controller|leader|follower|consumer)"})', NODES)
    return found


def _free_share(cluster: LocalCluster, prometheus: Prometheus) -> Numbers:
    """Of the disk, once it was told a moment ago: others write there, too; blocks."""
    for _ in range(60):
        usage = shutil.disk_usage(cluster.dir)
        found = Numbers(usage.free / usage.total, prometheus.value("max(logdirectory:kipmesh_disk_free:ratio)"))
        if abs(found.said - found.seen) <= FREE_SHARE_MARGIN:
            break
        time.sleep(INTERVAL_S)
    return found


async def _sessions(load: Load, prometheus: Prometheus) -> dict[str, Numbers]:
    """Clients take each other's slots: the moment is taken in which the brokers said the same for two seconds."""

    async def told() -> list[int]:
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
        said = await told()
        await asyncio.sleep(2 * INTERVAL_S)
        seen = [await asyncio.to_thread(prometheus.value, expr) for expr in exprs]
        if await told() == said and seen == said:
            break
    return dict(zip(("sessions", "partitions of sessions"), map(Numbers, said, seen), strict=True))


def _snapshot(cluster: LocalCluster, prometheus: Prometheus) -> Numbers:
    """The size of the newest snapshot of a controller, in its folder and in its metric; blocks."""
    (folder,) = Path(cluster.node("controller-1").dir).rglob("__cluster_metadata-0")
    expr = 'kafka_controller_kafkacontroller_snapshotsizebytes{instance="controller-1"}'

    def size() -> int:
        """0 where the newest was replaced while it was looked at."""
        try:
            return max(folder.glob("*.checkpoint")).stat().st_size
        except (FileNotFoundError, ValueError):
            return 0

    for _ in range(120):
        newest, seen = size(), prometheus.value(expr)
        if newest == seen == size():
            break
        time.sleep(INTERVAL_S / 2)
    return Numbers(newest, seen)


async def _rates(load: Load, prometheus: Prometheus) -> dict[str, Numbers]:
    """Rates of the mesh's dashboard while producers write steadily, beside what they wrote.

    Who stands still writes, or is scraped, late: it is not steady. What is wrong in a rate is so in each of the times.
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
    for title, said in (("Bytes in", written), ("Records in", records)):
        (expr,) = [each.expr for each in panels() if (each.dashboard, each.title) == ("mesh", title)]
        series = await asyncio.to_thread(prometheus.over, f"sum({in_grafana(expr, RATE_INTERVAL)})", begin + 8, end)
        rates = [rate for each in series for _, rate in each.samples]
        found[title] = Numbers(said / (end - begin), sum(rates) / max(len(rates), 1))
    return found


def _firing(prometheus: Prometheus) -> frozenset[str]:
    return frozenset(series.labels["alertname"] for series in prometheus.now('ALERTS{alertstate="firing"}'))


def _leader_gone(cluster: LocalCluster, prometheus: Prometheus) -> tuple[frozenset[str], frozenset[str]]:
    """Kill it until the alerts about it fire, and start it until they do not; blocks."""
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


async def _watch(cluster: LocalCluster, prometheus: Prometheus, exporter: Exporter) -> Watched:
    begin = time.time()
    await _wait(prometheus, "sum(up)", NODES + 1)
    http = HttpReaders(str(cluster.node("consumer-1").http))
    try:
        assert cluster.kafka_bootstrap is not None
        async with Load(cluster.bootstrap, cluster.kafka_bootstrap, exporter) as load:
            await load.admin.alter_group_offsets(STALLED, dict.fromkeys(EVERYWHERE, 0))
            numbers = await _rates(load, prometheus)
            numbers["snapshot bytes"] = await asyncio.to_thread(_snapshot, cluster, prometheus)
            load.pause()
            http.pause()
            await load.flush()
            numbers |= await _at_rest(load, prometheus, cluster, exporter)
            numbers |= await _sessions(load, prometheus)
            load.resume()
            http.resume()
            fired, quiet = await asyncio.to_thread(_leader_gone, cluster, prometheus)
            await asyncio.sleep(AFTERWARDS_S)
            return Watched(prometheus, begin, time.time(), numbers, fired, quiet)
    finally:
        await asyncio.to_thread(http.close)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The one run; Prometheus answers for it until the last test."""
    exporter = Exporter()
    try:
        with LocalCluster(controllers=3, leaders=1, followers=2, consumers=1, config=BROKERS) as cluster:
            prometheus = Prometheus(tmp_path_factory.mktemp("prometheus") / "it", cluster.nodes, exporter.address)
            with prometheus:
                run = asyncio.run(_watch(cluster, prometheus, exporter))
                cluster.down()
                yield run
    finally:
        exporter.close()


def _without_data(run: Watched, exprs: list[str]) -> list[str]:
    return [expr for expr in exprs if not run.prometheus.over(expr, run.begin, run.end)]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel.dashboard}-{panel.title}".replace(" ", "-"))
def test_every_panel_has_data(watched: Watched, panel: Panel) -> None:
    expr = in_grafana(panel.expr, RATE_INTERVAL)
    assert _without_data(watched, [expr, *selectors(expr)]) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_data(watched: Watched, rule: Rule) -> None:
    """An alert by what it compares; a recording rule as it is recorded, too."""
    expr = with_short_windows(rule.expr)
    wanted = [unfiltered(expr)] if rule.is_alert else [expr, rule.name]
    assert _without_data(watched, [*wanted, *selectors(expr)]) == []


def test_what_has_no_data_is_found(watched: Watched) -> None:
    """A name that nobody exports, a label's value that there is not, and a number that is none."""
    wrong = ["kipmesh_broker_fetchs_total", 'up{job="kipmesh-brokers"}', "0 * up / 0"]
    assert _without_data(watched, ["up", *wrong]) == wrong


def test_no_rule_has_failed(watched: Watched) -> None:
    loaded = watched.prometheus.rules()
    assert {rule["name"] for rule in loaded} == {rule.name for rule in rules()}
    assert [(rule["name"], rule["lastError"]) for rule in loaded if rule["health"] != "ok"] == []


def test_targets_have_their_names(watched: Watched) -> None:
    found = {
        (target["labels"]["job"], target["labels"]["instance"], target["labels"].get("node_rack"))
        for target in watched.prometheus.targets()
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
    assert {target["labels"]["cluster"] for target in watched.prometheus.targets()} == {"kipmesh"}


@pytest.mark.parametrize(
    "name",
    [
        "records",
        "lag",
        "topics asked for",
        "bytes across racks",
        "sessions",
        "partitions of sessions",
        "snapshot bytes",
        "observers",
        "active controllers",
        "replicas out of sync",
        "connections of the Kafka protocol",
        "frames that are no request",
        "nodes",
    ],
)
def test_numbers_equal_what_the_cluster_reports(watched: Watched, name: str) -> None:
    said, seen = watched.numbers[name]
    print(f"{name}: {said:g} said, {seen:g} seen")
    assert seen == said
    assert said > 0 or name == "replicas out of sync"


def test_rates_are_what_producers_sent(watched: Watched) -> None:
    for name, (low, high) in RATE_MARGINS.items():
        print(f"{name}: {watched.numbers[name].said:g}/s said, {watched.numbers[name].seen:g}/s seen")
        assert low <= watched.numbers[name].ratio <= high


def test_free_space_is_that_of_the_disk(watched: Watched) -> None:
    said, seen = watched.numbers["free share of the disk"]
    assert seen == pytest.approx(said, abs=FREE_SHARE_MARGIN)


def test_followers_serve_their_racks(watched: Watched) -> None:
    """And the leader the consumer service in its rack, when it is a follower after its return."""
    run = watched
    near = 'sum by (instance) (kipmesh_broker_consumer_fetched_bytes_total{role="follower",rack="same"})'
    serving = {series.labels["instance"] for series in run.prometheus.over(f"{near} > 0", run.begin, run.end)}
    assert {"follower-1", "follower-2"} <= serving


def test_snapshots_were_made_on_every_node(watched: Watched) -> None:
    run = watched
    made = "kafka_controller_kafkacontroller_gensnapshotlatencyms_count >= 3"
    makers = {series.labels["instance"] for series in run.prometheus.over(made, run.begin, run.end)}
    assert makers >= {"controller-1", "controller-2", "controller-3", "follower-1", "follower-2"}


def test_alerts_fire_for_a_killed_leader_and_end_when_it_is_back(watched: Watched) -> None:
    assert {"KipmeshNodeDown", "KipmeshUnderReplicatedPartitions"} <= watched.fired
    assert watched.quiet == {"KipmeshNodeDown", "KipmeshUnderReplicatedPartitions"}
