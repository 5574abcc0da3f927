"""UnregisterBroker over the Kafka protocol; what the controller decides has its tests in tests/unit/core/metadata."""

from __future__ import annotations

from pathlib import Path

from kio.schema.unregister_broker.v0.request import UnregisterBrokerRequest
from kio.schema.unregister_broker.v0.response import UnregisterBrokerResponse

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.conftest_broker import eventually
from tests.unit.broker.kafka_mesh import kafka_mesh


async def test_a_broker_that_is_stopped_is_forgotten(tmp_path: Path) -> None:
    async with kafka_mesh(tmp_path) as mesh:

        async def unregister(broker_id: int) -> tuple[int, bool]:
            asked = UnregisterBrokerRequest(broker_id=broker_id)
            response = await mesh.kio(1, asked, UnregisterBrokerResponse)
            return response.error_code, response.error_message is not None

        assert await unregister(3) == (ErrorCode.INVALID_REQUEST, True)
        assert await unregister(9) == (ErrorCode.BROKER_ID_NOT_REGISTERED, True)
        await mesh.create("t", replication_factor=3)
        assert await unregister(3) == (ErrorCode.POLICY_VIOLATION, True)
        delete = m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=30_000)
        assert [one.error_code for one in (await mesh.call(1, "DeleteTopics", delete, "Admin")).responses] == [0]
        await mesh.brokers.pop(3).stop()
        image = mesh.controller.image
        await eventually(lambda: image.brokers[3].fenced, "fenced")
        assert await unregister(3) == (0, False)
        assert sorted(image.brokers) == [1, 2]
        assert await unregister(3) == (ErrorCode.BROKER_ID_NOT_REGISTERED, True)
        again = await mesh.call(2, "UnregisterBroker", m.UnregisterBrokerRequest(3), "Admin")
        assert again.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
