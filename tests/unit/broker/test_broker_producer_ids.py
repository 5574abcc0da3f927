"""InitProducerId: every answer has another id, whichever broker gave it, also after a restart."""

from __future__ import annotations

import asyncio

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode


async def init(mesh, via: int, request: m.InitProducerIdRequest | None = None) -> m.InitProducerIdResponse:
    return await mesh.call(via, "InitProducerId", request or m.InitProducerIdRequest())


async def test_ids_are_given_once_over_all_brokers(mesh) -> None:
    answers = await asyncio.gather(*[init(mesh, via) for via in (1, 2, 3) for _ in range(40)])
    assert {answer.error_code for answer in answers} == {0}
    assert {answer.producer_epoch for answer in answers} == {0}
    assert len({answer.producer_id for answer in answers}) == 120
    assert {answer.producer_id // 1000 for answer in answers} == {0, 1, 2}, "a block for each broker"
    assert mesh.controller.image.next_producer_id == 3000


async def test_a_used_up_block_is_followed_by_another_one(mesh) -> None:
    answers = []
    for _ in range(5):
        answers += await asyncio.gather(*[init(mesh, 1) for _ in range(300)])
    assert {answer.error_code for answer in answers} == {0}
    assert len({answer.producer_id for answer in answers}) == 1500
    assert mesh.controller.image.next_producer_id == 2000


async def test_who_has_an_id_and_an_epoch_gets_a_new_id(mesh) -> None:
    first = await init(mesh, 1)
    again = await init(mesh, 1, m.InitProducerIdRequest(None, 0, first.producer_id, first.producer_epoch))
    assert again.error_code == 0
    assert again.producer_id != first.producer_id
    assert again.producer_epoch == 0


async def test_transactions_and_half_an_identity_are_refused(mesh) -> None:
    for request in (m.InitProducerIdRequest("payments", 60_000), m.InitProducerIdRequest(None, 0, 5, -1)):
        answer = await init(mesh, 1, request)
        assert answer.error_code == ErrorCode.INVALID_REQUEST
        assert answer.error_message
        assert answer.producer_id == -1


async def test_without_a_controller_the_answer_is_one_that_clients_retry(mesh, monkeypatch) -> None:
    monkeypatch.setattr("kipmesh.core.context._RESPONSE_SHARE", 0.02)  # most of the call's time is for the way back
    for node in mesh.controllers.values():
        await node.stop()
    mesh.controllers.clear()
    answer = await mesh.connection(1).call("Broker", "InitProducerId", m.InitProducerIdRequest(), 30)
    assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert "AllocateProducerIds" in answer.error_message
