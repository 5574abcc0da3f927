"""Replicas whose data folder failed (KIP-858): who leads instead, and that nobody leads who may lack something."""

from __future__ import annotations

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.states import LOST_DIRECTORY, is_lost
from kipmesh.messages import ElectionType
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

A, B, C, NEW = (bytes([letter]) * 16 for letter in b"ABCN")


@pytest.fixture
def controller() -> Controller:
    controller = Controller()
    for broker_id in (1, 2, 3):
        controller.join(broker_id, log_dirs=(A, B) if broker_id == 1 else (C,))
    return controller


def assign(controller: Controller, broker_id: int, directory: bytes, topic_id: bytes, *partitions: int) -> list[int]:
    request = m.AssignReplicasToDirsRequest(
        broker_id,
        controller.image.brokers[broker_id].broker_epoch,
        [
            m.AssignReplicasToDirsDirectory(
                directory,
                [m.AssignReplicasToDirsTopic(topic_id, [m.AssignReplicasToDirsPartition(p) for p in partitions])],
            )
        ],
    )
    response = controller.run(controller.core.assign_replicas_to_dirs(request))
    assert not response.error_code
    return [part.error_code for one in response.directories for t in one.topics for part in t.partitions]


def test_a_lost_leader_is_replaced_and_joins_no_isr_until_it_is_back(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2, 3))
    before = controller.state(topic_id)
    lost = before.leader
    assert assign(controller, lost, LOST_DIRECTORY, topic_id, 0) == [0]
    state = controller.state(topic_id)
    assert state.leader == before.replicas[1]
    assert set(state.isr) == {1, 2, 3} - {lost}
    assert state.leader_epoch == before.leader_epoch + 1
    assert state.last_known_elr == (lost,)
    assert is_lost(state, lost)
    assert not any(is_lost(state, other) for other in state.isr)
    assert assign(controller, lost, LOST_DIRECTORY, topic_id, 0) == [0]
    assert controller.last_records == []
    assert controller.alter_isr(topic_id, 0, (1, 2, 3)).error_code == ErrorCode.INELIGIBLE_REPLICA
    assert assign(controller, lost, NEW, topic_id, 0) == [0]
    assert not is_lost(controller.state(topic_id), lost)
    assert not controller.alter_isr(topic_id, 0, (1, 2, 3)).error_code
    controller.restart()
    assert set(controller.state(topic_id).isr) == {1, 2, 3}


def test_a_preferred_leader_that_is_lost_is_said_to_be_so(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2, 3))
    assign(controller, 1, LOST_DIRECTORY, topic_id, 0)
    (said,) = controller.run(controller.core.elect_leaders(ElectionType.PREFERRED, [("t", 0)]))
    assert said.code is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert said.message == "the preferred leader, broker 1, has lost this replica: its log directory failed"
    assign(controller, 1, NEW, topic_id, 0)
    (said,) = controller.run(controller.core.elect_leaders(ElectionType.PREFERRED, [("t", 0)]))
    assert "is not in the ISR" in said.message


def test_the_last_member_of_an_isr_is_waited_for(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2, 3))
    leader = controller.state(topic_id).leader
    assert not controller.alter_isr(topic_id, 0, (leader,)).error_code
    assign(controller, leader, LOST_DIRECTORY, topic_id, 0)
    state = controller.state(topic_id)
    assert (state.leader, tuple(state.isr), state.last_isr) == (r.NO_LEADER, (), (leader,))
    assert controller.image.required_brokers(topic_id, 0) == (leader,)
    for broker_id in (1, 2, 3):  # nobody else is elected, whatever happens to the others
        controller.heartbeat(broker_id, log_ends=[m.PartitionLogEnd(topic_id, 0, 0, 5)] if broker_id != leader else ())
    other = next(broker for broker in (1, 2, 3) if broker != leader)
    controller.pass_ms(SESSION_MS // 2)
    controller.heartbeat(leader)
    controller.pass_ms(SESSION_MS // 2)
    controller.join(other, 2, log_dirs=controller.image.brokers[other].log_dirs)
    assert controller.state(topic_id).leader == r.NO_LEADER
    # Its folder is back: it says where its log ends, and leads.
    assign(controller, leader, A, topic_id, 0)
    wanted = controller.heartbeat(leader).wanted_log_ends
    assert list(wanted) == [m.TopicIdPartition(topic_id, 0)]
    controller.heartbeat(leader, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, 7),))
    state = controller.state(topic_id)
    assert (state.leader, tuple(state.isr)) == (leader, (leader,))


