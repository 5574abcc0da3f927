"""AlterPartition: a leader changes its ISR, and thereby proves that it lives.

The checks are Kafka's, in Kafka's order. The request names the partition epoch that the leader knows, so an accepted
one shows that the leader was alive after the last change: what is remembered of earlier ISRs is forgotten (see
`elections`). One that puts the last replica of a reassignment's target into the ISR completes that reassignment; when
the leader leaves by it, the answer is NEW_LEADER_ELECTED although the change was made.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.elections import RECOVERED, RECOVERING
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState, changed
from kipmesh.core.metadata.reassignments import completed
from kipmesh.core.metadata.records import PartitionChangeRecord, Record
from kipmesh.core.metadata.states import is_lost


def alter_partition(image: MetadataImage, request: m.AlterPartitionRequest) -> Decision[m.AlterPartitionResponse]:
    """Change ISRs as their leader asks."""
    broker = image.brokers.get(request.broker_id)
    if broker is None or broker.broker_epoch != request.broker_epoch:
        return Decision((), m.AlterPartitionResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    records: list[Record] = []
    topics = []
    seen: set[PartitionKey] = set()
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            key = (topic.topic_id, asked.partition_index)
            code = ErrorCode.INVALID_REQUEST if key in seen else _refusal(image, key, request.broker_id, asked)
            seen.add(key)
            if code is not ErrorCode.NONE:
                partitions.append(
                    m.AlterPartitionPartitionResponse(asked.partition_index, code, leader_id=-1, leader_epoch=-1)
                )
                continue
            state = image.topics[topic.topic_id].partitions[asked.partition_index]
            change = completed(image, key, state, _change(key, state, asked))
            if change is not None:
                records.append(change)
                state = changed(state, change)
            if state.leader != request.broker_id:  # which left by that: it is to look for newer metadata
                code = ErrorCode.NEW_LEADER_ELECTED
                partitions.append(
                    m.AlterPartitionPartitionResponse(asked.partition_index, code, leader_id=-1, leader_epoch=-1)
                )
                continue
            partitions.append(
                m.AlterPartitionPartitionResponse(
                    asked.partition_index,
                    ErrorCode.NONE,
                    state.leader,
                    state.leader_epoch,
                    state.isr,
                    state.leader_recovery_state,
                    state.partition_epoch,
                )
            )
        topics.append(m.AlterPartitionTopicResponse(topic.topic_id, tuple(partitions)))
    return Decision(records, m.AlterPartitionResponse(topics=tuple(topics)))


def _change(key: PartitionKey, state: PartitionState, asked: m.AlterPartitionPartition) -> PartitionChangeRecord | None:
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


def _refusal(image: MetadataImage, key: PartitionKey, leader: int, asked: m.AlterPartitionPartition) -> ErrorCode:
    if key[0] not in image.topics:
        return ErrorCode.UNKNOWN_TOPIC_ID
    state = image.partition(*key)
    if state is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
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
    recovering = asked.leader_recovery_state == RECOVERING
    if asked.leader_recovery_state not in (RECOVERED, RECOVERING):
        return ErrorCode.INVALID_REQUEST
    if recovering and (len(isr) > 1 or state.leader_recovery_state == RECOVERED):
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
