"""Reads the final state of a run: all records through a new consumer, then the logs of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from kipmesh import messages as m
from kipmesh.client import AdminClient, Consumer, TopicMetadata, TopicPartition
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.transport.grpc.client import Connection, ConnectionPool, TransportError
from kipmesh_chaos.faults import PartitionView
from kipmesh_chaos.history import Dump, End, NotRecovered, Read, ReaderKind
from kipmesh_chaos.recorder import Recorder, RunClients
from kipmesh_chaos.workload import CONSUMER_CONFIG, by_partition, decode_batches

BATCHES_OF_A_DUMP = 500
READER = "final"
SERVED_BYTES = 1 << 20

Batch = tuple[BatchHeader, list[tuple[int, str]]]
"""Header of a batch, and its records as (offset, value)."""


async def final_read(clients: RunClients, partitions: int, timeout_s: float) -> dict[int, int]:
    """Read all partitions with a new consumer up to their current end offsets and record the results. Returns the end
    offset of each partition; the dict is empty if the offsets are unavailable.

    Stops after `timeout_s` without progress or at a client error and records NotRecovered.
    """
    recorder = clients.recorder
    places = [TopicPartition(clients.topic, partition) for partition in range(partitions)]
    config = {**clients.config, **CONSUMER_CONFIG, "max.poll.records": "2000"}
    positions = dict.fromkeys(range(partitions), 0)
    ends: dict[int, int] = {}
    try:
        async with Consumer(clients.bootstrap, **config) as consumer:
            ends = {where.partition: end for where, end in (await consumer.end_offsets(places)).items()}
            consumer.assign(places)
            consumer.seek_to_beginning(places)
            deadline = asyncio.get_running_loop().time() + timeout_s
            while any(positions[partition] < end for partition, end in ends.items()):
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError
                found = by_partition(await consumer.poll(500))
                for partition, records in found.items():
                    positions[partition] = records[-1][0] + 1
                    recorder.add(Read(recorder.now, READER, ReaderKind.FINAL, partition, records))
                if found:  # the timeout limits the time without progress
                    deadline = asyncio.get_running_loop().time() + timeout_s
    except (KafkaError, TimeoutError) as error:
        text = f"the final read stopped at {positions} of {ends}: {error or f'no records for {timeout_s:g} s'}"
        recorder.add(NotRecovered(recorder.now, text))
    return ends


def record_ends(recorder: Recorder, ends: Mapping[int, int], partitions: Mapping[int, PartitionView]) -> None:
    """Record an End event for each partition in `ends` whose state is known, with the end offset as high watermark, the
    replicas and the ISR.
    """
    for partition, end in ends.items():
        state = partitions.get(partition)
        if state is not None:
            recorder.add(End(recorder.now, partition, end, list(state.replicas), list(state.isr)))


def record_stopped(recorder: Recorder, brokers: Mapping[int | None, Path], topic: str) -> None:
    """Record the logs of stopped brokers. `brokers` maps node ids to data directories. An unreadable log becomes a
    note. Blocks.
    """
    for node_id, data in brokers.items():
        for directory in sorted(data.glob(f"{topic}-*")):
            partition = directory.name.rpartition("-")[2]
            if node_id is not None and partition.isdigit():
                _record_replica(recorder, node_id, int(partition), directory)


async def record_served(
    clients: RunClients, addresses: Mapping[int | None, str], ends: Mapping[int, int], timeout_s: float
) -> None:
    """Record for each replica of a running cluster the batches that it serves below the end offset.

    `addresses` has the brokers by node id, `ends` the end offsets by partition. Adds a note for each replica that does
    not serve everything within `timeout_s`. Raises KafkaError if the topic cannot be described.
    """
    async with AdminClient(",".join(addresses.values()), **clients.config) as admin:
        (topic,) = await admin.describe_topics([clients.topic])
    pool = ConnectionPool.of("kipmesh-chaos-dump", ClientSslConfig.parse(clients.config))
    try:
        for number, partition in topic.partitions.items():
            for node_id in partition.replicas:
                found: list[Batch] = []
                try:
                    async with asyncio.timeout(timeout_s):
                        await _read_to(pool.get(addresses.get(node_id, "")), topic, number, ends.get(number, 0), found)
                except (KafkaError, TransportError, TimeoutError) as error:
                    text = f"replica {node_id} of partition {number} does not serve its whole log: {error!r}"
                    clients.recorder.note(text)
                _add(clients.recorder, node_id, number, found)
    finally:
        await pool.close()


async def _read_to(broker: Connection, topic: TopicMetadata, partition: int, end: int, found: list[Batch]) -> None:
    """Fetch all batches below `end` from one replica and append them to `found`. Waits for missing batches without a
    time limit. Raises KafkaError, TransportError.
    """
    cursor = 0
    while cursor < end:
        partitions = [m.FetchPartition(partition, -1, cursor, partition_max_bytes=SERVED_BYTES)]
        request = m.FetchRequest(
            max_wait_ms=100,
            max_bytes=SERVED_BYTES,
            topics=[m.FetchTopic(topic.name, topic.topic_id, partitions)],
            session_epoch=-1,
        )
        response: m.FetchResponse = await broker.call("Broker", "Fetch", request, 5.0)
        batches: list[Batch] = []
        for one in [one for topic in response.responses for one in topic.partitions]:
            if one.error_code:
                raise KafkaError(ErrorCode.of(one.error_code))
            batches += decode_batches(one.records, allow_partial=True)
        if not batches:
            await asyncio.sleep(0.1)
            continue
        found += batches
        cursor = batches[-1][0].next_offset


def _record_replica(recorder: Recorder, node_id: int, partition: int, directory: Path) -> None:
    found: list[Batch] = []
    try:
        for segment in sorted(directory.glob("*.log")):
            found.extend(decode_batches(segment.read_bytes()))
    except (OSError, KafkaError) as error:
        recorder.note(f"the log of replica {node_id} of partition {partition} cannot be read: {error}")
    _add(recorder, node_id, partition, found)


def _add(recorder: Recorder, node_id: int, partition: int, found: Sequence[Batch]) -> None:
    start = found[0][0].base_offset if found else 0
    end = found[-1][0].next_offset if found else 0
    for first in range(0, max(len(found), 1), BATCHES_OF_A_DUMP):
        part = found[first : first + BATCHES_OF_A_DUMP]
        records = [one for _header, records in part for one in records]
        batches = [
            (header.base_offset, header.last_offset, header.crc, header.partition_leader_epoch) for header, _ in part
        ]
        recorder.add(Dump(recorder.now, node_id, partition, start, end, records, batches))
