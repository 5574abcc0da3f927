"""Producers as their users write them, ours and others': each sends the values in turn and returns the seconds it took.

All wait for acks=all, compress with lz4 and fill batches of 256 KiB for at most 5 ms; whatever else is as each library
has it by default (ours is idempotent). The clock stops when the last record is acknowledged.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bench.harness import BenchError
from bench.workload import STEP_SECONDS_MAX
from kipmesh.client import Producer
from kipmesh.client.sync import Producer as SyncProducer

BATCH_BYTES = 256 << 10
LINGER_MS = 5
BUFFER_BYTES = 64 << 20
_OURS: dict[str, Any] = {
    "acks": "all",
    "compression.type": "lz4",
    "linger.ms": LINGER_MS,
    "batch.size": BATCH_BYTES,
    "buffer.memory": BUFFER_BYTES,
}
_WORDS = ("carrier", "origin", "destination", "delay", "departure", "arrival", "minutes", "aircraft", "weather", "gate")


def values_of(size_bytes: int, count: int = 997) -> list[bytes]:
    """Different JSON-like values between half of that size and one and a half; lz4 makes about half of them."""
    source = random.Random(7)
    values = []
    for _ in range(count):
        wanted, text = source.randint(size_bytes // 2, size_bytes * 3 // 2), "{"
        while len(text) < wanted:
            text += f'"{source.choice(_WORDS)}":"{source.randbytes(8).hex()}",'
        values.append(text[:wanted].encode())
    return values


async def _timed(producer: Any, topic: str, values: Sequence[bytes], count: int) -> float:
    """Of a started asynchronous producer: the two are used alike."""
    await producer.partitions_for(topic)
    begin = time.perf_counter()
    sent = [await producer.send(topic, values[i % len(values)]) for i in range(count)]
    await producer.flush()
    seconds = time.perf_counter() - begin
    _check(each.exception() for each in sent)
    return seconds


async def _ours_async(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    async with asyncio.timeout(STEP_SECONDS_MAX), Producer(bootstrap, **_OURS) as producer:
        return await _timed(producer, topic, values, count)


def ours_async(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """`kipmesh.client.Producer`."""
    return asyncio.run(_ours_async(bootstrap, topic, values, count))


def ours_sync(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """`kipmesh.client.sync.Producer`."""
    with SyncProducer(bootstrap, **_OURS) as producer:
        producer.partitions_for(topic)
        begin = time.perf_counter()
        sent = [producer.send(topic, values[i % len(values)]) for i in range(count)]
        producer.flush()
        seconds = time.perf_counter() - begin
        for each in sent:
            each.result(STEP_SECONDS_MAX)
    return seconds


async def _aiokafka(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        compression_type="lz4",
        linger_ms=LINGER_MS,
        max_batch_size=BATCH_BYTES,
    )
    async with asyncio.timeout(STEP_SECONDS_MAX), producer:
        return await _timed(producer, topic, values, count)


def aiokafka(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """`aiokafka.AIOKafkaProducer`."""
    return asyncio.run(_aiokafka(bootstrap, topic, values, count))


def kafka_python(bootstrap: str, topic: str, values: Sequence[bytes], count: int) -> float:
    """`kafka.KafkaProducer` of kafka-python."""
    kafka: Any = importlib.import_module("kafka")
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        compression_type="lz4",
        linger_ms=LINGER_MS,
        batch_size=BATCH_BYTES,
    )
    try:
        producer.partitions_for(topic)
        begin = time.perf_counter()
        sent = [producer.send(topic, values[i % len(values)]) for i in range(count)]
        producer.flush(STEP_SECONDS_MAX)
        seconds = time.perf_counter() - begin
        _check(each.exception for each in sent)
    finally:
        producer.close(timeout=5)
    return seconds


def _check(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise BenchError(f"produce: {error!r}")
