"""The blocking forms of Producer, Consumer and AdminClient, for scripts, threads and Spark workers.

Each client has a portal: a daemon thread with an event loop, started with the client. Calls may come from any thread.
A client belongs to the process that started it; after a fork make a new one (a client that was not started yet is
fine). Invariant: after `close` the thread has ended and the loop is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from kipmesh.client import admin as _admin
from kipmesh.client import consumer as _consumer
from kipmesh.client import producer as _producer
from kipmesh.client.accumulator import Delivery
from kipmesh.client.consumer import Partitions
from kipmesh.client.credentials import ScramCredentialInfo, ScramMechanism
from kipmesh.client.group import RebalanceListener
from kipmesh.client.pump import PendingRecord, Pump
from kipmesh.client.reassignments import DrainProgress, NewReplicas, OnDrain, OnMoved, PartitionReassignment
from kipmesh.client.sync_groups import GroupAdmin
from kipmesh.client.types import (
    BrokerSessions,
    ClusterDescription,
    ConfigAlteration,
    ConfigResource,
    ConfigValue,
    ConsumerRecord,
    CreatedTopic,
    FetchedBatches,
    FetchStats,
    Headers,
    NewTopic,
    OffsetAndTimestamp,
    QuorumDescription,
    TopicMetadata,
    TopicPartition,
)
from kipmesh.core.errors import KafkaError
from kipmesh.core.scram import ITERATIONS_MIN
from kipmesh.messages import ElectionType
from kipmesh.rpc.loops import handle_exception

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Async(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=_Async)

_ITERATION_POLL_MS = 1000


class Portal:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(handle_exception)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:
            log.exception("the event loop of a client failed")
        finally:
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _cancel_all(self) -> None:
        """Nobody waits for a loop that has ended."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt of the caller cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        if self._pid != os.getpid() or self._loop.is_closed():
            work.close()
            gone = "is closed" if self._pid == os.getpid() else "belongs to another process: make one after the fork"
            raise RuntimeError(f"this client {gone}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and wait for the thread."""
        if self._pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class _Client(Generic[ClientT]):
    """What the three forms share."""

    def __init__(self, client: ClientT) -> None:
        self._client = client
        self._portal: Portal | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread and connect, which calls do by themselves; KafkaError when no bootstrap address answers."""
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._portal is None:
            portal = self._portal = Portal(f"kipmesh-{type(self).__name__.lower()}")
            try:
                portal.call(self._client.start())
            except BaseException:
                self._portal, self._closed = None, True  # `close` after this has nothing to do
                portal.close()
                raise

    def close(self) -> None:
        """Close the client and end the thread; may be called again."""
        portal, self._closed = self._portal, True
        if portal is not None:
            self._portal = None
            try:
                portal.call(self._client.close())
            finally:
                portal.close()

    def _running(self) -> Portal:
        if self._portal is None:
            self.start()
        assert self._portal is not None
        return self._portal

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            portal = self._running()
        except BaseException:
            work.close()
            raise
        return portal.call(work)


class Producer(_Client[_producer.Producer]):
    """See `kipmesh.client.Producer`. Records of one thread keep the order of the calls."""

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
        """Append a record; blocks when too many wait. What the asynchronous `send` raises is part of the outcome.

        Records of a topic whose metadata is missing wait by themselves.
        """
        return self._pump.send(self._running(), (topic, value, key, partition, timestamp_ms, headers))

    def send_many(
        self, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], partition: int | None = None
    ) -> list[Delivery]:
        """Append (key, value) pairs, far cheaper each than `send`; the outcomes are known after `flush`.

        Raises what the asynchronous `send` raises; the records before are sent all the same.
        """
        portal = self._running()
        self._pump.drain(portal, topic)
        return portal.call(self._send_all(topic, list(records), partition))

    async def _send_all(
        self, topic: str, records: Sequence[tuple[bytes | None, bytes | None]], partition: int | None
    ) -> list[Delivery]:
        send = self._client.send
        return [await send(topic, value, key, partition) for key, value in records]

    def flush(self) -> None:
        """Send all waiting records now; returns when each is delivered or has failed."""
        portal = self._running()
        self._pump.drain(portal)
        portal.call(self._client.flush())

    def close(self) -> None:
        """Deliver what was sent, then disconnect and end the thread; may be called again."""
        try:
            if self._portal is not None:
                self._pump.drain(self._portal)
        finally:
            super().close()

    def partitions_for(self, topic: str) -> TopicMetadata:
        """A topic's metadata."""
        return self._call(self._client.partitions_for(topic))

    def metrics(self) -> dict[str, int | float]:
        """See `kipmesh.client.Producer.metrics`; from any thread."""
        return self._client.metrics()


class Consumer(_Client[_consumer.Consumer]):
    """See `kipmesh.client.Consumer`. Iterating yields records without end."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        super().__init__(_consumer.Consumer(bootstrap, **config))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        while True:
            yield from self.poll(_ITERATION_POLL_MS)

    def assign(self, partitions: Partitions) -> None:
        """Read exactly these partitions."""
        self._do(self._client.assign, list(partitions))

    def subscribe(self, topics: Iterable[str], listener: RebalanceListener | None = None) -> None:
        """Read all partitions of these topics, with `group.id` shared with the group.

        The listener is called in the client's own thread, and must not call the consumer; its coroutines run there.
        """
        self._do(self._client.subscribe, topics if isinstance(topics, str) else list(topics), listener)

    def commit(self, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Commit for the group the positions of all assigned partitions, or these offsets."""
        self._call(self._client.commit(offsets))

    def committed(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The group's committed offsets of these; partitions without one are left out."""
        return self._call(self._client.committed(list(partitions)))

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now."""
        return self._do(self._client.assignment)

    def pause(self, partitions: Partitions) -> None:
        """Return no records of these until `resume`."""
        self._do(self._client.pause, list(partitions))

    def resume(self, partitions: Partitions) -> None:
        """Return records of these again."""
        self._do(self._client.resume, list(partitions))

    def paused(self) -> list[TopicPartition]:
        """Partitions that `pause` was called for."""
        return self._do(self._client.paused)

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Go on at `offset`."""
        self._do(self._client.seek, partition, offset)

    def seek_to_beginning(self, partitions: Partitions | None = None) -> None:
        """Go on at the first record of these (or all) partitions."""
        self._do(self._client.seek_to_beginning, None if partitions is None else list(partitions))

    def seek_to_end(self, partitions: Partitions | None = None) -> None:
        """Go on after the last record of these (or all) partitions."""
        self._do(self._client.seek_to_end, None if partitions is None else list(partitions))

    def position(self, partition: tuple[str, int]) -> int:
        """The offset of the next record that `poll` returns of this partition."""
        return self._call(self._client.position(partition))

    def high_watermark(self, partition: tuple[str, int]) -> int | None:
        """The high watermark in the partition's last answer."""
        return self._do(self._client.high_watermark, partition)

    def beginning_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The first offset of each."""
        return self._call(self._client.beginning_offsets(list(partitions)))

    def end_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The offset after the last record of each."""
        return self._call(self._client.end_offsets(list(partitions)))

    def offsets_for_times(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition whose timestamp is at least so many ms."""
        return self._call(self._client.offsets_for_times(timestamps))

    def partitions_for(self, topic: str) -> TopicMetadata:
        """A topic's metadata."""
        return self._call(self._client.partitions_for(topic))

    def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records, as soon as there are any; an empty list when there are none within `timeout_ms`."""
        return self._call(self._client.poll(timeout_ms, max_records))

    def fetch_batches(self, timeout_ms: int = 0) -> list[FetchedBatches]:
        """All that is fetched and not read yet, as raw batches; waits like `poll`."""
        return self._call(self._client.fetch_batches(timeout_ms))

    @property
    def fetch_stats(self) -> FetchStats:
        """Fetch sessions that are open, and what was fetched with and without them since the start."""
        return self._do(lambda: self._client.fetch_stats)

    def _do(self, method: Callable[..., T], *arguments: Any) -> T:
        async def work() -> T:
            return method(*arguments)

        return self._call(work())


class AdminClient(_Client[_admin.AdminClient], GroupAdmin):
    """See `kipmesh.client.AdminClient`."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        super().__init__(_admin.AdminClient(bootstrap, **config))

    def create_topics(
        self, topics: Iterable[NewTopic], *, wait: bool = True, validate_only: bool = False
    ) -> list[CreatedTopic]:
        """Create topics."""
        return self._call(self._client.create_topics(topics, wait=wait, validate_only=validate_only))

    def delete_topics(self, names: Iterable[str], *, wait: bool = True) -> None:
        """Delete topics by name."""
        self._call(self._client.delete_topics(names, wait=wait))

    def create_partitions(self, totals: Mapping[str, int], *, wait: bool = True) -> None:
        """Raise the number of partitions of topics to these totals."""
        self._call(self._client.create_partitions(totals, wait=wait))

    def list_topics(self) -> list[TopicMetadata]:
        """All topics, by name."""
        return self._call(self._client.list_topics())

    def describe_topics(self, names: Iterable[str]) -> list[TopicMetadata]:
        """These topics, in this order."""
        return self._call(self._client.describe_topics(names))

    def elect_leaders(
        self,
        election_type: ElectionType = ElectionType.PREFERRED,
        partitions: Iterable[tuple[str, int]] | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Elect leaders of these partitions, or of all that need it."""
        return self._call(self._client.elect_leaders(election_type, partitions))

    def alter_partition_reassignments(self, targets: NewReplicas) -> dict[TopicPartition, KafkaError | None]:
        """Give partitions other replicas; None cancels a reassignment that is running."""
        return self._call(self._client.alter_partition_reassignments(targets))

    def list_partition_reassignments(
        self, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The reassignments that are running."""
        return self._call(self._client.list_partition_reassignments(partitions))

    def wait_reassigned(self, partitions: Iterable[tuple[str, int]], on_progress: OnMoved | None = None) -> None:
        """Until no reassignment of these partitions is running; `on_progress` is called in another thread."""
        self._call(self._client.wait_reassigned(partitions, on_progress))

    def drain_broker(self, broker_id: int, *, wait: bool = True, on_progress: OnDrain | None = None) -> DrainProgress:
        """Move every replica of a broker to the others; `on_progress` is called in another thread."""
        return self._call(self._client.drain_broker(broker_id, wait=wait, on_progress=on_progress))

    def unregister_broker(self, broker_id: int) -> None:
        """Let the cluster forget a broker that is stopped and has no replica."""
        self._call(self._client.unregister_broker(broker_id))

    def describe_configs(
        self, resources: Iterable[ConfigResource], *, keys: Iterable[str] = (), with_documentation: bool = False
    ) -> dict[ConfigResource, dict[str, ConfigValue]]:
        """The configurations of topics and brokers by key."""
        work = self._client.describe_configs(resources, keys=keys, with_documentation=with_documentation)
        return self._call(work)

    def alter_configs(
        self, changes: Mapping[ConfigResource, Iterable[ConfigAlteration]], *, validate_only: bool = False
    ) -> None:
        """Change single configuration keys."""
        self._call(self._client.alter_configs(changes, validate_only=validate_only))

    def describe_user_scram_credentials(
        self, users: Iterable[str] | None = None
    ) -> dict[str, list[ScramCredentialInfo]]:
        """The SCRAM credentials in the metadata log by user."""
        return self._call(self._client.describe_user_scram_credentials(users))

    def set_user_scram_credential(
        self, user: str, mechanism: ScramMechanism, password: str, *, iterations: int = ITERATIONS_MIN
    ) -> None:
        """Give a user a SCRAM credential, or another one."""
        self._call(self._client.set_user_scram_credential(user, mechanism, password, iterations=iterations))

    def delete_user_scram_credential(self, user: str, mechanism: ScramMechanism) -> None:
        """Take a user's SCRAM credential away."""
        self._call(self._client.delete_user_scram_credential(user, mechanism))

    def list_offsets(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after a timestamp."""
        return self._call(self._client.list_offsets(timestamps))

    def delete_records(self, offsets: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets."""
        return self._call(self._client.delete_records(offsets))

    def describe_cluster(self) -> ClusterDescription:
        """The brokers."""
        return self._call(self._client.describe_cluster())

    def describe_quorum(self) -> QuorumDescription:
        """The metadata quorum."""
        return self._call(self._client.describe_quorum())

    def list_fetch_sessions(self, broker_id: int | None = None) -> list[BrokerSessions]:
        """The fetch sessions at one broker, or at all of them."""
        return self._call(self._client.list_fetch_sessions(broker_id))


__all__ = ["AdminClient", "Consumer", "PendingRecord", "Portal", "Producer"]
