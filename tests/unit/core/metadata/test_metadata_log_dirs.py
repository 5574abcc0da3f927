"""Failed log directories (KIP-858): elections of other leaders, never of a leader that may lack records."""

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
    return [part.error_code for result in response.directories for t in result.topics for part in t.partitions]


def test_leader_with_failed_log_directory_leaves_isr_until_reassigned(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
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


def test_preferred_election_reports_failed_log_directory(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
    assign(controller, 1, LOST_DIRECTORY, topic_id, 0)
    (result,) = controller.run(controller.core.elect_leaders(ElectionType.PREFERRED, [("t", 0)]))
    assert result.code is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert result.message == "the preferred leader, broker 1, has lost this replica: its log directory failed"
    assign(controller, 1, NEW, topic_id, 0)
    (result,) = controller.run(controller.core.elect_leaders(ElectionType.PREFERRED, [("t", 0)]))
    assert "is not in the ISR" in result.message


def test_election_waits_for_last_isr_member_with_failed_log_directory(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
    leader = controller.state(topic_id).leader
    assert not controller.alter_isr(topic_id, 0, (leader,)).error_code
    assign(controller, leader, LOST_DIRECTORY, topic_id, 0)
    state = controller.state(topic_id)
    assert (state.leader, tuple(state.isr), state.last_isr) == (r.NO_LEADER, (), (leader,))
    assert controller.image.required_brokers(topic_id, 0) == (leader,)
    for broker_id in (1, 2, 3):  # no other replica is elected
        controller.heartbeat(broker_id, log_ends=[m.PartitionLogEnd(topic_id, 0, 0, 5)] if broker_id != leader else ())
    other = next(broker for broker in (1, 2, 3) if broker != leader)
    controller.pass_ms(SESSION_MS // 2)
    controller.heartbeat(leader)
    controller.pass_ms(SESSION_MS // 2)
    controller.join(other, 2, log_dirs=controller.image.brokers[other].log_dirs)
    assert controller.state(topic_id).leader == r.NO_LEADER
    # The log directory is available again: the broker reports its log end and leads.
    assign(controller, leader, A, topic_id, 0)
    wanted = controller.heartbeat(leader).wanted_log_ends
    assert list(wanted) == [m.TopicIdPartition(topic_id, 0)]
    controller.heartbeat(leader, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, 7),))
    state = controller.state(topic_id)
    assert (state.leader, tuple(state.isr)) == (leader, (leader,))


def test_log_end_reported_before_directory_failure_is_ignored(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2))
    for broker_id in (1, 2):  # unclean restart of both brokers
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
    assert not controller.heartbeat(1).wanted_log_ends, "a lost replica has no log end to request"
    controller.register(1, 3, log_dirs=(A, B))
    controller.pass_ms(SESSION_MS)
    controller.join(1, 3, log_dirs=(A, B))
    controller.join(2, 2, log_dirs=(C,))
    assign(controller, 1, A, topic_id, 0)
    for broker_id, end in ((1, 9), (2, 5)):
        if controller.heartbeat(broker_id).wanted_log_ends:
            controller.heartbeat(broker_id, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, end),))
    assert controller.state(topic_id).leader == 1


def test_unclean_election_does_not_wait_for_failed_log_directory(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    leader = controller.state(topic_id).leader
    assert not controller.alter_isr(topic_id, 0, (leader,)).error_code
    assign(controller, leader, LOST_DIRECTORY, topic_id, 0)
    for broker_id in {1, 2, 3} - {leader}:
        controller.heartbeat(broker_id, log_ends=(m.PartitionLogEnd(topic_id, 0, 0, broker_id),))
    state = controller.state(topic_id)
    assert state.leader == max({1, 2, 3} - {leader})
    assert state.leader_recovery_state == 1


def test_registration_without_log_directory_loses_its_replicas(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", *[(1, 2, 3)] * 6)
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


def test_registration_with_more_log_directories_loses_no_replica(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
    controller.pass_ms(SESSION_MS)
    controller.register(1, 2, log_dirs=(NEW, B, A))
    assert not is_lost(controller.state(topic_id), 1)
    assert controller.image.brokers[1].log_dirs == (NEW, B, A)


def test_heartbeat_reports_failed_log_directories(controller: Controller) -> None:
    controller.heartbeat(1, offline_log_dirs=(B,))
    assert controller.image.brokers[1].log_dirs == (A,)
    assert not controller.image.brokers[1].fenced
    controller.heartbeat(1, offline_log_dirs=(B,))
    assert controller.last_records == []
    topic_id = controller.create_assigned("t", (1, 2, 3))
    controller.pass_ms(SESSION_MS)
    controller.register(1, 2, log_dirs=(A,))  # the failure was reported before: no replica is lost
    assert not is_lost(controller.state(topic_id), 1)


def test_invalid_log_directory_assignments_are_refused(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (2,))
    (holder,) = controller.state(topic_id).replicas
    other = next(broker for broker in (1, 2, 3) if broker != holder)
    assert assign(controller, other, LOST_DIRECTORY, topic_id, 0) == [ErrorCode.NOT_LEADER_OR_FOLLOWER]
    assert assign(controller, holder, LOST_DIRECTORY, topic_id, 7) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert assign(controller, holder, LOST_DIRECTORY, b"?" * 16, 0) == [ErrorCode.UNKNOWN_TOPIC_ID]
    assert assign(controller, holder, b"short", topic_id, 0) == [ErrorCode.INVALID_REQUEST]
    assert assign(controller, holder, A, topic_id, 0, 0) == [0, ErrorCode.INVALID_REQUEST]
    stale = m.AssignReplicasToDirsRequest(holder, 0, ())
    response = controller.run(controller.core.assign_replicas_to_dirs(stale))
    assert response.error_code == ErrorCode.STALE_BROKER_EPOCH
