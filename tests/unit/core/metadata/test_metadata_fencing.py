"""One record fences a broker (630-16), with the effect of one record per partition. Older logs still replay."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kipmesh import messages as m
from kipmesh.controller.events import log_decided
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata import elections, fencing
from kipmesh.core.metadata import image as image_module
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_records
from kipmesh.core.metadata.states import LeaderExample
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller, check_image

BROKERS = 6
LEVEL_1 = r.FeatureLevelRecord(fencing.FENCING_FEATURE, 1)
TOPICS = [bytes([number]) * 16 for number in range(3)]


@st.composite
def partitions(draw: st.DrawFn, topic_id: bytes, partition: int, eligible: set[int]) -> r.PartitionRecord:
    """Draw any valid partition state: the leader is eligible and in the ISR."""
    replicas = draw(st.lists(st.integers(1, BROKERS), min_size=1, max_size=5, unique=True).map(tuple))
    isr = draw(st.lists(st.sampled_from(replicas), unique=True).map(tuple))
    rest = [replica for replica in replicas if replica not in isr]
    remembered = draw(st.lists(st.sampled_from(rest), unique=True).map(tuple)) if rest else ()
    if not isr and not remembered:
        remembered = replicas[:1]
    leaders = [member for member in isr if member in eligible]
    return r.PartitionRecord(
        partition,
        topic_id,
        replicas,
        isr,
        leader=draw(st.sampled_from([*leaders, -1] if leaders else [-1])),
        leader_recovery_state=draw(st.sampled_from([0, 0, 1])),
        leader_epoch=draw(st.integers(0, 5)),
        partition_epoch=draw(st.integers(0, 9)),
        directories=tuple([bytes(16)] * len(replicas)),
        last_known_elr=remembered or None,
    )


@st.composite
def logs(draw: st.DrawFn) -> list[r.Record]:
    """Draw the records of an image with active, fenced and stopping brokers."""
    records: list[r.Record] = []
    eligible = set()
    for broker_id in range(1, BROKERS + 1):
        fenced, shutting = draw(st.sampled_from([(False, False)] * 4 + [(True, False), (False, True), (True, True)]))
        if not fenced and not shutting:
            eligible.add(broker_id)
        records.append(
            r.RegisterBrokerRecord(broker_id, broker_epoch=broker_id, fenced=fenced, in_controlled_shutdown=shutting)
        )
    for number, topic_id in enumerate(TOPICS):
        records.append(r.TopicRecord(f"t{number}", topic_id))
        records += [draw(partitions(topic_id, partition, eligible)) for partition in range(draw(st.integers(0, 5)))]
    return records


def image_of(*records: r.Record) -> MetadataImage:
    image = MetadataImage()
    apply(image, records)
    return image


def apply(image: MetadataImage, records: list[r.Record] | tuple[r.Record, ...]) -> MetadataDelta:
    delta = MetadataDelta()
    for record in records:
        image.offset += 1
        image.apply(record, delta)
    return delta


def records_per_partition(image: MetadataImage, event: r.BrokerRegistrationChangeRecord) -> list[r.Record]:
    """Return the records that replace an event: the broker change and one record per partition."""
    gone = {event.broker_id, *event.also_gone}

    def can_lead(candidate: int) -> bool:
        broker = image.brokers.get(candidate)
        return broker is not None and broker.can_lead and candidate not in gone

    records: list[r.Record] = [event._replace(also_gone=())]
    for topic in image.topics.values():
        for partition, state in topic.partitions.items():
            if event.broker_id in state.replicas:
                change = elections.leave_isr(
                    (topic.topic_id, partition), state, event.broker_id, can_lead, unclean=False
                )
                records += [change] if change else []
    return records


def assert_same(first: MetadataImage, second: MetadataImage) -> None:
    """Compare all but the level, the offset and the offsets since which leaders are unproven."""
    assert (first.brokers, first.topics) == (second.brokers, second.topics)
    assert set(first.leaderless) == set(second.leaderless)
    for broker_id in range(BROKERS + 1):
        assert set(first.partitions_of_broker(broker_id)) == set(second.partitions_of_broker(broker_id))
        assert first.unproven(broker_id).keys() == second.unproven(broker_id).keys()


@st.composite
def events(draw: st.DrawFn) -> r.BrokerRegistrationChangeRecord:
    broker_id = draw(st.integers(1, BROKERS))
    fenced, shutting = draw(st.sampled_from([(1, 0), (1, 0), (0, 1), (1, 1)]))
    also_gone = draw(st.lists(st.integers(1, BROKERS), max_size=3, unique=True).map(tuple))
    return r.BrokerRegistrationChangeRecord(broker_id, broker_id, fenced, shutting, also_gone=also_gone)


@given(logs(), st.lists(events(), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_fencing_event_equals_records_per_partition(log: list[r.Record], fencing_events: list[object]) -> None:
    current, legacy = image_of(*log, LEVEL_1), image_of(*log)
    for event in fencing_events:
        assert isinstance(event, r.BrokerRegistrationChangeRecord)
        records = records_per_partition(legacy, event)
        before = {
            (record.topic_id, record.partition_id): legacy.partition(record.topic_id, record.partition_id)
            for record in records[1:]
        }
        expected, found = apply(legacy, records), apply(current, [event])
        assert_same(current, legacy)
        check_image(current)
        assert found.changed_partitions == expected.changed_partitions == before.keys()
        assert found.outdated == expected.outdated
        assert found.changed_brokers == expected.changed_brokers
        (effect,) = found.fencing_effects
        leaders = [record.leader for record in records[1:] if record.leader != r.NO_LEADER_CHANGE]
        assert effect.partitions == len(before)
        assert effect.without_leader == leaders.count(-1)
        assert effect.elected == len(leaders) - leaders.count(-1)
        assert len(effect.examples) == min(len(leaders), image_module.EXAMPLES_MAX)
        for example in effect.examples:
            was, now = before[example.key], current.partition(*example.key)
            assert was is not None
            assert now is not None
            assert (example.before, example.after) == (was.leader, now.leader)


@given(logs(), events())
@settings(max_examples=100, deadline=None)
def test_snapshot_after_fencing_event_restores_image(
    log: list[r.Record], event: r.BrokerRegistrationChangeRecord
) -> None:
    image = image_of(*log, LEVEL_1)
    captured = image.capture()
    before = list(image_records(captured))
    apply(image, [event])
    assert list(image_records(captured)) == before, "a capture does not change"
    loaded = image_of(*image_records(image.capture()))
    assert_same(image, loaded)
    assert loaded.features == image.features
    again = event._replace(broker_id=event.broker_id % BROKERS + 1, broker_epoch=event.broker_id % BROKERS + 1)
    apply(image, [again])
    apply(loaded, [again])
    assert_same(image, loaded)


@given(logs(), events())
@settings(max_examples=50, deadline=None)
def test_fencing_event_without_feature_level_changes_broker_only(
    log: list[r.Record], event: r.BrokerRegistrationChangeRecord
) -> None:
    image = image_of(*log)
    topics = {topic_id: dict(topic.partitions) for topic_id, topic in image.topics.items()}
    delta = apply(image, [event, event._replace(proven=True)])
    assert {topic_id: topic.partitions for topic_id, topic in image.topics.items()} == topics
    assert not delta.changed_partitions
    assert not delta.fencing_effects
    # The level takes effect after its record.
    apply(image, [LEVEL_1, event])
    assert_same(image, image_of(*log, LEVEL_1, event))


@given(logs(), st.integers(1, BROKERS))
@settings(max_examples=100, deadline=None)
def test_proof_event_equals_records_per_partition(log: list[r.Record], broker_id: int) -> None:
    current, legacy = image_of(*log, LEVEL_1), image_of(*log)
    proof = r.BrokerRegistrationChangeRecord(broker_id, broker_id, proven=True)
    led = [
        (topic.topic_id, partition)
        for topic in legacy.topics.values()
        for partition, state in topic.partitions.items()
        if state.leader == broker_id and state.last_known_elr
    ]
    expected = apply(legacy, [proof, *[elections.clear_last_known_elr(key) for key in led]])
    found = apply(current, [proof])
    assert_same(current, legacy)
    assert not current.unproven(broker_id)
    assert (found.changed_partitions, found.outdated) == (expected.changed_partitions, expected.outdated)


@pytest.mark.parametrize("level", [-1, 2, 30_000])
def test_unknown_fencing_level_is_refused(level: int) -> None:
    image = MetadataImage()
    with pytest.raises(KafkaError, match=rf"kipmesh.fencing level {level}, .* knows 0 to 1") as raised:
        image.apply(r.FeatureLevelRecord(fencing.FENCING_FEATURE, level), MetadataDelta())
    assert raised.value.code is ErrorCode.UNSUPPORTED_VERSION
    assert image.failed


def test_legacy_fence_record_changes_no_partition() -> None:
    image = image_of(
        r.RegisterBrokerRecord(1, broker_epoch=1, fenced=False),
        r.TopicRecord("t", TOPICS[0]),
        r.PartitionRecord(0, TOPICS[0], (1,), (1,), leader=1),
        LEVEL_1,
    )
    delta = apply(image, [r.FenceBrokerRecord(1, 1)])
    assert image.brokers[1].fenced
    assert not delta.changed_partitions


# --- large brokers


def test_replay_steps_expose_no_partial_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker's partitions change in steps. The image cannot be captured within a batch."""
    monkeypatch.setattr(image_module, "STEP_PARTITIONS", 4)
    log: list[r.Record] = [r.RegisterBrokerRecord(i, broker_epoch=i, fenced=False) for i in (1, 2)]
    log += [r.TopicRecord("t", TOPICS[0]), LEVEL_1]
    log += [r.PartitionRecord(number, TOPICS[0], (1, 2), (1, 2), leader=1) for number in range(10)]
    image, whole = image_of(*log), image_of(*log)
    event = r.BrokerRegistrationChangeRecord(1, 1, fenced=1)
    batch = record_batch.build(
        [(None, r.encode_record(event))], base_offset=image.offset + 1, leader_epoch=1, timestamp_ms=7
    )
    delta = MetadataDelta()
    counts = []
    for _ in image.replay_steps(batch, delta):
        counts.append(sum(state.leader == 2 for state in image.topics[TOPICS[0]].partitions.values()))
        assert image.is_within_batch
        assert image.offset == whole.offset, "the batch is not complete"
        with pytest.raises(RuntimeError, match="within a batch"):
            image.capture()
    assert counts == [4, 8, 10]
    whole.replay(batch, MetadataDelta())
    assert image == whole
    assert not image.is_within_batch
    assert len(delta.changed_partitions) == 10
    image.capture()


