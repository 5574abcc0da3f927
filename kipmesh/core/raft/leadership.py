"""What a leader knows in its epoch: where every replica's log ends, who lives, who waits; and what that commits.

The high watermark is the offset that a majority of voters has durably, the leader counting with what it has synced
itself, and only once that is past the start of the leader's own epoch: an older epoch's record on a majority may still
be overwritten by a leader that never saw it.

Invariants: observers never count for the high watermark nor for the check of the quorum; there is at most one waiting
fetch a replica, at most `WAITING_MAX` in all; a voter's claim counts only when its offset and epoch matched this log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kipmesh.core.raft.types import RaftConfig
from kipmesh.messages import FetchPartition, ReplicaState

OBSERVERS_MAX = 10_000
OBSERVER_TIMEOUT_MS = 300_000
"""An observer that has not fetched for that long is not a replica any more."""
WAITING_MAX = 10_000
NO_DIRECTORY = bytes(16)


def majority_offset(ends: Iterable[int]) -> int:
    """The largest offset that more than half of these log ends reach; -1 stands for an unknown end."""
    descending = sorted(ends, reverse=True)
    return descending[len(descending) // 2]


class Waiting(NamedTuple):
    """A fetch that is answered when there is something to say, or at its deadline."""

    request_id: int
    replica_id: int
    partition: FetchPartition
    max_bytes: int
    deadline_ms: int


@dataclass(slots=True)
class Replica:
    """A replica as its fetches show it; times are the leader's clock, -1 for never."""

    end_offset: int = -1
    last_fetch_ms: int = -1
    last_caught_up_ms: int = -1
    leader_end_at_last_fetch: int = -1
    high_watermark_told: int = -1

    def fetched(self, offset: int, leader_end: int, now_ms: int) -> None:
        """It has everything below `offset`."""
        if offset >= leader_end:
            self.last_caught_up_ms = now_ms
        elif 0 < self.leader_end_at_last_fetch <= offset:
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.leader_end_at_last_fetch = leader_end
        self.last_fetch_ms = now_ms
        self.end_offset = offset


class Leadership:
    """See the module; made when the epoch begins, dropped when it ends."""

    def __init__(self, config: RaftConfig, epoch_start_offset: int, granting: Iterable[int], now_ms: int) -> None:
        self.config = config
        self.epoch_start_offset = epoch_start_offset
        self.granting_voters = tuple(sorted(granting))
        self.voters = {voter: Replica() for voter in config.voters if voter != config.node_id}
        self.observers: dict[int, Replica] = {}
        self.waiting: dict[int, Waiting] = {}
        """By replica id; negative request ids for those that are no replicas."""
        self.check_quorum_deadline_ms = now_ms + config.check_quorum_timeout_ms
        self.begin_deadline_ms = now_ms
        self.to_tell: set[int] = set(self.voters)
        """Voters that BeginQuorumEpoch goes to in this round."""
        self._alive: set[int] = set()

    # -- what fetches say

    def replica(self, replica_id: int, now_ms: int) -> Replica | None:
        """What is kept of a replica; None for a consumer, and for an observer too many."""
        found = self.voters.get(replica_id) or self.observers.get(replica_id)
        if found is not None or replica_id < 0:
            return found
        if len(self.observers) >= OBSERVERS_MAX:
            self.forget_observers(now_ms)
            if len(self.observers) >= OBSERVERS_MAX:
                return None
        self.observers[replica_id] = Replica()
        return self.observers[replica_id]

    def is_alive(self, replica_id: int, now_ms: int) -> None:
        """A voter fetched in this epoch: the quorum is there when enough of them did."""
        if replica_id not in self.voters:
            return
        self.to_tell.discard(replica_id)
        self._alive.add(replica_id)
        if len(self._alive) + 1 >= self.config.majority:
            self._alive.clear()
            self.check_quorum_deadline_ms = now_ms + self.config.check_quorum_timeout_ms

    def has_lost_quorum(self, now_ms: int) -> bool:
        """Whether a majority of voters has been silent for too long."""
        return bool(self.voters) and now_ms >= self.check_quorum_deadline_ms

    def forget_observers(self, now_ms: int) -> None:
        """Drop observers that have not fetched for a while."""
        oldest_ms = now_ms - OBSERVER_TIMEOUT_MS
        for replica_id in [id_ for id_, seen in self.observers.items() if seen.last_fetch_ms < oldest_ms]:
            del self.observers[replica_id]

    def begin_round(self, now_ms: int) -> None:
        """Every half fetch timeout those voters are told of the epoch that have not fetched since the last time."""
        if now_ms < self.begin_deadline_ms:
            return
        half_ms = self.config.fetch_timeout_ms // 2
        silent_since_ms = now_ms - half_ms
        self.to_tell = {voter for voter, seen in self.voters.items() if seen.last_fetch_ms < max(0, silent_since_ms)}
        self.begin_deadline_ms = now_ms + half_ms

    # -- what follows

    def committed_offset(self, durable_end: int) -> int:
        """What is committed by this leader's own epoch; -1 for nothing yet."""
        offset = majority_offset([durable_end, *(voter.end_offset for voter in self.voters.values())])
        return offset if offset > self.epoch_start_offset else -1

    def successors(self) -> tuple[int, ...]:
        """The other voters, those with the longest logs first."""
        return tuple(sorted(self.voters, key=lambda voter: (-self.voters[voter].end_offset, voter)))

    def described(self, log_end: int, now_ms: int, wall_ms: int) -> tuple[list[ReplicaState], list[ReplicaState]]:
        """Voters and observers as DescribeQuorum tells them; timestamps are of the wall clock."""
        self.forget_observers(now_ms)
        voters = [_described(voter, seen, now_ms, wall_ms) for voter, seen in self.voters.items()]
        voters.append(ReplicaState(self.config.node_id, NO_DIRECTORY, log_end, wall_ms, wall_ms))
        observers = [_described(id_, seen, now_ms, wall_ms) for id_, seen in self.observers.items()]
        return sorted(voters), sorted(observers)


def _described(replica_id: int, seen: Replica, now_ms: int, wall_ms: int) -> ReplicaState:
    def wall(at_ms: int) -> int:
        return wall_ms - (now_ms - at_ms) if at_ms >= 0 else -1

    return ReplicaState(
        replica_id, NO_DIRECTORY, seen.end_offset, wall(seen.last_fetch_ms), wall(seen.last_caught_up_ms)
    )
