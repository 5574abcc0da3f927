"""The durable state of one replica of `__cluster_metadata-0`: log, `quorum-state` and snapshots, changed together.

What raft's effects and the snapshot's maker, cleaner and fetcher do to the disk is done here and nowhere else, so that
a crash at any point leaves what `open` can begin with (630-06, 630-12, 630-14):

- a snapshot is durable before it is told to anybody, and before the log is emptied for it;
- the log start is durable before what is below it goes, and is raised to at most the latest snapshot's end;
- the directory's own name is durable before the first vote is kept in it;
- the checkpointed recovery point is lowered before the log is cut below it: what it says is there, or it is damage.

Threads: "the machine's task" is the owner of the log (`kipmesh.storage.log.log`): it calls everything that is not said
to be for a thread. Of the blocking calls one runs at a time, but `flush`, which may run beside all others, and
`install`, which may run beside `clean`: what is written of the log's start last is what it was last.

Invariants: log start 0 has any number of snapshots, above 0 at least one between it and the high watermark; `latest`
and `earliest` never go back; nothing that a majority may rely on is thrown away without somebody saying so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from kipmesh.core.config import TopicConfig
from kipmesh.core.control_records import leader_change_batch
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.raft import ElectionState, Machine, RaftConfig
from kipmesh.core.raft import types as effects
from kipmesh.core.snapshot import retention
from kipmesh.core.snapshot.ids import age_order
from kipmesh.messages import SnapshotId
from kipmesh.messages.schema import MAX_INT32
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum import quorum_state
from kipmesh.storage.quorum.snapshots import ReceivedSnapshot, SnapshotStore

_LOG = logging.getLogger(__name__)

_END_OF_TIME_MS = 1 << 62

LogChange = effects.TruncateLog | effects.AppendLeaderChange | effects.AppendAsLeader | effects.AppendAsFollower


def log_config(segment_bytes: int) -> TopicConfig:
    """The metadata log's: kept until snapshots say otherwise, one batch as large as a request may make it."""
    return TopicConfig.parse(
        {
            "max.message.bytes": MAX_INT32,
            "retention.ms": -1,
            "retention.bytes": -1,
            "segment.bytes": segment_bytes,
            "min.insync.replicas": 1,
            "file.delete.delay.ms": 0,
        }
    )


def _refusal(what: str) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{what}; {quorum_state.WAY_OUT}")


