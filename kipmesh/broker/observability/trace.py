"""The trace of a broker: what requests cost and saved, as JSON records in the topic `__mesh_trace`; off by default.

Traced are fetches, produce requests and metadata requests, each by a decision of its own (`mesh.trace.sample`), and all
snapshots of the metadata. An entry is made where the server has request and response and the bytes of both, right after
the handler returned: sessions, roles and racks are still as they were when it answered. The request's path has no more
than that and an append to a bounded queue.

`TraceWriter` creates the topic at the first write, and writes by produce requests as any client does. A write that
fails loses its entries, which are counted; while the topic cannot be created or has no leader, or its leader does not
know of it yet, they wait in their bounded queue. Each broker writes to one partition.

What only moves the trace is not traced, or each entry would make others: exchanges all of whose partitions are of
`__mesh_trace`. They are counted by themselves, so that the trace and the broker's metrics add up.

Invariants: what is in the queue is at most `mesh.trace.queue.max`; nothing here fails a request; every entry that was
sampled is written, waits, or is counted as dropped. docs/jobs.md has the fields.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh import messages as m
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core import record_batch
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.fetch_session import FetchKind, FetchSessionCache
from kipmesh.core.fetch_session.metrics import (
    REQUEST_PARTITION_BYTES,
    RESPONSE_PARTITION_BYTES,
    FetchSessionMetrics,
)
from kipmesh.core.metadata.image import TopicState
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.quorum.metrics import SnapshotSeen
from kipmesh.storage.log.log import Log
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.grpc.server import RequestContext
from kipmesh.transport.pipeline import Observer

log = structlog.get_logger(__name__)

TEXT_MAX: Final = 255
"""Longest client id or rack in an entry."""
TRACE_TOPIC: Final = "__mesh_trace"
CLIENT_ID: Final = "mesh-trace"
ENTRIES_MAX: Final = 1000
"""Of one request."""
BATCH_BYTES_MAX: Final = 256 << 10
"""Of the JSON of one batch: far below any `max.message.bytes` that makes sense."""
TIMEOUT_MS: Final = 5000
CREATE_PAUSE_MS: Final = 5000
SEGMENTS: Final = 8
"""Of a partition at its `retention.bytes`: what is deleted goes by whole segments."""
SEGMENT_BYTES_MIN: Final = 1 << 20
SEGMENT_BYTES_MAX: Final = 64 << 20
SEGMENT_MS: Final = 3_600_000
_LATER: Final = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER}
)
"""Of a leader whose metadata is behind ours, or the other way round: nothing was written."""
Entry = dict[str, Any]


class LastFetch(FetchSessionMetrics):
    """A session cache's counters that also know what the fetch that was answered last left out."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = FetchKind.ERROR
        self.not_asked = 0
        self.not_answered = 0

    def answered(self, kind: FetchKind) -> None:
        """See FetchSessionMetrics."""
        super().answered(kind)
        self.kind, self.not_asked, self.not_answered = kind, 0, 0

    def saved(self, not_asked: int, not_answered: int) -> None:
        """See FetchSessionMetrics."""
        super().saved(not_asked, not_answered)
        self.not_asked, self.not_answered = not_asked, not_answered


