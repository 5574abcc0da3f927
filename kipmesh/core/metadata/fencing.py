"""Effects of a BrokerRegistrationChangeRecord on the broker's partitions (630-16).

The record is an event. The changes of partitions are not written, but computed by every state machine from the image
and the record:

| level | record                              | effect on every partition of the broker                            |
| ----- | ----------------------------------- | ------------------------------------------------------------------ |
| 0     | any                                 | none; separate records change the partitions (logs of 0.1.0)       |
| 1     | fenced, or in controlled shutdown   | it leaves the ISR (the last member stays) and leadership           |
| 1     | `proven`                            | `last_known_elr` is cleared where the broker leads                 |

The next leader is the first replica that is in the ISR and can lead: registered, unfenced, not shutting down and not in
the record's `also_gone`; or -1. The removed replica is added to `last_known_elr` (see `elections`). Each change
increments the partition epoch, and a leader change also the leader epoch.

The level is that of the feature `kipmesh.fencing` and applies from its FeatureLevelRecord on. The effect of a level
never changes, because that would change old logs; a different effect is a new level. Unknown levels are refused with
UNSUPPORTED_VERSION.

Invariant: pure. Equal partitions, brokers and records give equal results.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.records import NO_LEADER, BrokerRegistrationChangeRecord, Record
from kipmesh.core.metadata.states import BrokerState, PartitionState, in_replica_order

FENCING_FEATURE = "kipmesh.fencing"
FENCING_LEVEL = 1
"""Newest level of `kipmesh.fencing` that this version of kipmesh knows and writes."""

ALSO_GONE_MAX = 1000
"""Maximum brokers named by one record. Further brokers may be elected until they are fenced themselves; that costs an
election and loses nothing."""


def check_level(name: str, level: int) -> None:
    """Raise KafkaError(UNSUPPORTED_VERSION) if feature `name` is `kipmesh.fencing` and its `level` is unknown. Other
    features are ignored."""
    if name == FENCING_FEATURE and not 0 <= level <= FENCING_LEVEL:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"the metadata has {FENCING_FEATURE} level {level}, this version of kipmesh knows 0 to {FENCING_LEVEL}; "
            "upgrade this node",
        )


def removes_broker(level: int, record: Record) -> bool:
    """Return whether the record removes its broker from ISRs and leaderships. `level` is the level of the feature
    `kipmesh.fencing`; False for level 0."""
    return (
        level >= 1
        and isinstance(record, BrokerRegistrationChangeRecord)
        and (record.fenced > 0 or record.in_controlled_shutdown > 0)
    )


def proves_liveness(level: int, record: Record) -> bool:
    """Return whether the record clears `last_known_elr` of all partitions that its broker leads; False for level 0.

    `level` is the level of the feature `kipmesh.fencing`. A record with `proven` shows that the broker has applied the
    metadata up to the last change of these partitions, so it was alive after that change and has all committed records.
    """
    return level >= 1 and isinstance(record, BrokerRegistrationChangeRecord) and record.proven


def successors(brokers: Mapping[int, BrokerState], record: BrokerRegistrationChangeRecord) -> Collection[int]:
    """Return the ids of brokers that may be elected in place of the record's broker: all that can lead, except that
    broker and those in `also_gone`."""
    gone = {record.broker_id, *record.also_gone}
    return {broker_id for broker_id, broker in brokers.items() if broker.can_lead and broker_id not in gone}


def without_broker(
    states: Iterable[PartitionState], broker_id: int, can_lead: Container[int]
) -> Iterator[PartitionState | None]:
    """Yield each partition's state after the broker was fenced: with the broker removed from the ISR (unless it is the
    last member) and from leadership, or None if nothing changes.

    Every state must have a replica on the broker. One step of the event loop may process tens of thousands of
    partitions, so equal ISRs share one value and `tuple.__new__` bypasses the slower constructor.
    """
    make, alone, gone = tuple.__new__, (broker_id,), (broker_id, NO_LEADER)
    rests: dict[Sequence[int], Sequence[int]] = {}
    for state in states:
        replicas, isr, leader, leader_epoch, epoch, recovery, remembered, elr, removing, adding, dirs = state
        rest = rests.get(isr)
        if rest is None:
            rest = rests[isr] = _without(isr, broker_id)
        leaves = rest is not isr and rest != isr
        if leaves:
            isr = rest
            remembered = in_replica_order(replicas, {*remembered, broker_id}) if remembered else alone
        if leader in gone:
            before, leader = leader, NO_LEADER
            for replica in replicas:
                if replica in isr and replica in can_lead:
                    leader = replica
                    break
            if leader != before:
                leader_epoch += 1
            elif not leaves:
                yield None
                continue
        elif not leaves:
            yield None
            continue
        yield make(
            PartitionState,
            (replicas, isr, leader, leader_epoch, epoch + 1, recovery, remembered, elr, removing, adding, dirs),
        )


def _without(isr: Sequence[int], broker_id: int) -> Sequence[int]:
    """Return the ISR without the broker, or the unchanged ISR if the broker is its last member."""
    return tuple([member for member in isr if member != broker_id]) if len(isr) > 1 else isr


def without_last_known_elr(state: PartitionState) -> PartitionState:
    """Return the partition with an empty `last_known_elr` and the next partition epoch, because its leader was alive
    after its last change."""
    return state._replace(partition_epoch=state.partition_epoch + 1, last_known_elr=())
