"""Draining a broker, unregistering it, and dynamic broker configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import draining
from kipmesh.core.metadata.draining import PLANNED_MAX
from kipmesh.core.metadata.reassignments import target_replicas
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller
from tests.unit.core.metadata.test_metadata_reassignments import reassign

RATE = "follower.replication.throttled.rate"


def cluster(brokers: int = 6, **values: Any) -> Controller:
    """Create a controller with brokers in three racks. Brokers 1 and 4 are leader services."""
    controller = Controller(**values)
    for broker in range(1, brokers + 1):
        controller.join(broker, rack=f"rack-{broker % 3}", leads=broker in (1, 4))
    return controller


def plan(controller: Controller, broker: int) -> m.PlanBrokerDrainResponse:
    response: m.PlanBrokerDrainResponse = controller.run(
        controller.core.plan_broker_drain(m.PlanBrokerDrainRequest(broker))
    )
    return response


def wanted(response: m.PlanBrokerDrainResponse) -> dict[tuple[str, int], tuple[int, ...]]:
    assert not response.error_code, response
    return {(t.name, p.partition_index): tuple(p.replicas or ()) for t in response.topics for p in t.partitions}


def heartbeats(controller: Controller, *brokers: int) -> None:
    """Advance the clock beyond the session timeout. Only these brokers send heartbeats."""
    for _ in range(3):
        controller.now_ms += SESSION_MS // 2
        for broker in brokers:
            controller.heartbeat(broker)
        controller.expire()


def test_drain_plan_replaces_one_replica_within_rack_rules() -> None:
    controller = cluster()
    controller.create_assigned("t", (1, 2, 3), (2, 3, 1), (4, 5, 6))
    # Without broker 1, its rack has no replica and only broker 4.
    assert wanted(plan(controller, 1)) == {("t", 0): (4, 2, 3), ("t", 1): (2, 3, 4)}
    assert wanted(plan(controller, 2)) == {("t", 0): (1, 5, 3), ("t", 1): (1, 3, 5)}
    assert wanted(plan(controller, 5)) == {("t", 2): (4, 2, 6)}


def test_drain_plan_keeps_leader_service_first() -> None:
    controller = cluster()
    controller.create_assigned("t", (1, 2))
    assert wanted(plan(controller, 1)) == {("t", 0): (4, 2)}
    heartbeats(controller, 1, 2, 3, 5, 6)  # broker 4 is fenced
    controller.create_assigned("u", (1, 2), (2, 1))
    assert wanted(plan(controller, 1))["u", 0] == (2, 6)
    assert wanted(plan(controller, 2))["u", 1] == (1, 6)  # no leader service is available, but the partition has one


def test_drain_plan_balances_load() -> None:
    controller = Controller()
    for broker in range(1, 5):
        controller.join(broker)
    controller.create_assigned("t", *[(1,)] * 9)
    taken = Counter(replicas[0] for replicas in wanted(plan(controller, 1)).values())
    assert taken == {2: 3, 3: 3, 4: 3}


def walk(
    controller: Controller, broker: int, cursor: m.DrainCursor | None = None, *, is_check: bool = False
) -> list[m.PlanBrokerDrainResponse]:
    """Return all plans from the cursor, without executing them."""
    plans = []
    while True:
        request = m.PlanBrokerDrainRequest(broker, 1000, cursor, is_check)
        plans.append(controller.run(controller.core.plan_broker_drain(request)))
        cursor = plans[-1].next_cursor
        if cursor is None:
            return plans


def test_drain_walk_moves_all_replicas_of_broker() -> None:
    total = 2 * PLANNED_MAX + 1
    controller = cluster(max_partitions_per_request=total)
    topic = controller.create_assigned("t", *[(1, 2, 3)] * total)
    sizes, cursor = [], None
    while True:
        response = controller.run(controller.core.plan_broker_drain(m.PlanBrokerDrainRequest(1, 1000, cursor)))
        sizes.append((len(wanted(response)), response.replicas, response.leaving))
        controller.run(
            controller.core.alter_partition_reassignments(m.AlterPartitionReassignmentsRequest(1, response.topics))
        )
        cursor = response.next_cursor
        if cursor is None:
            break
    assert sizes == [(PLANNED_MAX, total, 0), (PLANNED_MAX, total, 0), (1, total, 0)]
    assert plan(controller, 1) == m.PlanBrokerDrainResponse(replicas=total, leaving=total)
    for partition in range(total):
        assert 1 not in target_replicas(controller.state(topic, partition))
        controller.alter_isr(topic, partition, [1, 2, 3, 4])
    assert plan(controller, 1) == m.PlanBrokerDrainResponse()


def test_drain_walk_names_each_partition_once() -> None:
    total = 2 * PLANNED_MAX + 1
    controller = cluster(max_partitions_per_request=total)
    controller.create_assigned("t", *[(1, 2, 3)] * total)
    controller.create_assigned("u", (1, 2, 3))
    plans = walk(controller, 1)
    named = [partition for plan_ in plans for partition in wanted(plan_)]
    assert sorted(named) == [*[("t", number) for number in range(total)], ("u", 0)]
    loads = Counter(broker for plan_ in plans for replicas in wanted(plan_).values() for broker in replicas)
    assert loads[4] == total + 1, "the only broker of its rack"
    first = plan(controller, 1)
    controller.run(controller.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState("t")])))
    (rest,) = walk(controller, 1, first.next_cursor)
    assert wanted(rest) == {("u", 0): (4, 2, 3)}


def test_drain_walk_balances_load_across_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PLANNED_MAX", 2)
    controller = Controller()
    for broker in range(1, 5):
        controller.join(broker)
    controller.create_assigned("t", *[(1,)] * 9)
    taken = Counter(replicas[0] for plan_ in walk(controller, 1) for replicas in wanted(plan_).values())
    assert taken == {2: 3, 3: 3, 4: 3}


def test_drain_step_checks_bounded_number_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load counting, leaving partitions and checks all count towards the limit of plan_ step."""
    monkeypatch.setattr(draining, "CHECKED_MAX", 10)
    controller = cluster(max_partitions_per_request=100)
    controller.create_assigned("t", *[(1, 2, 3)] * 35)
    assert [len(wanted(plan_)) for plan_ in walk(controller, 1, is_check=True)] == [0] * 4
    plans = walk(controller, 1)
    assert [len(wanted(plan_)) for plan_ in plans] == [1, 10, 10, 10, 4]
    for plan_ in plans:
        controller.run(
            controller.core.alter_partition_reassignments(m.AlterPartitionReassignmentsRequest(1, plan_.topics))
        )
    assert [plan_.leaving for plan_ in walk(controller, 1)] == [10, 10, 10, 5]


