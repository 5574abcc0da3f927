"""The figures that the proposals give, beside those that the code computes (630-18 and others).

A figure `holds` when what kipmesh's code computes is what the proposal says, within the rounding that it uses. Where
records of the proposal and of this code have other sizes, both are there: the proposal's own sum with its sizes, and
the measured one. Neither has a verdict: the sum holds whatever the code does, and the measured one has other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kipmesh.core.config import BrokerConfig, ProducerConfig
from kipmesh.core.fetch_session.types import SESSION_SLOTS, UNUSED_MS_MAX
from kipmesh.core.producer_metadata import TrackerConfig
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.spark.jobs.plan import producers
from kipmesh.spark.jobs.report import binary_size, number

KIB, MIB, MB = 1 << 10, 1 << 20, 1_000_000
SEED_TOPICS, SEED_PARTITIONS, SEED_REPLICAS, SEED_BROKERS = 100_000, 10, 3, 100
ISR_CHANGE_BYTES = 4 + 16 + 8 + 4 + 4 + 2 + 2
"""Partition id, topic id, ISR, leader, leader epoch, API key and version, as KIP-630 counts them."""
FENCE_BYTES = 4 + 2 + 2
STATE_MB, CHANGE_MB_S, CLEAN_RATIO = 100, 1.0, 0.5

Mean = Callable[[str, str, str], float]
"""The mean of a metric of a part's case over all runs."""


class Figure(NamedTuple):
    """A figure as the proposal says it and as it is computed; `holds` is None for one without a verdict."""

    kip: str
    what: str
    seed_says: str
    computed: str
    holds: bool | None
    value: float


def figures(mean: Mean) -> list[Figure]:
    """All of them."""
    return [*_sessions(mean), *_metadata(), *_fencing(mean), *_snapshots()]


def _sessions(mean: Mean) -> list[Figure]:
    config = BrokerConfig.model_fields["max_incremental_fetch_session_cache_slots"].default
    eviction = BrokerConfig.model_fields["min_incremental_fetch_session_eviction_ms"].default
    sizes = _sizes_of(lambda size: _or_none(mean, "sizes", "10", f"sessions:{size}"))
    without = _sizes_of(lambda size: _or_none(mean, "sizes", "10", f"without:{size}"))
    least, most = min(sizes), max(sizes)
    grows = without[most] / without[least]
    return [
        Figure("227", "session cache slots", "10,000", number(config), config == SESSION_SLOTS == 10_000, config),
        Figure("227", "eviction, ms", "120,000", number(eviction), eviction == UNUSED_MS_MAX == 120_000, eviction),
        Figure(
            "227",
            f"bytes of a fetch of {most:,} partitions, 10 changed, beside {least:,}",
            "1 x: O(partitions that changed)",
            f"{sizes[most] / sizes[least]:.2f} x ({number(sizes[most])} B)",
            abs(sizes[most] / sizes[least] - 1) < 0.02,
            sizes[most] / sizes[least],
        ),
        Figure(
            "227",
            f"the same without sessions, {most // least:,} times the partitions",
            f"{most // least:,} x: O(partitions)",
            f"{grows:,.0f} x ({binary_size(without[most])})",
            abs(grows * least / most - 1) < 0.05,
            grows,
        ),
    ]


def _sizes_of(value: Callable[[int], float | None]) -> Mapping[int, float]:
    from kipmesh.spark.jobs.plan.fetches import SESSION_SIZES

    return {size: found for size in SESSION_SIZES if (found := value(size)) is not None}


def _or_none(mean: Mean, part: str, case: str, metric: str) -> float | None:
    try:
        return mean(part, case, metric)
    except KeyError:
        return None


def _metadata() -> list[Figure]:
    tracker = TrackerConfig(300_000, 300_000, 100, lambda attempts: 100.0)
    evict = ProducerConfig.model_fields["metadata_evict_ms"].default
    age = ProducerConfig.model_fields["metadata_max_age_ms"].default
    few, many = tracker.target_topics(100), tracker.target_topics(10_000)
    topics = 50
    new = producers.live_idle(topics, "paced")
    old = producers.live_idle(topics, "all")
    return [
        Figure("526", "metadata.evict.ms", "5 minutes", f"{evict / 60_000:g} minutes", evict == 300_000, evict),
        Figure("526", "metadata.max.age.ms", "5 minutes", f"{age / 60_000:g} minutes", age == 300_000, age),
        Figure("526", "target of 100 cached topics", "20: max(100 / 300 x 10, 20)", number(few), few == 20, few),
        Figure(
            "526",
            "target of 10,000 cached topics",
            "333.3: 10,000 / 300 x 10",
            f"{many} (rounded up)",
            many == 334,
            many,
        ),
        Figure(
            "526",
            f"requests of a start with {topics} new topics, one after the other",
            f"O(n): {topics}",
            number(new.requests[0]),
            new.requests[0] == topics,
            new.requests[0],
        ),
        Figure(
            "526",
            "topics asked for in them: only urgent ones",
            number(topics),
            number(new.topics[0]),
            new.topics[0] == topics,
            new.topics[0],
        ),
        Figure(
            "526",
            "the same when each request asks for all known topics",
            f"n (n + 1) / 2 = {topics * (topics + 1) // 2:,}",
            number(old.topics[0]),
            old.topics[0] == topics * (topics + 1) // 2,
            old.topics[0],
        ),
    ]


