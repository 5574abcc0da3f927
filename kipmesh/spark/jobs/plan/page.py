"""The page of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kipmesh.spark.jobs.plan import failover, fetches, producers, slots
from kipmesh.spark.jobs.plan.sizes import Sizes
from kipmesh.spark.jobs.report import (
    Bar,
    BarChart,
    Cell,
    Line,
    LineChart,
    Page,
    Section,
    Table,
    Tile,
    binary_size,
    number,
    percent,
)

if TYPE_CHECKING:
    from kipmesh.spark.jobs.plan.job import Statistics
    from kipmesh.spark.jobs.plan.seeds import Figure

_KINDS = ("follower", "large consumer", "small consumer", "slow consumer", "all")


def make_page(sizes: Sizes, runs: int, seed: int, found: Statistics, computed: Sequence[Figure]) -> Page:
    """The report."""
    held = [one for one in computed if one.holds is not None]
    good = sum(one.holds is True for one in held)
    saved = found.mean("fetches", "without", "mesh_bytes_per_s") / found.mean("fetches", "sessions", "mesh_bytes_per_s")
    sent = [found.mean("failover", failover.case_of(way, 1), "sent_as_responses_bytes") for way in failover.WAYS]
    return Page(
        "plan",
        f"{sizes.brokers:,} brokers, {sizes.topics:,} topics, {sizes.producers:,} producers",
        f"{sizes.partitions:,} partitions of {sizes.replication_factor} replicas, {sizes.partitions_of_broker:,.0f} on "
        f"a broker. Computed with the code that brokers and clients run, in simulated time: {runs} samples a case, "
        f"seed {seed}.",
        [
            Section(
                "What the proposals say, and what comes out",
                "Without a mark: the proposals' own sums, and, for comparison, the sizes of Kafka's own records.",
                [_figures(computed)],
            ),
            _fetches(found),
            _slots(sizes, found),
            _failover(found),
            _producers(found),
        ],
        [
            Tile("Figures that come out", f"{good} of {len(held)}", "of the proposals", good=good == len(held)),
            Tile("Fetches, without sessions", f"{saved:.1f} x", "the bytes that are said about partitions"),
            Tile(
                "A failure, by record",
                f"{sent[1] / sent[0]:,.0f} x",
                f"{binary_size(sent[1])} and {binary_size(sent[0])}",
            ),
            Tile(
                "Metadata",
                f"{binary_size(found.mean('producers', 'paced', 'bytes_per_s'))}/s",
                "of all producers, paced",
            ),
        ],
    )


def _figures(computed: Sequence[Figure]) -> Table:
    rows = [(f"KIP-{one.kip}", one.what, one.seed_says, one.computed, one.holds) for one in computed]
    return Table(("proposal", "figure", "seed says", "computed", "comes out"), rows)


def _fetches(found: Statistics) -> Section:
    rows: list[list[Cell]] = []
    for metric, what in (
        ("partitions_of_pair", "partitions of a leader and a follower"),
        ("fetches_per_s", "fetches a second, of a pair"),
        ("request_bytes", "bytes of a request"),
        ("response_bytes", "bytes of a response, records not counted"),
        ("mesh_bytes_per_s", "bytes a second in the whole mesh"),
    ):
        values = [found.mean("fetches", case, metric) for case in fetches.CASES]
        rows.append([what, *(round(value, 2) for value in values), round(values[1] / values[0], 2)])
    lines = []
    for case in fetches.CHANGED_CASES:
        metrics = found.case("sizes", case)
        for name in fetches.CASES:
            points = [
                (float(metric.split(":")[1]), one.mean)
                for metric, one in metrics.items()
                if metric.startswith(f"{name}:")
            ]
            lines.append(Line(f"{'with' if name == 'sessions' else 'without'}, {case} changed", sorted(points)))
    chart = LineChart(
        lines, "partitions of the follower", "bytes of a fetch, both ways", y_form=binary_size, log_x=True, log_y=True
    )
    return Section(
        "Fetches with and without sessions",
        "Followers and their leaders, at rates drawn from topics of which few are busy; the bytes of records are the "
        "same either way. Below: one fetch by the size of its session.",
        [Table(("", "sessions", "without", "without / with"), rows), chart],
    )


def _slots(sizes: Sizes, found: Statistics) -> Section:
    rows: list[list[Cell]] = []
    for load in slots.LOADS:
        for policy in slots.POLICIES:
            metrics = found.case("slots", slots.case_of(policy, load))
            hits = [metrics[f"hits:{kind}"].mean if f"hits:{kind}" in metrics else None for kind in _KINDS]
            shares = [None if hit is None else percent(round(hit, 3)) for hit in hits]
            rows.append([policy, round(sizes.slots * load), *shares, round(metrics["evictions"].mean)])
    lines = [
        Line(
            f"{policy}: {kind}s",
            [
                (load, metrics[f"hits:{kind}"].mean if f"hits:{kind}" in metrics else None)
                for load in slots.LOADS
                for metrics in [found.case("slots", slots.case_of(policy, load))]
            ],
        )
        for policy in slots.POLICIES
        for kind in _KINDS[:3]
    ]
    titles = ("policy", "consumers", *(f"{kind}s" for kind in _KINDS[:4]), "all", "evictions")
    chart = LineChart(lines, "consumers for each slot", "share of fetches that are incremental", y_form=percent)
    return Section(
        "Session caches under both policies",
        f"A broker with {sizes.slots:,} slots, {sizes.brokers - 1:,} followers and a crowd of consumers that come and "
        "go: "
        "the share of fetches that are incremental.",
        [chart, Table(titles, rows)],
    )


def _failover(found: Statistics) -> Section:
    bars: list[Bar] = []
    rows: list[list[Cell]] = []
    for many in failover.FAILURES:
        for place, way in enumerate(failover.WAYS):
            metrics = found.case("failover", failover.case_of(way, many))
            if not metrics:
                continue
            sent = metrics["sent_as_responses_bytes"].mean
            bars.append(Bar(f"{many} failed, by {way}", sent, group=place))
            names = (
                "partitions",
                "records",
                "record_bytes",
                "batch_bytes",
                "sent_as_responses_bytes",
                "proof_records",
                "proof_sent_bytes",
            )
            rows.append([f"{many}, by {way}", *(round(metrics[name].mean, 1) for name in names)])
    titles = (
        "brokers that fail",
        "partitions",
        "records",
        "bytes a record",
        "bytes of the batch",
        "sent to all",
        "leaders' proofs",
        "sent of those",
    )
    return Section(
        "Brokers fail",
        "What the active controller decides at once and all brokers are sent; then the proofs of leaders that stay.",
        [BarChart(bars, "bytes sent to all brokers", form=binary_size, log=True), Table(titles, rows)],
    )


def _producers(found: Statistics) -> Section:
    names = (
        ("topics_of_producer", "topics of a producer"),
        ("requests_per_s", "requests a second"),
        ("topics_per_s", "topics asked for a second"),
        ("topics_per_request", "topics of a request"),
        ("bytes_per_s", "bytes a second"),
        ("bytes_per_record", "bytes for each record produced"),
        ("start_requests_per_s", "requests a second, in the first ten seconds"),
        ("start_topics_per_s", "topics asked for a second, in the first ten seconds"),
        ("start_bytes_per_s", "bytes a second, in the first ten seconds"),
    )
    rows: list[list[Cell]] = [
        [what, *(round(found.mean("producers", mode, metric), 1) for mode in producers.MODES)] for metric, what in names
    ]
    bars = [
        Bar(f"{mode}, {when}", found.mean("producers", mode, metric), group=place)
        for place, (metric, when) in enumerate((("topics_per_s", "on average"), ("start_topics_per_s", "at the start")))
        for mode in producers.MODES
    ]
    return Section(
        "Metadata of the producers",
        "All start at once and produce for half an hour. An answer names all brokers, whatever is asked for.",
        [BarChart(bars, "topics asked for a second", form=number, log=True), Table(("", *producers.MODES), rows)],
    )
