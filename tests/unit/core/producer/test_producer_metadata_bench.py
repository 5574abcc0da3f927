"""The metadata benchmark: simulated parts at a small size, tables and charts."""

from __future__ import annotations

import json
from typing import Any

from bench import charts, metadata
from bench.charts import Bars
from bench.metadata import JAVA, Row
from kipmesh.testing.fake_broker import FakeCluster


def test_steady_state_benchmark_renders_table_and_chart() -> None:
    found = metadata.steady(100, 1)
    lines = metadata._steady_text(found, 100, 1)
    assert lines[-2].startswith("| `paced` |")
    assert lines[-1].startswith("| `literal` |")
    assert lines[-1].endswith(" | 100 | 300.00 to 300.00 s |"), "each topic is evicted when it expires"
    drawn = metadata.steady_chart(found, 1)
    assert all(f"{mode}: {unit} in ten seconds" in drawn for mode in found for unit in ("requests", "topics"))


def test_day_benchmark_has_one_row_per_pattern() -> None:
    assert len(metadata.day(200, 1)) == 2 + 5
    assert [line.split("`")[1] for line in metadata.day(50, 1, ["zipf"])[2:]] == ["zipf"]


def row(shape: str, producer: str, requests: int, size_bytes: int, total_s: float, **more: Any) -> Row:
    return Row(shape, producer, requests, requests, size_bytes, total_s, 70.0, 1.0, 2.0, 0.5, **more)


ROWS = [
    row("awaited", "`paced`", 1000, 1_000, 4.0),
    row("awaited", "`all`", 600, 60_000, 300.0),
    row("awaited", JAVA, 1001, 2_000, 5.0, broker_requests=1001, broker_received_bytes=1000),
    row("burst", "`paced`", 1, 900, 6.0),
    row("burst", "`all`", 1, 900, 3.0),
    row("burst", JAVA, 1001, 2_000, 5.0, broker_requests=1001, broker_received_bytes=1000),
]


def test_startup_table_lists_all_rows_and_ratios() -> None:
    lines = metadata.as_markdown(ROWS, 1000)
    assert [line.split(" | ")[1] for line in lines if line.startswith("| awaited")] == [
        "`paced`",
        "`all`, stopped after 600 topics",
        JAVA,
    ]
    assert [line for line in lines if line.startswith("- ")] == [
        "- awaited: `all` moved more than 60.0 times the bytes of `paced` (>= 50: met).",
        "- awaited: `paced` took 0.80 of the Java producer's time (< 1: met). Apache Kafka's broker counted 1,001 "
        "metadata requests, the Java producer 1,001.",
        "- burst: `all` moved 1.0 times the bytes of `paced`, in 0.50 times its time.",
        "- burst: `paced` took 1.20 of the Java producer's time (< 1: missed). Apache Kafka's broker counted 1,001 "
        "metadata requests, the Java producer 1,001.",
    ]
    without = metadata.as_markdown([row_ for row_ in ROWS if row_.producer != JAVA], 1000)
    assert not [line for line in without if "Java" in line]


def test_startup_chart_shows_all_rows() -> None:
    drawn = metadata.start_chart(ROWS)
    assert "60,000" in drawn
    assert all(drawn.count(f">{row.producer.replace('`', '')}<") >= 2 for row in ROWS)
    assert ">0.0<" in charts.bars([Bars("nothing", ["a"], [0.0])])


async def test_startup_counts_match_broker_requests() -> None:
    async with FakeCluster() as fake:
        for number in range(20):
            fake.create_topic(metadata.topic_name(number))
        for shape, mode, requests, topics in (("awaited", "paced", 20, 20), ("awaited", "all", 20, 210)):
            before = len(_requested_topic_counts(fake))
            figures = await metadata._produce(fake.bootstrap, shape, mode, 20, 60.0)
            counts = _requested_topic_counts(fake)[before:]
            assert (figures["requests"], figures["topics"]) == (requests, topics)
            assert (len(counts), sum(counts)) == (requests, topics)
            json.dumps(figures)
        figures = await metadata._produce(fake.bootstrap, "burst", "paced", 20, 60.0)
        assert figures["topics"] == 20
        assert figures["requests"] <= 2
        stopped = await metadata._produce(fake.bootstrap, "awaited", "all", 20, 0.0)
        assert stopped["requests"] == 1


def _requested_topic_counts(fake: FakeCluster) -> list[int]:
    """Return the number of topics of each metadata request that names topics."""
    found = [request for method, _, request in fake.calls if method == "Metadata"]
    return [len(request.topics) for request in found if request.topics]
