"""The log of `__cluster_metadata-0` as a voter keeps it: one Log in a folder of its own, written in Kafka's form.

Blocking: `load`, `flush` and `close` belong on a thread; `append` and `read` are short and belong to the owner.

Invariant: what is appended as one batch is there as a whole or not at all after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.messages import EpochEndOffset
from kipmesh.core.messages.limits import MAX_INT32
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.metadata.records import Record, encode_record
from kipmesh.core.raft.control import LeaderChange, encode_leader_change
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.log import Log
from kipmesh.storage.log_manager import LogManager

OPEN_FILES_MAX = 64
REPLAY_BYTES = 4 << 20
"""Bytes read at a time on start."""


class MetadataLog:
    """The metadata log of one voter."""

    def __init__(self, fs: FileSystem, folder: str, *, cluster_id: str, node_id: int, segment_bytes: int) -> None:
        # Kept whole until snapshots are there (2 of 8), and one batch as large as a request may make it.
        self._config = TopicConfig.parse(
            {
                "max.message.bytes": MAX_INT32,
                "retention.ms": -1,
                "retention.bytes": -1,
                "segment.bytes": segment_bytes,
                "min.insync.replicas": 1,
            }
        )
        self._manager = LogManager(
            fs,
            (folder,),
            cluster_id=cluster_id,
            node_id=node_id,
            defaults=self._config,
            open_files_max=OPEN_FILES_MAX,
        )
        self._log: Log | None = None

    def load(self, now_ms: int) -> None:
        """Open the folder, recover the log; KafkaError for a folder that is another's, or in use."""
        self._manager.load(now_ms)
        self._log = self._manager.get(CLUSTER_METADATA_TOPIC, 0) or self._manager.create(
            CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, self._config, now_ms
        )

    @property
    def log(self) -> Log:
        """The loaded log."""
        if self._log is None:
            raise RuntimeError("the metadata log is not loaded")
        return self._log

    @property
    def end_offset(self) -> int:
        """The offset that the next record gets."""
        return self.log.log_end_offset

    @property
    def start_offset(self) -> int:
        """The offset of the first record that is there."""
        return self.log.log_start_offset

    @property
    def latest_epoch(self) -> int:
        """The epoch of the last batch, -1 for an empty log."""
        return self.log.latest_epoch

    def append(self, records: Sequence[Record], epoch: int, now_ms: int) -> bytes:
        """Append the records as one batch, which is returned."""
        return self._append([(None, encode_record(record)) for record in records], epoch, now_ms, is_control=False)

    def append_leader_change(self, leader_id: int, voters: Sequence[int], epoch: int, now_ms: int) -> bytes:
        """Append what a new leader begins its epoch with."""
        return self._append(
            [encode_leader_change(LeaderChange(leader_id, tuple(voters), tuple(voters)))],
            epoch,
            now_ms,
            is_control=True,
        )

    def _append(
        self, pairs: Sequence[tuple[bytes | None, bytes]], epoch: int, now_ms: int, *, is_control: bool
    ) -> bytes:
        base = self.end_offset
        batch = record_batch.build(
            pairs, base_offset=base, leader_epoch=epoch, timestamp_ms=now_ms, is_control=is_control
        )
        self.log.append_as_leader(batch, epoch, now_ms)
        return batch

    def batches(self) -> Iterator[bytes]:
        """The whole log from its start, some batches at a time."""
        offset = self.start_offset
        while offset < self.end_offset:
            data = self.log.read(offset, REPLAY_BYTES, self.end_offset, True)
            yield data
            for _, header in record_batch.iterate(data):
                offset = header.next_offset

    def read(self, offset: int, max_bytes: int, high_watermark: int) -> bytes:
        """Whole batches below the high watermark, at least one if there is one."""
        return self.log.read(offset, max_bytes, high_watermark, True)

    def diverging_epoch(self, offset: int, last_fetched_epoch: int) -> EpochEndOffset | None:
        """Where a replica that ends at `offset` with that epoch leaves this log; None when it does not."""
        if last_fetched_epoch < 0:
            return None
        end = self.log.end_offset_for_epoch(last_fetched_epoch)
        if end.end_offset < 0:  # an epoch that this log knows nothing of
            return EpochEndOffset(self.latest_epoch, self.end_offset)
        if end.epoch != last_fetched_epoch or end.end_offset < offset:
            return end
        return None

    def flush(self) -> None:
        """Make everything appended so far durable."""
        self.log.flush()

    def close(self, epoch: int) -> None:
        """Flush, mark the folder as closed cleanly, give it back."""
        self._manager.close(epoch)
