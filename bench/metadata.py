"""`python -m bench.metadata`: what metadata costs a producer of many topics (KIP-526).

- Start-up (`bench.metadata_start`): one record to each of many topics, each awaited before the next, and all at once,
  by producers with `metadata.refresh=paced` and `=all` on a local cluster, and by the Java producer on Apache Kafka.
- Steady state in simulated time (`kipmesh_jobs.plan.producer_day`): the same topics in use for ten hours, paced and
  literal, and then idle; `--chart F.svg` draws requests and topics by window of ten seconds.
- `--day`: instead, a simulated day with 100,000 topics under each pattern of use, its invariants checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import charts, harness, metadata_start, system
from bench.charts import Bars, Series
from kipmesh_jobs.plan.producer_day import WINDOW_MS, Day, DayConfig, DayResult

HOURS = 10
MODULE = "bench.metadata"
USES_A_TOPIC_S = 240
"""In the steady state each topic gets a record so often: none is evicted."""
QUIET_S = 900
"""After the steady state there are no records for so long: each topic is evicted."""
DAY_TOPICS = 100_000
DAY_RECORDS_PER_S = {"uniform": 500.0, "zipf": 300.0, "bursts": 1.0, "idle": 1.0, "steady": 400.0}


def steady(topics: int, hours: int) -> dict[str, DayResult]:
    """Simulated hours by mode; raises DayError when an invariant does not hold."""
    found = {}
    for mode in ("paced", "literal"):
        kind: Any = mode
        config = DayConfig(
            "steady",
            kind,
            topics=topics,
            duration_s=hours * 3600 + QUIET_S,
            quiet_s=QUIET_S,
            records_per_s=topics / USES_A_TOPIC_S,
            scan_every_ms=600_000,
        )
        found[mode] = Day(config).run()
    return found


def day(topics: int, hours: int, patterns: Sequence[str] = tuple(DAY_RECORDS_PER_S)) -> list[str]:
    """Rows about a simulated day under each pattern; raises DayError when an invariant does not hold."""
    lines = [
        "| pattern | records | urgent requests | their topics | other requests | their topics | evictions "
        "| most topics cached | oldest metadata | longest idle |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for pattern in patterns:
        kind: Any = pattern
        rate = DAY_RECORDS_PER_S[pattern]
        begin = time.process_time()
        config = DayConfig(
            kind,
            topics=topics,
            duration_s=hours * 3600,
            records_per_s=rate * topics / DAY_TOPICS,
            missing_share=0.0005,
            moves_per_s=0.1,
            scan_every_ms=1_800_000,
        )
        result = Day(config).run()
        counts = result.metrics
        lines.append(
            f"| `{pattern}` | {result.records:,} | {counts.urgent_requests:,} | {counts.urgent_topics:,} "
            f"| {counts.non_urgent_requests:,} | {counts.non_urgent_topics:,} | {counts.evictions:,} "
            f"| {result.cached_most:,} | {result.oldest_ms / 1000:.2f} s | {result.idle_longest_ms / 1000:.2f} s |"
        )
        harness.say(MODULE, f"{pattern}: {time.process_time() - begin:.0f} s of CPU")
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    return lines


def _steady_text(found: dict[str, DayResult], topics: int, hours: int) -> list[str]:
    lines = [
        f"{topics:,} topics in use for {hours} simulated hours, and then idle.",
        "",
        "| `metadata.refresh` | requests | topics asked for | most requests in 10 s | most topics in 10 s | "
        "windows without a request | oldest metadata | evictions | idle until then |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    begin = 300_000 // WINDOW_MS  # the start, which is urgent, and the first spreading are not the steady state
    for mode, result in found.items():
        windows = range(begin, hours * 3_600_000 // WINDOW_MS)
        lines.append(
            f"| `{mode}` | {sum(result.requests.values()):,} | {sum(result.topics.values()):,} | "
            f"{max(result.requests[each] for each in windows)} | {max(result.topics[each] for each in windows):,} | "
            f"{sum(not result.requests[each] for each in windows):,} of {len(windows):,} | "
            f"{result.oldest_ms / 1000:.2f} s | {result.metrics.evictions:,} | "
            f"{result.idle_shortest_ms / 1000:.2f} to {result.idle_longest_ms / 1000:.2f} s |"
        )
    return lines


def steady_chart(found: dict[str, DayResult], hours: int) -> str:
    """Columns: requests and topics by window of ten seconds."""
    windows = hours * 3_600_000 // WINDOW_MS
    series = []
    for what in ("requests", "topics"):
        for mode, result in found.items():
            counts = getattr(result, what)
            # Without the start: its urgent requests ask for all topics.
            columns = [counts[each] if each else 0 for each in range(windows)]
            series.append(Series(f"{mode}: {what} in ten seconds", columns))
    return charts.columns(series, hours)


def start_chart(rows: Sequence[metadata_start.Row]) -> str:
    """Bars: bytes, on a logarithmic axis, and time."""
    panels = []
    for shape in dict.fromkeys(row.shape for row in rows):
        of_shape = [row for row in rows if row.shape == shape]
        names = [row.who.replace("`", "") for row in of_shape]
        panels.append(Bars(f"{shape}: bytes of metadata", names, [row.bytes for row in of_shape], is_log=True))
        panels.append(Bars(f"{shape}: seconds to the last acknowledgement", names, [row.total_s for row in of_shape]))
    return charts.bars(panels)


def main(given: Sequence[str]) -> int:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--topics", type=int, help="10,000; with --day 100,000")
    parser.add_argument("--hours", type=int, help="of simulated time: 10; with --day 24")
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=metadata_start.SHAPES,
        default=metadata_start.SHAPES,
        help="of the start-up, or none",
    )
    parser.add_argument("--no-kafka", action="store_true", help="the start-up without the Java producer")
    parser.add_argument(
        "--all-minutes", type=float, default=metadata_start.ALL_LIMIT_S / 60, help="`all`, awaited, stops then (5)"
    )
    parser.add_argument("--no-steady", action="store_true", help="the start-up only")
    parser.add_argument("--day", action="store_true", help="a simulated day under each pattern of use instead")
    parser.add_argument("--patterns", nargs="+", choices=list(DAY_RECORDS_PER_S), default=list(DAY_RECORDS_PER_S))
    parser.add_argument("--chart", type=Path, help="draw the steady state to this SVG file")
    parser.add_argument("--start-chart", type=Path, help="draw the start-up to this SVG file")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    harness.interrupt_on_sigterm()
    topics = options.topics or (DAY_TOPICS if options.day else 10_000)
    hours = options.hours or (24 if options.day else HOURS)
    if topics < 1 or hours < 1:
        parser.error("at least one topic and one hour")
    if options.step:
        sys.stdout.write(metadata_start.step(options.step))
        return 0
    if options.day:
        day(topics, hours, options.patterns)
        return 0
    lines = [f"{key}: {value}" for key, value in system.describe_machine().items()]
    if options.shapes:
        limit_s = options.all_minutes * 60
        rows = metadata_start.start_up(topics, options.shapes, with_kafka=not options.no_kafka, all_limit_s=limit_s)
        lines += ["", *metadata_start.as_markdown(rows, topics)]
        if options.start_chart:
            options.start_chart.write_text(start_chart(rows), encoding="utf-8")
    if not options.no_steady:
        found = steady(topics, hours)
        lines += ["", *_steady_text(found, topics, hours)]
        if options.chart:
            options.chart.write_text(steady_chart(found, hours), encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
