"""Writes a broker's trace to `__mesh_trace`, which is made at the first write, by produce requests as any client's.

A write that fails loses its entries, which are counted; while the topic cannot be made or has no leader, or its leader
does not know of it yet, they wait in their bounded queue. Each broker writes to one partition.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from kipmesh import messages as m
from kipmesh.core import record_batch
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import TopicState
from kipmesh.messages.table import CREATE_TOPICS
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.clock import monotonic_ms, wall_ms
from kipmesh.rpc.client import ConnectionPool, TransportError
from kipmesh.rpc.server import RequestContext

if TYPE_CHECKING:
    from kipmesh.node.broker.forwarder import Forwarder
    from kipmesh.node.broker.trace import TraceQueue

log = structlog.get_logger(__name__)

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


class TraceWriter:
    """One broker's way to the topic."""

    def __init__(
        self, config: BrokerConfig, partitions: Partitions, forwarder: Forwarder, pool: ConnectionPool
    ) -> None:
        self._config = config
        self._partitions = partitions
        self._forwarder = forwarder
        self._pool = pool
        self._create_after_ms = 0

    async def flush(self, queue: TraceQueue, status: Callable[[], Entry]) -> None:
        """Write what is in the queue now, with the status of before."""
        topic = self._partitions.image.topic_by_name(TRACE_TOPIC)
        if topic is None:
            await self._create()
            return
        index = self._config.node_id % len(topic.partitions)
        endpoints = self._partitions.endpoints(self._config.inter_broker_listener_name)
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
            response = await self._pool.get(address).call("Broker", "Produce", request, TIMEOUT_MS / 1000)
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
        config = self._config
        brokers = sum(not broker.fenced for broker in self._partitions.image.brokers.values())
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
        topic = m.CreatableTopic(
            TRACE_TOPIC,
            config.mesh_trace_topic_num_partitions,
            max(1, min(config.mesh_trace_topic_replication_factor, brokers)),
            configs=[m.ConfigEntry(key, str(value)) for key, value in configs.items()],
        )
        request = m.CreateTopicsRequest([topic], TIMEOUT_MS)
        response = await self._forwarder.forward(CREATE_TOPICS, request, RequestContext(CLIENT_ID, ""))
        result = response.topics[0]
        if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            self._create_after_ms = monotonic_ms() + CREATE_PAUSE_MS
            log.warning("topic not made", topic=TRACE_TOPIC, error=result.error_message)


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
