"""The simulation bites: known bugs of Raft, put in one at a time, are found within a few seeds.

Each bug is a patch of a class here; production code has no switch for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kipmesh.core.messages import EpochEndOffset
from kipmesh.core.raft import ElectionState, Machine, State, elections, replication
from kipmesh.core.raft.leadership import Leadership, majority_offset
from kipmesh.core.raft.transitions import Cause
from kipmesh.core.raft.types import TruncateLog
from kipmesh.storage import quorum_state
from kipmesh.testing.sim import InvariantError, World, run_world
from kipmesh.testing.sim.node import FOLDER, SimNode

SEEDS_MAX = 60

Patch = pytest.MonkeyPatch


class ForgetsItsVote(SimNode):
    """The epoch is on disk, the vote is not: after a restart it votes again. It likes to crash when it voted."""

    def persist(self, election: ElectionState) -> None:
        if election.voted_id not in (-1, self.node_id) and self.world.scheduler.now_ms < self.world.faults.until_ms:
            self.crash_point = "vote answered"
        stored = election._replace(voted_id=-1)
        quorum_state.write(self.fs, FOLDER, stored, self.config.cluster_id, self.config.voters)


class ForgetsThatItLed(SimNode):
    """`quorum-state` is written when a candidate is voted for only: after a restart the epoch before is used again."""

    def persist(self, election: ElectionState) -> None:
        if election.voted_id != self.node_id:
            super().persist(election)


class WritesWithoutSync(SimNode):
    """`quorum-state` is written but not made durable."""

    def persist(self, election: ElectionState) -> None:
        data = quorum_state.encode(election, self.config.cluster_id, self.config.voters)
        file = self.fs.open(f"{FOLDER}/{quorum_state.QUORUM_STATE}", create=True)
        file.truncate(0)
        file.write_at(data, 0)
        file.close()


class StaysLeader(Machine):
    """A leader that hears of a higher epoch takes it for its own."""

    def become(self, cause: Cause, epoch: int, *, leader_id: int = -1, voted_id: int = -1) -> None:
        if self.state is State.LEADER and cause in (Cause.HIGHER_EPOCH, Cause.LEADER_FOUND):
            self.election = ElectionState(epoch, self.config.node_id)
        else:
            super().become(cause, epoch, leader_id=leader_id, voted_id=voted_id)


class TriesItsEpochAgain(Machine):
    """Who led an epoch before a restart leads it again without asking anybody."""

    def _initial_state(self) -> State:
        state = super()._initial_state()
        return State.CANDIDATE if state is State.RESIGNED else state

    def start(self, now_ms: int, jitter: float) -> list:  # type: ignore[type-arg]
        effects = super().start(now_ms, jitter)
        if self.state is State.CANDIDATE:
            self.granted = set(self.config.voters)
        return effects


def one_voter_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        offset = max([durable_end, *(voter.end_offset for voter in self.voters.values())])
        return offset if offset > self.epoch_start_offset else -1

    patch.setattr(Leadership, "committed_offset", committed_offset)


def own_log_end_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        observers = [seen.end_offset for seen in self.observers.values()]
        ends = [durable_end, *(voter.end_offset for voter in self.voters.values()), *observers]
        offset = sorted(ends, reverse=True)[len(self.config.voters) // 2]
        return offset if offset > self.epoch_start_offset else -1

    patch.setattr(Leadership, "committed_offset", committed_offset)


def older_epoch_commits(patch: Patch) -> None:
    def committed_offset(self: Leadership, durable_end: int) -> int:
        return majority_offset([durable_end, *(voter.end_offset for voter in self.voters.values())])

    patch.setattr(Leadership, "committed_offset", committed_offset)


def cuts_below_the_high_watermark(patch: Patch) -> None:
    def truncate(machine: Machine, diverging: EpochEndOffset) -> None:
        machine.emit(TruncateLog(max(0, diverging.end_offset - 3)))

    patch.setattr(replication, "truncate", truncate)


def claims_before_fsync(patch: Patch) -> None:
    patch.setattr(replication, "may_fetch", lambda machine: True)


def leader_counts_itself_before_fsync(patch: Patch) -> None:
    def advance(machine: Machine, leadership: Leadership) -> None:
        machine.durable_end = machine.log.log_end_offset
        original(machine, leadership)

    original = replication.advance_leader
    patch.setattr(replication, "advance_leader", advance)


def votes_for_shorter_logs(patch: Patch) -> None:
    def may_grant(machine: Machine, candidate_id: int, last: tuple[int, int]) -> bool:
        return machine.state is State.UNATTACHED or machine.election.voted_id == candidate_id

    patch.setattr(elections, "may_grant", may_grant)


def believes_any_position(patch: Patch) -> None:
    def fetch_position(machine: Machine, asked: object) -> None:
        return None

    patch.setattr(replication, "fetch_position", fetch_position)


@dataclass(frozen=True)
class Bug:
    name: str
    patch: Callable[[Patch], None] | None = None
    node_type: type[SimNode] = SimNode
    machine_type: type[Machine] = Machine
    voters: int | None = None
    observers: int | None = None
    only_faults: tuple[str, ...] = ()
    fetch_max_bytes: int | None = None
    """Rare bugs get the shape and the faults that they need; what goes wrong when is still the seed's."""

    def world(self, seed: int) -> World:
        return World(
            seed,
            voters=self.voters,
            observers=self.observers,
            node_type=self.node_type,
            machine_type=self.machine_type,
            only_faults=self.only_faults,
            fetch_max_bytes=self.fetch_max_bytes,
        )


BUGS = [
    Bug(
        "votes twice in an epoch after a restart",
        node_type=ForgetsItsVote,
        voters=3,
        observers=0,
        only_faults=("cut_link", "kill", "cut_power"),
    ),
    Bug("uses an epoch again after a restart", node_type=ForgetsThatItLed),
    Bug("quorum-state without fsync", node_type=WritesWithoutSync),
    Bug("a stale leader goes on in the new epoch", machine_type=StaysLeader),
    Bug("leads its epoch again after a restart", machine_type=TriesItsEpochAgain),
    Bug("high watermark from one voter", one_voter_commits),
    Bug("observers count for the high watermark", own_log_end_commits),
    Bug(
        "commits an older epoch's record before its own",
        older_epoch_commits,
        voters=5,
        observers=0,
        only_faults=("strike_new_leader", "slow_network"),
        fetch_max_bytes=1,
    ),
    Bug("cuts below the high watermark", cuts_below_the_high_watermark),
    Bug("a voter claims records before it synced them", claims_before_fsync),
    Bug("a leader counts itself before it synced", leader_counts_itself_before_fsync),
    Bug("votes for shorter logs", votes_for_shorter_logs),
    Bug("believes any fetch position", believes_any_position),
]


def seeds_until_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> int | None:
    if bug.patch is not None:
        bug.patch(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            run_world(bug.world(seed))
        except InvariantError as error:
            print(f"{bug.name}: {error}")
            return seed + 1
    return None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_known_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_until_found(bug, monkeypatch), f"not found in {SEEDS_MAX} seeds"