class QuorumReplica:
    """See the module."""

    def __init__(self, manager: LogManager, log: Log, *, cluster_id: str, voters: tuple[int, ...]) -> None:
        """Of a loaded log of the manager, then `recover`; `open` does both."""
        self.log = log
        self.store = SnapshotStore(manager.fs, log.dir)
        self.election = ElectionState()
        self.latest_snapshot: SnapshotId | None = None
        self.earliest_snapshot: SnapshotId | None = None
        """The oldest that is not below the log start."""
        self.last_rejection: KafkaError | None = None
        """Why the log did not take the last append that it did not take."""
        self.manager = manager
        self._fs = manager.fs
        self._cluster_id = cluster_id
        self._voters = voters
        self._durable_start = log.log_start_offset
        self._may_retire = True
        self._snapshots_lock = threading.Lock()
        self._headers: dict[SnapshotId, tuple[int, int]] = {}
        self._received: set[SnapshotId] = set()
        """Of the leader, and not in the log's place yet: no snapshots of ours, whole or not."""

    @classmethod
    def open(
        cls,
        manager: LogManager,
        *,
        cluster_id: str,
        voters: tuple[int, ...],
        is_voter: bool,
        segment_bytes: int,
        now_ms: int,
    ) -> QuorumReplica:
        """Of a loaded manager, its metadata log made if there is none. Blocks.

        KafkaError with one line for people when the replica must not start (630-14), StorageError.
        """
        if manager.metadata_damage is not None:
            if is_voter:
                raise _refusal(manager.metadata_damage)
            _LOG.warning("%s: the metadata is fetched anew", manager.metadata_damage)
            manager.drop_damaged_metadata()
        config = log_config(segment_bytes)
        log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, config, now_ms)
        replica = cls(manager, log, cluster_id=cluster_id, voters=voters)
        replica.recover(is_voter=is_voter, durable_end=manager.metadata_recovery_point)
        return replica

    # -- starting

    def recover(self, *, is_voter: bool, durable_end: int = 0) -> None:
        """Read `quorum-state` and decide with what snapshot and log to begin (630-14). Blocks; errors as of `open`.

        What was below `durable_end` has to be there, in the log or a snapshot, or else a voter refuses.
        """
        log = self.log
        try:
            # A process that was killed may have renamed what a power cut would still take back, and the directory's own
            # name must not be lost with the first vote in it.
            self._fs.sync_dir(log.dir)
            self._fs.sync_dir(log.dir.rpartition("/")[0] or "/")
            election = quorum_state.read(self._fs, log.dir, self._cluster_id, self._voters)
        except OSError as error:
            raise StorageError(f"cannot read {log.dir}: {error}") from error
        if election is None and is_voter and len(self._voters) > 1:
            self._refuse_forgotten_vote()
        self.election = election or ElectionState()
        extent = retention.LogExtent(log.log_start_offset, log.log_end_offset, log.latest_epoch)
        start, _ = self.store.recover(extent, is_voter=is_voter)
        match start:
            case retention.StartRefused(message):
                raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{log.dir}: {message}")
            case retention.StartByFetching():
                _LOG.warning("%s: no snapshot is valid from offset %d on: it is emptied", log.dir, extent.start_offset)
                self._begin_at(0)
                self.store.delete(self.store.snapshot_ids())
            case retention.StartFromSnapshot(snapshot_id, replaces_log=True):
                if (extent.start_offset, extent.end_offset) != (snapshot_id.end_offset, snapshot_id.end_offset):
                    _LOG.warning("%s: snapshot %s takes the place of the log", log.dir, snapshot_id)
                self._begin_at(snapshot_id.end_offset)
            case _:
                pass
        # A log that was whole may have given way to a shorter snapshot, which contradicts its end: it was the leader's.
        end = max(log.log_end_offset, extent.end_offset)
        if is_voter and end < durable_end:
            raise _refusal(f"{log.dir} ends at offset {end}, though everything below {durable_end} was durable")
        self._drop_obsolete(self.log.log_start_offset)
        self._observe_snapshots()

    def _refuse_forgotten_vote(self) -> None:
        """A voter keeps its vote before it has anything else."""
        log = self.log
        if log.log_end_offset > 0 or self.store.snapshot_ids():
            path = f"{log.dir}/{quorum_state.QUORUM_STATE}"
            raise _refusal(f"{path} is missing, and with it the vote of a log that ends at {log.log_end_offset}")

    def _begin_at(self, offset: int) -> None:
        """Empty the log, durably in that it starts there. StorageError."""
        with self.manager.truncating(self.log, 0):
            self.log.truncate_fully_and_start_at(offset)
        self.manager.checkpoint_log_starts()
        self._durable_start = offset

    def machine(self, config: RaftConfig, machine_type: type[Machine] = Machine) -> Machine:
        """The machine of this state."""
        return machine_type(
            config,
            self.election,
            self.log,
            durable_end=self.log.recovery_point,
            latest_snapshot=self.latest_snapshot,
            earliest_snapshot=self.earliest_snapshot,
        )

    # -- what raft's effects do

    def persist(self, election: ElectionState) -> None:
        """Write `quorum-state` durably. Blocks; StorageError, after which nothing is known of the file."""
        directory = self.log.dir
        try:
            quorum_state.write(self._fs, directory, election, self._cluster_id, self._voters)
        except OSError as error:
            raise StorageError(f"cannot write {directory}/{quorum_state.QUORUM_STATE}: {error}") from error
        self.election = election

    def change_log(self, effect: LogChange, now_ms: int) -> effects.LogChanged | effects.AppendRejected:
        """Append or cut. StorageError when the log failed for good.

        What the log does not take (a full disk, a batch that is corrupt or too large) is `AppendRejected`, with the
        reason in `last_rejection`; of a follower's batches those before it may have been taken, then it is
        `LogChanged`.
        """
        log = self.log
        end_before = log.log_end_offset
        self._retire(now_ms)
        try:
            match effect:
                case effects.TruncateLog(offset):
                    self._truncate_to(offset)
                case effects.AppendLeaderChange(epoch, change):
                    log.append_as_leader(leader_change_batch(change, epoch, now_ms), epoch, now_ms)
                case effects.AppendAsLeader(_, batch, epoch):
                    log.append_as_leader(batch, epoch, now_ms)
                case effects.AppendAsFollower(records):
                    log.append_as_follower(records, now_ms)
        except KafkaError as error:
            if log.failed is not None:
                raise
            self.last_rejection = error
            return effects.LogChanged() if log.log_end_offset != end_before else effects.AppendRejected()
        return effects.LogChanged()

    def _truncate_to(self, offset: int) -> None:
        """Cut; where the batch that is cut begins is not known yet, but that is within its segment."""
        log = self.log
        if offset >= log.log_end_offset:
            log.truncate_to(offset)
            return
        kept = max((base for base in log.segment_base_offsets if base <= offset), default=0)
        with self.manager.truncating(log, kept):
            log.truncate_to(offset)

    def read(self, read: effects.Read) -> bytes:
        """The records for a Fetch answer. StorageError."""
        return self.log.read(read.offset, read.max_bytes, read.max_offset, True)

    def flush(self) -> int:
        """Make the log durable; gives the recovery point. Blocks, for any thread; StorageError."""
        self.log.flush()
        return self.log.recovery_point

    # -- snapshots

    def receive(self, snapshot_id: SnapshotId) -> ReceivedSnapshot:
        """Begin to receive a snapshot, or go on where an earlier transfer in this process broke off. StorageError.

        When it is whole (`complete`), `install` or `discard` must follow: what it says may contradict the log's end.
        """
        self._received.add(snapshot_id)
        return self.store.receive(snapshot_id)

    def install(self, snapshot_id: SnapshotId) -> effects.SnapshotChanged:
        """Let a snapshot that was received whole take the log's place (630-12). Blocks shortly; StorageError.

        On the machine's task: nothing else may change the log. A crash on the way is mended by `recover`.
        """
        if self.store.size(snapshot_id) is None:
            raise StorageError(f"snapshot {snapshot_id} is not in {self.log.dir}")
        self._begin_at(snapshot_id.end_offset)
        self._received.discard(snapshot_id)
        self._drop_obsolete(snapshot_id.end_offset)
        return self._changed()

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Delete a snapshot that was received whole and is not to be installed after all. StorageError."""
        if snapshot_id in self._received:
            self.store.delete([snapshot_id])
            self._received.discard(snapshot_id)

    def made(self, snapshot_id: SnapshotId) -> effects.SnapshotChanged:
        """A snapshot of our own was frozen; one that the log start has passed meanwhile does not count."""
        if snapshot_id.end_offset < self.log.log_start_offset:
            _LOG.info("snapshot %s is below the log start %d", snapshot_id, self.log.log_start_offset)
        self._received.discard(snapshot_id)
        return self._changed()

    # -- cleaning (630-05, 630-06)

    def plan_clean(
        self,
        *,
        leader_log_start: int | None,
        replicas: Sequence[retention.ReplicaEnd],
        high_watermark: int,
        now_ms: int,
        limits: retention.RetentionLimits,
    ) -> int:
        """Where the log may start from now on, its present start if it must stay.

        `leader_log_start` is what the leader told, None when this replica leads; then `replicas` are the others.
        `now_ms` is the wall clock's, as are the times in `replicas`. StorageError.
        """
        log = self.log
        self._retire(now_ms)
        if leader_log_start is not None:
            told = min(leader_log_start, high_watermark)
            return retention.follower_log_start(log.log_start_offset, told, self.latest_snapshot)
        return retention.leader_log_start(
            log.log_start_offset,
            high_watermark,
            self._bytes_from(log.log_start_offset),
            list(self._kept()),
            replicas,
            now_ms,
            limits,
        )

    def _kept(self) -> Iterator[retention.KeptSnapshot]:
        log, store = self.log, self.store
        snapshot_ids = self._own()
        self._headers = {each: known for each, known in self._headers.items() if each in snapshot_ids}
        for snapshot_id in snapshot_ids:
            known = self._headers.get(snapshot_id)
            if known is None:
                try:
                    timestamp_ms = store.header(snapshot_id).last_contained_log_timestamp
                except CorruptRecordError as error:
                    _LOG.error("%s: the log start is not raised to it: %s", log.dir, error.message)
                    continue
                known = self._headers[snapshot_id] = (store.size(snapshot_id) or 0, timestamp_ms)
            yield retention.KeptSnapshot(snapshot_id, *known, self._bytes_from(snapshot_id.end_offset))

    def _bytes_from(self, offset: int) -> int:
        try:
            return self.log.bytes_from(offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.log.dir}: {error}") from error

    def raise_log_start(self, offset: int) -> None:
        """Let readers find nothing below `offset` any more; `clean` makes that last. ValueError without a snapshot."""
        latest = self.latest_snapshot
        if offset > self.log.log_start_offset and (latest is None or latest.end_offset < offset):
            raise ValueError(f"no snapshot reaches offset {offset}, which the log is to start at")
        self.log.increment_log_start_offset(offset)

    def clean(self) -> effects.SnapshotChanged | None:
        """Make the log start durable, then let go what is below: snapshots now, segments with the next change.

        Blocks, for a thread. Gives the event when there are other snapshots than before. StorageError: on a full disk
        nothing was let go, and it may be tried again.
        """
        before = (self.latest_snapshot, self.earliest_snapshot)
        start = self.log.log_start_offset
        if start > self._durable_start:
            self.manager.checkpoint_log_starts()
            self._durable_start = start
        self._may_retire = True
        self._drop_obsolete(start)
        self.log.remove_deleted(_END_OF_TIME_MS)
        self._observe_snapshots()
        return None if before == (self.latest_snapshot, self.earliest_snapshot) else self._changed()

    def _retire(self, now_ms: int) -> None:
        """Take the segments below the durable log start out of use: the log's owner does, after `clean` said so."""
        if self._may_retire:
            self._may_retire = False
            self.log.run_retention(now_ms, self._durable_start)

    def _drop_obsolete(self, log_start: int) -> None:
        if log_start > 0:
            self.store.delete(retention.obsolete(log_start, self.store.snapshot_ids()))

    def _own(self) -> list[SnapshotId]:
        """Those at or above the log start that say what the log says, oldest first."""
        start, end = self.log.log_start_offset, self.log.log_end_offset
        there = self.store.snapshot_ids()
        return [each for each in there if start <= each.end_offset <= end and each not in self._received]

    def _observe_snapshots(self) -> None:
        """See what snapshots there are; never back, for another call may have looked later."""
        there = self._own()
        if there:
            with self._snapshots_lock:  # an install on the machine's task beside a cleaning on its thread
                self.latest_snapshot = max(there[-1], self.latest_snapshot or there[-1], key=age_order)
                self.earliest_snapshot = max(there[0], self.earliest_snapshot or there[0], key=age_order)

    def _changed(self) -> effects.SnapshotChanged:
        self._observe_snapshots()
        if self.latest_snapshot is None:
            raise RuntimeError(f"{self.log.dir} has no snapshot that could be told of")
        return effects.SnapshotChanged(self.latest_snapshot, self.earliest_snapshot)