def test_abandoned_replay_fails_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "STEP_RECORDS", 1)
    image = MetadataImage()
    values = [(None, r.encode_record(r.NoOpRecord()))] * 3
    steps = image.replay_steps(
        record_batch.build(values, base_offset=0, leader_epoch=1, timestamp_ms=7), MetadataDelta()
    )
    next(steps)
    assert isinstance(steps, Generator)
    steps.close()
    assert image.failed


# --- the controller's decisions


@pytest.fixture
def three() -> Controller:
    controller = Controller()
    for broker_id in (1, 2, 3):
        controller.join(broker_id)
    return controller


def test_fencing_writes_one_record_for_any_number_of_partitions(three: Controller) -> None:
    topics = [three.create_assigned(f"t{number}", *[(1, 2, 3)] * 20) for number in range(5)]
    three.run(three.core_fence(1))
    assert three.last_records == [r.BrokerRegistrationChangeRecord(1, three.image.brokers[1].broker_epoch, fenced=1)]
    assert all(three.state(topic, 19).leader == 2 for topic in topics)
    three.heartbeat(2)
    assert three.last_records == [r.BrokerRegistrationChangeRecord(2, three.image.brokers[2].broker_epoch, proven=True)]
    assert all(three.state(topic, 19).last_known_elr == () for topic in topics)
    assert three.replayed() == three.image


