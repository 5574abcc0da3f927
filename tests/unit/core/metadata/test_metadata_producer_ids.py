"""AllocateProducerIds: blocks of unique ids, also after a snapshot."""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import PRODUCER_ID_BLOCK_SIZE, MetadataController
from kipmesh.core.metadata.image import BrokerState, MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_records
from kipmesh.messages.schema import MAX_INT64
from tests.unit.core.metadata.metadata_support import config


def controller_with_broker(epoch: int = 7) -> MetadataController:
    image = MetadataImage()
    image.brokers[1] = BrokerState(1, epoch, b"\1" * 16, {}, None, False, False, False)
    return MetadataController(config(), image, lambda: bytes(16))


def test_producer_id_blocks_are_consecutive() -> None:
    controller = controller_with_broker()
    starts = []
    for _ in range(3):
        decision = controller.allocate_producer_ids(m.AllocateProducerIdsRequest(1, 7))
        starts.append(decision.response.producer_id_start)
        assert decision.response.producer_id_len == PRODUCER_ID_BLOCK_SIZE == 1000
        for record in decision.records:
            controller.image.apply(record, MetadataDelta())
    assert starts == [0, 1000, 2000]
    assert controller.image.next_producer_id == 3000


def test_producer_ids_require_registered_broker_epoch() -> None:
    controller = controller_with_broker()
    for request in (m.AllocateProducerIdsRequest(1, 6), m.AllocateProducerIdsRequest(2, 7)):
        decision = controller.allocate_producer_ids(request)
        assert (decision.records, decision.response.error_code) == ((), ErrorCode.STALE_BROKER_EPOCH)


def test_producer_ids_end_at_maximum() -> None:
    controller = controller_with_broker()
    controller.image.next_producer_id = MAX_INT64 - PRODUCER_ID_BLOCK_SIZE + 1
    decision = controller.allocate_producer_ids(m.AllocateProducerIdsRequest(1, 7))
    assert (decision.records, decision.response.error_code) == ((), ErrorCode.UNKNOWN_SERVER_ERROR)


def test_snapshot_keeps_next_producer_id() -> None:
    image = MetadataImage()
    image.offset = 0
    image.apply(r.ProducerIdsRecord(1, 7, 5000), MetadataDelta())
    loaded = MetadataImage()
    for record in image_records(image.capture()):
        loaded.apply(record, MetadataDelta())
    assert loaded.next_producer_id == 5000
