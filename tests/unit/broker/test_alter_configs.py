"""AlterConfigs: the keys of the request replace all keys of the resource."""

import asyncio

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kipmesh import messages as m
from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE as RATE
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.kafka_cluster import kafka_cluster


async def alter(cluster, *resources, validate_only: bool = False) -> list[int]:
    requested = [
        m.ReplacedConfigsResource(kind, name, [m.ReplacedConfig(*entry) for entry in entries])
        for kind, name, entries in resources
    ]
    response = await cluster.call(2, "AlterConfigs", m.AlterConfigsRequest(requested, validate_only), "Admin")
    assert [result[2:] for result in response.responses] == [resource[:2] for resource in resources]
    return [result.error_code for result in response.responses]


async def test_alter_configs_removes_keys_missing_from_request(cluster) -> None:
    await cluster.create("t", retention_ms="1000", segment_bytes="100000")
    image = cluster.controller.image
    wanted = {"retention.ms": "2000", "max.message.bytes": "5000"}
    for validate_only, after in ((True, {"retention.ms": "1000", "segment.bytes": "100000"}), (False, wanted)):
        assert await alter(cluster, (2, "t", wanted.items()), validate_only=validate_only) == [0]
        assert image.topic_config("t") == after
    assert await alter(cluster, (4, "", [(RATE, "7")]), (4, "1", [(RATE, "8")]), (2, "t", ())) == [0, 0, 0]
    assert [image.topic_config("t"), *map(image.broker_config, ("", "1"))] == [{}, {RATE: "7"}, {RATE: "8"}]
    assert await alter(cluster, (4, "", ()), (4, "01", ())) == [0, 0]
    assert (image.broker_config(""), image.broker_config("1")) == ({}, {})


async def test_alter_configs_leaves_refused_resource_unchanged(cluster) -> None:
    await cluster.create("t", retention_ms="1000")
    await cluster.create("other", retention_ms="1000")
    invalid, unchanged = ErrorCode.INVALID_REQUEST, (2, "other", [("retention.ms", "1000")])
    for code, *refused in (
        (invalid, 2, "t", [("retention.ms", "1"), ("retention.ms", "2")]),
        (invalid, 2, "t", [("segment.bytes", "100000"), ("retention.ms", None)]),
        (invalid, 4, "", [(RATE, None)]),
        (invalid, 8, "1", []),  # a logger
        (ErrorCode.INVALID_CONFIG, 2, "t", [("no.key", "1")]),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 2, "u", []),
        (ErrorCode.BROKER_ID_NOT_REGISTERED, 4, "9", []),
    ):
        assert await alter(cluster, tuple(refused), unchanged) == [code, 0], refused
    assert await alter(cluster, (2, "t", []), (2, "other", []), (2, "t", [])) == [invalid, 0, invalid]
    assert [cluster.controller.image.topic_config(name) for name in ("t", "other")] == [{"retention.ms": "1000"}, {}]


@pytest.mark.filterwarnings("ignore:alter_configs has been deprecated")
async def test_alter_configs_serves_confluent_kafka_client(tmp_path) -> None:
    async with kafka_cluster(tmp_path) as cluster:
        await cluster.create("t", retention_ms="1000")
        client = AdminClient({"bootstrap.servers": cluster.bootstrap(2)})
        resource = ConfigResource(ConfigResource.Type.TOPIC, "t", set_config={"segment.bytes": "100000"})
        (future,) = client.alter_configs([resource]).values()
        assert await asyncio.to_thread(future.result, 30) is None
        assert cluster.controller.image.topic_config("t") == {"segment.bytes": "100000"}
