"""Metadata decisions of clients, and an independent model of the metadata.

`decide` replaces the active controller: it returns records of Kafka's schemas that fit the image. It creates and
deletes topics, changes partitions and configurations, and registers, fences and unfences brokers with one event record
each (630-16). `Model` applies the same records to plain dicts, with other code than the image's.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.fencing import FENCING_FEATURE, FENCING_LEVEL
from kipmesh.core.metadata.image import TOPIC_RESOURCE, CapturedImage, MetadataImage
from kipmesh.core.metadata.states import TopicState

_NAMES = tuple(f"topic-{number}" for number in range(9))
_BROKERS = range(101, 105)
_KEYS = ("retention.ms", "segment.bytes")


def decide(image: MetadataImage, rng: Random) -> list[r.Record]:
    """Return the records of one random decision, valid for `image`. They form the batch at `image.offset + 1`."""
    if r.METADATA_VERSION not in image.features:
        return [
            r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL),
            r.FeatureLevelRecord(FENCING_FEATURE, FENCING_LEVEL),
        ]
    unknown = [broker for broker in _BROKERS if broker not in image.brokers]
    if unknown:
        return _register(unknown[0], image)
    kind = rng.random()
    if kind < 0.12:
        return _fence_or_unfence(image, rng)
    if kind < 0.2:
        return [r.ProducerIdsRecord(_BROKERS[0], 0, image.next_producer_id + 1000)]
    name = rng.choice(_NAMES)
    topic = image.topic_by_name(name)
    if topic is None:
        return _create(name, image, rng)
    if kind < 0.45:
        return [r.RemoveTopicRecord(topic.topic_id)]
    if kind < 0.65:
        value = None if rng.random() < 0.2 else str(rng.randrange(1000))
        return [r.ConfigRecord(TOPIC_RESOURCE, name, rng.choice(_KEYS), value)]
    return _change(topic, image, rng) or [r.ConfigRecord(TOPIC_RESOURCE, name, _KEYS[0], str(rng.randrange(1000)))]


def _live(image: MetadataImage) -> list[int]:
    return [broker.broker_id for broker in image.brokers.values() if broker.can_lead]


def _register(broker: int, image: MetadataImage) -> list[r.Record]:
    epoch = image.offset + 1
    endpoint = r.BrokerEndpoint("PLAINTEXT", f"host-{broker}", 9092)
    return [
        r.RegisterBrokerRecord(broker, False, broker.to_bytes(16), epoch, (endpoint,)),
        r.BrokerRegistrationChangeRecord(broker, epoch, fenced=-1),
    ]


def _fence_or_unfence(image: MetadataImage, rng: Random) -> list[r.Record]:
    broker = image.brokers[rng.choice(sorted(image.brokers))]
    if broker.fenced:
        return [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=-1)]
    others = [other for other in sorted(image.brokers) if other != broker.broker_id]
    also = tuple(rng.sample(others, rng.choice((0, 0, 1))))
    return [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=1, also_gone=also)]


def _create(name: str, image: MetadataImage, rng: Random) -> list[r.Record]:
    topic_id = rng.randbytes(16)
    records: list[r.Record] = [r.TopicRecord(name, topic_id)]
    for partition in range(rng.choice((1, 1, 2))):
        replicas = tuple(rng.sample(_BROKERS, 3))
        live = [replica for replica in replicas if replica in _live(image)]
        leader = live[0] if live else r.NO_LEADER
        isr = tuple(live) or replicas[:1]
        records.append(r.PartitionRecord(partition, topic_id, replicas, isr, (), (), leader, 0, 0, 0))
    return records


def _change(topic: TopicState, image: MetadataImage, rng: Random) -> list[r.Record]:
    partition, state = rng.choice(list(topic.partitions.items()))
    live = [replica for replica in state.replicas if replica in _live(image)]
    if not live:
        return []
    isr = tuple(live[: rng.randint(1, len(live))])
    return [r.PartitionChangeRecord(partition, topic.topic_id, isr=isr, leader=rng.choice(isr))]


class Model:
    """Metadata as clients see it: topics with partition counts, configurations, unfenced brokers, producer ids."""

    def __init__(self) -> None:
        self.topics: dict[str, tuple[bytes, int]] = {}
        self.configs: dict[str, dict[str, str]] = {}
        self.unfenced: set[int] = set()
        self.next_producer_id = 0

    def apply(self, records: Iterable[r.Record]) -> None:
        """Apply a decision. Raises ValueError if it does not fit earlier decisions."""
        for record in records:
            match record:
                case r.TopicRecord(name, topic_id):
                    if name in self.topics:
                        raise ValueError(f"topic {name} was created twice")
                    self.topics[name] = (topic_id, 0)
                case r.PartitionRecord():
                    name = self._name(record.topic_id)
                    self.topics[name] = (record.topic_id, self.topics[name][1] + 1)
                case r.RemoveTopicRecord(topic_id):
                    name = self._name(topic_id)
                    del self.topics[name]
                    self.configs.pop(name, None)
                case r.ConfigRecord():
                    self._configure(record)
                case r.BrokerRegistrationChangeRecord():
                    (self.unfenced.discard if record.fenced > 0 else self.unfenced.add)(record.broker_id)
                case r.ProducerIdsRecord():
                    self.next_producer_id = record.next_producer_id
                case _:
                    pass

    def _name(self, topic_id: bytes) -> str:
        for name, (known, _) in self.topics.items():
            if known == topic_id:
                return name
        raise ValueError(f"topic id {topic_id.hex()} does not exist")

    def _configure(self, record: r.ConfigRecord) -> None:
        keys = self.configs.setdefault(record.resource_name, {})
        keys.pop(record.name, None)
        if record.value is not None:
            keys[record.name] = record.value
        if not keys:
            del self.configs[record.resource_name]

    def difference(self, image: CapturedImage) -> str:
        """Return a description of the differences between an image and the model, or "" if there are none."""
        topics = {topic.name: (topic.topic_id, len(topic.partitions)) for topic in image.topics.values()}
        configs = {name: dict(keys) for (_, name), keys in image.configs.items()}
        unfenced = {broker.broker_id for broker in image.brokers.values() if not broker.fenced}
        pairs = {
            "topics": (topics, self.topics),
            "configurations": (configs, self.configs),
            "unfenced brokers": (unfenced, self.unfenced),
            "next producer id": (image.next_producer_id, self.next_producer_id),
        }
        return "; ".join(
            f"{name} {found}, expected {wanted}" for name, (found, wanted) in pairs.items() if found != wanted
        )


def is_same(image: MetadataImage, captured: CapturedImage) -> bool:
    """Return whether an image has the same content as a capture, which may be of another image."""
    names = [topic.name for topic in captured.topics.values()]
    wanted = {name: keys for (kind, name), keys in captured.configs.items() if kind == TOPIC_RESOURCE}
    return (
        (image.offset, image.epoch, image.timestamp_ms) == captured[:3]
        and image.brokers == captured.brokers
        and image.topics == captured.topics
        and image.features == captured.features
        and image.next_producer_id == captured.next_producer_id
        and {name: keys for name in names if (keys := image.topic_config(name))} == wanted
    )
