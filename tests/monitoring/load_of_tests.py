"""Everything that a mesh is used for, at once: so that each of its metrics has something to say.

Two producers write `flights`; readers in two racks, in a rack without a replica, and without one read it, and so do a
group and readers over HTTP. There are fewer slots for fetch sessions than readers, topics come and go, and some
batches are too large.
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
EVERYWHERE = [(TOPIC, partition) for partition in range(PARTITIONS)]
RECORD_BYTES = 1000
RECORDS_PER_SECOND = 120
STEP_S = 0.05
SMALL_BYTES = 2000
FROM_THE_START = {"auto.offset.reset": "earliest"}
GROUP, STALLED, OVER_HTTP = "readers", "stalled", "over-http"

KAFKA_IDLE = 3
"""Connections of the Kafka protocol to each broker that ask for nothing."""
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
"""Few slots that are lost soon, a snapshot every 3 s, and leaderships that come back at once."""


class Exporter:
    """This process's producers on a port of its own."""

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
    """Reads a consumer service over HTTP, on threads: two readers where one is let in, one of them in the group."""

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
            # Refused while the other one reads; gone, or cut short, while the leader is.
            with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=20) as answer:
                answer.read()
            self._ended.wait(0.2)

    def pause(self) -> None:
        """Nobody comes from now on; who reads does so for two seconds."""
        self._busy.clear()

    def resume(self) -> None:
        """Go on."""
        self._busy.set()

    def close(self) -> None:
        self._ended.set()
        self._busy.set()
        for thread in self._threads:
            thread.join()


class Load:
    """`async with Load(...)`; what it counted is in its attributes."""

    def __init__(self, bootstrap: str, kafka_bootstrap: str, exporter: Exporter) -> None:
        self._bootstrap = bootstrap
        self._kafka = [address.rpartition(":")[::2] for address in kafka_bootstrap.split(",")]
        self.strangers = 0
        """Connections of the Kafka protocol that sent what is no request."""
        self._exporter = exporter
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = asyncio.Event()
        self.admin = AdminClient(bootstrap)
        self.producers: dict[str, Producer] = {}
        self.acknowledged = 0
        """Records that brokers have, of all topics."""
        self.sent_bytes = 0
        """Of values, of the same records."""
        self.refused = 0
        """Records that were too large."""
        self.across = Consumer(
            bootstrap, **{"client.rack": "rack-z", "client.id": "far", "auto.offset.reset": "earliest"}
        )
        """Nobody else reads across racks."""

    async def __aenter__(self) -> Load:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.admin)
            await self.admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3), NewTopic(ONCE, 1, 3)])
            await self.admin.create_topics([NewTopic(SMALL, 1, 3, configs={"max.message.bytes": str(SMALL_BYTES)})])
            for name in ("orders", "clicks"):
                config = {"client.id": name, "metadata.max.age.ms": 4000, "metadata.evict.ms": 5000}
                self.producers[name] = await stack.enter_async_context(Producer(self._bootstrap, **config))
                self._exporter.producers.add(name, self.producers[name])
            await self._written(self.producers["orders"], ONCE, b"idle from now on")
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
        failures = [one for one in results if isinstance(one, Exception)]
        if failures:
            raise failures[0]

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        near = [Consumer(self._bootstrap, **{"client.rack": rack, "client.id": rack}) for rack in ("rack-b", "rack-c")]
        twins = [Consumer(self._bootstrap, **{"client.id": "twin"}) for _ in range(2)]
        works = [self._write(name) for name in self.producers]
        works += [self._read(one, EVERYWHERE) for one in [*near, *twins]]
        # Half of the partitions: a smaller session than the others', that they may take.
        works += [self._read(self.across, EVERYWHERE[: PARTITIONS // 2])]
        works += [self._speak_kafka(), self._speak_gibberish()]
        return [*works, self._read_in_group(), self._come_and_go(), self._change_metadata(), self._exceed()]

    def pause(self) -> None:
        """Nothing is written or changed from now on, and nobody comes; `flush` waits for what was written."""
        self._busy.clear()

    def resume(self) -> None:
        """Go on."""
        self._busy.set()

    async def flush(self) -> None:
        """Wait until all that was sent is counted."""
        await asyncio.gather(*(producer.flush() for producer in self.producers.values()))
        await asyncio.sleep(STEP_S)

    async def _written(self, producer: Producer, topic: str, value: bytes) -> None:
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
                await self._written(producer, TOPIC, value)
                due += 1 / rate
            await asyncio.sleep(STEP_S)

    async def _exceed(self) -> None:
        """Batches that the broker refuses: the producer's own limit is larger."""
        for number in itertools.count():
            await self._busy.wait()
            await self._written(self.producers["clicks"], SMALL, b"x" * SMALL_BYTES if number % 2 else b"fits")
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

    async def _come_and_go(self) -> None:
        """Larger sessions than the others', each for a while: they take others' slots, and leave them."""
        for number in itertools.count():
            await self._busy.wait()
            config = {"client.id": f"visitor-{number % 3}", **FROM_THE_START}
            with contextlib.suppress(KafkaError):
                async with Consumer(self._bootstrap, **config) as consumer:
                    consumer.assign([*EVERYWHERE, (SMALL, 0), (ONCE, 0)])
                    for _ in range(4):
                        await consumer.poll(timeout_ms=300)
            await asyncio.sleep(0.3)

    async def _speak_kafka(self) -> None:
        """A client of Kafka's protocol that says who it is, reads, and asks for a topic that there is not."""
        for host, port in itertools.cycle(self._kafka):
            await self._busy.wait()
            with contextlib.suppress(OSError, EOFError):  # the leader is killed
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    for request in (KAFKA_VERSIONS, KAFKA_METADATA, KAFKA_FETCH):
                        writer.write(struct.pack(">i", len(request)) + request)
                        (size,) = struct.unpack(">i", await reader.readexactly(4))
                        await reader.readexactly(size)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async def _speak_gibberish(self) -> None:
        """Somebody who is no client, at a follower: the leader forgets what it counted when it is killed."""
        host, port = self._kafka[-1]
        while True:
            await self._busy.wait()
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            self.strangers += 1
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            await asyncio.sleep(0.5)

    async def _change_metadata(self) -> None:
        """Topics that come and go: each snapshot has something new."""
        for number in itertools.count():
            await self._busy.wait()
            with contextlib.suppress(KafkaError):
                await self.admin.create_topics([NewTopic(f"passing-{number}", 1, 3)], wait=False)
                await asyncio.sleep(0.5)
                await self.admin.delete_topics([f"passing-{number}"], wait=False)
            await asyncio.sleep(0.5)