class TraceQueue:
    """Entries that wait to be written, within limits, and counts of what came and what was left out."""

    def __init__(self, queue_max: int, rate_max: int, now_ms: Callable[[], int] = monotonic_ms) -> None:
        self.sampled: Counter[str] = Counter()
        """Entries by kind, those included that a limit dropped."""
        self.dropped: Counter[str] = Counter({"rate": 0, "queue": 0, "write": 0})
        self.written = 0
        self._queue_max = queue_max
        self._rate_max = rate_max
        self._now_ms = now_ms
        self._entries: deque[Entry] = deque()
        self._second = -1
        self._in_second = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry, or count why not."""
        self.sampled[entry["kind"]] += 1
        second = self._now_ms() // 1000
        if second != self._second:
            self._second, self._in_second = second, 0
        if self._in_second >= self._rate_max:
            self.dropped["rate"] += 1
        elif len(self._entries) >= self._queue_max:
            self.dropped["queue"] += 1
        else:
            self._in_second += 1
            self._entries.append(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Entries that were taken and are still to be written; those without room by now are dropped."""
        room = max(0, self._queue_max - len(self._entries))
        self.dropped["queue"] += max(0, len(entries) - room)
        self._entries.extendleft(reversed(entries[:room]))

    def take(self, most: int) -> list[Entry]:
        """The oldest entries, no longer in the queue."""
        return [self._entries.popleft() for _ in range(min(most, len(self._entries)))]


