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


def silence(controller: Controller, *broker_ids: int) -> None:
    """All but these go on; these are fenced."""
    controller.now_ms += SESSION_MS // 2
    for broker_id, broker in list(controller.image.brokers.items()):
        if broker_id not in broker_ids and not broker.fenced:
            controller.heartbeat(broker_id)
    controller.now_ms += SESSION_MS // 2
    assert set(controller.expire()) == set(broker_ids)


def log_end(topic_id: bytes, epoch: int, end: int, partition: int = 0) -> m.PartitionLogEnd:
    return m.PartitionLogEnd(topic_id, partition, epoch, end)


# --- registration


def test_a_broker_epoch_is_the_offset_of_its_registration(controller: Controller) -> None:
    response = controller.register(1)
    assert response.broker_epoch == 2  # after the feature levels
    broker = controller.image.brokers[1]
    assert broker.fenced
    assert not broker.is_leader_role
    assert broker.endpoints == {"MESH": ("127.0.0.1", 9001)}
    assert controller.register(2, leads=True, rack="a").broker_epoch == 3
    assert controller.image.brokers[2].is_leader_role
    assert controller.image.brokers[2].rack == "a"


def test_another_cluster_is_refused(controller: Controller) -> None:
    response = controller.register(1, cluster_id="other")
    assert response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "other" in (response.error_message or "")
    assert not controller.image.brokers


def test_a_voters_id_is_refused(controller: Controller) -> None:
    response = controller.register(1001)
    assert response.error_code == ErrorCode.INVALID_REQUEST
    assert "node.id 1001 is a controller's" in (response.error_message or "")
    assert not controller.image.brokers


@pytest.mark.parametrize(
    "change",
    [{"incarnation_id": b"short"}, {"listeners": []}, {"broker_id": -1}, {"listeners": [m.Listener("A", "h", 70000)]}],
)
def test_nonsense_is_refused(controller: Controller, change: dict[str, object]) -> None:
    request = m.BrokerRegistrationRequest(1, controller.config.cluster_id, bytes(16), [m.Listener("A", "h", 1)])
    decision = controller.core.brokers.register(request._replace(**change), 0, 0)
    assert decision.response.error_code == ErrorCode.INVALID_REQUEST
    assert not decision.records


def test_a_live_twin_is_refused_until_the_session_ends(controller: Controller) -> None:
    controller.join(1)
    assert controller.register(1, incarnation=2).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    controller.now_ms += SESSION_MS
    response = controller.register(1, incarnation=2)
    assert response.error_code == 0
    assert controller.heartbeat(1, epoch=1).error_code == ErrorCode.STALE_BROKER_EPOCH


def test_a_session_that_the_controller_gave_does_not_prove_life(controller: Controller) -> None:
    controller.join(1)
    controller.restart()
    assert controller.register(1, incarnation=2).error_code == 0


def test_a_repeated_registration_keeps_the_epoch_and_the_state(three: Controller) -> None:
    topic = three.assigned("t", (1, 2))
    epoch = three.image.brokers[1].broker_epoch
    assert three.register(1, rack="new").broker_epoch == epoch
    assert not three.image.brokers[1].fenced
    assert three.image.brokers[1].rack == "new"
    assert three.state(topic).leader == 1


def test_a_broker_is_unfenced_when_it_has_seen_its_registration(controller: Controller) -> None:
    epoch = controller.register(1).broker_epoch
    response = controller.heartbeat(1, offset=epoch - 1)
    assert (response.is_caught_up, response.is_fenced) == (False, True)
    assert controller.heartbeat(1, offset=epoch, fence=True).is_fenced
    response = controller.heartbeat(1, offset=epoch)
    assert (response.is_caught_up, response.is_fenced) == (True, False)
    assert not controller.heartbeat(1, fence=True).is_fenced, "it may have missed the controllers' change only"
    controller.now_ms += 10_000
    assert controller.heartbeat(1, fence=True).is_fenced
    assert controller.heartbeat(9, epoch=1).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED


# --- fencing


def test_the_next_in_replica_order_leads(three: Controller) -> None:
    topic = three.assigned("t", (3, 1, 2), (2, 3, 1))
    other = three.assigned("other", (1, 2))
    silence(three, 3)
    first, second, third = three.state(topic), three.state(topic, 1), three.state(other)
    assert (first.leader, first.isr, first.leader_epoch, first.last_known_elr) == (1, (1, 2), 1, (3,))
    assert (second.leader, second.isr, second.leader_epoch) == (2, (2, 1), 0)
    assert third.partition_epoch == 0
    three.heartbeat(1)
    assert three.state(topic).last_known_elr == ()
    assert three.state(topic, 1).last_known_elr == (3,)
    three.heartbeat(2)
    assert three.state(topic, 1).last_known_elr == ()


