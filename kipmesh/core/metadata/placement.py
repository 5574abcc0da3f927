"""Placement of the replicas of new partitions.

- The preferred leader is on a leader-role broker, evenly over all of them; on any broker if there is none.
- The other replicas are spread over racks: no rack has a second replica while another has none. Brokers without a rack
  form one rack.
- Within these rules the least loaded broker is chosen: fewest replicas of the topic, then fewest of all topics.
- Fenced brokers are used only if there are too few others.

The cost is O(replicas x (racks + log brokers)). Equal input gives equal placement; there is no randomness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from kipmesh.core.metadata.states import BrokerState

_Load = tuple[int, int, int]
"""(replicas of this topic, replicas of all topics, broker id); the lowest is chosen."""


class _Heap:
    """Brokers of one rack or role, ordered by load. An entry with an outdated load is corrected when it reaches the
    top."""

    def __init__(self, brokers: Iterable[int], load: Mapping[int, int], before: Mapping[int, int]) -> None:
        self._load = load
        self._before = before
        self._entries = [self._entry(broker) for broker in brokers]
        heapify(self._entries)

    def _entry(self, broker: int) -> _Load:
        return (self._load[broker], self._before[broker], broker)

    def peek(self, taken: Sequence[int], aside: list[int]) -> _Load | None:
        """Return the entry of the least loaded broker that is not taken, or None if all are taken. Taken brokers move
        to `aside` until `put_back`."""
        entries = self._entries
        while entries:
            entry = entries[0]
            broker = entry[2]
            if broker in taken:
                heappop(entries)
                aside.append(broker)
            elif entry[0] != self._load[broker]:
                heappop(entries)
                heappush(entries, self._entry(broker))
            else:
                return entry
        return None

    def put_back(self, brokers: Iterable[int]) -> None:
        for broker in brokers:
            heappush(self._entries, self._entry(broker))


class Placement:
    """Places the partitions of one topic, one by one, by the rules of the module."""

    def __init__(
        self, brokers: Collection[BrokerState], replica_counts: Mapping[int, int], replication_factor: int
    ) -> None:
        """Args: brokers: all registered brokers; replica_counts: broker id -> replicas of all topics.

        Raises ValueError if `replication_factor` is below 1 or above the number of brokers, or no broker is unfenced. A
        broker that is shutting down counts as fenced.
        """
        unfenced = [broker for broker in brokers if broker.can_lead]
        if not unfenced or not 0 < replication_factor <= len(brokers):
            raise ValueError(f"{replication_factor} replicas on {len(brokers)} brokers ({len(unfenced)} unfenced)")
        usable = unfenced
        if len(unfenced) < replication_factor:
            usable = [*unfenced, *(broker for broker in brokers if not broker.can_lead)]
        self._replication_factor = replication_factor
        self._rack_of = {broker.broker_id: broker.rack or "" for broker in usable}
        self._load = dict.fromkeys(self._rack_of, 0)
        self._leader_load = dict.fromkeys(self._rack_of, 0)
        racks: dict[str, list[int]] = {}
        for broker_id, rack in self._rack_of.items():
            racks.setdefault(rack, []).append(broker_id)
        self._racks = {rack: _Heap(members, self._load, replica_counts) for rack, members in sorted(racks.items())}
        leaders = [broker for broker in unfenced if broker.is_leader_role] or unfenced
        self._leaders = _Heap([broker.broker_id for broker in leaders], self._leader_load, replica_counts)

    def add_existing(self, replicas: Sequence[int]) -> None:
        """Count the load of an existing partition of the topic with these replicas, so that `place` balances against
        it."""
        for position, broker in enumerate(replicas):
            if broker in self._load:
                self._load[broker] += 1
                self._leader_load[broker] += position == 0

    def place(self) -> tuple[int, ...]:
        """Return the broker ids of the next partition's replicas, the preferred leader first."""
        first = self._leaders.peek((), [])
        assert first is not None  # the constructor has checked for an unfenced broker
        leader = first[2]
        self._leader_load[leader] += 1
        taken = [leader]
        used = dict.fromkeys(self._racks, 0)
        used[self._rack_of[leader]] = 1
        aside: dict[str, list[int]] = {rack: [] for rack in self._racks}
        while len(taken) < self._replication_factor:
            rack, broker = self._next(taken, used, aside)
            used[rack] += 1
            taken.append(broker)
        for broker in taken:
            self._load[broker] += 1
        for rack, brokers in aside.items():
            self._racks[rack].put_back(brokers)
        return self._rotated(taken)

    def _next(self, taken: list[int], used: dict[str, int], aside: dict[str, list[int]]) -> tuple[str, int]:
        best: tuple[int, _Load, str] | None = None
        for rack, heap in self._racks.items():
            entry = heap.peek(taken, aside[rack])
            if entry is not None and (best is None or (used[rack], entry) < best[:2]):
                best = (used[rack], entry, rack)
        assert best is not None  # the constructor has counted the brokers
        return best[2], best[1][2]

    def _rotated(self, taken: list[int]) -> tuple[int, ...]:
        """Return the replicas with the followers rotated, so that a leader's partitions do not all fail over to the
        same broker."""
        leader, followers = taken[0], taken[1:]
        shift = self._leader_load[leader] % len(followers) if followers else 0
        return (leader, *followers[shift:], *followers[:shift])
