"""Requested elections, and leader balancing towards the leader service."""

from __future__ import annotations

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.elections import ElectionResult
from kipmesh.messages import ElectionType
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

PREFERRED, UNCLEAN = ElectionType.PREFERRED, ElectionType.UNCLEAN


@pytest.fixture
def three() -> Controller:
    """Return a controller with leader service 1 and followers 2 and 3."""
    controller = Controller()
    for broker_id in (1, 2, 3):
        controller.join(broker_id, leads=broker_id == 1)
    return controller


def elect(controller: Controller, kind: ElectionType, *wanted: tuple[str, int]) -> list[ElectionResult]:
    results: list[ElectionResult] = controller.run(controller.core.elect_leaders(kind, wanted))
    assert [(result.topic, result.partition) for result in results] == list(dict.fromkeys(wanted))
    return results


def codes(controller: Controller, kind: ElectionType, *wanted: tuple[str, int]) -> list[ErrorCode]:
    return [result.code for result in elect(controller, kind, *wanted)]


def balance(controller: Controller, count_max: int = 1000) -> int:
    keys = controller.core.preferred_candidates().response
    moved: int = controller.run(controller.core.elect_preferred(keys, count_max))
    return moved


def fail_and_return(controller: Controller, broker_id: int = 1) -> None:
    """Fence a broker and register a new incarnation. Its replicas are behind."""
    controller.run(controller.core_fence(broker_id))
    controller.now_ms += SESSION_MS + 1
    for other in controller.image.brokers:
        if other != broker_id:
            controller.heartbeat(other)
    controller.join(broker_id, incarnation=7, leads=True)


def test_new_topic_is_led_by_leader_service(three: Controller) -> None:
    three.create("t", 6, 3)
    assert not three.image.imbalanced
    assert codes(three, PREFERRED, ("t", 0)) == [ErrorCode.ELECTION_NOT_NEEDED]
    assert not three.last_records
    assert three.core.partitions_to_elect(PREFERRED).response == []


def test_leadership_returns_to_leader_service_when_in_sync(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3), (1, 3, 2), (2, 1, 3))
    fail_and_return(three)
    assert [three.state(topic, number).leader for number in range(3)] == [2, 3, 2]
    assert three.image.imbalance_count == 2
    behind = elect(three, PREFERRED, ("t", 0))
    assert [result.code for result in behind] == [ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE]
    assert "is not in the ISR" in (behind[0].message or "")
    assert balance(three) == 0
    three.alter_isr(topic, 0, [2, 3, 1])
    assert balance(three) == 1
    state = three.state(topic, 0)
    assert (state.leader, state.isr, three.state(topic, 1).leader) == (1, (2, 3, 1), 3)
    three.alter_isr(topic, 1, [2, 3, 1])
    assert elect(three, PREFERRED, ("t", 1), ("t", 2), ("t", 1))[0].code is ErrorCode.NONE
    assert three.state(topic, 1).leader == 1
    assert three.image.imbalance_count == 0
    assert three.replayed() == three.image


