"""Topics, partitions and followers of the in-memory cluster. See `fake_broker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kipmesh.core.errors import ErrorCode
from kipmesh.core.producer.sequences import ProducerStates
from kipmesh.core.record_batch import BatchHeader, assign, parse_header
from kipmesh.messages import EpochEndOffset


@dataclass(slots=True)
class FakeFollower:
    """A follower that serves consumers. An offset of None means the leader's, a `code` of None no error."""

    log_start_offset: int | None = None
    end_offset: int | None = None
    known_high_watermark: int | None = None
    """The high watermark that the follower received last."""
    code: ErrorCode | None = None
    """Error of every fetch from this follower."""
    is_in_sync: bool = True
    is_online: bool = True


@dataclass(slots=True)
class FakePartition:
    """A partition: its leader, followers and record batches."""

    leader_id: int
    leader_epoch: int = 0
    log_start_offset: int = 0
    batches: list[tuple[BatchHeader, bytes]] = field(default_factory=list)
    end_offset: int = 0
    followers: dict[int, FakeFollower] = field(default_factory=dict)
    preferred_leader: int = -1
    """The first leader; set on construction."""
    producers: ProducerStates = field(default_factory=ProducerStates)

    def __post_init__(self) -> None:
        self.preferred_leader = self.leader_id

    @property
    def replicas(self) -> tuple[int, ...]:
        """Broker ids of all replicas, leader first (-1 if there is no leader)."""
        return (self.leader_id, *self.followers)

    @property
    def isr(self) -> tuple[int, ...]:
        """Broker ids of the in-sync replicas, leader first (-1 if there is no leader)."""
        return (self.leader_id, *[node for node, each in self.followers.items() if each.is_in_sync])

    @property
    def offline(self) -> tuple[int, ...]:
        """Broker ids of the offline followers."""
        return tuple([node for node, each in self.followers.items() if not each.is_online])

    def preferred(self, rack_id: str, racks: Mapping[int, str]) -> int:
        """Return the id of the first online in-sync follower in the rack `rack_id`.

        Returns -1 if there is none, or if the leader is in that rack. `racks` maps broker ids to racks.
        """
        if racks.get(self.leader_id) == rack_id:
            return -1
        good = [node for node, each in self.followers.items() if each.is_in_sync and each.is_online]
        return next((node for node in good if racks.get(node) == rack_id), -1)

    def append(self, batch: bytes) -> int:
        """Append a batch as the leader and return its base offset, or that of the original if it is a duplicate.

        Raises KafkaError for a batch of an idempotent producer: OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH or
        INVALID_RECORD.
        """
        produced = parse_header(batch)
        if produced.producer_id >= 0:
            repeated = self.producers.check(produced)
            if repeated is not None:
                return repeated.first_offset
            self.producers.append(produced, self.end_offset, 0)
        base = self.end_offset
        stored = assign(batch, base, self.leader_epoch)
        header = parse_header(stored)
        self.batches.append((header, stored))
        self.end_offset = header.next_offset
        return base

    def truncate(self, offset: int) -> None:
        """Remove all batches that end after `offset`, including one that begins before it.

        The end offset becomes that of the last remaining batch, or the log start offset if none remains.
        """
        self.batches = [each for each in self.batches if each[0].next_offset <= offset]
        self.end_offset = self.batches[-1][0].next_offset if self.batches else self.log_start_offset
        self.producers.truncate(self.end_offset)


@dataclass(slots=True)
class FakeTopic:
    """A topic of the in-memory cluster."""

    name: str
    topic_id: bytes
    partitions: list[FakePartition]
    configs: dict[str, str] = field(default_factory=dict)


def epoch_end(partition: FakePartition, epoch: int) -> EpochEndOffset:
    """Return the largest epoch <= `epoch` that has batches, and its end offset, as in KIP-320.

    If all batches belong to later epochs, returns `epoch` and the first batch's base offset. Returns (-1, -1) if there
    are no batches and `epoch` is not the current one.
    """
    if epoch == partition.leader_epoch:
        return EpochEndOffset(epoch, partition.end_offset)
    earlier = [header for header, _ in partition.batches if header.partition_leader_epoch <= epoch]
    later = [header for header, _ in partition.batches if header.partition_leader_epoch > epoch]
    if not earlier:
        return EpochEndOffset(-1, -1) if not later else EpochEndOffset(epoch, later[0].base_offset)
    return EpochEndOffset(earlier[-1].partition_leader_epoch, earlier[-1].next_offset)
