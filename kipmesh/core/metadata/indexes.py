"""What an image can be asked without a walk over all partitions; all of it follows from the partitions.

Dicts serve as ordered sets: equal logs must give equal orders, and so equal records of decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.core.metadata.states import PartitionKey, PartitionState


def common(some: Collection[PartitionKey], others: Collection[PartitionKey]) -> list[PartitionKey]:
    """The partitions that are in both, sorted; looks at each of the fewer. Both must know quickly what is in them."""
    fewer, more = (some, others) if len(some) < len(others) else (others, some)
    return sorted([key for key in fewer if key in more])


@dataclass(slots=True)
class PartitionIndexes:
    """The partitions of each broker, those without a leader or the preferred one, and those of unproven leaders."""

    of_broker: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Broker -> what it has a replica of."""
    leaderless: dict[PartitionKey, None] = field(default_factory=dict)
    unproven: dict[int, dict[PartitionKey, int]] = field(default_factory=dict)
    """Leader -> what it leads that has a last known ELR -> offset of the record that made it so."""
    imbalanced: dict[int, dict[PartitionKey, None]] = field(default_factory=dict)
    """Preferred leader -> what somebody else leads, or nobody."""
    reassigning: dict[PartitionKey, None] = field(default_factory=dict)
    """Partitions whose replicas are being moved."""
    count: int = 0
    """Of all partitions."""

    def add(self, key: PartitionKey, state: PartitionState, offset: int) -> None:
        """A partition is new, or has other replicas, by the record at `offset`."""
        self.count += 1
        for replica in state.replicas:
            self.of_broker.setdefault(replica, {})[key] = None
        self.reassignment_changed(key, state)
        self.leader_changed(key, state.leader, state, offset)

    def remove(self, key: PartitionKey, state: PartitionState) -> None:
        """A partition is gone."""
        self.count -= 1
        for replica in state.replicas:
            of_broker = self.of_broker[replica]
            del of_broker[key]
            if not of_broker:
                del self.of_broker[replica]
        self.leaderless.pop(key, None)
        self.reassigning.pop(key, None)
        self.balance(key, state.replicas[0], state.replicas[0])
        self._forget_unproven(key, state.leader)

    def reassignment_changed(self, key: PartitionKey, state: PartitionState) -> None:
        """The partition has other replicas that come or go."""
        if state.adding_replicas or state.removing_replicas:
            self.reassigning[key] = None
        else:
            self.reassigning.pop(key, None)

    def leader_changed(self, key: PartitionKey, before: int, state: PartitionState, offset: int) -> None:
        """The partition was led by `before` and is `state` since the record at `offset`."""
        self._forget_unproven(key, before)
        self.balance(key, state.replicas[0], state.leader)
        if state.leader == NO_LEADER:
            self.leaderless[key] = None
            return
        self.leaderless.pop(key, None)
        if state.last_known_elr:
            self.unproven.setdefault(state.leader, {})[key] = offset

    def balance(self, key: PartitionKey, preferred: int, leader: int) -> None:
        """The partition, which `preferred` should lead, is led by `leader`."""
        waiting = self.imbalanced.get(preferred)
        if leader != preferred:
            if waiting is None:
                waiting = self.imbalanced[preferred] = {}
            waiting[key] = None
        elif waiting is not None:
            waiting.pop(key, None)
            if not waiting:
                del self.imbalanced[preferred]

    def _forget_unproven(self, key: PartitionKey, leader: int) -> None:
        unproven = self.unproven.get(leader)
        if unproven is not None:
            unproven.pop(key, None)
            if not unproven:
                del self.unproven[leader]
