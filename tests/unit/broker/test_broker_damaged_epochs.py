"""A leader epoch is in no CRC: a replica whose unsynced batch was damaged there comes back, and nothing is lost."""

from __future__ import annotations

from kipmesh.core.metadata import elections
from kipmesh.core.metadata.elections import LogEnd
from kipmesh.core.metadata.states import PartitionState
from tests.unit.broker.conftest_broker import Mesh
from tests.unit.broker.test_broker_failures import (
    acknowledged,
    batch,
    in_sync,
    kill,
    log_bytes,
    power_cut,
    restart,
    values,
)

EPOCH_AT = 12
RECORDS = 10


async def filled(mesh: Mesh, topic: str) -> bytes:
    topic_id = await mesh.create(topic)
    for number in range(RECORDS):
        await acknowledged(mesh, topic, topic_id, b"%d" % number)
    await in_sync(mesh, topic_id, 1, 2, 3)
    return topic_id


def damage(mesh: Mesh, broker: int, topic: str, offset: int) -> None:
    """One bit of the batch at an offset; all batches have the same size, and were not synced."""
    (path,) = (mesh.folder / f"broker-{broker}").glob(f"{topic}-0/*.log")
    data = bytearray(path.read_bytes())
    data[offset * len(batch(b"0")) + EPOCH_AT + 1] ^= 0x80
    path.write_bytes(data)


async def test_a_follower_drops_an_epoch_that_never_was(mesh: Mesh) -> None:
    topic_id = await filled(mesh, "damaged")
    for offset in (RECORDS - 1, 4, 0):  # the last batch, one in the middle, the first
        await kill(mesh, 2)
        damage(mesh, 2, "damaged", offset)
        await restart(mesh, 2)
        await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 2, topic_id)) == [b"%d" % number for number in range(RECORDS)]
    replica = mesh.brokers[2].hosted_replicas.get(topic_id, 0)
    assert replica.log.latest_epoch == replica.leader_epoch


async def test_after_a_power_cut_a_damaged_epoch_does_not_lead(mesh: Mesh) -> None:
    topic_id = await filled(mesh, "outage")
    await power_cut(mesh)
    damage(mesh, 1, "outage", 4)
    for broker in (1, 2, 3):
        await mesh.start_broker(broker)
    await mesh.ready(1, 2, 3)
    await acknowledged(mesh, "outage", topic_id, b"after")
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 1, topic_id)) == [*(b"%d" % number for number in range(RECORDS)), b"after"]


def test_an_epoch_above_the_partition_s_makes_the_least_log() -> None:
    def elected(leader_epoch: int, **ends: LogEnd) -> int:
        members = tuple(int(name[1:]) for name in ends)
        state = PartitionState(
            replicas=members, isr=(), last_known_elr=members, leader=-1, leader_epoch=leader_epoch, partition_epoch=1
        )
        log_ends = dict(zip(members, ends.values(), strict=True))
        change = elections.elect_by_log_end((b"t", 0), state, log_ends, lambda _: True, unclean_allowed=False)
        assert change is not None
        assert change.leader is not None
        return change.leader

    assert elected(3, b1=LogEnd(2, 9), b2=LogEnd(3, 5)) == 2
    assert elected(2, b1=LogEnd(2, 9), b2=LogEnd(3, 50)) == 1
    assert elected(2, b1=LogEnd(8388608, 9)) == 1
