"""The coordinator of one partition of `__consumer_offsets`, for one leader epoch: the driver of `core.group`.

    loading --(the log is read, and all of it replicated)--> active --(another leader, or the node stops)--> closed

Every request is a number with a future. Writes are appended in order and reported when they are below the high
watermark (and fsynced, where `flush.messages` asks for it). One that takes longer than `offsets.commit.timeout.ms` is
answered with an error, and still counts when it is replicated later. All of it is owned by the event loop.

The log is read in chunks, decoded off the event loop. What is not a record of groups (foreign or of Kafka's newer group
protocols) is skipped with a warning: it must not keep a broker from serving the groups beside it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from kipmesh.broker.replication.replica import Disk, Replica
from kipmesh.core import record_batch
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.group.coordinator import GroupCoordinator
from kipmesh.core.group.records import Record, decode_record, encode_record
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Decision, Instant, Settings, Write
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.storage.compression import decompress

log = structlog.get_logger(__name__)

ACKS_ALL = -1
RELOAD_BACKOFF_S = 0.5
CHUNK_BYTES = 1 << 20
RECORDS_OF_A_BATCH_BYTES_MAX = 64 << 20

Step = Callable[[GroupCoordinator, int, Instant], Decision]
"""A request: from the coordinator, the request's number and the time to what is to be done."""
Gone = Callable[[GroupCoordinator, int], None]
"""Who sent the request of that number has gone."""


def settings_of(config: BrokerConfig) -> Settings:
    """The coordinator's part of a broker's configuration."""
    return Settings(
        config.group_min_session_timeout_ms,
        config.group_max_session_timeout_ms,
        config.group_initial_rebalance_delay_ms,
        config.group_max_size,
        config.offset_metadata_max_bytes,
        config.offsets_retention_minutes * 60_000,
    )


@dataclass(slots=True, eq=False)
class _InFlight:
    """A write that is in the log."""

    write_id: int
    last_offset: int
    timer: asyncio.TimerHandle
    is_flushed: bool