def test_controlled_shutdown_writes_one_record(three: Controller) -> None:
    topic = three.create_assigned("t", *[(1, 2, 3)] * 20)
    three.heartbeat(1, shut_down=True)
    epoch = three.image.brokers[1].broker_epoch
    assert three.last_records == [r.BrokerRegistrationChangeRecord(1, epoch, in_controlled_shutdown=1)]
    assert three.state(topic, 19).leader == 2


def test_fencing_event_names_other_expired_brokers(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    three.now_ms += SESSION_MS // 2
    three.heartbeat(3)
    three.now_ms += SESSION_MS // 2
    assert three.core.brokers.expired(three.now_ms) == [1, 2]
    (event,) = three.core.brokers.fence([1, 2])
    assert event.also_gone == (2,)
    three.run(three.core_fence(1)._replace(records=[event]))
    assert three.state(topic).leader == 3


def test_fencing_event_names_bounded_number_of_brokers(three: Controller) -> None:
    (event,) = three.core.brokers.fence([1, *range(2, 5000)])
    assert event.also_gone == tuple(range(2, 2 + fencing.ALSO_GONE_MAX))


def test_heartbeat_proves_only_changes_applied_by_leader(three: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = three.create_assigned("t", *[(1, 2, 3)] * 3)
    three.run(three.core_fence(1))
    seen = three.image.offset
    three.create_assigned("u", (3, 2))
    three.run(three.core_fence(3))
    assert len(three.image.unproven(2)) == 4
    for key in list(three.image.unproven(2))[:2]:  # as if unchanged since
        three.image._indexes.unproven[2][key] = seen
    monkeypatch.setattr("kipmesh.core.metadata.brokers.PROVEN_RECORDS_MAX", 1)
    three.heartbeat(2, offset=seen)
    assert [type(record) for record in three.last_records] == [r.PartitionChangeRecord]
    assert sum(not three.state(topic, number).last_known_elr for number in range(3)) == 1


def test_log_ends_of_fencing_heartbeat_are_used_by_later_election(three: Controller) -> None:
    """A decision changes a partition once: by the event or by an election."""
    topic = three.create_assigned("t", (1, 2), unclean_leader_election_enable="true")
    three.alter_isr(topic, 0, [1])
    three.run(three.core_fence(1))
    assert three.heartbeat(2).wanted_log_ends == [m.TopicIdPartition(topic, 0)]
    three.now_ms += SESSION_MS  # the broker has been registered for a session
    three.heartbeat(2, fence=True, log_ends=[m.PartitionLogEnd(topic, 0, 0, 5)])
    assert three.state(topic).leader == -1
    three.heartbeat(2)
    three.run(three.elect_pending())
    assert three.state(topic).leader == 2
    assert three.replayed() == three.image


def older_log() -> Controller:
    """Return a controller on the log of a version without fencing events."""
    controller = Controller()
    controller.batches.clear()
    controller.batches.append(
        record_batch.build(
            [(None, r.encode_record(r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL)))],
            base_offset=0,
            leader_epoch=1,
            timestamp_ms=1,
        )
    )
    return controller


def test_controller_raises_fencing_level_of_older_log() -> None:
    controller = older_log()
    controller.restart()
    assert controller.last_records == [LEVEL_1]
    controller.restart()
    assert controller.last_records == []
    assert controller.image.features == {r.METADATA_VERSION: r.METADATA_VERSION_LEVEL, fencing.FENCING_FEATURE: 1}


def test_fencing_below_feature_level_writes_record_per_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of 0.1.0 is written, replayed, taken over by a new controller and continued."""
    controller = older_log()
    monkeypatch.setattr("kipmesh.core.metadata.controller.FENCING_LEVEL", 0)
    controller.restart()
    assert controller.image.fencing_level == 0
    for broker_id in (1, 2, 3):
        controller.join(broker_id)
    topic = controller.create_assigned("t", (1, 2, 3), (2, 3, 1))
    controller.heartbeat(3, shut_down=True)
    assert len(controller.last_records) == 3
    controller.run(controller.core_fence(1))
    assert [type(record) for record in controller.last_records] == [
        r.BrokerRegistrationChangeRecord,
        r.PartitionChangeRecord,
        r.PartitionChangeRecord,
    ]
    assert [controller.state(topic, number).isr for number in (0, 1)] == [(2,), (2,)]
    assert controller.replayed() == controller.image
    before = controller.image
    monkeypatch.setattr("kipmesh.core.metadata.controller.FENCING_LEVEL", 1)
    controller.restart()
    assert controller.image.topics == before.topics
    controller.heartbeat(2)
    (proof,) = controller.last_records
    assert proof.proven
    assert controller.state(topic).last_known_elr == ()
    controller.run(controller.core_fence(2))
    assert len(controller.last_records) == 1
    assert (controller.state(topic).isr, controller.state(topic).leader) == ((2,), -1)
    assert controller.replayed() == controller.image


# --- metrics and logs


@pytest.mark.usefixtures("default_structlog")
def test_elections_of_fencing_event_are_counted_and_logged(three: Controller) -> None:
    three.create_assigned("t", (1, 2), (1, 3), (2, 1))
    single = three.create_assigned("single", (1,))
    (event,) = three.core.brokers.fence([1])
    delta = apply(three.image, [event])
    with capture_logs() as lines:
        counts = log_decided(three.image, [event], [None], delta)
    assert counts == (2, 0)
    fenced, elected = lines
    assert (fenced["event"], fenced["state"]) == ("broker state changed", "fenced")
    assert (elected["event"], elected["partitions"], elected["without_leader"]) == ("leaders elected", 2, 1)
    assert elected["examples"] == ["t-0: 1 -> 2", "t-1: 1 -> 3", "single-0: 1 -> -1, waits for [1]"]
    assert delta.fencing_effects[0].examples[2] == LeaderExample((single, 0), 1, -1)
    proof = r.BrokerRegistrationChangeRecord(2, three.image.brokers[2].broker_epoch, proven=True)
    with capture_logs() as lines:
        assert log_decided(three.image, [proof], [None], apply(three.image, [proof])) == (0, 0)
    assert lines == []


@pytest.mark.usefixtures("default_structlog")
@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"fenced": 1}, "fenced"),
        ({"fenced": -1}, "unfenced"),
        ({"in_controlled_shutdown": 1}, "shutting down"),
        ({"log_dirs": [b"d" * 16]}, "log directories changed"),
    ],
)
def test_broker_state_event_names_the_change(change: dict[str, Any], state: str) -> None:
    record = r.BrokerRegistrationChangeRecord(1, 7, **change)
    with capture_logs() as events:
        log_decided(MetadataImage(), [record], [None], MetadataDelta())
    assert [event["state"] for event in events] == [state]
