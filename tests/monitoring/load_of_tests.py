"""A load that gives every metric of a cluster data.

Two producers write `flights`. Consumers read it: in two racks with replicas, in a rack without a replica, without a
rack, in a group, and over HTTP. There are fewer fetch session slots than consumers, topics are created and deleted, and
some batches are too large.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from http.client import HTTPException
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from kipmesh.client import AdminClient, Consumer, NewTopic, Producer
from kipmesh.client.producer.exporter import ProducerCollector
from kipmesh.cluster import ports
from kipmesh.core.errors import KafkaError

TOPIC, SMALL, ONCE = "flights", "small", "once"
PARTITIONS = 6
ALL_PARTITIONS = [(TOPIC, partition) for partition in range(PARTITIONS)]
RECORD_BYTES = 1000
RECORDS_PER_SECOND = 120
STEP_S = 0.05
SMALL_BYTES = 2000
FROM_THE_START = {"auto.offset.reset": "earliest"}
GROUP, STALLED, OVER_HTTP = "readers", "stalled", "over-http"

KAFKA_IDLE = 3
"""Idle connections of the Kafka protocol to each broker."""
KAFKA_VERSIONS = struct.pack(">hhih4s", 18, 3, 1, 4, b"load") + b"\0\x05load\x041.0\0"
KAFKA_METADATA = struct.pack(">hhih4sih5s?", 3, 4, 2, 4, b"load", 1, 5, b"noone", False)
KAFKA_FETCH = struct.pack(">hhih4siiiibi", 1, 4, 3, 4, b"load", -1, 50, 1, 1 << 20, 0, 1)
KAFKA_FETCH += struct.pack(">h7siiqi", 7, b"flights", 1, 0, 0, 1 << 16)
BROKERS = {
    "replica.selector.class": "RackAwareReplicaSelector",
    "max.incremental.fetch.session.cache.slots": "6",
    "min.incremental.fetch.session.eviction.ms": "1000",
    "max.incremental.fetch.sessions.per.client.id": "1",
    "metadata.log.max.snapshot.interval.ms": "3000",
    "metadata.log.max.record.bytes.between.snapshots": "2000",
    "offsets.topic.num.partitions": "3",
    "leader.imbalance.check.interval.seconds": "3",
    "group.initial.rebalance.delay.ms": "0",
    "group.id": OVER_HTTP,
    "streams.max": "1",
}
"""Few fetch session slots with early eviction, a snapshot every 3 s, and fast return of preferred leaders."""


class Exporter:
    """HTTP endpoint with the metrics of this process's producers."""

    def __init__(self) -> None:
        self.producers, registry = ProducerCollector(), CollectorRegistry()
        registry.register(self.producers)
        (port,) = ports.choose(1)
        self.address = f"127.0.0.1:{port}"
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class HttpReaders:
    """Two threads that read from a consumer service over HTTP, which admits one stream at a time; one is in a group."""

    def __init__(self, address: str) -> None:
        self._ended, self._busy = threading.Event(), threading.Event()
        self._busy.set()
        base = f"http://{address}/v1/topics/{TOPIC}/records?limit=200&timeout_ms=2000&from="
        starts = ("committed", "latest&follow=true")
        self._threads = [threading.Thread(target=self._read, args=(base + start,)) for start in starts]
        for thread in self._threads:
            thread.start()

    def _read(self, url: str) -> None:
        while self._busy.wait() and not self._ended.is_set():
            # Refused while the other thread reads; fails or ends early while the leader is killed.
            with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=20) as response:
                response.read()
            self._ended.wait(0.2)

    def pause(self) -> None:
        """Start no new requests. A request in flight takes up to two seconds."""
        self._busy.clear()

    def resume(self) -> None:
        """Start requests again."""
        self._busy.set()

    def close(self) -> None:
        self._ended.set()
        self._busy.set()
        for thread in self._threads:
            thread.join()


