"""Blocking versions of Producer, Consumer and AdminClient for scripts, threads and Spark workers.

Each client runs on an event loop in its own daemon thread (`kipmesh.client.portal`). The methods have the parameters,
results and documentation of the asynchronous ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kipmesh.client.admin import admin as _admin
from kipmesh.client.arguments import listed
from kipmesh.client.consumer import consumer as _consumer
from kipmesh.client.portal import BlockingClient, Portal, blocking, on_loop
from kipmesh.client.producer import producer as _producer
from kipmesh.client.producer.accumulator import Delivery
from kipmesh.client.producer.pump import PendingRecord, Pump
from kipmesh.client.types import ConsumerRecord, FetchStats, Headers

_ITERATION_POLL_MS = 1000


class Producer(BlockingClient[_producer.Producer]):
    """Blocking version of `kipmesh.client.Producer`. Records sent by one thread keep their order."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        super().__init__(_producer.Producer(bootstrap, **config))
        self._pump = Pump(self._client)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> PendingRecord:
        """Queue a record and return its pending outcome; blocks while 2000 records are queued.

        `result()` of the returned record also raises the errors that the asynchronous `send` would raise. A topic
        without metadata does not delay the records of other topics. Raises RuntimeError if the producer is closed or
        was started before a fork. The first call connects and raises the errors of `start`.
        """
        return self._pump.send(self._running(), (topic, value, key, partition, timestamp_ms, headers))

    def send_many(
        self, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], partition: int | None = None
    ) -> list[Delivery]:
        """Append (key, value) pairs, with much less overhead than `send`, and return a future for each.

        Blocks while the producer's buffer is full or the topic's metadata is missing. After `flush` all futures are
        done. Raises the errors of the asynchronous `send`; records before the rejected one are still sent.
        """
        portal = self._running()
        self._pump.drain(portal, topic)
        # In the caller's thread, because an iterator may call this producer.
        pairs = listed("records", records, "(key, value) pairs")

        async def send_all() -> list[Delivery]:
            send = self._client.send
            return [await send(topic, value, key, partition) for key, value in pairs]

        return portal.call(send_all())

    def flush(self) -> None:
        """Send all buffered records now and return when each is delivered or has failed.

        Raises KafkaError only if the producer itself has failed, not for failed records.
        """
        portal = self._running()
        self._pump.drain(portal)
        portal.call(self._client.flush())

    def close(self) -> None:
        """Deliver all queued records, each within `delivery.timeout.ms`, disconnect and end the thread. Idempotent."""
        try:
            if self._portal is not None:
                self._pump.drain(self._portal)
        finally:
            super().close()

    partitions_for = blocking(_producer.Producer.partitions_for)

    def metrics(self) -> dict[str, int | float]:
        """Return the counters of `kipmesh.client.Producer.metrics`. Any thread may call it."""
        return self._client.metrics()


class Consumer(BlockingClient[_consumer.Consumer]):
    """Blocking version of `kipmesh.client.Consumer`. Iterating over it yields records indefinitely.

    A rebalance listener runs in the client's thread and must not call the consumer.
    """

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        super().__init__(_consumer.Consumer(bootstrap, **config))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        while True:
            yield from self.poll(_ITERATION_POLL_MS)

    assign = on_loop(_consumer.Consumer.assign)
    subscribe = on_loop(_consumer.Consumer.subscribe)
    commit = blocking(_consumer.Consumer.commit)
    committed = blocking(_consumer.Consumer.committed)
    assignment = on_loop(_consumer.Consumer.assignment)
    pause = on_loop(_consumer.Consumer.pause)
    resume = on_loop(_consumer.Consumer.resume)
    paused = on_loop(_consumer.Consumer.paused)
    seek = on_loop(_consumer.Consumer.seek)
    seek_to_beginning = on_loop(_consumer.Consumer.seek_to_beginning)
    seek_to_end = on_loop(_consumer.Consumer.seek_to_end)
    position = blocking(_consumer.Consumer.position)
    high_watermark = on_loop(_consumer.Consumer.high_watermark)
    beginning_offsets = blocking(_consumer.Consumer.beginning_offsets)
    end_offsets = blocking(_consumer.Consumer.end_offsets)
    offsets_for_times = blocking(_consumer.Consumer.offsets_for_times)
    partitions_for = blocking(_consumer.Consumer.partitions_for)
    poll = blocking(_consumer.Consumer.poll)
    fetch_batches = blocking(_consumer.Consumer.fetch_batches)

    @property
    def fetch_stats(self) -> FetchStats:
        """Fetch counters since the consumer started; `sessions` and `partitions` are current values."""

        async def stats() -> FetchStats:
            return self._client.fetch_stats

        return self._running().call(stats())


class AdminClient(BlockingClient[_admin.AdminClient]):
    """Blocking version of `kipmesh.client.AdminClient`. `on_progress` callbacks run in the client's thread."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        super().__init__(_admin.AdminClient(bootstrap, **config))

    create_topics = blocking(_admin.AdminClient.create_topics)
    delete_topics = blocking(_admin.AdminClient.delete_topics)
    create_partitions = blocking(_admin.AdminClient.create_partitions)
    list_topics = blocking(_admin.AdminClient.list_topics)
    describe_topics = blocking(_admin.AdminClient.describe_topics)
    elect_leaders = blocking(_admin.AdminClient.elect_leaders)
    alter_partition_reassignments = blocking(_admin.AdminClient.alter_partition_reassignments)
    list_partition_reassignments = blocking(_admin.AdminClient.list_partition_reassignments)
    wait_reassigned = blocking(_admin.AdminClient.wait_reassigned)
    drain_broker = blocking(_admin.AdminClient.drain_broker)
    unregister_broker = blocking(_admin.AdminClient.unregister_broker)
    describe_configs = blocking(_admin.AdminClient.describe_configs)
    alter_configs = blocking(_admin.AdminClient.alter_configs)
    describe_user_scram_credentials = blocking(_admin.AdminClient.describe_user_scram_credentials)
    set_user_scram_credential = blocking(_admin.AdminClient.set_user_scram_credential)
    delete_user_scram_credential = blocking(_admin.AdminClient.delete_user_scram_credential)
    list_offsets = blocking(_admin.AdminClient.list_offsets)
    delete_records = blocking(_admin.AdminClient.delete_records)
    describe_cluster = blocking(_admin.AdminClient.describe_cluster)
    describe_quorum = blocking(_admin.AdminClient.describe_quorum)
    list_fetch_sessions = blocking(_admin.AdminClient.list_fetch_sessions)
    list_groups = blocking(_admin.AdminClient.list_groups)
    describe_groups = blocking(_admin.AdminClient.describe_groups)
    list_group_offsets = blocking(_admin.AdminClient.list_group_offsets)
    alter_group_offsets = blocking(_admin.AdminClient.alter_group_offsets)
    reset_group_offsets = blocking(_admin.AdminClient.reset_group_offsets)
    delete_group_offsets = blocking(_admin.AdminClient.delete_group_offsets)
    delete_groups = blocking(_admin.AdminClient.delete_groups)


__all__ = ["AdminClient", "Consumer", "PendingRecord", "Portal", "Producer"]
