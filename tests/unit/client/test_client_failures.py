"""An unexpected error ends a background task: it is logged, and calls raise it instead of waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

import pytest

from kipmesh.client import AdminClient, Consumer, Producer, sync
from kipmesh.client.metadata import Choice, Metadata, TopicEntry
from kipmesh.client.producer.accumulator import BufferMemory
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster
from kipmesh.transport.grpc.client import ConnectionPool

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "linger.ms": 0}
READ = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "auto.offset.reset": "earliest"}


class BrokenError(Exception):
    """An unexpected error."""


class BrokenPolicy:
    """A refresh policy that raises once `breaks` is set."""

    def __init__(self) -> None:
        self.breaks = False

    def choose(self, _now_s: float, entries: Mapping[str, TopicEntry]) -> Choice:
        if self.breaks:
            raise BrokenError
        return Choice(tuple(entries))


async def expect_failure(work: Any) -> None:
    with pytest.raises(KafkaError, match="failed: BrokenError") as caught:
        await asyncio.wait_for(work, 60)
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR


def kipmesh_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return log records of kipmesh. Ignores others, for example of grpc about closed event loops."""
    return [record for record in caplog.records if record.name.startswith("kipmesh")]


def check_logged(caplog: pytest.LogCaptureFixture, task: str) -> None:
    (record,) = [record for record in kipmesh_records(caplog) if record.levelno >= logging.ERROR]
    assert task in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is BrokenError


def break_metadata(metadata: Metadata) -> None:
    policy = BrokenPolicy()
    policy.breaks = True
    metadata._policy = policy
    metadata.request_refresh()


def break_tracker(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(_now_ms: float) -> None:
        raise BrokenError

    monkeypatch.setattr(producer._metadata._tracker, "poll", poll)
    producer._metadata.request_refresh()


async def test_failed_metadata_task_fails_producer_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"0"))
            cluster.inject("Produce", ErrorCode.NOT_LEADER_OR_FOLLOWER, times=1000)
            waiting = await producer.send("t", b"1")
            flushing = asyncio.create_task(producer.flush())
            sending = asyncio.create_task(producer.send("other", b"x"))
            await asyncio.sleep(0.02)
            break_tracker(producer, monkeypatch)
            for work in (flushing, sending):
                await expect_failure(work)
            assert isinstance(waiting.exception(), KafkaError)
            await expect_failure(producer.send("t", b"2"))
            await expect_failure(producer.flush())
            with pytest.raises(KafkaError, match="failed"):
                producer.send_nowait("t", b"3")
        check_logged(caplog, "metadata task")


async def test_failed_metadata_task_fails_consumer_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Consumer(cluster.bootstrap, **READ) as consumer:
            consumer.subscribe(["t"])
            await consumer.poll(50)
            polling = asyncio.create_task(consumer.poll(60_000))
            await asyncio.sleep(0.02)
            break_metadata(consumer._metadata)
            await expect_failure(polling)
            await expect_failure(consumer.poll(60_000))
            await expect_failure(consumer.position(("t", 0)))
        check_logged(caplog, "metadata task")


async def test_failed_metadata_task_fails_admin_client_calls() -> None:
    async with FakeCluster() as cluster, AdminClient(cluster.bootstrap) as admin:
        break_metadata(admin._cluster.metadata)
        await asyncio.sleep(0.02)
        await expect_failure(admin.list_offsets({("no", 0): 0}))


async def test_broken_metadata_connection_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    class Pool(ConnectionPool):
        """Returns a broken connection three times."""

        broken = 3

        def get(self, address: str) -> Any:
            if self.broken:
                self.broken -= 1
                raise BrokenError
            return super().get(address)

    async with FakeCluster() as cluster:
        pool = Pool("test")
        metadata = Metadata(cluster.bootstrap, pool, ProducerConfig.parse(FAST))
        await metadata.start(60)
        assert set(metadata.brokers) == {1}
        assert [record.exc_info[0] for record in kipmesh_records(caplog) if record.exc_info] == [BrokenError] * 3
        assert metadata.failure is None
        await metadata.close()
        await pool.close()


async def test_failed_sender_task_fails_producer_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        config = {**FAST, "batch.size": 1000, "buffer.memory": 2000, "linger.ms": 60_000}
        async with Producer(cluster.bootstrap, **config) as producer:
            sender = producer._sender
            assert sender is not None
            hold = asyncio.Event()

            async def hook(method: str, _node: int, _request: object) -> None:
                if method == "Produce":
                    await hold.wait()

            cluster.hook = hook
            sent = [await producer.send("t", b"x" * 900) for _ in range(2)]
            blocked = asyncio.create_task(producer.send("t", b"x" * 900))
            await asyncio.sleep(0.02)
            free = producer._memory.free_bytes
            flushing = asyncio.create_task(producer.flush())
            await asyncio.sleep(0)
            break_sender(sender)
            for work in (blocked, flushing):
                await expect_failure(work)
            assert all(isinstance(each.exception(), KafkaError) for each in sent)
            assert producer._memory.free_bytes == free, "the blocked send has reserved no memory"
            await expect_failure(producer.send("t", b"x"))
            await expect_failure(producer.flush())
            hold.set()
            await asyncio.wait_for(producer.close(), 60)
        check_logged(caplog, "sending task")


