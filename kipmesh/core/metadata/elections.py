"""Who leaves an ISR, who leads next, and who may lead when no clean member is left ("Log truth" of the rules).

A broker that stopped uncleanly may have lost what it had not synced, so it leaves every ISR when it registers again.
After a power cut brokers that are already dead look alive until they register or their sessions end, one after the
other; each step hands the leadership to one that is dead as well, and shrinks the ISR. So the ISR alone does not say
which ISR last had a leader. Therefore whoever leaves an ISR by the controller's hand (not by its leader's own
AlterPartition) is remembered in `last_known_elr` of the partition, until a leader proves that it was alive after that
and therefore holds all that was committed before it: by a heartbeat that says that the leader has applied the record
(`proven`), or by an AlterPartition that names the current partition epoch. ISR and `last_known_elr` together are the
last ISR that had a leader.

- A clean member of the ISR (it never stopped uncleanly since it joined) may lead at once, even as the last one.
- When the ISR is empty, every member of the last ISR says where its log ends, and the greatest (last epoch, log end)
  leads. Who stays away is waited for.
- `unclean.leader.election.enable` lets the greatest of the replicas that are here lead, whatever the ISR was.

Each function is pure and returns the record that makes the change, or None for no change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord
from kipmesh.core.metadata.states import PartitionKey, PartitionState, is_lost

RECOVERED = 0
RECOVERING = 1

CanLead = Callable[[int], bool]
"""Whether a broker is registered, unfenced and not shutting down."""


class LogEnd(NamedTuple):
    """Where a replica's log ends; the greatest one has the most of what was committed."""

    last_epoch: int
    """The epoch of the last batch, -1 for an empty log."""
    log_end_offset: int


def _in_replica_order(state: PartitionState, members: Collection[int]) -> tuple[int, ...]:
    return tuple([replica for replica in state.replicas if replica in members])


def _first(candidates: Sequence[int], can_lead: CanLead) -> int:
    return next((candidate for candidate in candidates if can_lead(candidate)), NO_LEADER)


def leave_isr(
    key: PartitionKey, state: PartitionState, broker_id: int, can_lead: CanLead, *, unclean: bool
) -> PartitionChangeRecord | None:
    """`broker_id`, which cannot lead any more, gives up leadership and ISR membership.

    The last member stays in the ISR, without leading; only an unclean stop ends its membership too.
    """
    isr: Sequence[int] = state.isr
    remembered: Sequence[int] = state.last_known_elr
    if broker_id in isr and (unclean or len(isr) > 1):
        isr = [member for member in isr if member != broker_id]
        remembered = _in_replica_order(state, {*remembered, broker_id})
    leader = state.leader
    if leader in (broker_id, NO_LEADER):
        leader = _first(_in_replica_order(state, isr), can_lead)
    if leader == state.leader and len(isr) == len(state.isr):
        return None
    return PartitionChangeRecord(
        key[1],
        key[0],
        isr=isr if len(isr) != len(state.isr) else None,
        leader=leader if leader != state.leader else NO_LEADER_CHANGE,
        last_known_elr=remembered if remembered != state.last_known_elr else None,
    )


def elect_clean(key: PartitionKey, state: PartitionState, can_lead: CanLead) -> PartitionChangeRecord | None:
    """A clean member of the ISR leads a partition that had no leader."""
    if state.leader != NO_LEADER:
        return None
    leader = _first(_in_replica_order(state, state.isr), can_lead)
    return None if leader == NO_LEADER else PartitionChangeRecord(key[1], key[0], leader=leader)


def wants_log_end(state: PartitionState, broker_id: int, *, unclean_allowed: bool) -> bool:
    """Whether an election waits for where this broker's log ends."""
    if state.leader != NO_LEADER or is_lost(state, broker_id):
        return False
    return (not state.isr and broker_id in state.last_isr) or (unclean_allowed and broker_id in state.replicas)


def elect_by_log_end(
    key: PartitionKey,
    state: PartitionState,
    log_ends: Mapping[int, LogEnd],
    can_lead: CanLead,
    *,
    unclean_allowed: bool,
) -> PartitionChangeRecord | None:
    """The greatest log leads a partition that has neither a leader nor a clean member of its ISR that is here."""
    if state.leader != NO_LEADER:
        return None
    members = state.last_isr
    # What a lost replica told before its folder failed is nowhere any more.
    log_ends = {
        replica: _plausible(end, state.leader_epoch) for replica, end in log_ends.items() if not is_lost(state, replica)
    }
    if not state.isr and all(member in log_ends for member in members):
        leader = _greatest(members, log_ends, can_lead)
        if leader != NO_LEADER:
            others = tuple([member for member in members if member != leader])
            return PartitionChangeRecord(key[1], key[0], isr=(leader,), leader=leader, last_known_elr=others)
    if unclean_allowed:
        present = [replica for replica in state.replicas if can_lead(replica) and not is_lost(state, replica)]
        if present and all(replica in log_ends for replica in present):
            leader = _greatest(present, log_ends, can_lead)
            return PartitionChangeRecord(
                key[1],
                key[0],
                isr=(leader,),
                leader=leader,
                leader_recovery_state=RECOVERING,
                last_known_elr=() if state.last_known_elr else None,
            )
    return None


def _plausible(end: LogEnd, leader_epoch: int) -> LogEnd:
    """No log has records of an epoch that never was: such a batch is damaged where no CRC is, and its log the least."""
    return end if end.last_epoch <= leader_epoch else LogEnd(-1, -1)


def _greatest(members: Sequence[int], log_ends: Mapping[int, LogEnd], can_lead: CanLead) -> int:
    """The first, in replica order, of the members that have the greatest log end and can lead; -1 if none can."""
    greatest = max(log_ends[member] for member in members)
    return _first([member for member in members if log_ends[member] == greatest], can_lead)


def proven(key: PartitionKey) -> PartitionChangeRecord:
    """The leader was alive after the last change: only its ISR counts from now on."""
    return PartitionChangeRecord(key[1], key[0], last_known_elr=())
