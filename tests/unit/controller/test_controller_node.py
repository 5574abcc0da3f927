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
    CLUSTER,
    FakeBroker,
    LiveController,
    controller_config,
    end_session,
)


async def test_a_new_cluster_serves_topics_to_brokers(tmp_path: Path) -> None:
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


async def test_a_restart_keeps_everything_and_begins_a_new_epoch(tmp_path: Path) -> None:
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
        # The session goes on: same broker epoch, no registration.
        assert (await broker.heartbeat()).error_code == 0
        assert set(before.topic_names) == {"kept"}


async def test_a_fetch_waits_for_records_and_not_longer(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        loop = asyncio.get_running_loop()
        # Longer than the call has: who waits for the end gets no answer.
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


async def test_a_stream_of_fetches(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        broker = FakeBroker(controller, 1)
        await broker.join()
        stream = controller.connection.fetch_stream("Quorum")
        for name in ("a", "b"):
            await controller.create(name)
            broker.take(await stream.exchange(broker.fetch_request(60_000), 30))
            assert broker.image.topic_by_name(name)
        stream.cancel()


async def test_describe_quorum(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        await FakeBroker(controller, 7).join()
        node = controller.node
        end = node.image.offset + 1
        partition = m.FetchPartition(0, node.epoch, end, node.epoch, partition_max_bytes=1000)
        topic = m.FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])
        await controller.call("Quorum", "Fetch", m.FetchRequest(CLUSTER, 7, topics=[topic]))
        response = await controller.call("Quorum", "DescribeQuorum", m.DescribeQuorumRequest())
        found = response.topics[0].partitions[0]
        assert (found.leader_id, found.leader_epoch, found.high_watermark) == (1001, 1, end)
        assert [(voter.replica_id, voter.log_end_offset) for voter in found.current_voters] == [(1001, end)]
        assert [(observer.replica_id, observer.log_end_offset) for observer in found.observers] == [(7, end)]
        assert found.observers[0].last_caught_up_timestamp > 0
        assert [(voter.node_id, voter.port) for voter in response.endpoints] == [(1001, 19093)]


async def test_a_silent_broker_is_fenced_by_a_timer(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        alive, silent = FakeBroker(controller, 1), FakeBroker(controller, 2)
        await alive.join()
        await silent.join()
        result = await controller.create("t", 2, 2)
        node = controller.node
        end_session(node, 2)
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


async def test_controlled_shutdown_waits_for_the_others(tmp_path: Path) -> None:
    async with LiveController(tmp_path) as controller:
        one, two = FakeBroker(controller, 1, leads=True), FakeBroker(controller, 2)
        await one.join()
        await two.join()
        result = await controller.create("t", 1, 2)
        response = await one.heartbeat(shut_down=True)
        assert (response.error_code, response.should_shut_down) == (0, False)
        assert not (await one.heartbeat(shut_down=True)).should_shut_down
        await two.catch_up()
        state = two.image.partition(result.topic_id, 0)
        assert state is not None
        assert (state.leader, state.isr) == (2, (2,))
        await two.heartbeat()
        response = await one.heartbeat(shut_down=True)
        assert (response.should_shut_down, response.is_fenced) == (True, True)
        # A clean return takes no session timeout.
        again = FakeBroker(controller, 1, leads=True)
        await again.join(previous_broker_epoch=one.epoch)


async def test_registration_refusals(tmp_path: Path) -> None:
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
async def test_the_folder_of_another_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    async with LiveController(tmp_path):
        pass
    config = controller_config(tmp_path)
    node = ControllerNode(type(config).parse({**config.as_dict(), **change}))
    with pytest.raises(KafkaError):
        await node.start()
    await node.stop()


async def test_voters_without_this_node_are_refused(tmp_path: Path) -> None:
    node = ControllerNode(controller_config(tmp_path, controller_quorum_voters="1002@h:2"))
    with pytest.raises(InvalidConfigError, match=r"controller\.quorum\.voters"):
        await node.start()
    await node.stop()


def write_as_before(folder: Path, records: list[r.Record]) -> None:
    """What kipmesh 0.1.0 left: a metadata log of one voter, stopped in its first epoch, and no `quorum-state`."""
    manager = LogManager(
        RealFileSystem(), (str(folder),), cluster_id=CLUSTER, node_id=1001, defaults=TopicConfig.parse({})
    )
    manager.load(0)
    log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, TopicConfig.parse({}), 0)
    log.append_as_leader(leader_change_batch(LeaderChange(1001, (1001,), (1001,)), 1, 5), 1, 5)
    batch = record_batch.build(
        [(None, r.encode_record(record)) for record in records], base_offset=1, leader_epoch=1, timestamp_ms=5
    )
    log.append_as_leader(batch, 1, 5)
    manager.close(1)


async def test_data_of_the_version_before_goes_on(tmp_path: Path) -> None:
    topic_id = b"t" * 16
    write_as_before(
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


async def test_a_crash_is_no_clean_stop(tmp_path: Path) -> None:
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


async def test_stop_ends_waiting_fetches_and_is_idempotent(tmp_path: Path) -> None:
    controller = LiveController(tmp_path)
    await controller.node.start()
    async with LiveConnection(controller) as broker:
        await until(lambda: controller.node.ready, "a controller")
        await broker.join()
        waiting = asyncio.create_task(controller.call("Quorum", "Fetch", broker.fetch_request(60_000)))
        await until(lambda: controller.node.registry.get_sample_value("kipmesh_controller_waiting_fetches"), "a fetch")
        await controller.node.stop()
        response = await waiting
        assert response.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        await controller.node.stop()
        assert not controller.node.ready


class LiveConnection:
    """A broker on a controller that a test starts and stops itself."""

    def __init__(self, controller: LiveController) -> None:
        self._controller = controller

    async def __aenter__(self) -> FakeBroker:
        from kipmesh.transport.grpc.client import Connection

        self._controller.connection = Connection(f"127.0.0.1:{self._controller.node.grpc_port}", CLUSTER)
        return FakeBroker(self._controller, 1)

    async def __aexit__(self, *error: object) -> None:
        await self._controller.connection.close()


async def test_three_thousand_partitions_in_one_request(tmp_path: Path) -> None:
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
