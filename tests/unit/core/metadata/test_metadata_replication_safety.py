"""No acknowledged record is lost: simulated brokers under a real controller, in seeded random order.

The model contains unsynced records that a power cut removes, brokers that act on old metadata, and a controller that
detects failures late. Each acting leader must have all acknowledged records, except records that a power cut removed
from every member of the last ISR.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from kipmesh import messages as m
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.metadata.records import PartitionChangeRecord
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

BROKERS = (1, 2, 3)
STEPS = 1500


class Written(NamedTuple):
    epoch: int
    number: int


class Broker:
    """One replica: its log, the synced part of it, and its view of the metadata."""

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.log: list[Written] = []
        self.synced = 0
        self.is_alive = False
        self.incarnation = 0
        self.broker_epoch = -1
        self.clean_epoch = -1
        self.applied = -1
        self.view: PartitionState | None = None
        self.positions: dict[int, tuple[int, int]] = {}
        self.wanted: tuple[m.TopicIdPartition, ...] = ()
        self.high_watermark = 0

    @property
    def leads(self) -> bool:
        return self.is_alive and self.view is not None and self.view.leader == self.broker_id


class ReplicationModel:
    """The controller, the brokers, and the acknowledged records."""

    def __init__(self, seed: int, *, power_cuts: bool) -> None:
        self.random = random.Random(seed)
        self.power_cuts = power_cuts
        self.controller = Controller()
        self.brokers = {broker_id: Broker(broker_id) for broker_id in BROKERS}
        for broker in self.brokers.values():
            self.restart(broker)
            broker.applied = self.controller.image.offset
            self.heartbeat(broker)
        self.topic_id = self.controller.create_assigned("t", BROKERS)
        self.numbers = 0
        self.committed: set[Written] = set()
        self.lost: set[Written] = set()
        self.late: list[tuple[int, int, int]] = []
        self.elections = 0
        self.moves = 0
        self.acted: tuple[int, int, tuple[int, ...]] = (-1, -1, ())
        for broker in self.brokers.values():
            self.apply(broker)

    # --- brokers

    def apply(self, broker: Broker) -> None:
        if not broker.is_alive or self.controller.image.offset < broker.broker_epoch:
            return
        broker.applied = self.controller.image.offset
        self.apply_state(broker, self.controller.state(self.topic_id))

    def apply_state(self, broker: Broker, state: PartitionState) -> None:
        if broker.view is not None and state.partition_epoch < broker.view.partition_epoch:
            return
        if broker.view is None or state.leader_epoch != broker.view.leader_epoch:
            broker.positions = {}
        broker.view = state
        if broker.leads:
            self.acted = max(self.acted, (state.leader_epoch, state.partition_epoch, tuple(state.isr)))
            self.check_leader(broker)

    def append(self, broker: Broker) -> None:
        if broker.leads and broker.view is not None:
            self.numbers += 1
            broker.log.append(Written(broker.view.leader_epoch, self.numbers))
            self.commit(broker)

    def replicate(self, follower: Broker) -> None:
        view = follower.view
        if not follower.is_alive or view is None or view.leader not in self.brokers or follower.leads:
            return
        leader = self.brokers[view.leader]
        if not leader.leads or leader.view is None or leader.view.leader_epoch != view.leader_epoch:
            return
        common = 0
        for ours, theirs in zip(follower.log, leader.log, strict=False):
            if ours != theirs:
                break
            common += 1
        del follower.log[common:]
        follower.synced = min(follower.synced, common)
        leader.positions[follower.broker_id] = (follower.broker_epoch, common)
        self.commit(leader)
        follower.log += leader.log[common : common + self.random.randint(1, 4)]

    def commit(self, leader: Broker) -> None:
        assert leader.view is not None
        positions = [
            len(leader.log) if member == leader.broker_id else leader.positions.get(member, (-1, 0))[1]
            for member in leader.view.isr
        ]
        leader.high_watermark = max(leader.high_watermark, min(positions))
        self.committed.update(leader.log[: min(positions)])

    def alter(self, leader: Broker) -> None:
        if not leader.leads or leader.view is None:
            return
        view = leader.view
        isr = [leader.broker_id]
        for member in self.brokers:
            position = leader.positions.get(member, (-1, -1))[1]
            caught_up = position >= leader.high_watermark and position == len(leader.log)
            if member != leader.broker_id and (caught_up or (member in view.isr and self.random.random() < 0.7)):
                isr.append(member)
        registered = self.controller.image.brokers
        members = [
            m.IsrMember(i, leader.positions.get(i, (-1, 0))[0] if i != leader.broker_id else leader.broker_epoch)
            for i in isr
        ]
        if registered[leader.broker_id].broker_epoch != leader.broker_epoch:
            return
        requested = m.AlterPartitionPartition(0, view.leader_epoch, view.partition_epoch, members)
        request = m.AlterPartitionRequest(
            leader.broker_id, leader.broker_epoch, [m.AlterPartitionTopic(self.topic_id, [requested])]
        )
        response = self.controller.run(self.controller.core.alter_partition(request))
        result = response.topics[0].partitions[0]
        if not result.error_code:
            self.apply_state(
                leader, view._replace(isr=result.isr, partition_epoch=result.partition_epoch, last_known_elr=())
            )

    def heartbeat(self, broker: Broker) -> None:
        if not broker.is_alive:
            return
        ends = [
            m.PartitionLogEnd(
                wanted.topic_id, wanted.partition, broker.log[-1].epoch if broker.log else -1, len(broker.log)
            )
            for wanted in broker.wanted
        ]
        before = self.controller.state(self.topic_id) if self.controller.image.topics else None
        response = self.controller.heartbeat(
            broker.broker_id, epoch=broker.broker_epoch, offset=broker.applied, log_ends=ends
        )
        broker.wanted = tuple(response.wanted_log_ends)
        self.note_election(before)

    def deliver_late(self) -> None:
        """Deliver a delayed heartbeat, even if its sender has stopped."""
        if self.late:
            broker_id, epoch, offset = self.late.pop(self.random.randrange(len(self.late)))
            before = self.controller.state(self.topic_id)
            self.controller.heartbeat(broker_id, epoch=epoch, offset=offset)
            self.note_election(before)

    def note_election(self, before: PartitionState | None) -> None:
        """After an election by log ends, the winner has all records that the last acting leader's ISR still has."""
        if before is None or before.isr or before.leader != -1:
            return
        after = self.controller.state(self.topic_id)
        if after.leader == -1:
            return
        self.elections += 1
        winner = self.brokers[after.leader]
        kept = set(winner.log)
        for member in self.acted[2]:
            missing = (set(self.brokers[member].log) & self.committed) - self.lost - kept
            assert not missing, f"{member} still has {missing}, {winner.broker_id} was elected"
        self.lost |= self.committed - kept

    def check_leader(self, leader: Broker) -> None:
        assert leader.view is not None
        if leader.view.leader_epoch == self.controller.state(self.topic_id).leader_epoch:
            missing = self.committed - self.lost - set(leader.log)
            assert not missing, f"{leader.broker_id} leads without {missing}"

    # --- faults

    def stop(self, broker: Broker, kind: str) -> None:
        if not broker.is_alive:
            return
        broker.is_alive = False
        broker.clean_epoch = -1
        if kind == "clean":
            broker.synced = len(broker.log)
            broker.clean_epoch = broker.broker_epoch
        elif kind == "power cut" and self.power_cuts:
            del broker.log[self.random.randint(broker.synced, len(broker.log)) :]
        broker.synced = min(broker.synced, len(broker.log))

    def restart(self, broker: Broker) -> None:
        if broker.is_alive:
            return
        response = self.controller.register(broker.broker_id, broker.incarnation + 1, broker.clean_epoch)
        if response.error_code:
            return
        broker.incarnation += 1
        broker.is_alive = True
        broker.broker_epoch = response.broker_epoch
        broker.applied = -1
        broker.view = None
        broker.positions = {}
        broker.wanted = ()
        broker.high_watermark = 0

    def step(self) -> None:
        broker = self.brokers[self.random.choice(sorted(self.brokers))]
        match self.random.choices(
            (
                "append",
                "replicate",
                "apply",
                "heartbeat",
                "alter",
                "sync",
                "time",
                "late",
                "stop",
                "restart",
                "all",
                "controller",
                "move",
            ),
            (40, 80, 50, 60, 20, 8, 20, 20, 3, 20, 1, 1, 20),
        )[0]:
            case "append":
                self.append(broker)
            case "replicate":
                self.replicate(broker)
            case "apply":
                self.apply(broker)
            case "heartbeat":
                self.heartbeat(broker)
            case "late" if broker.is_alive and self.random.random() < 0.5:
                self.late.append((broker.broker_id, broker.broker_epoch, broker.applied))
            case "late":
                self.deliver_late()
            case "alter":
                self.alter(broker)
            case "sync":
                broker.synced = len(broker.log)
            case "time":
                self.controller.now_ms += self.random.randint(1, SESSION_MS // 4)
                self.controller.expire()
            case "stop":
                self.stop(broker, self.random.choice(("clean", "kill", "power cut")))
            case "restart":
                self.restart(broker)
            case "all":
                for other in self.brokers.values():
                    self.stop(other, "power cut")
            case "controller":
                self.controller.restart()
            case "move":
                self.move()

    def move(self) -> None:
        """Elect another live ISR member, like an election of the preferred leader."""
        state, brokers = self.controller.state(self.topic_id), self.controller.image.brokers
        eligible = [member for member in state.isr if brokers[member].can_lead and member != state.leader]
        if eligible and state.leader != -1:
            self.moves += 1
            record = PartitionChangeRecord(0, self.topic_id, leader=self.random.choice(eligible))
            self.controller.run(Decision([record], None))

    def recover(self) -> None:
        """Restart all brokers. The partition must get a leader with all acknowledged records."""
        for _ in range(8):
            self.controller.now_ms += SESSION_MS // 2
            for broker in self.brokers.values():
                self.restart(broker)
                self.apply(broker)
                self.heartbeat(broker)
            self.controller.expire()
        state = self.controller.state(self.topic_id)
        assert state.leader != -1, "all brokers are running, but there is no leader"
        assert not state.last_known_elr, "the leader has proved itself"
        leader = self.brokers[state.leader]
        self.apply(leader)
        assert leader.leads
        assert self.controller.replayed() == self.controller.image


def run(seed: int, *, power_cuts: bool) -> ReplicationModel:
    model = ReplicationModel(seed, power_cuts=power_cuts)
    try:
        for _ in range(STEPS):
            model.step()
        model.recover()
    except AssertionError as error:
        raise AssertionError(f"seed {seed} (replay: run({seed}, power_cuts={power_cuts})): {error}") from error
    return model


@pytest.mark.parametrize("power_cuts", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_power_cuts_and_restarts_lose_no_acknowledged_record(block: int, *, power_cuts: bool) -> None:
    models = [run(block * 1000 + number, power_cuts=power_cuts) for number in range(25)]
    assert sum(len(model.committed) for model in models) > 100, "the model committed too few records"
    assert sum(model.elections for model in models) > 5, "too few elections by log ends"
    assert sum(model.moves for model in models) > 25, "too few leader moves"
    if not power_cuts:
        assert not any(model.lost for model in models)
