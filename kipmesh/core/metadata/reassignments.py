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

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.brokers import UncleanAllowed
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.elections import RECOVERING, CanLead
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState, changed
from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord, Record
from kipmesh.core.metadata.request_limits import refusal
from kipmesh.messages.records.metadata import ZERO_UUID

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


def can_lead_in(image: MetadataImage) -> CanLead:
    """Who may be elected as things are."""

    def decide(candidate: int) -> bool:
        broker = image.brokers.get(candidate)
        return broker is not None and broker.can_lead

    return decide


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
    can_lead = can_lead_in(image)
    if not is_complete(state, can_lead):
        return change
    base = change or PartitionChangeRecord(key[1], key[0])
    return _dropping(image, before, base, target_replicas(state), state.isr, can_lead)


def complete(image: MetadataImage, keys: Iterable[PartitionKey]) -> list[PartitionChangeRecord]:
    """End the reassignments of these partitions where that may be."""
    records = []
    for key in keys:
        state = image.partition(*key)
        if state is not None:
            record = completed(image, key, state, None)
            if record is not None:
                records.append(record)
    return records


def _dropping(
    image: MetadataImage,
    before: PartitionState,
    base: PartitionChangeRecord,
    replicas: Sequence[int],
    isr: Sequence[int],
    can_lead: CanLead,
) -> PartitionChangeRecord:
    """`base`, and nothing is being moved any more: these are the replicas, with what is left of the ISR.

    Raises KafkaError(INVALID_REPLICA_ASSIGNMENT) when nobody of them could lead instead of a leader that is dropped.
    """
    rest = tuple([member for member in isr if member in replicas])
    return base._replace(
        isr=rest if rest != tuple(before.isr) else None,
        leader=_leader_of(before, replicas, rest, can_lead),
        replicas=tuple(replicas) if tuple(replicas) != tuple(before.replicas) else None,
        removing_replicas=() if before.removing_replicas else None,
        adding_replicas=() if before.adding_replicas else None,
        directories=_directories(image, before, replicas),
    )


def _leader_of(before: PartitionState, replicas: Sequence[int], isr: Collection[int], can_lead: CanLead) -> int:
    """What the record says of the leader; the same one is named for a new leader epoch when replicas are dropped."""
    if before.leader in replicas:
        return NO_LEADER_CHANGE if set(before.replicas) <= set(replicas) else before.leader
    leader = next((replica for replica in replicas if replica in isr and can_lead(replica)), NO_LEADER)
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
    found = []
    for replica in replicas:
        if replica not in held:
            broker = image.brokers.get(replica)
            log_dirs = broker.log_dirs if broker is not None else ()
            held[replica] = log_dirs[0] if len(log_dirs) == 1 else ZERO_UUID
        found.append(held[replica])
    return None if tuple(found) == tuple(state.directories) else tuple(found)


# --- AlterPartitionReassignments ----------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """A partition that a request names."""

    topic: str
    key: PartitionKey
    state: PartitionState


def alter_reassignments(
    image: MetadataImage,
    request: m.AlterPartitionReassignmentsRequest,
    unclean_allowed: UncleanAllowed,
    *,
    partitions_max: int,
) -> Decision[m.AlterPartitionReassignmentsResponse]:
    """Begin, change and cancel reassignments, each partition by itself; at most `partitions_max` in one request."""
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
                record = _alter(image, topic.name, asked, unclean_allowed)
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
    image: MetadataImage, topic_name: str, asked: m.ReassignablePartition, unclean_allowed: UncleanAllowed
) -> PartitionChangeRecord | None:
    topic = image.topic_by_name(topic_name)
    state = None if topic is None else topic.partitions.get(asked.partition_index)
    if topic is None or state is None:
        raise KafkaError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {_name(topic_name, asked.partition_index)}"
        )
    partition = _Asked(topic_name, (topic.topic_id, asked.partition_index), state)
    is_unclean = unclean_allowed(topic_name)
    if asked.replicas is None:
        return _cancel(image, partition, is_unclean=is_unclean)
    _check_target(image, asked.replicas)
    return _begin(image, partition, tuple(asked.replicas), is_unclean=is_unclean)


