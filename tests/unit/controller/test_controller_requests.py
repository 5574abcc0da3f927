"""Arbitrary requests neither stop the controller nor block the next request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.controller.controller_support import CLUSTER_ID, FakeBroker, LiveController

DIRECTORY = Path("/metadata")
INTS = (
    0,
    1,
    2,
    -1,
    -2,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    65536,
    70000,
    2**31 - 1,
    -(2**31),
    2**63 - 1,
    -(2**63),
)
TEXTS = (
    "",
    "a\0b",
    "\0",
    "x" * 300,
    "x" * 40_000,
    "\U0001f600",
    "..",
    "t",
    "retention.ms",
    " 1 ",
    "__cluster_metadata",
)
BYTES = (b"", b"\0" * 15, b"\0" * 16, b"\xff" * 16, b"\0" * 17)


def templates(topic_id: bytes, epoch: int) -> dict[tuple[str, str], list[Any]]:
    """Return valid or almost valid requests per API."""
    registration = m.BrokerRegistrationRequest(
        3,
        CLUSTER_ID,
        b"i" * 16,
        [m.Listener("MESH", "127.0.0.1", 9003), m.Listener("OTHER", "127.0.0.1", 9004)],
        [m.Feature("kipmesh.leader", 0, 1)],
        "rack",
        [b"d" * 16],
    )
    heartbeat = m.BrokerHeartbeatRequest(1, epoch, 10, log_ends=[m.PartitionLogEnd(topic_id, 0, 1, 5)])
    change = m.AlterPartitionPartition(0, 0, 0, [m.IsrMember(1, epoch)])
    topic = m.CreatableTopic("new", 2, 1, configs=[m.ConfigEntry("retention.ms", "5")])
    assigned = m.CreatableTopic("assigned", assignments=[m.CreatableReplicaAssignment(0, [1])])
    more = m.CreatePartitionsTopic("t", 2, [m.CreatePartitionsAssignment([1])])
    altered = m.AlterConfigsResource(2, "t", [m.AlterableConfig("retention.ms", 0, "7")])
    fetch = m.FetchTopic("__cluster_metadata", b"", [m.FetchPartition(0, fetch_offset=0, partition_max_bytes=1000)])
    return {
        ("Controller", "BrokerRegistration"): [registration],
        ("Controller", "BrokerHeartbeat"): [heartbeat],
        ("Controller", "AlterPartition"): [
            m.AlterPartitionRequest(1, epoch, [m.AlterPartitionTopic(topic_id, [change])])
        ],
        ("Admin", "CreateTopics"): [m.CreateTopicsRequest([topic, assigned]), m.CreateTopicsRequest([topic])],
        ("Admin", "DeleteTopics"): [
            m.DeleteTopicsRequest([m.DeleteTopicState("new")]),
            m.DeleteTopicsRequest([m.DeleteTopicState(None, topic_id)]),
        ],
        ("Admin", "CreatePartitions"): [m.CreatePartitionsRequest([more])],
        ("Admin", "DescribeConfigs"): [m.DescribeConfigsRequest([m.DescribeConfigsResource(2, "t", ["retention.ms"])])],
        ("Admin", "IncrementalAlterConfigs"): [
            m.IncrementalAlterConfigsRequest([altered]),
            m.IncrementalAlterConfigsRequest(
                [m.AlterConfigsResource(4, "1", [m.AlterableConfig("follower.replication.throttled.rate", 0, "7")])]
            ),
        ],
        ("Admin", "AlterPartitionReassignments"): [
            m.AlterPartitionReassignmentsRequest(1000, [m.ReassignableTopic("t", [m.ReassignablePartition(0, (1,))])]),
            m.AlterPartitionReassignmentsRequest(1000, [m.ReassignableTopic("t", [m.ReassignablePartition(0, None)])]),
        ],
        ("Admin", "ListPartitionReassignments"): [
            m.ListPartitionReassignmentsRequest(1000, None),
            m.ListPartitionReassignmentsRequest(1000, [m.ListPartitionReassignmentsTopics("t", (0,))]),
        ],
        ("Admin", "DescribeUserScramCredentials"): [m.DescribeUserScramCredentialsRequest([m.UserName("alice")])],
        ("Admin", "AlterUserScramCredentials"): [
            m.AlterUserScramCredentialsRequest(
                [m.ScramCredentialDeletion("alice", 1)],
                [m.ScramCredentialUpsertion("bob", 2, 4096, b"s" * 16, b"p" * 64)],
            ),
            m.AlterUserScramCredentialsRequest((), [m.ScramCredentialUpsertion("alice", 1, 4096, b"s", b"p" * 32)]),
        ],
        ("Admin", "PlanBrokerDrain"): [m.PlanBrokerDrainRequest(1)],
        ("Admin", "UnregisterBroker"): [m.UnregisterBrokerRequest(3)],
        ("Quorum", "Fetch"): [m.FetchRequest(CLUSTER_ID, 1, epoch, 1, 1, 1000, topics=[fetch])],
        ("Quorum", "DescribeQuorum"): [m.DescribeQuorumRequest([m.DescribeQuorumTopic("__cluster_metadata", [0])])],
    }


def mutate(draw: Callable[[Any], Any], value: Any) -> Any:
    """Replace values at positions that hypothesis picks by extreme values."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mutate(draw, part) for part in value])
    if isinstance(value, (list, tuple)):
        parts = [mutate(draw, part) for part in value]
        return parts * draw(st.sampled_from((1, 1, 1, 0, 2, 70)))
    if draw(st.integers(0, 5)):
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from(INTS))
    if isinstance(value, str):
        return draw(st.sampled_from(TEXTS))
    return draw(st.sampled_from(BYTES)) if isinstance(value, bytes) else value


