"""Replicas in data folders that have failed (KIP-858, ADR 8): who is lost, and who is back.

A broker has one or more data folders, each with an id. `PartitionRecord.directories` names one for each replica; all
that counts of it is `LOST`: the replica's folder has failed, and nobody has its log.

| event                                                       | then, for each partition concerned                     |
| ----------------------------------------------------------- | ------------------------------------------------------ |
| the broker assigns LOST (its folder failed)                 | the replica is lost: it leaves ISR and leadership      |
| a broker registers without a folder that it had             | all its replicas are lost, until it says which are not |
| the broker assigns a folder (it found the log, or began     | the replica is not lost                                |
| anew as the follower of a leader)                           |                                                        |

A lost replica leaves the ISR as one whose broker stopped uncleanly, even as its last member: what it had is not
known any more. It stays a member of the last ISR, so nobody leads in its stead who may lack what was committed
("Log truth", `elections`); it may not join an ISR, and no unclean election waits for it. If its folder comes back,
so does its log end.

Each function is pure. Invariant: a lost replica is in no ISR.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import elections
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.elections import CanLead
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionKey, PartitionState
from kipmesh.core.metadata.records import BrokerRegistrationChangeRecord, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import LOST_DIRECTORY, UNASSIGNED_DIRECTORY, is_lost

_ID_BYTES = 16


def has_lost_folders(before: BrokerState | None, log_dirs: Sequence[bytes]) -> bool:
    """Whether a broker that registers lacks a folder that it had."""
    return before is not None and bool(log_dirs) and not set(before.log_dirs) <= set(log_dirs)


def lose_all(image: MetadataImage, broker_id: int, can_lead: CanLead) -> list[Record]:
    """Every replica of the broker is lost."""
    records: list[Record] = []
    for key in image.partitions_of_broker(broker_id):
        state = image.topics[key[0]].partitions[key[1]]
        change = _lost(key, state, broker_id, can_lead)
        if change is not None:
            records.append(change)
    return records


def folders_failed(broker: BrokerState, failed: Collection[bytes]) -> list[Record]:
    """The broker has fewer folders than it registered; what that means for its replicas it says itself."""
    left = [directory for directory in broker.log_dirs if directory not in failed]
    if not left or len(left) == len(broker.log_dirs):
        return []
    return [BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, log_dirs=left)]


def assign_replicas(
    image: MetadataImage, request: m.AssignReplicasToDirsRequest, can_lead: CanLead
) -> Decision[m.AssignReplicasToDirsResponse]:
    """Put replicas of the broker into folders. `can_lead` says who may be elected."""
    broker = image.brokers.get(request.broker_id)
    if broker is None or broker.broker_epoch != request.broker_epoch:
        return Decision((), m.AssignReplicasToDirsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    seen: set[PartitionKey] = set()
    answers = [_assign_to(image, broker.broker_id, one, can_lead, records, seen) for one in request.directories]
    return Decision(records, m.AssignReplicasToDirsResponse(directories=tuple(answers)))


def _assign_to(
    image: MetadataImage,
    broker_id: int,
    asked: m.AssignReplicasToDirsDirectory,
    can_lead: CanLead,
    records: list[Record],
    seen: set[PartitionKey],
) -> m.AssignReplicasToDirsDirectoryResponse:
    topics = []
    for topic in asked.topics:
        partitions = []
        for partition in topic.partitions:
            key = (topic.topic_id, partition.partition_index)
            code = ErrorCode.INVALID_REQUEST if key in seen else _refusal(image, key, broker_id, asked.id)
            seen.add(key)
            if not code:
                change = _assigned(key, image.topics[key[0]].partitions[key[1]], broker_id, asked.id, can_lead)
                if change is not None:
                    records.append(change)
            partitions.append(m.AssignReplicasToDirsPartitionResponse(partition.partition_index, code))
        topics.append(m.AssignReplicasToDirsTopicResponse(topic.topic_id, tuple(partitions)))
    return m.AssignReplicasToDirsDirectoryResponse(asked.id, tuple(topics))


def _refusal(image: MetadataImage, key: PartitionKey, broker_id: int, directory: bytes) -> ErrorCode:
    if len(directory) != _ID_BYTES:
        return ErrorCode.INVALID_REQUEST
    if key[0] not in image.topics:
        return ErrorCode.UNKNOWN_TOPIC_ID
    state = image.partition(*key)
    if state is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return ErrorCode.NONE if broker_id in state.replicas else ErrorCode.NOT_LEADER_OR_FOLLOWER


def _assigned(
    key: PartitionKey, state: PartitionState, broker_id: int, directory: bytes, can_lead: CanLead
) -> PartitionChangeRecord | None:
    if directory == LOST_DIRECTORY:
        return _lost(key, state, broker_id, can_lead)
    directories = _with(state, broker_id, directory)
    return None if directories is None else PartitionChangeRecord(key[1], key[0], directories=directories)


def _lost(key: PartitionKey, state: PartitionState, broker_id: int, can_lead: CanLead) -> PartitionChangeRecord | None:
    if is_lost(state, broker_id):
        return None
    leaves = elections.leave_isr(key, state, broker_id, can_lead, unclean=True)
    change = PartitionChangeRecord(key[1], key[0]) if leaves is None else leaves
    return change._replace(directories=_with(state, broker_id, LOST_DIRECTORY))


def _with(state: PartitionState, broker_id: int, directory: bytes) -> tuple[bytes, ...] | None:
    """The folders of the replicas with another one for this broker's; None if it is the same."""
    held = dict(zip(state.replicas, state.directories, strict=False))
    if held.get(broker_id) == directory:
        return None
    held[broker_id] = directory
    return tuple([held.get(replica, UNASSIGNED_DIRECTORY) for replica in state.replicas])
