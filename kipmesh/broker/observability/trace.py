"""Request trace of a broker: costs and savings of requests, as JSON records in the topic `__mesh_trace`.

Off by default. Each Fetch, Produce and Metadata request is traced with probability `mesh.trace.sample`, and every
metadata snapshot. The server calls the observers right after the handler returned, so sessions, roles and racks are
those of the response. A traced request costs that call and an append to a bounded queue. Requests that concern only
`__mesh_trace` are counted, not traced, or each entry would cause others.

`TraceWriter` creates the topic and writes with Produce requests. A failed write drops its entries. Entries stay queued
while the topic has no leader. Invariants: the queue has at most `mesh.trace.queue.max` entries; tracing never fails a
request; each sampled entry is written, queued or counted as dropped. docs/jobs.md lists the fields.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kipmesh import messages as m
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.observability.metrics import counter_family
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
"""Maximum length of a client id or rack in an entry."""
TRACE_TOPIC: Final = "__mesh_trace"
CLIENT_ID: Final = "mesh-trace"
ENTRIES_MAX: Final = 1000
"""Maximum entries per write."""
BATCH_BYTES_MAX: Final = 256 << 10
"""Maximum JSON bytes per batch, far below any reasonable `max.message.bytes`."""
TIMEOUT_MS: Final = 5000
CREATE_PAUSE_MS: Final = 5000
SEGMENTS: Final = 8
"""Number of segments of a partition at its `retention.bytes`, because retention deletes whole segments."""
SEGMENT_BYTES_MIN: Final = 1 << 20
SEGMENT_BYTES_MAX: Final = 64 << 20
SEGMENT_MS: Final = 3_600_000
_RETRIABLE: Final = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER}
)
"""Errors of a leader whose metadata differs from this broker's: nothing was written."""
Entry = dict[str, Any]


