from __future__ import annotations

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta
from tests.unit.core.metadata.metadata_support import Controller

SET, DELETE, APPEND = 0, 1, 2


@pytest.fixture
def controller() -> Controller:
    result = Controller(max_partitions_per_request=100)
    for broker_id in (1, 2, 3):
        result.join(broker_id, rack=f"rack-{broker_id}", leads=broker_id == 1)
    return result


def topic(name: str, partitions: int = 1, replicas: int = 1, **values: object) -> m.CreatableTopic:
    return m.CreatableTopic(name, partitions, replicas)._replace(**values)


def test_new_topic_gets_defaults_and_leader_service_leads(controller: Controller) -> None:
    result = controller.create("t", -1, -1, retention_ms="5")
    assert (result.error_code, result.num_partitions, result.replication_factor) == (0, 1, 3)
    assert len(result.topic_id) == 16
    state = controller.state(result.topic_id)
    assert state.replicas[0] == state.leader == 1
    assert set(state.isr) == {1, 2, 3}
    assert (state.leader_epoch, state.partition_epoch) == (0, 0)
    assert controller.image.topic_config("t") == {"retention.ms": "5"}
    kinds = [type(record) for record in controller.last_records]
    assert kinds == [r.TopicRecord, r.ConfigRecord, r.PartitionRecord]


def test_default_replication_factor_is_lowered_to_broker_count() -> None:
    controller = Controller()
    assert controller.create("none").error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    controller.join(1)
    assert controller.create("one").replication_factor == 1
    assert controller.create("two", 1, 2).error_code == ErrorCode.INVALID_REPLICATION_FACTOR


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 250, "a b", "a/b", "ä", "a\n", "a:b"])
def test_invalid_topic_names_are_refused(controller: Controller, name: str) -> None:
    assert controller.create(name).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


@pytest.mark.parametrize("name", ["a" * 249, "...", "_", "A-z.0_9"])
def test_valid_topic_names_are_accepted(controller: Controller, name: str) -> None:
    assert controller.create(name).error_code == 0


@pytest.mark.parametrize(
    ("requested", "code"),
    [
        (topic("t", 0), ErrorCode.INVALID_PARTITIONS),
        (topic("t", -2), ErrorCode.INVALID_PARTITIONS),
        (topic("t", 1, 0), ErrorCode.INVALID_REPLICATION_FACTOR),
        (topic("t", 1, -2), ErrorCode.INVALID_REPLICATION_FACTOR),
        (topic("t", 1, 4), ErrorCode.INVALID_REPLICATION_FACTOR),
        (topic("t", 101), ErrorCode.POLICY_VIOLATION),
        (topic("__cluster_metadata"), ErrorCode.INVALID_REQUEST),
        (topic("t", configs=[m.ConfigEntry("no.such.key", "1")]), ErrorCode.INVALID_CONFIG),
        (topic("t", configs=[m.ConfigEntry("retention.ms", "soon")]), ErrorCode.INVALID_CONFIG),
        (topic("t", configs=[m.ConfigEntry("retention.ms", None)]), ErrorCode.INVALID_CONFIG),
    ],
)
def test_invalid_topic_creations_are_refused(
    controller: Controller, requested: m.CreatableTopic, code: ErrorCode
) -> None:
    (result,) = controller.create_topics(requested)
    assert result.error_code == code
    assert result.error_message
    assert not controller.last_records


@pytest.mark.parametrize(
    ("assignment", "code"),
    [
        ([(0, [1, 2]), (1, [2, 1])], 0),
        ([(1, [1])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [1]), (0, [2])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [1, 1])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [9])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ([(0, [1]), (1, [1, 2])], ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_manual_replica_assignments_are_validated(
    controller: Controller, assignment: list[tuple[int, list[int]]], code: int
) -> None:
    assignments = [m.CreatableReplicaAssignment(*item) for item in assignment]
    (result,) = controller.create_topics(m.CreatableTopic("t", assignments=assignments))
    assert result.error_code == code
    (result,) = controller.create_topics(m.CreatableTopic("u", 1, -1, assignments))
    assert result.error_code == ErrorCode.INVALID_REQUEST


def test_fenced_brokers_are_excluded_from_new_isr(controller: Controller) -> None:
    controller.run(controller.core_fence(3))
    result = controller.create("t", 4, 2)
    states = controller.image.topics[result.topic_id].partitions.values()
    assert not any(3 in state.replicas for state in states)
    result = controller.create("u", 4, 3)
    for state in controller.image.topics[result.topic_id].partitions.values():
        assert set(state.replicas) == {1, 2, 3}
        assert set(state.isr) == {1, 2}
    assert controller.create_topics(m.CreatableTopic("v", assignments=[m.CreatableReplicaAssignment(0, [3])]))[
        0
    ].error_code


def test_duplicate_and_colliding_topic_names_are_refused(controller: Controller) -> None:
    assert controller.create("a.b").error_code == 0
    assert controller.create("a.b").error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    assert controller.create("a_b").error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert [result.error_code for result in controller.create_topics(topic("x"), topic("x"), topic("y"))] == [
        ErrorCode.INVALID_REQUEST,
        0,
    ]
    assert [result.error_code for result in controller.create_topics(topic("c.d"), topic("c_d"))] == [
        0,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    ]
    controller.run(controller.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState("a.b")])))
    assert controller.create("a_b").error_code == 0