@dataclass(eq=False)
class TraceWriter:
    """One broker's way to the topic."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    forwarder: Forwarder
    pool: ConnectionPool

    def __post_init__(self) -> None:
        self._create_after_ms = 0

    async def flush(self, queue: TraceQueue, status: Callable[[], Entry]) -> None:
        """Write what is in the queue now, with the status of before."""
        topic = self.hosted_replicas.image.topic_by_name(TRACE_TOPIC)
        if topic is None:
            await self._create()
            return
        index = self.config.node_id % len(topic.partitions)
        endpoints = self.hosted_replicas.endpoints(self.config.inter_broker_listener_name)
        leader = endpoints.get(topic.partitions[index].leader)
        if leader is None:
            return
        address, waiting = f"{leader.host}:{leader.port}", len(queue)
        while waiting > 0:
            entries = queue.take(min(waiting, ENTRIES_MAX))
            waiting -= len(entries)
            undecided = len(entries)
            try:
                batches = await asyncio.to_thread(list, batches_of([status(), *entries], wall_ms()))
                for number, (batch, inside) in enumerate(batches):
                    error = await self._send(address, topic, index, batch)
                    if error in _LATER:
                        undecided = 0
                        queue.put_back([entry for _, rest in batches[number:] for entry in rest])
                        return
                    undecided -= len(inside)
                    if error:
                        queue.dropped["write"] += len(inside)
                    else:
                        queue.written += len(inside)
            finally:  # what was taken when something raised, or the broker ends, is nowhere else
                queue.dropped["write"] += undecided

    async def _send(self, address: str, topic: TopicState, index: int, batch: bytes) -> ErrorCode:
        """What the leader says; without an answer NETWORK_EXCEPTION: the batch may be in the log."""
        data = m.TopicProduceData(topic.name, topic.topic_id, [m.PartitionProduceData(index, batch)])
        request = m.ProduceRequest(None, 1, TIMEOUT_MS, [data])
        try:
            response = await self.pool.get(address).call("Broker", "Produce", request, TIMEOUT_MS / 1000)
            error = ErrorCode(response.responses[0].partition_responses[0].error_code)
        except (TransportError, KafkaError, IndexError, ValueError) as failure:
            log.warning("trace not written", address=address, error=str(failure))
            return ErrorCode.NETWORK_EXCEPTION
        if error:
            log.warning("trace not written", address=address, error=error.name)
        return error

    async def _create(self) -> None:
        """Make the topic; it is found in the metadata later."""
        if monotonic_ms() < self._create_after_ms:
            return
        config = self.config
        retention_bytes = config.mesh_trace_topic_retention_bytes
        segment_bytes = max(SEGMENT_BYTES_MIN, min(retention_bytes // SEGMENTS, SEGMENT_BYTES_MAX))
        configs = {
            "cleanup.policy": "delete",
            "retention.ms": config.mesh_trace_topic_retention_ms,
            "retention.bytes": retention_bytes,
            "segment.bytes": SEGMENT_BYTES_MAX if retention_bytes < 0 else segment_bytes,
            "segment.ms": SEGMENT_MS,
            "min.insync.replicas": 1,
        }
        exists = await self.forwarder.create_internal_topic(
            TRACE_TOPIC,
            config.mesh_trace_topic_num_partitions,
            config.mesh_trace_topic_replication_factor,
            configs,
            TIMEOUT_MS / 1000,
            RequestContext(CLIENT_ID, ""),
        )
        if not exists:
            self._create_after_ms = monotonic_ms() + CREATE_PAUSE_MS


def batches_of(entries: Sequence[Entry], now_ms: int) -> Iterator[tuple[bytes, list[Entry]]]:
    """Record batches and the entries that each has, the status not among them."""
    records: list[tuple[bytes | None, bytes | None]] = []
    inside: list[Entry] = []
    size = 0
    for entry in entries:
        value = json.dumps(entry, separators=(",", ":")).encode()
        if records and size + len(value) > BATCH_BYTES_MAX:
            yield record_batch.build(records, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms), inside
            records, inside, size = [], [], 0
        records.append((str(entry["kind"]).encode(), value))
        size += len(value)
        if entry["kind"] != "status":
            inside.append(entry)
    if records:
        yield record_batch.build(records, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms), inside


@dataclass(eq=False)
class RequestTrace:
    """See the module. Belongs to the broker's event loop.

    From here on `sessions` counts by `LastFetch`. `draw` gives numbers from 0 to below 1.
    """

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    sessions: FetchSessionCache
    registry: CollectorRegistry
    metadata_log: Callable[[], Log | None]
    _: KW_ONLY
    draw: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.queue = TraceQueue(self.config.mesh_trace_queue_max, self.config.mesh_trace_rate_max)
        self.own: Counter[str] = Counter({"fetch": 0, "produce": 0, "metadata": 0})
        """Sampled exchanges that only moved the trace, by kind."""
        self.own_saved_bytes = 0
        """What self.sessions saved in those."""
        self._draw = self.draw or random.Random().random
        self._last = self.sessions.metrics = LastFetch()
        self._started_ms = wall_ms()
        self._common = {
            "broker": self.config.node_id,
            "broker_rack": self.config.broker_rack,
            "started": self._started_ms,
        }
        self.registry.register(_TraceCollector(self))

    async def run(self, forwarder: Forwarder, pool: ConnectionPool, ready: Callable[[], bool]) -> None:
        """Write what is queued, until cancelled."""
        writer = TraceWriter(self.config, self.hosted_replicas, forwarder, pool)
        while True:
            await asyncio.sleep(self.config.mesh_trace_flush_interval_ms / 1000)
            try:
                if len(self.queue) and ready():
                    await writer.flush(self.queue, self._status)
            except Exception as error:  # the broker goes on without its trace
                log.warning("trace not written", error=f"{type(error).__name__}: {error}")

    def observers(self) -> Mapping[str, Observer]:
        """For the server."""
        fetch, produce, metadata = (self._sampled(make) for make in (self._fetch, self._produce, self._metadata))
        return {
            "Fetch": fetch,
            "Produce": produce,
            "Metadata": metadata,
        }

    def _sampled(self, make: Callable[[RequestContext, Any, Any], Entry | None]) -> Observer:
        sample, draw = self.config.mesh_trace_sample, self._draw

        def observe(who: RequestContext, request: Any, response: Any, request_bytes: int, response_bytes: int) -> None:
            if sample < 1 and draw() >= sample:
                return
            try:
                entry = make(who, request, response)
                if entry is not None:
                    entry |= {"sample": sample, "request_bytes": request_bytes, "response_bytes": response_bytes}
                    self._put(entry)
            except Exception as error:  # a request is not to fail for its trace
                log.error("exchange not traced", error=f"{type(error).__name__}: {error}")

        return observe

    def _put(self, entry: Entry) -> None:
        self.queue.put({"v": 1, "ts": wall_ms(), **self._common, **entry})

    def _status(self) -> Entry:
        """What was sampled and dropped since the start: an entry that goes with each write."""
        queue = self.queue
        return {
            "v": 1,
            "ts": wall_ms(),
            **self._common,
            "kind": "status",
            "sample": 1.0,
            "sampled": dict(queue.sampled),
            "dropped": dict(queue.dropped),
            "own": dict(self.own),
        }

    # --- fetches -----------------------------------------------------------------------------------------------------

    def _fetch(self, who: RequestContext, request: m.FetchRequest, response: m.FetchResponse) -> Entry | None:
        last, error = self._last, response.error_code
        not_asked, not_answered = (0, 0) if error else (last.not_asked, last.not_answered)
        saved_request, saved_response = not_asked * REQUEST_PARTITION_BYTES, not_answered * RESPONSE_PARTITION_BYTES
        if self._is_own(
            (topic.topic, topic.topic_id) for topics in (request.topics, response.responses) for topic in topics
        ):
            self.own["fetch"] += 1
            self.own_saved_bytes += saved_request + saved_response
            return None
        named = _partition_count(request.topics)
        entry: Entry = {
            "kind": "fetch",
            "client": who.client_id[:TEXT_MAX],
            "rack": request.rack_id[:TEXT_MAX],
            "replica": request.replica_id,
            "session": response.session_id or request.session_id,
            "epoch": request.session_epoch,
            "fetch": FetchKind.ERROR.value if error else last.kind.value,
            "error": error,
            "named": named,
            "answered": _partition_count(response.responses),
            "session_partitions": named + not_asked,
            "saved_request_bytes": saved_request,
            "saved_response_bytes": saved_response,
            "record_bytes": sum(len(data.records) for topic in response.responses for data in topic.partitions),
        }
        if request.replica_id < 0:
            entry |= self._closeness(request.rack_id, response.responses)
        return entry

    def _closeness(self, client_rack: str, topics: Sequence[m.FetchableTopicResponse]) -> Entry:
        """Bytes of a consumer's fetch by this broker's role, as its metrics count them, and what stayed in the rack.

        Saved are those that a follower in the client's rack sent while the partition's leader is in another one.
        """
        here = self.config.broker_rack
        relation = "unknown" if not (client_rack and here) else "same" if client_rack == here else "cross"
        leader_bytes = follower_bytes = saved = 0
        brokers = self.hosted_replicas.image.brokers
        for topic in topics:
            replicas, _ = self.hosted_replicas.find_topic(topic.topic_id, topic.topic)
            for data in topic.partitions:
                replica = replicas.get(data.partition_index) if data.records else None
                if replica is None:
                    continue
                if replica.leader is not None:
                    leader_bytes += len(data.records)
                    continue
                follower_bytes += len(data.records)
                leader = brokers.get(replica.leader_id)
                if relation == "same" and leader is not None and leader.rack != client_rack:
                    saved += len(data.records)
        return {
            "relation": relation,
            "leader_bytes": leader_bytes,
            "follower_bytes": follower_bytes,
            "saved_cross_rack_bytes": saved,
        }

    def _is_own(self, topics: Iterable[tuple[str, bytes]]) -> bool:
        """Whether there are topics, and all of them are the trace's."""
        topic = self.hosted_replicas.image.topic_by_name(TRACE_TOPIC)
        own_id = None if topic is None else topic.topic_id
        is_own = False
        for name, topic_id in topics:
            if name != TRACE_TOPIC and (not topic_id or topic_id != own_id):
                return False
            is_own = True
        return is_own

    # --- the others --------------------------------------------------------------------------------------------------

    def _produce(self, who: RequestContext, request: m.ProduceRequest, response: m.ProduceResponse) -> Entry | None:
        if self._is_own((topic.name, topic.topic_id) for topic in request.topic_data):
            self.own["produce"] += 1
            return None
        count = records = size = 0
        for asked, told in zip(request.topic_data, response.responses, strict=False):
            for data, result in zip(asked.partition_data, told.partition_responses, strict=False):
                count += 1
                if not result.error_code:
                    records += _record_count(data.records)
                    size += len(data.records)
        return {
            "kind": "produce",
            "client": who.client_id[:TEXT_MAX],
            "partitions": count,
            "records": records,
            "record_bytes": size,
        }

    def _metadata(self, who: RequestContext, request: m.MetadataRequest, response: m.MetadataResponse) -> Entry | None:
        asked = request.topics
        if asked is not None and self._is_own((topic.name or "", topic.topic_id) for topic in asked):
            self.own["metadata"] += 1
            return None
        return {
            "kind": "metadata",
            "client": who.client_id[:TEXT_MAX],
            "rack": request.rack_id[:TEXT_MAX],
            "all_topics": asked is None,
            "asked": len(asked or ()),
            "answered": sum(not topic.error_code for topic in response.topics),
            "partitions": _partition_count(response.topics),
            "error": response.error_code,
        }

    def snapshot(self, seen: SnapshotSeen) -> None:
        """A snapshot was made, fetched or loaded."""
        try:
            self._put(self._snapshot(seen))
        except Exception as error:  # the metadata quorum calls this, and is not to fail for the trace
            log.error("snapshot not traced", error=f"{type(error).__name__}: {error}")

    def _snapshot(self, seen: SnapshotSeen) -> Entry:
        """Beside the snapshot what the log up to there would be to replay.

        Offsets begin at 0, so that the records are exact; bytes are those of the log that is there, by its mean batch.
        """
        end, metadata_log = seen.snapshot_id.end_offset, self.metadata_log()
        replay_bytes, is_whole = None, False
        if metadata_log is not None and end > 0:
            begin = metadata_log.segment_base_offsets[0]
            there = metadata_log.log_end_offset - begin
            is_whole = begin == 0 and metadata_log.log_end_offset == end
            replay_bytes = round(metadata_log.size_bytes * end / there) if there > 0 else None
        return {
            "kind": "snapshot",
            "sample": 1.0,
            "event": seen.event,
            "end_offset": end,
            "snapshot_epoch": seen.snapshot_id.epoch,
            "records": seen.records,
            "bytes": seen.size_bytes,
            "took_ms": seen.took_ms,
            "replay_records": end,
            "replay_bytes": replay_bytes,
            "replay_bytes_exact": is_whole,
        }


