"""Three controllers: one is active, another takes over, and nothing that was acknowledged is lost."""

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
from tests.unit.controller.controller_support import SESSION_MS, FakeBroker, end_session
from tests.unit.controller.controllers_support import CLUSTER, STEADY, Controllers

DESCRIBE = m.DescribeQuorumRequest([m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))])
HESITANT = {**STEADY, "controller_quorum_fetch_timeout_ms": 2500}
"""A leader that is alone takes requests for so long, though it may stand still meanwhile."""
NEW_TOPIC = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)])


async def same_images(quorum: Controllers) -> None:
    """Every node that runs comes to the same metadata."""
    active = quorum.nodes[await quorum.active()]
    await until(lambda: all(node.image == active.image for node in quorum.nodes.values()), "equal images")


async def test_one_is_active_and_the_others_say_who(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **STEADY) as quorum:
        active = await quorum.active()
        await quorum.join(1)
        topic_id = await quorum.create("t", 4)
        await same_images(quorum)
        for node_id in quorum.others:
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


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_another_takes_over_and_the_first_comes_back(tmp_path: Path, how: str) -> None:
    async with Controllers(tmp_path) as quorum:
        await quorum.join(1)
        await quorum.create("before")
        first = await quorum.active()
        epoch = quorum.nodes[first].epoch
        await (quorum.kill(first) if how == "kill" else quorum.stop(first))
        await quorum.create("between")
        second = await quorum.active()
        assert second != first
        assert quorum.nodes[second].epoch > epoch
        changes = "kafka_controller_kafkacontroller_newactivecontrollerscount_total"
        assert (quorum.value(second, changes) or 0) >= 2
        await quorum.start(first)
        await quorum.create("after")
        await same_images(quorum)
        assert set(quorum.nodes[first].image.topic_names) == {"before", "between", "after"}


async def test_a_clean_stop_hands_over_at_once(tmp_path: Path) -> None:
    # With timeouts that no test waits for: only who is told that the leader resigned can be this fast.
    async with Controllers(tmp_path, **STEADY) as quorum:
        await quorum.stop(await quorum.active())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await quorum.active()
        assert loop.time() - began < 50


async def test_kills_under_topic_creation(tmp_path: Path) -> None:
    async with Controllers(tmp_path) as quorum:
        await quorum.join(1)
        acknowledged: dict[str, bytes] = {}

        async def create(number: int) -> None:
            for turn in range(12):
                name = f"topic-{number}-{turn}"
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
        await same_images(quorum)
        image = quorum.nodes[await quorum.active()].image
        assert set(image.topic_names) == set(acknowledged)
        assert len(image.topics) == len(acknowledged), "none is there twice"
        for name, topic_id in acknowledged.items():
            assert topic_id in (b"", image.topic_names[name])


async def test_without_a_majority_nothing_is_acknowledged(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **HESITANT) as quorum:
        await quorum.join(1)
        active = await quorum.active()
        for node_id in quorum.others:
            await quorum.kill(node_id)
        refused = await quorum.call_at(active, "Admin", "CreateTopics", NEW_TOPIC)
        assert refused.topics[0].error_code == ErrorCode.NOT_CONTROLLER
        assert "the request may or may not take effect" in refused.topics[0].error_message
        await until(lambda: not quorum.nodes[active].is_active, "a leader that knows that it is alone")
        refused = await quorum.call_at(active, "Admin", "CreateTopics", NEW_TOPIC)
        assert refused.topics[0].error_message == "no controller is active"
        assert not quorum.nodes[active].ready
        # Its own epoch's record is in its log: the next leader keeps it, or it is cut everywhere.
        await quorum.start(*(node_id for node_id in quorum.ids if node_id != active))
        await same_images(quorum)


async def test_what_a_deposed_leader_had_alone_is_gone_from_its_image(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **HESITANT) as quorum:
        await quorum.join(1)
        await quorum.create("kept")
        deposed = await quorum.active()
        others = quorum.others
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
        await same_images(quorum)
        assert set(quorum.nodes[deposed].image.topic_names) == {"kept", "next"}