def test_validate_only_creation_changes_nothing(controller: Controller) -> None:
    (good, bad) = controller.create_topics(topic("t", 2, 2), topic("u", 0), validate_only=True)
    assert (good.error_code, good.num_partitions, good.replication_factor) == (0, 2, 2)
    assert bad.error_code == ErrorCode.INVALID_PARTITIONS
    assert not controller.last_records
    assert not controller.image.topics


def test_partition_limit_applies_to_whole_create_request(controller: Controller) -> None:
    results = controller.create_topics(topic("a", 60), topic("b", 60), topic("c", 40))
    assert [result.error_code for result in results] == [0, ErrorCode.POLICY_VIOLATION, 0]


def test_topics_are_deleted_by_name_and_by_id(controller: Controller) -> None:
    first, second = controller.create("first", 2, retention_ms="5"), controller.create("second")
    states = [
        m.DeleteTopicState("first"),
        m.DeleteTopicState(None, second.topic_id),
        m.DeleteTopicState("first", first.topic_id),
        m.DeleteTopicState(None, first.topic_id),
        m.DeleteTopicState("no"),
        m.DeleteTopicState(None, b"?" * 16),
        m.DeleteTopicState("__cluster_metadata"),
        m.DeleteTopicState(),
    ]
    response = controller.run(controller.core.delete_topics(m.DeleteTopicsRequest(states)))
    assert [result.error_code for result in response.responses] == [
        0,
        0,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert [(result.name, result.topic_id) for result in response.responses[:2]] == [
        ("first", first.topic_id),
        ("second", second.topic_id),
    ]
    assert not controller.image.topics
    assert not controller.image.topic_names
    assert not controller.image.partitions_of_broker(1)
    assert controller.image.topic_config("first") == {}
    again = controller.create("first")
    assert again.error_code == 0
    assert again.topic_id != first.topic_id


def test_delta_contains_changed_partitions_topics_and_brokers(controller: Controller) -> None:
    start = len(controller.batches)
    kept, gone = controller.create("kept", 2), controller.create("gone", 2, retention_ms="5")
    controller.run(controller.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState("gone")])))
    controller.join(4)
    image = Controller().image
    image.offset = -1
    replayed, delta = controller.replayed(), MetadataDelta()
    assert replayed == controller.image
    fresh = type(image)()
    for batch in controller.batches[:start]:
        fresh.replay(batch, MetadataDelta())
    assert not delta
    for batch in controller.batches[start:]:
        fresh.replay(batch, delta)
    assert delta.changed_partitions == {(kept.topic_id, 0), (kept.topic_id, 1)}
    assert [topic.topic_id for topic in delta.deleted_topics] == [gone.topic_id]
    assert delta.changed_brokers == {4}
    assert delta.changed_topic_configs == set()
    again = MetadataDelta()
    fresh.replay(b"".join(controller.batches), again)
    assert not again, "applied batches are skipped"


def test_create_partitions_adds_partitions_and_validates_requests(controller: Controller) -> None:
    controller.create("t", 2, 2)

    def create_partitions(*topics: m.CreatePartitionsTopic, validate_only: bool = False) -> list[int]:
        request = m.CreatePartitionsRequest(topics, validate_only=validate_only)
        return [result.error_code for result in controller.run(controller.core.create_partitions(request)).results]

    more = m.CreatePartitionsTopic
    assert create_partitions(more("t", 4), validate_only=True) == [0]
    assert len(controller.image.topic_by_name("t").partitions) == 2  # type: ignore[union-attr]
    assert create_partitions(more("t", 4)) == [0]
    states = controller.image.topic_by_name("t").partitions  # type: ignore[union-attr]
    assert sorted(states) == [0, 1, 2, 3]
    assert {state.leader for state in states.values()} == {1}
    assert sorted(state.replicas[1] for state in states.values()) == [2, 2, 3, 3]
    assert create_partitions(more("t", 4), more("t", 5), more("no", 3), more("__cluster_metadata", 3)) == [
        ErrorCode.INVALID_PARTITIONS,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_REQUEST,
    ]
    assert create_partitions(more("t", 3)) == [ErrorCode.INVALID_PARTITIONS]
    assert create_partitions(more("t", 200)) == [ErrorCode.POLICY_VIOLATION]
    by_hand = m.CreatePartitionsAssignment
    assert create_partitions(more("t", 6, [by_hand([3, 2])])) == [ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert create_partitions(more("t", 5, [by_hand([3])])) == [ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert create_partitions(more("t", 5, [by_hand([3, 2])])) == [0]
    assert states[4].replicas == (3, 2)


# --- configurations


def alter(controller: Controller, *configs: m.AlterableConfig, name: str = "t", kind: int = 2, **values: bool) -> int:
    request = m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(kind, name, configs)], **values)
    (response,) = controller.run(controller.core.incremental_alter_configs(request)).responses
    assert (response.resource_type, response.resource_name) == (kind, name)
    code: int = response.error_code
    return code


