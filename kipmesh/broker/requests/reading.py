"""What a fetch gets from one partition: followers from its leader, consumers from any replica of it.

The decisions are `kipmesh.core.replica`'s. Consumers read below the replica's own high watermark, and are told the
leader's (392-01, 392-03 to 392-07, 392-10); on a leader, both are one. Errors are in what is returned.
"""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HINTED
from kipmesh.broker.replication.replica import Replica
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import PartitionRead
from kipmesh.core.replica.follower import has_diverged
from kipmesh.core.replica.leader import FollowerFetches
from kipmesh.core.replica.selection import ClientMetadata
from kipmesh.core.replica.serving import CONSUMER_ID, OffsetCase, check_reader, compares_epochs, offset_case
from kipmesh.messages import EpochEndOffset, FetchPartition, PartitionData


class Consumer(NamedTuple):
    """A client that fetches; brokers are none."""

    replica_id: int = CONSUMER_ID
    client: ClientMetadata = ClientMetadata()
    names_rack: bool = True
    """Whether its protocol can name a rack: without, leaders alone serve it."""
    may_be_redirected: bool = False


def partition_data(
    replica: Replica,
    error_code: int = 0,
    diverging_epoch: EpochEndOffset | None = None,
    preferred_read_replica: int = -1,
    records: bytes = b"",
) -> PartitionData:
    """An answer; each says where the log begins and what the high watermark is (392-07)."""
    high_watermark = replica.told_high_watermark
    # Positional: this is built once a partition a fetch.
    return PartitionData(
        replica.partition,
        error_code,
        high_watermark,
        high_watermark,
        replica.log.log_start_offset,
        diverging_epoch,
        replica.current_leader if error_code in HINTED else None,
        None,
        (),
        preferred_read_replica,
        records,
    )


def _divergence(replica: Replica, request: FetchPartition) -> PartitionData | None:
    """The answer to who has read what is not in this log; None if all is well. Raises OFFSET_OUT_OF_RANGE.

    Nothing but the divergence is taken from it, and the high watermark has to be told again. So it does not count as
    told: nobody's last stable offset is -1, and what differs is news (227-08).
    """
    found = replica.log.end_offset_for_epoch(request.last_fetched_epoch)
    if found.end_offset < 0:
        raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, "no common leader epoch")
    if not has_diverged(request.fetch_offset, request.last_fetched_epoch, found):
        return None
    return partition_data(replica, diverging_epoch=found)._replace(last_stable_offset=-1)


def read_for_follower(
    replica: Replica,
    request: FetchPartition,
    replica_id: int,
    replica_epoch: int,
    max_bytes: int,
    min_one_batch: bool,
    fetches: FollowerFetches | None = None,
) -> PartitionRead:
    """What broker `replica_id` of `replica_epoch` gets from a leader, to the log end; its position moves.

    A follower outside of the ISR is read `again` in each fetch until it is a member: what keeps it out may end without
    any event here.
    """
    try:
        leader = replica.require_leader(request.current_leader_epoch)
        if request.last_fetched_epoch >= 0:
            diverged = _divergence(replica, request)
            if diverged is not None:
                return PartitionRead(diverged, True)
        replica.follower_fetched(leader, replica_id, replica_epoch, request, fetches)
        again = replica_id not in leader.isr
        end = replica.log.log_end_offset
        if request.fetch_offset == end:
            return PartitionRead(partition_data(replica), again=again)
        return _records(replica, request.fetch_offset, end, max_bytes, min_one_batch, again)
    except KafkaError as error:
        return PartitionRead(partition_data(replica, error.code), True)


def _records(
    replica: Replica, offset: int, end: int, max_bytes: int, min_one_batch: bool, again: bool = False
) -> PartitionRead:
    """Batches from `offset`, which is in the log and below `end`; cut where the limit leaves room for none."""
    records = b""
    if max_bytes > 0 or min_one_batch:
        records = replica.log.read(offset, max_bytes, end, min_one_batch)
    is_cut = not records and not min_one_batch
    return PartitionRead(partition_data(replica, records=records), is_cut=is_cut, again=again)


class ConsumerReads:
    """Serves consumers from the replicas here, whatever their role."""

    def __init__(self, metrics: BrokerMetrics, selection: ReplicaSelection | None = None) -> None:
        self._metrics = metrics
        self._selection = selection

    def read(
        self, replica: Replica, request: FetchPartition, consumer: Consumer, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """The first that applies: an error, a divergence, another replica, the offset's case, records."""
        try:
            return self._read(replica, request, consumer, max_bytes, min_one_batch)
        except KafkaError as error:
            return PartitionRead(partition_data(replica, error.code), True)

    def _read(
        self, replica: Replica, request: FetchPartition, consumer: Consumer, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        replica.require_connected()
        leader, log, offset = replica.leader, replica.log, request.fetch_offset
        code = replica.check_epoch(request.current_leader_epoch) or check_reader(
            is_leader=leader is not None,
            replica_id=consumer.replica_id,
            names_rack=consumer.names_rack and replica.has_role,
        )
        if code:
            return PartitionRead(partition_data(replica, code), True)
        start, end = log.log_start_offset, log.log_end_offset
        if compares_epochs(
            offset,
            request.last_fetched_epoch,
            is_leader=leader is not None,
            log_start_offset=start,
            log_end_offset=end,
        ):
            diverged = _divergence(replica, request)
            if diverged is not None:
                return PartitionRead(diverged, True)
        if leader is not None and consumer.may_be_redirected and self._selection is not None:
            nearer = self._selection.by_leader(replica, leader, consumer.client, consumer.replica_id, offset)
            if nearer >= 0:
                self._metrics.redirected.labels(str(nearer)).inc()
                return PartitionRead(partition_data(replica, preferred_read_replica=nearer), True)
        case = offset_case(
            offset,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=replica.high_watermark,
            leader_high_watermark=replica.told_high_watermark,
        )
        if case is OffsetCase.READABLE:
            return _records(replica, offset, replica.high_watermark, max_bytes, min_one_batch)
        if case.is_counted:
            self._metrics.offset_case(case, is_leader=leader is not None)
        return PartitionRead(partition_data(replica, case.error_code), bool(case.error_code))