async def check(data: st.DataObject) -> None:
    async with LiveController(DIRECTORY, FaultyFileSystem()) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        created = await controller.create("t", 1, 1)
        requests = templates(created.topic_id, broker.epoch)
        draw = data.draw
        for _ in range(draw(st.integers(1, 12))):
            service, method = draw(st.sampled_from(sorted(requests)))
            request = mutate(draw, draw(st.sampled_from(requests[service, method])))
            with contextlib.suppress(KafkaError, TransportError):  # a value that its field cannot encode
                await controller.call(service, method, request, 10)
            assert controller.node.ready, request
            assert not controller.node.failed.done()
        broker.incarnation = b"z" * 16
        broker.broker_id = 9
        assert (await broker.register()).error_code == 0
        await broker.catch_up()
        assert broker.image == controller.node.image


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_arbitrary_requests_do_not_stop_controller(data: st.DataObject) -> None:
    asyncio.run(check(data))


@pytest.mark.parametrize(
    "change",
    [
        {"features": [m.Feature("x", 0, 70_000)]},
        {"features": [m.Feature("x", -1, 0)]},
        {"features": [m.Feature("x", 0, 1)] * 300},
        {"features": [m.Feature("x\0", 0, 1)]},
        {"listeners": [m.Listener("MESH", "h", 1, 70_000)]},
        {"listeners": [m.Listener("MESH", "h", 70_000)]},
        {"listeners": [m.Listener("MESH", "h" * 1000, 1)]},
        {"listeners": [m.Listener("MESH", "h", 1)] * 2},
        {"listeners": [m.Listener(f"L{index}", "h", 1) for index in range(100)]},
        {"rack": "r" * 1000},
        {"log_dirs": [b"d" * 16] * 2000},
        {"log_dirs": [b"d"]},
        {"incarnation_id": b"i"},
        {"broker_id": -1},
    ],
)
async def test_invalid_registration_fields_are_refused(change: dict[str, Any]) -> None:
    async with LiveController(DIRECTORY, FaultyFileSystem()) as controller:
        request = m.BrokerRegistrationRequest(1, CLUSTER_ID, b"i" * 16, [m.Listener("MESH", "h", 1)])
        response = await controller.call("Controller", "BrokerRegistration", request._replace(**change))
        assert response.error_code == ErrorCode.INVALID_REQUEST
        assert response.error_message
        assert controller.node.ready
        await FakeBroker(controller, 1).join()


async def test_error_message_of_long_config_value_is_short() -> None:
    async with LiveController(DIRECTORY, FaultyFileSystem()) as controller:
        await FakeBroker(controller, 1).join()
        for value in (" 1" + " " * 100_000, "1\0", "9" * 100_000):
            result = await controller.create("t", retention_ms=value)
            assert result.error_code == ErrorCode.INVALID_CONFIG
            assert len(result.error_message or "") < 600
        assert (await controller.create("t")).error_code == 0
        resource = m.AlterConfigsResource(2, "t", [m.AlterableConfig("retention.ms", 0, "1" + " " * 100_000)])
        response = await controller.call(
            "Admin", "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest([resource])
        )
        assert response.responses[0].error_code == ErrorCode.INVALID_CONFIG