def break_sender(sender: Any) -> None:
    """Insert a batch whose age raises, so that the sender's next step fails."""

    class Never:
        finished = False

        @property
        def created_s(self) -> float:
            raise BrokenError

    sender._by_age.appendleft(Never())
    sender.wake.set()


async def test_failed_fetcher_task_fails_consumer_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Consumer(cluster.bootstrap, **READ) as consumer:
            consumer.subscribe(["t"])
            await consumer.poll(50)
            polling = asyncio.create_task(consumer.poll(60_000))
            await asyncio.sleep(0.02)

            class Unhashable(dict[Any, Any]):
                def __or__(self, other: Any) -> Any:
                    raise BrokenError

            consumer._fetcher._deferred = Unhashable()
            consumer._fetcher.wake.set()
            await expect_failure(polling)
            await expect_failure(consumer.poll(0))
        check_logged(caplog, "fetching task")


async def test_refused_buffer_waiters_get_no_memory() -> None:
    memory = BufferMemory(100)
    assert memory.try_reserve(100)
    waiting = asyncio.create_task(memory.reserve(50, 60))
    await asyncio.sleep(0)
    memory.refuse_waiters()
    assert not await waiting
    waiting = asyncio.create_task(memory.reserve(50, 60))
    await asyncio.sleep(0)
    memory.refuse_waiters()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    memory.release(100)
    assert memory.free_bytes == 100


async def test_cancelled_send_releases_buffer_memory() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **{**FAST, "batch.size": 1000, "buffer.memory": 1000}) as producer:
            for steps in range(12):
                first = await producer.send("t", b"x" * 900)
                second = asyncio.create_task(producer.send("t", b"x" * 900))
                for _ in range(steps):
                    await asyncio.sleep(0)
                second.cancel()
                await asyncio.gather(second, return_exceptions=True)
                await first
                await producer.flush()
                assert producer._memory.free_bytes == 1000


def test_stopped_portal_loop_cancels_calls() -> None:
    portal = sync.Portal("test")

    async def wait() -> None:
        await asyncio.Event().wait()

    future = portal.submit(wait())
    portal._loop.call_soon_threadsafe(portal._loop.stop)
    with pytest.raises(CancelledError):
        future.result(60)
    portal._thread.join(60)
    with pytest.raises(RuntimeError, match="closed"):
        portal.call(wait())
    portal.close()


async def test_producer_leaves_silent_leader_after_leader_change() -> None:
    """A stopped process keeps its connections and responds to no request, not even for metadata."""
    async with FakeCluster(3) as fake:
        fake.create_topic("t")
        fake.move_leader("t", 0, 1)
        requests: list[str] = []

        async def stopped(method: str, node_id: int, _request: object) -> None:
            if node_id == 1 and (requests or method == "Produce"):
                requests.append(method)
                await asyncio.Event().wait()

        fake.hook = stopped
        late = {"request.timeout.ms": 200_000, "delivery.timeout.ms": 300_000}
        async with Producer(fake.bootstrap, **FAST, **late) as producer:
            delivery = await producer.send("t", b"v")
            await until(lambda: requests)
            await asyncio.sleep(1.0)  # the producer waits for the current leader
            assert not delivery.done()
            assert requests.count("Produce") == 1
            fake.move_leader("t", 0, 2)
            assert (await asyncio.wait_for(delivery, 60)).offset == 0


@pytest.mark.parametrize("responds", [False, True], ids=["silent leader", "leader without replication"])
async def test_produce_timeout_refreshes_leader(responds: bool) -> None:
    """Found by chaos tests: producers waited for an isolated leader until the partition healed."""
    async with FakeCluster(2) as fake:
        fake.create_topic("t")
        fake.move_leader("t", 0, 1)
        moved = asyncio.Event()

        async def cut_off(method: str, node_id: int, _request: object) -> None:
            if method == "Produce" and node_id == 1:
                fake.move_leader("t", 0, 2)
                moved.set()
                if responds:
                    fake.inject("Produce", ErrorCode.REQUEST_TIMED_OUT)
                else:
                    await asyncio.Event().wait()

        fake.hook = cut_off
        async with Producer(fake.bootstrap, **FAST) as producer:
            await producer.partitions_for("t")
            sender = producer._sender
            assert sender is not None
            sender._config = producer.config.model_copy(update={"request_timeout_ms": 200})  # for records only
            metadata = await asyncio.wait_for(await producer.send("t", b"v"), 60)
        assert moved.is_set()
        assert metadata.offset == 0
