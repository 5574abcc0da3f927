"""Options of the source, compatible with Spark's Kafka connector. Errors name the option."""

from __future__ import annotations

import pytest

from kipmesh.spark.offsets import InvalidOptionError, TopicPartition
from kipmesh.spark.options import BoundKind, Mode, SourceOptions, parse_options

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "a"}


def parse(mode: Mode = Mode.BATCH, /, **given: str) -> SourceOptions:
    return parse_options({**BASE, **given}, mode)


def test_read_options_have_defaults_of_the_kafka_connector() -> None:
    batch, stream = parse(Mode.BATCH), parse(Mode.STREAM)
    assert (batch.starting.kind, batch.ending.kind) == (BoundKind.EARLIEST, BoundKind.LATEST)
    assert stream.starting.kind is BoundKind.LATEST
    assert batch.fail_on_data_loss
    assert not batch.include_headers
    assert batch.min_partitions is None
    assert batch.topics == ("a",)


def test_names_of_read_options_are_case_insensitive() -> None:
    options = parse_options(
        {
            "KAFKA.BOOTSTRAP.SERVERS": "h:1",
            "SUBSCRIBE": "a, b,a",
            "startingoffsets": "EARLIEST",
            "IncludeHeaders": "TRUE",
        },
        Mode.STREAM,
    )
    assert options.topics == ("a", "b")
    assert options.starting.kind is BoundKind.EARLIEST
    assert options.include_headers


def test_read_options_pass_client_settings_without_prefix() -> None:
    options = parse(**{"kafka.request.timeout.ms": "5000", "kafka.max.partition.fetch.bytes": "65536"})
    assert options.client_config["request.timeout.ms"] == "5000"
    assert options.client_config["max.partition.fetch.bytes"] == "65536"
    assert "bootstrap.servers" not in options.client_config


def test_group_options_set_the_client_id_only() -> None:
    assert parse().client_config["client.id"] == "spark-kipmesh-source"
    assert parse(groupIdPrefix="mine").client_config["client.id"] == "mine"
    both = parse(**{"groupIdPrefix": "mine", "kafka.group.id": "g"})
    assert both.client_config["client.id"] == "g"
    assert "group.id" not in both.client_config
    assert parse(**{"groupIdPrefix": "mine", "kafka.client.id": "me"}).client_config["client.id"] == "me"


@pytest.mark.parametrize(
    ("given", "delay_ms"),
    [
        ("250", 250),
        ("250ms", 250),
        ("30s", 30_000),
        ("2m", 120_000),
        ("2 min", 120_000),
        ("1H", 3_600_000),
        ("1d", 86_400_000),
    ],
)
def test_max_trigger_delay_accepts_units(given: str, delay_ms: int) -> None:
    assert parse(Mode.STREAM, maxTriggerDelay=given).max_trigger_delay_ms == delay_ms


def test_max_trigger_delay_has_default_of_the_kafka_connector() -> None:
    assert parse(Mode.STREAM).max_trigger_delay_ms == 15 * 60_000


def test_starting_and_ending_offsets_are_parsed_from_json() -> None:
    options = parse(startingOffsets='{"a":{"0":23,"1":-2}}', endingOffsets='{"a":{"0":50,"1":-1}}')
    assert options.starting.positions == {TopicPartition("a", 0): 23, TopicPartition("a", 1): -2}
    assert options.ending.positions == {TopicPartition("a", 0): 50, TopicPartition("a", 1): -1}


def test_timestamp_overrides_timestamps_by_partition_and_offsets() -> None:
    both = parse(
        startingTimestamp="1000", startingOffsetsByTimestamp='{"a":{"0":1}}', endingOffsetsByTimestamp='{"a":{"0":7}}'
    )
    assert (both.starting.kind, both.starting.timestamp_ms) == (BoundKind.TIMESTAMP, 1000)
    assert both.ending.positions == {TopicPartition("a", 0): 7}


def test_assign_and_subscribe_pattern_select_partitions() -> None:
    assigned = parse_options({"kafka.bootstrap.servers": "h:1", "assign": '{"b":[1,0],"a":[2]}'}, Mode.BATCH)
    assert assigned.assignment == (TopicPartition("a", 2), TopicPartition("b", 0), TopicPartition("b", 1))
    pattern = parse_options({"kafka.bootstrap.servers": "h:1", "subscribePattern": "fl.*"}, Mode.BATCH)
    assert pattern.pattern == "fl.*"