def test_topic_configs_are_set_and_deleted(controller: Controller) -> None:
    controller.create("t")
    change = m.AlterableConfig
    assert alter(controller, change("retention.ms", SET, "7"), change("segment.ms", SET, "8")) == 0
    assert controller.image.topic_config("t") == {"retention.ms": "7", "segment.ms": "8"}
    assert alter(controller, change("retention.ms", SET, "7")) == 0
    assert not controller.last_records
    assert alter(controller, change("retention.ms", DELETE)) == 0
    assert alter(controller, change("retention.ms", DELETE)) == 0
    assert controller.image.topic_config("t") == {"segment.ms": "8"}
    assert alter(controller, change("segment.ms", SET, "9"), validate_only=True) == 0
    assert controller.image.topic_config("t") == {"segment.ms": "8"}
    assert alter(controller, change("segment.ms", DELETE)) == 0
    assert controller.image.topic_config("t") == {}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (m.AlterableConfig("no.such", SET, "1"), ErrorCode.INVALID_CONFIG),
        (m.AlterableConfig("no.such", DELETE), ErrorCode.INVALID_CONFIG),
        (m.AlterableConfig("retention.ms", SET, "x"), ErrorCode.INVALID_CONFIG),
        (m.AlterableConfig("retention.ms", SET, None), ErrorCode.INVALID_REQUEST),
        (m.AlterableConfig("retention.ms", APPEND, "1"), ErrorCode.INVALID_CONFIG),
        (m.AlterableConfig("retention.ms", 9, "1"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_invalid_topic_config_alterations_change_nothing(
    controller: Controller, config: m.AlterableConfig, code: ErrorCode
) -> None:
    controller.create("t")
    assert alter(controller, m.AlterableConfig("segment.ms", SET, "8"), config) == code
    assert controller.image.topic_config("t") == {}


def test_config_alterations_of_unsupported_resources_are_refused(controller: Controller) -> None:
    controller.create("t")
    change = m.AlterableConfig("retention.ms", SET, "7")
    assert alter(controller, change, name="no") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert alter(controller, change, name="__cluster_metadata") == ErrorCode.POLICY_VIOLATION
    assert alter(controller, change, name="1", kind=8) == ErrorCode.INVALID_REQUEST
    assert alter(controller, change, change) == ErrorCode.INVALID_REQUEST


def test_describe_configs_returns_values_sources_and_documentation(controller: Controller) -> None:
    controller.create("t", 1, 1, retention_ms="7")

    def describe(name: str, *keys: str, documentation: bool = False) -> m.DescribeConfigsResult:
        request = m.DescribeConfigsRequest(
            [m.DescribeConfigsResource(2, name, keys)], include_documentation=documentation
        )
        result: m.DescribeConfigsResult = controller.run(controller.core.describe_configs(request)).results[0]
        return result

    configs = {config.name: config for config in describe("t").configs}
    assert (configs["retention.ms"].value, configs["retention.ms"].config_source) == ("7", 1)
    assert (configs["segment.ms"].value, configs["segment.ms"].config_source) == ("604800000", 5)
    assert configs["unclean.leader.election.enable"].value == "false"
    # The default of 2 is limited by the topic's single replica.
    assert configs["min.insync.replicas"].value == "1"
    assert configs["segment.ms"].documentation is None
    (only,) = describe("t", "segment.ms", documentation=True).configs
    assert only.documentation
    assert describe("no").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    static = Controller(min_insync_replicas=3)
    static.join(1)
    static.create("t")
    request = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "t", ["min.insync.replicas"])])
    (config,) = static.run(static.core.describe_configs(request)).results[0].configs
    assert config.config_source == 4
    unclean = Controller(unclean_leader_election_enable=True)
    unclean.join(1)
    unclean.create("t")
    request = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "t", ["unclean.leader.election.enable"])])
    (config,) = unclean.run(unclean.core.describe_configs(request)).results[0].configs
    assert (config.value, config.config_source) == ("true", 4)
    broker = m.DescribeConfigsRequest([m.DescribeConfigsResource(8, "1")])
    assert unclean.run(unclean.core.describe_configs(broker)).results[0].error_code == ErrorCode.INVALID_REQUEST