def test_evicted_drain_walk_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients can drain the same broker. The oldest of too many walks is evicted."""
    monkeypatch.setattr(draining, "PLANNED_MAX", 1)
    monkeypatch.setattr(draining, "WALKS_MAX", 2)
    controller = cluster()
    controller.create_assigned("t", *[(1, 2, 3)] * 3)
    first, second = plan(controller, 1), plan(controller, 1)
    assert first.next_cursor != second.next_cursor
    for started in (second, first):
        assert [list(wanted(plan_)) for plan_ in walk(controller, 1, started.next_cursor)] == [[("t", 1)], [("t", 2)]]
    evicted, *_ = [plan(controller, 1).next_cursor for _ in range(3)]
    for cursor in (evicted, m.DrainCursor(77, "t", 1)):
        assert len(walk(controller, 1, cursor)) == 3
    other = plan(controller, 2).next_cursor
    assert len(walk(controller, 1, other)) == 3, "a cursor of another broker"


def test_drain_plan_without_target_brokers_is_refused() -> None:
    controller = cluster(3)
    controller.create_assigned("t", (1, 2))
    controller.create_assigned("u", (1, 2, 3))
    response = plan(controller, 1)
    assert response.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    assert response.error_message is not None
    assert "'u'" in response.error_message
    assert not response.topics
    assert plan(controller, 9).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    heartbeats(controller, 1, 2)
    assert plan(controller, 1).error_code == ErrorCode.INVALID_REPLICATION_FACTOR  # fenced brokers get no replicas


def unregister(controller: Controller, broker: int) -> int:
    response = controller.run(controller.core.unregister_broker(m.UnregisterBrokerRequest(broker)))
    assert bool(response.error_message) == bool(response.error_code)
    code: int = response.error_code
    return code


def test_only_empty_stopped_broker_can_be_unregistered() -> None:
    controller = cluster(4)
    controller.create_assigned("t", (1, 2))
    assert unregister(controller, 9) == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert unregister(controller, 1) == ErrorCode.POLICY_VIOLATION
    assert unregister(controller, 3) == ErrorCode.INVALID_REQUEST
    reassign(controller, (2, 4))
    heartbeats(controller, 1, 2, 4)  # broker 3 is stopped
    assert unregister(controller, 3) == 0
    assert 3 not in controller.image.brokers
    assert unregister(controller, 3) == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert controller.heartbeat(3, epoch=1).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    assert controller.replayed() == controller.image
    controller.register(3, incarnation=2)
    assert unregister(controller, 3) == ErrorCode.INVALID_REQUEST  # the broker is starting
    heartbeats(controller, 2, 4)  # broker 1 fails before it is empty
    assert unregister(controller, 1) == ErrorCode.POLICY_VIOLATION


# --- dynamic configuration of brokers


def alter(controller: Controller, name: str, *configs: m.AlterableConfig) -> int:
    request = m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(4, name, configs)])
    (response,) = controller.run(controller.core.incremental_alter_configs(request)).responses
    code: int = response.error_code
    return code


def described(controller: Controller, name: str) -> list[tuple[str, str | None, int]]:
    request = m.DescribeConfigsRequest([m.DescribeConfigsResource(4, name)], include_documentation=True)
    (result,) = controller.run(controller.core.describe_configs(request)).results
    assert result.error_code == 0
    assert all(config.documentation for config in result.configs)
    return [(config.name, config.value, config.config_source) for config in result.configs]


def test_replication_throttle_is_configured_per_broker_and_cluster_wide() -> None:
    controller = cluster(2)
    assert described(controller, "1") == []
    assert alter(controller, "", m.AlterableConfig(RATE, 0, "1000")) == 0
    assert alter(controller, "1", m.AlterableConfig(RATE, 0, "0050")) == 0
    assert described(controller, "1") == [(RATE, "50", 2)]
    assert described(controller, "2") == described(controller, "") == [(RATE, "1000", 3)]
    assert alter(controller, "1", m.AlterableConfig(RATE, 0, "50")) == 0
    assert not controller.last_records
    assert controller.replayed().broker_config("1") == {RATE: "50"}
    assert alter(controller, "1", m.AlterableConfig(RATE, 1)) == 0
    assert alter(controller, "", m.AlterableConfig(RATE, 1)) == 0
    assert described(controller, "1") == []


def test_unregistering_broker_removes_its_config() -> None:
    controller = cluster(3)
    for name in ("", "2", "3"):
        assert alter(controller, name, m.AlterableConfig(RATE, 0, "50")) == 0
    heartbeats(controller, 1, 2)  # broker 3 is stopped
    assert unregister(controller, 3) == 0
    assert controller.image.broker_config("3") == {}
    assert controller.image.broker_config("2") == controller.image.broker_config("") == {RATE: "50"}
    assert controller.replayed() == controller.image
    assert alter(controller, "", m.AlterableConfig(RATE, 1)) == 0
    controller.register(3, incarnation=2)
    assert described(controller, "3") == []


@pytest.mark.parametrize(
    ("name", "config", "code"),
    [
        ("7", m.AlterableConfig(RATE, 0, "1"), ErrorCode.BROKER_ID_NOT_REGISTERED),
        ("one", m.AlterableConfig(RATE, 0, "1"), ErrorCode.BROKER_ID_NOT_REGISTERED),
        ("9" * 5000, m.AlterableConfig(RATE, 0, "1"), ErrorCode.BROKER_ID_NOT_REGISTERED),
        ("1", m.AlterableConfig(RATE, 0, None), ErrorCode.INVALID_REQUEST),
        ("1", m.AlterableConfig(RATE, 7, "1"), ErrorCode.INVALID_REQUEST),
        ("1", m.AlterableConfig(RATE, 2, "1"), ErrorCode.INVALID_CONFIG),
        ("1", m.AlterableConfig("log.dirs", 0, "1"), ErrorCode.INVALID_CONFIG),
        *[
            ("1", m.AlterableConfig(RATE, 0, bad), ErrorCode.INVALID_CONFIG)
            for bad in ("0", "-1", "x", "", "1.5", str(2**63), "9" * 5000, "\u0661")
        ],
    ],
)
def test_invalid_broker_config_is_refused(name: str, config: m.AlterableConfig, code: ErrorCode) -> None:
    controller = cluster(2)
    assert alter(controller, name, config) == code
    assert alter(controller, "1", m.AlterableConfig(RATE, 0, "1"), m.AlterableConfig(RATE, 0, "2")) == (
        ErrorCode.INVALID_REQUEST
    )
