"""ElectLeaders, and the way back to the preferred leader: the first replica, which is the partition's leader service.

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

The errors are Kafka's. Kafka elects the first replica that is alive when it is told to elect uncleanly; here it is the
one that loses least, which heartbeats have to tell first, so that the caller asks again.

A preferred election changes nothing but the leader: the old one and the new one are in the ISR, so the new one has all
that was acknowledged. What the old one had appended and not replicated it cuts off; who produced it with acks=all is
told NOT_LEADER_OR_FOLLOWER and sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState
from kipmesh.core.metadata.records import NO_LEADER, PartitionChangeRecord, Record
from kipmesh.core.metadata.request_limits import refusal
from kipmesh.core.metadata.states import is_lost
from kipmesh.messages import ElectionType

TopicPartition = tuple[str, int]
"""Topic name and partition."""

ElectUnclean = Callable[[Sequence[PartitionKey]], list[Record]]
"""Elects whom the log ends told so far allow, and asks for the others': `BrokerLifecycle.elect_unclean`."""


class ElectionResult(NamedTuple):
    """What became of one partition's election."""

    topic: str
    partition: int
    code: ErrorCode = ErrorCode.NONE
    message: str | None = None
    is_pending: bool = False
    """Whether it may be elected as soon as brokers have told their log ends."""


def elect_leaders(
    image: MetadataImage,
    election_type: ElectionType,
    partitions: Iterable[TopicPartition],
    elect_unclean: ElectUnclean,
) -> Decision[list[ElectionResult]]:
    """Elect leaders of partitions; one that is named twice is elected once and answered once."""
    wanted = dict.fromkeys(partitions)
    if election_type is ElectionType.PREFERRED:
        changes = [_preferred(image, *each) for each in wanted]
        records: list[Record] = [record for _, record in changes if record is not None]
        return Decision(records, [result for result, _ in changes])
    results: dict[TopicPartition, ElectionResult] = {}
    keys: dict[PartitionKey, TopicPartition] = {}
    for each in wanted:
        found = _look(image, *each)
        if isinstance(found, ElectionResult):
            results[each] = found
        elif found[1].leader != NO_LEADER:
            results[each] = _not_needed(*each, f"broker {found[1].leader} leads")
        elif not any(_can_lead(image, replica) for replica in found[1].replicas):
            text = f"none of {list(found[1].replicas)} is alive"
            results[each] = ElectionResult(*each, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, text)
        else:
            keys[found[0]] = each
    unclean = elect_unclean(list(keys))
    elected = {
        (record.topic_id, record.partition_id) for record in unclean if isinstance(record, PartitionChangeRecord)
    }
    text = "where the logs of the replicas end is not known yet"
    for key, each in keys.items():
        waits = ElectionResult(*each, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, text, is_pending=True)
        results[each] = ElectionResult(*each) if key in elected else waits
    return Decision(unclean, [results[each] for each in wanted])


def elect_preferred(image: MetadataImage, keys: Iterable[PartitionKey], count_max: int) -> list[Record]:
    """Records that let the preferred leaders of these partitions lead where they can; at most so many."""
    records: list[Record] = []
    for key in keys:
        state = image.partition(*key)
        if state is not None and state.leader != state.replicas[0] and _preferred_can_lead(image, state):
            records.append(PartitionChangeRecord(key[1], key[0], leader=state.replicas[0]))
            if len(records) == count_max:
                break
    return records


def returnable(image: MetadataImage) -> list[PartitionKey]:
    """The partitions that somebody else leads while their preferred leader can lead, in sync or not."""
    return [key for preferred, keys in image.imbalanced.items() if _can_lead(image, preferred) for key in keys]


def electable(image: MetadataImage, election_type: ElectionType) -> list[TopicPartition]:
    """The partitions that an election of this type is for, when it is asked for all."""
    topics = image.topics
    if election_type is ElectionType.UNCLEAN:
        return [(topics[topic_id].name, partition) for topic_id, partition in image.leaderless]
    return [(topics[topic_id].name, partition) for keys in image.imbalanced.values() for topic_id, partition in keys]


def imbalance_count(image: MetadataImage) -> int:
    """How many partitions are not led by their preferred leader; those without a leader count."""
    return sum(len(keys) for keys in list(image.imbalanced.values()))


def _look(image: MetadataImage, topic: str, partition: int) -> tuple[PartitionKey, PartitionState] | ElectionResult:
    found = image.topic_by_name(topic)
    state = None if found is None else found.partitions.get(partition)
    if found is None or state is None:
        what = refusal(f"topic {topic!r}" if found is None else f"partition {partition} of topic {topic!r}")
        return ElectionResult(topic, partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {what}")
    return (found.topic_id, partition), state


def _preferred(image: MetadataImage, topic: str, partition: int) -> tuple[ElectionResult, Record | None]:
    found = _look(image, topic, partition)
    if isinstance(found, ElectionResult):
        return found, None
    key, state = found
    preferred = state.replicas[0]
    if state.leader == preferred:
        return _not_needed(topic, partition, f"broker {preferred}, the preferred one, leads"), None
    if _preferred_can_lead(image, state):
        return ElectionResult(topic, partition), PartitionChangeRecord(key[1], key[0], leader=preferred)
    why = "is not alive, or stops"
    if _can_lead(image, preferred):
        why = "has lost this replica: its data folder failed" if is_lost(state, preferred) else "is behind"
    text = f"broker {preferred}, the preferred one, {why}"
    return ElectionResult(topic, partition, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, text), None


def _not_needed(topic: str, partition: int, text: str) -> ElectionResult:
    return ElectionResult(topic, partition, ErrorCode.ELECTION_NOT_NEEDED, text)


def _preferred_can_lead(image: MetadataImage, state: PartitionState) -> bool:
    preferred = state.replicas[0]
    return preferred in state.isr and _can_lead(image, preferred)


def _can_lead(image: MetadataImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.can_lead
