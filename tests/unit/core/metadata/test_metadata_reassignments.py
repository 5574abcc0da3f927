"""Reassignment of replicas (KIP-455). A removing replica stays until the targets have all records."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.metadata.reassignments import original_replicas, target_replicas
from kipmesh.messages import proto
from kipmesh.messages.kafka import MalformedError
from tests.unit.core.metadata.metadata_support import Controller
from tests.unit.core.metadata.test_metadata_invariants import BROKER, NAME, ControllerMachine
from tests.unit.core.metadata.test_metadata_replication_safety import Broker, ReplicationModel

INVALID = ErrorCode.INVALID_REPLICA_ASSIGNMENT


@pytest.fixture
def controller() -> Controller:
    result = Controller()
    for broker in range(1, 6):
        result.join(broker, rack=f"rack-{broker % 3}", leads=broker in (1, 4))
    return result


def reassign(controller: Controller, *wanted: Sequence[int] | None, name: str = "t", first: int = 0) -> list[int]:
    """Reassign partitions from `first` on (None cancels) and return their error codes."""
    requested = [
        m.ReassignablePartition(index, None if replicas is None else tuple(replicas))
        for index, replicas in enumerate(wanted, first)
    ]
    request = m.AlterPartitionReassignmentsRequest(1000, [m.ReassignableTopic(name, requested)])
    response = controller.run(controller.core.alter_partition_reassignments(request))
    assert not response.error_code
    (topic,) = response.responses
    assert [result.partition_index for result in topic.partitions] == [p.partition_index for p in requested]
    assert all(bool(result.error_message) == bool(result.error_code) for result in topic.partitions)
    return [result.error_code for result in topic.partitions]


def moving(state: PartitionState) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    return state.replicas, state.adding_replicas, state.removing_replicas, state.isr


def listed(controller: Controller, *topics: m.ListPartitionReassignmentsTopics) -> dict[str, list[int]]:
    request = m.ListPartitionReassignmentsRequest(1000, topics or None)
    response = controller.run(controller.core.list_partition_reassignments(request))
    return {topic.name: [partition.partition_index for partition in topic.partitions] for topic in response.topics}


def test_reassignment_moves_replica_and_leader(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3), (1, 2, 3))
    assert reassign(controller, (4, 2, 3)) == [0]
    state = controller.state(topic)
    assert moving(state) == ((4, 2, 3, 1), (4,), (1,), (1, 2, 3))
    assert (state.leader, state.leader_epoch, state.partition_epoch) == (1, 0, 1)
    assert len(state.directories) == 4
    assert listed(controller) == {"t": [0]}
    assert reassign(controller, (4, 2, 3)) == [0]
    assert not controller.last_records
    # All targets are in sync: the leader's ISR change completes the reassignment and removes the leader.
    result = controller.alter_isr(topic, 0, [1, 2, 3, 4])
    assert (result.error_code, result.leader_id, result.leader_epoch) == (ErrorCode.NEW_LEADER_ELECTED, -1, -1)
    assert len(controller.last_records) == 1
    state = controller.state(topic)
    assert moving(state) == ((4, 2, 3), (), (), (2, 3, 4))
    assert (state.leader, state.leader_epoch, state.partition_epoch) == (4, 1, 2)
    assert len(state.directories) == 3
    assert listed(controller) == {}
    assert controller.replayed() == controller.image


def test_reassignment_completion_increments_epoch_of_remaining_leader(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    reassign(controller, (1, 4, 2))
    result = controller.alter_isr(topic, 0, [1, 2, 4])
    assert (result.error_code, result.leader_id, result.leader_epoch, result.isr) == (0, 1, 1, (1, 2, 4))
    assert moving(controller.state(topic)) == ((1, 4, 2), (), (), (1, 2, 4))


def test_reassignment_completes_when_all_targets_are_in_sync(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    reassign(controller, (4, 5))
    assert controller.alter_isr(topic, 0, [1, 2, 3, 4]).error_code == 0
    assert moving(controller.state(topic)) == ((4, 5, 1, 2, 3), (4, 5), (1, 2, 3), (1, 2, 3, 4))
    assert controller.alter_isr(topic, 0, [1, 4, 5]).error_code == ErrorCode.NEW_LEADER_ELECTED
    assert moving(controller.state(topic)) == ((4, 5), (), (), (4, 5))


def test_reassignment_without_new_replicas_completes_immediately(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3), (1, 2, 3), (1, 2, 3))
    assert reassign(controller, (3, 2, 1), (2, 3), (1, 2, 3)) == [0, 0, 0]
    assert len(controller.last_records) == 2
    order, fewer, same = (controller.state(topic, index) for index in range(3))
    assert moving(order)[:3] == ((3, 2, 1), (), ())
    assert (order.leader, order.leader_epoch) == (1, 0)
    assert moving(fewer) == ((2, 3), (), (), (2, 3))
    assert (fewer.leader, fewer.leader_epoch) == (2, 1)
    assert same.partition_epoch == 0


def test_second_reassignment_keeps_original_replicas(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    reassign(controller, (4, 2, 3))
    controller.alter_isr(topic, 0, [1, 2, 3])
    assert reassign(controller, (2, 3, 5)) == [0]
    assert moving(controller.state(topic)) == ((2, 3, 5, 1), (5,), (1,), (1, 2, 3))
    assert reassign(controller, None) == [0]
    assert moving(controller.state(topic)) == ((2, 3, 1), (), (), (1, 2, 3))


def test_cancelling_restores_original_replicas(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    assert reassign(controller, None) == [ErrorCode.NO_REASSIGNMENT_IN_PROGRESS]
    reassign(controller, (4, 5, 1))
    controller.alter_isr(topic, 0, [1, 2, 4])
    before = controller.state(topic)
    assert reassign(controller, None) == [0]
    state = controller.state(topic)
    assert moving(state) == ((1, 2, 3), (), (), (1, 2))
    assert (state.leader, state.leader_epoch) == (1, before.leader_epoch + 1)
    assert reassign(controller, None) == [ErrorCode.NO_REASSIGNMENT_IN_PROGRESS]


def test_cancelling_moves_leadership_from_adding_replica(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2))
    reassign(controller, (4, 5))
    controller.alter_isr(topic, 0, [1, 2, 4])
    controller.run(controller.core_fence(1))
    assert controller.state(topic).leader == 4
    # The new leader has not proved itself since the controller fenced broker 1.
    assert reassign(controller, None) == [INVALID]
    controller.heartbeat(4)
    assert reassign(controller, None) == [0]
    state = controller.state(topic)
    assert moving(state) == ((1, 2), (), (), (2,))
    assert state.leader == 2


@pytest.mark.parametrize("unclean", [False, True])
def test_cancelling_with_only_adding_replicas_in_sync_needs_unclean_election(
    controller: Controller, *, unclean: bool
) -> None:
    topic = controller.create_assigned("t", (1, 2), unclean_leader_election_enable=str(unclean).lower())
    reassign(controller, (4, 5))
    controller.alter_isr(topic, 0, [1, 4])
    controller.run(controller.core_fence(1))
    controller.heartbeat(4)
    assert controller.state(topic).isr == (4,)
    assert reassign(controller, None) == [0 if unclean else INVALID]
    state = controller.state(topic)
    if unclean:
        assert (state.replicas, state.isr, state.leader, state.leader_recovery_state) == ((1, 2), (2,), 2, 1)
    else:
        assert (state.replicas, state.isr, state.leader) == ((4, 5, 1, 2), (4,), 4)


def test_reassignment_completion_waits_for_proven_leader(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    controller.run(controller.core_fence(3))
    assert controller.state(topic).last_known_elr == (3,)
    assert reassign(controller, (1, 2)) == [0]
    # After a power cut, broker 3 might have the longest log: the others are not proven to be alive.
    assert moving(controller.state(topic)) == ((1, 2, 3), (), (3,), (1, 2))
    controller.heartbeat(1)
    assert controller.state(topic).last_known_elr == ()
    controller.heartbeat(2)
    assert moving(controller.state(topic)) == ((1, 2), (), (), (1, 2))
    assert controller.state(topic).leader == 1


def test_new_controller_completes_running_reassignment(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    controller.run(controller.core_fence(3))
    reassign(controller, (1, 2))
    controller.heartbeat(1)
    controller.restart()
    assert listed(controller) == {"t": [0]}
    controller.heartbeat(2)
    assert controller.state(topic).replicas == (1, 2)


def test_later_heartbeat_retries_failed_reassignment_completion(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    controller.run(controller.core_fence(3))
    reassign(controller, (1, 2))
    controller.heartbeat(1)
    controller.restart()
    request = m.BrokerHeartbeatRequest(2, controller.image.brokers[2].broker_epoch, controller.image.offset)
    assert controller.core.heartbeat(request, controller.now_ms, controller.end).records  # the append fails
    controller.heartbeat(2)
    assert controller.state(topic).replicas == (1, 2)
    controller.heartbeat(2)
    assert controller.last_records == []


def test_reassignment_does_not_wait_for_fenced_removing_replica(controller: Controller) -> None:
    topic = controller.create_assigned("t", (1, 2, 3))
    controller.run(controller.core_fence(3))
    controller.heartbeat(1)
    reassign(controller, (1, 2, 4))
    assert moving(controller.state(topic)) == ((1, 2, 4, 3), (4,), (3,), (1, 2))
    controller.alter_isr(topic, 0, [1, 2, 4])
    assert moving(controller.state(topic)) == ((1, 2, 4), (), (), (1, 2, 4))
    assert not [key for key in controller.image.partitions_of_broker(3) if key[0] == topic]


def test_topic_deletion_ends_its_reassignments(controller: Controller) -> None:
    controller.create_assigned("t", (1, 2, 3))
    reassign(controller, (4, 2, 3))
    controller.run(controller.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState("t")])))
    assert not controller.image.reassigning
    assert listed(controller) == {}
    assert reassign(controller, None) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


def test_invalid_reassignments_are_refused(controller: Controller) -> None:
    controller.create_assigned("t", (1, 2, 3))
    assert reassign(controller, (1,), name="no") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert reassign(controller, (1,), first=7) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    for bad in ((), (1, 1), (1, 99), (-1,)):
        assert reassign(controller, bad) == [INVALID]
    assert reassign(controller, (5, 2, 3), (1,)) == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    requested = [m.ReassignablePartition(0, (1,)), m.ReassignablePartition(0, (2,))]
    request = m.AlterPartitionReassignmentsRequest(1000, [m.ReassignableTopic("t", requested)])
    (topic,) = controller.run(controller.core.alter_partition_reassignments(request)).responses
    assert [result.error_code for result in topic.partitions] == [0, ErrorCode.INVALID_REQUEST]
    is_cancelled = bytes([3 << 3, 1])
    assert proto.decode(m.ReassignablePartition, is_cancelled).replicas is None
    with pytest.raises(MalformedError):
        proto.decode(m.ReassignablePartition, proto.encode(m.ReassignablePartition(0, (1,))) + is_cancelled)


def test_reassignments_are_limited_per_request() -> None:
    controller = Controller(max_partitions_per_request=2)
    for broker in (1, 2):
        controller.join(broker)
    controller.create_assigned("t", (1,), (1,))
    controller.create_assigned("u", (1,))
    assert reassign(controller, (2,), (2,)) == [0, 0]
    topics = [m.ReassignableTopic(name, [m.ReassignablePartition(0, (2,))]) for name in "tu"]
    topics[0] = m.ReassignableTopic("t", [m.ReassignablePartition(index, (2, 1)) for index in (0, 1)])
    response = controller.run(
        controller.core.alter_partition_reassignments(m.AlterPartitionReassignmentsRequest(1, topics))
    )
    assert [result.error_code for topic in response.responses for result in topic.partitions] == [
        0,
        0,
        ErrorCode.POLICY_VIOLATION,
    ]


def test_list_returns_requested_running_reassignments(controller: Controller) -> None:
    controller.create_assigned("t", (1, 2), (1, 2), (1, 2))
    controller.create_assigned("u", (1, 2))
    reassign(controller, (3, 2), (1, 2), (1, 4))
    reassign(controller, (3, 2), name="u")
    assert listed(controller) == {"t": [0, 2], "u": [0]}
    topics = m.ListPartitionReassignmentsTopics
    assert listed(controller, topics("t", (2, 1, 7, 2)), topics("no", (0,)), topics("u", ())) == {"t": [2]}


# --- random requests


class ReassignmentMachine(ControllerMachine):
    """`ControllerMachine` with reassignments, drains and unregistration."""

    @precondition(lambda self: self.controller.image.topics)
    @rule(data=st.data(), wanted=st.one_of(st.none(), st.lists(BROKER, max_size=4)))
    def reassign(self, data: st.DataObject, wanted: list[int] | None) -> None:
        name = data.draw(st.one_of(NAME, st.sampled_from(sorted(self.controller.image.topic_names))))
        codes = reassign(self.controller, wanted, name=name, first=data.draw(st.integers(0, 2)))
        assert codes[0] in (
            0,
            INVALID,
            ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )

    @rule(broker=BROKER)
    def unregister(self, broker: int) -> None:
        had = self.controller.image.partitions_of_broker(broker)
        request = m.UnregisterBrokerRequest(broker)
        response = self.controller.run(self.controller.core.unregister_broker(request))
        assert not (had and not response.error_code)

    @rule(broker=BROKER)
    def plan(self, broker: int) -> None:
        plan = self.controller.run(self.controller.core.plan_broker_drain(m.PlanBrokerDrainRequest(broker)))
        if not plan.error_code and plan.topics:
            request = m.AlterPartitionReassignmentsRequest(1, plan.topics)
            response = self.controller.run(self.controller.core.alter_partition_reassignments(request))
            assert {result.error_code for topic in response.responses for result in topic.partitions} <= {0, INVALID}

    @invariant()
    def reassignment_state_is_consistent(self) -> None:
        image = self.controller.image
        running = set()
        for topic_id, topic in image.topics.items():
            for partition, state in topic.partitions.items():
                adding, removing = set(state.adding_replicas), set(state.removing_replicas)
                assert adding | removing <= set(state.replicas)
                assert not adding & removing
                assert original_replicas(state)
                assert target_replicas(state)
                assert len(state.directories) == len(state.replicas)
                assert len(set(state.replicas)) == len(state.replicas)
                if adding or removing:
                    running.add((topic_id, partition))
        assert set(image.reassigning) == running

    def teardown(self) -> None:
        """Send heartbeats and add all live replicas to the ISRs: every reassignment with live targets completes."""
        controller = self.controller
        for _ in range(2):
            for broker in list(controller.image.brokers):
                controller.heartbeat(broker)
            for topic_id, partition in list(controller.image.reassigning):
                state = controller.state(topic_id, partition)
                known = [r for r in state.replicas if r in controller.image.brokers]
                eligible = [replica for replica in known if controller.image.brokers[replica].can_lead]
                if state.leader >= 0 and set(target_replicas(state)) <= set(eligible):
                    members = sorted({*eligible, state.leader})
                    code = controller.alter_isr(topic_id, partition, members).error_code
                    assert code in (0, ErrorCode.NEW_LEADER_ELECTED)
                    assert (topic_id, partition) not in controller.image.reassigning
        super().teardown()


TestReassignmentMachine = ReassignmentMachine.TestCase
TestReassignmentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- replication safety


class ReassignmentModel(ReplicationModel):
    """`ReplicationModel` with five brokers and reassignments. A removed replica deletes its log."""

    def __init__(self, seed: int, *, power_cuts: bool) -> None:
        super().__init__(seed, power_cuts=power_cuts)
        self.started = self.cancelled = self.completed = 0
        for broker_id in (4, 5):
            broker = self.brokers[broker_id] = Broker(broker_id)
            self.restart(broker)
            self.apply(broker)
            self.heartbeat(broker)
            self.apply(broker)

    def apply_state(self, broker: Broker, state: PartitionState) -> None:
        super().apply_state(broker, state)
        if broker.view is state and broker.broker_id not in state.replicas:
            broker.log, broker.synced, broker.high_watermark = [], 0, 0

    def replicate(self, follower: Broker) -> None:
        if follower.view is not None and follower.broker_id in follower.view.replicas:
            super().replicate(follower)

    def step(self) -> None:
        before = self.controller.state(self.topic_id)
        if self.random.random() < 0.01:
            wanted = self.random.sample(sorted(self.brokers), self.random.randint(1, 3))
            cancel = self.random.random() < 0.3
            (code,) = reassign(self.controller, None if cancel else wanted)
            self.cancelled += cancel and not code
            self.started += not cancel and not code
        else:
            super().step()
        after = self.controller.state(self.topic_id)
        self.completed += bool(before.adding_replicas) and not after.adding_replicas


def run_reassignments(seed: int, *, power_cuts: bool) -> ReassignmentModel:
    model = ReassignmentModel(seed, power_cuts=power_cuts)
    try:
        for _ in range(1500):
            model.step()
        model.recover()
    except AssertionError as error:
        raise AssertionError(
            f"seed {seed} (replay: run_reassignments({seed}, power_cuts={power_cuts})): {error}"
        ) from error
    return model


@pytest.mark.parametrize("power_cuts", [False, True])
@pytest.mark.parametrize("block", range(2))
def test_reassignments_lose_no_acknowledged_record(block: int, *, power_cuts: bool) -> None:
    models = [run_reassignments(block * 1000 + number, power_cuts=power_cuts) for number in range(20)]
    assert sum(len(model.committed) for model in models) > 100, "the model committed too few records"
    assert min(sum(model.started for model in models), sum(model.cancelled for model in models)) > 10
    assert sum(model.completed for model in models) > 20, "too few completed reassignments"
    if not power_cuts:
        assert not any(model.lost for model in models)
