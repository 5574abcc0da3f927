"""StartupIsrCheck: when the replicas of a restarted broker count as in sync."""

from __future__ import annotations

from typing import Any

from kipmesh.broker.replication.isr_changes import StartupIsrCheck
from kipmesh.core.metadata import records as r
from tests.unit.broker.broker_images import ImageBuilder, topic_id_of

TOPIC = topic_id_of(1)


def image_with(*assignments: tuple[int, ...]) -> ImageBuilder:
    images = ImageBuilder(1, 2, 3)
    images.topic("t", TOPIC, assignments)
    return images


def startup_check(images: Any) -> StartupIsrCheck:
    return StartupIsrCheck(3, images)


def set_isr(images: ImageBuilder, partition: int, isr: tuple[int, ...]) -> None:
    images.apply(r.PartitionChangeRecord(partition_id=partition, topic_id=TOPIC, isr=isr))


def test_startup_check_requires_all_replicas_in_sync() -> None:
    images = image_with((1, 2, 3), (2, 3, 1), (2, 3))
    set_isr(images, 0, (1, 2))
    set_isr(images, 2, (2,))
    check = startup_check(images)
    assert not check.all_in_sync()
    assert check.lagging() == 2
    set_isr(images, 0, (1, 2, 3))
    assert not check.all_in_sync()
    set_isr(images, 2, (2, 3))
    assert check.all_in_sync()


def test_startup_check_stays_true_when_replica_lags_later() -> None:
    images = image_with((1, 2, 3))
    check = startup_check(images)
    assert check.all_in_sync()
    set_isr(images, 0, (1, 2))
    assert check.all_in_sync()
    assert check.lagging() == 1
    assert not startup_check(images).all_in_sync()  # as after a restart


def test_startup_check_ignores_partitions_without_leader() -> None:
    images = image_with((1, 3), (2, 3))
    images.apply(r.PartitionChangeRecord(partition_id=0, topic_id=TOPIC, isr=(1,), leader=-1))
    assert startup_check(images).all_in_sync()


def test_startup_check_ignores_replicas_added_by_reassignment() -> None:
    images = image_with((1, 2))
    images.apply(
        r.PartitionChangeRecord(
            partition_id=0, topic_id=TOPIC, replicas=(1, 2, 3), adding_replicas=(3,), removing_replicas=(2,)
        )
    )
    assert startup_check(images).all_in_sync()


def test_startup_check_passes_without_replicas() -> None:
    assert startup_check(image_with((1, 2))).all_in_sync()
