"""Images of large clusters, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage

BROKERS = 100
PARTITIONS = 10
"""Of a topic."""
EPOCH = 1
SEED = 1

Place = Callable[[int, int], tuple[int, int, int]]
"""Gives the replicas of a partition by the number of its topic and its own; the first one leads."""


def make_image(topics: int, place: Place, rng: Random) -> MetadataImage:
    """All brokers are there, each partition has three replicas in sync, with a directory each; ids are of `rng`."""
    image, delta = MetadataImage(), MetadataDelta()
    directories = [rng.randbytes(16) for _ in range(BROKERS)]
    image.apply(r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL), delta)
    for broker in range(BROKERS):
        end_points = (r.BrokerEndpoint("MESH", f"broker-{broker}", 9092),)
        image.apply(r.RegisterBrokerRecord(broker, False, rng.randbytes(16), broker, end_points, fenced=False), delta)
    for topic in range(topics):
        topic_id = rng.randbytes(16)
        image.apply(r.TopicRecord(f"topic-{topic}", topic_id), delta)
        for partition in range(PARTITIONS):
            replicas = place(topic, partition)
            placed = tuple([directories[replica] for replica in replicas])
            image.apply(
                r.PartitionRecord(partition, topic_id, replicas, replicas, (), (), replicas[0], 0, 0, 0, placed), delta
            )
    image.offset, image.epoch = image.partition_count + topics + BROKERS, EPOCH
    return image


def neighbours_image(topics: int) -> MetadataImage:
    """Each partition is on three brokers that are neighbours, by chance."""
    rng = Random(SEED)

    def place(_topic: int, _partition: int) -> tuple[int, int, int]:
        first = rng.randrange(BROKERS - 2)
        return first, first + 1, first + 2

    return make_image(topics, place, rng)


def balanced_image(topics: int) -> MetadataImage:
    """Every broker has as many partitions, at most one of a topic, and leads a third of them."""

    def place(topic: int, partition: int) -> tuple[int, int, int]:
        shift = PARTITIONS + topic // PARTITIONS % 20  # as many shifts as Kafka's placement would use, or fewer
        first = (topic * PARTITIONS + partition) % BROKERS
        return first, (first + shift) % BROKERS, (first + 2 * shift) % BROKERS

    return make_image(topics, place, Random(SEED))
