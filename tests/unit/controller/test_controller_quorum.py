"""Failover in a quorum of controllers: acknowledged decisions survive."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from functools import partial
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.testing import until
from tests.unit.controller.controller_quorum import CLUSTER_ID, STEADY, ControllerQuorum
from tests.unit.controller.controller_support import SESSION_MS, FakeBroker, expire_session

DESCRIBE = m.DescribeQuorumRequest([m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))])
SLOW_RESIGNATION = {**STEADY, "controller_quorum_fetch_timeout_ms": 2500}
"""An active controller without a majority accepts requests for 2.5 s, which outlasts pauses of a slow machine."""
NEW_TOPIC = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)])


async def wait_for_equal_images(quorum: ControllerQuorum) -> None:
    """Wait until all running nodes have the image of the active controller."""
    active = quorum.nodes[await quorum.active()]
    await until(lambda: all(node.image == active.image for node in quorum.nodes.values()), "equal images")


async def test_inactive_controllers_name_active_controller(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **STEADY) as quorum:
        active = await quorum.active()
        await quorum.join(1)
        topic_id = await quorum.create("t", 4)
        await wait_for_equal_images(quorum)
        for node_id in quorum.inactive:
            node = quorum.nodes[node_id]
            assert (node.ready, node.is_active) == (True, False)
            assert topic_id in node.image.topics
            refused = await quorum.call_at(node_id, "Admin", "CreateTopics", NEW_TOPIC)
            assert refused.topics[0].error_code == ErrorCode.NOT_CONTROLLER
            assert refused.topics[0].error_message == (
                f"controller {active} (127.0.0.1:{quorum.ports[active]}) is active"
            )
            heartbeat = await quorum.call_at(node_id, "Controller", "BrokerHeartbeat", m.BrokerHeartbeatRequest(1))
            assert heartbeat.error_code == ErrorCode.NOT_CONTROLLER
            described = await quorum.call_at(node_id, "Quorum", "DescribeQuorum", DESCRIBE)
            found = described.topics[0].partitions[0]
            assert (found.error_code, found.leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, active)
            assert [node.node_id for node in described.endpoints] == quorum.ids
        counts = [quorum.value(id_, "kafka_controller_kafkacontroller_activecontrollercount") for id_ in quorum.ids]
        assert sorted(value or 0 for value in counts) == [0, 0, 1]
        assert quorum.value(active, "kafka_controller_kafkacontroller_globaltopiccount") == 1


@pytest.mark.parametrize("ending", ["kill", "stop"])
async def test_quorum_fails_over_and_old_active_controller_rejoins(tmp_path: Path, ending: str) -> None:
    async with ControllerQuorum(tmp_path) as quorum:
        await quorum.join(1)
        await quorum.create("before")
        first = await quorum.active()
        epoch = quorum.nodes[first].epoch
        await (quorum.kill(first) if ending == "kill" else quorum.stop(first))
        await quorum.create("between")
        second = await quorum.active()
        assert second != first
        assert quorum.nodes[second].epoch > epoch
        changes = "kafka_controller_kafkacontroller_newactivecontrollerscount_total"
        assert (quorum.value(second, changes) or 0) >= 2
        await quorum.start(first)
        await quorum.create("after")
        await wait_for_equal_images(quorum)
        assert set(quorum.nodes[first].image.topic_names) == {"before", "between", "after"}


async def test_cleanly_stopped_controller_hands_over_before_fetch_timeout(tmp_path: Path) -> None:
    # The timeouts outlast the test. Only EndQuorumEpoch can cause an election this early.
    async with ControllerQuorum(tmp_path, **STEADY) as quorum:
        await quorum.stop(await quorum.active())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await quorum.active()
        assert loop.time() - began < 50


async def test_acknowledged_topics_survive_killed_active_controllers(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path) as quorum:
        await quorum.join(1)
        acknowledged: dict[str, bytes] = {}

        async def create(number: int) -> None:
            for index in range(12):
                name = f"topic-{number}-{index}"
                acknowledged[name] = await quorum.create(name)

        def reached(count: int) -> bool:
            return len(acknowledged) >= count

        creating = asyncio.gather(*(create(number) for number in range(3)))
        for _ in range(2):
            target = len(acknowledged) + 6
            await until(partial(reached, target), "topics")
            killed = await quorum.active()
            await quorum.kill(killed)
            await quorum.active()
            await quorum.start(killed)
        await creating
        await wait_for_equal_images(quorum)
        image = quorum.nodes[await quorum.active()].image
        assert set(image.topic_names) == set(acknowledged)
        assert len(image.topics) == len(acknowledged), "no topic exists twice"
        for name, topic_id in acknowledged.items():
            assert topic_id in (b"", image.topic_names[name])


async def test_controller_without_majority_acknowledges_nothing_and_resigns(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **SLOW_RESIGNATION) as quorum:
        await quorum.join(1)
        active = await quorum.active()
        for node_id in quorum.inactive:
            await quorum.kill(node_id)
        refused = await quorum.call_at(active, "Admin", "CreateTopics", NEW_TOPIC)
        assert refused.topics[0].error_code == ErrorCode.NOT_CONTROLLER
        assert "the request may or may not take effect" in refused.topics[0].error_message
        await until(lambda: not quorum.nodes[active].is_active, "the leader has resigned")
        refused = await quorum.call_at(active, "Admin", "CreateTopics", NEW_TOPIC)
        assert refused.topics[0].error_message == "no controller is active"
        assert not quorum.nodes[active].ready
        # Its log has an uncommitted record of its epoch, which the next leader commits or all nodes truncate.
        await quorum.start(*(node_id for node_id in quorum.ids if node_id != active))
        await wait_for_equal_images(quorum)


async def test_deposed_controller_drops_uncommitted_topic(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **SLOW_RESIGNATION) as quorum:
        await quorum.join(1)
        await quorum.create("kept")
        deposed = await quorum.active()
        others = quorum.inactive
        for node_id in others:
            await quorum.kill(node_id)
        waiting = asyncio.create_task(quorum.call_at(deposed, "Admin", "CreateTopics", NEW_TOPIC))
        await until(lambda: "t" in quorum.nodes[deposed].image.topic_names, "the decision")
        await quorum.kill(deposed)
        with contextlib.suppress(Exception):
            await waiting
        await quorum.start(*others)
        await quorum.create("next")
        await quorum.start(deposed)
        await wait_for_equal_images(quorum)
        assert set(quorum.nodes[deposed].image.topic_names) == {"kept", "next"}


async def test_failover_renews_broker_sessions(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **STEADY) as quorum:
        alive, silent = await quorum.join(1), await quorum.join(2)
        await quorum.stop(await quorum.active())
        second = quorum.nodes[await quorum.active()]
        assert not second.image.brokers[1].fenced
        assert not second.image.brokers[2].fenced

        for broker_id in (1, 2):
            expire_session(second, broker_id, remaining_ms=SESSION_MS // 4)  # most of the session has passed
        assert second.active is not None
        session = second.active._controller.sessions._sessions.get(1)
        assert session is not None
        before_ms = session.last_contact_ms
        assert not (await alive.heartbeat(offset=alive.epoch)).is_fenced
        assert session.last_contact_ms > before_ms + SESSION_MS // 2, "the heartbeat renews the session"
        expire_session(second, 2)
        await until(lambda: second.image.brokers[2].fenced, "the silent broker fenced")
        assert not second.image.brokers[1].fenced
        assert silent.epoch == second.image.brokers[2].broker_epoch


async def test_only_active_controller_expires_sessions(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, **STEADY, broker_session_timeout_ms=300) as quorum:
        await quorum.join(1)
        node_id = await quorum.active()
        node = quorum.nodes[node_id]
        await until(lambda: node.image.brokers[1].fenced, "the broker fenced")
        await wait_for_equal_images(quorum)
        name = "kafka_controller_kafkacontroller_timedoutbrokerheartbeatcount_total"
        await until(lambda: quorum.value(node_id, name), "the expired session is counted")
        assert sorted(quorum.value(node_id, name) or 0 for node_id in quorum.ids) == [0, 0, 1]


async def test_wiped_controller_recovers_from_snapshot(tmp_path: Path) -> None:
    small = {
        "metadata_log_max_record_bytes_between_snapshots": 2000,
        "metadata_log_max_snapshot_interval_ms": 100,
        "metadata_max_retention_bytes": 1,
        "metadata_log_segment_bytes": 1000,
    }
    async with ControllerQuorum(tmp_path, **small) as quorum:
        await quorum.join(1)
        wiped = quorum.inactive[0]
        names = [f"topic-{number}" for number in range(30)]
        for name in names[:20]:
            await quorum.create(name, 3)
        await quorum.kill(wiped)
        shutil.rmtree(tmp_path / str(wiped))
        for name in names[20:]:
            await quorum.create(name, 3)
        active = quorum.nodes[await quorum.active()]
        await until(lambda: log_start(quorum, active.config.node_id) > 0, "a log start above 0")
        await quorum.start(wiped)
        await wait_for_equal_images(quorum)
        assert set(quorum.nodes[wiped].image.topic_names) == set(names)
        assert log_start(quorum, wiped) > 0
        assert list((tmp_path / str(wiped) / "__cluster_metadata-0").glob("*.checkpoint"))


def log_start(quorum: ControllerQuorum, node_id: int) -> int:
    return int(quorum.value(node_id, "kipmesh_metadata_log_start_offset") or 0)


async def test_quorum_of_five_survives_two_killed_controllers(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path, 5) as quorum:
        await quorum.join(1)
        for index in range(2):
            await quorum.create(f"before-{index}")
            await quorum.kill(await quorum.active())
        await quorum.create("after")
        await wait_for_equal_images(quorum)
        assert len(quorum.nodes) == 3
        image = quorum.nodes[await quorum.active()].image
        assert set(image.topic_names) == {"before-0", "before-1", "after"}


async def test_broker_keeps_registration_across_failovers(tmp_path: Path) -> None:
    async with ControllerQuorum(tmp_path) as quorum:
        broker = await quorum.join(1)
        for _ in range(2):
            await quorum.kill(first := await quorum.active())
            assert (await broker.heartbeat(offset=broker.epoch)).error_code == 0
            assert (await broker.register()).broker_epoch == broker.epoch, "the same registration"
            await quorum.start(first)
        twin = FakeBroker(quorum, 1)  # type: ignore[arg-type]
        assert (await twin.register(cluster_id=CLUSTER_ID)).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
