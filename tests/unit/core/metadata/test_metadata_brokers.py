from __future__ import annotations

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import records as r
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def three(controller: Controller) -> Controller:
    for broker_id in (1, 2, 3):
        controller.join(broker_id)
    return controller


def expire_brokers(controller: Controller, *broker_ids: int) -> None:
    """Fence these brokers. All others send heartbeats."""
    controller.now_ms += SESSION_MS // 2
    for broker_id, broker in list(controller.image.brokers.items()):
        if broker_id not in broker_ids and not broker.fenced:
            controller.heartbeat(broker_id)
    controller.now_ms += SESSION_MS // 2
    assert set(controller.expire()) == set(broker_ids)


def log_end(topic_id: bytes, epoch: int, end: int, partition: int = 0) -> m.PartitionLogEnd:
    return m.PartitionLogEnd(topic_id, partition, epoch, end)


# --- registration


def test_broker_epoch_is_registration_offset(controller: Controller) -> None:
    response = controller.register(1)
    assert response.broker_epoch == 2  # after the feature levels
    broker = controller.image.brokers[1]
    assert broker.fenced
    assert not broker.is_leader_role
    assert broker.endpoints == {"MESH": ("127.0.0.1", 9001)}
    assert controller.register(2, leads=True, rack="a").broker_epoch == 3
    assert controller.image.brokers[2].is_leader_role
    assert controller.image.brokers[2].rack == "a"


def test_registration_with_other_cluster_id_is_refused(controller: Controller) -> None:
    response = controller.register(1, cluster_id="other")
    assert response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "other" in (response.error_message or "")
    assert not controller.image.brokers


def test_registration_with_controller_id_is_refused(controller: Controller) -> None:
    response = controller.register(1001)
    assert response.error_code == ErrorCode.INVALID_REQUEST
    assert "node.id 1001 is a controller's" in (response.error_message or "")
    assert not controller.image.brokers


@pytest.mark.parametrize(
    "change",
    [{"incarnation_id": b"short"}, {"listeners": []}, {"broker_id": -1}, {"listeners": [m.Listener("A", "h", 70000)]}],
)
def test_invalid_registration_is_refused(controller: Controller, change: dict[str, object]) -> None:
    request = m.BrokerRegistrationRequest(1, controller.config.cluster_id, bytes(16), [m.Listener("A", "h", 1)])
    decision = controller.core.brokers.register(request._replace(**change), 0, 0)
    assert decision.response.error_code == ErrorCode.INVALID_REQUEST
    assert not decision.records


def test_duplicate_registration_is_refused_until_session_ends(controller: Controller) -> None:
    controller.join(1)
    assert controller.register(1, incarnation=2).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    controller.now_ms += SESSION_MS
    response = controller.register(1, incarnation=2)
    assert response.error_code == 0
    assert controller.heartbeat(1, epoch=1).error_code == ErrorCode.STALE_BROKER_EPOCH


def test_session_granted_by_new_controller_allows_new_incarnation(controller: Controller) -> None:
    controller.join(1)
    controller.restart()
    assert controller.register(1, incarnation=2).error_code == 0


def test_repeated_registration_keeps_broker_epoch_and_state(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2))
    epoch = three.image.brokers[1].broker_epoch
    assert three.register(1, rack="new").broker_epoch == epoch
    assert not three.image.brokers[1].fenced
    assert three.image.brokers[1].rack == "new"
    assert three.state(topic).leader == 1


def test_broker_is_unfenced_after_applying_its_registration(controller: Controller) -> None:
    epoch = controller.register(1).broker_epoch
    response = controller.heartbeat(1, offset=epoch - 1)
    assert (response.is_caught_up, response.is_fenced) == (False, True)
    assert controller.heartbeat(1, offset=epoch, fence=True).is_fenced
    response = controller.heartbeat(1, offset=epoch)
    assert (response.is_caught_up, response.is_fenced) == (True, False)
    assert not controller.heartbeat(1, fence=True).is_fenced, (
        "a recent session may have missed only the controller change"
    )
    controller.now_ms += 10_000
    assert controller.heartbeat(1, fence=True).is_fenced
    assert controller.heartbeat(9, epoch=1).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED


# --- fencing


