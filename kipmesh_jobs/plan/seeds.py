"""Figures of the proposals, compared with computed ones (630-18 and others).

A figure `holds` if the code reproduces the proposal's value within its rounding. Where record sizes differ from the
proposal's, there are two figures without a verdict: the proposal's sum with its own sizes, and the measured value.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kipmesh.core.config import BrokerConfig, ProducerConfig
from kipmesh.core.config.base import Config
from kipmesh.core.fetch_session.types import SESSION_SLOTS, UNUSED_MS_MAX
from kipmesh.core.producer import TrackerConfig
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh_jobs.plan import producers
from kipmesh_jobs.plan.fetches import SESSION_SIZES
from kipmesh_jobs.report import binary_size, number

KIB, MIB = 1 << 10, 1 << 20
SEED_TOPICS, SEED_PARTITIONS, SEED_REPLICAS, SEED_BROKERS = 100_000, 10, 3, 100
ISR_CHANGE_BYTES = 4 + 16 + 8 + 4 + 4 + 2 + 2
"""Partition id, topic id, ISR, leader, leader epoch, API key and version, as in KIP-630."""
FENCE_BYTES = 4 + 2 + 2
STATE_MB, CHANGE_MB_S, CLEAN_RATIO = 100, 1.0, 0.5

Mean = Callable[[str, str, str], float]
"""Returns the mean of a metric over all runs, given (part, case, metric). Raises KeyError if it was not simulated."""


class Figure(NamedTuple):
    """A figure of a proposal beside the computed one: KIP number, description, the proposal's text, the computed text
    and value.

    `holds` is True if the code reproduces the figure, False if not, None if they are not comparable.
    """

    kip: str
    what: str
    seed_says: str
    computed: str
    holds: bool | None
    value: float


def figures(mean: Mean) -> list[Figure]:
    """Return the figures of KIP-227, KIP-526 and KIP-630, in this order. `mean` returns means of simulated samples."""
    return [*_sessions(mean), *_metadata(), *_fencing(mean), *_snapshots()]


def _exact(kip: str, what: str, says: str, value: float, expected: float, text: str = "") -> Figure:
    """Return a figure that holds only if `value` equals `expected`. `text` (default: the formatted value) is shown."""
    return Figure(kip, what, says, text or number(value), value == expected, float(value))


def _sum(what: str, says: str, text: str, value: float) -> Figure:
    """Return a figure of KIP-630 whose `holds` is None."""
    return Figure("630", what, says, text, None, float(value))


def _default(config: type[Config], name: str) -> float:
    return float(config.model_fields[name].default)


def _sessions(mean: Mean) -> list[Figure]:
    slots = _default(BrokerConfig, "max_incremental_fetch_session_cache_slots")
    eviction = _default(BrokerConfig, "min_incremental_fetch_session_eviction_ms")
    sizes, without = _sizes_of(mean, "sessions"), _sizes_of(mean, "without")
    least, most = min(sizes), max(sizes)
    stays, grows, times = sizes[most] / sizes[least], without[most] / without[least], most // least
    same_slots, same_eviction = SESSION_SLOTS == 10_000, UNUSED_MS_MAX == 120_000
    bytes_of_most = f"{stays:.2f} x ({number(sizes[most])} B)"
    return [
        Figure("227", "session cache slots", "10,000", number(slots), slots == 10_000 and same_slots, slots),
        Figure("227", "eviction, ms", "120,000", number(eviction), eviction == 120_000 and same_eviction, eviction),
        Figure(
            "227",
            f"bytes of a fetch of {most:,} partitions, 10 changed, beside {least:,}",
            "1 x: O(partitions that changed)",
            bytes_of_most,
            abs(stays - 1) < 0.02,
            stays,
        ),
        Figure(
            "227",
            f"the same without sessions, {times:,} times the partitions",
            f"{times:,} x: O(partitions)",
            f"{grows:,.0f} x ({binary_size(without[most])})",
            abs(grows * least / most - 1) < 0.05,
            grows,
        ),
    ]


def _sizes_of(mean: Mean, way: str) -> dict[int, float]:
    found = {}
    for size in SESSION_SIZES:
        with suppress(KeyError):  # the cluster may have fewer partitions
            found[size] = mean("sizes", "10", f"{way}:{size}")
    return found


def _metadata() -> list[Figure]:
    tracker = TrackerConfig(300_000, 300_000, 100, lambda attempts: 100.0)
    evict, age = _default(ProducerConfig, "metadata_evict_ms"), _default(ProducerConfig, "metadata_max_age_ms")
    few, many = tracker.target_topics(100), tracker.target_topics(10_000)
    topics = 50
    pairs = topics * (topics + 1) // 2
    new = producers.simulate_start(topics, "paced")
    old = producers.simulate_start(topics, "all")
    start = f"requests of a start with {topics} new topics, one after the other"
    return [
        _exact("526", "metadata.evict.ms", "5 minutes", evict, 300_000, f"{evict / 60_000:g} minutes"),
        _exact("526", "metadata.max.age.ms", "5 minutes", age, 300_000, f"{age / 60_000:g} minutes"),
        _exact("526", "target of 100 cached topics", "20: max(100 / 300 x 10, 20)", few, 20),
        _exact("526", "target of 10,000 cached topics", "333.3: 10,000 / 300 x 10", many, 334, f"{many} (rounded up)"),
        _exact("526", start, f"O(n): {topics}", new.requests[0], topics),
        _exact("526", "topics in them: only urgent ones", number(topics), new.topics[0], topics),
        _exact(
            "526",
            "the same if each request has all known topics",
            f"n (n + 1) / 2 = {pairs:,}",
            old.topics[0],
            pairs,
        ),
    ]


def _fencing(mean: Mean) -> list[Figure]:
    partitions = SEED_TOPICS * SEED_PARTITIONS * SEED_REPLICAS // SEED_BROKERS
    observers = SEED_BROKERS - 1
    replica, fenced = partitions * ISR_CHANGE_BYTES, FENCE_BYTES * observers
    sent = replica * observers
    by_record, by_event = ({name: mean("seed", way, name) for name in _SEED_METRICS} for way in ("record", "event"))
    decided = by_record["records"] - 1  # the other record fences the broker
    framed = "the same, with batch framing, in Fetch responses"

    def measured(what: str, says: str, value: float) -> Figure:
        return _sum(what, says, binary_size(value), value)

    record_bytes, event_bytes = by_record["record_bytes"], by_event["record_bytes"]
    return [
        _exact("630", "IsrChange records of one failure", "30,000", decided, 30_000),
        _sum("bytes of a record", "40", f"{record_bytes:.0f}", record_bytes),
        _sum("written by a replica, 40-byte records", "1.14 MiB", f"{replica / MIB:.2f} MiB", replica),
        _sum("sent to 99 brokers, 40-byte records", "113.29 MiB", f"{sent / MIB:.3f} MiB", sent),
        measured("written by a replica, Kafka's own records", "1.14 MiB", by_record["replica_bytes"]),
        measured("sent to 99 brokers, Kafka's own records", "113.29 MiB", by_record["sent_bytes"]),
        measured(framed, "113.29 MiB", by_record["sent_as_responses_bytes"]),
        _exact("630", "event records of one failure", "1", by_event["records"], 1),
        _sum("sent to 99 brokers, an event of 8 bytes", "0.77 KiB", f"{fenced / KIB:.2f} KiB", fenced),
        measured(f"the same, Kafka's own record of {event_bytes:.0f} bytes", "0.77 KiB", by_event["sent_bytes"]),
        measured(framed, "0.77 KiB", by_event["sent_as_responses_bytes"]),
    ]


_SEED_METRICS = ("records", "record_bytes", "replica_bytes", "sent_bytes", "sent_as_responses_bytes")


class Reads(NamedTuple):
    """MB per second that compaction reads from the head of the log, to build the offset map, and to copy records.
    `seconds_between` is the time between two compactions.
    """

    head: float
    offset_map: float
    copied: float
    seconds_between: float


def compaction_reads(state_mb: float, change_mb_s: float, clean_ratio: float) -> Reads:
    """Return the reads of compaction for a state of constant size in MB that changes by `change_mb_s`. Compaction runs
    whenever the changes reach `clean_ratio` of the state's size.
    """
    dirty_mb = clean_ratio * state_mb
    seconds = dirty_mb / change_mb_s
    return Reads(change_mb_s, dirty_mb / seconds, (state_mb + dirty_mb) / seconds, seconds)


def _snapshots() -> list[Figure]:
    reads = compaction_reads(STATE_MB, CHANGE_MB_S, CLEAN_RATIO)
    ratio, between = SnapshotLimits().changed_records_ratio_min, SnapshotLimits().record_bytes_between
    bytes_between = "metadata.log.max.record.bytes.between.snapshots"
    return [
        *(
            _sum(what, says, f"{value:g}{unit}", value)
            for what, says, value, unit in (
                ("read with snapshots: the head of the log alone", "1 MB/s", CHANGE_MB_S, " MB/s"),
                ("read with compaction: the head of the log", "1 MB/s", reads.head, " MB/s"),
                ("read with compaction: the map of offsets", "1 MB/s", reads.offset_map, " MB/s"),
                ("read with compaction: what is copied", "3 MB/s", reads.copied, " MB/s"),
                ("seconds between two compactions", "50", reads.seconds_between, ""),
            )
        ),
        _exact("630", "metadata.snapshot.min.changed_records.ratio", "0.5", ratio, 0.5, f"{ratio:g}"),
        _exact("630", bytes_between, "20 MB", between, 20 * MIB, binary_size(between)),
    ]
