"""The quorum simulator finds known bugs of Raft and of snapshots, injected one at a time, within a few seeds.

Each bug is a patch or a subclass, because production code has no switches for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kipmesh.core.metadata.image import CapturedImage, MetadataImage
from kipmesh.core.raft import Cause, ElectionState, Machine, State, elections, replication
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.leadership import Leadership, majority_offset
from kipmesh.core.raft.types import SnapshotChanged, TruncateLog
from kipmesh.core.snapshot.ids import file_name
from kipmesh.messages import EpochEndOffset, SnapshotId
from kipmesh.storage.quorum import quorum_state, snapshots
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from simulation.quorum import World
from simulation.quorum.node import SimNode
from simulation.quorum.state import PendingSnapshot, SimState
from simulation.quorum.world import QUIET_MS, VIRTUAL_MS
from tests.simulation.sim_support import seed_that_finds

SEEDS_MAX = 60
DIRECTORY = "/data/__cluster_metadata-0"
FAULTS_UNTIL_MS = VIRTUAL_MS - QUIET_MS

Patch = pytest.MonkeyPatch


class ForgetsItsVote(SimNode):
    """Stores the epoch without the vote, so that a restarted voter votes again. Crashes after voting."""

    def persist(self, election: ElectionState) -> None:
        if election.voted_id not in (-1, self.node_id) and self.engine.now_ms < FAULTS_UNTIL_MS:
            self.crash_point = "vote granted"
        stored = election._replace(voted_id=-1)
        quorum_state.write(self.fs, DIRECTORY, stored, self.config.cluster_id, self.config.voters)


class ForgetsItsEpoch(SimNode):
    """Writes `quorum-state` only when it votes for itself, so that a restarted node reuses an epoch."""

    def persist(self, election: ElectionState) -> None:
        if election.voted_id != self.node_id:
            super().persist(election)


class WritesWithoutSync(SimNode):
    """Writes `quorum-state` without pending it durable."""

    def persist(self, election: ElectionState) -> None:
        data = quorum_state.encode(election, self.config.cluster_id, self.config.voters)
        file = self.fs.open(f"{DIRECTORY}/{quorum_state.QUORUM_STATE}", create=True)
        file.truncate(0)
        file.write_at(data, 0)
        file.close()


class LeadsItsEpochAgain(Machine):
    """Leads its last epoch again after a restart, without an election."""

    def _initial_state(self) -> State:
        state = super()._initial_state()
        return State.CANDIDATE if state is State.RESIGNED else state

    def start(self, now_ms: int, jitter: float) -> list:  # type: ignore[type-arg]
        effects = super().start(now_ms, jitter)
        if self.state is State.CANDIDATE:
            self.granted = set(self.config.voters)
        return effects


class CrashesAfterSendingRecords(SimNode):
    """A leader that crashes after sending unsynced records and restarts before it is missed."""

    machine_type = LeadsItsEpochAgain

    def apply_own(self) -> None:
        super().apply_own()
        if self.engine.now_ms < FAULTS_UNTIL_MS and self.rng.random() < 0.2:
            self.crash_point = "records sent"


def leads_in_a_higher_epoch(patch: Patch) -> None:
    def transition(context: RaftContext, cause: Cause, epoch: int, *, leader_id: int = -1, voted_id: int = -1) -> None:
        if context.state is State.LEADER and cause in (Cause.HIGHER_EPOCH, Cause.LEADER_FOUND):
            context.election = ElectionState(epoch, context.config.node_id)
        else:
            original(context, cause, epoch, leader_id=leader_id, voted_id=voted_id)

    original = elections.transition
    patch.setattr(elections, "transition", transition)


def one_voter_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        offset = max([durable_end, *(voter.end_offset for voter in self.voters.values())])
        return offset if offset > self.epoch_start_offset else -1

    patch.setattr(Leadership, "committed_offset", committed_offset)


def own_log_end_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        observers = [observer.end_offset for observer in self.observers.values()]
        ends = [durable_end, *(voter.end_offset for voter in self.voters.values()), *observers]
        offset = sorted(ends, reverse=True)[len(self.config.voters) // 2]
        return offset if offset > self.epoch_start_offset else -1

    patch.setattr(Leadership, "committed_offset", committed_offset)


def older_epoch_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        return majority_offset([durable_end, *(voter.end_offset for voter in self.voters.values())])

    patch.setattr(Leadership, "committed_offset", committed_offset)


def cuts_below_the_high_watermark(patch: Patch) -> None:
    def truncate(context: RaftContext, diverging: EpochEndOffset) -> None:
        context.emit(TruncateLog(max(0, diverging.end_offset - 3)))

    patch.setattr(replication, "truncate", truncate)


def claims_before_fsync(patch: Patch) -> None:
    patch.setattr(replication, "may_fetch", lambda context: True)


def leader_counts_itself_before_fsync(patch: Patch) -> None:
    def advance(context: RaftContext, leadership: Leadership) -> None:
        context.durable_end = context.log.log_end_offset
        original(context, leadership)

    original = replication.advance_leader
    patch.setattr(replication, "advance_leader", advance)


def votes_for_shorter_logs(patch: Patch) -> None:
    def may_grant(context: RaftContext, candidate_id: int, last: tuple[int, int]) -> bool:
        return context.state is State.UNATTACHED or context.election.voted_id == candidate_id

    patch.setattr(elections, "may_grant", may_grant)


def accepts_any_fetch_position(patch: Patch) -> None:
    def fetch_position(context: RaftContext, request: object) -> None:
        return None

    patch.setattr(replication, "fetch_position", fetch_position)


# -- snapshots


class FreezesBeforeCommit(SimState):
    """Freezes a snapshot when it is written, before its records are committed."""

    def _may_freeze(self, pending: PendingSnapshot) -> bool:
        return True


class ContinuesAfterFailure(SimState):
    """Keeps the image after a failed apply, and writes snapshots of it."""

    def apply(self, end: int) -> None:
        if not self.node.image.failed:
            super().apply(end)

    def apply_failed(self, error: Exception) -> None:
        self.node.later(3000, lambda: self.node.stop(restart_ms=200))

    def tick(self) -> None:
        if self.node.image.failed and self.pending is None:
            self._begin()
        super().tick()


class NodeThatFreezesBeforeCommit(SimNode):
    state_type = FreezesBeforeCommit


class NodeThatContinuesAfterFailure(SimNode):
    state_type = ContinuesAfterFailure


def captures_a_failed_image(patch: Patch) -> None:
    def capture(self: MetadataImage) -> CapturedImage:
        has_failed, self.failed = self.failed, False
        is_within, self.is_within_batch = self.is_within_batch, False
        try:
            return original(self)
        finally:
            self.failed, self.is_within_batch = has_failed, is_within

    original = MetadataImage.capture
    patch.setattr(MetadataImage, "capture", capture)


def votes_by_the_log_alone(patch: Patch) -> None:
    def may_grant(context: RaftContext, candidate_id: int, last: tuple[int, int]) -> bool:
        if context.state is State.VOTED:
            return context.election.voted_id == candidate_id
        log_end = (max(context.log.latest_epoch, 0), context.log.log_end_offset)
        return context.state is State.UNATTACHED and last >= log_end

    patch.setattr(elections, "may_grant", may_grant)


def two_voters_have_only_a_snapshot(world: World) -> None:
    """One voter lags; two others are wiped and fetch a snapshot; then the other two stop.

    Random faults rarely occur in this order. A voter that must not elect the lagging one has the committed records only
    in a snapshot.
    """
    ids = list(world.nodes)

    def isolate() -> None:
        leader = next((node.node_id for node in world.nodes.values() if node.is_leader), ids[0])
        ids.remove(leader)
        ids.insert(0, leader)
        behind = ids[-1]
        world.engine.conditions.blocked |= {(one, other) for one in ids for other in ids if behind in (one, other)}

    def stop_the_rest() -> None:
        world.engine.conditions.blocked.clear()
        for node_id in ids[:2]:
            world.nodes[node_id].stop(restart_ms=8000)

    def resume() -> None:
        world.client.is_done = False
        world.client.propose()

    after = world.engine.after
    after(5000, isolate)
    after(9000, lambda: setattr(world.client, "is_done", True))
    after(10_500, lambda: world.nodes[ids[2]].wipe())
    after(13_500, lambda: world.nodes[ids[3]].wipe())
    after(17_000, stop_the_rest)
    after(30_000, resume)


def becomes_candidate_by_the_log_alone(patch: Patch) -> None:
    def last_offset_and_epoch(self: Machine) -> tuple[int, int]:
        return max(self.log.latest_epoch, 0), self.log.log_end_offset

    patch.setattr(Machine, "last_offset_and_epoch", property(last_offset_and_epoch))


def renames_before_fsync(patch: Patch) -> None:
    def publish(self: snapshots._PartFile) -> None:
        self._open_file.close()
        self._fs.rename(self._path, f"{self._directory}/{file_name(self.snapshot_id)}")
        self._fs.sync_dir(self._directory)
        self._file = None

    patch.setattr(snapshots._PartFile, "_publish", publish)


def renames_without_fsync_of_the_directory(patch: Patch) -> None:
    def publish(self: snapshots._PartFile) -> None:
        self._open_file.sync()
        self._open_file.close()
        self._fs.rename(self._path, f"{self._directory}/{file_name(self.snapshot_id)}")
        self._file = None

    patch.setattr(snapshots._PartFile, "_publish", publish)


def raises_the_start_without_a_snapshot(patch: Patch) -> None:
    def plan_clean(self: QuorumReplica, *, high_watermark: int, **_: object) -> int:
        return high_watermark

    def raise_log_start(self: QuorumReplica, offset: int) -> None:
        self.log.increment_log_start_offset(offset)

    patch.setattr(QuorumReplica, "plan_clean", plan_clean)
    patch.setattr(QuorumReplica, "raise_log_start", raise_log_start)


def keeps_one_snapshot_too_few(patch: Patch) -> None:
    def drop_obsolete(self: QuorumReplica, log_start: int) -> None:
        if log_start > 0:
            self.store.delete([each for each in self.store.snapshot_ids() if each.end_offset <= log_start])

    patch.setattr(QuorumReplica, "_drop_obsolete", drop_obsolete)


def installs_without_emptying_the_log(patch: Patch) -> None:
    def install(self: QuorumReplica, snapshot_id: SnapshotId) -> SnapshotChanged:
        self._received.discard(snapshot_id)
        return self._changed()

    patch.setattr(QuorumReplica, "install", install)


def accepts_received_snapshot_unchecked(patch: Patch) -> None:
    patch.setattr(snapshots.ReceivedSnapshot, "complete", lambda self: self._publish())


def accepts_any_position_at_log_start(patch: Patch) -> None:
    def needs_snapshot(offset: int, epoch: int, log_start: int, oldest: SnapshotId | None) -> bool:
        return oldest is not None and offset < log_start

    patch.setattr(replication, "needs_snapshot", needs_snapshot)


def starts_with_any_snapshot(patch: Patch) -> None:
    patch.setattr(snapshots.SnapshotStore, "validate", lambda self, snapshot_id: None)


@dataclass(frozen=True)
class Bug:
    name: str
    patch: Callable[[Patch], None] | None = None
    node_type: type[SimNode] = SimNode
    voters: int | None = None
    observers: int | None = None
    only_faults: tuple[str, ...] = ()
    fetch_max_bytes: int | None = None
    always_snapshots: bool = False
    first_seed: int = 0
    plan: Callable[[World], None] | None = None
    """Faults for rare bugs; the seed still determines their timing."""

    def world(self, seed: int) -> World:
        world = World(
            seed,
            voters=self.voters,
            observers=self.observers,
            node_type=self.node_type,
            only_faults=self.only_faults,
            fetch_max_bytes=self.fetch_max_bytes,
            always_snapshots=self.always_snapshots,
        )
        if self.plan is not None:
            self.plan(world)
        return world


BUGS = [
    Bug(
        "votes twice in an epoch after a restart",
        node_type=ForgetsItsVote,
        voters=3,
        observers=0,
        only_faults=("cut_link", "kill", "cut_power"),
        first_seed=39,
    ),
    Bug("uses an epoch again after a restart", node_type=ForgetsItsEpoch),
    Bug("quorum-state without fsync", node_type=WritesWithoutSync),
    Bug("a stale leader continues in the new epoch", leads_in_a_higher_epoch, first_seed=9),
    Bug(
        "leads its epoch again after a restart",
        node_type=CrashesAfterSendingRecords,
        voters=3,
        observers=0,
        only_faults=("slow_network", "cut_link"),
    ),
    Bug("high watermark from one voter", one_voter_commits),
    Bug("observers count for the high watermark", own_log_end_commits),
    Bug(
        "commits an older epoch's record before its own",
        older_epoch_commits,
        voters=5,
        observers=0,
        only_faults=("hit_new_leaders", "slow_network"),
        fetch_max_bytes=1,
    ),
    Bug("cuts below the high watermark", cuts_below_the_high_watermark),
    Bug("a voter claims records before it synced them", claims_before_fsync),
    Bug("a leader counts itself before it synced", leader_counts_itself_before_fsync),
    Bug("votes for shorter logs", votes_for_shorter_logs),
    Bug("accepts any fetch position", accepts_any_fetch_position),
    Bug(
        "votes without the snapshot's epoch",
        votes_by_the_log_alone,
        voters=5,
        observers=0,
        only_faults=("none",),
        always_snapshots=True,
        plan=two_voters_have_only_a_snapshot,
    ),
    Bug("becomes candidate without the snapshot's epoch", becomes_candidate_by_the_log_alone),
    Bug("renames a snapshot before fsync", renames_before_fsync),
    Bug("renames a snapshot without fsync of the directory", renames_without_fsync_of_the_directory),
    Bug("raises the log start without a snapshot", raises_the_start_without_a_snapshot),
    Bug("deletes the snapshot that the log starts at", keeps_one_snapshot_too_few),
    Bug("freezes a snapshot before it is committed", node_type=NodeThatFreezesBeforeCommit),
    Bug("makes a snapshot after a failed apply", captures_a_failed_image, node_type=NodeThatContinuesAfterFailure),
    Bug("installs a snapshot without emptying the log", installs_without_emptying_the_log),
    Bug("accepts a received snapshot unchecked", accepts_received_snapshot_unchecked),
    Bug("accepts every position at the log start", accepts_any_position_at_log_start, first_seed=40),
    Bug("starts with any snapshot", starts_with_any_snapshot),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_known_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug.patch is not None:
        bug.patch(monkeypatch)
    seed_that_finds(bug.name, bug.world, range(bug.first_seed, bug.first_seed + SEEDS_MAX))