def test_fencing_elects_next_isr_member_in_replica_order(three: Controller) -> None:
    topic = three.create_assigned("t", (3, 1, 2), (2, 3, 1))
    other = three.create_assigned("other", (1, 2))
    expire_brokers(three, 3)
    first, second, third = three.state(topic), three.state(topic, 1), three.state(other)
    assert (first.leader, first.isr, first.leader_epoch, first.last_known_elr) == (1, (1, 2), 1, (3,))
    assert (second.leader, second.isr, second.leader_epoch) == (2, (2, 1), 0)
    assert third.partition_epoch == 0
    three.heartbeat(1)
    assert three.state(topic).last_known_elr == ()
    assert three.state(topic, 1).last_known_elr == (3,)
    three.heartbeat(2)
    assert three.state(topic, 1).last_known_elr == ()


def test_heartbeat_before_applying_change_keeps_last_known_elr(three: Controller) -> None:
    topic = three.create_assigned("t", (3, 1, 2))
    before = three.image.offset
    expire_brokers(three, 3)
    three.heartbeat(1, offset=before)
    assert three.state(topic).last_known_elr == (3,)


def test_last_isr_member_stays_in_isr_and_leads_when_unfenced(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2))
    three.alter_isr(topic, 0, [1])
    expire_brokers(three, 1)
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_epoch) == (-1, (1,), 1)
    assert three.image.required_brokers(topic, 0) == (1,)
    assert three.heartbeat(2).wanted_log_ends == []
    assert not three.heartbeat(1).is_fenced
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_epoch) == (1, (1,), 2)
    assert three.image.required_brokers(topic, 0) == ()


