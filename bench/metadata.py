"""`python -m bench.metadata`: what metadata costs a producer of many topics (KIP-526).

- Start-up: one record to each of many topics, each awaited before the next, and all at once, by producers with
  `metadata.refresh=paced` and `=all` on one local cluster, each in a process of its own.
- Steady state in simulated time (`kipmesh.testing.producer_day`): the same topics in use for ten hours, paced and
  literal; `--picture F.svg` draws requests and topics by window of ten seconds.
- `--day`: instead, a simulated day with 100,000 topics under each pattern of use, its invariants checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import system
from bench.metadata_picture import Series, picture
from kipmesh.client import NewTopic, Producer
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import LocalCluster
from kipmesh.testing.producer_day import WINDOW_MS, Day, DayConfig, DayResult

SHAPES = ("awaited", "burst")
MODES = ("paced", "all")
CREATED_AT_ONCE = 500
VALUE = b"x" * 100
CONFIG = {"linger.ms": 0, "acks": "all", "max.block.ms": 600_000, "delivery.timeout.ms": 600_000}
HOURS = 10
USES_A_TOPIC_S = 240
"""In the steady state each topic gets a record so often: none is evicted."""
DAY_TOPICS = 100_000
DAY_RECORDS_PER_S = {"uniform": 500.0, "zipf": 300.0, "bursts": 1.0, "idle": 1.0, "steady": 1000.0}


def _name(number: int) -> str:
    return f"metadata-{number:06}"


async def _produce(bootstrap: str, shape: str, mode: str, topics: int) -> dict[str, Any]:
    names = [_name(number) for number in range(topics)]
    async with Producer(bootstrap, **CONFIG, **{"metadata.refresh": mode}) as producer:
        begin = time.perf_counter()
        if shape == "awaited":
            for name in names:
                await (await producer.send(name, VALUE))
        else:
            await asyncio.gather(*await asyncio.gather(*[producer.send(name, VALUE) for name in names]))
        total_s = time.perf_counter() - begin
        metrics = producer.metrics()
    kinds = ("urgent", "non_urgent")
    return {
        "shape": shape,
        "mode": mode,
        "total_s": total_s,
        **{what: sum(metrics[f"metadata_{kind}_{what}"] for kind in kinds) for what in ("requests", "topics", "bytes")},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _in_process(bootstrap: str, shape: str, mode: str, topics: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.metadata", "--topics", str(topics)]
    command += ["--step", f"{shape},{mode}", "--bootstrap", bootstrap]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return figures


def start_up(topics: int, shapes: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of figures, by shape and mode."""
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=0) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            for first in range(0, topics, CREATED_AT_ONCE):
                last = min(first + CREATED_AT_ONCE, topics)
                admin.create_topics([NewTopic(_name(number), 1, 1) for number in range(first, last)])
        return [_in_process(cluster.bootstrap, shape, mode, topics) for shape in shapes for mode in MODES]


def steady(topics: int, hours: int) -> dict[str, DayResult]:
    """Simulated hours by mode; raises DayError when an invariant does not hold."""
    config = {"topics": topics, "duration_s": hours * 3600, "records_per_s": topics / USES_A_TOPIC_S}
    found = {}
    for mode in ("paced", "literal"):
        kind: Any = mode
        found[mode] = Day(DayConfig("steady", kind, scan_every_ms=600_000, **config)).run()  # type: ignore[arg-type]
    return found


def day(topics: int, hours: int) -> list[str]:
    """Lines about a simulated day under each pattern; raises DayError when an invariant does not hold."""
    lines = []
    for pattern, rate in DAY_RECORDS_PER_S.items():
        kind: Any = pattern
        begin = time.perf_counter()
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
            f"{pattern:<8} {result.records:>11,} records, {counts.urgent_requests:,} urgent and "
            f"{counts.non_urgent_requests:,} other requests for {counts.urgent_topics:,} and "
            f"{counts.non_urgent_topics:,} topics; {counts.evictions:,} evictions, at most {result.cached_most:,} "
            f"cached, oldest metadata {result.oldest_ms / 1000:.1f} s; {time.perf_counter() - begin:.0f} s"
        )
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    return lines