def _check_target(image: MetadataImage, target: Sequence[int]) -> None:
    """Kafka's rules: not empty, each broker once and registered. Fenced ones may be named: they may come back."""
    if not target:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "a partition has at least one replica")
    if len(set(target)) != len(target):
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{list(target)} has a broker twice")
    unknown = next((broker for broker in target if broker not in image.brokers), None)
    if unknown is not None:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {unknown} is not registered")


def _begin(
    image: MetadataImage, partition: _Asked, target: tuple[int, ...], *, is_unclean: bool
) -> PartitionChangeRecord | None:
    key, state, can_lead = partition.key, partition.state, can_lead_in(image)
    original = original_replicas(state)
    removing = tuple(sorted(replica for replica in original if replica not in target))
    adding = tuple(sorted(replica for replica in target if replica not in original))
    replicas = (*target, *removing)
    base = PartitionChangeRecord(key[1], key[0])
    dropped = [replica for replica in state.replicas if replica not in replicas]
    isr: Sequence[int] = state.isr
    if dropped:
        base, isr = _without(partition, base, dropped, can_lead, is_unclean=is_unclean)
    record = _dropping(image, state, base, replicas, isr, can_lead)._replace(
        removing_replicas=removing if removing != tuple(state.removing_replicas) else None,
        adding_replicas=adding if adding != tuple(state.adding_replicas) else None,
    )
    after = changed(state, record)
    if is_complete(after, can_lead):
        return _dropping(image, state, base, target, after.isr, can_lead)
    return None if record == PartitionChangeRecord(key[1], key[0]) else record


def _cancel(image: MetadataImage, partition: _Asked, *, is_unclean: bool) -> PartitionChangeRecord:
    key, state, can_lead = partition.key, partition.state, can_lead_in(image)
    if not is_reassigning(state):
        raise KafkaError(
            ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, f"{_name(partition.topic, key[1])} is not being reassigned"
        )
    base = PartitionChangeRecord(key[1], key[0])
    base, isr = _without(partition, base, state.adding_replicas, can_lead, is_unclean=is_unclean)
    return _dropping(image, state, base, original_replicas(state), isr, can_lead)


def _without(
    partition: _Asked,
    base: PartitionChangeRecord,
    dropped: Collection[int],
    can_lead: CanLead,
    *,
    is_unclean: bool,
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
    if not is_unclean:
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"without {needed}, {_name(partition.topic, partition.key[1])} might lose what was committed: "
            + ("no other replica is in sync" if not isr else "its leader has not shown yet that it is alive"),
        )
    if isr:
        return base, isr
    rest = [replica for replica in state.replicas if replica not in dropped]
    leader = next((replica for replica in rest if can_lead(replica)), NO_LEADER)
    if leader == NO_LEADER:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"none of {rest} can lead")
    return base._replace(leader_recovery_state=RECOVERING, last_known_elr=() if state.last_known_elr else None), (
        leader,
    )


# --- ListPartitionReassignments -----------------------------------------------------------------------------------


def list_reassignments(
    image: MetadataImage, request: m.ListPartitionReassignmentsRequest
) -> m.ListPartitionReassignmentsResponse:
    """The reassignments that are running: all of them, or those of the partitions that the request names."""
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
        ongoing = _ongoing(image.topics[topic_id].partitions, sorted(set(partitions)))
        if ongoing:
            topics.append(m.OngoingTopicReassignment(image.topics[topic_id].name, ongoing))
    return m.ListPartitionReassignmentsResponse(topics=tuple(sorted(topics)))


def _ongoing(
    states: Mapping[int, PartitionState], partitions: Iterable[int]
) -> tuple[m.OngoingPartitionReassignment, ...]:
    return tuple(
        [
            m.OngoingPartitionReassignment(
                partition, tuple(state.replicas), tuple(state.adding_replicas), tuple(state.removing_replicas)
            )
            for partition in partitions
            if (state := states.get(partition)) is not None and is_reassigning(state)
        ]
    )
