"""Reproducible metadata images of large clusters."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage

BROKERS = 100
PARTITIONS = 10
"""Partitions of each topic."""
EPOCH = 1
SEED = 1

Place = Callable[[int, int], tuple[int, int, int]]
"""Returns the replicas of a partition by the numbers of its topic and of itself. The first replica leads."""


def make_image(topics: int, place: Place, rng: Random) -> MetadataImage:
    """Return an image of `topics` topics. All brokers are registered and unfenced, and all three replicas of each
    partition are in sync.

    `place` chooses the replicas, and `rng` generates the ids.
    """
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
    """Return an image in which each partition is on three brokers with consecutive ids; the first one is random. The
    image is always the same for a given number of topics.
    """
    rng = Random(SEED)

    def place(_topic: int, _partition: int) -> tuple[int, int, int]:
        first = rng.randrange(BROKERS - 2)
        return first, first + 1, first + 2

    return make_image(topics, place, rng)


def balanced_image(topics: int) -> MetadataImage:
    """Return an image in which each broker leads a third of its replicas and has at most one replica of a topic. If the
    number of topics is a multiple of ten, all brokers have equally many replicas.
    """

    def place(topic: int, partition: int) -> tuple[int, int, int]:
        shift = PARTITIONS + topic // PARTITIONS % 20  # at most as many shifts as Kafka's placement uses
        first = (topic * PARTITIONS + partition) % BROKERS
        return first, (first + shift) % BROKERS, (first + 2 * shift) % BROKERS

    return make_image(topics, place, Random(SEED))