def test_brokers_that_expire_together_are_not_elected(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    expire_brokers(three, 1, 2)
    assert three.state(topic).leader == 3
    assert three.state(topic).leader_epoch == 1


def test_paused_controller_extends_sessions(three: Controller) -> None:
    three.now_ms += 100 * SESSION_MS
    three.core.sessions.extend(three.now_ms)
    assert three.expire() == []


def test_new_controller_restarts_sessions(three: Controller) -> None:
    three.now_ms += SESSION_MS - 1
    three.restart()
    assert three.expire() == []
    assert three.core.sessions.next_deadline_ms() == three.now_ms + SESSION_MS
    three.now_ms += SESSION_MS
    assert sorted(three.expire()) == [1, 2, 3]


# --- unclean restarts


def test_unclean_restart_removes_unfenced_broker_from_isr(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    three.restart()
    assert three.register(1, incarnation=2, previous=-1).error_code == 0
    state = three.state(topic)
    assert (state.leader, state.isr, state.last_known_elr) == (2, (2, 3), (1,))
    assert three.image.brokers[1].fenced


def test_wrong_previous_broker_epoch_counts_as_unclean_restart(three: Controller) -> None:
    topic = three.create_assigned("t", (1,))
    epoch = three.image.brokers[1].broker_epoch
    three.restart()
    three.register(1, incarnation=2, previous=epoch + 1)
    assert three.state(topic).isr == ()
    assert three.image.required_brokers(topic, 0) == (1,)


def test_clean_restart_keeps_last_isr_member(three: Controller) -> None:
    topic = three.create_assigned("t", (1,))
    epoch = three.image.brokers[1].broker_epoch
    three.restart()
    three.register(1, incarnation=2, previous=epoch)
    assert (three.state(topic).leader, three.state(topic).isr) == (-1, (1,))
    three.heartbeat(1)
    assert three.state(topic).leader == 1


@pytest.mark.parametrize("fenced_first", [False, True])
def test_power_cut_of_all_brokers_elects_longest_log(three: Controller, *, fenced_first: bool) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    if fenced_first:
        three.now_ms += SESSION_MS
        for broker_id in three.core.brokers.expired(three.now_ms):  # sequentially, as sessions end
            three.run(three.core_fence(broker_id))
        assert three.state(topic).isr == (3,)
    else:
        three.restart()
    for broker_id in (2, 1):
        three.register(broker_id, incarnation=2)
        three.heartbeat(broker_id)
    # Broker 3 seems to be alive, or is the last ISR member: the election must wait for it.
    assert 3 in three.state(topic).last_isr
    if not fenced_first:
        three.now_ms += SESSION_MS
        three.heartbeat(1)
        three.heartbeat(2)
        three.expire()
    assert three.state(topic).leader == -1
    assert three.image.required_brokers(topic, 0) == (3,)
    three.register(3, incarnation=2)
    state = three.state(topic)
    assert (state.isr, state.last_isr) == ((), (1, 2, 3))
    wanted = [m.TopicIdPartition(topic, 0)]
    for broker_id in (1, 2, 3):
        assert three.heartbeat(broker_id).wanted_log_ends == wanted
    epoch = state.leader_epoch
    three.heartbeat(1, log_ends=[log_end(topic, epoch - 1, 100)])
    assert three.heartbeat(1).wanted_log_ends == []
    three.heartbeat(2, log_ends=[log_end(topic, epoch, 90)])
    assert three.state(topic).leader == -1
    three.heartbeat(3, log_ends=[log_end(topic, epoch, 80)])
    state = three.state(topic)
    assert (state.leader, state.isr, state.last_known_elr) == (2, (2,), (1, 3))
    three.heartbeat(2)
    assert three.state(topic).last_known_elr == ()
    assert three.replayed() == three.image


def test_log_end_of_previous_incarnation_is_ignored(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
        three.heartbeat(broker_id)
    three.heartbeat(1, log_ends=[log_end(topic, 0, 10)])
    three.now_ms += SESSION_MS
    three.register(1, incarnation=3)
    three.heartbeat(1)
    three.heartbeat(2, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    assert three.heartbeat(1).wanted_log_ends == [m.TopicIdPartition(topic, 0)]
    three.heartbeat(1, log_ends=[log_end(topic, 0, 4)])
    assert three.state(topic).leader == 2


def test_equal_log_ends_elect_first_unfenced_replica(three: Controller) -> None:
    topic = three.create_assigned("t", (2, 1))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    three.heartbeat(1)
    three.heartbeat(2, offset=0, log_ends=[log_end(topic, 0, 5)])  # not caught up, so it stays fenced
    three.heartbeat(1, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == 1


def test_election_waits_until_broker_with_longest_log_is_unfenced(three: Controller) -> None:
    topic = three.create_assigned("t", (2, 1))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    three.heartbeat(1)
    three.heartbeat(2, offset=0, log_ends=[log_end(topic, 0, 6)])
    three.heartbeat(1, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    three.heartbeat(2)
    assert three.state(topic).leader == 2


def test_unclean_election_takes_longest_log_of_unfenced_brokers(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    three.alter_isr(topic, 0, [1])
    expire_brokers(three, 1)
    wanted = [m.TopicIdPartition(topic, 0)]
    assert three.heartbeat(2).wanted_log_ends == wanted
    assert three.heartbeat(3).wanted_log_ends == wanted
    three.heartbeat(2, log_ends=[log_end(topic, 0, 5)])
    three.heartbeat(3, log_ends=[log_end(topic, 0, 6)])
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_recovery_state) == (3, (3,), 1)
    result = three.alter_isr(topic, 0, [3], leader_recovery_state=0)
    assert (result.error_code, result.leader_recovery_state) == (0, 0)
    assert three.state(topic).leader_recovery_state == 0


@pytest.mark.parametrize("default", [True, False])
def test_unclean_election_follows_topic_config_then_controller_default(default: bool) -> None:
    controller = Controller(unclean_leader_election_enable=default)
    for broker_id in (1, 2):
        controller.join(broker_id)
    unset = controller.create_assigned("unset", (1, 2))
    other = controller.create_assigned("other", (1, 2), unclean_leader_election_enable=str(not default).lower())
    for topic in (unset, other):
        controller.alter_isr(topic, 0, [1])
    expire_brokers(controller, 1)
    unclean, clean = (unset, other) if default else (other, unset)
    assert controller.heartbeat(2).wanted_log_ends == [m.TopicIdPartition(unclean, 0)]
    controller.heartbeat(2, log_ends=[log_end(unclean, 0, 5)])
    assert (controller.state(unclean).leader, controller.state(clean).leader) == (2, -1)


def test_log_ends_are_requested_after_broker_applied_its_registration(three: Controller) -> None:
    topic = three.create_assigned("t", (2, 1))
    three.restart()
    epoch = three.register(2, incarnation=2).broker_epoch
    three.register(1, incarnation=2)
    assert three.heartbeat(2, offset=epoch - 1).wanted_log_ends == ()
    assert three.heartbeat(2, offset=epoch).wanted_log_ends == [m.TopicIdPartition(topic, 0)]


def test_enabling_unclean_election_elects_waiting_partition(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    three.heartbeat(2)
    three.heartbeat(2, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    assert three.image.required_brokers(topic, 0) == (1,)
    setting = m.AlterableConfig("unclean.leader.election.enable", 0, "true")
    three.run(
        three.core.incremental_alter_configs(
            m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(2, "t", [setting])])
        )
    )
    three.run(three.elect_pending())
    assert three.state(topic).leader == 2


def test_unclean_election_does_not_wait_for_fenced_broker(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    three.alter_isr(topic, 0, [1])
    expire_brokers(three, 1)
    three.heartbeat(2, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    expire_brokers(three, 3)
    assert three.state(topic).leader == 2


def test_log_ends_of_non_replicas_are_not_requested_and_ignored(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    assert three.heartbeat(3).wanted_log_ends == []
    three.heartbeat(3, log_ends=[log_end(topic, 9, 99), log_end(b"?" * 16, 1, 1), log_end(topic, 1, 1, partition=7)])
    assert three.state(topic).leader == -1


# --- controlled shutdown


def test_controlled_shutdown_moves_leaders_and_waits_for_followers(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    pair, single = three.create_assigned("pair", (2, 1)), three.create_assigned("single", (1,))
    before = three.image.offset
    assert not three.heartbeat(1, shut_down=True).should_shut_down
    assert (three.state(topic).leader, three.state(topic).isr) == (2, (2, 3))
    assert (three.state(pair).leader, three.state(pair).isr) == (2, (2,))
    assert (three.state(single).leader, three.state(single).isr) == (-1, (1,))
    assert three.image.brokers[1].in_controlled_shutdown
    three.heartbeat(2, offset=before)
    three.heartbeat(3)
    assert not three.heartbeat(1, shut_down=True).should_shut_down
    three.heartbeat(2)
    response = three.heartbeat(1, shut_down=True)
    assert (response.should_shut_down, response.is_fenced) == (True, True)
    epoch = three.image.brokers[1].broker_epoch
    # After a clean restart it is unfenced immediately and leads where it was the last ISR member.
    assert three.register(1, incarnation=2, previous=epoch).error_code == 0
    assert not three.heartbeat(1).is_fenced
    assert three.state(single).leader == 1
    assert three.state(topic).isr == (2, 3)


def test_last_broker_shuts_down_immediately(controller: Controller) -> None:
    controller.join(1)
    topic = controller.create_assigned("t", (1,))
    response = controller.heartbeat(1, shut_down=True)
    assert (response.should_shut_down, response.is_fenced) == (True, True)
    assert controller.state(topic).isr == (1,)


def test_fenced_broker_shuts_down_immediately(controller: Controller) -> None:
    controller.register(1)
    assert controller.heartbeat(1, shut_down=True).should_shut_down


def test_all_brokers_can_shut_down_together(three: Controller) -> None:
    three.create_assigned("t", (1, 2, 3))
    for broker_id in (1, 2, 3):
        three.heartbeat(broker_id, shut_down=True)
    assert all(three.heartbeat(broker_id, shut_down=True).should_shut_down for broker_id in (1, 2))
    assert not any(record.can_lead for record in three.image.brokers.values())


def test_controlled_shutdown_survives_controller_failover(three: Controller) -> None:
    three.heartbeat(1, shut_down=True)
    three.restart()
    assert not three.heartbeat(1, shut_down=True).should_shut_down
    three.heartbeat(2)
    three.heartbeat(3)
    assert three.heartbeat(1, shut_down=True).should_shut_down


def test_broker_in_controlled_shutdown_joins_no_isr_and_gets_no_replica(three: Controller) -> None:
    topic = three.create_assigned("t", (2, 1))
    three.heartbeat(1, shut_down=True)
    assert three.alter_isr(topic, 0, [2, 1]).error_code == ErrorCode.INELIGIBLE_REPLICA
    result = three.create("two", 4, 2)
    assert not any(1 in state.replicas for state in three.image.topics[result.topic_id].partitions.values())


def test_image_applies_legacy_fencing_records(three: Controller) -> None:
    epoch = three.image.brokers[1].broker_epoch
    image = three.replayed()
    from kipmesh.core.metadata.image import MetadataDelta

    delta = MetadataDelta()
    image.apply(r.FenceBrokerRecord(1, epoch), delta)
    assert image.brokers[1].fenced
    image.apply(r.UnfenceBrokerRecord(1, epoch), delta)
    assert not image.brokers[1].fenced
    image.apply(r.UnregisterBrokerRecord(1, epoch), delta)
    assert 1 not in image.brokers
    assert delta.changed_brokers == {1}
