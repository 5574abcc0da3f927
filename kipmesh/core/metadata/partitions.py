"""What brokers report of their replicas: AlterPartition (the ISR) and AssignReplicasToDirs (log directories).

AlterPartition: a leader changes its ISR, and thereby proves that it is alive. The checks are Kafka's, in Kafka's order.
The request names the partition epoch that the leader knows, so an accepted one shows that the leader was alive after
the last change: what is remembered of earlier ISRs is forgotten (see `elections`). One that puts the last replica of a
reassignment's target into the ISR completes that reassignment; when the leader leaves by it, the response is
NEW_LEADER_ELECTED although the change was made.

Replicas in log directories that have failed (KIP-858, ADR 8): a broker has one or more log directories, each with an
id. `PartitionRecord.directories` names one for each replica; all that counts of it is `LOST`: the replica's directory
has failed, and nobody has its log.

| event                                                       | then, for each partition concerned                     |
| ----------------------------------------------------------- | ------------------------------------------------------ |
| the broker assigns LOST (its directory failed)              | the replica is lost: it leaves ISR and leadership      |
| a broker registers without a directory that it had          | all its replicas are lost, until it says which are not |
| the broker assigns a directory (it found the log, or        | the replica is not lost                                |
| started again as the follower of a leader)                  |                                                        |

A lost replica leaves the ISR as one whose broker stopped uncleanly, even as its last member: what it had is not
known any more. It stays a member of the last ISR, so nobody leads in its stead who may lack what was committed
("Log truth", `elections`); it may not join an ISR, and no unclean election waits for it. If its directory comes back,
so does its log end.

Invariant: a lost replica is in no ISR.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import elections
from kipmesh.core.metadata.decision import CanLead, ControllerState, Decision, is_registered
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionKey, PartitionState, changed
from kipmesh.core.metadata.reassignments import completed
from kipmesh.core.metadata.records import BrokerRegistrationChangeRecord, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import LOST_DIRECTORY, UNASSIGNED_DIRECTORY, is_lost

_ID_BYTES = 16


def _unknown(image: MetadataImage, key: PartitionKey) -> ErrorCode:
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if key[0] in image.topics else ErrorCode.UNKNOWN_TOPIC_ID


# --- AlterPartition


def alter_partition(
    controller: ControllerState, request: m.AlterPartitionRequest
) -> Decision[m.AlterPartitionResponse]:
    """AlterPartition: change ISRs as their leader requests."""
    image = controller.image
    if not is_registered(image, request.broker_id, request.broker_epoch):
        return Decision((), m.AlterPartitionResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    topics = []
    seen: set[PartitionKey] = set()
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            key = (topic.topic_id, asked.partition_index)
            code = ErrorCode.INVALID_REQUEST if key in seen else _isr_refusal(image, key, request.broker_id, asked)
            seen.add(key)
            response = m.AlterPartitionPartitionResponse(asked.partition_index, code, leader_id=-1, leader_epoch=-1)
            if code is ErrorCode.NONE:
                state = image.topics[topic.topic_id].partitions[asked.partition_index]
                change = completed(image, key, state, _isr_change(key, state, asked))
                if change is not None:
                    records.append(change)
                    state = changed(state, change)
                if state.leader != request.broker_id:  # which left by that: it is to look for newer metadata
                    response = response._replace(error_code=ErrorCode.NEW_LEADER_ELECTED)
                else:
                    response = m.AlterPartitionPartitionResponse(
                        asked.partition_index,
                        ErrorCode.NONE,
                        state.leader,
                        state.leader_epoch,
                        state.isr,
                        state.leader_recovery_state,
                        state.partition_epoch,
                    )
            partitions.append(response)
        topics.append(m.AlterPartitionTopicResponse(topic.topic_id, tuple(partitions)))
    return Decision(records, m.AlterPartitionResponse(topics=tuple(topics)))


def _isr_change(
    key: PartitionKey, state: PartitionState, asked: m.AlterPartitionPartition
) -> PartitionChangeRecord | None:
    isr = tuple([member.broker_id for member in asked.new_isr_with_epochs])
    recovery = asked.leader_recovery_state
    change = PartitionChangeRecord(
        key[1],
        key[0],
        isr=isr if isr != tuple(state.isr) else None,
        leader_recovery_state=recovery if recovery != state.leader_recovery_state else -1,
        last_known_elr=() if state.last_known_elr else None,
    )
    nothing = change.isr is None and change.leader_recovery_state < 0 and change.last_known_elr is None
    return None if nothing else change


def _isr_refusal(image: MetadataImage, key: PartitionKey, leader: int, asked: m.AlterPartitionPartition) -> ErrorCode:
    state = image.partition(*key)
    if state is None:
        return _unknown(image, key)
    # A leader that knows more than this controller should look for a newer one.
    if asked.leader_epoch > state.leader_epoch or asked.partition_epoch > state.partition_epoch:
        return ErrorCode.NOT_CONTROLLER
    if asked.leader_epoch < state.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if leader != state.leader:
        return ErrorCode.INVALID_REQUEST
    if asked.partition_epoch < state.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    isr = [member.broker_id for member in asked.new_isr_with_epochs]
    if leader not in isr or len(set(isr)) != len(isr) or not set(isr) <= set(state.replicas):
        return ErrorCode.INVALID_REQUEST
    recovering = asked.leader_recovery_state == elections.RECOVERING
    if asked.leader_recovery_state not in (elections.RECOVERED, elections.RECOVERING):
        return ErrorCode.INVALID_REQUEST
    if recovering and (len(isr) > 1 or state.leader_recovery_state == elections.RECOVERED):
        return ErrorCode.INVALID_REQUEST
    if not all(_is_eligible(image, state, member) for member in asked.new_isr_with_epochs):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _is_eligible(image: MetadataImage, state: PartitionState, member: m.IsrMember) -> bool:
    """Whether the broker may be in the ISR, and is the one (by its epoch, -1 for any) that the leader means."""
    broker = image.brokers.get(member.broker_id)
    if broker is None or not broker.can_lead or is_lost(state, member.broker_id):
        return False
    return member.broker_epoch in (-1, broker.broker_epoch)


# --- log directories


def has_lost_directories(before: BrokerState | None, log_dirs: Sequence[bytes]) -> bool:
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


def directories_failed(broker: BrokerState, failed: Collection[bytes]) -> list[Record]:
    """The broker has fewer folders than it registered; what that means for its replicas it says itself."""
    left = [directory for directory in broker.log_dirs if directory not in failed]
    if not left or len(left) == len(broker.log_dirs):
        return []
    return [BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, log_dirs=left)]


def assign_replicas_to_dirs(
    controller: ControllerState, request: m.AssignReplicasToDirsRequest
) -> Decision[m.AssignReplicasToDirsResponse]:
    """AssignReplicasToDirs: put replicas of the broker into log directories."""
    image, broker_id = controller.image, request.broker_id
    if not is_registered(image, broker_id, request.broker_epoch):
        return Decision((), m.AssignReplicasToDirsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    directories = []
    seen: set[PartitionKey] = set()
    for asked in request.directories:
        topics = []
        for topic in asked.topics:
            partitions = []
            for partition in topic.partitions:
                key = (topic.topic_id, partition.partition_index)
                code = ErrorCode.INVALID_REQUEST if key in seen else _refusal(image, key, broker_id, asked.id)
                seen.add(key)
                if not code:
                    state = image.topics[key[0]].partitions[key[1]]
                    change = _assigned(key, state, broker_id, asked.id, image.can_lead)
                    if change is not None:
                        records.append(change)
                partitions.append(m.AssignReplicasToDirsPartitionResponse(partition.partition_index, code))
            topics.append(m.AssignReplicasToDirsTopicResponse(topic.topic_id, tuple(partitions)))
        directories.append(m.AssignReplicasToDirsDirectoryResponse(asked.id, tuple(topics)))
    return Decision(records, m.AssignReplicasToDirsResponse(directories=tuple(directories)))


def _refusal(image: MetadataImage, key: PartitionKey, broker_id: int, directory: bytes) -> ErrorCode:
    if len(directory) != _ID_BYTES:
        return ErrorCode.INVALID_REQUEST
    state = image.partition(*key)
    if state is None:
        return _unknown(image, key)
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
