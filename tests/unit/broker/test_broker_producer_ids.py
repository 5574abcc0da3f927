"""InitProducerId: producer ids are unique across brokers."""

from __future__ import annotations

import asyncio

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode


async def init(cluster, via: int, request: m.InitProducerIdRequest | None = None) -> m.InitProducerIdResponse:
    return await cluster.call(via, "InitProducerId", request or m.InitProducerIdRequest())


async def test_producer_ids_are_unique_across_brokers(cluster) -> None:
    responses = await asyncio.gather(*[init(cluster, via) for via in (1, 2, 3) for _ in range(40)])
    assert {response.error_code for response in responses} == {0}
    assert {response.producer_epoch for response in responses} == {0}
    assert len({response.producer_id for response in responses}) == 120
    assert {response.producer_id // 1000 for response in responses} == {0, 1, 2}, "one block per broker"
    assert cluster.controller.image.next_producer_id == 3000


async def test_broker_allocates_next_block_when_block_is_used_up(cluster) -> None:
    responses = []
    for _ in range(5):
        responses += await asyncio.gather(*[init(cluster, 1) for _ in range(300)])
    assert {response.error_code for response in responses} == {0}
    assert len({response.producer_id for response in responses}) == 1500
    assert cluster.controller.image.next_producer_id == 2000


async def test_producer_with_id_and_epoch_gets_new_id(cluster) -> None:
    first = await init(cluster, 1)
    second = await init(cluster, 1, m.InitProducerIdRequest(None, 0, first.producer_id, first.producer_epoch))
    assert second.error_code == 0
    assert second.producer_id != first.producer_id
    assert second.producer_epoch == 0


async def test_transactional_id_and_id_without_epoch_are_refused(cluster) -> None:
    for request in (m.InitProducerIdRequest("payments", 60_000), m.InitProducerIdRequest(None, 0, 5, -1)):
        response = await init(cluster, 1, request)
        assert response.error_code == ErrorCode.INVALID_REQUEST
        assert response.error_message
        assert response.producer_id == -1


async def test_init_producer_id_returns_retriable_error_without_controller(cluster, monkeypatch) -> None:
    monkeypatch.setattr("kipmesh.core.context._RESPONSE_SHARE", 0.02)  # leaves little of the timeout for the controller
    for node in cluster.controllers.values():
        await node.stop()
    cluster.controllers.clear()
    response = await cluster.connection(1).call("Broker", "InitProducerId", m.InitProducerIdRequest(), 30)
    assert response.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert "AllocateProducerIds" in response.error_message