# --- AlterPartition


def test_leader_alters_isr(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
    result = controller.alter_isr(topic_id, 0, [1, 2])
    assert (result.error_code, result.leader_id, result.leader_epoch, result.partition_epoch) == (0, 1, 0, 1)
    assert tuple(result.isr) == (1, 2)
    assert controller.state(topic_id).isr == (1, 2)
    result = controller.alter_isr(topic_id, 0, [1, 2])
    assert (result.error_code, result.partition_epoch) == (0, 1)
    assert not controller.last_records
    assert controller.alter_isr(topic_id, 0, [1, 2, 3]).partition_epoch == 2


def test_accepted_isr_change_clears_last_known_elr(controller: Controller) -> None:
    topic_id = controller.create_assigned("t", (1, 2, 3))
    controller.run(controller.core_fence(3))
    assert controller.state(topic_id).last_known_elr == (3,)
    assert controller.alter_isr(topic_id, 0, [1, 2]).error_code == 0
    assert controller.state(topic_id).last_known_elr == ()
    assert controller.state(topic_id).partition_epoch == 2


@pytest.mark.parametrize(
    ("isr", "values", "code"),
    [
        ([1, 2], {"leader_epoch": 5}, ErrorCode.NOT_CONTROLLER),
        ([1, 2], {"partition_epoch": 5}, ErrorCode.NOT_CONTROLLER),
        ([1, 2], {"leader_epoch": 0}, ErrorCode.FENCED_LEADER_EPOCH),
        ([1, 2], {"partition_epoch": 0}, ErrorCode.INVALID_UPDATE_VERSION),
        ([2], {}, ErrorCode.INVALID_REQUEST),
        ([], {}, ErrorCode.INVALID_REQUEST),
        ([1, 2, 2], {}, ErrorCode.INVALID_REQUEST),
        ([1, 4], {}, ErrorCode.INVALID_REQUEST),
        ([1, 2], {"broker_id": 2}, ErrorCode.INVALID_REQUEST),
        ([1], {"leader_recovery_state": 1}, ErrorCode.INVALID_REQUEST),
        ([1], {"leader_recovery_state": 7}, ErrorCode.INVALID_REQUEST),
        ([1], {"partition_index": 7}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([1, 3], {}, ErrorCode.INELIGIBLE_REPLICA),
        ([1, 2], {"members": [m.IsrMember(1), m.IsrMember(2, 1)]}, ErrorCode.INELIGIBLE_REPLICA),
        ([1, 2], {"members": [m.IsrMember(1), m.IsrMember(2)]}, 0),
    ],
)
def test_invalid_isr_changes_are_refused(
    controller: Controller, isr: list[int], values: dict[str, object], code: int
) -> None:
    controller.join(4)
    topic_id = controller.create_assigned("t", (2, 1, 3))
    controller.run(controller.core_fence(3))
    controller.run(controller.core_fence(2))
    controller.heartbeat(2)
    assert controller.state(topic_id).leader == 1
    before = controller.state(topic_id)
    result = controller.alter_isr(topic_id, 0, isr, **values)
    assert result.error_code == code
    if code:
        assert controller.state(topic_id) == before


def test_alter_partition_from_unknown_broker_or_topic_is_refused(controller: Controller) -> None:
    def alter_partition(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        response: m.AlterPartitionResponse = controller.run(controller.core.alter_partition(request))
        return response

    assert alter_partition(m.AlterPartitionRequest(9, 1)).error_code == ErrorCode.STALE_BROKER_EPOCH
    assert alter_partition(m.AlterPartitionRequest(1, 999)).error_code == ErrorCode.STALE_BROKER_EPOCH
    epoch = controller.image.brokers[1].broker_epoch
    unknown_topic = m.AlterPartitionTopic(b"?" * 16, [m.AlterPartitionPartition()])
    response = alter_partition(m.AlterPartitionRequest(1, epoch, [unknown_topic]))
    assert response.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    topic_id = controller.create_assigned("t", (1, 2))
    twice = m.AlterPartitionPartition(0, 0, 0, [m.IsrMember(1)])
    response = alter_partition(m.AlterPartitionRequest(1, epoch, [m.AlterPartitionTopic(topic_id, [twice, twice])]))
    assert [partition.error_code for partition in response.topics[0].partitions] == [0, ErrorCode.INVALID_REQUEST]
