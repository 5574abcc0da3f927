"""Replicas recover from a damaged leader epoch, which the CRC of a batch does not cover, without losing records."""

from __future__ import annotations

from kipmesh.core.metadata import elections
from kipmesh.core.metadata.elections import LogEnd
from kipmesh.core.metadata.states import PartitionState
from tests.unit.broker.broker_cluster import BrokerCluster
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

EPOCH_POSITION = 12
RECORDS = 10


async def create_with_records(cluster: BrokerCluster, topic: str) -> bytes:
    topic_id = await cluster.create(topic)
    for number in range(RECORDS):
        await acknowledged(cluster, topic, topic_id, b"%d" % number)
    await in_sync(cluster, topic_id, 1, 2, 3)
    return topic_id


def damage(cluster: BrokerCluster, broker: int, topic: str, offset: int) -> None:
    """Flip a bit in the leader epoch of the batch at `offset`. All batches have the same size; none is synced."""
    (path,) = (cluster.directory / f"broker-{broker}").glob(f"{topic}-0/*.log")
    data = bytearray(path.read_bytes())
    data[offset * len(batch(b"0")) + EPOCH_POSITION + 1] ^= 0x80
    path.write_bytes(data)


async def test_follower_recovers_from_damaged_leader_epoch(cluster: BrokerCluster) -> None:
    topic_id = await create_with_records(cluster, "damaged")
    for offset in (RECORDS - 1, 4, 0):  # last, middle and first batch
        await kill(cluster, 2)
        damage(cluster, 2, "damaged", offset)
        await restart(cluster, 2)
        await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 2, topic_id)) == [b"%d" % number for number in range(RECORDS)]
    replica = cluster.brokers[2].hosted_replicas.get(topic_id, 0)
    assert replica.log.latest_epoch == replica.leader_epoch


async def test_replica_with_damaged_leader_epoch_is_not_elected_after_power_cut(cluster: BrokerCluster) -> None:
    topic_id = await create_with_records(cluster, "outage")
    await power_cut(cluster)
    damage(cluster, 1, "outage", 4)
    for broker in (1, 2, 3):
        await cluster.start_broker(broker)
    await cluster.ready(1, 2, 3)
    await acknowledged(cluster, "outage", topic_id, b"after")
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 1, topic_id)) == [*(b"%d" % number for number in range(RECORDS)), b"after"]


def test_election_ranks_log_with_epoch_above_partition_epoch_last() -> None:
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
