"""What goes wrong in a run, and when: drawn from the seed.

Faults come about every other second of virtual time, rather at leaders than at others, until the run's last part: then
everything is healed, and all partitions must find together again. A disk is replaced only where another live member of
every ISR has what is lost, so that what the checker allows to be lost stays rare.
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
    """See the module."""

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
        "controller_fails": 3,
        "controller_pauses": 3,
        "controllers_away": 2,
        "delete_records": 2,
    }
    FIRST_AFTER_MS = 1200
    LEADER_SHARE = 0.6
    PAUSE_MS = (100, 4000)
    CUT_MS = (300, 5000)
    LASTING_MS = (300, 3000)
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
        super().__init__(quorum.engine, brokers, until_ms, only)
        self.clients = clients
        self.quorum = quorum
        self.checker = checker

    def running(self) -> list[SimBroker]:
        """See FaultPlan."""
        return [one for one in self.nodes.values() if one.parts is not None and not one.is_paused]

    def leaders(self, running: list[SimBroker]) -> list[SimBroker]:
        """See FaultPlan."""
        led = {state.leader for state in self._states()}
        return [one for one in running if one.node_id in led]

    def _states(self) -> list[PartitionState]:
        topic = self.checker.image.topics.get(self.quorum.settings.topic_id)
        return list(topic.partitions.values()) if topic is not None else []

    def others(self, group: Collection[int]) -> list[int]:
        """See FaultPlan."""
        ids = (*self.nodes, *CONTROLLER_IDS, *(client.node_id for client in self.clients))
        return [one for one in ids if one not in group]

    def crash(self, node: SimBroker, *, power: bool) -> None:
        """See FaultPlan."""
        if not self.is_over:
            node.crash(power=power)

    def may_wipe(self, node: SimBroker) -> bool:
        """See FaultPlan."""
        others = {one.node_id for one in self.running()} - {node.node_id}
        return all(
            state.leader >= 0 and (node.node_id not in state.last_isr or others & set(state.isr))
            for state in self._states()
        )

    def heal(self) -> None:
        """See FaultPlan."""
        super().heal()
        for broker in self.nodes.values():
            broker.crash_point = ""
        for broker in self.nodes.values():
            if broker.process is not None:
                broker.process.loop.go_on()
            broker.boot()
        for node in self.quorum.nodes.values():
            if node.process is None:
                node.boot()
            else:
                node.process.loop.go_on()
        if self.quorum.leadership is None:
            self.quorum.elect(self.rng.choice(CONTROLLER_IDS))

    # -- kinds

    def cut_power_of_all(self) -> bool:
        """All at once, and back one after the other."""
        return self._end_all(power=True)

    def kill_all(self) -> bool:
        """All at once; what they had written stays."""
        return self._end_all(power=False)

    def _end_all(self, *, power: bool) -> bool:
        for broker in self.nodes.values():
            self.crash(broker, power=power)
        return True

    def isolate_from_controllers(self) -> bool:
        """A broker sees the other brokers only; in one direction sometimes."""
        broker = self.victim()
        if broker is None:
            return False
        return self.cut([broker.node_id], CONTROLLER_IDS, both=self.rng.random() < 0.6)

    def split(self) -> bool:
        """Two groups of brokers that do not see each other; one of them sees the controllers."""
        ids = list(self.nodes)
        group = self.rng.sample(ids, self.rng.randint(1, len(ids) - 1))
        others = [one for one in ids if one not in group]
        return self.cut(group, [*others, *CONTROLLER_IDS], both=True)

    def cut_link(self) -> bool:
        """Two brokers do not see each other, everybody else sees both: the ISR shrinks by lag."""
        one, other = self.rng.sample(list(self.nodes), 2)
        return self.cut([one], [other], both=self.rng.random() < 0.7)

    def slow_network(self) -> bool:
        """Messages take long, and overtake each other."""
        return self.change(delay_max_ms=self.rng.uniform(20, 600), commit_max_ms=self.rng.uniform(5, 300))

    def slow_disks(self) -> bool:
        """What the disks' threads do takes long."""
        return self.change(disk_work_max_ms=self.rng.uniform(10, 500))

    def shut_down(self) -> bool:
        """A broker is stopped well, and comes back."""
        broker = self.victim()
        if broker is not None:
            broker.shut_down()
        return broker is not None

    def crash_at_point(self) -> bool:
        """End processes when they next pass some point."""
        for broker in self.running():
            if self.rng.random() < 0.6:
                broker.crash_point = self.rng.choice(CRASH_POINTS)
        return True

    def controller_fails(self) -> bool:
        """The active controller's process ends; another leads, and the process comes back."""
        quorum = self.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None:
            return False
        quorum.depose()
        node.stop()
        self._elect_later(self.rng.uniform(100, 1500))
        self.later(self.rng.uniform(200, 3000), lambda: node.boot() if node.process is None else None)
        return True

    def controller_pauses(self) -> bool:
        """The active controller stands still: not long, or another leads meanwhile."""
        quorum = self.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None or node.process is None or node.process.loop.is_stopped:
            return False
        loop = node.process.loop
        loop.is_stopped = True
        pause_ms = self.rng.uniform(100, 3000)
        if pause_ms > 700:
            leadership = quorum.leadership
            self.later(600, lambda: quorum.depose() if quorum.leadership is leadership else None)
            self._elect_later(self.rng.uniform(700, 1500))
        self.later(pause_ms, loop.go_on)
        return True

    def controllers_away(self) -> bool:
        """The quorum has no leader for a while."""
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
        """Somebody raises the log start of a partition."""
        partition = self.rng.randrange(self.quorum.settings.partitions)
        state, truth = self.checker.state(partition), self.checker.truths[partition]
        if state is None or state.leader < 0 or truth.end < 4:
            return False
        offset = self.rng.randint(1, truth.end * 2 // 3)
        truth.log_start = max(truth.log_start, offset)
        asked = DeleteRecordsTopic(TOPIC, [DeleteRecordsPartition(partition, offset)])
        client, leader = self.clients[0], state.leader

        async def ask() -> None:
            try:
                await client.call(leader, "DeleteRecords", DeleteRecordsRequest([asked], 1000), 1.5)
            except TransportError:
                self.engine.counts["log starts not answered"] += 1

        client.spawn(ask())
        return True
