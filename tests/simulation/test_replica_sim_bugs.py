"""The replication simulator finds known bugs, injected one at a time, within a few seeds.

Each bug is a patch of production code, which has no switches for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from kipmesh.broker.replication.replica import Replica
from kipmesh.broker.requests import reading
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata import brokers, elections, fencing
from kipmesh.core.metadata.records import NO_LEADER, PartitionChangeRecord
from kipmesh.core.metadata.states import PartitionState
from kipmesh.core.replica.follower import FollowerWatermarks
from kipmesh.core.replica.leader import IsrChange, PartitionLeader
from kipmesh.messages import EpochEndOffset, FetchPartition
from kipmesh.storage.log.durability import Durability
from kipmesh.storage.log.epochs import LeaderEpochs
from simulation.replicas import World, run_world
from tests.simulation.sim_support import seed_that_finds

SEEDS_MAX = 40

Patch = pytest.MonkeyPatch


def high_watermark_from_the_leader_alone(patch: Patch) -> None:
    def advance(self: PartitionLeader, now_ms: int) -> bool:
        moved = self.log_end_offset > self.high_watermark
        self.high_watermark = max(self.high_watermark, self.log_end_offset)
        return moved

    patch.setattr(PartitionLeader, "advance", advance)


def new_leaders_commit_their_whole_log(patch: Patch) -> None:
    original = PartitionLeader.__init__

    def init(self: PartitionLeader, **keys: Any) -> None:
        original(self, **keys | {"high_watermark": keys["log_end_offset"]})

    patch.setattr(PartitionLeader, "__init__", init)


def nothing_counts_as_pending(patch: Patch) -> None:
    def sent(self: PartitionLeader, change: IsrChange) -> None:
        self.pending = None

    patch.setattr(PartitionLeader, "isr_change_sent", sent)


def lagging_replicas_join_isr(patch: Patch) -> None:
    def isr_to_join(self: PartitionLeader, replica: int) -> IsrChange | None:
        if self.pending is not None or replica in self.isr or not self._is_eligible(replica):
            return None
        return self._change(self.isr | {replica})

    patch.setattr(PartitionLeader, "isr_to_join", isr_to_join)


def acknowledges_below_the_least_isr(patch: Patch) -> None:
    patch.setattr(PartitionLeader, "is_under_min_isr", property(lambda self: False))


def acknowledges_without_replication(patch: Patch) -> None:
    def when_replicated(self: Replica, offset: int, leader_epoch: int, done: Callable[[ErrorCode], None]) -> None:
        done(ErrorCode.NONE)

    patch.setattr(Replica, "when_replicated", when_replicated)


def truncates_to_the_high_watermark(patch: Patch) -> None:
    """Truncation of followers as in Apache Kafka before KIP-101."""
    original = Replica.become_follower

    def become_follower(self: Replica, state: PartitionState) -> None:
        original(self, state)
        self.log.truncate_to(self.high_watermark)

    patch.setattr(Replica, "become_follower", become_follower)


def never_truncates(patch: Patch) -> None:
    patch.setattr(reading, "_divergence", lambda replica, request: None)


def truncates_too_little(patch: Patch) -> None:
    """Truncate by only one record per leader epoch.

    Truncating one record per response would be correct, because the leader compares until the logs match.
    """
    cut: set[tuple[Replica, int]] = set()

    def truncate(self: Replica, diverging: EpochEndOffset) -> int:
        if (self, self.leader_epoch) not in cut:
            cut.add((self, self.leader_epoch))
            self._truncate(max(diverging.end_offset, self.log.log_end_offset - 1))
        return self.log.log_end_offset

    patch.setattr(Replica, "truncate_diverged", truncate)


def epochs_are_not_truncated(patch: Patch) -> None:
    patch.setattr(LeaderEpochs, "truncate_from_end", lambda self, end_offset: None)


def followers_serve_uncommitted_records(patch: Patch) -> None:
    original = FollowerWatermarks.observe_leader

    def observe_leader(self: FollowerWatermarks, leader_high_watermark: int, log_end_offset: int) -> FollowerWatermarks:
        return original(self, max(leader_high_watermark, log_end_offset), log_end_offset)

    patch.setattr(FollowerWatermarks, "observe_leader", observe_leader)


def unclean_stops_count_as_clean(patch: Patch) -> None:
    original = elections.leave_isr

    def leave_isr(key: Any, state: Any, broker_id: int, can_lead: Any, *, unclean: bool) -> Any:
        return original(key, state, broker_id, can_lead, unclean=False)

    patch.setattr(elections, "leave_isr", leave_isr)


def unclean_brokers_stay_in_isrs(patch: Patch) -> None:
    patch.setattr(brokers.BrokerLifecycle, "_leave_records", lambda self, excluded, *, unclean: [])


def elects_outside_of_the_isr(patch: Patch) -> None:
    original = fencing.without_broker

    def without_broker(
        states: Collection[PartitionState], broker_id: int, can_lead: Collection[int]
    ) -> Iterator[PartitionState | None]:
        for state, after in zip(states, original(states, broker_id, can_lead), strict=True):
            if after is not None and after.leader == NO_LEADER:
                others = [one for one in after.replicas if one in can_lead]
                if others:
                    after = after._replace(leader=others[0], isr=(others[0],), leader_epoch=state.leader_epoch + 1)
            yield after

    patch.setattr(fencing, "without_broker", without_broker)


def elects_first_reported_log_end(patch: Patch) -> None:
    def elect(
        key: Any, state: PartitionState, log_ends: Mapping[int, Any], can_lead: Any, *, unclean_allowed: bool
    ) -> PartitionChangeRecord | None:
        if state.leader != NO_LEADER or state.isr:
            return None
        here = [member for member in state.last_isr if member in log_ends and can_lead(member)]
        if not here:
            return None
        others = tuple([member for member in state.last_isr if member != here[0]])
        return PartitionChangeRecord(key[1], key[0], isr=(here[0],), leader=here[0], last_known_elr=others)

    patch.setattr(elections, "elect_by_log_end", elect)


def truncation_keeps_recovery_point(patch: Patch) -> None:
    patch.setattr(Durability, "lower", lambda self, log_end_offset: None)


def new_leaders_send_their_high_watermark(patch: Patch) -> None:
    """392-09: the high watermark is sent, and ends epochs, before it has reached the leader's epoch."""
    patch.setattr(PartitionLeader, "high_watermark_is_known", property(lambda self: True))


