"""Options and columns of writes, compatible with Spark's Kafka connector. Errors name the option or column."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.spark import options
from kipmesh.spark.offsets import InvalidOptionError
from kipmesh.spark.options import Mode, WriteOptions, check_columns, parse_write_options

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
HEADERS = "array<struct<key:string,value:binary>>"


def parse(mode: Mode = Mode.BATCH, /, **given: str) -> WriteOptions:
    return parse_write_options({**BASE, **given}, mode)


def test_write_options_have_defaults_and_ignore_case() -> None:
    options_of_write = parse()
    assert (options_of_write.topic, options_of_write.batch_id) == (None, None)
    assert options_of_write.write_ids
    assert options_of_write.include_headers
    assert parse(Mode.STREAM, TOPIC=" t ", checkpointlocation="/x").topic == "t"


def test_write_options_pass_client_settings_without_prefix() -> None:
    config = parse(**{"kafka.compression.type": "zstd", "kafka.linger.ms": "5", "kafka.client.id": "me"}).client_config
    assert (config["compression.type"], config["linger.ms"], config["client.id"]) == ("zstd", "5", "me")


@pytest.mark.parametrize("acks", ["all", "-1"])
def test_write_options_accept_settings_that_match_the_guarantees(acks: str) -> None:
    config = parse(**{"kafka.acks": acks, "kafka.enable.idempotence": "true", "kafka.retries": "9"}).client_config
    assert (config["acks"], config["enable.idempotence"], config["retries"]) == (acks, "true", "9")


@pytest.mark.parametrize(
    ("mode", "given", "name"),
    [
        (Mode.BATCH, {"topics": "t"}, "topics"),
        (Mode.BATCH, {"topic": ""}, "topic"),
        (Mode.BATCH, {"subscribe": "t"}, "subscribe"),
        (Mode.BATCH, {"path": "/x"}, "path"),
        (Mode.BATCH, {"kafka.bootstrap.servers": "host"}, "kafka.bootstrap.servers"),
        (Mode.BATCH, {"kafka.value.serializer": "x"}, "kafka.value.serializer"),
        (Mode.BATCH, {"kafka.transactional.id": "x"}, "kafka.transactional.id"),
        (Mode.BATCH, {"kafka.partitioner.class": "x"}, "kafka.partitioner.class"),
        (Mode.BATCH, {"kafka.compression.typ": "zstd"}, "kafka.compression.typ"),
        (Mode.BATCH, {"kafka.compression.type": "brotli"}, "kafka.compression.type"),
        (Mode.BATCH, {"kafka.acks": "0"}, "kafka.acks"),
        (Mode.STREAM, {"kafka.acks": "1"}, "kafka.acks"),
        (Mode.BATCH, {"kafka.acks": "1", "kafka.enable.idempotence": "true"}, "kafka.acks"),
        (Mode.BATCH, {"kafka.enable.idempotence": "false"}, "kafka.enable.idempotence"),
        (Mode.STREAM, {"KAFKA.Enable.Idempotence": "False"}, "kafka.enable.idempotence"),
        (Mode.BATCH, {"kafka.retries": "0"}, "kafka.retries"),
        (
            Mode.BATCH,
            {"kafka.max.in.flight.requests.per.connection": "6"},
            "kafka.max.in.flight.requests.per.connection",
        ),
        (Mode.BATCH, {"writeIds": "sometimes"}, "writeIds"),
        (Mode.BATCH, {"batchId": "x" * 201}, "batchId"),
        (Mode.BATCH, {"batchId": "x", "writeIds": "false"}, "batchId"),
        (Mode.STREAM, {"batchId": "x"}, "batchId"),
    ],
)
def test_invalid_write_option_is_named(mode: Mode, given: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse(mode, **given)
    assert caught.value.option == name


def test_valid_columns_are_accepted() -> None:
    check_columns({"value": "binary"}, parse(topic="t"))
    check_columns({"value": "string", "topic": "string", "key": "binary", "other": "double"}, parse())
    check_columns(
        {"value": "string", "headers": HEADERS, "partition": "int", "timestamp": "timestamp"}, parse(topic="t")
    )


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"key": "string"}, "column value is missing"),
        ({"value": "int"}, "column value must be string or binary, got int"),
        ({"value": "string", "key": "bigint"}, "column key must be string or binary, got bigint"),
        ({"value": "string", "partition": "bigint"}, "column partition must be int, got bigint"),
        ({"value": "string", "headers": "array<string>"}, "column headers must be .* got array<string>"),
        ({"value": "string", "timestamp": "bigint"}, "column timestamp must be timestamp, got bigint"),
    ],
)
def test_invalid_column_is_named(columns: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_columns(columns, parse(topic="t"))


def test_topic_option_or_column_is_required() -> None:
    with pytest.raises(InvalidOptionError, match="option topic is required"):
        check_columns({"value": "string"}, parse())
    with pytest.raises(ValueError, match="column topic must be string, got int"):
        check_columns({"value": "string", "topic": "int"}, parse())


def test_documentation_lists_each_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    reads, writes = page.split("## Options of writes")
    for known, part in ((options._KNOWN, reads), (options._WRITE_KNOWN, writes)):
        missing = [name for name in known if f"`{name}`" not in part and name != "checkpointLocation"]
        assert missing == []
    refused = {*options._REFUSED, *options._WRITE_REFUSED} - {"includeTimestamp", "path"}
    assert [name for name in sorted(refused) if f"`{name}`" not in page] == []
