"""Partition assignors of a group's leader: Kafka's range, roundrobin and cooperative-sticky.

Each assigns every partition of a subscribed topic to one subscribed member. Members are sorted as in Kafka: static
members by instance id, then the others by member id, so that range and roundrobin equal Kafka's clients. Racks are
ignored.

`cooperative-sticky` first balances (no member has two partitions more than one that could take one) and then minimizes
changes. A partition that changes its owner is assigned to no member until the old owner has revoked it, so consecutive
generations never assign it twice.

All functions are pure.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from kipmesh.core.group.records import Partition, Subscription, flat

Assignments: TypeAlias = dict[str, list[Partition]]
"""Member id -> assigned partitions, for every member."""


class GroupMember(NamedTuple):
    """A member in the leader's JoinGroup response."""

    member_id: str
    group_instance_id: str | None
    subscription: Subscription


class RebalanceProtocol(Enum):
    """How members treat their partitions when a rebalance starts."""

    EAGER = "eager"
    """Members revoke all partitions before they join."""
    COOPERATIVE = "cooperative"
    """Members keep their partitions and revoke those that the next assignment lacks."""


class Assignor(NamedTuple):
    """An assignment strategy. `name` is the strategy's name in Kafka's clients."""

    name: str
    protocol: RebalanceProtocol
    assign: Callable[[Mapping[str, int], Sequence[GroupMember]], Assignments]
    """(partition count by topic, members) -> assignments."""


def _in_order(members: Sequence[GroupMember]) -> list[GroupMember]:
    return sorted(members, key=lambda one: (one.group_instance_id is None, one.group_instance_id or one.member_id))


def assign_range(partitions: Mapping[str, int], members: Sequence[GroupMember]) -> Assignments:
    """Assign each topic's partitions as consecutive ranges to its subscribers. If the partitions do not divide evenly,
    the first subscribers get one more each."""
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
    """Assign all partitions of subscribed topics in (topic, partition) order, each to the next member that subscribes
    to the topic."""
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
    """Assign balanced loads with few changes. A partition that another member must revoke first stays unassigned."""
    ordered = _in_order(members)
    topics = {member.member_id: frozenset(member.subscription.topics) for member in ordered}
    claims = {member.member_id: flat(member.subscription.owned_partitions) for member in ordered}
    target = StickyAssignment(partitions, topics, _owners(ordered)).solve()
    claimed_by: dict[Partition, set[str]] = {}
    for member_id, owned in claims.items():
        for partition in owned:
            claimed_by.setdefault(partition, set()).add(member_id)
    return {
        member_id: sorted(one for one in target[member_id] if claimed_by.get(one, set()) <= {member_id})
        for member_id in topics
    }


def _owners(members: Sequence[GroupMember]) -> dict[Partition, str]:
    """Return partition -> last owner. Of several claims, the one with the latest generation counts. A partition that
    two members claim in that generation is omitted."""
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
    """Return the generation of the owned partitions, -1 if unknown. Older Java clients store it in their user data."""
    if subscription.generation_id >= 0 or subscription.user_data is None or len(subscription.user_data) < 4:
        return subscription.generation_id
    return int.from_bytes(subscription.user_data[:4], "big", signed=True)