def _fencing(mean: Mean) -> list[Figure]:
    partitions = SEED_TOPICS * SEED_PARTITIONS * SEED_REPLICAS // SEED_BROKERS
    observers = SEED_BROKERS - 1
    replica, sent, fenced = (
        partitions * ISR_CHANGE_BYTES,
        partitions * ISR_CHANGE_BYTES * observers,
        FENCE_BYTES * observers,
    )
    ours = {way: {name: mean("seed", way, name) for name in _SEED_METRICS} for way in ("record", "event")}
    by_record, by_event = ours["record"], ours["event"]
    decided, events = by_record["records"] - 1, by_event["records"]  # one more says that the broker is fenced
    mib, share = f"{replica / MIB:.2f} MiB", f"{sent / MIB:.3f} MiB"
    return [
        _figure("IsrChange records of one failure", "30,000", number(decided), decided == 30_000, decided),
        _figure("bytes of a record", "40", f"{by_record['record_bytes']:.0f}", None, by_record["record_bytes"]),
        _figure("written by a replica, 40-byte records", "1.14 MiB", mib, None, replica),
        _figure("sent to 99 brokers, 40-byte records", "113.29 MiB", share, None, sent),
        _measured("written by a replica, Kafka's own records", "1.14 MiB", by_record["replica_bytes"]),
        _measured("sent to 99 brokers, Kafka's own records", "113.29 MiB", by_record["sent_bytes"]),
        _measured(f"the same, {_FRAMED}", "113.29 MiB", by_record["sent_as_responses_bytes"]),
        _figure("event records of one failure", "1", number(events), events == 1, events),
        _figure("sent to 99 brokers, an event of 8 bytes", "0.77 KiB", f"{fenced / KIB:.2f} KiB", None, fenced),
        _measured(
            f"the same, Kafka's own record of {by_event['record_bytes']:.0f} bytes", "0.77 KiB", by_event["sent_bytes"]
        ),
        _measured(f"the same, {_FRAMED}", "0.77 KiB", by_event["sent_as_responses_bytes"]),
    ]


_FRAMED = "with batch framing, in Fetch responses"


def _figure(what: str, says: str, computed: str, holds: bool | None, value: float) -> Figure:
    return Figure("630", what, says, computed, holds, float(value))


def _measured(what: str, says: str, value: float) -> Figure:
    """For comparison only: records of this code are larger than the proposal's."""
    return _figure(what, says, binary_size(value), None, value)


_SEED_METRICS = ("records", "record_bytes", "replica_bytes", "sent_bytes", "sent_as_responses_bytes")


class Reads(NamedTuple):
    """MB a second that are read to keep a state small, second by second added up."""

    head: float
    offset_map: float
    copied: float
    seconds_between: float


def compaction_reads(state_mb: float, change_mb_s: float, clean_ratio: float, cycles: int = 4) -> Reads:
    """Log compaction of a state that keeps its size: it begins when `clean_ratio` of the state was changed."""
    head = offset_map = copied = dirty = 0.0
    seconds = done = 0
    while done < cycles:
        seconds += 1
        dirty += change_mb_s
        head += change_mb_s
        if dirty >= clean_ratio * state_mb:
            offset_map += dirty
            copied += state_mb + dirty
            dirty, done = 0.0, done + 1
    return Reads(head / seconds, offset_map / seconds, copied / seconds, seconds / cycles)


def _snapshots() -> list[Figure]:
    reads = compaction_reads(STATE_MB, CHANGE_MB_S, CLEAN_RATIO)
    ratio = SnapshotLimits().changed_records_ratio_min
    between = SnapshotLimits().record_bytes_between
    return [
        _figure("read with snapshots: the head of the log alone", "1 MB/s", f"{CHANGE_MB_S:g} MB/s", None, CHANGE_MB_S),
        _figure("read with compaction: the head of the log", "1 MB/s", f"{reads.head:g} MB/s", None, reads.head),
        _figure(
            "read with compaction: the map of offsets", "1 MB/s", f"{reads.offset_map:g} MB/s", None, reads.offset_map
        ),
        _figure("read with compaction: what is copied", "3 MB/s", f"{reads.copied:g} MB/s", None, reads.copied),
        _figure("seconds between two compactions", "50", f"{reads.seconds_between:g}", None, reads.seconds_between),
        Figure("630", "metadata.snapshot.min.changed_records.ratio", "0.5", f"{ratio:g}", ratio == 0.5, ratio),
        Figure(
            "630",
            "metadata.log.max.record.bytes.between.snapshots",
            "20 MB",
            binary_size(between),
            between == 20 * MIB,
            between,
        ),
    ]