class LastFetch(FetchSessionMetrics):
    """`FetchSessionMetrics` that also keeps the values of the last completed fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = FetchKind.ERROR
        self.omitted_requested = self.omitted_returned = 0

    def completed(self, kind: FetchKind) -> None:
        """Count a completed fetch and keep its kind."""
        super().completed(kind)
        self.kind, self.omitted_requested, self.omitted_returned = kind, 0, 0

    def saved(self, omitted_requested: int, omitted_returned: int) -> None:
        """Count and keep the numbers of partitions that the session omitted from the request and the response."""
        super().saved(omitted_requested, omitted_returned)
        self.omitted_requested, self.omitted_returned = omitted_requested, omitted_returned


@dataclass(eq=False)
class TraceQueue:
    """A bounded queue of entries to write. `rate_max` is in entries per second; `now_ms` is a monotonic clock."""

    queue_max: int
    rate_max: int
    now_ms: Callable[[], int] = monotonic_ms

    def __post_init__(self) -> None:
        self.sampled: Counter[str] = Counter()
        """Entries by kind, including dropped ones."""
        self.dropped: Counter[str] = Counter({"rate": 0, "queue": 0, "write": 0})
        self.written = 0
        self._entries: deque[Entry] = deque()
        self._second = -1
        self._in_second = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Add an entry, or count it as dropped if the queue is full or had `rate_max` entries in this second."""
        self.sampled[entry["kind"]] += 1
        second = self.now_ms() // 1000
        if second != self._second:
            self._second, self._in_second = second, 0
        if self._in_second >= self.rate_max:
            self.dropped["rate"] += 1
        elif len(self._entries) >= self.queue_max:
            self.dropped["queue"] += 1
        else:
            self._in_second += 1
            self._entries.append(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Return entries from `take` to the front of the queue. The last ones are dropped if there is no room."""
        room = max(0, self.queue_max - len(self._entries))
        self.dropped["queue"] += max(0, len(entries) - room)
        self._entries.extendleft(reversed(entries[:room]))

    def take(self, most: int) -> list[Entry]:
        """Remove and return up to `most` of the oldest entries."""
        return [self._entries.popleft() for _ in range(min(most, len(self._entries)))]


@dataclass(eq=False)
class TraceWriter:
    """Writes entries to this broker's partition of the trace topic."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    forwarder: Forwarder
    pool: ConnectionPool

    def __post_init__(self) -> None:
        self._create_after_ms = 0

    async def flush(self, queue: TraceQueue, status: Callable[[], Entry]) -> None:
        """Write the queued entries to the trace topic, up to `ENTRIES_MAX` and the current `status` entry at a time.

        If the topic is missing, only creates it. Entries stay queued if the topic is missing or has no leader, and
        after errors in `_RETRIABLE`. Entries of any other failed write are dropped.
        """
        topic = self.hosted_replicas.image.topic_by_name(TRACE_TOPIC)
        if topic is None:
            await self._create()
            return
        index = self.config.node_id % len(topic.partitions)
        endpoints = self.hosted_replicas.endpoints(self.config.inter_broker_listener_name)
        leader = endpoints.get(topic.partitions[index].leader)
        if leader is None:
            return
        address, remaining = f"{leader.host}:{leader.port}", len(queue)
        while remaining > 0:
            entries = queue.take(min(remaining, ENTRIES_MAX))
            remaining -= len(entries)
            undecided = len(entries)
            try:
                batches = await asyncio.to_thread(list, batches_of([status(), *entries], wall_ms()))
                for number, (batch, inside) in enumerate(batches):
                    error = await self._send(address, topic, index, batch)
                    if error in _RETRIABLE:
                        undecided = 0
                        queue.put_back([entry for _, rest in batches[number:] for entry in rest])
                        return
                    undecided -= len(inside)
                    if error:
                        queue.dropped["write"] += len(inside)
                    else:
                        queue.written += len(inside)
            finally:  # after an exception, entries of this request are dropped
                queue.dropped["write"] += undecided

    async def _send(self, address: str, topic: TopicState, index: int, batch: bytes) -> ErrorCode:
        """Return the leader's error code, or NETWORK_EXCEPTION without a response: the batch may be in the log."""
        data = m.TopicProduceData(topic.name, topic.topic_id, [m.PartitionProduceData(index, batch)])
        request = m.ProduceRequest(None, 1, TIMEOUT_MS, [data])
        try:
            response = await self.pool.get(address).call("Broker", "Produce", request, TIMEOUT_MS / 1000)
            error = ErrorCode(response.responses[0].partition_responses[0].error_code)
        except (TransportError, KafkaError, IndexError, ValueError) as failure:
            log.warning("trace write failed", address=address, error=str(failure))
            return ErrorCode.NETWORK_EXCEPTION
        if error:
            log.warning("trace write failed", address=address, error=error.name)
        return error

    async def _create(self) -> None:
        """Create the trace topic; a later flush finds it in the metadata. Tries at most once per `CREATE_PAUSE_MS`."""
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
    """Encode entries as record batches. Yields each batch and the list of its entries, without status entries."""
    batches: list[list[tuple[Entry, bytes]]] = []
    room = 0
    for entry in entries:
        value = json.dumps(entry, separators=(",", ":")).encode()
        if len(value) > room or not batches:
            batches.append([])
            room = BATCH_BYTES_MAX
        batches[-1].append((entry, value))
        room -= len(value)
    for batch in batches:
        records = [(str(entry["kind"]).encode(), value) for entry, value in batch]
        inside = [entry for entry, _ in batch if entry["kind"] != "status"]
        yield record_batch.build(records, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms), inside


@dataclass(eq=False)
class RequestTrace:
    """The trace of one broker. Belongs to the event loop.

    Replaces the counters of `sessions` with a `LastFetch`. `metadata_log` returns the metadata log, or None before it
    is open; `draw` returns random numbers in [0, 1).
    """

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    sessions: FetchSessionCache
    metadata_log: Callable[[], Log | None]
    draw: Callable[[], float] = field(default_factory=lambda: random.Random().random, kw_only=True)

    def __post_init__(self) -> None:
        self.queue = TraceQueue(self.config.mesh_trace_queue_max, self.config.mesh_trace_rate_max)
        self.own: Counter[str] = Counter({"fetch": 0, "produce": 0, "metadata": 0})
        """Sampled requests that concern only the trace topic, by kind."""
        self.own_saved_bytes = 0
        """Bytes that fetch sessions saved in those requests."""
        self._last = self.sessions.metrics = LastFetch()
        self._common = {
            "broker": self.config.node_id,
            "broker_rack": self.config.broker_rack,
            "started": wall_ms(),
        }

    async def run(self, forwarder: Forwarder, pool: ConnectionPool, ready: Callable[[], bool]) -> None:
        """Write queued entries periodically while `ready()` is true, until cancelled. Errors are only logged."""
        writer = TraceWriter(self.config, self.hosted_replicas, forwarder, pool)
        while True:
            await asyncio.sleep(self.config.mesh_trace_flush_interval_ms / 1000)
            try:
                if len(self.queue) and ready():
                    await writer.flush(self.queue, self._status)
            except Exception as error:  # tracing must not end the broker
                log.warning("trace write failed", error=f"{type(error).__name__}: {error}")

    def observers(self) -> Mapping[str, Observer]:
        """Return the observers of the traced APIs by API name, for the request pipeline."""
        return {
            "Fetch": self._sampled(self._fetch),
            "Produce": self._sampled(self._produce),
            "Metadata": self._sampled(self._metadata),
        }

    def _sampled(self, make: Callable[[RequestContext, Any, Any], Entry | None]) -> Observer:
        sample, draw = self.config.mesh_trace_sample, self.draw

        def observe(
            context: RequestContext, request: Any, response: Any, request_bytes: int, response_bytes: int
        ) -> None:
            if sample < 1 and draw() >= sample:
                return
            try:
                entry = make(context, request, response)
                if entry is not None:
                    entry |= {"sample": sample, "request_bytes": request_bytes, "response_bytes": response_bytes}
                    self._put(entry)
            except Exception as error:  # tracing must not fail a request
                log.error("request not traced", error=f"{type(error).__name__}: {error}")

        return observe

    def _put(self, entry: Entry) -> None:
        self.queue.put(self._stamped(entry))

    def _stamped(self, entry: Entry) -> Entry:
        return {"v": 1, "ts": wall_ms(), **self._common, **entry}

    def _status(self) -> Entry:
        """Return an entry with the number of entries that were sampled and dropped since the start."""
        return self._stamped(
            {
                "kind": "status",
                "sample": 1.0,
                "sampled": dict(self.queue.sampled),
                "dropped": dict(self.queue.dropped),
                "own": dict(self.own),
            }
        )

    # --- fetches -----------------------------------------------------------------------------------------------------

    def _fetch(self, context: RequestContext, request: m.FetchRequest, response: m.FetchResponse) -> Entry | None:
        last, error = self._last, response.error_code
        requested, returned = (0, 0) if error else (last.omitted_requested, last.omitted_returned)
        saved_request, saved_response = requested * REQUEST_PARTITION_BYTES, returned * RESPONSE_PARTITION_BYTES
        if self._is_own(
            (topic.topic, topic.topic_id) for topics in (request.topics, response.responses) for topic in topics
        ):
            self.own["fetch"] += 1
            self.own_saved_bytes += saved_request + saved_response
            return None
        named = _partition_count(request.topics)
        entry: Entry = {
            "kind": "fetch",
            "client": context.client_id[:TEXT_MAX],
            "rack": request.rack_id[:TEXT_MAX],
            "replica": request.replica_id,
            "session": response.session_id or request.session_id,
            "epoch": request.session_epoch,
            "fetch": FetchKind.ERROR.value if error else last.kind.value,
            "error": error,
            "named": named,
            "answered": _partition_count(response.responses),
            "session_partitions": named + requested,
            "saved_request_bytes": saved_request,
            "saved_response_bytes": saved_response,
            "record_bytes": sum(len(data.records) for topic in response.responses for data in topic.partitions),
        }
        if request.replica_id < 0:
            entry |= self._rack_bytes(request.rack_id, response.responses)
        return entry

    def _rack_bytes(self, client_rack: str, topics: Sequence[m.FetchableTopicResponse]) -> Entry:
        """Return a consumer's fetched bytes by role of the replica, and the bytes that did not cross racks.

        Bytes count as saved if a follower in the client's rack sent them while the leader is in another rack.
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
        """Whether there is at least one topic, and all are the trace topic."""
        topic = self.hosted_replicas.image.topic_by_name(TRACE_TOPIC)
        own_id = None if topic is None else topic.topic_id
        is_own = False
        for name, topic_id in topics:
            if name != TRACE_TOPIC and (not topic_id or topic_id != own_id):
                return False
            is_own = True
        return is_own

    # --- produce, metadata, snapshots --------------------------------------------------------------------------------

    def _produce(self, context: RequestContext, request: m.ProduceRequest, response: m.ProduceResponse) -> Entry | None:
        if self._is_own((topic.name, topic.topic_id) for topic in request.topic_data):
            self.own["produce"] += 1
            return None
        count = records = size = 0
        for topic, topic_response in zip(request.topic_data, response.responses, strict=False):
            for data, result in zip(topic.partition_data, topic_response.partition_responses, strict=False):
                count += 1
                if not result.error_code:
                    records += _record_count(data.records)
                    size += len(data.records)
        return {
            "kind": "produce",
            "client": context.client_id[:TEXT_MAX],
            "partitions": count,
            "records": records,
            "record_bytes": size,
        }

    def _metadata(
        self, context: RequestContext, request: m.MetadataRequest, response: m.MetadataResponse
    ) -> Entry | None:
        requested = request.topics
        if requested is not None and self._is_own((topic.name or "", topic.topic_id) for topic in requested):
            self.own["metadata"] += 1
            return None
        return {
            "kind": "metadata",
            "client": context.client_id[:TEXT_MAX],
            "rack": request.rack_id[:TEXT_MAX],
            "all_topics": requested is None,
            "asked": len(requested or ()),
            "answered": sum(not topic.error_code for topic in response.topics),
            "partitions": _partition_count(response.topics),
            "error": response.error_code,
        }

    def snapshot(self, seen: SnapshotSeen) -> None:
        """Add an entry about a snapshot that was made, fetched or loaded. Never raises."""
        try:
            self._put(self._snapshot(seen))
        except Exception as error:  # tracing must not fail the metadata quorum
            log.error("snapshot not traced", error=f"{type(error).__name__}: {error}")

    def _snapshot(self, seen: SnapshotSeen) -> Entry:
        """Return an entry that compares a snapshot with a replay of the log up to its end offset.

        Offsets begin at 0, so the number of records is exact. Bytes are estimated from the mean record size of the
        current log.
        """
        end, metadata_log = seen.snapshot_id.end_offset, self.metadata_log()
        replay_bytes, is_whole = None, False
        if metadata_log is not None and end > 0:
            begin = metadata_log.segment_base_offsets[0]
            length = metadata_log.log_end_offset - begin
            is_whole = begin == 0 and metadata_log.log_end_offset == end
            replay_bytes = round(metadata_log.size_bytes * end / length) if length > 0 else None
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

    def metrics(self) -> Iterator[Metric]:
        """Yield the trace's own counters. Callable from other threads."""
        queue, prefix = self.queue, "kipmesh_broker_trace_"
        for name, text, label, counts in (
            ("sampled", "Entries of the request trace, including dropped ones, by kind.", "kind", queue.sampled),
            ("dropped", "Entries of the request trace that were dropped, by reason.", "reason", queue.dropped),
            ("own", "Sampled requests that only write or read the trace, by kind.", "kind", self.own),
        ):
            yield counter_family(prefix + name, text, label, counts)
        yield CounterMetricFamily(prefix + "written", "Entries of the request trace that were written.", queue.written)
        text = "Bytes that fetch sessions saved in requests that only read the trace."
        yield CounterMetricFamily(prefix + "own_saved_bytes", text, self.own_saved_bytes)
        yield GaugeMetricFamily(prefix + "queued", "Entries of the request trace that wait for a write.", len(queue))


def _partition_count(topics: Iterable[Any]) -> int:
    return sum(len(topic.partitions) for topic in topics)


def _record_count(records: bytes) -> int:
    """Return the number of records in a request's batches, up to the first corrupt one."""
    count = 0
    with suppress(CorruptRecordError):
        for _, header in record_batch.iterate(records):
            count += header.record_count
    return count
