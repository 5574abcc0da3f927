"""What a run looks at when nobody writes any more: everything once more by a new consumer, then the replicas' files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kipmesh import messages as m
from kipmesh.chaos import values
from kipmesh.chaos.recorder import Recorder
from kipmesh.chaos.workload import CONSUMER_CONFIG
from kipmesh.client import AdminClient, Consumer, TopicPartition
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.rpc.client import ConnectionPool, TransportError
from kipmesh.testing.history import Dump, End, NotRecovered, Read, ReaderKind

BATCHES_OF_A_DUMP = 500
READER = "final"
SERVED_BYTES = 1 << 20

Batch = tuple[BatchHeader, list[tuple[int, str]]]
"""A batch's header, and its records as (offset, value)."""


class Replicated(Protocol):
    """A partition as metadata says it."""

    @property
    def replicas(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def isr(self) -> Sequence[int]: ...  # noqa: D102


async def final_read(
    bootstrap: str,
    topic: str,
    partitions: int,
    recorder: Recorder,
    timeout_s: float,
    client: Mapping[str, str] | None = None,
) -> dict[int, int]:
    """Record all records up to the end offsets; gives those, as far as they could be found out."""
    places = [TopicPartition(topic, partition) for partition in range(partitions)]
    config = {**(client or {}), **CONSUMER_CONFIG, "max.poll.records": "2000"}
    positions = dict.fromkeys(range(partitions), 0)
    ends: dict[int, int] = {}
    try:
        async with Consumer(bootstrap, **config) as consumer:
            ends = {where.partition: end for where, end in (await consumer.end_offsets(places)).items()}
            consumer.assign(places)
            consumer.seek_to_beginning(places)
            deadline = asyncio.get_running_loop().time() + timeout_s
            while any(positions[partition] < end for partition, end in ends.items()):
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError
                found: dict[int, list[tuple[int, str]]] = {}
                for record in await consumer.poll(500):
                    found.setdefault(record.partition, []).append((record.offset, values.decode(record.value)))
                for partition, records in found.items():
                    positions[partition] = records[-1][0] + 1
                    recorder.add(Read(recorder.now, READER, ReaderKind.FINAL, partition, records))
                if found:  # it is progress that is bounded, not the whole
                    deadline = asyncio.get_running_loop().time() + timeout_s
    except (KafkaError, TimeoutError) as error:
        text = f"the final read stopped at {positions} of {ends}: {error or f'nothing for {timeout_s:g} s'}"
        recorder.add(NotRecovered(recorder.now, text))
    return ends


def record_ends(recorder: Recorder, ends: Mapping[int, int], partitions: Mapping[int, Replicated]) -> None:
    """Record high watermarks and in-sync replicas."""
    for partition, end in ends.items():
        state = partitions.get(partition)
        if state is not None:
            recorder.add(End(recorder.now, partition, end, list(state.replicas), list(state.isr)))


def record(recorder: Recorder, brokers: Mapping[int | None, Path], topic: str) -> None:
    """Record the logs of stopped brokers, by node id and folder. Blocking."""
    for node_id, data in brokers.items():
        for folder in sorted(data.glob(f"{topic}-*")):
            partition = folder.name.rpartition("-")[2]
            if node_id is not None and partition.isdigit():
                _record_replica(recorder, node_id, int(partition), folder)


async def record_served(
    recorder: Recorder,
    addresses: Mapping[int | None, str],
    topic: str,
    ends: Mapping[int, int],
    timeout_s: float,
    client: Mapping[str, str] | None = None,
) -> None:
    """Record what each replica of a running mesh serves, below the high watermarks: where files cannot be reached."""
    async with AdminClient(",".join(addresses.values()), **(client or {})) as admin:
        (described,) = await admin.describe_topics([topic])
    pool = ConnectionPool.of("kipmesh-chaos-dump", ClientSslConfig.parse(client or {}))
    try:
        for number, partition in described.partitions.items():
            for node_id in partition.replicas:
                reader = _Served(pool, addresses.get(node_id, ""), topic, described.topic_id, number)
                found: list[Batch] = []
                try:
                    async with asyncio.timeout(timeout_s):
                        await reader.read_to(ends.get(number, 0), found)
                except (KafkaError, TransportError, TimeoutError) as error:
                    recorder.note(f"replica {node_id}, partition {number}, does not serve it all: {error!r}")
                _add(recorder, node_id, number, found)
    finally:
        await pool.close()


class _Served:
    """Plain fetches of one partition from one replica."""

    def __init__(self, pool: ConnectionPool, address: str, topic: str, topic_id: bytes, partition: int) -> None:
        self._pool = pool
        self._address = address
        self._topic = topic
        self._topic_id = topic_id
        self._partition = partition

    async def read_to(self, end: int, found: list[Batch]) -> None:
        """Append all batches below `end`; raises KafkaError, TransportError."""
        cursor = 0
        while cursor < end:
            asked = [m.FetchPartition(self._partition, -1, cursor, partition_max_bytes=SERVED_BYTES)]
            request = m.FetchRequest(
                max_wait_ms=100,
                max_bytes=SERVED_BYTES,
                topics=[m.FetchTopic(self._topic, self._topic_id, asked)],
                session_epoch=-1,
            )
            response: m.FetchResponse = await self._pool.get(self._address).call("Broker", "Fetch", request, 5.0)
            got: list[Batch] = []
            for one in [one for topic in response.responses for one in topic.partitions]:
                if one.error_code:
                    raise KafkaError(ErrorCode.of(one.error_code))
                got += values.batches(one.records, allow_partial=True)
            if not got:
                await asyncio.sleep(0.1)
                continue
            found += got
            cursor = got[-1][0].next_offset


def _record_replica(recorder: Recorder, node_id: int, partition: int, folder: Path) -> None:
    found: list[Batch] = []
    try:
        found.extend(_read_all(folder))
    except (OSError, KafkaError) as error:
        recorder.note(f"the log of replica {node_id}, partition {partition}, cannot be read whole: {error}")
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


def _read_all(folder: Path) -> Iterator[Batch]:
    for segment in sorted(folder.glob("*.log")):
        yield from values.batches(segment.read_bytes())