class StickyAssignment:
    """A balanced assignment close to the last one.

    Members keep their partitions first. Unowned partitions go to the least loaded eligible member. Then, while a member
    has at least two partitions more than another one to which it can pass a partition, directly or through a chain of
    members that each pass one on, one partition moves along the chain. The result has the most even loads that the
    subscriptions allow.

    Invariants: each partition has one owner, which subscribes to its topic; with equal subscriptions, loads differ by
    at most one and no member below its share loses a partition.

    Internally, members are their index in `topics`, which also breaks ties. Args: partitions: topic -> partition count;
    topics: member id -> subscribed topics; owners: partition -> last owner.
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
        self._assigned: list[dict[str, list[int]]] = [{} for _ in self._members]
        """Per member: topic -> partitions, previously owned ones first."""
        self._loads = [0] * len(self._members)
        self._owners = owners

    def solve(self) -> dict[str, list[Partition]]:
        """Return member id -> partitions, for every member. Call it once."""
        self._assign_rest(self._assign_owned())
        self._balance_loads()
        return {
            member: [(topic, number) for topic, numbers in assigned.items() for number in numbers]
            for member, assigned in zip(self._members, self._assigned, strict=True)
        }

    def _assign(self, place: int, topic: str, number: int) -> None:
        self._assigned[place].setdefault(topic, []).append(number)
        self._loads[place] += 1

    def _assign_owned(self) -> list[Partition]:
        """Let owners keep partitions that they still subscribe to. Return the other partitions, topics with the fewest
        subscribers first."""
        places = {member: place for place, member in enumerate(self._members)}
        rest = []
        for topic in sorted(self._eligible, key=lambda topic: (len(self._eligible[topic]), topic)):
            if not self._eligible[topic]:
                continue
            for number in range(self._partitions[topic]):
                place = places.get(self._owners.get((topic, number), ""), -1)
                if place >= 0 and topic in self._topics[place]:
                    self._assign(place, topic, number)
                else:
                    rest.append((topic, number))
        return rest

    def _assign_rest(self, rest: list[Partition]) -> None:
        heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for topic, number in rest:
            eligible = tuple(self._eligible[topic])
            heap = heaps.get(eligible)
            if heap is None:
                heap = heaps[eligible] = [(self._loads[place], place) for place in eligible]
                heapq.heapify(heap)
            while heap[0][0] != self._loads[heap[0][1]]:  # it received partitions of another topic
                heapq.heapreplace(heap, (self._loads[heap[0][1]], heap[0][1]))
            place = heap[0][1]
            self._assign(place, topic, number)
            heapq.heapreplace(heap, (self._loads[place], place))

    def _balance_loads(self) -> None:
        """Move partitions away from the most loaded members while `_chain` finds a chain. A member without a chain is
        retried after the next move."""
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
        """Return the shortest chain from `source` to a member with at least two fewer partitions, as (giver, topic,
        taker) moves, last move first. Empty if there is none."""
        load_max = self._loads[source] - 2
        reached_by: dict[int, tuple[int, str]] = {source: (source, "")}
        queue, best = deque([source]), -1
        seen_topics: set[str] = set()
        while queue and best < 0:
            giver = queue.popleft()
            for topic, numbers in self._assigned[giver].items():
                if not numbers or topic in seen_topics:
                    continue
                seen_topics.add(topic)
                for taker in self._eligible[topic]:
                    if taker not in reached_by:
                        reached_by[taker] = (giver, topic)
                        queue.append(taker)
                        if self._loads[taker] <= load_max and (best < 0 or self._loads[taker] < self._loads[best]):
                            best = taker
        chain: list[tuple[int, str, int]] = []
        while best >= 0 and best != source:
            giver, topic = reached_by[best]
            chain.append((giver, topic, best))
            best = giver
        return chain

    def _move(self, giver: int, topic: str, taker: int) -> None:
        """Move a partition of `topic`: preferably one that the taker owned before, then one that the giver did not
        own."""
        numbers = self._assigned[giver][topic]
        numbers.sort(key=lambda number: self._move_cost(giver, taker, topic, number))
        number = numbers.pop(0)
        self._loads[giver] -= 1
        self._assign(taker, topic, number)

    def _move_cost(self, giver: int, taker: int, topic: str, number: int) -> tuple[int, int]:
        owner = self._owners.get((topic, number))
        rank = 0 if owner == self._members[taker] else 2 if owner == self._members[giver] else 1
        return rank, -number


RANGE = Assignor("range", RebalanceProtocol.EAGER, assign_range)
ROUND_ROBIN = Assignor("roundrobin", RebalanceProtocol.EAGER, assign_round_robin)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", RebalanceProtocol.COOPERATIVE, assign_cooperative_sticky)

ASSIGNORS: Mapping[str, Assignor] = {one.name: one for one in (RANGE, ROUND_ROBIN, COOPERATIVE_STICKY)}
"""Assignor name -> assignor."""
