"""What one record about a broker does to its partitions (630-16): the function that every state machine applies.

A BrokerRegistrationChangeRecord is an event. What follows from it is not written down for each partition, but computed
by whoever applies it, from the image and the record alone:

| level | the record says                  | then, of every partition of the broker                                 |
| ----- | -------------------------------- | ---------------------------------------------------------------------- |
| 0     | anything                         | nothing: records of their own follow or precede (logs of 0.1.0)        |
| 1     | fenced, or in controlled shutdown| it leaves the ISR (the last member stays) and leads no more            |
| 1     | `proven`                         | where it leads, `last_known_elr` is forgotten                          |

A partition that it led goes to the first of its replicas, in their order, that is in the ISR and can lead: registered,
not fenced, not shutting down, and not named in the record's `also_gone`. With none, the leader is -1. Whoever leaves is
remembered in `last_known_elr` (see `elections`). Each change is one more partition epoch, another leader also one more
leader epoch.

The level is that of the feature `kipmesh.fencing` in the log, and holds from the FeatureLevelRecord on. What a level
means never changes, or logs that were written under it would say something else: a change is a new level. A level that
is not known is refused with UNSUPPORTED_VERSION.

Invariant: pure. Equal partitions, brokers and records give equal partitions, in whichever order they are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.records import NO_LEADER, BrokerRegistrationChangeRecord, Record
from kipmesh.core.metadata.states import BrokerState, PartitionState

FENCING_FEATURE = "kipmesh.fencing"
FENCING_LEVEL = 1
"""The newest level that this version of kipmesh knows, and the one that it writes."""

ALSO_GONE_MAX = 1000
"""Most brokers that one record names. Those beyond may be elected for the moment until their own turn comes, which
costs an election and loses nothing."""


def check_level(name: str, level: int) -> None:
    """KafkaError(UNSUPPORTED_VERSION) for a level of `kipmesh.fencing` whose meaning is not known here."""
    if name == FENCING_FEATURE and not 0 <= level <= FENCING_LEVEL:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"the metadata has {FENCING_FEATURE} level {level}, this version of kipmesh knows 0 to {FENCING_LEVEL}",
        )


def is_departure(level: int, record: Record) -> bool:
    """Whether the broker leaves its partitions by this record."""
    return (
        level >= 1
        and isinstance(record, BrokerRegistrationChangeRecord)
        and (record.fenced > 0 or record.in_controlled_shutdown > 0)
    )


def is_proof(level: int, record: Record) -> bool:
    """Whether the broker proves by this record that it was alive after the last change of what it leads."""
    return level >= 1 and isinstance(record, BrokerRegistrationChangeRecord) and record.proven


def successors(brokers: Mapping[int, BrokerState], record: BrokerRegistrationChangeRecord) -> Collection[int]:
    """Who may be elected in the broker's place."""
    gone = {record.broker_id, *record.also_gone}
    return {
        broker_id
        for broker_id, broker in brokers.items()
        if not (broker.fenced or broker.in_controlled_shutdown or broker_id in gone)
    }


def departures(
    states: Iterable[PartitionState], broker_id: int, can_lead: Container[int]
) -> Iterator[PartitionState | None]:
    """Each of the partitions, which the broker has a replica of, without it; None where nothing changes.

    A broker has tens of thousands, and they are one step of an event loop: equal ISRs share one value, and a partition
    is made without the keywords and defaults of its type.
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
            remembered = _in_replica_order(replicas, {*remembered, broker_id}) if remembered else alone
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
    """The other members of the ISR; the last member stays."""
    return tuple([member for member in isr if member != broker_id]) if len(isr) > 1 else isr


def _in_replica_order(replicas: Sequence[int], members: Container[int]) -> tuple[int, ...]:
    return tuple([replica for replica in replicas if replica in members])


def proved(state: PartitionState) -> PartitionState:
    """The partition, whose leader was alive after its last change."""
    return state._replace(partition_epoch=state.partition_epoch + 1, last_known_elr=())
