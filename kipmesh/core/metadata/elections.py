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

Each function is pure. The first ones return the record that makes the change, or None for no change. ElectLeaders and
the automatic return to the preferred leader (the first replica, the partition's leader service) follow:

| type      | the partition                                    | then                                             |
| --------- | ------------------------------------------------ | ------------------------------------------------ |
| any       | does not exist                                   | UNKNOWN_TOPIC_OR_PARTITION                       |
| PREFERRED | is led by its first replica                      | ELECTION_NOT_NEEDED                              |
| PREFERRED | that one can lead and is in the ISR              | it leads                                         |
| PREFERRED | that one is fenced, stops, is behind or lost     | PREFERRED_LEADER_NOT_AVAILABLE                   |
| UNCLEAN   | has a leader                                     | ELECTION_NOT_NEEDED                              |
| UNCLEAN   | has none, and no replica can lead                | ELIGIBLE_LEADERS_NOT_AVAILABLE                   |
| UNCLEAN   | has none, and all that can lead told their ends  | who has the most of the log leads                |
| UNCLEAN   | has none, and some did not                       | ELIGIBLE_LEADERS_NOT_AVAILABLE, and they are asked |

The errors are Kafka's. Kafka elects the first live replica in an unclean election. Here the replica that loses least is
elected. Heartbeats report the log ends first, so the caller repeats the request.

A preferred election changes nothing but the leader: the old and the new leader are in the ISR, so the new one has all
that was acknowledged. It truncates what the old one had appended and not replicated; a producer with acks=all receives
NOT_LEADER_OR_FOLLOWER for that and sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import CanLead, ControllerState, Decision, find_partition, refusal
from kipmesh.core.metadata.records import NO_LEADER, NO_LEADER_CHANGE, PartitionChangeRecord, Record
from kipmesh.core.metadata.states import PartitionKey, PartitionState, is_lost
from kipmesh.messages import ElectionType

RECOVERED = 0
RECOVERING = 1

TopicPartition = tuple[str, int]
"""Topic name and partition."""

ElectUnclean = Callable[[Sequence[PartitionKey]], list[Record]]
"""Elects whom the log ends told so far allow, and asks for the others': `BrokerLifecycle.elect_unclean`."""


class LogEnd(NamedTuple):
    """Where a replica's log ends; the greatest one has the most of what was committed."""

    last_epoch: int
    """The epoch of the last batch, -1 for an empty log."""
    log_end_offset: int


def _in_replica_order(state: PartitionState, members: Collection[int]) -> tuple[int, ...]:
    return tuple([replica for replica in state.replicas if replica in members])


def first_that(can_lead: CanLead, candidates: Iterable[int]) -> int:
    """The first candidate that can lead, NO_LEADER if none can."""
    return next(filter(can_lead, candidates), NO_LEADER)


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
        leader = first_that(can_lead, _in_replica_order(state, isr))
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
    leader = first_that(can_lead, _in_replica_order(state, state.isr))
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
    return first_that(can_lead, [member for member in members if log_ends[member] == greatest])


def proven(key: PartitionKey) -> PartitionChangeRecord:
    """The leader was alive after the last change: only its ISR counts from now on."""
    return PartitionChangeRecord(key[1], key[0], last_known_elr=())


# --- ElectLeaders and the preferred leader


class ElectionResult(NamedTuple):
    """What became of one partition's election."""

    topic: str
    partition: int
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None
    is_pending: bool = False
    """Whether it may be elected as soon as brokers have told their log ends."""


def elect_leaders(
    controller: ControllerState,
    election_type: ElectionType,
    partitions: Iterable[TopicPartition],
    elect_unclean: ElectUnclean,
) -> Decision[list[ElectionResult]]:
    """Elect leaders of partitions; one that is named twice is elected once and answered once."""
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
            results[each] = ElectionResult(*each, error.code, refusal(error.message))
    if pending:
        records = elect_unclean(list(pending))
    elected = {(record.topic_id, record.partition_id) for record in records}
    text = "where the logs of the replicas end is not known yet"
    for key in pending.keys() - elected:
        each = pending[key]
        results[each] = ElectionResult(*each, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, text, is_pending=True)
    return Decision(records, list(results.values()))


def _check_preferred(controller: ControllerState, state: PartitionState) -> None:
    """Raises KafkaError unless the preferred leader is another one and can lead."""
    image, preferred = controller.image, state.replicas[0]
    if state.leader == preferred:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, f"broker {preferred}, the preferred one, leads")
    if preferred in state.isr and image.can_lead(preferred):
        return
    why = "is not alive, or stops"
    if image.can_lead(preferred):
        why = "has lost this replica: its data folder failed" if is_lost(state, preferred) else "is behind"
    raise KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, f"broker {preferred}, the preferred one, {why}")


def _check_leaderless(controller: ControllerState, state: PartitionState) -> None:
    """Raises KafkaError unless there is no leader and a replica that can lead."""
    if state.leader != NO_LEADER:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, f"broker {state.leader} leads")
    if not any(map(controller.image.can_lead, state.replicas)):
        raise KafkaError(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, f"none of {list(state.replicas)} is alive")


def elect_preferred(controller: ControllerState, keys: Iterable[PartitionKey], count_max: int) -> Decision[int]:
    """Let the preferred leaders of these partitions lead where they can, at most so many; returns how many do."""
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


def returnable(controller: ControllerState) -> Decision[list[PartitionKey]]:
    """The partitions that another broker leads while their preferred leader can lead, in sync or not."""
    image = controller.image
    return Decision((), [key for leader, keys in image.imbalanced.items() if image.can_lead(leader) for key in keys])


def electable(controller: ControllerState, election_type: ElectionType) -> Decision[list[TopicPartition]]:
    """The partitions that ElectLeaders of this type is for when it names none."""
    image = controller.image
    groups = [image.leaderless] if election_type is ElectionType.UNCLEAN else image.imbalanced.values()
    return Decision((), [(image.topics[topic_id].name, partition) for keys in groups for topic_id, partition in keys])
