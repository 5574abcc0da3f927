"""How a group's leader shares out partitions: Kafka's range, roundrobin and cooperative-sticky, pure functions.

All give every partition of a subscribed topic to one member that subscribes to it, as long as there is one. Members are
taken in Kafka's order: static ones by their names, then the others by their ids, so that range and roundrobin come out
as Kafka's own clients' do. Racks are not looked at.

`cooperative-sticky` is balanced first (no member could take one from another that has two or more partitions more), and
then changes as little as it can. By the cooperative protocol a partition that changes hands is assigned to nobody in
the generation in which its owner is to give it up, so that no two generations next to each other have it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from kipmesh.core.group.consumer_protocol import Partition, Subscription, flat
from kipmesh.core.group.sticky import sticky

Assignments: TypeAlias = dict[str, list[Partition]]
"""Member id -> what it gets; every member is in it."""


class GroupMember(NamedTuple):
    """A member as the leader knows it."""

    member_id: str
    group_instance_id: str | None
    subscription: Subscription


class RebalanceProtocol(Enum):
    """What members do with what they have when a rebalance begins."""

    EAGER = "eager"
    """They give up all of it before they join."""
    COOPERATIVE = "cooperative"
    """They keep it, and give up what their next assignment lacks."""


class Assignor(NamedTuple):
    """A way to share out partitions, by the name that Kafka's clients know."""

    name: str
    protocol: RebalanceProtocol
    assign: Callable[[Mapping[str, int], Sequence[GroupMember]], Assignments]
    """From partitions by topic and the members to the assignments."""


def _in_order(members: Sequence[GroupMember]) -> list[GroupMember]:
    return sorted(members, key=lambda one: (one.group_instance_id is None, one.group_instance_id or one.member_id))


def assign_range(partitions: Mapping[str, int], members: Sequence[GroupMember]) -> Assignments:
    """Of each topic by itself a run of partitions to each of its subscribers, the first ones getting one more."""
    assignments: Assignments = {member.member_id: [] for member in members}
    ordered = _in_order(members)
    for topic in sorted(partitions):
        subscribers = [member.member_id for member in ordered if topic in member.subscription.topics]
        if not subscribers:
            continue
        each, more = divmod(partitions[topic], len(subscribers))
        start = 0
        for place, member_id in enumerate(subscribers):
            end = start + each + (place < more)
            assignments[member_id].extend((topic, number) for number in range(start, end))
            start = end
    return assignments


def assign_round_robin(partitions: Mapping[str, int], members: Sequence[GroupMember]) -> Assignments:
    """All partitions in order, one after the other to the next member that subscribes to it."""
    assignments: Assignments = {member.member_id: [] for member in members}
    ordered = [(member.member_id, frozenset(member.subscription.topics)) for member in _in_order(members)]
    subscribed = {topic for _, topics in ordered for topic in topics}
    place = 0
    for topic in sorted(subscribed & partitions.keys()):
        for number in range(partitions[topic]):
            while topic not in ordered[place][1]:
                place = (place + 1) % len(ordered)
            assignments[ordered[place][0]].append((topic, number))
            place = (place + 1) % len(ordered)
    return assignments


def assign_cooperative_sticky(partitions: Mapping[str, int], members: Sequence[GroupMember]) -> Assignments:
    """Balanced, near to what was, and without what another member still has to give up."""
    ordered = _in_order(members)
    topics = {member.member_id: frozenset(member.subscription.topics) for member in ordered}
    claims = {member.member_id: flat(member.subscription.owned_partitions) for member in ordered}
    wanted = sticky(partitions, topics, _owners(ordered))
    claimed_by: dict[Partition, set[str]] = {}
    for member_id, owned in claims.items():
        for partition in owned:
            claimed_by.setdefault(partition, set()).add(member_id)
    return {
        member_id: sorted(one for one in wanted[member_id] if claimed_by.get(one, set()) <= {member_id})
        for member_id in topics
    }


def _owners(members: Sequence[GroupMember]) -> dict[Partition, str]:
    """Who had which partition last: of several that say so who was in the latest generation, of equals nobody."""
    owners: dict[Partition, tuple[int, str | None]] = {}
    for member in members:
        generation = _generation(member.subscription)
        for partition in flat(member.subscription.owned_partitions):
            latest, owner = owners.get(partition, (-2, None))
            if generation > latest:
                owners[partition] = (generation, member.member_id)
            elif generation == latest and owner != member.member_id:
                owners[partition] = (generation, None)
    return {partition: owner for partition, (_, owner) in owners.items() if owner is not None}


def _generation(subscription: Subscription) -> int:
    """The generation that the owned partitions are of; older Java clients say it in their user data."""
    if subscription.generation_id >= 0 or subscription.user_data is None or len(subscription.user_data) < 4:
        return subscription.generation_id
    return int.from_bytes(subscription.user_data[:4], "big", signed=True)


RANGE = Assignor("range", RebalanceProtocol.EAGER, assign_range)
ROUND_ROBIN = Assignor("roundrobin", RebalanceProtocol.EAGER, assign_round_robin)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", RebalanceProtocol.COOPERATIVE, assign_cooperative_sticky)

ASSIGNORS: Mapping[str, Assignor] = {one.name: one for one in (RANGE, ROUND_ROBIN, COOPERATIVE_STICKY)}
"""By their names."""
