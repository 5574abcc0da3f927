"""What is different between two images, for readers of the first who are given the second: a snapshot was loaded.

Invariant: whoever has published the first image and handles this delta knows all of the second. `outdated` is empty:
the counting for the next snapshot begins anew. SCRAM credentials are in no delta: they are looked up in the image when
somebody authenticates.
"""

from __future__ import annotations

from collections.abc import Iterator

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.states import TopicState

TOPICS_BETWEEN_STEPS = 100


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """The delta from one to the other. A topic that was deleted and made again is in it as both."""
    delta = MetadataDelta()
    for _ in difference_steps(before, after, delta):
        pass
    return delta


def difference_steps(before: MetadataImage, after: MetadataImage, delta: MetadataDelta) -> Iterator[None]:
    """The same into an empty delta, some topics at a time; neither image may change meanwhile."""
    for index, (topic_id, topic) in enumerate(before.topics.items()):
        if topic_id not in after.topics:
            delta.deleted_topics.append(topic)
        if index % TOPICS_BETWEEN_STEPS == 0:
            yield
    for index, topic in enumerate(after.topics.values()):
        _compare(before, after, topic, delta)
        if index % TOPICS_BETWEEN_STEPS == 0:
            yield
    for broker_id in {**before.brokers, **after.brokers}:
        if before.brokers.get(broker_id) != after.brokers.get(broker_id):
            delta.changed_brokers.add(broker_id)


def _compare(before: MetadataImage, after: MetadataImage, topic: TopicState, delta: MetadataDelta) -> None:
    known = before.topics.get(topic.topic_id)
    known_partitions = {} if known is None else known.partitions
    for partition, state in topic.partitions.items():
        if known_partitions.get(partition) != state:
            delta.changed_partitions.add((topic.topic_id, partition))
    if before.topic_config(topic.name) != after.topic_config(topic.name):
        delta.changed_topic_configs.add(topic.name)