@pytest.mark.parametrize(
    ("mode", "given", "name"),
    [
        (Mode.BATCH, {"startingOffset": "earliest"}, "startingOffset"),
        (Mode.BATCH, {"assign": '{"a":[0]}'}, "subscribe"),
        (Mode.BATCH, {"subscribe": ""}, "subscribe"),
        (Mode.BATCH, {"subscribe": "a,,b"}, "subscribe"),
        (Mode.BATCH, {"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers"),
        (Mode.BATCH, {"kafka.bootstrap.servers": "host"}, "kafka.bootstrap.servers"),
        (Mode.BATCH, {"startingOffsets": "latest"}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": '{"a":{"0":-1}}'}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": '{"a":{"0":-3}}'}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": '{"a":{"0":1.5}}'}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": '{"a":{"x":1}}'}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": '{"a":5}'}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": "{"}, "startingOffsets"),
        (Mode.BATCH, {"startingOffsets": "[]"}, "startingOffsets"),
        (Mode.BATCH, {"endingOffsets": "earliest"}, "endingOffsets"),
        (Mode.BATCH, {"endingOffsets": '{"a":{"0":-2}}'}, "endingOffsets"),
        (Mode.BATCH, {"endingTimestamp": "yesterday"}, "endingTimestamp"),
        (Mode.BATCH, {"startingOffsetsByTimestamp": '{"a":{"0":-1}}'}, "startingOffsetsByTimestamp"),
        (Mode.BATCH, {"startingOffsetsByTimestampStrategy": "maybe"}, "startingOffsetsByTimestampStrategy"),
        (Mode.BATCH, {"maxOffsetsPerTrigger": "10"}, "maxOffsetsPerTrigger"),
        (Mode.BATCH, {"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        (Mode.BATCH, {"minPartitions": "0"}, "minPartitions"),
        (Mode.BATCH, {"maxTasks": "none"}, "maxTasks"),
        (Mode.STREAM, {"maxTasks": "3", "minPartitions": "4"}, "minPartitions"),
        (Mode.BATCH, {"maxTasks": "3", "maxRecordsPerPartition": "4"}, "maxTasks"),
        (Mode.BATCH, {"maxRecordsPerPartition": "-4"}, "maxRecordsPerPartition"),
        (Mode.BATCH, {"minOffsetsPerTrigger": "10"}, "minOffsetsPerTrigger"),
        (Mode.BATCH, {"maxTriggerDelay": "10s"}, "maxTriggerDelay"),
        (Mode.BATCH, {"groupIdPrefix": ""}, "groupIdPrefix"),
        (Mode.BATCH, {"kafka.group.id": "x" * 250}, "kafka.group.id"),
        (Mode.BATCH, {"kafkaConsumer.pollTimeoutMs": "0"}, "kafkaConsumer.pollTimeoutMs"),
        (Mode.BATCH, {"includeRecordId": "1"}, "includeRecordId"),
        (Mode.BATCH, {"fetchOffset.numRetries": "3"}, "fetchOffset.numRetries"),
        (Mode.BATCH, {"topic": "a"}, "topic"),
        (Mode.BATCH, {"kafka.fetch.min.byte": "1"}, "kafka.fetch.min.byte"),
        (Mode.BATCH, {"kafka.session.timeout.ms": "10"}, "kafka.*"),
        (Mode.BATCH, {"kafka.max.partition.fetch.bytes": "x"}, "kafka.max.partition.fetch.bytes"),
        (Mode.STREAM, {"endingOffsets": "latest"}, "endingOffsets"),
        (Mode.STREAM, {"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger"),
        (Mode.STREAM, {"minOffsetsPerTrigger": "-5"}, "minOffsetsPerTrigger"),
        (Mode.STREAM, {"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger"),
        (Mode.STREAM, {"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        (Mode.STREAM, {"maxTriggerDelay": "5 weeks"}, "maxTriggerDelay"),
    ],
)
def test_invalid_read_option_is_named(mode: Mode, given: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse(mode, **given)
    assert caught.value.option == name
    assert f"option {name} " in str(caught.value)


def test_invalid_subscribe_pattern_is_named() -> None:
    with pytest.raises(InvalidOptionError, match="subscribePattern"):
        parse_options({"kafka.bootstrap.servers": "h:1", "subscribePattern": "("}, Mode.BATCH)