def test_a_leader_that_has_not_seen_the_change_proves_nothing(three: Controller) -> None:
    topic = three.assigned("t", (3, 1, 2))
    before = three.image.offset
    silence(three, 3)
    three.heartbeat(1, offset=before)
    assert three.state(topic).last_known_elr == (3,)


def test_the_last_member_stays_and_leads_at_once_when_it_is_back(three: Controller) -> None:
    topic = three.assigned("t", (1, 2))
    three.alter_isr(topic, 0, [1])
    silence(three, 1)
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_epoch) == (-1, (1,), 1)
    assert three.image.required_brokers(topic, 0) == (1,)
    assert three.heartbeat(2).wanted_log_ends == []
    assert not three.heartbeat(1).is_fenced
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_epoch) == (1, (1,), 2)
    assert three.image.required_brokers(topic, 0) == ()


def test_brokers_that_fall_silent_together_are_not_elected_in_turn(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3))
    silence(three, 1, 2)
    assert three.state(topic).leader == 3
    assert three.state(topic).leader_epoch == 1


def test_a_controller_that_was_away_fences_nobody(three: Controller) -> None:
    three.now_ms += 100 * SESSION_MS
    three.core.sessions.extend(three.now_ms)
    assert three.expire() == []


def test_sessions_begin_anew_with_a_controller(three: Controller) -> None:
    three.now_ms += SESSION_MS - 1
    three.restart()
    assert three.expire() == []
    assert three.core.sessions.next_deadline_ms() == three.now_ms + SESSION_MS
    three.now_ms += SESSION_MS
    assert sorted(three.expire()) == [1, 2, 3]


# --- unclean stops


def test_an_unclean_return_leaves_isr_and_leadership_though_never_fenced(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3))
    three.restart()
    assert three.register(1, incarnation=2, previous=-1).error_code == 0
    state = three.state(topic)
    assert (state.leader, state.isr, state.last_known_elr) == (2, (2, 3), (1,))
    assert three.image.brokers[1].fenced


def test_a_wrong_clean_epoch_is_unclean(three: Controller) -> None:
    topic = three.assigned("t", (1,))
    epoch = three.image.brokers[1].broker_epoch
    three.restart()
    three.register(1, incarnation=2, previous=epoch + 1)
    assert three.state(topic).isr == ()
    assert three.image.required_brokers(topic, 0) == (1,)


def test_a_clean_return_keeps_the_last_membership(three: Controller) -> None:
    topic = three.assigned("t", (1,))
    epoch = three.image.brokers[1].broker_epoch
    three.restart()
    three.register(1, incarnation=2, previous=epoch)
    assert (three.state(topic).leader, three.state(topic).isr) == (-1, (1,))
    three.heartbeat(1)
    assert three.state(topic).leader == 1


@pytest.mark.parametrize("fenced_first", [False, True])
def test_a_power_cut_of_everything(three: Controller, *, fenced_first: bool) -> None:
    topic = three.assigned("t", (1, 2, 3))
    if fenced_first:
        three.now_ms += SESSION_MS
        for broker_id in three.core.brokers.expired(three.now_ms):  # one after the other, as sessions end
            three.run(three.core_fence(broker_id))
        assert three.state(topic).isr == (3,)
    else:
        three.restart()
    for broker_id in (2, 1):
        three.register(broker_id, incarnation=2)
        three.heartbeat(broker_id)
    # 3 seems to be alive, or is the last member: nothing may be decided without it.
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


def test_a_log_end_of_an_earlier_life_does_not_count(three: Controller) -> None:
    topic = three.assigned("t", (1, 2))
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


