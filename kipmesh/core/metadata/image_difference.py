"""What is different between two images, for readers of the first who are given the second: a snapshot was loaded.

Invariant: whoever has published the first image and handles this delta knows all of the second. `outdated` is empty:
the counting for the next snapshot begins anew.
"""

from __future__ import annotations

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """The delta from one to the other. A topic that was deleted and made again is in it as both."""
    delta = MetadataDelta()
    for topic_id, topic in before.topics.items():
        if topic_id not in after.topics:
            delta.deleted_topics.append(topic)
    for topic_id, topic in after.topics.items():
        known = before.topics.get(topic_id)
        known_partitions = {} if known is None else known.partitions
        for partition, state in topic.partitions.items():
            if known_partitions.get(partition) != state:
                delta.changed_partitions.add((topic_id, partition))
        if before.topic_config(topic.name) != after.topic_config(topic.name):
            delta.changed_topic_configs.add(topic.name)
    for broker_id in {**before.brokers, **after.brokers}:
        if before.brokers.get(broker_id) != after.brokers.get(broker_id):
            delta.changed_brokers.add(broker_id)
    return delta
