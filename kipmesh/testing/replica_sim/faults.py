"""What goes wrong in a run, and when: drawn from the seed.

Faults come about every other second of virtual time, rather at leaders than at others, until the run's last part: then
everything is healed, and all partitions must find together again. A disk is replaced only where another live member of
every ISR has what is lost, so that what the checker allows to be lost stays rare.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kipmesh.messages import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from kipmesh.rpc.client import TransportError
from kipmesh.testing.replica_sim.clients import TOPIC
from kipmesh.testing.replica_sim.quorum import CONTROLLER_IDS

if TYPE_CHECKING:
    from kipmesh.testing.replica_sim.broker import SimBroker
    from kipmesh.testing.replica_sim.checker import Seen
    from kipmesh.testing.replica_sim.world import World

_SPARE_BYTES = 400
CRASH_POINTS = ("appended", "truncated", "leader", "follower", "high watermark moved")
"""What a process may have just done when it crashes."""


class Faults:
    """See the module."""

    def __init__(self, world: World, rng: Random, every_ms: float, until_ms: float, only: tuple[str, ...]) -> None:
        self.world = world
        self.rng = rng
        self.every_ms = every_ms
        self.until_ms = until_ms
        self._points: dict[int, str] = {}
        self._kinds = {
            self.kill: 4,
            self.cut_power: 4,
            self.cut_power_of_all: 1,
            self.kill_all: 1,
            self.pause: 4,
            self.isolate: 4,
            self.isolate_from_controllers: 3,
            self.split: 3,
            self.block_one_way: 3,
            self.cut_link: 4,
            self.lose_messages: 3,
            self.slow_network: 3,
            self.slow_disks: 2,
            self.fill_disk: 2,
            self.fail_disk: 2,
            self.wipe: 2,
            self.shut_down: 3,
            self.crash_at_point: 5,
            self.controller_fails: 3,
            self.controller_pauses: 3,
            self.controllers_away: 2,
            self.delete_records: 2,
        }
        if only:
            self._kinds = {kind: weight for kind, weight in self._kinds.items() if kind.__name__ in only}

    def begin(self) -> None:
        """Plan the first one, and the end of all."""
        self._later(self.rng.expovariate(1 / self.every_ms) + 1200, self._next)
        self.world.scheduler.after(self.until_ms, self.heal)

    @property
    def is_over(self) -> bool:
        """Whether there are no more faults."""
        return self.world.scheduler.now_ms >= self.until_ms

    def _later(self, delay_ms: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if not self.is_over:
                action()

        self.world.scheduler.after(delay_ms, act)

    def _next(self) -> None:
        kinds = list(self._kinds)
        if not kinds:
            return
        kind = self.rng.choices(kinds, [self._kinds[one] for one in kinds])[0]
        if kind():
            self.world.counts["faults"] += 1
            self.world.counts[f"fault {kind.__name__}"] += 1
        self._later(self.rng.expovariate(1 / self.every_ms), self._next)

    def _running(self) -> list[SimBroker]:
        return [one for one in self.world.brokers.values() if one.parts is not None and not one.is_paused]

    def _victim(self) -> SimBroker | None:
        running = self._running()
        image, topic_id = self.world.quorum.image, self.world.topic_id
        topic = image.topics.get(topic_id)
        led = {state.leader for state in topic.partitions.values()} if topic is not None else set()
        leaders = [one for one in running if one.node_id in led]
        if leaders and self.rng.random() < 0.6:
            return self.rng.choice(leaders)
        return self.rng.choice(running) if running else None

    def heal(self) -> None:
        """The last faults end."""
        world = self.world
        world.network.heal()
        world.flush_max_ms, world.quorum.commit_max_ms = 2.0, 5.0
        self._points.clear()
        for broker in world.brokers.values():
            broker.fs.capacity_bytes = None
            broker.fs.faults.clear()
            if broker.process is not None:
                broker.process.loop.go_on()
            broker.boot()
        for node in world.quorum.nodes.values():
            if node.process is None:
                node.boot()
            else:
                node.process.loop.go_on()
        if world.quorum.leadership is None:
            world.quorum.elect(self.rng.choice(CONTROLLER_IDS))

    def noticed(self, broker: SimBroker, before: Seen | None, now: Seen) -> None:
        """A replica changed: its process may be due to crash for it."""
        point = self._points.get(broker.node_id)
        if not point or before is None or self.is_over:
            return
        passed = {
            "appended": now.log_end > before.log_end,
            "truncated": now.log_end < before.log_end,
            "leader": now.is_leader and now.leader_epoch > before.leader_epoch,
            "follower": not now.is_leader and now.leader_epoch > before.leader_epoch,
            "high watermark moved": now.high_watermark > before.high_watermark,
        }
        if passed[point]:
            del self._points[broker.node_id]
            power = self.rng.random() < 0.5
            self.world.counts[f"crash at {point}"] += 1
            self.world.scheduler.after(0, lambda: self._crash(broker, power=power))

    def _crash(self, broker: SimBroker, *, power: bool) -> None:
        if broker.parts is not None and not self.is_over:
            self.world.counts["crashes"] += 1
            self.world.counts["power cuts"] += power
            broker.stop(power=power, restart_ms=self.rng.choice((30, 300, 2500)) * self.rng.uniform(0.5, 1.5))

    # -- kinds; each says whether it did anything

    def kill(self) -> bool:
        """End a process."""
        broker = self._victim()
        if broker is not None:
            self._crash(broker, power=False)
        return broker is not None

    def cut_power(self) -> bool:
        """End a process, and its disk forgets."""
        broker = self._victim()
        if broker is not None:
            self._crash(broker, power=True)
        return broker is not None

    def _end_all(self, *, power: bool) -> bool:
        for broker in self.world.brokers.values():
            self._crash(broker, power=power)
        return True

    def cut_power_of_all(self) -> bool:
        """All at once, and back one after the other."""
        return self._end_all(power=True)

    def kill_all(self) -> bool:
        """All at once; what they had written stays."""
        return self._end_all(power=False)

    def pause(self) -> bool:
        """Stop a process for a while, as SIGSTOP does."""
        broker = self._victim()
        process = broker.process if broker is not None else None
        if process is None:
            return False
        process.loop.is_stopped = True
        self._later(self.rng.uniform(100, 4000), process.loop.go_on)
        return True

    def isolate(self) -> bool:
        """Nothing reaches or leaves a broker."""
        broker = self._victim()
        return broker is not None and self._cut([broker.node_id], self._others([broker.node_id]), both=True)

    def isolate_from_controllers(self) -> bool:
        """A broker sees the other brokers only; in one direction sometimes."""
        broker = self._victim()
        if broker is None:
            return False
        return self._cut([broker.node_id], list(CONTROLLER_IDS), both=self.rng.random() < 0.6)

    def _others(self, group: list[int]) -> list[int]:
        return [one for one in (*self.world.brokers, *CONTROLLER_IDS, *self.world.client_ids) if one not in group]

    def split(self) -> bool:
        """Two groups of brokers that do not see each other; one of them sees the controllers."""
        ids = list(self.world.brokers)
        group = self.rng.sample(ids, self.rng.randint(1, len(ids) - 1))
        others = [one for one in ids if one not in group]
        return self._cut(group, [*others, *CONTROLLER_IDS], both=True)

    def block_one_way(self) -> bool:
        """A broker hears nobody, or nobody hears it."""
        broker = self._victim()
        return broker is not None and self._cut([broker.node_id], self._others([broker.node_id]), both=False)

    def cut_link(self) -> bool:
        """Two brokers do not see each other, everybody else sees both: the ISR shrinks by lag."""
        one, other = self.rng.sample(list(self.world.brokers), 2)
        return self._cut([one], [other], both=self.rng.random() < 0.7)

    def _cut(self, group: list[int], others: list[int], *, both: bool) -> bool:
        outward = {(one, other) for one in group for other in others}
        inward = {(other, one) for one, other in outward}
        links = outward | inward if both else self.rng.choice((outward, inward))
        network = self.world.network
        network.blocked |= links
        self._later(self.rng.uniform(300, 5000), lambda: network.blocked.difference_update(links))
        return bool(links)

    def lose_messages(self) -> bool:
        """Some messages get lost, some come twice."""
        network = self.world.network
        network.loss, network.duplication = self.rng.uniform(0.02, 0.3), self.rng.uniform(0, 0.3)

        def end() -> None:
            network.loss = network.duplication = 0.0

        self._later(self.rng.uniform(300, 3000), end)
        return True

    def slow_network(self) -> bool:
        """Messages take long, and overtake each other."""
        world = self.world
        world.network.delay_max_ms = self.rng.uniform(20, 600)
        world.quorum.commit_max_ms = self.rng.uniform(5, 300)

        def end() -> None:
            world.network.delay_max_ms, world.quorum.commit_max_ms = 4.0, 5.0

        self._later(self.rng.uniform(300, 3000), end)
        return True

    def slow_disks(self) -> bool:
        """What the disks' threads do takes long."""
        world = self.world
        world.flush_max_ms = self.rng.uniform(10, 500)

        def end() -> None:
            world.flush_max_ms = 2.0

        self._later(self.rng.uniform(300, 3000), end)
        return True

    def fill_disk(self) -> bool:
        """No room for a while."""
        broker = self._victim()
        if broker is None:
            return False
        fs = broker.fs
        fs.capacity_bytes = fs.used_bytes + self.rng.randint(0, _SPARE_BYTES)

        def end() -> None:
            fs.capacity_bytes = None

        self._later(self.rng.uniform(200, 3000), end)
        return True

    def fail_disk(self) -> bool:
        """A write, torn or not, or a sync fails; the process ends with it."""
        broker = self._victim()
        if broker is None:
            return False
        operation = self.rng.choice(("write", "sync", "sync_dir", "rename"))
        torn = self.rng.randint(0, 60) if operation == "write" else 0
        broker.fs.fail(operation, errno.EIO, skip=self.rng.randint(0, 3), torn_bytes=torn)
        return True

    def wipe(self) -> bool:
        """Replace a disk by an empty one."""
        spare = [one for one in self._running() if self._may_wipe(one)]
        if not spare:
            return False
        self.world.counts["wipes"] += 1
        self.rng.choice(spare).wipe()
        return True

    def _may_wipe(self, broker: SimBroker) -> bool:
        image, running = self.world.quorum.image, {one.node_id for one in self._running()}
        topic = image.topics.get(self.world.topic_id)
        states = topic.partitions.values() if topic is not None else ()
        others = running - {broker.node_id}
        return all(
            state.leader >= 0 and (broker.node_id not in state.last_isr or others & set(state.isr)) for state in states
        )

    def shut_down(self) -> bool:
        """A broker is stopped well, and comes back."""
        broker = self._victim()
        if broker is not None:
            broker.shut_down()
        return broker is not None

    def crash_at_point(self) -> bool:
        """End processes when they next pass some point."""
        for broker in self._running():
            if self.rng.random() < 0.6:
                self._points[broker.node_id] = self.rng.choice(CRASH_POINTS)
        return True

    def controller_fails(self) -> bool:
        """The active controller's process ends; another leads, and the process comes back."""
        quorum = self.world.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None:
            return False
        quorum.depose()
        node.stop()
        self._elect_later(self.rng.uniform(100, 1500))
        self._later(self.rng.uniform(200, 3000), lambda: node.boot() if node.process is None else None)
        return True

    def controller_pauses(self) -> bool:
        """The active controller stands still: not long, or another leads meanwhile."""
        quorum = self.world.quorum
        node = quorum.nodes.get(quorum.leader_id)
        if node is None or node.process is None or node.process.loop.is_stopped:
            return False
        loop = node.process.loop
        loop.is_stopped = True
        pause_ms = self.rng.uniform(100, 3000)
        if pause_ms > 700:
            leadership = quorum.leadership
            self._later(600, lambda: quorum.depose() if quorum.leadership is leadership else None)
            self._elect_later(self.rng.uniform(700, 1500))
        self._later(pause_ms, loop.go_on)
        return True

    def controllers_away(self) -> bool:
        """The quorum has no leader for a while."""
        if self.world.quorum.leadership is None:
            return False
        self.world.quorum.depose()
        self._elect_later(self.rng.uniform(300, 4000))
        return True

    def _elect_later(self, delay_ms: float) -> None:
        def elect() -> None:
            quorum = self.world.quorum
            if quorum.leadership is None:
                quorum.elect(self.rng.choice(CONTROLLER_IDS))
            if quorum.leadership is None:
                self._elect_later(200)

        self._later(delay_ms, elect)

    def delete_records(self) -> bool:
        """Somebody raises the log start of a partition."""
        world = self.world
        partition = self.rng.randrange(world.partitions)
        state = world.quorum.image.partition(world.topic_id, partition)
        truth = world.checker.truths[partition]
        if state is None or state.leader < 0 or truth.end < 4:
            return False
        offset = self.rng.randint(1, truth.end * 2 // 3)
        truth.log_start = max(truth.log_start, offset)
        asked = DeleteRecordsTopic(TOPIC, [DeleteRecordsPartition(partition, offset)])
        client, leader = world.producers[0], state.leader

        async def ask() -> None:
            try:
                await client.call(leader, "DeleteRecords", DeleteRecordsRequest([asked], 1000), 1.5)
            except TransportError:
                world.counts["log starts not answered"] += 1

        client.loop.deliver(lambda: client.loop.create_task(ask()))
        return True
