"""AlterPartitionReassignments and ListPartitionReassignments (KIP-455): replicas move to other brokers.

| step     | replicas                            | adding            | removing          | ISR                       |
| -------- | ----------------------------------- | ----------------- | ----------------- | ------------------------- |
| begins   | target, then the others of original | target - original | original - target | as it was                 |
| runs     |                                     |                   |                   | adding replicas join it   |
| complete | target                              | none              | none              | without those that leave  |
| cancel   | original                            | none              | none              | without those being added |

The original replicas are those that are not being added, so a second target for a partition begins at the same
original as the first did, and what only the first wanted is dropped at once.

A reassignment is complete when the ISR has all of the target. The leader's own AlterPartition makes it so, and in that
very decision; a leader that leaves hands over to the first of the target that can lead. Each record that drops a
replica starts a new leader epoch, so that the dropped one's fetches are refused.

What must hold ("Log truth"): a replica is dropped only while the rest of the ISR surely has all that was committed.
That is not so while `last_known_elr` is not empty: the leader may be dead, and the one to be dropped may be who has
the most (see `elections`). Then completion waits until a leader has proved itself, and dropping a replica that may be
needed is refused, unless the topic allows unclean elections.

Each function is pure. Invariants: `adding` and `removing` are parts of `replicas` and have nothing in common;
without a running reassignment both are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import CanLead, ControllerState, Decision, check_replicas, find_partition, refusal
from kipmesh.core.metadata.elections import RECOVERING, first_that
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState, changed
from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import new_directory

COMPLETIONS_MAX = 1000
"""Most reassignments that one decision completes beside AlterPartition."""


def is_reassigning(state: PartitionState) -> bool:
    """Whether a reassignment of the partition is running."""
    return bool(state.adding_replicas or state.removing_replicas)


def original_replicas(state: PartitionState) -> tuple[int, ...]:
    """The replicas that were there before the reassignment that is running, if one is."""
    return tuple([replica for replica in state.replicas if replica not in state.adding_replicas])


def target_replicas(state: PartitionState) -> tuple[int, ...]:
    """The replicas that will be there when the reassignment that is running is complete."""
    return tuple([replica for replica in state.replicas if replica not in state.removing_replicas])


# --- completion ---------------------------------------------------------------------------------------------------


def is_complete(state: PartitionState, can_lead: CanLead) -> bool:
    """Whether a reassignment is running that may end now."""
    if not is_reassigning(state) or state.last_known_elr:
        return False
    target = target_replicas(state)
    if not set(target) <= set(state.isr):
        return False
    return state.leader in (NO_LEADER, *target) or any(can_lead(replica) for replica in target)


def completed(
    image: MetadataImage, key: PartitionKey, before: PartitionState, change: PartitionChangeRecord | None
) -> PartitionChangeRecord | None:
    """`change` of the partition, together with the end of its reassignment where that makes it complete."""
    state = before if change is None else changed(before, change)
    if not is_complete(state, image.can_lead):
        return change
    base = change or PartitionChangeRecord(key[1], key[0])
    return _dropping(image, before, base, target_replicas(state), state.isr)


def _dropping(
    image: MetadataImage,
    before: PartitionState,
    base: PartitionChangeRecord,
    replicas: Sequence[int],
    isr: Sequence[int],
) -> PartitionChangeRecord:
    """`base`, and nothing is being moved any more: these are the replicas, with what is left of the ISR.

    Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) when nobody of them could lead instead of a leader that is dropped.
    """
    rest = tuple([member for member in isr if member in replicas])
    return base._replace(
        isr=rest if rest != tuple(before.isr) else None,
        leader=_leader_of(before, replicas, rest, image.can_lead),
        replicas=tuple(replicas) if tuple(replicas) != tuple(before.replicas) else None,
        removing_replicas=() if before.removing_replicas else None,
        adding_replicas=() if before.adding_replicas else None,
        directories=_directories(image, before, replicas),
    )


def _leader_of(before: PartitionState, replicas: Sequence[int], isr: Collection[int], can_lead: CanLead) -> int:
    """What the record says of the leader; the same one is named for a new leader epoch when replicas are dropped."""
    if before.leader in replicas:
        return NO_LEADER_CHANGE if set(before.replicas) <= set(replicas) else before.leader
    leader = first_that(can_lead, [replica for replica in replicas if replica in isr])
    if before.leader == NO_LEADER:
        return NO_LEADER_CHANGE if leader == NO_LEADER else leader
    if leader == NO_LEADER:
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"none of {list(replicas)} can lead instead of {before.leader}"
        )
    return leader


def _directories(image: MetadataImage, state: PartitionState, replicas: Sequence[int]) -> tuple[bytes, ...] | None:
    """The log folders of the replicas, where they are other than those of the state; None for the same."""
    held = dict(zip(state.replicas, state.directories, strict=False))
    found = [held.get(replica) or new_directory(image.brokers.get(replica)) for replica in replicas]
    return None if found == list(state.directories) else tuple(found)


# --- AlterPartitionReassignments ----------------------------------------------------------------------------------


class _Partition(NamedTuple):
    """A partition that a request names."""

    name: str
    key: PartitionKey
    state: PartitionState
    is_unclean: bool
    """Whether its topic allows unclean elections."""


def alter_partition_reassignments(
    controller: ControllerState, request: m.AlterPartitionReassignmentsRequest
) -> Decision[m.AlterPartitionReassignmentsResponse]:
    """AlterPartitionReassignments: begin, change and cancel reassignments, each partition by itself."""
    partitions_max = controller.config.max_partitions_per_request
    records: list[Record] = []
    topics = []
    seen: set[tuple[str, int]] = set()
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            code, message = ErrorCode.NONE, None
            where = (topic.name, asked.partition_index)
            try:
                if where in seen:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has {_name(*where)} more than once")
                seen.add(where)
                if len(records) >= partitions_max:
                    raise KafkaError(ErrorCode.POLICY_VIOLATION, f"more than {partitions_max} partitions at once")
                record = _alter(controller, topic.name, asked)
                if record is not None:
                    records.append(record)
            except KafkaError as error:
                code, message = error.code, refusal(error.message)
            partitions.append(m.ReassignablePartitionResponse(asked.partition_index, code, message))
        topics.append(m.ReassignableTopicResponse(topic.name, tuple(partitions)))
    return Decision(records, m.AlterPartitionReassignmentsResponse(responses=tuple(topics)))


def _name(topic: str, partition: int) -> str:
    return f"partition {partition} of topic {topic!r}"


def _alter(
    controller: ControllerState, topic_name: str, asked: m.ReassignablePartition
) -> PartitionChangeRecord | None:
    key, state = find_partition(controller.image, topic_name, asked.partition_index)
    partition = _Partition(_name(topic_name, key[1]), key, state, controller.unclean_allowed(topic_name))
    if asked.replicas is None:
        return _cancel(controller.image, partition)
    check_replicas(controller.image, asked.replicas)
    return _begin(controller.image, partition, tuple(asked.replicas))


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
        base, isr = _without(image, partition, base, dropped)
    record = _dropping(image, state, base, replicas, isr)._replace(
        removing_replicas=removing if removing != tuple(state.removing_replicas) else None,
        adding_replicas=adding if adding != tuple(state.adding_replicas) else None,
    )
    after = changed(state, record)
    if is_complete(after, image.can_lead):
        return _dropping(image, state, base, target, after.isr)
    return None if record == PartitionChangeRecord(key[1], key[0]) else record


def _cancel(image: MetadataImage, partition: _Partition) -> PartitionChangeRecord:
    key, state = partition.key, partition.state
    if not is_reassigning(state):
        raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{partition.name} is not being reassigned")
    base, isr = _without(image, partition, PartitionChangeRecord(key[1], key[0]), state.adding_replicas)
    return _dropping(image, state, base, original_replicas(state), isr)


def _without(
    image: MetadataImage, partition: _Partition, base: PartitionChangeRecord, dropped: Collection[int]
) -> tuple[PartitionChangeRecord, Sequence[int]]:
    """The ISR without replicas that are dropped before anybody has taken their place, and what the record says of it.

    Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) where that may lose what was committed and that is not allowed.
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
            f"without {needed}, {partition.name} might lose what was committed: "
            + ("no other replica is in sync" if not isr else "its leader has not shown yet that it is alive"),
        )
    if isr:
        return base, isr
    rest = [replica for replica in state.replicas if replica not in dropped]
    leader = first_that(image.can_lead, rest)
    if leader == NO_LEADER:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"none of {rest} can lead")
    return base._replace(leader_recovery_state=RECOVERING, last_known_elr=() if state.last_known_elr else None), (
        leader,
    )


# --- ListPartitionReassignments -----------------------------------------------------------------------------------


def list_partition_reassignments(
    controller: ControllerState, request: m.ListPartitionReassignmentsRequest
) -> Decision[m.ListPartitionReassignmentsResponse]:
    """The reassignments that are running: all of them, or those of the partitions that the request names."""
    image = controller.image
    wanted: dict[bytes, list[int]] = {}
    if request.topics is None:
        for topic_id, partition in image.reassigning:
            wanted.setdefault(topic_id, []).append(partition)
    else:
        for asked in request.topics:
            topic = image.topic_by_name(asked.name)
            if topic is not None:
                wanted.setdefault(topic.topic_id, []).extend(asked.partition_indexes)
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
