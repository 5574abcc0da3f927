"""Strategies for metadata images, built from records, and comparison of images."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage

IDS = [bytes(15) + bytes([number]) for number in range(1, 5)]
NAMES = ["a", "b.c", "b_d", "e"]
BROKERS = st.integers(0, 5)
REPLICAS = st.lists(BROKERS, min_size=1, max_size=4, unique=True).map(tuple)
OPTIONAL = st.none() | st.lists(BROKERS, max_size=3, unique=True).map(tuple)
UUIDS = st.sampled_from([bytes(16), *IDS])
EPOCHS = st.integers(0, 2**31 - 100)
USERS = ["alice", "bob", "ü,=\n"]


@st.composite
def partition_records(draw: st.DrawFn, topic_id: bytes | None = None) -> r.PartitionRecord:
    replicas = draw(REPLICAS)
    isr = draw(st.lists(st.sampled_from(replicas), unique=True).map(tuple))
    return r.PartitionRecord(
        draw(st.integers(0, 3)),
        topic_id or draw(st.binary(min_size=16, max_size=16)),
        replicas,
        isr,
        draw(st.just(()) | REPLICAS),
        draw(st.just(()) | REPLICAS),
        draw(st.sampled_from([-1, *isr])),
        draw(st.sampled_from([0, 0, 1])),
        draw(EPOCHS),
        draw(EPOCHS),
        draw(st.lists(UUIDS, max_size=4).map(tuple)),
        draw(OPTIONAL),
        draw(OPTIONAL),
    )


@st.composite
def records(draw: st.DrawFn, image: MetadataImage) -> r.Record:
    """Draw a record that the image can apply."""
    kinds = ["broker", "feature", "producer ids", "config", "credential"]
    kinds += ["no credential"] * bool(image.credentials)
    free = [name for name in NAMES if name not in image.topic_names]
    kinds += ["topic"] * bool(free)
    kinds += ["partition", "partition", "remove"] * bool(image.topics)
    kinds += ["change", "change"] * bool(image.partition_count)
    kinds += ["broker change", "unregister"] * bool(image.brokers)
    kind = draw(st.sampled_from(kinds))
    if kind in ("broker change", "unregister"):
        broker = image.brokers[draw(st.sampled_from(sorted(image.brokers)))]
        if kind == "unregister":
            return r.UnregisterBrokerRecord(broker.broker_id, broker.broker_epoch)
        return r.BrokerRegistrationChangeRecord(
            broker.broker_id,
            broker.broker_epoch,
            draw(st.integers(-1, 1)),
            draw(st.integers(0, 1)),
            proven=draw(st.booleans()),
        )
    if kind == "broker":
        end_points = (r.BrokerEndpoint("MESH", "h", draw(st.integers(0, 65535))),)
        features = draw(st.sampled_from([(), (r.BrokerFeature("kipmesh.leader", 0, 1),)]))
        rack = draw(st.none() | st.text(max_size=3))
        return r.RegisterBrokerRecord(
            draw(BROKERS), False, draw(UUIDS), image.offset, end_points, features, rack, draw(st.booleans())
        )
    if kind == "feature":
        if draw(st.booleans()):
            return r.FeatureLevelRecord("kipmesh.fencing", draw(st.integers(0, 1)))
        return r.FeatureLevelRecord(draw(st.sampled_from(["metadata.version", "x"])), draw(st.integers(0, 30)))
    if kind == "producer ids":
        return r.ProducerIdsRecord(1, 2, draw(st.integers(0, 2**40)))
    if kind == "credential":
        user, mechanism = draw(st.sampled_from(USERS)), draw(st.integers(1, 3))
        salt, stored_key, server_key = [draw(st.binary(max_size=3)) for _ in range(3)]
        return r.UserScramCredentialRecord(user, mechanism, salt, stored_key, server_key, 4096)
    if kind == "no credential":
        user = draw(st.sampled_from(sorted(image.credentials)))
        return r.RemoveUserScramCredentialRecord(user, draw(st.sampled_from(sorted(image.credentials[user]))))
    if kind == "config":
        value = draw(st.none() | st.text(max_size=3))
        return r.ConfigRecord(
            draw(st.sampled_from([2, 4])), draw(st.sampled_from(NAMES)), draw(st.sampled_from("xy")), value
        )
    if kind == "topic":
        topic_id = next(id_ for id_ in IDS if id_ not in image.topics)
        return r.TopicRecord(draw(st.sampled_from(free)), topic_id)
    if kind == "change":
        topic_id, partition = draw(
            st.sampled_from([(t.topic_id, p) for t in image.topics.values() for p in sorted(t.partitions)])
        )
        leader = draw(st.integers(-2, 5))
        return r.PartitionChangeRecord(
            partition, topic_id, draw(OPTIONAL), leader, draw(st.none() | REPLICAS), last_known_elr=draw(OPTIONAL)
        )
    topic_id = draw(st.sampled_from(sorted(image.topics)))
    if kind == "remove":
        return r.RemoveTopicRecord(topic_id)
    return draw(partition_records(topic_id))


def apply(image: MetadataImage, record: r.Record, delta: MetadataDelta | None = None) -> None:
    image.offset += 1
    image.apply(record, MetadataDelta() if delta is None else delta)


@st.composite
def images(draw: st.DrawFn, length: int = 25) -> MetadataImage:
    image = MetadataImage()
    image.epoch = 3
    for _ in range(draw(st.integers(0, length))):
        apply(image, draw(records(image)))
    return image


def restored(offset: int, epoch: int, all_records: Sequence[r.Record]) -> MetadataImage:
    """Build an image from snapshot records."""
    image = MetadataImage(offset, epoch)
    for record in all_records:
        image.apply(record, MetadataDelta())
    return image


def assert_same(original: MetadataImage, loaded: MetadataImage) -> None:
    """Compare all but the offsets since which leaders are unproven: a snapshot may raise them."""
    for name in MetadataImage.__slots__:
        if name == "_indexes":
            before, after = original._indexes, loaded._indexes
            assert (before.of_broker, before.leaderless, before.count) == (
                after.of_broker,
                after.leaderless,
                after.count,
            )
            assert before.imbalanced == after.imbalanced
            for leader in {*before.unproven, *after.unproven}:
                assert original.unproven(leader).keys() == loaded.unproven(leader).keys()
                assert all(loaded.unproven(leader)[key] >= at for key, at in original.unproven(leader).items())
        elif name != "_generation":
            assert getattr(original, name) == getattr(loaded, name), name
