"""AlterConfigs: the given keys replace all others."""

import asyncio

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kipmesh import messages as m
from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE as RATE
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.kafka_mesh import kafka_mesh


async def alter(mesh, *resources, validate_only: bool = False) -> list[int]:
    asked = [m.ReplacedConfigsResource(*one[:2], [m.ReplacedConfig(*each) for each in one[2]]) for one in resources]
    response = await mesh.call(2, "AlterConfigs", m.AlterConfigsRequest(asked, validate_only), "Admin")
    assert [one[2:] for one in response.responses] == [one[:2] for one in resources]
    return [one.error_code for one in response.responses]


async def test_keys_that_are_not_named_are_removed(mesh) -> None:
    await mesh.create("t", retention_ms="1000", segment_bytes="100000")
    image = mesh.controller.image
    wanted = {"retention.ms": "2000", "max.message.bytes": "5000"}
    for validate_only, after in ((True, {"retention.ms": "1000", "segment.bytes": "100000"}), (False, wanted)):
        assert await alter(mesh, (2, "t", wanted.items()), validate_only=validate_only) == [0]
        assert image.topic_config("t") == after
    assert await alter(mesh, (4, "", [(RATE, "7")]), (4, "1", [(RATE, "8")]), (2, "t", ())) == [0, 0, 0]
    assert [image.topic_config("t"), *map(image.broker_config, ("", "1"))] == [{}, {RATE: "7"}, {RATE: "8"}]
    assert await alter(mesh, (4, "", ()), (4, "01", ())) == [0, 0]
    assert (image.broker_config(""), image.broker_config("1")) == ({}, {})


async def test_a_refused_resource_keeps_all(mesh) -> None:
    await mesh.create("t", retention_ms="1000")
    await mesh.create("other", retention_ms="1000")
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
        assert await alter(mesh, tuple(refused), unchanged) == [code, 0], refused
    assert await alter(mesh, (2, "t", []), (2, "other", []), (2, "t", [])) == [invalid, 0, invalid]
    assert [mesh.controller.image.topic_config(name) for name in ("t", "other")] == [{"retention.ms": "1000"}, {}]


@pytest.mark.filterwarnings("ignore:alter_configs has been deprecated")
async def test_clients_of_the_kafka_protocol(tmp_path) -> None:
    async with kafka_mesh(tmp_path) as mesh:
        await mesh.create("t", retention_ms="1000")
        client = AdminClient({"bootstrap.servers": mesh.kafka(2)})
        resource = ConfigResource(ConfigResource.Type.TOPIC, "t", set_config={"segment.bytes": "100000"})
        (future,) = client.alter_configs([resource]).values()
        assert await asyncio.to_thread(future.result, 30) is None
        assert mesh.controller.image.topic_config("t") == {"segment.bytes": "100000"}
