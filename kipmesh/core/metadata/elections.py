"""Leader election and ISR membership of partitions (REP-03, REP-06, REP-07).

A broker that stopped uncleanly may have lost unsynced records, so it leaves every ISR when it registers again. After a
power cut, dead brokers look alive until they register or their sessions expire. Leadership may pass from one dead
broker to the next, and each step shrinks the ISR. The ISR alone therefore does not identify the last ISR that had a
live leader. A replica that the controller removes from the ISR (not its leader by AlterPartition) stays in
`last_known_elr` until a leader proves that it was alive later and so holds all committed records. The proof is a
heartbeat after the leader applied the record, or an AlterPartition with the current partition epoch. The last ISR is
the ISR plus `last_known_elr`.

- A clean member of the ISR (no unclean stop since it joined) may lead immediately, even as the last member.
- With an empty ISR, all members of the last ISR report their log ends. The replica with the highest (last epoch, log
  end) leads. The election waits for absent members.
- `unclean.leader.election.enable` elects the highest log among the available replicas, whatever the ISR was.

All functions are pure. They return the record that makes the change, or None for no change. ElectLeaders and the
automatic return to the preferred leader (the first replica) follow these rules:

| type      | partition                                        | result                                           |
| --------- | ------------------------------------------------ | ------------------------------------------------ |
| any       | does not exist                                   | UNKNOWN_TOPIC_OR_PARTITION                       |
| PREFERRED | its first replica leads                          | ELECTION_NOT_NEEDED                              |
| PREFERRED | its first replica can lead and is in the ISR     | the first replica leads                          |
| PREFERRED | its first replica is unavailable, behind or lost | PREFERRED_LEADER_NOT_AVAILABLE                   |
| UNCLEAN   | has a leader                                     | ELECTION_NOT_NEEDED                              |
| UNCLEAN   | no leader, and no replica can lead               | ELIGIBLE_LEADERS_NOT_AVAILABLE                   |
| UNCLEAN   | no leader, all available log ends are known      | the replica with the highest log end leads       |
| UNCLEAN   | no leader, some log ends are unknown             | ELIGIBLE_LEADERS_NOT_AVAILABLE; brokers report   |

The errors are Kafka's. Kafka elects the first live replica in an unclean election; kipmesh elects the replica that
loses least. Heartbeats report the log ends first, so the caller repeats the request.

A preferred election moves leadership within the ISR, so no acknowledged record is lost. The new leader truncates
records that the old leader had appended but not replicated; a producer with acks=all receives NOT_LEADER_OR_FOLLOWER
for them and retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import CanLead, ControllerState, Decision, error_text, find_partition
from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import PartitionKey, PartitionState, in_replica_order, is_lost
from kipmesh.messages import ElectionType

RECOVERED = 0
RECOVERING = 1

TopicPartition = tuple[str, int]
"""(topic name, partition)."""

ElectUnclean = Callable[[Sequence[PartitionKey]], list[Record]]
"""Elects leaders from the known log ends and requests the missing ones: `BrokerLifecycle.elect_unclean`."""


class LogEnd(NamedTuple):
    """End of a replica's log, ordered by (last epoch, offset). Of a partition's replicas, the one with the highest
    value has the most committed records."""

    last_epoch: int
    """Leader epoch of the last batch, or -1 for an empty log."""
    log_end_offset: int


def first_eligible(can_lead: CanLead, candidates: Iterable[int]) -> int:
    """Return the first candidate that can lead, or NO_LEADER (-1) if none can."""
    return next(filter(can_lead, candidates), NO_LEADER)


def leave_isr(
    key: PartitionKey, state: PartitionState, broker_id: int, can_lead: CanLead, *, unclean: bool
) -> PartitionChangeRecord | None:
    """Return the change that removes `broker_id` from leadership and ISR, or None if nothing changes. `can_lead` must
    exclude it.

    The first ISR member in replica order that can lead becomes the leader, even if the partition had none. The last
    member stays in the ISR without leading, unless `unclean`: its broker stopped uncleanly or lost the log.
    """
    isr: Sequence[int] = state.isr
    remembered: Sequence[int] = state.last_known_elr
    if broker_id in isr and (unclean or len(isr) > 1):
        isr = [member for member in isr if member != broker_id]
        remembered = in_replica_order(state.replicas, {*remembered, broker_id})
    leader = state.leader
    if leader in (broker_id, NO_LEADER):
        leader = first_eligible(can_lead, in_replica_order(state.replicas, isr))
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
    """Return the change that elects an ISR member for a leaderless partition. None if the partition has a leader or no
    ISR member can lead."""
    if state.leader != NO_LEADER:
        return None
    leader = first_eligible(can_lead, in_replica_order(state.replicas, state.isr))
    return None if leader == NO_LEADER else PartitionChangeRecord(key[1], key[0], leader=leader)


def wants_log_end(state: PartitionState, broker_id: int, *, unclean_allowed: bool) -> bool:
    """Return whether the partition has no leader and needs the log end of this broker's replica to elect one."""
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
    """Return the change that elects the replica with the highest log end. None if log ends are missing, the highest
    replica cannot lead or the partition has a leader.

    With an empty ISR, all members of the last ISR must have reported. With `unclean_allowed`, the available replicas
    suffice, whatever the ISR is. Call `elect_clean` first. `log_ends` maps broker id to log end.
    """
    if state.leader != NO_LEADER:
        return None
    members = state.last_isr
    # A lost replica may have reported its log end before its log directory failed.
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
    """Return the log end, or LogEnd(-1, -1) if its epoch is newer than the partition's, because the header of the last
    batch is then corrupt."""
    return end if end.last_epoch <= leader_epoch else LogEnd(-1, -1)