def _start_up_text(rows: Sequence[dict[str, Any]], topics: int) -> list[str]:
    lines = [
        f"One record to each of {topics:,} topics.",
        "",
        "| shape | `metadata.refresh` | requests | topics asked for | bytes of metadata | total | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['shape']} | `{row['mode']}` | {row['requests']:,} | {row['topics']:,} | {row['bytes']:,} | "
        f"{row['total_s']:.1f} s | {row['peak_mib']:.0f} MiB |"
        for row in rows
    ]
    for few, all_ in zip(rows[::2], rows[1::2], strict=True):
        ratio, times = all_["bytes"] / few["bytes"], all_["total_s"] / few["total_s"]
        lines.append(f"\n{few['shape']}: `all` took {ratio:,.1f} times the bytes and {times:.1f} times the time.")
    return lines


def _steady_text(found: dict[str, DayResult], topics: int, hours: int) -> list[str]:
    lines = [
        f"{topics:,} topics in use for {hours} simulated hours.",
        "",
        "| `metadata.refresh` | requests | topics asked for | most requests in 10 s | most topics in 10 s | "
        "windows without a request | oldest metadata |",
        "|---|---|---|---|---|---|---|",
    ]
    begin = 300_000 // WINDOW_MS  # the start, which is urgent, and the first spreading are not the steady state
    for mode, result in found.items():
        windows = range(begin, hours * 3_600_000 // WINDOW_MS)
        lines.append(
            f"| `{mode}` | {sum(result.requests.values()):,} | {sum(result.topics.values()):,} | "
            f"{max(result.requests[each] for each in windows)} | {max(result.topics[each] for each in windows):,} | "
            f"{sum(not result.requests[each] for each in windows):,} of {len(windows):,} | "
            f"{result.oldest_ms / 1000:.2f} s |"
        )
    return lines


def _draw(found: dict[str, DayResult], hours: int) -> str:
    windows = hours * 3_600_000 // WINDOW_MS
    series = []
    for what in ("requests", "topics"):
        for mode, result in found.items():
            counts = getattr(result, what)
            # Without the start: its urgent requests ask for all topics.
            columns = [counts[each] if each else 0 for each in range(windows)]
            series.append(Series(f"{mode}: {what} in ten seconds", columns))
    return picture(series, hours)


def main(given: Sequence[str]) -> int:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.metadata", description=__doc__)
    parser.add_argument("--topics", type=int, help="10,000; with --day 100,000")
    parser.add_argument("--hours", type=int, help="of simulated time: 10; with --day 24")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=SHAPES, help="of the start-up; or none of it")
    parser.add_argument("--day", action="store_true", help="a simulated day under each pattern of use instead")
    parser.add_argument("--picture", type=Path, help="draw the steady state to this SVG file")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    topics = options.topics or (DAY_TOPICS if options.day else 10_000)
    hours = options.hours or (24 if options.day else HOURS)
    if topics < 1 or hours < 1:
        parser.error("at least one topic and one hour")
    if options.step:
        shape, mode = options.step.split(",")
        sys.stdout.write(json.dumps(asyncio.run(_produce(options.bootstrap, shape, mode, topics))))
        return 0
    if options.day:
        day(topics, hours)
        return 0
    lines = [f"{key}: {value}" for key, value in system.describe_machine().items()]
    if options.shapes:
        lines += ["", *_start_up_text(start_up(topics, options.shapes), topics)]
    found = steady(topics, hours)
    lines += ["", *_steady_text(found, topics, hours)]
    if options.picture:
        options.picture.write_text(_draw(found, hours), encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
