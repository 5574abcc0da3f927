"""Faults of brokers and controllers, drawn from the seed.

A disk is replaced only where another live member of every ISR has its records, so that losses that the checker must
tolerate stay rare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from kipmesh.core.metadata.states import PartitionState
from kipmesh.messages import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from kipmesh.transport.grpc.client import TransportError
from simulation.faults import FaultPlan
from simulation.replicas.broker import CRASH_POINTS, SimBroker
from simulation.replicas.checker import Checker
from simulation.replicas.clients import Client
from simulation.replicas.quorum import Quorum
from simulation.replicas.settings import CONTROLLER_IDS, TOPIC


class Faults(FaultPlan[SimBroker]):
    """A `FaultPlan` for brokers and controllers. See the module docstring."""

    KINDS: ClassVar = {
        "kill": 4,
        "cut_power": 4,
        "cut_power_of_all": 1,
        "kill_all": 1,
        "pause": 4,
        "isolate": 4,
        "isolate_from_controllers": 3,
        "split": 3,
        "block_one_way": 3,
        "cut_link": 4,
        "lose_messages": 3,
        "slow_network": 3,
        "slow_disks": 2,
        "fill_disk": 2,
        "fail_disk": 2,
        "wipe": 2,
        "shut_down": 3,
        "crash_at_point": 5,
        "crash_controller": 3,
        "pause_controller": 3,
        "depose_controller": 2,
        "delete_records": 2,
    }
    FIRST_AFTER_MS = 1200
    LEADER_SHARE = 0.6
    PAUSE_MS = (100, 4000)
    CUT_MS = LINK_CUT_MS = (300, 5000)
    LINK_CUT_BOTH_SHARE = 0.7
    LASTING_MS = (300, 3000)
    SLOW_NETWORK: ClassVar = {"delay_max_ms": (20, 600), "commit_max_ms": (5, 300)}
    SPLIT_WITH = CONTROLLER_IDS
    FULL_DISK_MS = (200, 3000)
    SPARE_BYTES_MAX = 400
    LOSS_MAX = 0.3

    def __init__(
        self,
        brokers: Mapping[int, SimBroker],
        clients: Sequence[Client],
        quorum: Quorum,
        checker: Checker,
        until_ms: float,
        only: Collection[str],
    ) -> None:
        node_ids = (*brokers, *CONTROLLER_IDS, *(client.node_id for client in clients))
        super().__init__(quorum.engine, brokers, node_ids, until_ms, only)
        self.clients = clients
        self.quorum = quorum
        self.checker = checker

    def leaders(self, running: list[SimBroker]) -> list[SimBroker]:
        """Return the running brokers that lead a partition according to the committed metadata."""
        leader_ids = {state.leader for state in self._states()}
        return [broker for broker in running if broker.node_id in leader_ids]

    def _states(self) -> list[PartitionState]:
        topic = self.checker.image.topics.get(self.quorum.settings.topic_id)
        return list(topic.partitions.values()) if topic is not None else []

    def crash(self, node: SimBroker, *, power: bool) -> None:
        """Kill the process of a broker; it restarts later. Does nothing once the faults have ended.

        With `power`, the disk also loses unsynced data.
        """
        if not self.is_over:
            node.crash(power=power)

    def may_wipe(self, node: SimBroker) -> bool:
        """Return whether all partitions have leaders, and each ISR with this broker also has another running member."""
        others = {broker.node_id for broker in self.running()} - {node.node_id}
        return all(
            state.leader >= 0 and (node.node_id not in state.last_isr or others & set(state.isr))
            for state in self._states()
        )

    def heal(self) -> None:
        """End all faults, restart or resume all processes, and elect a controller if there is none."""
        super().heal()
        for broker in self.nodes.values():
            if broker.process is not None:
                broker.process.loop.resume()
            broker.boot()
        for node in self.quorum.nodes.values():
            if node.process is None:
                node.boot()
            else:
                node.process.loop.resume()
        if self.quorum.leadership is None:
            self.quorum.elect(self.rng.choice(CONTROLLER_IDS))

    # -- kinds

    def cut_power_of_all(self) -> bool:
        """Cut the power of all brokers at the same time. They restart at random times. Always returns True."""
        return self._end_all(power=True)

    def kill_all(self) -> bool:
        """Kill all brokers at the same time. Their written data remains. Always returns True."""
        return self._end_all(power=False)

    def _end_all(self, *, power: bool) -> bool:
        for broker in self.nodes.values():
            self.crash(broker, power=power)
        return True

    def isolate_from_controllers(self) -> bool:
        """Cut the links between a random broker and the controllers temporarily, sometimes only in one direction.

        Returns False if no broker runs.
        """
        broker = self.victim()
        if broker is None:
            return False
        return self.cut([broker.node_id], CONTROLLER_IDS, both=self.rng.random() < 0.6)

    def slow_disks(self) -> bool:
        """Slow down the disk threads of all brokers temporarily. Always returns True."""
        return self.change(disk_work_max_ms=self.rng.uniform(10, 500))

    def shut_down(self) -> bool:
        """Stop a random broker cleanly. It restarts later. Returns False if no broker runs."""
        broker = self.victim()
        if broker is not None:
            broker.shut_down()
        return broker is not None

    def crash_at_point(self) -> bool:
        """Make random brokers crash the next time they pass a random crash point. Always returns True."""
        for broker in self.running():
            if self.rng.random() < 0.6:
                broker.crash_point = self.rng.choice(CRASH_POINTS)
        return True

    def crash_controller(self) -> bool:
        """Kill the active controller. Another one is elected, and the process restarts later.

        Returns False if no controller is active.
        """
        quorum = self.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None:
            return False
        quorum.depose()
        node.stop()
        self._elect_later(self.rng.uniform(100, 1500))
        self.later(self.rng.uniform(200, 3000), lambda: node.boot() if node.process is None else None)
        return True

    def pause_controller(self) -> bool:
        """Pause the active controller. During a long pause another one is elected.

        Returns False if no controller is active, or it is already paused.
        """
        quorum = self.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None or node.process is None or node.process.loop.is_paused:
            return False
        loop = node.process.loop
        loop.is_paused = True
        pause_ms = self.rng.uniform(100, 3000)
        if pause_ms > 700:
            leadership = quorum.leadership
            self.later(600, lambda: quorum.depose() if quorum.leadership is leadership else None)
            self._elect_later(self.rng.uniform(700, 1500))
        self.later(pause_ms, loop.resume)
        return True

    def depose_controller(self) -> bool:
        """Temporarily leave the quorum without a leader. Returns False if it already has none."""
        if self.quorum.leadership is None:
            return False
        self.quorum.depose()
        self._elect_later(self.rng.uniform(300, 4000))
        return True

    def _elect_later(self, delay_ms: float) -> None:
        def elect() -> None:
            quorum = self.quorum
            if quorum.leadership is None:
                quorum.elect(self.rng.choice(CONTROLLER_IDS))
            if quorum.leadership is None:
                self._elect_later(200)

        self.later(delay_ms, elect)

    def delete_records(self) -> bool:
        """Raise the log start of a random partition with a DeleteRecords request.

        Returns False if the partition has no leader, or fewer than four committed records.
        """
        partition = self.rng.randrange(self.quorum.settings.partitions)
        state, committed = self.checker.state(partition), self.checker.committed[partition]
        if state is None or state.leader < 0 or committed.end < 4:
            return False
        offset = self.rng.randint(1, committed.end * 2 // 3)
        committed.log_start = max(committed.log_start, offset)
        topic = DeleteRecordsTopic(TOPIC, [DeleteRecordsPartition(partition, offset)])
        client, leader = self.clients[0], state.leader

        async def send() -> None:
            try:
                await client.call(leader, "DeleteRecords", DeleteRecordsRequest([topic], 1000), 1.5)
            except TransportError:
                self.engine.counts["DeleteRecords without response"] += 1

        client.spawn(send())
        return True
