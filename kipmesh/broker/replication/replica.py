"""One partition on this broker: its log, its role and its waiting requests. Rules 227-10, 392-01 and REP-01 to REP-04.

Applies the decisions of `kipmesh.core.replica`: appends, advances offsets, completes produce requests when the high
watermark passes them and notifies fetch sessions of changes. `kipmesh.broker.requests.reading` reads it for fetches.

A replica belongs to the event loop. Appends and reads run on the loop because each is one `pwrite` or `pread` of the
page cache. Fsyncs and checkpoints run on the thread of `Disk`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import HIGH_WATERMARK, LEADERSHIP, LOG_END, LOG_START, Subscriptions, partition_key
from kipmesh.core.metadata.image import PartitionKey, PartitionState
from kipmesh.core.metadata.states import lost_replicas
from kipmesh.core.replica.follower import FollowerWatermarks, truncation_offset
from kipmesh.core.replica.leader import FollowerFetches, IsrChange, PartitionLeader
from kipmesh.storage.log.log import Log
from kipmesh.storage.log.validation import AppendInfo
from kipmesh.storage.log_manager import LogManager

Result = TypeVar("Result")


class Disk:
    """A single thread that runs blocking disk work in order, so that no two threads use the log manager at a time."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-disk")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the disk thread and return its result. Exceptions of `work` propagate."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for the running work, cancel queued work and end the thread. Blocks."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class DirtyReplicas:
    """The replicas that need periodic work, so that idle partitions cost nothing. Belongs to the event loop.

    A high watermark moves back only when records below it are lost in a way that the rules allow (REP-01). The
    checkpoint on disk is then above the log end, and new records at these offsets would count as committed after a
    restart. `Replica.must_checkpoint` therefore blocks appends until a lower value is on disk.
    """

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        """Fetch sessions and waiting fetches by partition; notified immediately."""
        self.behind: dict[Replica, None] = {}
        """Led partitions whose followers may lack records. The followers of all other partitions are in sync."""
        self.unflushed: dict[Replica, None] = {}
        """Partitions whose logs may need an fsync by time or by size."""
        self.high_watermarks: dict[Replica, None] = {}
        """Partitions whose high watermark changed since the last checkpoint."""

    def remove(self, replica: Replica) -> None:
        """Remove a replica that this broker no longer hosts. Its subscriptions stay."""
        for table in (self.behind, self.unflushed, self.high_watermarks):
            table.pop(replica, None)

    @property
    def must_checkpoint(self) -> bool:
        """Whether a log refuses appends until its lowered high watermark is on disk."""
        return any(replica.must_checkpoint for replica in self.high_watermarks)

    async def checkpoint_high_watermarks(self, log_manager: LogManager, disk: Disk) -> None:
        """Write the changed high watermarks to disk. Logs that refused appends because of this accept them again.

        Raises KafkaError if the disk fails; the next call then writes them again.
        """
        moved, self.high_watermarks = self.high_watermarks, {}
        if not moved:
            return
        # The disk thread runs work in order: an older value never replaces a newer one.
        values = {replica: replica.high_watermark for replica in moved}
        high_watermarks = {(replica.topic, replica.partition): value for replica, value in values.items()}
        try:
            await disk.run(lambda: log_manager.checkpoint_high_watermarks(high_watermarks))
        except KafkaError:
            self.high_watermarks.update(moved)
            raise
        for replica, value in values.items():
            replica.checkpointed(value)


class AckWaiter(NamedTuple):
    """A write that waits until the high watermark is above `offset`. `done` receives the result."""

    offset: int
    done: Callable[[ErrorCode], None]


class DeleteWaiter(NamedTuple):
    """A DeleteRecords request that waits until the log start of every ISR member is at least `offset`."""

    offset: int
    done: asyncio.Future[ErrorCode]


