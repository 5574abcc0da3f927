"""Images to records and back, isolated captures, and the fast partition codec."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, difference
from kipmesh.core.metadata.image_writer import image_records, image_values
from kipmesh.core.metadata.records import decode_partition, encode_partition
from kipmesh.messages import SnapshotId
from tests.unit.core.snapshot.image_strategies import (
    IDS,
    apply,
    assert_same,
    images,
    partition_records,
    records,
    restored,
)

TOPIC, OTHER = IDS[:2]


def record_of(fields: tuple[Any, ...]) -> r.PartitionRecord:
    values: tuple[Any, ...] = (*fields, None, None)
    return r.PartitionRecord(*values)


@given(images())
@settings(max_examples=200, deadline=None)
def test_records_of_image_restore_equal_image(image: MetadataImage) -> None:
    captured = image.capture()
    written = list(image_records(captured))
    assert_same(image, restored(image.offset, image.epoch, written))
    values = list(image_values(captured))
    assert values == [r.encode_record(record) for record in written]
    assert_same(image, restored(image.offset, image.epoch, [r.decode_record(value) for value in values]))


@given(images(), st.data())
@settings(max_examples=100, deadline=None)
def test_capture_is_isolated_from_image_changes(image: MetadataImage, data: st.DataObject) -> None:
    first = image.capture()
    before = list(image_records(first))
    reading = image_values(first)
    read = [value for _, value in zip(range(3), reading, strict=False)]
    second = None
    for number in range(data.draw(st.integers(1, 8))):
        apply(image, data.draw(records(image)))
        if number == 2:
            second = (image.capture(), list(image_records(image.capture())))
    assert list(image_records(first)) == before
    assert read + list(reading) == [r.encode_record(record) for record in before]
    if second is not None:
        assert list(image_records(second[0])) == second[1]
    assert_same(image, restored(image.offset, image.epoch, list(image_records(image.capture()))))


def test_metadata_version_is_first_snapshot_record() -> None:
    image = MetadataImage()
    for record in (r.FeatureLevelRecord("x", 1), r.FeatureLevelRecord(r.METADATA_VERSION, 25)):
        apply(image, record)
    assert [record.name for record in image_records(image.capture())] == [r.METADATA_VERSION, "x"]


def test_topic_is_copied_once_per_capture() -> None:
    image = MetadataImage()
    apply(image, r.TopicRecord("t", TOPIC))
    apply(image, r.PartitionRecord(0, TOPIC, (1,), (1,), leader=1, leader_epoch=0, partition_epoch=0))
    own = image.topics[TOPIC]
    captured = image.capture()
    apply(image, r.PartitionChangeRecord(0, TOPIC, leader=1))
    changed = image.topics[TOPIC]
    assert changed is not own
    assert captured.topics[TOPIC] is own
    assert own.partitions[0].leader_epoch == 0
    apply(image, r.PartitionChangeRecord(0, TOPIC, leader=1))
    assert image.topics[TOPIC] is changed


@pytest.mark.parametrize("by_replay", [False, True])
def test_failed_image_cannot_be_captured(by_replay: bool) -> None:
    image = MetadataImage()
    with pytest.raises(CorruptRecordError):
        image.replay(b"x" * 80, MetadataDelta()) if by_replay else apply(image, r.RemoveTopicRecord(TOPIC))
    assert image.failed
    with pytest.raises(RuntimeError, match="failed"):
        image.capture()


def test_delta_tracks_outdated_records() -> None:
    """630-04: counts each outdated record once, but no new records."""
    image, delta = MetadataImage(), MetadataDelta()
    for record in (
        r.FeatureLevelRecord("x", 1),
        r.ProducerIdsRecord(1, 1, 5),
        r.RegisterBrokerRecord(1, broker_epoch=2),
        r.TopicRecord("t", TOPIC),
        r.TopicRecord("u", OTHER),
        r.PartitionRecord(0, TOPIC, (1,), (1,), leader=1),
        r.PartitionRecord(1, TOPIC, (1,), (1,), leader=1),
        r.PartitionRecord(0, OTHER, (1,), (1,), leader=1),
        r.ConfigRecord(2, "t", "k", "v"),
        r.ConfigRecord(2, "u", "k", "v"),
        r.ConfigRecord(2, "u", "none", None),
        r.UserScramCredentialRecord("alice", 1, b"s", b"k", b"v", 4096),
        r.UserScramCredentialRecord("alice", 2, b"s", b"k", b"v", 4096),
        r.UserScramCredentialRecord("bob", 1, b"s", b"k", b"v", 4096),
    ):
        apply(image, record, delta)
    assert delta.outdated == set()
    for _ in range(2):
        apply(image, r.PartitionChangeRecord(0, OTHER, leader=1), delta)
    assert delta.outdated == {(OTHER, 0)}
    apply(image, r.RemoveTopicRecord(TOPIC), delta)
    assert delta.outdated == {(OTHER, 0), (TOPIC, 0), (TOPIC, 1), ("topic", TOPIC), ("config", 2, "t", "k")}
    apply(image, r.ConfigRecord(2, "u", "k", "w"), delta)
    apply(image, r.FeatureLevelRecord("x", 2), delta)
    apply(image, r.ProducerIdsRecord(1, 1, 9), delta)
    apply(image, r.BrokerRegistrationChangeRecord(1, 2, -1), delta)
    apply(image, r.UnregisterBrokerRecord(1, 2), delta)
    apply(image, r.UserScramCredentialRecord("alice", 1, b"t", b"k", b"v", 8192), delta)
    apply(image, r.RemoveUserScramCredentialRecord("bob", 1), delta)
    more = {("config", 2, "u", "k"), ("feature", "x"), ("producer ids",), ("broker", 1)}
    more |= {("credential", "alice", 1), ("credential", "bob", 1)}
    assert delta.outdated >= more
    assert len(delta.outdated) == 11


def test_capture_has_snapshot_id_and_timestamp() -> None:
    image = MetadataImage()
    batch = record_batch.build(
        [(None, r.encode_record(r.NoOpRecord()))] * 3, base_offset=0, leader_epoch=4, timestamp_ms=77
    )
    image.replay(batch, MetadataDelta())
    captured = image.capture()
    assert (captured.snapshot_id, captured.timestamp_ms) == (SnapshotId(3, 4), 77)
    assert MetadataImage(captured.offset, captured.epoch, captured.timestamp_ms) == image


@given(images(), st.data())
@settings(max_examples=100, deadline=None)
def test_image_difference_contains_changes_only(image: MetadataImage, data: st.DataObject) -> None:
    before = restored(image.offset, image.epoch, list(image_records(image.capture())))
    assert not difference(before, image)
    applied = MetadataDelta()
    for _ in range(data.draw(st.integers(1, 10))):
        apply(image, data.draw(records(image)), applied)
    found = difference(before, image)
    assert found.changed_partitions <= applied.changed_partitions
    assert found.changed_brokers <= applied.changed_brokers
    assert {topic.topic_id for topic in found.deleted_topics} == before.topics.keys() - image.topics.keys()
    for topic in image.topics.values():
        known = before.topics.get(topic.topic_id)
        for partition, state in topic.partitions.items():
            is_same = known is not None and known.partitions.get(partition) == state
            assert is_same != ((topic.topic_id, partition) in found.changed_partitions)
        is_same = before.topic_config(topic.name) == image.topic_config(topic.name)
        assert is_same != (topic.name in found.changed_topic_configs)
    assert found.changed_topic_configs <= image.topic_names.keys()
    for broker_id in {*before.brokers, *image.brokers}:
        is_same = before.brokers.get(broker_id) == image.brokers.get(broker_id)
        assert is_same != (broker_id in found.changed_brokers)


@given(partition_records())
@settings(deadline=None)
def test_partition_codec_matches_generic_codec(record: r.PartitionRecord) -> None:
    slow = r.encode_record(record)
    fields = decode_partition(slow)
    if fields is not None:
        assert record_of(fields) == record
    plain = record._replace(
        removing_replicas=(), adding_replicas=(), leader_recovery_state=0, eligible_leader_replicas=None,
        last_known_elr=None,
    )  # fmt: skip
    numbers = (plain.leader, plain.leader_epoch, plain.partition_epoch)
    quick = encode_partition(
        plain.topic_id, plain.partition_id, plain.replicas, plain.isr, numbers, plain.directories
    )  # fmt: skip
    assert quick == r.encode_record(plain)
    assert record_of(decode_partition(quick) or ()) == plain
    assert (fields is None) == (plain != record)


def test_partition_codec_declines_unusual_records() -> None:
    long = tuple(range(130))
    record = r.PartitionRecord(1, TOPIC, long, long, (), (), 1, 0, 1, 1, (bytes(16),) * 130)
    assert encode_partition(TOPIC, 1, long, long, (1, 1, 1), ()) is None
    assert encode_partition(TOPIC[1:], 1, (1,), (1,), (1, 1, 1), ()) is None
    assert encode_partition(TOPIC, 1, (1,), (1,), (1, 1, 1), (TOPIC[1:],)) is None
    assert encode_partition(TOPIC, 1, (1,), (1,), (1, 1, 1), (TOPIC * 2,)) is None
    encoded = r.encode_record(record)
    assert decode_partition(encoded) is None
    assert r.decode_record(encoded) == record
    image = MetadataImage()
    apply(image, r.TopicRecord("t", TOPIC))
    apply(image, record)
    assert r.decode_record(list(image_values(image.capture()))[-1]) == record


@given(st.binary(max_size=80))
def test_partition_codec_never_raises(tail: bytes) -> None:
    for cut in (b"", b"\1\3\2"):
        decode_partition(cut + tail)


@given(partition_records(), st.data())
@settings(deadline=None)
def test_partition_codec_decodes_only_canonical_bytes(record: r.PartitionRecord, data: st.DataObject) -> None:
    encoded = bytearray(r.encode_record(record))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    changed = bytes(encoded[: data.draw(st.integers(1, len(encoded)))])
    fields = decode_partition(changed)
    if fields is not None:
        decoded = record_of(fields)
        assert r.encode_record(decoded) == changed
