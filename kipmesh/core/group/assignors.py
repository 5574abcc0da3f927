"""How a group's leader shares out partitions: Kafka's range, roundrobin and cooperative-sticky, pure functions.

All give every partition of a subscribed topic to one member that subscribes to it, as long as there is one. Members are
taken in Kafka's order: static ones by their names, then the others by their ids, so that range and roundrobin come out
as Kafka's own clients' do. Racks are not looked at.

`cooperative-sticky` is balanced first (no member could take one from another that has two or more partitions more), and
then changes as little as it can. By the cooperative protocol a partition that changes hands is assigned to nobody in
the generation in which its owner is to give it up, so that no two generations next to each other have it twice.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from kipmesh.core.group.records import Partition, Subscription, flat

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
    wanted = StickyAssignment(partitions, topics, _owners(ordered)).solve()
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


class StickyAssignment:
    """A balanced assignment that is near to the last one.

    Members first keep what they had. What nobody has goes to the least loaded that may have it. Then, as long as a
    member has at least two partitions more than one that could be relieved by it - directly, or by a chain of members
    of whom each hands one on to the next - one partition moves along. That ends in the most even loads that the
    subscriptions allow.

    Invariants: each partition has one owner, who subscribes to its topic; when all subscriptions are equal, loads
    differ by one at most, and nobody who has no more than its share loses anything.

    Inside, members are known by their place in `topics`, which also breaks ties.
    """

    def __init__(
        self, partitions: Mapping[str, int], topics: Mapping[str, frozenset[str]], owners: Mapping[Partition, str]
    ) -> None:
        self._members = list(topics)
        self._topics = [topics[member] for member in self._members]
        self._partitions = partitions
        self._eligible = {
            topic: [place for place, wanted in enumerate(self._topics) if topic in wanted]
            for topic in sorted(partitions)
        }
        self._held: list[dict[str, list[int]]] = [{} for _ in self._members]
        """By member and topic the partitions, those that it had before first."""
        self._loads = [0] * len(self._members)
        self._owners = owners

    def solve(self) -> dict[str, list[Partition]]:
        """What each member is to have, from partitions by topic, members' topics and the last owners."""
        self._hand_out(self._keep())
        self._even_out()
        return {
            member: [(topic, number) for topic, numbers in held.items() for number in numbers]
            for member, held in zip(self._members, self._held, strict=True)
        }

    def _give(self, place: int, topic: str, number: int) -> None:
        self._held[place].setdefault(topic, []).append(number)
        self._loads[place] += 1

    def _keep(self) -> list[Partition]:
        """Give the last owners what they may still have; the rest is returned, of the least wanted topics first."""
        places = {member: place for place, member in enumerate(self._members)}
        rest = []
        for topic in sorted(self._eligible, key=lambda topic: (len(self._eligible[topic]), topic)):
            if not self._eligible[topic]:
                continue
            for number in range(self._partitions[topic]):
                place = places.get(self._owners.get((topic, number), ""), -1)
                if place >= 0 and topic in self._topics[place]:
                    self._give(place, topic, number)
                else:
                    rest.append((topic, number))
        return rest

    def _hand_out(self, rest: list[Partition]) -> None:
        heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for topic, number in rest:
            eligible = tuple(self._eligible[topic])
            heap = heaps.get(eligible)
            if heap is None:
                heap = heaps[eligible] = [(self._loads[place], place) for place in eligible]
                heapq.heapify(heap)
            while heap[0][0] != self._loads[heap[0][1]]:  # it got some of another topic meanwhile
                heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
            place = heap[0][1]
            self._give(place, topic, number)
            heapq.heapreplace(heap, (self._loads[place], place))

    def _even_out(self) -> None:
        """Relieve the most loaded who can be; who cannot is looked at again only after somebody else was."""
        stuck: set[int] = set()
        while True:
            loaded = [place for place in range(len(self._members)) if place not in stuck]
            if not loaded:
                return
            source = max(loaded, key=lambda place: (self._loads[place], -place))
            chain = self._chain(source)
            if chain:
                for giver, topic, taker in chain:
                    self._move(giver, topic, taker)
                stuck.clear()
            else:
                stuck.add(source)

    def _chain(self, source: int) -> list[tuple[int, str, int]]:
        """The shortest way from `source` to a member with at least two partitions less: (giver, topic, taker) each."""
        enough = self._loads[source] - 2
        came_by: dict[int, tuple[int, str]] = {source: (source, "")}
        queue, best = deque([source]), -1
        seen_topics: set[str] = set()
        while queue and best < 0:
            giver = queue.popleft()
            for topic, numbers in self._held[giver].items():
                if not numbers or topic in seen_topics:
                    continue
                seen_topics.add(topic)
                for taker in self._eligible[topic]:
                    if taker not in came_by:
                        came_by[taker] = (giver, topic)
                        queue.append(taker)
                        if self._loads[taker] <= enough and (best < 0 or self._loads[taker] < self._loads[best]):
                            best = taker
        chain: list[tuple[int, str, int]] = []
        while best >= 0 and best != source:
            giver, topic = came_by[best]
            chain.append((giver, topic, best))
            best = giver
        return chain

    def _move(self, giver: int, topic: str, taker: int) -> None:
        """Hand over one that the taker had before, or else one that the giver had not, or the last."""
        numbers = self._held[giver][topic]
        numbers.sort(key=lambda number: self._reluctance(giver, taker, topic, number))
        number = numbers.pop(0)
        self._loads[giver] -= 1
        self._give(taker, topic, number)

    def _reluctance(self, giver: int, taker: int, topic: str, number: int) -> tuple[int, int]:
        owner = self._owners.get((topic, number))
        rank = 0 if owner == self._members[taker] else 2 if owner == self._members[giver] else 1
        return rank, -number


RANGE = Assignor("range", RebalanceProtocol.EAGER, assign_range)
ROUND_ROBIN = Assignor("roundrobin", RebalanceProtocol.EAGER, assign_round_robin)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", RebalanceProtocol.COOPERATIVE, assign_cooperative_sticky)

ASSIGNORS: Mapping[str, Assignor] = {one.name: one for one in (RANGE, ROUND_ROBIN, COOPERATIVE_STICKY)}
"""By their names."""
