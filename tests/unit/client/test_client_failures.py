"""A background task that ends by an error nobody expected: it is logged, and every call says so instead of waiting."""

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
    """What nobody expects."""


class BrokenPolicy:
    """A refresh policy with a bug that shows from the second request on."""

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


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What others report, as grpc of a loop that a test before has closed, is not what is asked here."""
    return [record for record in caplog.records if record.name.startswith("kipmesh")]


def check_logged(caplog: pytest.LogCaptureFixture, what: str) -> None:
    (record,) = [record for record in ours(caplog) if record.levelno >= logging.ERROR]
    assert what in record.getMessage()
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


async def test_failed_metadata_task_fails_the_calls_of_a_producer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with Producer(cluster.bootstrap, **FAST) as producer:
            await (await producer.send("t", b"0"))
            cluster.inject("Produce", ErrorCode.NOT_LEADER_OR_FOLLOWER, times=1000)
            waiting = await producer.send("t", b"1")
            flushing = asyncio.create_task(producer.flush())
            asking = asyncio.create_task(producer.send("other", b"x"))
            await asyncio.sleep(0.02)
            break_tracker(producer, monkeypatch)
            for work in (flushing, asking):
                await expect_failure(work)
            assert isinstance(waiting.exception(), KafkaError)
            await expect_failure(producer.send("t", b"2"))
            await expect_failure(producer.flush())
            with pytest.raises(KafkaError, match="failed"):
                producer.send_nowait("t", b"3")
        check_logged(caplog, "metadata task")


async def test_failed_metadata_task_fails_the_calls_of_a_consumer(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_failed_metadata_task_fails_the_calls_of_an_admin_client() -> None:
    async with FakeCluster() as cluster, AdminClient(cluster.bootstrap) as admin:
        break_metadata(admin._cluster.metadata)
        await asyncio.sleep(0.02)
        await expect_failure(admin.list_offsets({("no", 0): 0}))


async def test_a_malformed_answer_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Pool(ConnectionPool):
        """Gives a broken connection at first."""

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
        assert [record.exc_info[0] for record in ours(caplog) if record.exc_info] == [BrokenError] * 3
        assert metadata.failure is None
        await metadata.close()
        await pool.close()


async def test_failed_sending_task_fails_the_calls_of_a_producer(caplog: pytest.LogCaptureFixture) -> None:
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
            assert producer._memory.free_bytes == free, "the one that waited had reserved nothing"
            await expect_failure(producer.send("t", b"x"))
            await expect_failure(producer.flush())
            hold.set()
            await asyncio.wait_for(producer.close(), 60)
        check_logged(caplog, "sending task")


def break_sender(sender: Any) -> None:
    """A deadline that cannot be compared: the next step fails."""

    class Never:
        finished = False

        @property
        def created_s(self) -> float:
            raise BrokenError

    sender._by_age.appendleft(Never())
    sender.wake.set()


async def test_failed_fetching_task_fails_the_calls_of_a_consumer(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_room_that_will_never_be_is_not_room() -> None:
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


async def test_a_cancelled_send_keeps_no_room() -> None:
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


def test_the_end_of_a_portals_loop_ends_every_call() -> None:
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


async def test_a_silent_leader_is_given_up_as_soon_as_another_one_leads() -> None:
    """A stopped process keeps its connections, and answers no question for metadata either."""
    async with FakeCluster(3) as fake:
        fake.create_topic("t")
        fake.move_leader("t", 0, 1)
        asked: list[str] = []

        async def stopped(method: str, node_id: int, _request: object) -> None:
            if node_id == 1 and (asked or method == "Produce"):
                asked.append(method)
                await asyncio.Event().wait()

        fake.hook = stopped
        late = {"request.timeout.ms": 200_000, "delivery.timeout.ms": 300_000}
        async with Producer(fake.bootstrap, **FAST, **late) as producer:
            delivery = await producer.send("t", b"v")
            await until(lambda: asked)
            await asyncio.sleep(1.0)  # a leader that leads is waited for
            assert not delivery.done()
            assert asked.count("Produce") == 1
            fake.move_leader("t", 0, 2)
            assert (await asyncio.wait_for(delivery, 60)).offset == 0


@pytest.mark.parametrize("answers", [False, True], ids=["a silent leader", "a leader that cannot replicate"])
async def test_a_timeout_is_a_reason_to_ask_who_leads_now(answers: bool) -> None:
    """Found by chaos: a leader that was cut off kept its producers for as long as that lasted."""
    async with FakeCluster(2) as fake:
        fake.create_topic("t")
        fake.move_leader("t", 0, 1)
        moved = asyncio.Event()

        async def cut_off(method: str, node_id: int, _request: object) -> None:
            if method == "Produce" and node_id == 1:
                fake.move_leader("t", 0, 2)
                moved.set()
                if answers:
                    fake.inject("Produce", ErrorCode.REQUEST_TIMED_OUT)
                else:
                    await asyncio.Event().wait()

        fake.hook = cut_off
        async with Producer(fake.bootstrap, **FAST) as producer:
            await producer.partitions_for("t")
            sender = producer._sender
            assert sender is not None
            sender._config = producer.config.model_copy(update={"request_timeout_ms": 200})  # for records only
            where = await asyncio.wait_for(await producer.send("t", b"v"), 60)
        assert moved.is_set()
        assert where.offset == 0