def test_equal_logs_follow_replica_order_among_those_that_can_lead(three: Controller) -> None:
    topic = three.assigned("t", (2, 1))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    three.heartbeat(1)
    three.heartbeat(2, offset=0, log_ends=[log_end(topic, 0, 5)])  # not caught up: stays fenced
    three.heartbeat(1, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == 1


def test_the_greatest_log_is_waited_for_until_it_can_lead(three: Controller) -> None:
    topic = three.assigned("t", (2, 1))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    three.heartbeat(1)
    three.heartbeat(2, offset=0, log_ends=[log_end(topic, 0, 6)])
    three.heartbeat(1, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    three.heartbeat(2)
    assert three.state(topic).leader == 2


def test_unclean_election_takes_the_greatest_that_is_here(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    three.alter_isr(topic, 0, [1])
    silence(three, 1)
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
def test_the_controllers_default_of_unclean_election_counts_where_the_topic_says_nothing(default: bool) -> None:
    controller = Controller(unclean_leader_election_enable=default)
    for broker_id in (1, 2):
        controller.join(broker_id)
    silent = controller.assigned("silent", (1, 2))
    other = controller.assigned("other", (1, 2), unclean_leader_election_enable=str(not default).lower())
    for topic in (silent, other):
        controller.alter_isr(topic, 0, [1])
    silence(controller, 1)
    unclean, clean = (silent, other) if default else (other, silent)
    assert controller.heartbeat(2).wanted_log_ends == [m.TopicIdPartition(unclean, 0)]
    controller.heartbeat(2, log_ends=[log_end(unclean, 0, 5)])
    assert (controller.state(unclean).leader, controller.state(clean).leader) == (2, -1)


def test_only_a_broker_that_knows_its_partitions_is_asked_for_log_ends(three: Controller) -> None:
    topic = three.assigned("t", (2, 1))
    three.restart()
    epoch = three.register(2, incarnation=2).broker_epoch
    three.register(1, incarnation=2)
    assert three.heartbeat(2, offset=epoch - 1).wanted_log_ends == ()
    assert three.heartbeat(2, offset=epoch).wanted_log_ends == [m.TopicIdPartition(topic, 0)]


def test_a_changed_configuration_allows_an_unclean_election(three: Controller) -> None:
    topic = three.assigned("t", (1, 2))
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


def test_a_broker_that_is_gone_no_longer_holds_up_an_unclean_election(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3), unclean_leader_election_enable="true")
    three.alter_isr(topic, 0, [1])
    silence(three, 1)
    three.heartbeat(2, log_ends=[log_end(topic, 0, 5)])
    assert three.state(topic).leader == -1
    silence(three, 3)
    assert three.state(topic).leader == 2


def test_no_log_end_is_asked_of_a_stranger(three: Controller) -> None:
    topic = three.assigned("t", (1, 2))
    three.restart()
    for broker_id in (1, 2):
        three.register(broker_id, incarnation=2)
    assert three.heartbeat(3).wanted_log_ends == []
    three.heartbeat(3, log_ends=[log_end(topic, 9, 99), log_end(b"?" * 16, 1, 1), log_end(topic, 1, 1, partition=7)])
    assert three.state(topic).leader == -1


# --- controlled shutdown


def test_controlled_shutdown_moves_everything_and_waits(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3))
    pair, single = three.assigned("pair", (2, 1)), three.assigned("single", (1,))
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
    # It returns clean, at once, and leads where it was the last.
    assert three.register(1, incarnation=2, previous=epoch).error_code == 0
    assert not three.heartbeat(1).is_fenced
    assert three.state(single).leader == 1
    assert three.state(topic).isr == (2, 3)


def test_the_last_broker_may_stop_at_once(controller: Controller) -> None:
    controller.join(1)
    topic = controller.assigned("t", (1,))
    response = controller.heartbeat(1, shut_down=True)
    assert (response.should_shut_down, response.is_fenced) == (True, True)
    assert controller.state(topic).isr == (1,)


def test_a_fenced_broker_may_stop_at_once(controller: Controller) -> None:
    controller.register(1)
    assert controller.heartbeat(1, shut_down=True).should_shut_down


def test_all_brokers_may_stop_together(three: Controller) -> None:
    three.assigned("t", (1, 2, 3))
    for broker_id in (1, 2, 3):
        three.heartbeat(broker_id, shut_down=True)
    assert all(three.heartbeat(broker_id, shut_down=True).should_shut_down for broker_id in (1, 2))
    assert not any(record.can_lead for record in three.image.brokers.values())


def test_a_shutdown_survives_a_new_controller(three: Controller) -> None:
    three.heartbeat(1, shut_down=True)
    three.restart()
    assert not three.heartbeat(1, shut_down=True).should_shut_down
    three.heartbeat(2)
    three.heartbeat(3)
    assert three.heartbeat(1, shut_down=True).should_shut_down


def test_a_broker_that_shuts_down_joins_no_isr_and_gets_no_replica(three: Controller) -> None:
    topic = three.assigned("t", (2, 1))
    three.heartbeat(1, shut_down=True)
    assert three.alter_isr(topic, 0, [2, 1]).error_code == ErrorCode.INELIGIBLE_REPLICA
    result = three.create("two", 4, 2)
    assert not any(1 in state.replicas for state in three.image.topics[result.topic_id].partitions.values())


def test_older_fencing_records_are_understood(three: Controller) -> None:
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
