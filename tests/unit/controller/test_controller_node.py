"""A single controller: startup, metadata fetches, broker sessions, and its directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.controller import ControllerNode
from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.control_records import LeaderChange, leader_change_batch
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.metadata.records import METADATA_VERSION_LEVEL
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.testing import until
from tests.unit.controller.controller_support import (
    CLUSTER_ID,
    FakeBroker,
    LiveController,
    controller_config,
    expire_session,
)


async def test_brokers_join_new_cluster_and_receive_topics(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        assert controller.node.ready
        brokers = [FakeBroker(controller, i, rack=f"rack-{i}", leads=i == 1) for i in (1, 2, 3)]
        for broker in brokers:
            await broker.join()
        result = await controller.create("flights", 6)
        assert (result.error_code, result.num_partitions, result.replication_factor) == (0, 6, 3)
        await brokers[0].follow()
        topic = brokers[0].image.topics[result.topic_id]
        assert topic.name == "flights"
        assert {state.leader for state in topic.partitions.values()} == {1}
        assert all(set(state.isr) == {1, 2, 3} for state in topic.partitions.values())
        assert brokers[0].image.features["metadata.version"] == METADATA_VERSION_LEVEL
        assert brokers[0].image.brokers[1].is_leader_role
        assert brokers[0].image.brokers[2].endpoints == {"MESH": brokers[1].address}


async def test_restarted_controller_keeps_metadata_and_sessions_in_new_epoch(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        await controller.create("kept", 3, retention_ms="1000")
        await broker.follow()
        before = broker.image
        epoch = controller.node.epoch
    async with LiveController(tmp_path) as controller:
        assert controller.node.epoch == epoch + 1
        broker.controller = controller
        await broker.catch_up()
        assert broker.image == controller.node.image
        assert broker.image.topic_config("kept") == {"retention.ms": "1000"}
        # The session continues with the same broker epoch.
        assert (await broker.heartbeat()).error_code == 0
        assert set(before.topic_names) == {"kept"}


async def test_metadata_fetch_waits_until_records_arrive_or_max_wait_passes(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        loop = asyncio.get_running_loop()
        # Longer than the timeout of the call: a fetch that waits for its end fails the test.
        waiting = asyncio.create_task(broker.follow(max_wait_ms=60_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await controller.create("t")
        data = await waiting
        assert data.records
        assert broker.image.topic_by_name("t")
        began = loop.time()
        data = await broker.follow(max_wait_ms=100)
        assert not data.records
        assert loop.time() - began > 0.09
        assert controller.node.registry.get_sample_value("kipmesh_controller_waiting_fetches") == 0


async def test_metadata_fetch_stream_returns_new_records(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        stream = controller.connection.fetch_stream("Quorum")
        for name in ("a", "b"):
            await controller.create(name)
            broker.apply(await stream.exchange(broker.fetch_request(60_000), 30))
            assert broker.image.topic_by_name(name)
        stream.cancel()


async def test_describe_quorum_returns_voters_and_observers(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        await FakeBroker(controller, 7).join()
        node = controller.node
        end = node.image.offset + 1
        partition = m.FetchPartition(0, node.epoch, end, node.epoch, partition_max_bytes=1000)
        topic = m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])
        await controller.call("Quorum", "Fetch", m.FetchRequest(CLUSTER_ID, 7, topics=[topic]))
        response = await controller.call("Quorum", "DescribeQuorum", m.DescribeQuorumRequest())
        found = response.topics[0].partitions[0]
        assert (found.leader_id, found.leader_epoch, found.high_watermark) == (1001, 1, end)
        assert [(voter.replica_id, voter.log_end_offset) for voter in found.current_voters] == [(1001, end)]
        assert [(observer.replica_id, observer.log_end_offset) for observer in found.observers] == [(7, end)]
        assert found.observers[0].last_caught_up_timestamp > 0
        assert [(voter.node_id, voter.port) for voter in response.endpoints] == [(1001, 19093)]


async def test_timer_fences_broker_after_session_timeout(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        alive, silent = FakeBroker(controller, 1), FakeBroker(controller, 2)
        await alive.join()
        await silent.join()
        result = await controller.create("t", 2, 2)
        node = controller.node
        expire_session(node, 2)
        await until(lambda: node.image.brokers[2].fenced, "the silent broker fenced")
        assert not node.image.brokers[1].fenced
        for partition in (0, 1):
            state = node.image.partition(result.topic_id, partition)
            assert state is not None
            assert (state.leader, state.isr) == (1, (1,))
        value = node.registry.get_sample_value
        assert value("kafka_controller_kafkacontroller_fencedbrokercount") == 1
        assert value("kafka_controller_kafkacontroller_activebrokercount") == 1
        assert value("kafka_controller_kafkacontroller_offlinepartitionscount") == 0
        assert value("kafka_controller_kafkacontroller_globaltopiccount") == 1
        assert value("kafka_controller_kafkacontroller_globalpartitioncount") == 2
        assert value("kafka_controller_kafkacontroller_activecontrollercount") == 1


async def test_controlled_shutdown_waits_for_leader_change(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        first, second = FakeBroker(controller, 1, leads=True), FakeBroker(controller, 2)
        await first.join()
        await second.join()
        result = await controller.create("t", 1, 2)
        response = await first.heartbeat(shut_down=True)
        assert (response.error_code, response.should_shut_down) == (0, False)
        assert not (await first.heartbeat(shut_down=True)).should_shut_down
        await second.catch_up()
        state = second.image.partition(result.topic_id, 0)
        assert state is not None
        assert (state.leader, state.isr) == (2, (2,))
        await second.heartbeat()
        response = await first.heartbeat(shut_down=True)
        assert (response.should_shut_down, response.is_fenced) == (True, True)
        # After a clean stop, the broker registers before the session timeout.
        restarted = FakeBroker(controller, 1, leads=True)
        await restarted.join(previous_broker_epoch=first.epoch)


async def test_controller_refuses_foreign_duplicate_and_stale_brokers(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker, twin = FakeBroker(controller, 1), FakeBroker(controller, 1)
        assert (await broker.register(cluster_id="other")).error_code == ErrorCode.INCONSISTENT_CLUSTER_ID
        await broker.join()
        assert (await twin.register()).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
        assert (await broker.register()).broker_epoch == broker.epoch
        twin.epoch = 99
        assert (await twin.heartbeat()).error_code == ErrorCode.STALE_BROKER_EPOCH
        assert (await FakeBroker(controller, 2).heartbeat()).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED


@pytest.mark.parametrize(
    "change", [{"cluster.id": "another"}, {"node.id": 1002, "controller.quorum.voters": "1002@h:1"}]
)
async def test_controller_refuses_directory_of_other_cluster_or_node(tmp_path: Path, change: dict[str, object]) -> None:
    async with LiveController(tmp_path):
        pass
    config = controller_config(tmp_path)
    node = ControllerNode(type(config).parse({**config.as_dict(), **change}))
    with pytest.raises(KafkaError):
        await node.start()
    await node.stop()


async def test_controller_refuses_voters_without_its_id(tmp_path: Path) -> None:
    node = ControllerNode(controller_config(tmp_path, controller_quorum_voters="1002@h:2"))
    with pytest.raises(InvalidConfigError, match=r"controller\.quorum\.voters"):
        await node.start()
    await node.stop()


def write_version_0_1_log(directory: Path, records: list[r.Record]) -> None:
    """Write the metadata log of kipmesh 0.1.0: one voter, stopped in its first epoch, and no `quorum-state` file."""
    manager = LogManager(
        RealFileSystem(), (str(directory),), cluster_id=CLUSTER_ID, node_id=1001, defaults=TopicConfig.parse({})
    )
    manager.load(0)
    log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, TopicConfig.parse({}), 0)
    log.append_as_leader(leader_change_batch(LeaderChange(1001, (1001,), (1001,)), 1, 5), 1, 5)
    batch = record_batch.build(
        [(None, r.encode_record(record)) for record in records], base_offset=1, leader_epoch=1, timestamp_ms=5
    )
    log.append_as_leader(batch, 1, 5)
    manager.close(1)


async def test_controller_starts_from_metadata_log_of_version_0_1(tmp_path: Path) -> None:
    topic_id = b"t" * 16
    write_version_0_1_log(
        tmp_path,
        [
            r.FeatureLevelRecord(r.METADATA_VERSION, METADATA_VERSION_LEVEL),
            r.TopicRecord("kept", topic_id),
            r.PartitionRecord(0, topic_id, (1,), (1,), leader=-1, last_known_elr=(1,), directories=(bytes(16),)),
        ],
    )
    async with LiveController(tmp_path) as controller:
        node = controller.node
        assert node.epoch == 2
        assert node.image.topic_names == {"kept": topic_id}
        assert (tmp_path / "__cluster_metadata-0" / "quorum-state").is_file()
        broker = FakeBroker(controller, 1)
        await broker.join()
        await controller.create("new")
    async with LiveController(tmp_path) as controller:
        assert controller.node.epoch == 3
        assert set(controller.node.image.topic_names) == {"kept", "new"}


async def test_aborted_controller_keeps_metadata_and_writes_no_clean_shutdown_file(tmp_path: Path) -> None:
    controller = LiveController(tmp_path)
    async with controller:
        await FakeBroker(controller, 1).join()
        await controller.create("kept")
        await controller.node.abort()
        assert not controller.node.ready
        assert not (tmp_path / ".kafka_cleanshutdown").exists()
        await controller.node.abort()
    async with LiveController(tmp_path) as controller:
        assert set(controller.node.image.topic_names) == {"kept"}


async def test_stopped_controller_ends_waiting_fetches_and_can_stop_again(tmp_path: Path) -> None:
    controller = LiveController(tmp_path)
    await controller.node.start()
    async with ConnectedBroker(controller) as broker:
        await until(lambda: controller.node.ready, "a controller")
        await broker.join()
        waiting = asyncio.create_task(controller.call("Quorum", "Fetch", broker.fetch_request(60_000)))
        await until(lambda: controller.node.registry.get_sample_value("kipmesh_controller_waiting_fetches"), "a fetch")
        await controller.node.stop()
        response = await waiting
        assert response.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        await controller.node.stop()
        assert not controller.node.ready


class ConnectedBroker:
    """A fake broker of a controller that the test starts and stops."""

    def __init__(self, controller: LiveController) -> None:
        self._controller = controller

    async def __aenter__(self) -> FakeBroker:
        from kipmesh.transport.grpc.client import Connection

        self._controller.connection = Connection(f"127.0.0.1:{self._controller.node.grpc_port}", CLUSTER_ID)
        return FakeBroker(self._controller, 1)

    async def __aexit__(self, *error: object) -> None:
        await self._controller.connection.close()


async def test_controller_creates_3000_partitions_in_one_request(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = None
        for broker_id in (1, 2, 3):
            broker = FakeBroker(controller, broker_id, rack=str(broker_id), leads=broker_id == 1)
            await broker.join()
        assert broker is not None
        result = await controller.create("many", 3000, 3)
        assert result.error_code == 0
        await broker.catch_up()
        assert broker.image == controller.node.image
        assert broker.image.partition_count == 3000