class Load:
    """`async with Load(...)` runs the load; attributes have its counters."""

    def __init__(self, bootstrap: str, kafka_bootstrap: str, exporter: Exporter) -> None:
        self._bootstrap = bootstrap
        self._kafka = [address.rpartition(":")[::2] for address in kafka_bootstrap.split(",")]
        self.malformed_frames = 0
        """Connections to Kafka listeners that sent a malformed frame."""
        self._exporter = exporter
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = asyncio.Event()
        self.admin = AdminClient(bootstrap)
        self.producers: dict[str, Producer] = {}
        self.acknowledged = 0
        """Acknowledged records of all topics."""
        self.sent_bytes = 0
        """Value bytes of acknowledged records."""
        self.refused = 0
        """Records refused because they were too large."""
        self.across = Consumer(
            bootstrap, **{"client.rack": "rack-z", "client.id": "far", "auto.offset.reset": "earliest"}
        )
        """The only consumer that reads across racks."""

    async def __aenter__(self) -> Load:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.admin)
            await self.admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3), NewTopic(ONCE, 1, 3)])
            await self.admin.create_topics([NewTopic(SMALL, 1, 3, configs={"max.message.bytes": str(SMALL_BYTES)})])
            for name in ("orders", "clicks"):
                config = {"client.id": name, "metadata.max.age.ms": 4000, "metadata.evict.ms": 5000}
                self.producers[name] = await stack.enter_async_context(Producer(self._bootstrap, **config))
                self._exporter.producers.add(name, self.producers[name])
            await self._send(self.producers["orders"], ONCE, b"only record")
            for host, port in self._kafka * KAFKA_IDLE:
                _, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
            self._busy.set()
            self._tasks = [asyncio.create_task(work) for work in self._works()]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise failures[0]

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        near = [Consumer(self._bootstrap, **{"client.rack": rack, "client.id": rack}) for rack in ("rack-b", "rack-c")]
        twins = [Consumer(self._bootstrap, **{"client.id": "twin"}) for _ in range(2)]
        works = [self._write(name) for name in self.producers]
        works += [self._read(consumer, ALL_PARTITIONS) for consumer in [*near, *twins]]
        # Half of the partitions: a smaller session, which larger ones may evict.
        works += [self._read(self.across, ALL_PARTITIONS[: PARTITIONS // 2])]
        works += [self._send_kafka_requests(), self._send_malformed_frames()]
        return [*works, self._read_in_group(), self._read_briefly(), self._change_metadata(), self._exceed_limit()]

    def pause(self) -> None:
        """Stop writes, metadata changes and new consumers. `flush` waits for pending records."""
        self._busy.clear()

    def resume(self) -> None:
        """Resume after `pause`."""
        self._busy.set()

    async def flush(self) -> None:
        """Wait until all sent records are counted."""
        await asyncio.gather(*(producer.flush() for producer in self.producers.values()))
        await asyncio.sleep(STEP_S)

    async def _send(self, producer: Producer, topic: str, value: bytes) -> None:
        delivery = await producer.send(topic, value)

        def count(done: Any) -> None:
            if done.cancelled() or done.exception() is not None:
                self.refused += 1
            else:
                self.acknowledged += 1
                self.sent_bytes += len(value)

        delivery.add_done_callback(count)

    async def _write(self, name: str) -> None:
        loop, producer, value = asyncio.get_running_loop(), self.producers[name], b"x" * RECORD_BYTES
        rate = RECORDS_PER_SECOND / len(self.producers)
        due = loop.time()
        while True:
            if not self._busy.is_set():
                await self._busy.wait()
                due = loop.time()
            while due < loop.time() and self._busy.is_set():
                await self._send(producer, TOPIC, value)
                due += 1 / rate
            await asyncio.sleep(STEP_S)

    async def _exceed_limit(self) -> None:
        """Send batches that only the broker refuses, because the producer's limit is larger."""
        for number in itertools.count():
            await self._busy.wait()
            await self._send(self.producers["clicks"], SMALL, b"x" * SMALL_BYTES if number % 2 else b"fits")
            await asyncio.sleep(0.25)

    async def _read(self, consumer: Consumer, partitions: list[tuple[str, int]]) -> None:
        async with consumer:
            consumer.assign(partitions)
            while True:
                await consumer.poll(timeout_ms=500)

    async def _read_in_group(self) -> None:
        config = {
            "group.id": GROUP,
            "client.id": GROUP,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 500,
        }
        async with Consumer(self._bootstrap, **config) as consumer:
            consumer.subscribe([TOPIC])
            while True:
                await consumer.poll(timeout_ms=500)

    async def _read_briefly(self) -> None:
        """Open larger fetch sessions for a short time, which evict other sessions and release their slots."""
        for number in itertools.count():
            await self._busy.wait()
            config = {"client.id": f"visitor-{number % 3}", **FROM_THE_START}
            with contextlib.suppress(KafkaError):
                async with Consumer(self._bootstrap, **config) as consumer:
                    consumer.assign([*ALL_PARTITIONS, (SMALL, 0), (ONCE, 0)])
                    for _ in range(4):
                        await consumer.poll(timeout_ms=300)
            await asyncio.sleep(0.3)

    async def _send_kafka_requests(self) -> None:
        """Send ApiVersions, Metadata for an unknown topic, and Fetch by the Kafka protocol."""
        for host, port in itertools.cycle(self._kafka):
            await self._busy.wait()
            with contextlib.suppress(OSError, EOFError):  # while the leader is killed
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    for request in (KAFKA_VERSIONS, KAFKA_METADATA, KAFKA_FETCH):
                        writer.write(struct.pack(">i", len(request)) + request)
                        (size,) = struct.unpack(">i", await reader.readexactly(4))
                        await reader.readexactly(size)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async def _send_malformed_frames(self) -> None:
        """Send malformed frames to a follower, because the leader's counters are lost when it is killed."""
        host, port = self._kafka[-1]
        while True:
            await self._busy.wait()
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            self.malformed_frames += 1
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            await asyncio.sleep(0.5)

    async def _change_metadata(self) -> None:
        """Create and delete topics, so that each snapshot has new records."""
        for number in itertools.count():
            await self._busy.wait()
            with contextlib.suppress(KafkaError):
                await self.admin.create_topics([NewTopic(f"passing-{number}", 1, 3)], wait=False)
                await asyncio.sleep(0.5)
                await self.admin.delete_topics([f"passing-{number}"], wait=False)
            await asyncio.sleep(0.5)
