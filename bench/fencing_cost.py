"""What the failure of one broker costs: a decision, its bytes, and what each state machine does with them."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from bench.images import BROKERS, EPOCH, balanced_image
from kipmesh import messages as m
from kipmesh.core import record_batch
from kipmesh.core.config import ControllerConfig
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, MetadataDelta, MetadataImage
from kipmesh.messages.proto import encode

FAILING = BROKERS // 2

_CONFIG = {
    "node.id": 1001,
    "cluster.id": "bench",
    "controller.quorum.voters": "1001@127.0.0.1:19093",
    "metadata.log.dir": "unused",
}


class _Ledger:
    """Decisions appended and applied, their bytes and times."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self.records = self.values_bytes = self.batch_bytes = self.responses_bytes = 0
        self.encode_s = self.apply_s = self.longest_step_s = 0.0

    def take(self, records: Sequence[r.Record]) -> None:
        """Encode the records as one batch, and apply it as any replica does, step by step."""
        image = self._image
        begin = time.perf_counter()
        values = [r.encode_record(record) for record in records]
        batch = record_batch.build(
            [(None, value) for value in values], base_offset=image.offset + 1, leader_epoch=EPOCH, timestamp_ms=1
        )
        end = time.perf_counter()
        self.encode_s += end - begin
        self.records += len(records)
        self.values_bytes += sum(map(len, values))
        self.batch_bytes += len(batch)
        self.responses_bytes += len(encode(_response(batch, image.offset)))
        last = begin = time.perf_counter()
        for _ in image.replay_steps(batch, MetadataDelta()):
            now = time.perf_counter()
            self.longest_step_s, last = max(self.longest_step_s, now - last), now
        end = time.perf_counter()
        self.longest_step_s = max(self.longest_step_s, end - last)
        self.apply_s += end - begin

    def figures(self) -> dict[str, Any]:
        """Sizes in bytes, the times in ms."""
        observers = BROKERS - 1
        return {
            "records": self.records,
            "record_bytes": self.values_bytes / max(self.records, 1),
            "values_bytes": self.values_bytes,
            "batch_bytes": self.batch_bytes,
            "values_sent_bytes": self.values_bytes * observers,
            "batch_sent_bytes": self.batch_bytes * observers,
            "responses_sent_bytes": self.responses_bytes * observers,
            "apply_ms": self.apply_s * 1e3,
            "longest_step_ms": self.longest_step_s * 1e3,
        }


def _response(batch: bytes, offset: int) -> m.FetchResponse:
    end = offset + 1
    partition = m.PartitionData(0, 0, end, end, 0, records=batch)
    return m.FetchResponse(
        responses=[m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])]
    )


def measure_failure(topics: int, *, by_event: bool) -> dict[str, Any]:
    """One broker is fenced; then each leader's heartbeat says that it has applied that."""
    gc.disable()
    image = balanced_image(topics)
    controller = MetadataController(ControllerConfig.parse(_CONFIG), image, lambda: b"")
    if by_event:
        _Ledger(image).take(controller.activate(0))
    gc.enable()
    gc.collect()
    gc.freeze()
    image.capture()  # the dearest case: no topic has changed since the last snapshot was begun
    partitions = len(image.partitions_of_broker(FAILING))
    ledger = _Ledger(image)
    begin = time.perf_counter()
    records = controller.brokers.fence([FAILING])
    decide_s = time.perf_counter() - begin
    ledger.take(records)
    led = sum(image.topics[key[0]].partitions[key[1]].leader == FAILING for key in image.partitions_of_broker(FAILING))
    assert not led
    proofs = _Ledger(image)
    for broker_id, broker in image.brokers.items():
        if broker_id != FAILING:
            heartbeat = m.BrokerHeartbeatRequest(broker_id, broker.broker_epoch, image.offset)
            decided = controller.heartbeat(heartbeat, 1, image.offset + 1).records
            if decided:
                proofs.take(decided)
    return {
        "all_partitions": image.partition_count,
        "partitions": partitions,
        "decide_ms": (decide_s + ledger.encode_s) * 1e3,
        **ledger.figures(),
        "proofs": proofs.figures(),
    }
