"""A controller without a node: appends decisions to a list, applies them and checks the invariants after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kipmesh import messages as m
from kipmesh.core import record_batch
from kipmesh.core.config import ControllerConfig
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionState

CLUSTER = "test-cluster"
SESSION_MS = 3000


def config(**values: Any) -> ControllerConfig:
    return ControllerConfig.parse(
        {
            "node.id": 1001,
            "cluster.id": CLUSTER,
            "controller.quorum.voters": "1001@127.0.0.1:19093",
            "metadata.log.dir": "unused",
            **{name.replace("_", "."): value for name, value in values.items()},
        }
    )


def check_image(image: MetadataImage) -> None:
    """Check the invariants of a metadata image."""
    leaderless: set[Any] = set()
    imbalanced: dict[int, set[Any]] = {}
    count = 0
    for topic_id, topic in image.topics.items():
        assert image.topic_names[topic.name] == topic_id
        for partition, state in topic.partitions.items():
            key = (topic_id, partition)
            count += 1
            assert set(state.isr) <= set(state.replicas), state
            assert len(set(state.isr)) == len(state.isr), state
            assert set(state.last_known_elr) <= set(state.replicas), state
            assert not set(state.last_known_elr) & set(state.isr), state
            if state.leader == r.NO_LEADER:
                assert state.last_isr, "no ISR member to wait for"
                leaderless.add(key)
            else:
                assert state.leader in state.isr, state
                leader = image.brokers.get(state.leader)
                assert leader is not None
                assert leader.can_lead, (state, leader)
            if state.leader != state.replicas[0]:
                imbalanced.setdefault(state.replicas[0], set()).add(key)
            for replica in state.replicas:
                assert key in image.partitions_of_broker(replica)
    assert set(image.leaderless) == leaderless
    assert {preferred: set(keys) for preferred, keys in image.imbalanced.items()} == imbalanced
    assert image.partition_count == count


class Controller:
    """Drives a MetadataController like the controller node."""

    def __init__(self, **values: Any) -> None:
        self.config = config(**values)
        self.batches: list[bytes] = []
        self.now_ms = 1_000_000
        self.epoch = 0
        self._ids = 0
        self.last_records: Sequence[r.Record] = ()
        self.restart()

    def restart(self) -> None:
        """Start a new controller on the same log."""
        self.image = MetadataImage()
        for batch in self.batches:
            self.image.replay(batch, MetadataDelta())
        self.epoch += 1
        self.core = MetadataController(self.config, self.image, self._new_topic_id)
        self.run(Decision(self.core.activate(self.now_ms), None))

    def _new_topic_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16, "big")

    @property
    def end(self) -> int:
        return self.image.offset + 1

    def run(self, decision: Decision[Any]) -> Any:
        self.last_records = decision.records
        if decision.records:
            epochs = self._epochs()
            pairs = [(None, r.encode_record(record)) for record in decision.records]
            batch = record_batch.build(pairs, base_offset=self.end, leader_epoch=self.epoch, timestamp_ms=self.now_ms)
            self.batches.append(batch)
            self.core.applied(batch)
            check_image(self.image)
            for key, (leader_epoch, partition_epoch) in self._epochs().items():
                before = epochs.get(key, (-1, -1))
                assert (leader_epoch, partition_epoch) >= before
                assert key not in epochs or partition_epoch in (before[1], before[1] + 1), "two changes in one decision"
        return decision.response

    def _epochs(self) -> dict[Any, tuple[int, int]]:
        return {
            (topic.topic_id, partition): (state.leader_epoch, state.partition_epoch)
            for topic in self.image.topics.values()
            for partition, state in topic.partitions.items()
        }

    def expire(self) -> list[int]:
        expired = self.core.brokers.expired(self.now_ms)
        for index in range(len(expired)):
            self.run(Decision(self.core.brokers.fence(expired[index:]), None))
        if expired:
            self.run(Decision(self.core.brokers.elect_pending(), None))
        return expired

    def pass_ms(self, duration_ms: int) -> list[int]:
        """Advance the clock and expire sessions at each deadline. Return the fenced brokers."""
        fenced: list[int] = []
        end_ms = self.now_ms + duration_ms
        while (deadline := self.core.sessions.next_deadline_ms()) is not None and deadline <= end_ms:
            self.now_ms = max(deadline, self.now_ms)
            fenced += self.expire()
        self.now_ms = end_ms
        return fenced

    def connected(self, broker_id: int, connection: int) -> None:
        """Send a heartbeat over a connection whose end is reported."""
        epoch = self.image.brokers[broker_id].broker_epoch
        request = m.BrokerHeartbeatRequest(broker_id, epoch, self.image.offset)
        self.run(self.core.heartbeat(request, self.now_ms, self.end, connection))

    def core_fence(self, broker_id: int) -> Decision[None]:
        return Decision(self.core.brokers.fence([broker_id]), None)

    def elect_pending(self) -> Decision[None]:
        return Decision(self.core.brokers.elect_pending(), None)

    def register(
        self,
        broker_id: int,
        incarnation: int = 1,
        previous: int = -1,
        *,
        rack: str | None = None,
        leads: bool = False,
        cluster_id: str = CLUSTER,
        log_dirs: Sequence[bytes] = (),
    ) -> m.BrokerRegistrationResponse:
        request = m.BrokerRegistrationRequest(
            broker_id,
            cluster_id,
            (broker_id * 1000 + incarnation).to_bytes(16, "big"),
            [m.Listener("MESH", "127.0.0.1", 9000 + broker_id)],
            [m.Feature("kipmesh.leader", 0, 1)] if leads else [],
            rack,
            log_dirs,
            previous,
        )
        response: m.BrokerRegistrationResponse = self.run(self.core.brokers.register(request, self.now_ms, self.end))
        return response

    def heartbeat(
        self,
        broker_id: int,
        *,
        epoch: int | None = None,
        offset: int | None = None,
        fence: bool = False,
        shut_down: bool = False,
        log_ends: Sequence[m.PartitionLogEnd] = (),
        offline_log_dirs: Sequence[bytes] = (),
    ) -> m.BrokerHeartbeatResponse:
        if epoch is None:
            epoch = self.image.brokers[broker_id].broker_epoch
        request = m.BrokerHeartbeatRequest(
            broker_id,
            epoch,
            self.image.offset if offset is None else offset,
            fence,
            shut_down,
            log_ends,
            offline_log_dirs,
        )
        response: m.BrokerHeartbeatResponse = self.run(self.core.heartbeat(request, self.now_ms, self.end))
        return response

    def join(self, broker_id: int, incarnation: int = 1, previous: int = -1, **values: Any) -> int:
        """Register a broker, unfence it and return its broker epoch."""
        response = self.register(broker_id, incarnation, previous, **values)
        assert response.error_code == 0, response
        assert not self.heartbeat(broker_id).is_fenced
        return response.broker_epoch

    def create(self, name: str, partitions: int = 1, replicas: int = -1, **configs: str) -> m.CreatableTopicResult:
        entries = [m.ConfigEntry(key.replace("_", "."), value) for key, value in configs.items()]
        return self.create_topics(m.CreatableTopic(name, partitions, replicas, configs=entries))[0]

    def create_topics(self, *topics: m.CreatableTopic, validate_only: bool = False) -> Sequence[m.CreatableTopicResult]:
        request = m.CreateTopicsRequest(topics, validate_only=validate_only)
        response: m.CreateTopicsResponse = self.run(self.core.create_topics(request))
        return response.topics

    def create_assigned(self, name: str, *replicas: Sequence[int], **configs: str) -> bytes:
        entries = [m.ConfigEntry(key.replace("_", "."), value) for key, value in configs.items()]
        assignments = [m.CreatableReplicaAssignment(index, brokers) for index, brokers in enumerate(replicas)]
        result = self.create_topics(m.CreatableTopic(name, assignments=assignments, configs=entries))[0]
        assert result.error_code == 0, result
        return result.topic_id

    def alter_isr(
        self, topic_id: bytes, partition: int, isr: Sequence[int], **values: Any
    ) -> m.AlterPartitionPartitionResponse:
        state = self.state(topic_id, partition)
        broker_id = values.pop("broker_id", state.leader)
        members = values.pop("members", None)
        if members is None:
            members = [m.IsrMember(i, self.image.brokers[i].broker_epoch) for i in isr]
        requested = m.AlterPartitionPartition(partition, state.leader_epoch, state.partition_epoch, members)._replace(
            **values
        )
        request = m.AlterPartitionRequest(
            broker_id, self.image.brokers[broker_id].broker_epoch, [m.AlterPartitionTopic(topic_id, [requested])]
        )
        response: m.AlterPartitionResponse = self.run(self.core.alter_partition(request))
        assert response.error_code == 0
        result: m.AlterPartitionPartitionResponse = response.topics[0].partitions[0]
        return result

    def state(self, topic_id: bytes, partition: int = 0) -> PartitionState:
        state = self.image.partition(topic_id, partition)
        assert state is not None
        return state

    def replayed(self) -> MetadataImage:
        image = MetadataImage()
        image.replay(b"".join(self.batches), MetadataDelta())
        return image