@dataclass(eq=False)
class GroupShard:
    """One partition while this broker leads it in one epoch."""

    replica: Replica
    config: BrokerConfig
    disk: Disk
    on_task_done: Callable[[asyncio.Task[None]], None]

    def __post_init__(self) -> None:
        self.leader_epoch = self.replica.leader_epoch
        self.coordinator: GroupCoordinator | None = None
        """None while the log is read."""
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._in_flight: deque[_InFlight] = deque()
        self._flushing: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ms: int | None = None
        self.is_closed = False
        self._loading = asyncio.create_task(self._load(), name=f"load-groups-{self.replica.partition}")
        self._loading.add_done_callback(self.on_task_done)

    # --- life --------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        replica, begin = self.replica, monotonic_ms()
        where = f"{replica.topic}-{replica.partition}"
        end = replica.log.log_end_offset  # no other epoch's records come after it
        while True:
            try:
                table = await read_table(replica, end)
                break
            except KafkaError as error:  # the disk; the members keep asking
                log.error("groups cannot be read", log=where, error=str(error))
                await asyncio.sleep(RELOAD_BACKOFF_S)
        await self._until_replicated(end - 1)
        if self.is_closed:
            return
        self.coordinator = GroupCoordinator(settings_of(self.config), table)
        self._carry_out(self.coordinator.loaded(self._now()))
        log.info("groups loaded", log=where, groups=len(table.group_ids()), took_ms=monotonic_ms() - begin)

    async def _until_replicated(self, offset: int) -> None:
        """What a former leader wrote counts when it can be lost no more."""
        while offset >= self.replica.high_watermark and not self.is_closed:
            news: asyncio.Future[ErrorCode] = self._loop.create_future()
            self.replica.when_replicated(offset, self.leader_epoch, partial(_settle, news))
            if await news == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                self.close()

    def close(self) -> None:
        """This broker leads the partition no more, or ends: whoever waits is told NOT_COORDINATOR. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loading.cancel()
        for task in self._flushing:
            task.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        for entry in self._in_flight:
            entry.timer.cancel()
        self._in_flight.clear()
        if self.coordinator is not None:
            self._respond(self.coordinator.unloaded(self._now()))
        for future in self._futures.values():
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.NOT_COORDINATOR))
        self._futures.clear()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def ask(self, step: Step, gone: Gone | None = None) -> Any:
        """The answer to a request; raises KafkaError where this broker is not the coordinator, or not yet.

        `gone` is called where who asked does not wait for the answer.
        """
        coordinator = self.active()
        number = next(self._numbers)
        future = self._futures[number] = self._loop.create_future()
        try:
            self._carry_out(step(coordinator, number, self._now()))
            return await future
        except asyncio.CancelledError:
            if gone is not None:
                gone(coordinator, number)
            raise
        finally:
            self._futures.pop(number, None)  # who asked may have gone

    def active(self) -> GroupCoordinator:
        """The coordinator; raises NOT_COORDINATOR or COORDINATOR_LOAD_IN_PROGRESS."""
        if self.is_closed or self.replica.is_cut_off or self.replica.leader_epoch != self.leader_epoch:
            raise KafkaError(ErrorCode.NOT_COORDINATOR)
        if self.coordinator is None:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return self.coordinator

    def do(self, step: Callable[[GroupCoordinator, Instant], Decision]) -> None:
        """Something that nobody waits for; nothing where there is no active coordinator."""
        if self.coordinator is not None and not self.is_closed:
            self._carry_out(step(self.coordinator, self._now()))

    def _now(self) -> Instant:
        return Instant(wall_ms(), monotonic_ms())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        self._respond(decision)
        for write in decision.writes:
            self._append(write)
        self._set_alarm()

    def _respond(self, decision: Decision) -> None:
        for answer in decision.answers:
            future = self._futures.pop(answer.request_id, None)
            if future is not None and not future.done():
                future.set_result(answer.response)

    def _append(self, write: Write) -> None:
        coordinator = self.coordinator
        if coordinator is None or self.is_closed:
            return
        now = self._now()
        try:
            batch = batch_of(write.records, now.wall_ms)
            info = self.replica.append(batch, ACKS_ALL, now.wall_ms)
        except (KafkaError, ValueError) as error:
            code = error.code if isinstance(error, KafkaError) else ErrorCode.UNKNOWN_SERVER_ERROR
            log.info("group not written", group=write.group_id, error=str(error))
            self._carry_out(coordinator.failed(write.id, code, now))
            return
        timer = self._loop.call_later(self.config.offsets_commit_timeout_ms / 1000, self._too_late, write.id)
        entry = _InFlight(write.id, info.last_offset, timer, not self.replica.must_flush)
        self._in_flight.append(entry)
        if not entry.is_flushed:
            task = self._loop.create_task(self._flush(entry), name="flush-groups")
            self._flushing.add(task)
            task.add_done_callback(self._flushing.discard)
        self._watch(entry)

    async def _flush(self, entry: _InFlight) -> None:
        try:
            await self.disk.run(self.replica.log.flush)
        except KafkaError as error:  # a log that does not take its records is closed, and led by another broker soon
            log.error("groups not flushed", error=str(error))
            return
        entry.is_flushed = True
        self._report()

    def _watch(self, entry: _InFlight) -> None:
        def news(code: ErrorCode) -> None:
            if code == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                self.close()
            elif entry.last_offset < self.replica.high_watermark:
                # Not from within the append or the fetch that moved it: what follows may append again.
                self._loop.call_soon(self._report)
            elif not self.is_closed:  # too few replicas now: it may still come true
                self._watch(entry)

        self.replica.when_replicated(entry.last_offset, self.leader_epoch, news)

    def _report(self) -> None:
        """Tell the coordinator of the writes that are durable, in their order."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].is_flushed and in_flight[0].last_offset < self.replica.high_watermark:
            entry = in_flight.popleft()
            entry.timer.cancel()
            if self.coordinator is not None:
                self._carry_out(self.coordinator.committed(entry.write_id, self._now()))

    def _too_late(self, write_id: int) -> None:
        if self.coordinator is not None and not self.is_closed:
            code = ErrorCode.REQUEST_TIMED_OUT
            self._carry_out(self.coordinator.failed(write_id, code, self._now(), may_commit=True))

    # --- time --------------------------------------------------------------------------------------------------------

    def _set_alarm(self) -> None:
        due = None if self.coordinator is None or self.is_closed else self.coordinator.next_deadline_ms()
        if due == self._alarm_ms and self._alarm is not None:
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._alarm_ms = due
        if due is not None:
            self._alarm = self._loop.call_later(max(due - monotonic_ms(), 0) / 1000, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self.coordinator is not None and not self.is_closed:
            self._carry_out(self.coordinator.tick(self._now()))


def _settle(future: asyncio.Future[ErrorCode], code: ErrorCode) -> None:
    if not future.done():
        future.set_result(code)


def batch_of(records: Sequence[Record], now_ms: int) -> bytes:
    """The records as one batch to append; raises ValueError for what they cannot say."""
    pairs = [encode_record(record) for record in records]
    return record_batch.build(pairs, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms)


async def read_table(replica: Replica, end: int) -> GroupTable:
    """What the records below `end` say; raises KafkaError when the log cannot be read."""
    table = GroupTable()
    offset = replica.log.log_start_offset
    while offset < end:
        data = replica.log.read(offset, CHUNK_BYTES, end, True)
        if not data:
            break
        offset = await asyncio.to_thread(_replay, table, data, offset, f"{replica.topic}-{replica.partition}")
    return table


def _replay(table: GroupTable, data: bytes, offset: int, where: str) -> int:
    """Follow whole batches; returns the offset after them. `table` is nobody else's meanwhile."""
    for position, header in record_batch.iterate(data, allow_partial=True):
        if not header.is_control:
            _replay_batch(table, data, position, header, where)
        offset = header.next_offset
    return offset


def _replay_batch(table: GroupTable, data: bytes, position: int, header: record_batch.BatchHeader, where: str) -> None:
    try:
        if header.compression:
            body = data[position + record_batch.HEADER_BYTES : position + header.size_bytes]
            plain = decompress(body, header.compression, RECORDS_OF_A_BATCH_BYTES_MAX)
            header = header.with_records(len(plain), 0)
            data, position = record_batch.pack_header(header) + plain, 0
        for record in record_batch.read_records(data, position, header):
            try:
                known = decode_record(record.key, record.value)
            except CorruptRecordError as error:
                log.warning("record of no group skipped", log=where, offset=record.offset, error=str(error))
                continue
            if known is not None:
                table.replay(known)
    except CorruptRecordError as error:
        log.warning("batch of no groups skipped", log=where, offset=header.base_offset, error=str(error))
