"""The group coordinator of one partition of `__consumer_offsets`, for one leader epoch. Drives `kipmesh.core.group`.

    loading --(log read, and replicated to its end)--> active --(leadership lost, or node stops)--> closed

Every request has a number and a future. Writes are appended in order and reported to the coordinator when they are
below the high watermark, and synced if `flush.messages` requires it. A write that takes longer than
`offsets.commit.timeout.ms` fails its request, and still counts if it is replicated later. Belongs to the event loop.

The log is read in chunks that are decoded off the event loop. Records that do not belong to a classic group, for
example of newer group protocols, are skipped with a warning.
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

RequestStep = Callable[[GroupCoordinator, int, Instant], Decision]
"""A request: maps the coordinator, the request's number and the time to a decision."""
OnDisconnect = Callable[[GroupCoordinator, int], None]
"""Called with the coordinator and the request's number if the client of a pending request disconnects."""


def settings_of(config: BrokerConfig) -> Settings:
    """Return the group coordinator's settings from the broker's configuration."""
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
    """A write that is in the log but not yet committed."""

    write_id: int
    last_offset: int
    timer: asyncio.TimerHandle
    is_flushed: bool


@dataclass(eq=False)
class GroupShard:
    """The group coordinator of one partition of `__consumer_offsets`, while this broker leads it in one epoch.

    Starts loading the groups from the log when it is created.
    """

    replica: Replica
    config: BrokerConfig
    disk: Disk
    on_task_done: Callable[[asyncio.Task[None]], None]

    def __post_init__(self) -> None:
        self.leader_epoch = self.replica.leader_epoch
        self.coordinator: GroupCoordinator | None = None
        """None while the log is being read."""
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._in_flight: deque[_InFlight] = deque()
        self._flushing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self.is_closed = False
        self._loading = asyncio.create_task(self._load(), name=f"load-groups-{self.replica.partition}")
        self._loading.add_done_callback(self.on_task_done)

    # --- life --------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        replica, begin = self.replica, monotonic_ms()
        end = replica.log.log_end_offset  # later records are this epoch's
        while True:
            try:
                table = await read_table(replica, end)
                break
            except KafkaError as error:
                log.error("groups not read", log=str(replica), error=str(error))
                await asyncio.sleep(RELOAD_BACKOFF_S)
        await self._wait_replicated(end - 1)
        if self.is_closed:
            return
        self.coordinator = GroupCoordinator(settings_of(self.config), table)
        self._apply(self.coordinator.loaded(self._now()))
        log.info("groups loaded", log=str(replica), groups=len(table.group_ids()), took_ms=monotonic_ms() - begin)

    async def _wait_replicated(self, offset: int) -> None:
        """Wait until `offset` is committed or the shard is closed. Records of a former leader may still be lost."""
        while offset >= self.replica.high_watermark and not self.is_closed:
            result: asyncio.Future[ErrorCode] = self._loop.create_future()
            self.replica.when_replicated(offset, self.leader_epoch, partial(_set_result, result))
            if await result == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                self.close()

    def close(self) -> None:
        """Stop because leadership is lost or the broker stops. Pending requests get NOT_COORDINATOR. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loading.cancel()
        for task in self._flushing:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
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

    async def request(self, step: RequestStep, on_disconnect: OnDisconnect | None = None) -> Any:
        """Execute a request and return its response, which may contain an error code.

        `on_disconnect` is called if the caller is cancelled. Raises the errors of `active`, and KafkaError with
        NOT_COORDINATOR if the shard is closed before the response.
        """
        coordinator = self.active()
        number = next(self._numbers)
        future = self._futures[number] = self._loop.create_future()
        try:
            self._apply(step(coordinator, number, self._now()))
            return await future
        except asyncio.CancelledError:
            if on_disconnect is not None:
                on_disconnect(coordinator, number)
            raise
        finally:
            self._futures.pop(number, None)

    def active(self) -> GroupCoordinator:
        """Return the coordinator.

        Raises KafkaError: NOT_COORDINATOR if the shard is closed or its leader is deposed or isolated,
        COORDINATOR_LOAD_IN_PROGRESS while the log is being read.
        """
        if self.is_closed or self.replica.rejects_clients or self.replica.leader_epoch != self.leader_epoch:
            raise KafkaError(ErrorCode.NOT_COORDINATOR)
        if self.coordinator is None:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return self.coordinator

    def execute(self, step: Callable[[GroupCoordinator, Instant], Decision]) -> None:
        """Execute a step that has no response. Does nothing while the log is being read and after `close`."""
        if self.coordinator is not None and not self.is_closed:
            self._apply(step(self.coordinator, self._now()))

    def _now(self) -> Instant:
        return Instant(wall_ms(), monotonic_ms())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        self._respond(decision)
        for write in decision.writes:
            self._append(write)
        self._set_timer()

    def _respond(self, decision: Decision) -> None:
        for completion in decision.completions:
            future = self._futures.pop(completion.request_id, None)
            if future is not None and not future.done():
                future.set_result(completion.response)

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
            log.info("group write failed", group=write.group_id, error=str(error))
            self._apply(coordinator.failed(write.id, code, now))
            return
        timer = self._loop.call_later(self.config.offsets_commit_timeout_ms / 1000, self._time_out, write.id)
        entry = _InFlight(write.id, info.last_offset, timer, not self.replica.must_flush)
        self._in_flight.append(entry)
        if not entry.is_flushed:
            task = self._loop.create_task(self._flush(entry), name="flush-groups")
            self._flushing.add(task)
            task.add_done_callback(self._flushing.discard)
        self._when_committed(entry)

    async def _flush(self, entry: _InFlight) -> None:
        try:
            await self.disk.run(self.replica.log.flush)
        except KafkaError as error:  # the log has failed; another broker will lead
            log.error("group flush failed", error=str(error))
            return
        entry.is_flushed = True
        self._report_committed()

    def _when_committed(self, entry: _InFlight) -> None:
        def done(code: ErrorCode) -> None:
            if code == ErrorCode.NOT_LEADER_OR_FOLLOWER:
                self.close()
            elif entry.last_offset < self.replica.high_watermark:
                # Not within the append or fetch that moved the high watermark: it may append again.
                self._loop.call_soon(self._report_committed)
            elif not self.is_closed:  # the ISR is too small; it may recover
                self._when_committed(entry)

        self.replica.when_replicated(entry.last_offset, self.leader_epoch, done)

    def _report_committed(self) -> None:
        """Report committed and flushed writes to the coordinator, in the order of the log."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].is_flushed and in_flight[0].last_offset < self.replica.high_watermark:
            entry = in_flight.popleft()
            entry.timer.cancel()
            if self.coordinator is not None:
                self._apply(self.coordinator.committed(entry.write_id, self._now()))

    def _time_out(self, write_id: int) -> None:
        if self.coordinator is not None and not self.is_closed:
            code = ErrorCode.REQUEST_TIMED_OUT
            self._apply(self.coordinator.failed(write_id, code, self._now(), may_commit=True))

    # --- time --------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        due = None if self.coordinator is None or self.is_closed else self.coordinator.next_deadline_ms()
        if due == self._timer_ms and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ms = due
        if due is not None:
            self._timer = self._loop.call_later(max(due - monotonic_ms(), 0) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.coordinator is not None and not self.is_closed:
            self._apply(self.coordinator.tick(self._now()))


def _set_result(future: asyncio.Future[ErrorCode], code: ErrorCode) -> None:
    if not future.done():
        future.set_result(code)


def batch_of(records: Sequence[Record], now_ms: int) -> bytes:
    """Encode records as one record batch. Raises ValueError if a record does not fit the format."""
    pairs = [encode_record(record) for record in records]
    return record_batch.build(pairs, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms)


async def read_table(replica: Replica, end: int) -> GroupTable:
    """Return a table with the group records below the offset `end`. Corrupt records are skipped with a warning.

    Raises KafkaError if the log cannot be read.
    """
    table = GroupTable()
    offset = replica.log.log_start_offset
    while offset < end:
        data = replica.log.read(offset, CHUNK_BYTES, end, True)
        if not data:
            break
        offset = await asyncio.to_thread(_replay, table, data, offset, str(replica))
    return table


def _replay(table: GroupTable, data: bytes, offset: int, where: str) -> int:
    """Replay whole batches into `table` on another thread, which then owns it. Returns the next offset."""
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
                log.warning("record skipped", log=where, offset=record.offset, error=str(error))
                continue
            if known is not None:
                table.replay(known)
    except CorruptRecordError as error:
        log.warning("batch skipped", log=where, offset=header.base_offset, error=str(error))
