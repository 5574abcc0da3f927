"""Durable state of one replica of `__cluster_metadata-0`: log, `quorum-state` and snapshots.

Only this module applies raft's effects and snapshot operations to the disk. A crash at any point leaves a state that
`open` recovers (630-06, 630-12, 630-14):

- A snapshot is durable before other components are notified of it, and before it replaces the log.
- The log start is durable before older files are removed, and never exceeds the end of the latest snapshot.
- The name of the directory is durable before the first vote is stored in it.
- The checkpointed recovery point is lowered before a truncation below it; a shorter log counts as damage.

Threads: the machine's task owns the log (`kipmesh.storage.log.log`) and calls all methods not marked as blocking.
Blocking methods run one at a time, except that `flush` may run beside all others and `install` beside `clean`.

Invariants: with a log start above 0 there is a snapshot between it and the high watermark. `latest_snapshot` and
`earliest_snapshot` never decrease. Data that a majority may rely on is removed only by an operator.
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
    """Return the topic configuration of the metadata log: no retention, and batches up to the request size limit."""
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


def _refusal(problem: str) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{problem}; {quorum_state.REMEDIATION}")


class QuorumReplica:
    """Log, election state and snapshots of one replica of the metadata quorum. See the module docstring."""

    def __init__(self, manager: LogManager, log: Log, *, cluster_id: str, voters: tuple[int, ...]) -> None:
        """`log`: the metadata log of `manager`. Call `recover` next; `open` does both."""
        self.log = log
        self.store = SnapshotStore(manager.fs, log.dir)
        self.election = ElectionState()
        self.latest_snapshot: SnapshotId | None = None
        self.earliest_snapshot: SnapshotId | None = None
        """The oldest snapshot at or above the log start."""
        self.last_rejection: KafkaError | None = None
        """Error of the last rejected append."""
        self.manager = manager
        self._fs = manager.fs
        self._cluster_id = cluster_id
        self._voters = voters
        self._durable_start = log.log_start_offset
        self._may_retire = True
        self._snapshots_lock = threading.Lock()
        self._headers: dict[SnapshotId, tuple[int, int]] = {}
        self._received: set[SnapshotId] = set()
        """Snapshots of the leader that are not installed, complete or not."""

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
        """Return the replica of a loaded manager, creating the metadata log if missing. Blocks.

        An observer deletes a damaged log and fetches it again; a voter refuses to start. Raises KafkaError with
        remediation if the replica must not start (630-14): KAFKA_STORAGE_ERROR, INCONSISTENT_CLUSTER_ID or
        INCONSISTENT_VOTER_SET. Raises StorageError if the disk fails.
        """
        if manager.metadata_damage is not None:
            if is_voter:
                raise _refusal(manager.metadata_damage)
            _LOG.warning(
                "metadata log is damaged, fetching all metadata from the leader error=%s", manager.metadata_damage
            )
            manager.drop_damaged_metadata()
        config = log_config(segment_bytes)
        log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, config, now_ms)
        replica = cls(manager, log, cluster_id=cluster_id, voters=voters)
        replica.recover(is_voter=is_voter, durable_end=manager.metadata_recovery_point)
        return replica

    # -- starting

    def recover(self, *, is_voter: bool, durable_end: int = 0) -> None:
        """Read `quorum-state`, and decide which snapshot and log to start with (630-14). Blocks.

        A voter refuses to start if log and snapshots end below `durable_end`. Raises the errors of `open`.
        """
        log = self.log
        try:
            # A killed process may have left unsynced renames, and the directory's name must outlive the first vote.
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
            case retention.StartRefused(problem):
                raise _refusal(f"{log.dir}: {problem}")
            case retention.StartByFetching():
                _LOG.warning("no valid snapshot, emptying the log log=%s log_start=%d", log.dir, extent.start_offset)
                self._reset_log(0)
                self.store.delete(self.store.snapshot_ids())
            case retention.StartFromSnapshot(snapshot_id, replaces_log=True):
                if (extent.start_offset, extent.end_offset) != (snapshot_id.end_offset, snapshot_id.end_offset):
                    _LOG.warning("snapshot replaces the log log=%s snapshot=%s", log.dir, snapshot_id)
                self._reset_log(snapshot_id.end_offset)
            case _:
                pass
        # A snapshot of the leader may have replaced a longer log that contradicts it.
        end = max(log.log_end_offset, extent.end_offset)
        if is_voter and end < durable_end:
            raise _refusal(f"{log.dir} ends at offset {end}, but everything below {durable_end} was durable")
        self._drop_obsolete(self.log.log_start_offset)
        self._observe_snapshots()

    def _refuse_forgotten_vote(self) -> None:
        """Refuse to start if there is a log or a snapshot but no `quorum-state`: a voter stores its vote first."""
        log = self.log
        if log.log_end_offset > 0 or self.store.snapshot_ids():
            path = f"{log.dir}/{quorum_state.QUORUM_STATE}"
            raise _refusal(f"{path} with this voter's vote is missing, but the log ends at {log.log_end_offset}")

    def _reset_log(self, offset: int) -> None:
        """Empty the log. It starts and ends at `offset`, which becomes its durable start. Raises StorageError."""
        with self.manager.truncating(self.log, 0):
            self.log.truncate_fully_and_start_at(offset)
        self.manager.checkpoint_log_starts()
        self._durable_start = offset

    def machine(self, config: RaftConfig, machine_type: type[Machine] = Machine) -> Machine:
        """Return a new raft machine that starts with this replica's state."""
        return machine_type(
            config,
            self.election,
            self.log,
            durable_end=self.log.recovery_point,
            latest_snapshot=self.latest_snapshot,
            earliest_snapshot=self.earliest_snapshot,
        )

    # -- effects of raft

    def persist(self, election: ElectionState) -> None:
        """Write `quorum-state` durably. Blocks. Raises StorageError; the content of the file is then unknown."""
        directory = self.log.dir
        try:
            quorum_state.write(self._fs, directory, election, self._cluster_id, self._voters)
        except OSError as error:
            raise StorageError(f"cannot write {directory}/{quorum_state.QUORUM_STATE}: {error}") from error
        self.election = election

    def change_log(self, effect: LogChange, now_ms: int) -> effects.LogChanged | effects.AppendRejected:
        """Append to or truncate the log. Return LogChanged, or AppendRejected with the error in `last_rejection`.

        An append is rejected if the disk is full, or a batch is corrupt or too large; a truncation is rejected if a
        full disk prevents its checkpoint. If some batches of a follower's append were stored before the error, the
        result is LogChanged. Raises StorageError if the log failed permanently.
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
        """Truncate the log to `offset`. It keeps at least the segments before the one that contains `offset`."""
        log = self.log
        if offset >= log.log_end_offset:
            log.truncate_to(offset)
            return
        kept = max((base for base in log.segment_base_offsets if base <= offset), default=0)
        with self.manager.truncating(log, kept):
            log.truncate_to(offset)

    def read(self, read: effects.Read) -> bytes:
        """Return the records for a Fetch response, b"" if there are none.

        Raises the KafkaErrors of `Log.read`, for example OFFSET_OUT_OF_RANGE; StorageError if the disk fails.
        """
        return self.log.read(read.offset, read.max_bytes, read.max_offset, True)

    def flush(self) -> int:
        """Make the log durable. Return the recovery point. Blocks. Thread-safe.

        Raises StorageError if the log has failed or the disk fails, KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if it is
        closed.
        """
        self.log.flush()
        return self.log.recovery_point

    # -- snapshots

    def receive(self, snapshot_id: SnapshotId) -> ReceivedSnapshot:
        """Start receiving a snapshot, or resume an interrupted transfer of this process. Raises StorageError.

        After `ReceivedSnapshot.complete`, call `install` or `discard`, because the snapshot may contradict the end of
        the log.
        """
        self._received.add(snapshot_id)
        return self.store.receive(snapshot_id)

    def install(self, snapshot_id: SnapshotId) -> effects.SnapshotChanged:
        """Replace the log with a completely received snapshot (630-12).

        Returns the latest and earliest snapshot for raft. Blocks briefly. Runs on the machine's task; nothing else may
        change the log. After a crash, `recover` completes the installation. Raises StorageError if the snapshot does
        not exist or the disk fails.
        """
        if self.store.size(snapshot_id) is None:
            raise StorageError(f"snapshot {snapshot_id} does not exist in {self.log.dir}")
        self._reset_log(snapshot_id.end_offset)
        self._received.discard(snapshot_id)
        self._drop_obsolete(snapshot_id.end_offset)
        return self._changed()

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Delete a completely received snapshot instead of installing it. Ignores one that was not received.

        Raises StorageError.
        """
        if snapshot_id in self._received:
            self.store.delete([snapshot_id])
            self._received.discard(snapshot_id)

    def register_snapshot(self, snapshot_id: SnapshotId) -> effects.SnapshotChanged:
        """Register a snapshot that this replica has frozen. Ignores one that ends below the log start.

        Returns the latest and earliest snapshot for raft. Raises StorageError; RuntimeError if there is no snapshot.
        """
        if snapshot_id.end_offset < self.log.log_start_offset:
            _LOG.info(
                "ignoring snapshot below log start snapshot=%s log_start=%d", snapshot_id, self.log.log_start_offset
            )
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
        """Return the offset to which the log start may be raised, or the current log start if it must not change.

        `leader_log_start`: the log start received from the leader, None if this replica is the leader. `replicas`: the
        other replicas if this replica is the leader. `now_ms` and the times in `replicas` are wall-clock times. Raises
        StorageError.
        """
        log = self.log
        self._retire(now_ms)
        if leader_log_start is not None:
            limit = min(leader_log_start, high_watermark)
            return retention.follower_log_start(log.log_start_offset, limit, self.latest_snapshot)
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
                    _LOG.error("not raising log start to corrupt snapshot log=%s error=%s", log.dir, error.message)
                    continue
                known = self._headers[snapshot_id] = (store.size(snapshot_id) or 0, timestamp_ms)
            yield retention.KeptSnapshot(snapshot_id, *known, self._bytes_from(snapshot_id.end_offset))

    def _bytes_from(self, offset: int) -> int:
        try:
            return self.log.bytes_from(offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.log.dir}: {error}") from error

    def raise_log_start(self, offset: int) -> None:
        """Raise the log start to `offset`; a lower one has no effect. `clean` makes it durable.

        Raises ValueError if no snapshot reaches `offset`, and the KafkaErrors of `Log.increment_log_start_offset`.
        """
        latest = self.latest_snapshot
        if offset > self.log.log_start_offset and (latest is None or latest.end_offset < offset):
            raise ValueError(f"log start must not exceed the latest snapshot {latest}, got {offset}")
        self.log.increment_log_start_offset(offset)

    def clean(self) -> effects.SnapshotChanged | None:
        """Make the log start durable, then delete snapshots below it. Blocks.

        Segments below it are retired with the next log change. Returns SnapshotChanged if the latest or earliest
        snapshot changed, else None. Raises StorageError; if the disk is full, nothing was removed and `clean` may be
        retried.
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
        """Remove segments below the durable log start from the log. Called by the log's owner after `clean`."""
        if self._may_retire:
            self._may_retire = False
            self.log.run_retention(now_ms, self._durable_start)

    def _drop_obsolete(self, log_start: int) -> None:
        if log_start > 0:
            self.store.delete(retention.obsolete(log_start, self.store.snapshot_ids()))

    def _own(self) -> list[SnapshotId]:
        """Return the ids of the snapshots that end within the log, except those being received, oldest first."""
        start, end = self.log.log_start_offset, self.log.log_end_offset
        snapshot_ids = self.store.snapshot_ids()
        return [each for each in snapshot_ids if start <= each.end_offset <= end and each not in self._received]

    def _observe_snapshots(self) -> None:
        """Update the latest and earliest snapshot, unless a concurrent call has already set newer ones."""
        own = self._own()
        if own:
            with self._snapshots_lock:  # `install` on the machine's task may run beside `clean` on a thread
                self.latest_snapshot = max(own[-1], self.latest_snapshot or own[-1], key=age_order)
                self.earliest_snapshot = max(own[0], self.earliest_snapshot or own[0], key=age_order)

    def _changed(self) -> effects.SnapshotChanged:
        self._observe_snapshots()
        if self.latest_snapshot is None:
            raise RuntimeError(f"{self.log.dir} has no snapshot")
        return effects.SnapshotChanged(self.latest_snapshot, self.earliest_snapshot)
