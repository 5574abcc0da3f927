"""A leader's view of its epoch: replica progress, liveness, waiting fetches, and the resulting high watermark.

The high watermark is the largest offset that a majority of voters has made durable. The leader counts only its own
durable records. It advances only past the start of the leader's own epoch: a record of an older epoch may be on a
majority and still be overwritten by a later leader that never had it.

Invariants: observers never count for the high watermark or for check-quorum. Each replica has at most one waiting
fetch, and there are at most `WAITING_MAX` in total. A voter's position counts only if its offset and epoch match this
log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kipmesh.core.raft.types import RaftConfig
from kipmesh.messages import FetchPartition, ReplicaState

OBSERVERS_MAX = 10_000
OBSERVER_TIMEOUT_MS = 300_000
"""Time without a fetch after which an observer is removed."""
WAITING_MAX = 10_000
NO_DIRECTORY = bytes(16)


def majority_offset(ends: Iterable[int]) -> int:
    """Return the largest offset that more than half of the log ends have reached. An unknown log end is -1."""
    descending = sorted(ends, reverse=True)
    return descending[len(descending) // 2]


class WaitingFetch(NamedTuple):
    """A Fetch request without a response yet: it waits for records, a higher high watermark, or its deadline."""

    request_id: int
    replica_id: int
    partition: FetchPartition
    max_bytes: int
    deadline_ms: int


@dataclass(slots=True)
class Replica:
    """Progress of another replica according to its fetches. Times are monotonic ms; -1 is never or unknown."""

    end_offset: int = -1
    last_fetch_ms: int = -1
    last_caught_up_ms: int = -1
    leader_end_at_last_fetch: int = -1
    sent_high_watermark: int = -1

    def record_fetch(self, offset: int, leader_end: int, now_ms: int) -> None:
        """Record a fetch from `offset`: the replica has all records below it."""
        if offset >= leader_end:
            self.last_caught_up_ms = now_ms
        elif 0 < self.leader_end_at_last_fetch <= offset:
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.leader_end_at_last_fetch = leader_end
        self.last_fetch_ms = now_ms
        self.end_offset = offset


class Leadership:
    """Leader state of one epoch. Created when the epoch begins and dropped when it ends.

    Args: epoch_start_offset: offset of the LeaderChange record; granting: voters that granted their vote.
    """

    def __init__(self, config: RaftConfig, epoch_start_offset: int, granting: Iterable[int], now_ms: int) -> None:
        self.config = config
        self.epoch_start_offset = epoch_start_offset
        self.granting_voters = tuple(sorted(granting))
        self.voters = {voter: Replica() for voter in config.voters if voter != config.node_id}
        self.observers: dict[int, Replica] = {}
        self.waiting: dict[int, WaitingFetch] = {}
        """By replica id; consumers by -1 - request id."""
        self.check_quorum_deadline_ms = now_ms + config.check_quorum_timeout_ms
        self.begin_deadline_ms = now_ms
        self.unnotified_voters: set[int] = set(self.voters)
        """Voters that must still receive BeginQuorumEpoch in this round."""
        self._alive: set[int] = set()

    # -- fetches

    def replica(self, replica_id: int, now_ms: int) -> Replica | None:
        """Return the progress of a voter or observer. Adds an observer that is not known yet.

        Returns None for a consumer (`replica_id` < 0), or if there are already `OBSERVERS_MAX` active observers.
        """
        replica = self.voters.get(replica_id) or self.observers.get(replica_id)
        if replica is not None or replica_id < 0:
            return replica
        if len(self.observers) >= OBSERVERS_MAX:
            self.expire_observers(now_ms)
            if len(self.observers) >= OBSERVERS_MAX:
                return None
        self.observers[replica_id] = Replica()
        return self.observers[replica_id]

    def mark_alive(self, replica_id: int, now_ms: int) -> None:
        """Record a Fetch or FetchSnapshot request of a voter. Ignored for observers and consumers.

        The check-quorum timeout restarts when the voters that have sent one form a majority together with the leader.
        """
        if replica_id not in self.voters:
            return
        self.unnotified_voters.discard(replica_id)
        self._alive.add(replica_id)
        if len(self._alive) + 1 >= self.config.majority:
            self._alive.clear()
            self.check_quorum_deadline_ms = now_ms + self.config.check_quorum_timeout_ms

    def has_lost_quorum(self, now_ms: int) -> bool:
        """Whether the check-quorum timeout passed without fetches from a majority. False without other voters."""
        return bool(self.voters) and now_ms >= self.check_quorum_deadline_ms

    def expire_observers(self, now_ms: int) -> None:
        """Remove observers that have not fetched for `OBSERVER_TIMEOUT_MS`."""
        oldest_ms = now_ms - OBSERVER_TIMEOUT_MS
        for replica_id in [id_ for id_, replica in self.observers.items() if replica.last_fetch_ms < oldest_ms]:
            del self.observers[replica_id]

    def start_round(self, now_ms: int) -> None:
        """Select the voters to send BeginQuorumEpoch: those that have not fetched for half the fetch timeout.

        Does nothing unless that time has passed since the previous round.
        """
        if now_ms < self.begin_deadline_ms:
            return
        half_ms = self.config.fetch_timeout_ms // 2
        since_ms = max(0, now_ms - half_ms)
        self.unnotified_voters = {voter for voter, replica in self.voters.items() if replica.last_fetch_ms < since_ms}
        self.begin_deadline_ms = now_ms + half_ms

    # -- derived values

    def committed_offset(self, durable_end: int) -> int:
        """Return the high watermark that follows from the log ends; -1 before a record of this epoch is committed.

        `durable_end` is the end offset of the leader's durable records.
        """
        offset = majority_offset([durable_end, *(voter.end_offset for voter in self.voters.values())])
        return offset if offset > self.epoch_start_offset else -1

    def successors(self) -> tuple[int, ...]:
        """Return the ids of the other voters, ordered by log end (longest first), then id."""
        return tuple(sorted(self.voters, key=lambda voter: (-self.voters[voter].end_offset, voter)))

    def describe(self, log_end: int, now_ms: int, wall_ms: int) -> tuple[list[ReplicaState], list[ReplicaState]]:
        """Return (voters, observers) for a DescribeQuorum response, each sorted by id. Voters include the leader.

        Timestamps are wall-clock milliseconds: `now_ms` of the monotonic clock corresponds to `wall_ms`.
        """
        self.expire_observers(now_ms)
        voters = [_replica_state(id_, replica, wall_ms - now_ms) for id_, replica in self.voters.items()]
        voters.append(ReplicaState(self.config.node_id, NO_DIRECTORY, log_end, wall_ms, wall_ms))
        observers = [_replica_state(id_, replica, wall_ms - now_ms) for id_, replica in self.observers.items()]
        return sorted(voters), sorted(observers)


def _replica_state(replica_id: int, replica: Replica, wall_offset_ms: int) -> ReplicaState:
    times_ms = (replica.last_fetch_ms, replica.last_caught_up_ms)
    wall_times_ms = [at_ms + wall_offset_ms if at_ms >= 0 else -1 for at_ms in times_ms]
    return ReplicaState(replica_id, NO_DIRECTORY, replica.end_offset, *wall_times_ms)
