"""Options and columns of writes: as Spark's Kafka connector has them, and every refusal names its option or column."""

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


def test_defaults() -> None:
    chosen = parse()
    assert (chosen.topic, chosen.batch_id) == (None, None)
    assert chosen.write_ids
    assert chosen.include_headers
    assert parse(Mode.STREAM, TOPIC=" t ", checkpointlocation="/x").topic == "t"


def test_client_settings_pass_without_the_prefix() -> None:
    config = parse(**{"kafka.compression.type": "zstd", "kafka.linger.ms": "5", "kafka.client.id": "me"}).client_config
    assert (config["compression.type"], config["linger.ms"], config["client.id"]) == ("zstd", "5", "me")


@pytest.mark.parametrize("acks", ["all", "-1"])
def test_what_is_promised_may_be_said(acks: str) -> None:
    config = parse(**{"kafka.acks": acks, "kafka.enable.idempotence": "true", "kafka.retries": "9"}).client_config
    assert (config["acks"], config["enable.idempotence"], config["retries"]) == (acks, "true", "9")


@pytest.mark.parametrize(
    ("mode", "given", "named"),
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
def test_a_bad_option_is_named(mode: Mode, given: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse(mode, **given)
    assert caught.value.option == named


def test_columns() -> None:
    check_columns({"value": "binary"}, parse(topic="t"))
    check_columns({"value": "string", "topic": "string", "key": "binary", "other": "double"}, parse())
    check_columns(
        {"value": "string", "headers": HEADERS, "partition": "int", "timestamp": "timestamp"}, parse(topic="t")
    )


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"key": "string"}, "column value is missing"),
        ({"value": "int"}, "column value must be string or binary, got int"),
        ({"value": "string", "key": "bigint"}, "column key must be string or binary, got bigint"),
        ({"value": "string", "partition": "bigint"}, "column partition must be int, got bigint"),
        ({"value": "string", "headers": "array<string>"}, "column headers must be .* got array<string>"),
        ({"value": "string", "timestamp": "bigint"}, "column timestamp must be timestamp, got bigint"),
    ],
)
def test_a_bad_column_is_named(columns: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_columns(columns, parse(topic="t"))


def test_a_topic_is_needed() -> None:
    with pytest.raises(InvalidOptionError, match="option topic is required"):
        check_columns({"value": "string"}, parse())
    with pytest.raises(ValueError, match="column topic must be string, got int"):
        check_columns({"value": "string", "topic": "int"}, parse())


def test_the_page_lists_every_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    reads, writes = page.split("## Options of writes")
    for names, part in ((options._KNOWN, reads), (options._WRITE_KNOWN, writes)):
        missing = [name for name in names if f"`{name}`" not in part and name != "checkpointLocation"]
        assert missing == []
    refused = {*options._REFUSED, *options._WRITE_REFUSED} - {"includeTimestamp", "path"}
    assert [name for name in sorted(refused) if f"`{name}`" not in page] == []
