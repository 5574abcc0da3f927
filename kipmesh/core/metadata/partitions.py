"""Broker reports about replicas: AlterPartition (the ISR) and AssignReplicasToDirs (log directories).

AlterPartition: a leader changes its ISR. The checks and their order are Kafka's. The request carries the partition
epoch that the leader knows, so an accepted request proves that the leader was alive after the last change and clears
`last_known_elr` (see `elections`). A request that adds the last replica of a reassignment's target to the ISR completes
the reassignment. If that removes the leader, the response is NEW_LEADER_ELECTED although the change was made.

Failed log directories (KIP-858, ADR 8): `PartitionRecord.directories` names the log directory of each replica. Only the
id `LOST` has an effect: the directory has failed, and the log is not available.

| event                                                       | effect on each partition concerned                     |
| ----------------------------------------------------------- | ------------------------------------------------------ |
| the broker assigns LOST (its directory failed)              | the replica is lost and leaves ISR and leadership      |
| a broker registers without a directory that it had          | all its replicas are lost until it assigns directories |
| the broker assigns a directory (it has the log, or          | the replica is not lost                                |
| recreated it as a follower)                                 |                                                        |

A lost replica leaves the ISR like one whose broker stopped uncleanly, even as the last member. It stays in the last
ISR, so no replica that may lack committed records leads in its place. It may not join an ISR, and unclean elections do
not wait for it.

Invariant: a lost replica is in no ISR.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import elections
from kipmesh.core.metadata.decision import CanLead, ControllerState, Decision, is_registered
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionKey, PartitionState
from kipmesh.core.metadata.reassignments import with_completion
from kipmesh.core.metadata.records import BrokerRegistrationChangeRecord, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import LOST_DIRECTORY, UNASSIGNED_DIRECTORY, apply_change, is_lost

_ID_BYTES = 16


def _unknown_code(image: MetadataImage, key: PartitionKey) -> ErrorCode:
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if key[0] in image.topics else ErrorCode.UNKNOWN_TOPIC_ID


# --- AlterPartition


def alter_partition(
    controller: ControllerState, request: m.AlterPartitionRequest
) -> Decision[m.AlterPartitionResponse]:
    """Decide AlterPartition: change the ISRs of partitions at the request of their leader.

    Error codes: STALE_BROKER_EPOCH; per partition UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, NOT_CONTROLLER,
    FENCED_LEADER_EPOCH, INVALID_UPDATE_VERSION, INELIGIBLE_REPLICA, INVALID_REQUEST, NEW_LEADER_ELECTED (the change was
    made).
    """
    image = controller.image
    if not is_registered(image, request.broker_id, request.broker_epoch):
        return Decision((), m.AlterPartitionResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    topics = []
    seen: set[PartitionKey] = set()
    for topic in request.topics:
        partitions = []
        for requested in topic.partitions:
            key = (topic.topic_id, requested.partition_index)
            code = ErrorCode.INVALID_REQUEST if key in seen else _isr_error(image, key, request.broker_id, requested)
            seen.add(key)
            response = m.AlterPartitionPartitionResponse(requested.partition_index, code, leader_id=-1, leader_epoch=-1)
            if code is ErrorCode.NONE:
                state = image.topics[topic.topic_id].partitions[requested.partition_index]
                change = with_completion(image, key, state, _isr_change(key, state, requested))
                if change is not None:
                    records.append(change)
                    state = apply_change(state, change)
                if state.leader != request.broker_id:  # the change removed the leader, which must fetch newer metadata
                    response = response._replace(error_code=ErrorCode.NEW_LEADER_ELECTED)
                else:
                    response = m.AlterPartitionPartitionResponse(
                        requested.partition_index,
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
    key: PartitionKey, state: PartitionState, requested: m.AlterPartitionPartition
) -> PartitionChangeRecord | None:
    isr = tuple([member.broker_id for member in requested.new_isr_with_epochs])
    recovery = requested.leader_recovery_state
    change = PartitionChangeRecord(
        key[1],
        key[0],
        isr=isr if isr != tuple(state.isr) else None,
        leader_recovery_state=recovery if recovery != state.leader_recovery_state else -1,
        last_known_elr=() if state.last_known_elr else None,
    )
    return None if change == PartitionChangeRecord(key[1], key[0]) else change


def _isr_error(image: MetadataImage, key: PartitionKey, leader: int, requested: m.AlterPartitionPartition) -> ErrorCode:
    state = image.partition(*key)
    if state is None:
        return _unknown_code(image, key)
    # A leader with newer metadata than this controller should find the newer controller.
    if requested.leader_epoch > state.leader_epoch or requested.partition_epoch > state.partition_epoch:
        return ErrorCode.NOT_CONTROLLER
    if requested.leader_epoch < state.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if leader != state.leader:
        return ErrorCode.INVALID_REQUEST
    if requested.partition_epoch < state.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    isr = [member.broker_id for member in requested.new_isr_with_epochs]
    if leader not in isr or len(set(isr)) != len(isr) or not set(isr) <= set(state.replicas):
        return ErrorCode.INVALID_REQUEST
    recovering = requested.leader_recovery_state == elections.RECOVERING
    if requested.leader_recovery_state not in (elections.RECOVERED, elections.RECOVERING):
        return ErrorCode.INVALID_REQUEST
    if recovering and (len(isr) > 1 or state.leader_recovery_state == elections.RECOVERED):
        return ErrorCode.INVALID_REQUEST
    if not all(_is_eligible(image, state, member) for member in requested.new_isr_with_epochs):
        return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _is_eligible(image: MetadataImage, state: PartitionState, member: m.IsrMember) -> bool:
    """Return whether the broker may join the ISR and has the broker epoch in the request (-1 for any)."""
    broker = image.brokers.get(member.broker_id)
    if broker is None or not broker.can_lead or is_lost(state, member.broker_id):
        return False
    return member.broker_epoch in (-1, broker.broker_epoch)


# --- log directories


def has_lost_directories(before: BrokerState | None, log_dirs: Sequence[bytes]) -> bool:
    """Return whether a registering broker lacks a log directory of its registration `before`. False if `before` is None
    or the broker reports no directories."""
    return before is not None and bool(log_dirs) and not set(before.log_dirs) <= set(log_dirs)


def mark_all_lost(image: MetadataImage, broker_id: int, can_lead: CanLead) -> list[Record]:
    """Return the changes that mark every replica of the broker as lost, except those that are already lost."""
    changes = [
        _mark_lost(key, image.topics[key[0]].partitions[key[1]], broker_id, can_lead)
        for key in image.partitions_of_broker(broker_id)
    ]
    return [change for change in changes if change is not None]


def directories_failed(broker: BrokerState, failed: Collection[bytes]) -> list[Record]:
    """Return the record that removes the failed log directories from the registration; empty if none is registered or
    no directory would be left. The broker reports lost replicas itself."""
    left = [directory for directory in broker.log_dirs if directory not in failed]
    if not left or len(left) == len(broker.log_dirs):
        return []
    return [BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, log_dirs=left)]


def assign_replicas_to_dirs(
    controller: ControllerState, request: m.AssignReplicasToDirsRequest
) -> Decision[m.AssignReplicasToDirsResponse]:
    """Decide AssignReplicasToDirs: assign the broker's replicas to log directories, or mark them lost (directory id
    LOST).

    Error codes: STALE_BROKER_EPOCH; per partition UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER
    (no replica on the broker), INVALID_REQUEST.
    """
    image, broker_id = controller.image, request.broker_id
    if not is_registered(image, broker_id, request.broker_epoch):
        return Decision((), m.AssignReplicasToDirsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    directories = []
    seen: set[PartitionKey] = set()
    for directory in request.directories:
        topics = []
        for topic in directory.topics:
            partitions = []
            for partition in topic.partitions:
                key = (topic.topic_id, partition.partition_index)
                code = _assignment_error(image, key, broker_id, directory.id)
                if key in seen:
                    code = ErrorCode.INVALID_REQUEST
                seen.add(key)
                if not code:
                    state = image.topics[key[0]].partitions[key[1]]
                    change = _assigned(key, state, broker_id, directory.id, image.can_lead)
                    if change is not None:
                        records.append(change)
                partitions.append(m.AssignReplicasToDirsPartitionResponse(partition.partition_index, code))
            topics.append(m.AssignReplicasToDirsTopicResponse(topic.topic_id, tuple(partitions)))
        directories.append(m.AssignReplicasToDirsDirectoryResponse(directory.id, tuple(topics)))
    return Decision(records, m.AssignReplicasToDirsResponse(directories=tuple(directories)))


def _assignment_error(image: MetadataImage, key: PartitionKey, broker_id: int, directory: bytes) -> ErrorCode:
    if len(directory) != _ID_BYTES:
        return ErrorCode.INVALID_REQUEST
    state = image.partition(*key)
    if state is None:
        return _unknown_code(image, key)
    return ErrorCode.NONE if broker_id in state.replicas else ErrorCode.NOT_LEADER_OR_FOLLOWER


def _assigned(
    key: PartitionKey, state: PartitionState, broker_id: int, directory: bytes, can_lead: CanLead
) -> PartitionChangeRecord | None:
    if directory == LOST_DIRECTORY:
        return _mark_lost(key, state, broker_id, can_lead)
    directories = _with_directory(state, broker_id, directory)
    return None if directories is None else PartitionChangeRecord(key[1], key[0], directories=directories)


def _mark_lost(
    key: PartitionKey, state: PartitionState, broker_id: int, can_lead: CanLead
) -> PartitionChangeRecord | None:
    if is_lost(state, broker_id):
        return None
    leaves = elections.leave_isr(key, state, broker_id, can_lead, unclean=True)
    change = PartitionChangeRecord(key[1], key[0]) if leaves is None else leaves
    return change._replace(directories=_with_directory(state, broker_id, LOST_DIRECTORY))


def _with_directory(state: PartitionState, broker_id: int, directory: bytes) -> tuple[bytes, ...] | None:
    """Return the replicas' log directories with the broker's replaced by `directory`, or None if that changes
    nothing."""
    held = dict(zip(state.replicas, state.directories, strict=False))
    if held.get(broker_id) == directory:
        return None
    held[broker_id] = directory
    return tuple([held.get(replica, UNASSIGNED_DIRECTORY) for replica in state.replicas])