async def test_sessions_after_a_failover_fence_nobody_who_lives(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **STEADY) as quorum:
        alive, silent = await quorum.join(1), await quorum.join(2)
        await quorum.stop(await quorum.active())
        second = quorum.nodes[await quorum.active()]
        assert not second.image.brokers[1].fenced
        assert not second.image.brokers[2].fenced

        for broker_id in (1, 2):
            end_session(second, broker_id, but_for_ms=SESSION_MS // 4)  # most of what was granted is over
        assert second.active is not None
        session = second.active._controller.sessions._sessions.get(1)
        assert session is not None
        before_ms = session.last_contact_ms
        assert not (await alive.heartbeat(offset=alive.epoch)).is_fenced
        assert session.last_contact_ms > before_ms + SESSION_MS // 2, "it has begun anew"
        end_session(second, 2)
        await until(lambda: second.image.brokers[2].fenced, "the silent broker fenced")
        assert not second.image.brokers[1].fenced
        assert silent.epoch == second.image.brokers[2].broker_epoch


async def test_only_the_active_controller_ends_sessions(tmp_path: Path) -> None:
    async with Controllers(tmp_path, **STEADY, broker_session_timeout_ms=300) as quorum:
        await quorum.join(1)
        node_id = await quorum.active()
        node = quorum.nodes[node_id]
        await until(lambda: node.image.brokers[1].fenced, "the broker fenced")
        await same_images(quorum)
        name = "kafka_controller_kafkacontroller_timedoutbrokerheartbeatcount_total"
        await until(lambda: quorum.value(node_id, name), "it is counted")
        assert sorted(quorum.value(node_id, name) or 0 for node_id in quorum.ids) == [0, 0, 1]


async def test_a_wiped_controller_comes_back_by_a_snapshot(tmp_path: Path) -> None:
    small = {
        "metadata_log_max_record_bytes_between_snapshots": 2000,
        "metadata_log_max_snapshot_interval_ms": 100,
        "metadata_max_retention_bytes": 1,
        "metadata_log_segment_bytes": 1000,
    }
    async with Controllers(tmp_path, **small) as quorum:
        await quorum.join(1)
        wiped = quorum.others[0]
        names = [f"topic-{number}" for number in range(30)]
        for name in names[:20]:
            await quorum.create(name, 3)
        await quorum.kill(wiped)
        shutil.rmtree(tmp_path / str(wiped))
        for name in names[20:]:
            await quorum.create(name, 3)
        active = quorum.nodes[await quorum.active()]
        await until(lambda: log_start(quorum, active.config.node_id) > 0, "a log that begins above 0")
        await quorum.start(wiped)
        await same_images(quorum)
        assert set(quorum.nodes[wiped].image.topic_names) == set(names)
        assert log_start(quorum, wiped) > 0
        assert list((tmp_path / str(wiped) / "__cluster_metadata-0").glob("*.checkpoint"))


def log_start(quorum: Controllers, node_id: int) -> int:
    return int(quorum.value(node_id, "kipmesh_metadata_log_start_offset") or 0)


async def test_five_survive_two(tmp_path: Path) -> None:
    async with Controllers(tmp_path, 5) as quorum:
        await quorum.join(1)
        for turn in range(2):
            await quorum.create(f"before-{turn}")
            await quorum.kill(await quorum.active())
        await quorum.create("after")
        await same_images(quorum)
        assert len(quorum.nodes) == 3
        image = quorum.nodes[await quorum.active()].image
        assert set(image.topic_names) == {"before-0", "before-1", "after"}


async def test_a_broker_is_served_by_whoever_is_active(tmp_path: Path) -> None:
    async with Controllers(tmp_path) as quorum:
        broker = await quorum.join(1)
        for _ in range(2):
            await quorum.kill(first := await quorum.active())
            assert (await broker.heartbeat(offset=broker.epoch)).error_code == 0
            assert (await broker.register()).broker_epoch == broker.epoch, "the same registration"
            await quorum.start(first)
        twin = FakeBroker(quorum, 1)  # type: ignore[arg-type]
        assert (await twin.register(cluster_id=CLUSTER)).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