def test_what_a_replica_told_before_it_was_lost_elects_nobody(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2))
    for broker_id in (1, 2):  # a power cut: both are back, and neither is clean
        controller.pass_ms(SESSION_MS)
        controller.register(broker_id, 2, log_dirs=controller.image.brokers[broker_id].log_dirs)
    assert (controller.state(topic_id).leader, controller.state(topic_id).last_isr) == (r.NO_LEADER, (1, 2))
    controller.heartbeat(1)
    controller.heartbeat(1, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, 9),))
    assign(controller, 1, LOST_DIRECTORY, topic_id, 0)
    controller.heartbeat(2)
    controller.heartbeat(2, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, 5),))
    assert controller.state(topic_id).leader == r.NO_LEADER
    assert controller.image.required_brokers(topic_id, 0) == (1,)
    assert not controller.heartbeat(1).wanted_log_ends, "there is no log to ask for"
    controller.register(1, 3, log_dirs=(A, B))
    controller.pass_ms(SESSION_MS)
    controller.join(1, 3, log_dirs=(A, B))
    controller.join(2, 2, log_dirs=(C,))
    assign(controller, 1, A, topic_id, 0)
    for broker_id, end in ((1, 9), (2, 5)):
        if controller.heartbeat(broker_id).wanted_log_ends:
            controller.heartbeat(broker_id, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, end),))
    assert controller.state(topic_id).leader == 1


def test_an_unclean_election_does_not_wait_for_a_lost_replica(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    leader = controller.state(topic_id).leader
    assert not controller.alter_isr(topic_id, 0, (leader,)).error_code
    assign(controller, leader, LOST_DIRECTORY, topic_id, 0)
    for broker_id in {1, 2, 3} - {leader}:
        controller.heartbeat(broker_id, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, broker_id),))
    state = controller.state(topic_id)
    assert state.leader == max({1, 2, 3} - {leader})
    assert state.leader_recovery_state == 1


def test_a_broker_that_registers_without_a_folder_has_lost_all(controller: Controller) -> None:
    topic_id = controller.assigned("t", *[(1, 2, 3)] * 6)
    clean = controller.image.brokers[1].broker_epoch
    while not controller.heartbeat(1, shut_down=True).should_shut_down:
        controller.heartbeat(2)
        controller.heartbeat(3)
    assert not controller.register(1, 2, clean, log_dirs=(A, NEW)).error_code
    for partition in range(6):
        state = controller.state(topic_id, partition)
        assert is_lost(state, 1)
        assert 1 not in state.isr
    assert assign(controller, 1, A, topic_id, 0, 3) == [0, 0]
    assert [is_lost(controller.state(topic_id, partition), 1) for partition in range(6)] == [
        partition not in (0, 3) for partition in range(6)
    ]


def test_more_folders_are_no_loss(controller: Controller) -> None:
    topic_id = controller.assigned("t", (1, 2, 3))
    controller.pass_ms(SESSION_MS)
    controller.register(1, 2, log_dirs=(NEW, B, A))
    assert not is_lost(controller.state(topic_id), 1)
    assert controller.image.brokers[1].log_dirs == (NEW, B, A)


def test_heartbeats_tell_of_failed_folders(controller: Controller) -> None:
    controller.heartbeat(1, offline_log_dirs=(B,))
    assert controller.image.brokers[1].log_dirs == (A,)
    assert not controller.image.brokers[1].fenced
    controller.heartbeat(1, offline_log_dirs=(B,))
    assert controller.last_records == []
    topic_id = controller.assigned("t", (1, 2, 3))
    controller.pass_ms(SESSION_MS)
    controller.register(1, 2, log_dirs=(A,))  # it is known by now: nothing is lost by that
    assert not is_lost(controller.state(topic_id), 1)


def test_assignments_that_are_refused(controller: Controller) -> None:
    topic_id = controller.assigned("t", (2,))
    (holder,) = controller.state(topic_id).replicas
    other = next(broker for broker in (1, 2, 3) if broker != holder)
    assert assign(controller, other, LOST_DIRECTORY, topic_id, 0) == [ErrorCode.NOT_LEADER_OR_FOLLOWER]
    assert assign(controller, holder, LOST_DIRECTORY, topic_id, 7) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert assign(controller, holder, LOST_DIRECTORY, b"?" * 16, 0) == [ErrorCode.UNKNOWN_TOPIC_ID]
    assert assign(controller, holder, b"short", topic_id, 0) == [ErrorCode.INVALID_REQUEST]
    assert assign(controller, holder, A, topic_id, 0, 0) == [0, ErrorCode.INVALID_REQUEST]
    stale = m.AssignReplicasToDirsRequest(holder, 0, ())
    answer = controller.run(controller.core.assign_replicas_to_dirs(stale))
    assert answer.error_code == ErrorCode.STALE_BROKER_EPOCH