def ignores_fetch_offset_of_followers(patch: Patch) -> None:
    """The leader serves followers beyond their log end, because it ignores their fetch offset."""
    original = Replica.follower_fetched

    def fetched(self: Replica, leader: Any, replica_id: int, epoch: int, request: FetchPartition, fetches: Any) -> None:
        try:
            original(self, leader, replica_id, epoch, request._replace(fetch_offset=self.log.log_end_offset), fetches)
        except KafkaError as error:
            raise error from None

    patch.setattr(Replica, "follower_fetched", fetched)


@dataclass(frozen=True)
class Bug:
    """A patch, and the worlds in which it is searched."""

    patch: Callable[[Patch], None]
    min_isr: int | None = None
    only_faults: tuple[str, ...] = ()
    first_seed: int = 0

    def world(self, seed: int) -> World:
        return World(seed, min_isr=self.min_isr, only_faults=self.only_faults, is_unclean=False)


BUGS = [
    Bug(high_watermark_from_the_leader_alone),
    Bug(new_leaders_commit_their_whole_log),
    Bug(nothing_counts_as_pending),
    Bug(lagging_replicas_join_isr),
    Bug(acknowledges_below_the_least_isr, min_isr=2),
    Bug(acknowledges_without_replication),
    Bug(truncates_to_the_high_watermark, first_seed=59),
    Bug(never_truncates),
    Bug(truncates_too_little, first_seed=12),
    Bug(epochs_are_not_truncated, first_seed=9),
    Bug(followers_serve_uncommitted_records),
    Bug(unclean_stops_count_as_clean, first_seed=22),
    Bug(unclean_brokers_stay_in_isrs, first_seed=15),
    Bug(elects_outside_of_the_isr),
    Bug(elects_first_reported_log_end, first_seed=30),
    Bug(
        truncation_keeps_recovery_point,
        only_faults=("isolate", "split", "cut_power", "crash_at_point"),
        first_seed=636,  # one seed in a hundred
    ),
    Bug(new_leaders_send_their_high_watermark, first_seed=87),  # one seed in thirty
    Bug(ignores_fetch_offset_of_followers),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.patch.__name__)
def test_known_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same world is clean without the bug."""
    with monkeypatch.context() as patch:
        bug.patch(patch)
        seeds = range(bug.first_seed, bug.first_seed + SEEDS_MAX)
        seed = seed_that_finds(bug.patch.__name__, bug.world, seeds)
    run_world(bug.world(seed))