def _greatest(members: Sequence[int], log_ends: Mapping[int, LogEnd], can_lead: CanLead) -> int:
    """Return the first member that has the highest log end and can lead, or NO_LEADER."""
    greatest = max(log_ends[member] for member in members)
    return first_eligible(can_lead, [member for member in members if log_ends[member] == greatest])


def clear_last_known_elr(key: PartitionKey) -> PartitionChangeRecord:
    """Return the record that clears the partition's `last_known_elr` after its leader proved itself alive."""
    return PartitionChangeRecord(key[1], key[0], last_known_elr=())


# --- ElectLeaders and the preferred leader


class ElectionResult(NamedTuple):
    """Result of one partition's election in an ElectLeaders request. `message` is None without an error."""

    topic: str
    partition: int
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None
    is_pending: bool = False
    """Whether a leader may be elected once brokers have reported their log ends."""


def elect_leaders(
    controller: ControllerState,
    election_type: ElectionType,
    partitions: Iterable[TopicPartition],
    elect_unclean: ElectUnclean,
) -> Decision[list[ElectionResult]]:
    """Decide ElectLeaders: one result per distinct partition, with the error codes of the module's table. Errors do not
    affect other partitions."""
    image = controller.image
    results: dict[TopicPartition, ElectionResult] = {}
    records: list[Record] = []
    pending: dict[PartitionKey, TopicPartition] = {}
    for each in dict.fromkeys(partitions):
        results[each] = ElectionResult(*each)
        try:
            key, state = find_partition(image, *each)
            if election_type is ElectionType.PREFERRED:
                _check_preferred(controller, state)
                records.append(PartitionChangeRecord(key[1], key[0], leader=state.replicas[0]))
            else:
                _check_leaderless(controller, state)
                pending[key] = each
        except KafkaError as error:
            results[each] = ElectionResult(*each, error.code, error_text(error.message))
    if pending:
        records = elect_unclean(list(pending))
    elected = {(record.topic_id, record.partition_id) for record in records}
    text = "log ends of the replicas are not known yet; repeat the request"
    for key in pending.keys() - elected:
        each = pending[key]
        results[each] = ElectionResult(*each, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, text, is_pending=True)
    return Decision(records, list(results.values()))


def _check_preferred(controller: ControllerState, state: PartitionState) -> None:
    """Raise KafkaError: ELECTION_NOT_NEEDED if the preferred leader leads, PREFERRED_LEADER_NOT_AVAILABLE if it cannot
    lead."""
    image, preferred = controller.image, state.replicas[0]
    if state.leader == preferred:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, f"the preferred leader, broker {preferred}, already leads")
    if preferred in state.isr and image.can_lead(preferred):
        return
    reason = "is fenced or shutting down"
    if image.can_lead(preferred):
        reason = "has lost this replica: its log directory failed" if is_lost(state, preferred) else "is not in the ISR"
    text = f"the preferred leader, broker {preferred}, {reason}"
    raise KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, text)


def _check_leaderless(controller: ControllerState, state: PartitionState) -> None:
    """Raise KafkaError: ELECTION_NOT_NEEDED if the partition has a leader, ELIGIBLE_LEADERS_NOT_AVAILABLE if all its
    replicas are fenced or shutting down."""
    if state.leader != NO_LEADER:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, f"broker {state.leader} already leads")
    if not any(map(controller.image.can_lead, state.replicas)):
        text = f"none of the replicas {list(state.replicas)} can lead"
        raise KafkaError(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, text)


def elect_preferred(controller: ControllerState, keys: Iterable[PartitionKey], count_max: int) -> Decision[int]:
    """Elect the preferred leaders of up to `count_max` of these partitions. Skips partitions that their preferred
    leader already leads or cannot lead. The response is the number of leaders elected."""
    image = controller.image
    records: list[Record] = []
    for key in keys:
        state = image.partition(*key)
        if state is None or state.replicas[0] == state.leader:
            continue
        if state.replicas[0] in state.isr and image.can_lead(state.replicas[0]):
            records.append(PartitionChangeRecord(key[1], key[0], leader=state.replicas[0]))
            if len(records) == count_max:
                break
    return Decision(records, len(records))


def preferred_candidates(controller: ControllerState) -> Decision[list[PartitionKey]]:
    """Return the keys of partitions whose preferred leader does not lead although its broker is available. The
    preferred leader may be outside the ISR."""
    image = controller.image
    return Decision((), [key for leader, keys in image.imbalanced.items() if image.can_lead(leader) for key in keys])


def partitions_to_elect(controller: ControllerState, election_type: ElectionType) -> Decision[list[TopicPartition]]:
    """Return the partitions for an ElectLeaders request that names none: all without a leader (UNCLEAN), or all that
    their preferred leader does not lead (PREFERRED)."""
    image = controller.image
    groups = [image.leaderless] if election_type is ElectionType.UNCLEAN else image.imbalanced.values()
    return Decision((), [(image.topics[topic_id].name, partition) for keys in groups for topic_id, partition in keys])
