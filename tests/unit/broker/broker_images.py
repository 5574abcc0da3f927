"""A builder of metadata images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import TOPIC_RESOURCE, MetadataDelta, MetadataImage


def topic_id_of(number: int) -> bytes:
    """Return the topic id with this number."""
    return number.to_bytes(16, "big")


class ImageBuilder:
    """Applies records at consecutive offsets; `delta` collects their changes."""

    def __init__(self, *broker_ids: int) -> None:
        self.image = MetadataImage()
        self.delta = MetadataDelta()
        for broker_id in broker_ids:
            self.broker(broker_id)

    def apply(self, record: r.Record) -> None:
        self.image.offset += 1
        self.image.apply(record, self.delta)

    def broker(self, broker_id: int, *, port: int = 1) -> int:
        """Register an unfenced broker and return its epoch."""
        epoch = self.image.offset + 1
        endpoint = r.BrokerEndpoint("MESH", "127.0.0.1", port, 0)
        self.apply(
            r.RegisterBrokerRecord(
                broker_id=broker_id,
                incarnation_id=bytes(16),
                broker_epoch=epoch,
                end_points=(endpoint,),
                fenced=False,
            )
        )
        return epoch

    def topic(
        self, name: str, topic_id: bytes, assignments: Sequence[Sequence[int]], configs: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic; the first replica of each partition leads it."""
        self.apply(r.TopicRecord(name=name, topic_id=topic_id))
        for partition in range(len(assignments)):
            self.partition(topic_id, partition, assignments[partition])
        for key, value in (configs or {}).items():
            self.apply(r.ConfigRecord(TOPIC_RESOURCE, name, key, value))

    def partition(self, topic_id: bytes, partition: int, replicas: Sequence[int], *, epoch: int = 0) -> None:
        self.apply(
            r.PartitionRecord(
                partition_id=partition,
                topic_id=topic_id,
                replicas=tuple(replicas),
                isr=tuple(replicas),
                leader=replicas[0],
                leader_epoch=epoch,
                partition_epoch=epoch,
            )
        )

    def delete(self, topic_id: bytes) -> None:
        self.apply(r.RemoveTopicRecord(topic_id))
