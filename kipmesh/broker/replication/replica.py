"""One partition that this broker hosts: its log, its role, and the requests that wait for it.

The driver of `kipmesh.core.replica`: it appends, moves the numbers, and notifies produce requests that wait for the
high watermark, and fetch sessions (227-10). Fetches read it by `kipmesh.broker.requests.reading`. Replicas belong to
the event loop; fsyncs and checkpoints run on the thread of `Disk`. Appends and reads stay on the loop: they are one
`pwrite` or `pread` of the page cache.
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
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.metadata.states import lost_replicas
from kipmesh.core.replica.follower import FollowerWatermarks, truncation_offset
from kipmesh.core.replica.leader import FollowerFetches, IsrChange, PartitionLeader
from kipmesh.storage.log.log import Log
from kipmesh.storage.log.validation import AppendInfo
from kipmesh.storage.log_manager import LogManager

Result = TypeVar("Result")


class Disk:
    """Runs blocking work in order on one thread, so that two threads never use the log manager at once."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-disk")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for the running work and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class DirtyReplicas:
    """The replicas of a broker that need housekeeping, so that idle partitions cost nothing. Owned by the event loop.

    A high watermark moves back only when records below it are lost as the rules allow ("Log truth" in docs/rules.md).
    Then the checkpoint is above the log's end, and new records at these offsets would count as committed after a start.
    `Replica.must_checkpoint` keeps the log from growing until a lower one is on disk.
    """

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        """Fetch sessions and waiting fetches, by partition; notified at once."""
        self.behind: dict[Replica, None] = {}
        """Led partitions that followers may lack records of: all others are in sync whatever time it is."""
        self.unflushed: dict[Replica, None] = {}
        """Partitions whose logs may be due for an fsync by time or by size."""
        self.high_watermarks: dict[Replica, None] = {}
        """Partitions whose high watermark moved since the last checkpoint."""

    def forget(self, replica: Replica) -> None:
        """The partition leaves this broker."""
        for table in (self.behind, self.unflushed, self.high_watermarks):
            table.pop(replica, None)

    @property
    def must_checkpoint(self) -> bool:
        """Whether a log must not grow before its high watermark is written."""
        return any(replica.must_checkpoint for replica in self.high_watermarks)

    async def checkpoint_high_watermarks(self, log_manager: LogManager, disk: Disk) -> None:
        """Write those that moved since the last time; after a KafkaError they are still to be written."""
        moved, self.high_watermarks = self.high_watermarks, {}
        if not moved:
            return
        # The disk's thread writes in the order of the calls: an older value never replaces a newer one.
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
    """A produce request that waits until `offset` is below the high watermark."""

    offset: int
    done: Callable[[ErrorCode], None]


class DeleteWaiter(NamedTuple):
    """A DeleteRecords that waits until every live replica's log starts at `offset` or above."""

    offset: int
    done: asyncio.Future[ErrorCode]


