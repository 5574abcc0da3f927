"""UnregisterBroker over the Kafka protocol. The decisions of the controller are tested in tests/unit/core/metadata."""

from __future__ import annotations

from pathlib import Path

from kio.schema.unregister_broker.v0.request import UnregisterBrokerRequest
from kio.schema.unregister_broker.v0.response import UnregisterBrokerResponse

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.broker_cluster import eventually
from tests.unit.broker.kafka_cluster import kafka_cluster


async def test_only_stopped_broker_without_replicas_can_be_unregistered(tmp_path: Path) -> None:
    async with kafka_cluster(tmp_path) as cluster:

        async def unregister(broker_id: int) -> tuple[int, bool]:
            requested = UnregisterBrokerRequest(broker_id=broker_id)
            response = await cluster.kio(1, requested, UnregisterBrokerResponse)
            return response.error_code, response.error_message is not None

        assert await unregister(3) == (ErrorCode.INVALID_REQUEST, True)
        assert await unregister(9) == (ErrorCode.BROKER_ID_NOT_REGISTERED, True)
        await cluster.create("t", replication_factor=3)
        assert await unregister(3) == (ErrorCode.POLICY_VIOLATION, True)
        delete = m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=30_000)
        assert [result.error_code for result in (await cluster.call(1, "DeleteTopics", delete, "Admin")).responses] == [
            0
        ]
        await cluster.brokers.pop(3).stop()
        image = cluster.controller.image
        await eventually(lambda: image.brokers[3].fenced, "fenced")
        assert await unregister(3) == (0, False)
        assert sorted(image.brokers) == [1, 2]
        assert await unregister(3) == (ErrorCode.BROKER_ID_NOT_REGISTERED, True)
        repeated = await cluster.call(2, "UnregisterBroker", m.UnregisterBrokerRequest(3), "Admin")
        assert repeated.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
