"""Reads one partition for a fetch: for followers from the leader, for consumers from any replica.

`kipmesh.core.replica` decides. Consumers read below the replica's own high watermark and receive the leader's (392-01,
392-03 to 392-07, 392-10). Errors are returned in the response, not raised.
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
from kipmesh.core.replica.serving import CONSUMER_ID, OffsetCase, check_fetch, compares_epochs, offset_case
from kipmesh.messages import EpochEndOffset, FetchPartition, PartitionData


class Consumer(NamedTuple):
    """The consumer that sent a fetch, and how replicas may serve it."""

    replica_id: int = CONSUMER_ID
    client: ClientMetadata = ClientMetadata()
    names_rack: bool = True
    """Whether the client's protocol version can name a rack. Otherwise only leaders serve it."""
    may_be_redirected: bool = False


def partition_data(
    replica: Replica,
    error_code: int = 0,
    diverging_epoch: EpochEndOffset | None = None,
    preferred_read_replica: int = -1,
    records: bytes = b"",
) -> PartitionData:
    """Return the response for one partition, with its log start offset and the leader's high watermark (392-07)."""
    high_watermark = replica.leader_high_watermark
    # Positional arguments: hot path.
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
    """Return the response for a reader whose log diverges from this one, or None if it does not.

    Raises KafkaError with OFFSET_OUT_OF_RANGE if no epoch of this log is at or below the reader's last fetched epoch.

    The reader ignores the high watermark of the response. The last stable offset is -1, a value that no reader has, so
    that the session sends both again later (227-08).
    """
    epoch_end = replica.log.end_offset_for_epoch(request.last_fetched_epoch)
    if epoch_end.end_offset < 0:
        raise KafkaError(
            ErrorCode.OFFSET_OUT_OF_RANGE, f"no leader epoch of {replica} is at or below {request.last_fetched_epoch}"
        )
    if not has_diverged(request.fetch_offset, request.last_fetched_epoch, epoch_end):
        return None
    return partition_data(replica, diverging_epoch=epoch_end)._replace(last_stable_offset=-1)


def read_for_follower(
    replica: Replica,
    request: FetchPartition,
    replica_id: int,
    replica_epoch: int,
    max_bytes: int,
    min_one_batch: bool,
    fetches: FollowerFetches | None = None,
) -> PartitionRead:
    """Read from this leader, up to the log end, for follower `replica_id`, and record the follower's position.

    Errors are in the result. A follower outside the ISR has `again` set in each result until it joins, because there
    may be no event here when it becomes able to join.
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
    """Read batches from `offset`, which is below `end`. Sets `is_cut` if `max_bytes` has no room for a batch."""
    records = b""
    if max_bytes > 0 or min_one_batch:
        records = replica.log.read(offset, max_bytes, end, min_one_batch)
    is_cut = not records and not min_one_batch
    return PartitionRead(partition_data(replica, records=records), is_cut=is_cut, again=again)


class ConsumerReads:
    """Reads partitions for consumers, from leaders and followers."""

    def __init__(self, metrics: BrokerMetrics, selection: ReplicaSelection | None = None) -> None:
        self._metrics = metrics
        self._selection = selection

    def read(
        self, replica: Replica, request: FetchPartition, consumer: Consumer, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Read one partition for a consumer.

        The result has the first of these that applies: an error, a diverging epoch, a preferred read replica, an
        offset without readable records (392-03 to 392-06), or records.
        """
        try:
            return self._read(replica, request, consumer, max_bytes, min_one_batch)
        except KafkaError as error:
            return PartitionRead(partition_data(replica, error.code), True)

    def _read(
        self, replica: Replica, request: FetchPartition, consumer: Consumer, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        replica.require_clients_accepted()
        leader, log, offset = replica.leader, replica.log, request.fetch_offset
        code = replica.check_epoch(request.current_leader_epoch) or check_fetch(
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
            preferred = self._selection.by_leader(replica, leader, consumer.client, consumer.replica_id, offset)
            if preferred >= 0:
                self._metrics.redirected.labels(str(preferred)).inc()
                return PartitionRead(partition_data(replica, preferred_read_replica=preferred), True)
        case = offset_case(
            offset,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=replica.high_watermark,
            leader_high_watermark=replica.leader_high_watermark,
        )
        if case is OffsetCase.READABLE:
            return _records(replica, offset, replica.high_watermark, max_bytes, min_one_batch)
        if case.is_counted:
            self._metrics.offset_case(case, is_leader=leader is not None)
        return PartitionRead(partition_data(replica, case.error_code), bool(case.error_code))