@dataclass(slots=True, eq=False)
class Replica:
    """A partition on this broker, as a leader, a follower, or without a leader."""

    broker_id: int
    log: Log
    high_watermark: int
    monotonic_ms: Callable[[], int]
    """Clock for lag and ISR decisions, in ms. Records are stamped by the wall clock."""
    dirty_replicas: DirtyReplicas = field(default_factory=DirtyReplicas)
    topic: str = field(init=False)
    topic_id: bytes = field(init=False)
    partition: int = field(init=False)
    must_checkpoint: bool = field(init=False)
    """Whether the high watermark on disk is above the current one.

    Appends fail until a lower value is on disk: after a restart, new records below the old value would count as
    committed.
    """
    leader: PartitionLeader | None = field(default=None, init=False)
    has_role: bool = field(default=False, init=False)
    """Whether the replica leads or follows. Requests are refused before the first role and after `stop`."""
    rejects_clients: bool = field(default=False, init=False)
    """Whether an isolated broker redirects producers and consumers (`kipmesh.core.replica.serving`)."""
    leader_id: int = field(default=-1, init=False)
    leader_epoch: int = field(default=-1, init=False)
    _watermarks: FollowerWatermarks = field(init=False)
    """Both high watermarks of a follower (392-01); unused while this replica leads."""
    _ack_waiters: deque[AckWaiter] = field(default_factory=deque, init=False)
    _delete_waiters: list[DeleteWaiter] = field(default_factory=list, init=False)
    _key: bytes = field(init=False)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def key(self) -> PartitionKey:
        """The topic id and the partition number."""
        return self.topic_id, self.partition

    def __post_init__(self) -> None:
        log, checkpointed = self.log, self.high_watermark
        self.topic, self.topic_id, self.partition = log.topic, log.topic_id, log.partition
        self.high_watermark = min(max(checkpointed, log.log_start_offset), log.log_end_offset)
        self.must_checkpoint = checkpointed > self.high_watermark
        self._watermarks = FollowerWatermarks.start(-1, self.high_watermark)
        self._key = partition_key(self.topic_id, self.partition)

    def _changed(self, change: int) -> None:
        """Notify the fetch sessions and waiting fetches that contain this partition. `change`: bits such as LOG_END."""
        self.dirty_replicas.subscriptions.changed(self._key, self.topic, change)

    # --- roles -----------------------------------------------------------------------------------------------------

    def become_leader(
        self,
        state: PartitionState,
        *,
        min_insync_replicas: int,
        lag_max_ms: int,
        eligible_epoch: Callable[[int], int],
    ) -> None:
        """Lead in `state.leader_epoch`. Within the same epoch, apply changes to the ISR and the assignment.

        `lag_max_ms` is `replica.lag.time.max.ms`. `eligible_epoch` returns the epoch of a broker that may join the ISR,
        else -1. Raises StorageError if the epoch cannot be written.
        """
        if self.leader is not None and self.leader.leader_epoch == state.leader_epoch:
            self.leader.offline = lost_replicas(state)
            self.replicas_changed(state.replicas, min_insync_replicas)
            self.isr_changed(state.isr, state.partition_epoch)
            return
        self._drop_leadership()
        self.log.assign_epoch(state.leader_epoch)
        self.leader = PartitionLeader(
            broker_id=self.broker_id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=frozenset(state.isr),
            log_end_offset=self.log.log_end_offset,
            high_watermark=self.high_watermark,
            min_insync_replicas=min_insync_replicas,
            lag_max_ms=lag_max_ms,
            eligible_epoch=eligible_epoch,
            now_ms=self.monotonic_ms(),
        )
        self.leader.offline = lost_replicas(state)
        self.leader_id, self.leader_epoch, self.has_role = self.broker_id, state.leader_epoch, True
        self._set_high_watermark(self.leader.high_watermark)
        self.dirty_replicas.behind[self] = self.dirty_replicas.unflushed[self] = None
        self._changed(LEADERSHIP)

    def become_follower(self, state: PartitionState) -> None:
        """Follow `state.leader`, or no broker if it is -1.

        Pending produce and DeleteRecords requests fail with NOT_LEADER_OR_FOLLOWER.
        """
        if self.leader is not None or state.leader_epoch != self._watermarks.leader_epoch:
            self._watermarks = FollowerWatermarks.start(state.leader_epoch, self.high_watermark)
        self._drop_leadership()
        self.leader_id, self.leader_epoch, self.has_role = state.leader, state.leader_epoch, True
        self.dirty_replicas.unflushed[self] = None
        self._changed(LEADERSHIP)

    def _drop_leadership(self) -> None:
        self.leader = None
        self._fail_ack_waiters(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        deletes, self._delete_waiters = self._delete_waiters, []
        for delete in deletes:
            if not delete.done.done():
                delete.done.set_result(ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def stop(self) -> None:
        """Give up the role and fail pending requests with NOT_LEADER_OR_FOLLOWER, before the replica is unhosted."""
        self._drop_leadership()
        self.leader_id, self.has_role = -1, False
        self.dirty_replicas.remove(self)
        self._changed(LEADERSHIP)

    def check_epoch(self, current_leader_epoch: int) -> ErrorCode:
        """Compare a request's leader epoch with the replica's.

        Returns FENCED_LEADER_EPOCH if the request's epoch is older, UNKNOWN_LEADER_EPOCH if it is newer, NONE if it is
        equal or -1.
        """
        if current_leader_epoch < 0 or current_leader_epoch == self.leader_epoch:
            return ErrorCode.NONE
        older = current_leader_epoch < self.leader_epoch
        return ErrorCode.FENCED_LEADER_EPOCH if older else ErrorCode.UNKNOWN_LEADER_EPOCH

    def require_epoch(self, current_leader_epoch: int) -> None:
        """Raise KafkaError with the code of `check_epoch`, if there is one."""
        code = self.check_epoch(current_leader_epoch)
        if code:
            raise KafkaError(code, f"{self} is in leader epoch {self.leader_epoch}, got {current_leader_epoch}")

    def require_leader(self, current_leader_epoch: int = -1) -> PartitionLeader:
        """Return the leadership state of this replica.

        Raises KafkaError: FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH as in `check_epoch`, NOT_LEADER_OR_FOLLOWER if
        the replica does not lead.
        """
        self.require_epoch(current_leader_epoch)
        if self.leader is None:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"the leader of {self} is broker {self.leader_id}")
        return self.leader

    @property
    def current_leader(self) -> m.LeaderIdAndEpoch:
        """The leader and its epoch for responses. The id is -1 if it is unknown or this leader rejects clients."""
        is_unknown = self.rejects_clients and self.leader is not None
        return m.LeaderIdAndEpoch(-1 if is_unknown else self.leader_id, self.leader_epoch)

    def set_rejects_clients(self, rejects_clients: bool) -> None:
        """Set whether producers and consumers are refused. A change wakes waiting fetches."""
        if rejects_clients != self.rejects_clients:
            self.rejects_clients = rejects_clients
            self._changed(LEADERSHIP)

    def require_clients_accepted(self) -> None:
        """Raise KafkaError with NOT_LEADER_OR_FOLLOWER if the replica rejects clients."""
        if self.rejects_clients:
            raise KafkaError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{self}: broker {self.broker_id} is isolated from the controllers",
            )

    @property
    def leader_high_watermark(self) -> int:
        """The leader's high watermark for Fetch responses; on a follower the last value received (392-01)."""
        return self.high_watermark if self.leader is not None else self._watermarks.leader

    @property
    def must_flush(self) -> bool:
        """Whether `flush.messages` requires an fsync before the last records are acknowledged."""
        return self.log.unflushed_messages >= self.log.config.flush_messages

    # --- leading ---------------------------------------------------------------------------------------------------

    def append(self, batch: bytes, acks: int, now_ms: int) -> AppendInfo:
        """Append a producer's batch with the given `acks`. `now_ms` is wall time.

        Raises KafkaError: NOT_LEADER_OR_FOLLOWER if the replica does not lead or rejects clients, NOT_ENOUGH_REPLICAS
        if `acks` is -1 and the ISR is below `min.insync.replicas`, KAFKA_STORAGE_ERROR if the log refuses appends, or
        the code of the failed validation, for example CORRUPT_MESSAGE or OUT_OF_ORDER_SEQUENCE_NUMBER.
        """
        leader = self.require_leader()
        self.require_clients_accepted()
        self._check_growable()
        if acks == -1 and leader.is_under_min_isr:
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{self} has {len(leader.isr)} in-sync replicas, min.insync.replicas is {leader.min_insync_replicas}",
            )
        info = self.log.append_as_leader(batch, leader.leader_epoch, now_ms)
        self.dirty_replicas.unflushed[self] = self.dirty_replicas.behind[self] = None
        change = LOG_END
        if leader.appended(self.log.log_end_offset, self.monotonic_ms()):
            self._take_high_watermark(leader)
            change |= HIGH_WATERMARK
        self._changed(change)
        return info

    def when_replicated(self, offset: int, leader_epoch: int, done: Callable[[ErrorCode], None]) -> AckWaiter | None:
        """Call `done` once the record at `offset`, appended in `leader_epoch`, is committed or no longer can be.

        `done` receives NONE, NOT_LEADER_OR_FOLLOWER or NOT_ENOUGH_REPLICAS_AFTER_APPEND. Returns a waiter for
        `cancel_ack_waiter`, or None if `done` was called immediately. A different leader epoch fails because the offset
        may hold another record.
        """
        leader = self.leader
        if leader is None or leader.leader_epoch != leader_epoch:
            done(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        elif leader.high_watermark > offset:
            done(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND if leader.is_under_min_isr else ErrorCode.NONE)
        else:
            waiter, waiters = AckWaiter(offset, done), self._ack_waiters
            place = len(waiters)
            while place and waiters[place - 1].offset > offset:  # an fsync delayed this one
                place -= 1
            waiters.insert(place, waiter)
            return waiter
        return None

    def cancel_ack_waiter(self, waiter: AckWaiter) -> None:
        """Drop a waiter without calling its `done`. No effect if it has completed."""
        if waiter in self._ack_waiters:
            self._ack_waiters.remove(waiter)

    def brokers_changed(self) -> None:
        """Recompute a leader's high watermark, which ignores fenced joining replicas, after brokers were (un)fenced."""
        if self.leader is not None and self.leader.advance(self.monotonic_ms()):
            self._high_watermark_moved(self.leader)

    def isr_changed(self, isr: Collection[int], partition_epoch: int) -> None:
        """Apply the ISR that the controller confirmed in `partition_epoch`. No effect unless the replica leads."""
        leader = self.leader
        if leader is None:
            return
        old_isr = leader.isr
        if leader.isr_changed(isr, partition_epoch, self.monotonic_ms()):
            self._high_watermark_moved(leader)
        if not old_isr <= leader.isr:
            self._mark_for_next_fetch()
        elif old_isr != leader.isr:
            self._changed(LOG_START)  # no wake-up; the next fetch may select another preferred replica (392-13)
        self._check_min_isr(leader)
        self._check_deleted()

    def replicas_changed(self, replicas: Sequence[int], min_insync_replicas: int) -> None:
        """Apply a changed assignment or `min.insync.replicas`. No effect unless the replica leads."""
        leader = self.leader
        if leader is None:
            return
        old_followers = set(leader.followers)
        if leader.replicas_changed(replicas, min_insync_replicas, self.monotonic_ms()):
            self._high_watermark_moved(leader)
        if old_followers != leader.followers.keys():
            self._mark_for_next_fetch()
        self._check_min_isr(leader)

    def _mark_for_next_fetch(self) -> None:
        """Have followers outside the ISR read this partition at their next fetch, so that they can join.

        A session does not read clean partitions, and an unread partition is never proposed for the ISR.
        """
        self.dirty_replicas.behind[self] = None
        self._changed(LOG_START)  # marks it dirty without a wake-up

    def check_lag(self, now_ms: int) -> tuple[bool, IsrChange | None]:
        """Recompute which followers are in sync at `now_ms` (monotonic).

        Returns whether followers may lack records, so that the check must be repeated, and the ISR change that removes
        laggards, or None without laggards. The result is (False, None) if the replica does not lead or no follower is
        behind.
        """
        leader = self.leader
        if leader is None or not leader.has_followers_behind:
            return False, None
        if leader.advance(now_ms):
            self._high_watermark_moved(leader)
        return True, leader.isr_without_laggards(now_ms)

    def _check_min_isr(self, leader: PartitionLeader) -> None:
        if leader.is_under_min_isr:
            self._fail_ack_waiters(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)

    def _fail_ack_waiters(self, code: ErrorCode) -> None:
        waiters, self._ack_waiters = self._ack_waiters, deque()
        for waiter in waiters:
            waiter.done(code)

    def _set_high_watermark(self, high_watermark: int) -> None:
        if high_watermark != self.high_watermark:
            self.must_checkpoint |= high_watermark < self.high_watermark
            self.high_watermark = high_watermark
            self.dirty_replicas.high_watermarks[self] = None

    def checkpointed(self, high_watermark: int) -> None:
        """Record that `high_watermark` is on disk. Appends are allowed again unless the current one is lower."""
        if high_watermark <= self.high_watermark:
            self.must_checkpoint = False

    def _check_growable(self) -> None:
        if self.must_checkpoint:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{self}: the high watermark on disk is not lowered to {self.high_watermark} yet",
            )

    def _take_high_watermark(self, leader: PartitionLeader) -> None:
        self._set_high_watermark(leader.high_watermark)
        waiters = self._ack_waiters
        while waiters and waiters[0].offset < leader.high_watermark:
            waiters.popleft().done(ErrorCode.NONE)

    def _high_watermark_moved(self, leader: PartitionLeader) -> None:
        self._take_high_watermark(leader)
        self._changed(HIGH_WATERMARK)

    # --- fetches of followers ----------------------------------------------------------------------------------------

    def isr_to_join(self, replica_id: int) -> IsrChange | None:
        """Return the ISR change that adds this follower, or None if it may not join or the replica does not lead."""
        leader = self.leader
        return leader.isr_to_join(replica_id) if leader is not None and replica_id in leader.followers else None

    def follower_left(self, replica_id: int) -> None:
        """Record on a leader that the fetch session of a follower no longer contains this partition (227-07)."""
        if self.leader is not None:
            self.leader.follower_left(replica_id)

    def when_deleted(self, offset: int) -> asyncio.Future[ErrorCode]:
        """Return a future that completes when the log start of every ISR member is at least `offset`.

        Its result is NONE, or NOT_LEADER_OR_FOLLOWER if leadership is lost. Cancel it to give up.
        """
        waiter = DeleteWaiter(offset, asyncio.get_running_loop().create_future())
        self._delete_waiters.append(waiter)
        self._check_deleted()
        return waiter.done

    def _check_deleted(self) -> None:
        if not self._delete_waiters:
            return
        low = self.log.log_start_offset
        if self.leader is not None:
            followers = self.leader.followers
            low = min([low, *(followers[r].log_start_offset for r in self.leader.isr if r in followers)])
        for waiter in self._delete_waiters:
            if waiter.offset <= low and not waiter.done.done():
                waiter.done.set_result(ErrorCode.NONE)
        self._delete_waiters = [waiter for waiter in self._delete_waiters if not waiter.done.done()]

    def follower_fetched(
        self,
        leader: PartitionLeader,
        replica_id: int,
        replica_epoch: int,
        request: m.FetchPartition,
        fetches: FollowerFetches | None,
    ) -> None:
        """Record that the log of follower `replica_id` ends at the request's fetch offset.

        May advance the high watermark. `fetches` is the state of the follower's fetch session, if any. Raises
        KafkaError: NOT_LEADER_OR_FOLLOWER if that broker has no replica, OFFSET_OUT_OF_RANGE if the fetch offset is
        outside this log.
        """
        if replica_id not in leader.followers:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {replica_id} has no replica of {self}")
        start, end, offset = self.log.log_start_offset, self.log.log_end_offset, request.fetch_offset
        if not start <= offset <= end:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"fetch offset must be in {start}..{end}, got {offset}")
        if leader.follower_fetched(
            replica_id, offset, request.log_start_offset, replica_epoch, self.monotonic_ms(), fetches
        ):
            self._high_watermark_moved(leader)
        if offset != end:  # a restarted follower may have lost its tail
            self.dirty_replicas.behind[self] = None
        self._check_deleted()

    # --- following -------------------------------------------------------------------------------------------------

    def append_from_leader(self, data: m.PartitionData, now_ms: int) -> int:
        """Append the records of the leader's response and apply its log start and high watermark.

        Returns the number of bytes appended, which may be 0. `now_ms` is wall time. Raises KafkaError:
        KAFKA_STORAGE_ERROR if the disk fails or the log refuses appends, CORRUPT_MESSAGE if a batch is corrupt or does
        not continue the log.
        """
        size = 0
        if data.records:
            self._check_growable()
            info = self.log.append_as_follower(data.records, now_ms)
            size = info.size_bytes if info else 0
        change = LOG_END if size else 0
        if data.log_start_offset > self.log.log_start_offset:
            self.log.increment_log_start_offset(min(data.log_start_offset, self.log.log_end_offset))
            change |= LOG_START
        if size:
            self.dirty_replicas.unflushed[self] = None
        self.update_leader_high_watermark(data.high_watermark, change)
        return size

    def update_leader_high_watermark(self, high_watermark: int, change: int = 0) -> None:
        """Record the leader's high watermark, even from a response that is otherwise discarded.

        Raises this replica's own high watermark, as far as its log reaches. `change` has the bits of other changes that
        fetch sessions must be notified of.
        """
        before = self._watermarks
        self._watermarks = before.observe_leader(high_watermark, self.log.log_end_offset)
        if self._watermarks is not before:
            self._set_high_watermark(self._watermarks.own)
            change |= HIGH_WATERMARK
        if change:
            self._changed(change)

    def raise_log_start(self, offset: int) -> None:
        """Raise the log start to `offset`, which hides the records below it; a lower offset has no effect.

        Raises KafkaError: OFFSET_OUT_OF_RANGE above the log end, KAFKA_STORAGE_ERROR if the log has failed.
        """
        before = self.log.log_start_offset
        self.log.increment_log_start_offset(offset)
        if self.log.log_start_offset != before:
            self._changed(LOG_START)

    def retain(self, now_ms: int) -> int:
        """Roll a segment that is due and delete expired ones. Returns the number of deleted segments.

        `now_ms` is wall time. Raises KafkaError with KAFKA_STORAGE_ERROR.
        """
        before = self.log.log_start_offset
        self.log.maybe_roll(now_ms)
        self.dirty_replicas.unflushed[self] = None
        try:
            return self.log.run_retention(now_ms, self.high_watermark)
        finally:
            if self.log.log_start_offset != before:
                self._changed(LOG_START)

    def held_back(self, now_ms: int) -> int:
        """Return how many expired segments are kept because their records are not committed. `now_ms` is wall time."""
        mark = self.high_watermark
        return self.log.held_back(now_ms, mark) if mark < self.log.log_end_offset else 0

    def update_config(self, config: TopicConfig) -> None:
        """Apply a changed topic configuration."""
        self.log.update_config(config)
        self.dirty_replicas.unflushed[self] = None

    def truncate_diverged(self, diverging: m.EpochEndOffset) -> int:
        """Truncate by the diverging epoch of the leader's response (REP-01) and return the new log end offset.

        Raises StorageError.
        """
        local = self.log.end_offset_for_epoch(diverging.epoch)
        self._truncate(truncation_offset(diverging, local, self.log.log_end_offset))
        return self.log.log_end_offset

    def truncate_future_epochs(self) -> bool:
        """After OFFSET_OUT_OF_RANGE, truncate any batches whose leader epoch is above the replica's.

        No leader wrote such an epoch. A crash can damage the leader epoch of an unsynced batch, which the batch's CRC
        does not cover. Returns whether batches were truncated. Raises StorageError.
        """
        if self.log.latest_epoch <= self.leader_epoch:
            return False
        self._truncate(self.log.end_offset_for_epoch(self.leader_epoch).end_offset)
        return True

    def restart_in_range(self, leader_start: int, leader_high_watermark: int) -> bool:
        """After OFFSET_OUT_OF_RANGE, restart at the leader's log start if the two logs have no record in common.

        That is the case if this log ends below the leader's start, or is empty beyond the leader's high watermark. This
        replica's high watermark then becomes `leader_start`. Returns whether the log was restarted. Raises
        StorageError.
        """
        log = self.log
        is_empty_beyond = log.log_start_offset == log.log_end_offset > leader_high_watermark
        if log.log_end_offset >= leader_start and not is_empty_beyond:
            return False
        log.truncate_fully_and_start_at(leader_start)
        self._watermarks = self._watermarks.restarted(leader_start)
        self._set_high_watermark(leader_start)
        self._changed(LEADERSHIP)
        return True

    def _truncate(self, offset: int) -> None:
        try:
            self.log.truncate_to(offset)
        finally:  # a failing disk may have truncated the log
            self._watermarks = self._watermarks.truncated(self.log.log_end_offset)
            self._set_high_watermark(self._watermarks.own)
            self._changed(LEADERSHIP)
