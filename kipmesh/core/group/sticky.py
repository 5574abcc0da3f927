"""A balanced assignment that is near to the last one.

Members first keep what they had. What nobody has goes to the least loaded that may have it. Then, as long as a member
has at least two partitions more than one that could be relieved by it - directly, or by a chain of members of whom each
hands one on to the next - one partition moves along. That ends in the most even loads that the subscriptions allow.

Invariants: each partition has one owner, who subscribes to its topic; when all subscriptions are equal, loads differ by
one at most, and nobody who has no more than its share loses anything.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from kipmesh.core.group.consumer_protocol import Partition


def sticky(
    partitions: Mapping[str, int], topics: Mapping[str, frozenset[str]], owners: Mapping[Partition, str]
) -> dict[str, list[Partition]]:
    """From partitions by topic, members' topics and the last owners to what each member is to have."""
    return _Assignment(partitions, topics, owners).solve()


class _Assignment:
    """One that is being made; members are known by their place in `topics`, which also breaks ties."""

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
        """All steps."""
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