@dataclass(slots=True, eq=False)
class Replica:
    """A partition on this broker, leading, following, or without a leader."""

    broker_id: int
    log: Log
    high_watermark: int
    monotonic_ms: Callable[[], int]
    """Judges who is in sync by a clock that never jumps; records are stamped by the wall clock."""
    dirty_replicas: DirtyReplicas = field(default_factory=DirtyReplicas)
    topic: str = field(init=False)
    topic_id: bytes = field(init=False)
    partition: int = field(init=False)
    must_checkpoint: bool = field(init=False)
    """Whether the checkpointed high watermark names records that are gone.

    Others would take their offsets, and pass for committed after the next start. So the log does not grow until a lower
    one was written.
    """
    leader: PartitionLeader | None = field(default=None, init=False)
    has_role: bool = field(default=False, init=False)
    """Whether it leads or follows; before, and after `stop`, requests are refused."""
    is_cut_off: bool = field(default=False, init=False)
    leader_id: int = field(default=-1, init=False)
    leader_epoch: int = field(default=-1, init=False)
    _marks: FollowerWatermarks = field(init=False)
    """While it does not lead."""
    _ack_waiters: deque[AckWaiter] = field(default_factory=deque, init=False)
    _delete_waiters: list[DeleteWaiter] = field(default_factory=list, init=False)
    _key: bytes = field(init=False)

    def __post_init__(self) -> None:
        log, checkpointed = self.log, self.high_watermark
        self.topic, self.topic_id, self.partition = log.topic, log.topic_id, log.partition
        self.high_watermark = min(max(checkpointed, log.log_start_offset), log.log_end_offset)
        self.must_checkpoint = checkpointed > self.high_watermark
        self._marks = FollowerWatermarks.start(-1, self.high_watermark)
        self._key = partition_key(self.topic_id, self.partition)

    def _changed(self, change: int) -> None:
        """Tell the fetch sessions that have this partition."""
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
        """Lead in `state.leader_epoch`; within an epoch only the ISR and the assignment may have changed."""
        if self.leader is not None and self.leader.leader_epoch == state.leader_epoch:
            self.leader.lost = lost_replicas(state)
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
        self.leader.lost = lost_replicas(state)
        self.leader_id, self.leader_epoch, self.has_role = self.broker_id, state.leader_epoch, True
        self._set_high_watermark(self.leader.high_watermark)
        self.dirty_replicas.behind[self] = self.dirty_replicas.unflushed[self] = None
        self._changed(LEADERSHIP)

    def become_follower(self, state: PartitionState) -> None:
        """Follow `state.leader`, or nobody when it is -1."""
        if self.leader is not None or state.leader_epoch != self._marks.leader_epoch:
            self._marks = FollowerWatermarks.start(state.leader_epoch, self.high_watermark)
        self._drop_leadership()
        self.leader_id, self.leader_epoch, self.has_role = state.leader, state.leader_epoch, True
        self.dirty_replicas.unflushed[self] = None
        self._changed(LEADERSHIP)

    def _drop_leadership(self) -> None:
        self.leader = None
        waiters, self._ack_waiters = self._ack_waiters, deque()
        for waiter in waiters:
            waiter.done(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        deletes, self._delete_waiters = self._delete_waiters, []
        for delete in deletes:
            if not delete.done.done():
                delete.done.set_result(ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def stop(self) -> None:
        """The partition leaves this broker: whoever waits is answered."""
        self._drop_leadership()
        self.leader_id, self.has_role = -1, False
        self.dirty_replicas.forget(self)
        self._changed(LEADERSHIP)

    def check_epoch(self, current_leader_epoch: int) -> ErrorCode:
        """A request's epoch: FENCED_LEADER_EPOCH when older than ours, UNKNOWN_LEADER_EPOCH when newer; -1 passes."""
        if current_leader_epoch < 0 or current_leader_epoch == self.leader_epoch:
            return ErrorCode.NONE
        older = current_leader_epoch < self.leader_epoch
        return ErrorCode.FENCED_LEADER_EPOCH if older else ErrorCode.UNKNOWN_LEADER_EPOCH

    def require_epoch(self, current_leader_epoch: int) -> None:
        """Raises the error of a request's epoch, if it has one."""
        code = self.check_epoch(current_leader_epoch)
        if code:
            raise KafkaError(code, f"{self.topic}-{self.partition} is in leader epoch {self.leader_epoch}")

    def require_leader(self, current_leader_epoch: int = -1) -> PartitionLeader:
        """The leader's state; raises NOT_LEADER_OR_FOLLOWER or the epoch's error."""
        self.require_epoch(current_leader_epoch)
        if self.leader is None:
            raise KafkaError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.topic}-{self.partition} is led by {self.leader_id}"
            )
        return self.leader

    @property
    def current_leader(self) -> m.LeaderIdAndEpoch:
        """Whom to ask instead; -1 where that is not known."""
        is_unknown = self.is_cut_off and self.leader is not None
        return m.LeaderIdAndEpoch(-1 if is_unknown else self.leader_id, self.leader_epoch)

    def set_cut_off(self, is_cut_off: bool) -> None:
        """Send producers and consumers away, or no longer (`kipmesh.core.replica.serving`)."""
        if is_cut_off != self.is_cut_off:
            self.is_cut_off = is_cut_off
            self._changed(LEADERSHIP)

    def require_connected(self) -> None:
        """Raises NOT_LEADER_OR_FOLLOWER where clients are sent away."""
        if self.is_cut_off:
            raise KafkaError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{self.topic}-{self.partition}: broker {self.broker_id} does not hear from the controllers",
            )

    @property
    def told_high_watermark(self) -> int:
        """What readers are told: the leader's high watermark, on a follower as it was last heard (392-01)."""
        return self.high_watermark if self.leader is not None else self._marks.told

    @property
    def must_flush(self) -> bool:
        """Whether `flush.messages` asks for an fsync before anybody is told of the last records."""
        return self.log.unflushed_messages >= self.log.config.flush_messages

    # --- leading ---------------------------------------------------------------------------------------------------

    def append(self, batch: bytes, acks: int, now_ms: int) -> AppendInfo:
        """Append a producer's batch; raises KafkaError. With acks=all the ISR must be large enough."""
        leader = self.require_leader()
        self.require_connected()
        self._check_growable()
        if acks == -1 and leader.is_under_min_isr:
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{self.topic}-{self.partition}: {len(leader.isr)} in sync, {leader.min_insync_replicas} needed",
            )
        info = self.log.append_as_leader(batch, leader.leader_epoch, now_ms)
        self.dirty_replicas.unflushed[self] = None
        self.dirty_replicas.behind[self] = None
        change = LOG_END
        if leader.appended(self.log.log_end_offset, self.monotonic_ms()):
            self._take_high_watermark(leader)
            change |= HIGH_WATERMARK
        self._changed(change)
        return info

    def when_replicated(self, offset: int, leader_epoch: int, done: Callable[[ErrorCode], None]) -> AckWaiter | None:
        """Call `done` once `offset`, appended in `leader_epoch`, is below the high watermark or never will be.

        None when it was called now. In another epoch the offset may hold another record.
        """
        leader = self.leader
        if leader is None or leader.leader_epoch != leader_epoch:
            done(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        elif leader.high_watermark > offset:
            done(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND if leader.is_under_min_isr else ErrorCode.NONE)
        else:
            waiter, waiters = AckWaiter(offset, done), self._ack_waiters
            place = len(waiters)
            while place and waiters[place - 1].offset > offset:  # one that was fsynced meanwhile comes late
                place -= 1
            waiters.insert(place, waiter)
            return waiter
        return None

    def forget(self, waiter: AckWaiter) -> None:
        """A produce request that timed out waits no more."""
        if waiter in self._ack_waiters:
            self._ack_waiters.remove(waiter)

    def brokers_changed(self) -> None:
        """Brokers were fenced or unfenced: a joiner that is gone is not waited for."""
        if self.leader is not None and self.leader.advance(self.monotonic_ms()):
            self._high_watermark_moved(self.leader)

    def isr_changed(self, isr: Collection[int], partition_epoch: int) -> None:
        """The controller's word on the ISR."""
        leader = self.leader
        if leader is None:
            return
        before = leader.isr
        if leader.isr_changed(isr, partition_epoch, self.monotonic_ms()):
            self._high_watermark_moved(leader)
        if not before <= leader.isr:
            self._look_again()
        elif before != leader.isr:
            self._changed(LOG_START)  # wakes nobody; a consumer may have a nearer replica at its next fetch (392-13)
        self._check_min_isr(leader)
        self._check_deleted()

    def replicas_changed(self, replicas: Sequence[int], min_insync_replicas: int) -> None:
        """The assignment or `min.insync.replicas` changed."""
        leader = self.leader
        if leader is None:
            return
        before = leader.followers.keys() | set()
        if leader.replicas_changed(replicas, min_insync_replicas, self.monotonic_ms()):
            self._high_watermark_moved(leader)
        if before != leader.followers.keys():
            self._look_again()
        self._check_min_isr(leader)

    def _look_again(self) -> None:
        """Replicas are new, or outside of the ISR: their next fetches read this partition, so that they may join.

        A clean partition of a session is not read, and who does not read it is never asked for.
        """
        self.dirty_replicas.behind[self] = None
        self._changed(LOG_START)  # the flag that is heard and wakes nobody

    def laggards(self, now_ms: int) -> tuple[bool, IsrChange | None]:
        """Whether time may still change who is in sync here, and what ISR to ask for after the time that passed."""
        leader = self.leader
        if leader is None or not leader.has_followers_behind:
            return False, None
        if leader.advance(now_ms):
            self._high_watermark_moved(leader)
        return True, leader.isr_without_laggards(now_ms)

    def _check_min_isr(self, leader: PartitionLeader) -> None:
        if leader.is_under_min_isr:
            waiters, self._ack_waiters = self._ack_waiters, deque()
            for waiter in waiters:
                waiter.done(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)

    def _set_high_watermark(self, high_watermark: int) -> None:
        if high_watermark != self.high_watermark:
            self.must_checkpoint |= high_watermark < self.high_watermark
            self.high_watermark = high_watermark
            self.dirty_replicas.high_watermarks[self] = None

    def checkpointed(self, high_watermark: int) -> None:
        """This was written as the high watermark; it may have moved meanwhile."""
        if high_watermark <= self.high_watermark:
            self.must_checkpoint = False

    def _check_growable(self) -> None:
        if self.must_checkpoint:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"{self.topic}-{self.partition}: the checkpointed high watermark is above {self.high_watermark}",
            )

    def _take_high_watermark(self, leader: PartitionLeader) -> None:
        self._set_high_watermark(leader.high_watermark)
        waiters = self._ack_waiters
        while waiters and waiters[0].offset < leader.high_watermark:
            waiters.popleft().done(ErrorCode.NONE)

    def _high_watermark_moved(self, leader: PartitionLeader) -> None:
        self._take_high_watermark(leader)
        self._changed(HIGH_WATERMARK)

    # --- followers' fetches -----------------------------------------------------------------------------------------

    def isr_to_join(self, replica_id: int) -> IsrChange | None:
        """What to ask the controller for after a fetch of a follower outside of the ISR, if it is in sync now."""
        leader = self.leader
        return leader.isr_to_join(replica_id) if leader is not None and replica_id in leader.followers else None

    def follower_left(self, replica_id: int) -> None:
        """A follower's session has this partition no more (227-07)."""
        if self.leader is not None:
            self.leader.follower_left(replica_id)

    def when_deleted(self, offset: int) -> asyncio.Future[ErrorCode]:
        """Done once every replica that is in the ISR has its log start at `offset` or above; cancel to give up."""
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
        """A follower is where its fetch says; raises KafkaError if it has no replica or is outside of the log."""
        if replica_id not in leader.followers:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {replica_id} has no replica here")
        if not self.log.log_start_offset <= request.fetch_offset <= self.log.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{request.fetch_offset} is outside of the log")
        if leader.follower_fetched(
            replica_id, request.fetch_offset, request.log_start_offset, replica_epoch, self.monotonic_ms(), fetches
        ):
            self._high_watermark_moved(leader)
        if request.fetch_offset != self.log.log_end_offset:  # one that was caught up may come back without its tail
            self.dirty_replicas.behind[self] = None
        self._check_deleted()

    # --- following -------------------------------------------------------------------------------------------------

    def append_from_leader(self, data: m.PartitionData, now_ms: int) -> int:
        """Take the records and offsets of the leader's answer; returns the bytes appended. Raises KafkaError."""
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
        self.high_watermark_told(data.high_watermark, change)
        return size

    def high_watermark_told(self, high_watermark: int, change: int = 0) -> None:
        """The leader's high watermark, also from a response of which nothing else applies any more.

        What was below it stays in the log of every later leader, and in ours as far as that is one's.
        """
        before = self._marks
        self._marks = before.heard(high_watermark, self.log.log_end_offset)
        if self._marks is not before:
            self._set_high_watermark(self._marks.own)
            change |= HIGH_WATERMARK
        if change:
            self._changed(change)

    def raise_log_start(self, offset: int) -> None:
        """Records below `offset` are deleted; raises KafkaError. Never back."""
        before = self.log.log_start_offset
        self.log.increment_log_start_offset(offset)
        if self.log.log_start_offset != before:
            self._changed(LOG_START)

    def retain(self, now_ms: int) -> int:
        """Roll a segment that is due, and delete those that retention says; returns how many. Raises KafkaError."""
        before = self.log.log_start_offset
        self.log.maybe_roll(now_ms)
        self.dirty_replicas.unflushed[self] = None
        try:
            return self.log.run_retention(now_ms, self.high_watermark)
        finally:
            if self.log.log_start_offset != before:
                self._changed(LOG_START)

    def held_back(self, now_ms: int) -> int:
        """How many segments are due, and stay because they are not committed: nobody leads, say."""
        mark = self.high_watermark
        return self.log.held_back(now_ms, mark) if mark < self.log.log_end_offset else 0

    def update_config(self, config: TopicConfig) -> None:
        """The topic's configuration changed."""
        self.log.update_config(config)
        self.dirty_replicas.unflushed[self] = None

    def truncate_diverged(self, diverging: m.EpochEndOffset) -> int:
        """Drop what the leader never had; returns the new log end."""
        local = self.log.end_offset_for_epoch(diverging.epoch)
        self._truncate(truncation_offset(diverging, local, self.log.log_end_offset))
        return self.log.log_end_offset

    def truncate_future_epochs(self) -> bool:
        """After OFFSET_OUT_OF_RANGE in our own leader epoch: cut the log where one above it begins, if one does.

        No leader wrote that: CRCs do not cover a batch's leader epoch, and what a crash had not synced may be damaged
        there.
        """
        if self.log.latest_epoch <= self.leader_epoch:
            return False
        self._truncate(self.log.end_offset_for_epoch(self.leader_epoch).end_offset)
        return True

    def restart_in_range(self, leader_start: int, leader_high_watermark: int) -> bool:
        """After OFFSET_OUT_OF_RANGE: begin anew at the leader's log start where nothing in our log can be the leader's.

        That is when the log ends below that start, or when it is empty beyond what the leader has.
        """
        log = self.log
        is_empty_beyond = log.log_start_offset == log.log_end_offset > leader_high_watermark
        if log.log_end_offset >= leader_start and not is_empty_beyond:
            return False
        log.truncate_fully_and_start_at(leader_start)
        self._marks = self._marks.restarted(leader_start)
        self._set_high_watermark(leader_start)
        self._changed(LEADERSHIP)
        return True

    def _truncate(self, offset: int) -> None:
        try:
            self.log.truncate_to(offset)
        finally:  # a disk that fails half way may have cut the log all the same
            self._marks = self._marks.truncated(self.log.log_end_offset)
            self._set_high_watermark(self._marks.own)
            self._changed(LEADERSHIP)
