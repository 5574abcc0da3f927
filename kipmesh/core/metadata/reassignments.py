"""AlterPartitionReassignments and ListPartitionReassignments (KIP-455): move replicas to other brokers.

| step     | replicas                            | adding            | removing          | ISR                       |
| -------- | ----------------------------------- | ----------------- | ----------------- | ------------------------- |
| begin    | target, then the rest of original   | target - original | original - target | unchanged                 |
| running  |                                     |                   |                   | adding replicas join it   |
| complete | target                              | none              | none              | without removing replicas |
| cancel   | original                            | none              | none              | without adding replicas   |

The original replicas are those that are not being added. A second target therefore replaces the first and starts from
the same original.

A reassignment completes when the ISR contains all of the target, in the same decision as the AlterPartition that causes
it. If the leader is removed, the first target replica that can lead takes over. A record that drops a replica starts a
new leader epoch, which fences the replica's fetches.

A replica is dropped only while the rest of the ISR certainly has all committed records. While `last_known_elr` is not
empty, the leader may be dead and the dropped replica may have the most records (see `elections`). Completion then waits
until a leader has proved itself alive. Begin and cancel are refused if they drop a replica that may be needed, unless
the topic allows unclean elections.

All functions are pure. Invariants: `adding` and `removing` are disjoint subsets of `replicas`; both are empty without a
reassignment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import (
    CanLead,
    ControllerState,
    Decision,
    check_replicas,
    error_text,
    find_partition,
)
from kipmesh.core.metadata.elections import RECOVERING, first_eligible
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState
from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import apply_change, new_directory

COMPLETIONS_MAX = 1000
"""Maximum reassignments that one decision other than AlterPartition completes."""


def is_reassigning(state: PartitionState) -> bool:
    """Return whether a reassignment of the partition is running."""
    return bool(state.adding_replicas or state.removing_replicas)


def original_replicas(state: PartitionState) -> tuple[int, ...]:
    """Return the replicas before the running reassignment; all replicas if none is running."""
    return tuple([replica for replica in state.replicas if replica not in state.adding_replicas])


def target_replicas(state: PartitionState) -> tuple[int, ...]:
    """Return the replicas after the running reassignment; all replicas if none is running."""
    return tuple([replica for replica in state.replicas if replica not in state.removing_replicas])


# --- completion ---------------------------------------------------------------------------------------------------


def is_complete(state: PartitionState, can_lead: CanLead) -> bool:
    """Return whether a running reassignment may complete now: the ISR contains the target, `last_known_elr` is empty,
    and the leader stays or can be replaced."""
    if not is_reassigning(state) or state.last_known_elr:
        return False
    target = target_replicas(state)
    if not set(target) <= set(state.isr):
        return False
    return state.leader in (NO_LEADER, *target) or any(can_lead(replica) for replica in target)


def with_completion(
    image: MetadataImage, key: PartitionKey, before: PartitionState, change: PartitionChangeRecord | None
) -> PartitionChangeRecord | None:
    """Return `change` (may be None), extended by the completion of the reassignment if it may complete after `change`;
    otherwise return `change` unchanged."""
    state = before if change is None else apply_change(before, change)
    if not is_complete(state, image.can_lead):
        return change
    base = change or PartitionChangeRecord(key[1], key[0])
    return _finish(image, before, base, target_replicas(state), state.isr)


def _finish(
    image: MetadataImage,
    before: PartitionState,
    base: PartitionChangeRecord,
    replicas: Sequence[int],
    isr: Sequence[int],
) -> PartitionChangeRecord:
    """Return `base`, extended so that it ends the reassignment with these replicas, and with the members of `isr` among
    them as the ISR.

    Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) if the leader is dropped and none of the replicas can lead.
    """
    rest = tuple([member for member in isr if member in replicas])
    return base._replace(
        isr=rest if rest != tuple(before.isr) else None,
        leader=_next_leader(before, replicas, rest, image.can_lead),
        replicas=tuple(replicas) if tuple(replicas) != tuple(before.replicas) else None,
        removing_replicas=() if before.removing_replicas else None,
        adding_replicas=() if before.adding_replicas else None,
        directories=_directories(image, before, replicas),
    )


def _next_leader(before: PartitionState, replicas: Sequence[int], isr: Collection[int], can_lead: CanLead) -> int:
    """Return the value for the record's `leader`. An unchanged leader is named again if replicas are dropped, which
    starts a new leader epoch. Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) if the leader is dropped and no replica can
    lead."""
    if before.leader in replicas:
        return NO_LEADER_CHANGE if set(before.replicas) <= set(replicas) else before.leader
    leader = first_eligible(can_lead, [replica for replica in replicas if replica in isr])
    if before.leader == NO_LEADER:
        return NO_LEADER_CHANGE if leader == NO_LEADER else leader
    if leader == NO_LEADER:
        text = f"none of the replicas {list(replicas)} can replace leader {before.leader}"
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
    return leader


def _directories(image: MetadataImage, state: PartitionState, replicas: Sequence[int]) -> tuple[bytes, ...] | None:
    """Return the log directories of the replicas, or None if they are unchanged."""
    held = dict(zip(state.replicas, state.directories, strict=False))
    found = [held.get(replica) or new_directory(image.brokers.get(replica)) for replica in replicas]
    return None if found == list(state.directories) else tuple(found)


# --- AlterPartitionReassignments ----------------------------------------------------------------------------------


class _Partition(NamedTuple):
    """A partition of an AlterPartitionReassignments request. `name` describes it in error messages."""

    name: str
    key: PartitionKey
    state: PartitionState
    is_unclean: bool
    """Whether the topic allows unclean elections."""


def alter_partition_reassignments(
    controller: ControllerState, request: m.AlterPartitionReassignmentsRequest
) -> Decision[m.AlterPartitionReassignmentsResponse]:
    """Decide AlterPartitionReassignments: begin, change or cancel the reassignment of each partition independently.

    Error codes per partition: INVALID_REQUEST (named twice), UNKNOWN_TOPIC_OR_PARTITION, INVALID_REPLICA_ASSIGNMENT,
    NO_REASSIGNMENT_IN_PROGRESS, POLICY_VIOLATION (too many partitions in the request).
    """
    partitions_max = controller.config.max_partitions_per_request
    records: list[Record] = []
    topics = []
    seen: set[tuple[str, int]] = set()
    for topic in request.topics:
        partitions = []
        for requested in topic.partitions:
            code, message = ErrorCode.NONE, None
            where = (topic.name, requested.partition_index)
            try:
                if where in seen:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has {_name(*where)} more than once")
                seen.add(where)
                if len(records) >= partitions_max:
                    text = f"more than {partitions_max} partitions in one request; split it"
                    raise KafkaError(ErrorCode.POLICY_VIOLATION, text)
                record = _alter(controller, topic.name, requested)
                if record is not None:
                    records.append(record)
            except KafkaError as error:
                code, message = error.code, error_text(error.message)
            partitions.append(m.ReassignablePartitionResponse(requested.partition_index, code, message))
        topics.append(m.ReassignableTopicResponse(topic.name, tuple(partitions)))
    return Decision(records, m.AlterPartitionReassignmentsResponse(responses=tuple(topics)))


def _name(topic: str, partition: int) -> str:
    return f"partition {partition} of topic {topic!r}"


def _alter(
    controller: ControllerState, topic_name: str, requested: m.ReassignablePartition
) -> PartitionChangeRecord | None:
    key, state = find_partition(controller.image, topic_name, requested.partition_index)
    partition = _Partition(_name(topic_name, key[1]), key, state, controller.unclean_allowed(topic_name))
    if requested.replicas is None:
        return _cancel(controller.image, partition)
    check_replicas(controller.image, requested.replicas)
    return _begin(controller.image, partition, tuple(requested.replicas))


def _begin(image: MetadataImage, partition: _Partition, target: tuple[int, ...]) -> PartitionChangeRecord | None:
    key, state = partition.key, partition.state
    original = original_replicas(state)
    removing = tuple(sorted(replica for replica in original if replica not in target))
    adding = tuple(sorted(replica for replica in target if replica not in original))
    replicas = (*target, *removing)
    base = PartitionChangeRecord(key[1], key[0])
    dropped = [replica for replica in state.replicas if replica not in replicas]
    isr: Sequence[int] = state.isr
    if dropped:
        base, isr = _drop_replicas(image, partition, base, dropped)
    record = _finish(image, state, base, replicas, isr)._replace(
        removing_replicas=removing if removing != tuple(state.removing_replicas) else None,
        adding_replicas=adding if adding != tuple(state.adding_replicas) else None,
    )
    after = apply_change(state, record)
    if is_complete(after, image.can_lead):
        return _finish(image, state, base, target, after.isr)
    return None if record == PartitionChangeRecord(key[1], key[0]) else record


def _cancel(image: MetadataImage, partition: _Partition) -> PartitionChangeRecord:
    key, state = partition.key, partition.state
    if not is_reassigning(state):
        raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{partition.name} is not being reassigned")
    base, isr = _drop_replicas(image, partition, PartitionChangeRecord(key[1], key[0]), state.adding_replicas)
    return _finish(image, state, base, original_replicas(state), isr)


def _drop_replicas(
    image: MetadataImage, partition: _Partition, base: PartitionChangeRecord, dropped: Collection[int]
) -> tuple[PartitionChangeRecord, Sequence[int]]:
    """Return (`base`, ISR) without the replicas that are dropped before replacements are in sync.

    Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) if that may lose committed records and the topic forbids unclean
    elections.
    """
    state = partition.state
    isr = tuple([member for member in state.isr if member not in dropped])
    needed = [replica for replica in state.last_isr if replica in dropped]
    if not needed:
        return base, isr
    remembered = tuple([replica for replica in state.last_known_elr if replica not in dropped])
    base = base._replace(last_known_elr=remembered if remembered != tuple(state.last_known_elr) else None)
    if isr and not state.last_known_elr:
        return base, isr
    if not partition.is_unclean:
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"dropping {needed} may lose committed records of {partition.name}: "
            + ("no other replica is in sync" if not isr else "its leader has not proved itself alive yet; retry later"),
        )
    if isr:
        return base, isr
    rest = [replica for replica in state.replicas if replica not in dropped]
    leader = first_eligible(image.can_lead, rest)
    if leader == NO_LEADER:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"none of the replicas {rest} can lead")
    return base._replace(leader_recovery_state=RECOVERING, last_known_elr=() if state.last_known_elr else None), (
        leader,
    )


# --- ListPartitionReassignments -----------------------------------------------------------------------------------


def list_partition_reassignments(
    controller: ControllerState, request: m.ListPartitionReassignmentsRequest
) -> Decision[m.ListPartitionReassignmentsResponse]:
    """Return the running reassignments: all of them, or those of the requested partitions. Requested partitions that
    are unknown or not being reassigned are omitted without an error."""
    image = controller.image
    wanted: dict[bytes, list[int]] = {}
    if request.topics is None:
        for topic_id, partition in image.reassigning:
            wanted.setdefault(topic_id, []).append(partition)
    else:
        for requested in request.topics:
            topic = image.topic_by_name(requested.name)
            if topic is not None:
                wanted.setdefault(topic.topic_id, []).extend(requested.partition_indexes)
    topics = []
    for topic_id, partitions in wanted.items():
        topic = image.topics[topic_id]
        ongoing = [
            m.OngoingPartitionReassignment(
                partition, tuple(state.replicas), tuple(state.adding_replicas), tuple(state.removing_replicas)
            )
            for partition in sorted(set(partitions))
            if (state := topic.partitions.get(partition)) is not None and is_reassigning(state)
        ]
        if ongoing:
            topics.append(m.OngoingTopicReassignment(topic.name, tuple(ongoing)))
    return Decision((), m.ListPartitionReassignmentsResponse(topics=tuple(sorted(topics))))