def test_fenced_or_stopping_leader_service_is_not_elected(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    three.run(three.core_fence(1))
    assert codes(three, PREFERRED, ("t", 0)) == [ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE]
    assert three.core.preferred_candidates().response == []
    three.heartbeat(1)
    three.alter_isr(topic, 0, [1, 2, 3])
    epoch = three.image.brokers[1].broker_epoch
    assert not three.heartbeat(1, shut_down=True, offset=epoch).should_shut_down
    assert three.state(topic).leader != 1
    assert codes(three, PREFERRED, ("t", 0)) == [ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE]
    assert balance(three) == 0


def test_leader_balancing_round_is_bounded(three: Controller) -> None:
    topic = three.create_assigned("t", *[(1, 2, 3)] * 5)
    fail_and_return(three)
    for number in range(5):
        three.alter_isr(topic, number, [1, 2, 3])
    assert [balance(three, 2) for _ in range(4)] == [2, 2, 1, 0]


def test_election_of_unknown_partition_is_refused(three: Controller) -> None:
    three.create_assigned("t", (1, 2, 3))
    for kind in ElectionType:
        wanted = (("u", 0), ("t", 1), ("t", -1), ("", 0), ("x" * 100_000, 2**31))
        results = elect(three, kind, *wanted)
        assert {result.code for result in results} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        assert max(len(result.message or "") for result in results) < 1000


def test_preferred_election_keeps_last_known_elr_until_leader_proves_itself(three: Controller) -> None:
    """A member that left the ISR before the leader proved itself stays in the last known ELR."""
    topic = three.create_assigned("t", (1, 2, 3))
    three.run(three.core_fence(1))
    three.heartbeat(1)
    three.alter_isr(topic, 0, [1, 2, 3])
    three.run(three.core_fence(3))
    assert three.state(topic).last_known_elr == (3,)
    assert codes(three, PREFERRED, ("t", 0)) == [ErrorCode.NONE]
    state = three.state(topic)
    assert (state.leader, state.last_known_elr) == (1, (3,))
    assert list(three.image.unproven(1)) == [(topic, 0)]
    assert not three.image.unproven(2)
    three.heartbeat(1)
    assert three.state(topic).last_known_elr == ()


# --- unclean elections


def offline(controller: Controller) -> bytes:
    """Create a partition whose only ISR member is fenced. Replicas 2 and 3 are live and have parts of its log."""
    topic = controller.create_assigned("t", (1, 2, 3))
    controller.alter_isr(topic, 0, [1])
    controller.run(controller.core_fence(1))
    assert controller.state(topic).leader == -1
    return topic


def test_unclean_election_waits_for_log_ends_and_takes_longest(three: Controller) -> None:
    topic = offline(three)
    assert three.core.partitions_to_elect(UNCLEAN).response == [("t", 0)]
    assert not three.heartbeat(2).wanted_log_ends
    waits = elect(three, UNCLEAN, ("t", 0))[0]
    assert (waits.code, waits.is_pending) == (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, True)
    assert not three.last_records
    assert three.heartbeat(2).wanted_log_ends == [m.TopicIdPartition(topic, 0)]
    three.heartbeat(2, log_ends=[m.PartitionLogEnd(topic, 0, 0, 7)])
    assert elect(three, UNCLEAN, ("t", 0))[0].is_pending
    three.heartbeat(3, log_ends=[m.PartitionLogEnd(topic, 0, 0, 9)])
    state = three.state(topic)
    assert (state.leader, state.isr, state.leader_recovery_state) == (3, (3,), 1)
    assert codes(three, UNCLEAN, ("t", 0)) == [ErrorCode.ELECTION_NOT_NEEDED]


def test_unclean_election_is_immediate_if_log_ends_are_known(three: Controller) -> None:
    topic = offline(three)
    elect(three, UNCLEAN, ("t", 0))
    three.heartbeat(2, log_ends=[m.PartitionLogEnd(topic, 0, 0, 7)])
    three.run(three.core.withdraw_elections([("t", 0), ("gone", 0)]))
    three.heartbeat(3, log_ends=[m.PartitionLogEnd(topic, 0, 0, 9)])
    assert three.state(topic).leader == -1
    assert not three.heartbeat(2).wanted_log_ends
    assert codes(three, UNCLEAN, ("t", 0)) == [ErrorCode.NONE]
    assert three.state(topic).leader == 3


def test_unclean_election_without_live_replicas_is_not_available(three: Controller) -> None:
    topic = offline(three)
    for broker_id in (2, 3):
        three.run(three.core_fence(broker_id))
    result = elect(three, UNCLEAN, ("t", 0))[0]
    assert (result.code, result.is_pending) == (ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, False)
    three.heartbeat(1)
    assert three.state(topic).leader == 1


def test_unclean_election_request_ends_with_leader_or_topic_deletion(three: Controller) -> None:
    topic = offline(three)
    elect(three, UNCLEAN, ("t", 0))
    three.heartbeat(1)
    assert three.state(topic).leader == 1
    three.alter_isr(topic, 0, [1])
    three.run(three.core_fence(1))
    assert not three.heartbeat(2).wanted_log_ends, "the request ended with the previous election"
    elect(three, UNCLEAN, ("t", 0))
    three.run(three.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState("t")])))
    assert not three.heartbeat(2).wanted_log_ends
