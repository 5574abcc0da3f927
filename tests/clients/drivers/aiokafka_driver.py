"""Driver of aiokafka. Verbs run on an event loop in a thread, so that heartbeats continue between them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
import time
from collections.abc import Coroutine
from typing import Any

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import BrokerResponseError, OffsetOutOfRangeError, RecordTooLargeError, for_code

from tests.clients.drivers.serving import BEGINNING, END, VerbError, data, headers_of, record, serve

TopicPartition = aiokafka.TopicPartition


def _of_record(found: Any) -> dict[str, Any]:
    return record(found.partition, found.offset, found.key, found.value, found.timestamp, found.headers)


def _raise(code: int, text: str) -> None:
    if code:
        raise VerbError(code, f"{for_code(code).__name__} {text}")


class Client:
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        self._common = {"bootstrap_servers": bootstrap, "request_timeout_ms": 15_000}
        self._rack = options.get("rack")
        self._admin_client: Any = None
        self._group: Any = None

    async def _admin(self) -> Any:
        if self._admin_client is None:
            admin = AIOKafkaAdminClient(**self._common)
            await admin.start()
            self._admin_client = admin
        return self._admin_client

    async def hello(self) -> dict[str, Any]:
        return {"client": "aiokafka", "version": importlib.metadata.version("aiokafka")}

    async def create_topic(
        self, topic: str, partitions: int, replicas: int, config: dict[str, str] | None = None
    ) -> None:
        new_topic = NewTopic(topic, partitions, replicas, topic_configs=config or {})
        found = await (await self._admin()).create_topics([new_topic], timeout_ms=15_000)
        for _name, code, *text in found.topic_errors:
            _raise(code, str(text))

    async def delete_topic(self, topic: str) -> None:
        found = await (await self._admin()).delete_topics([topic], timeout_ms=15_000)
        for _name, code in found.topic_error_codes:
            _raise(code, topic)

    async def list_topics(self) -> list[str]:
        return sorted(await (await self._admin()).list_topics())

    async def describe_topic(self, topic: str) -> list[dict[str, Any]]:
        (found,) = await (await self._admin()).describe_topics([topic])
        _raise(found["error_code"], topic)
        return [
            {"id": each["partition"], "leader": each["leader"], "replicas": each["replicas"], "isr": each["isr"]}
            for each in found["partitions"]
        ]

    async def describe_cluster(self) -> dict[str, Any]:
        found = await (await self._admin()).describe_cluster()
        brokers = [
            {"id": each["node_id"], "host": each["host"], "port": each["port"], "rack": each["rack"]}
            for each in found["brokers"]
        ]
        return {"brokers": brokers, "controller": found["controller_id"]}

    async def create_partitions(self, topic: str, total: int) -> None:
        found = await (await self._admin()).create_partitions({topic: NewPartitions(total)}, timeout_ms=15_000)
        for _name, code, text in found.topic_errors:
            _raise(code, text)

    async def describe_configs(self, topic: str) -> dict[str, str]:
        (found,) = await (await self._admin()).describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        ((code, text, _kind, _name, entries),) = found.resources
        _raise(code, text)
        return {name: value for name, value, *_ in entries}

    async def delete_records(self, topic: str, partition: int, before: int) -> int:
        topic_partition = TopicPartition(topic, partition)
        found = await (await self._admin()).delete_records({topic_partition: RecordsToDelete(before)})
        return int(found[topic_partition])

    async def produce(
        self,
        topic: str,
        records: list[dict[str, Any]],
        compression: str = "none",
        acks: str = "all",
        idempotent: bool = False,
        pace_ms: float = 0,
    ) -> list[list[int]]:
        producer = aiokafka.AIOKafkaProducer(
            **self._common,
            compression_type=None if compression == "none" else compression,
            acks="all" if acks == "all" else int(acks),
            enable_idempotence=idempotent,
            linger_ms=2,
        )
        await producer.start()
        try:
            pending = []
            for each in records:
                pending.append(
                    await producer.send(
                        topic,
                        data(each["value"]),
                        data(each.get("key")),
                        partition=each.get("partition"),
                        timestamp_ms=each.get("timestamp"),
                        headers=headers_of(each),
                    )
                )
                if pace_ms:
                    await asyncio.sleep(pace_ms / 1000)
            async with asyncio.timeout(60):
                acknowledged = [await delivery for delivery in pending]
            return [[each.partition, each.offset] if each else [-1, -1] for each in acknowledged]  # None with acks=0
        finally:
            async with asyncio.timeout(20):
                await producer.stop()

    async def _consumer(self, group: str | None, reset: str, *topics: str) -> Any:
        consumer = aiokafka.AIOKafkaConsumer(
            *topics,
            **self._common,
            group_id=group,
            auto_offset_reset=reset,
            enable_auto_commit=False,
            client_rack=self._rack,
            fetch_max_wait_ms=100,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1000,
        )
        await consumer.start()
        return consumer

    async def consume(
        self, topic: str, partitions: dict[str, int], count: int, timeout_s: float = 30, reset: str = "earliest"
    ) -> list[dict[str, Any]]:
        consumer = await self._consumer(None, reset)
        try:
            consumer.assign([TopicPartition(topic, int(number)) for number in partitions])
            for number, offset in partitions.items():
                topic_partition = TopicPartition(topic, int(number))
                if offset == BEGINNING:
                    await consumer.seek_to_beginning(topic_partition)
                elif offset == END:
                    await consumer.seek_to_end(topic_partition)
                else:
                    consumer.seek(topic_partition, offset)
            return await self._read(consumer, count, timeout_s)
        finally:
            await consumer.stop()

    async def _read(self, consumer: Any, count: int, timeout_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            for records in (await consumer.getmany(timeout_ms=200, max_records=count - len(found))).values():
                found += [_of_record(each) for each in records]
        return found

    async def watermarks(self, topic: str, partition: int) -> list[int]:
        topic_partition = TopicPartition(topic, partition)
        consumer = await self._consumer(None, "earliest")
        try:
            low, high = (
                await consumer.beginning_offsets([topic_partition]),
                await consumer.end_offsets([topic_partition]),
            )
            return [low[topic_partition], high[topic_partition]]
        finally:
            await consumer.stop()

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        topic_partition = TopicPartition(topic, partition)
        consumer = await self._consumer(None, "earliest")
        try:
            found = (await consumer.offsets_for_times({topic_partition: timestamp}))[topic_partition]
            return END if found is None else int(found.offset)
        finally:
            await consumer.stop()

    async def group_open(self, group: str, topics: list[str]) -> None:
        self._group = await self._consumer(group, "earliest", *topics)

    async def group_poll(self, count: int, timeout_s: float) -> dict[str, Any]:
        records = await self._read(self._group, count, timeout_s)
        return {"records": records, "assigned": sorted(each.partition for each in self._group.assignment())}

    async def group_commit(self) -> None:
        await self._group.commit()

    async def group_close(self) -> None:
        group, self._group = self._group, None
        await group.stop()

    async def committed(self, group: str, topic: str, partition: int) -> int:
        topic_partition = TopicPartition(topic, partition)
        found = await (await self._admin()).list_consumer_group_offsets(group, partitions=[topic_partition])
        return int(found[topic_partition].offset)

    async def list_groups(self) -> list[str]:
        return sorted(name for name, *_ in await (await self._admin()).list_consumer_groups())

    async def describe_group(self, group: str) -> dict[str, Any]:
        (found,) = await (await self._admin()).describe_consumer_groups([group])
        ((code, _name, state, _kind, _protocol, members, *_),) = found.groups
        _raise(code, group)
        return {"state": state.upper(), "members": len(members)}

    async def close(self) -> None:
        if self._group is not None:
            await self._group.stop()
        if self._admin_client is not None:
            await self._admin_client.close()


class Driver:
    """Runs the verbs of `Client` synchronously."""

    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = Client(bootstrap, options)

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._client, verb)
        return lambda **arguments: self._run(method(**arguments))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def code_of(error: BaseException) -> int | None:
    """Return the code of broker errors and of the errors that consumer and producer raise instead."""
    if isinstance(error, BrokerResponseError):
        return int(error.errno)
    if isinstance(error, RecordTooLargeError):
        return 10
    return OffsetOutOfRangeError.errno if "OffsetOutOfRange" in repr(error) else None


if __name__ == "__main__":
    serve(Driver, code_of)