def _partition_count(topics: Iterable[Any]) -> int:
    return sum(len(topic.partitions) for topic in topics)


def _record_count(records: bytes) -> int:
    """Records of a request's batches; those of what is none do not count."""
    count = 0
    with suppress(CorruptRecordError):
        for _, header in record_batch.iterate(records):
            count += header.record_count
    return count


class _TraceCollector(Collector):
    """The trace's own counters, read at each scrape: in another thread, so tables are copied before they are walked."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace

    def collect(self) -> Iterator[Metric]:
        """Names of ours."""
        trace, prefix = self._trace, "kipmesh_broker_trace_"
        queue = trace.queue
        for name, text, label, counts in (
            ("sampled", "Entries of the trace, those that were dropped included.", "kind", queue.sampled),
            ("dropped", "Entries of the trace that were dropped, by reason.", "reason", queue.dropped),
            ("own", "Sampled exchanges that only moved the trace and are not in it.", "kind", trace.own),
        ):
            family = CounterMetricFamily(prefix + name, text, labels=[label])
            for value, count in dict(counts).items():
                family.add_metric([value], count)
            yield family
        yield CounterMetricFamily(prefix + "written", "Entries of the trace that were written.", queue.written)
        yield CounterMetricFamily(
            prefix + "own_saved_bytes",
            "Bytes that sessions saved in exchanges that are not traced.",
            trace.own_saved_bytes,
        )
        yield GaugeMetricFamily(prefix + "queued", "Entries of the trace that wait to be written.", len(queue))
