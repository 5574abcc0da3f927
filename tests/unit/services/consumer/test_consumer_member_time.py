"""Timeout of group streams, with a consumer that joins its group at its fourth poll."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kipmesh_consumer.metrics import ServiceMetrics
from kipmesh_consumer.parameters import Edge, Start
from kipmesh_consumer.streams import End, MemberStream, StreamRequest, Streams
from prometheus_client import CollectorRegistry

from kipmesh.client import Consumer, ConsumerRecord, FetchStats, RebalanceListener
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import ErrorCode, KafkaError

POLLS_TO_JOIN = 4


class SlowGroup:
    """A consumer that receives its assignment and the given records at its fourth poll."""

    fetch_stats = FetchStats()

    def __init__(self, records: Sequence[Any], api_timeout_ms: int) -> None:
        self.config = SimpleNamespace(default_api_timeout_ms=api_timeout_ms, group_id="slow")
        self.polls = 0
        self._records = records
        self._listener: RebalanceListener | None = None

    async def start(self) -> None:
        pass

    async def close(self, *, commit: bool) -> None:
        pass

    def subscribe(self, topics: Sequence[str], listener: RebalanceListener) -> None:
        self._listener = listener

    async def poll(self, timeout_ms: int, max_records: int) -> Sequence[Any]:
        self.polls += 1
        await asyncio.sleep(0.005)
        if self.polls == POLLS_TO_JOIN and self._listener is not None:
            self._listener.on_partitions_assigned([])
            return self._records
        return ()


async def read(consumer: SlowGroup) -> tuple[MemberStream, list[ConsumerRecord]]:
    config = ConsumerServiceConfig.parse({"bootstrap.servers": "127.0.0.1:1", "group.id": "slow"})
    streams = Streams(config, ServiceMetrics(CollectorRegistry()))
    wanted = StreamRequest("t", (), Start(Edge.COMMITTED), limit=None, timeout_ms=1, follow=True)
    stream = MemberStream(streams, streams.reserve_slot(), wanted, cast("Consumer", consumer))
    await stream.begin()
    records_read: list[ConsumerRecord] = []
    try:
        async for records in stream.batches():
            records_read += records
    finally:
        await stream.close()
    return stream, records_read


async def test_stream_timeout_starts_with_the_assignment() -> None:
    record = SimpleNamespace(partition=0, offset=0)
    stream, records_read = await read(SlowGroup([record], api_timeout_ms=60_000))
    assert records_read == [record]
    assert stream.end is End.TIMEOUT


async def test_stream_without_records_times_out_after_the_assignment() -> None:
    consumer = SlowGroup([], api_timeout_ms=60_000)
    stream, records_read = await read(consumer)
    assert (records_read, stream.end) == ([], End.TIMEOUT)
    assert consumer.polls >= POLLS_TO_JOIN


async def test_stream_without_assignment_fails_with_request_timed_out() -> None:
    consumer = SlowGroup([], api_timeout_ms=1)
    with pytest.raises(KafkaError, match="no assignment from group 'slow'") as caught:
        await read(consumer)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    assert consumer.polls < POLLS_TO_JOIN
