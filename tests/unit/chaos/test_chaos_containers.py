"""Experiments on containers, with an engine that has none: what it is told, what is refused."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kipmesh.testing.fake_broker import FakeCluster
from kipmesh_chaos import containers
from kipmesh_chaos.containers import ContainerCluster, EngineError
from kipmesh_chaos.disk import NotPossibleError
from kipmesh_chaos.experiment import Experiment
from kipmesh_chaos.recorder import Recorder
from kipmesh_chaos.runner import _Run
from kipmesh_chaos.target_cluster import ChaosError, is_broker, is_controller
from tests.unit.chaos.engine_of_tests import NETWORK, FakeContainer, FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    it = FakeEngine()
    it.add(FakeContainer("controller-1", environment={"KIPMESH_CONFIG_NODE_ID": "1001"}))
    it.members["id-of-controller-1"].ports = {"9093/tcp": [{"HostIp": "127.0.0.1", "HostPort": "19101"}]}
    it.add(
        FakeContainer(
            "leader-1",
            environment={"KIPMESH_CONFIG_NODE_ID": "1", "KIPMESH_CONFIG_BROKER_RACK": "rack-a"},
            ports={"9094/tcp": [{"HostIp": "", "HostPort": "19092"}]},
        )
    )
    it.add(FakeContainer("consumer-1"))
    it.add(FakeContainer("prometheus"))
    it.add(FakeContainer("leader-2", project="another"))
    return it


def cluster_of(engine: FakeEngine, folder: Path, *, inside: bool = False) -> ContainerCluster:
    return ContainerCluster(cast("Any", engine), "mesh", folder, "chaos", inside=inside)


@pytest.fixture
def cluster(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerCluster:
    """Known to be healthy, without a topic of an earlier run."""
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    it = cluster_of(engine, tmp_path)
    it.up()
    engine.asked.clear()
    return it


# -- what is found


def test_nodes_are_the_containers_of_the_project_s_services(cluster: ContainerCluster) -> None:
    nodes = {node.name: node for node in cluster.nodes()}
    assert list(nodes) == ["consumer-1", "controller-1", "leader-1"]
    leader, controller, consumer = nodes["leader-1"], nodes["controller-1"], nodes["consumer-1"]
    assert (leader.node_id, leader.rack, leader.grpc, leader.pid) == (1, "rack-a", "127.0.0.1:19092", 4000)
    assert (controller.node_id, controller.grpc) == (1001, "127.0.0.1:19101")
    assert (consumer.node_id, consumer.grpc) == (None, None)
    assert is_broker(leader)
    assert is_controller(controller)
    assert not is_broker(consumer)


def test_inside_the_network_nodes_have_their_own_names(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    it = cluster_of(engine, tmp_path, inside=True)
    it.up()
    assert {node.grpc for node in it.nodes()} == {"leader-1:9092", "controller-1:9093", None}


def test_a_project_without_a_mesh_is_told(engine: FakeEngine, tmp_path: Path) -> None:
    nobody = ContainerCluster(cast("Any", engine), "nothing", tmp_path, "chaos")
    with pytest.raises(ChaosError, match="project 'nothing' has no containers"):
        nobody.up()


def test_up_waits_until_all_are_healthy(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    monkeypatch.setattr(containers, "HEALTH_INTERVAL_S", 0.001)
    leader = engine.members["id-of-leader-1"]
    leader.health = ["starting", "starting", "unhealthy", "healthy"]
    engine.members["id-of-consumer-1"].health = ["none"]  # an image without a check
    cluster_of(engine, tmp_path).up()
    assert leader.health == ["healthy"]


def test_what_does_not_become_healthy_is_named(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "HEALTH_INTERVAL_S", 0.001)
    monkeypatch.setattr(containers, "HEALTHY_TIMEOUT_S", 0.01)
    engine.members["id-of-leader-1"].health = ["unhealthy"]
    with pytest.raises(ChaosError, match=r"leader-1 must be healthy within 0\.01 s, got running, unhealthy"):
        cluster_of(engine, tmp_path).up()


@pytest.fixture
def mesh() -> Iterator[FakeCluster]:
    loop = asyncio.new_event_loop()
    # grpc.aio wakes every loop of a process; those that find nothing to read say so.
    loop.set_exception_handler(lambda _loop, _context: None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    it = FakeCluster()
    asyncio.run_coroutine_threadsafe(it.__aenter__(), loop).result()
    yield it
    asyncio.run_coroutine_threadsafe(it.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_topic_of_an_earlier_run_is_removed(engine: FakeEngine, mesh: FakeCluster, tmp_path: Path) -> None:
    engine.members["id-of-leader-1"].ports["9094/tcp"][0]["HostPort"] = mesh.bootstrap.rpartition(":")[2]
    mesh.create_topic("chaos")
    for _ in range(2):  # the second time there is none
        cluster_of(engine, tmp_path).up()
        assert not mesh.topics


# -- what is done


def test_kill_and_start(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.kill("leader-1")
    assert not cluster.is_running("leader-1")
    assert next(node for node in cluster.nodes() if node.name == "leader-1").pid is None
    cluster.start("leader-1")
    assert cluster.is_running("leader-1")
    assert next(node for node in cluster.nodes() if node.name == "leader-1").pid == 4000
    assert engine.asked == ["kill leader-1", "start leader-1"]


def test_stop_gives_it_time_and_asks_how_it_ended(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.stop("leader-1")
    assert engine.asked == [f"stop leader-1 t={containers.STOP_TIMEOUT_S}"]
    cluster.start("leader-1")
    engine.members["id-of-leader-1"].exit_code_on_stop = 137
    with pytest.raises(ChaosError, match="leader-1 must exit with 0 on SIGTERM, got 137"):
        cluster.stop("leader-1")


def test_pause_and_resume(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.pause("leader-1")
    assert engine.members["id-of-leader-1"].paused
    assert cluster.is_running("leader-1")
    cluster.resume("leader-1")
    assert engine.asked == ["pause leader-1", "unpause leader-1"]


def test_a_container_comes_back_to_its_network_by_its_names(cluster: ContainerCluster, engine: FakeEngine) -> None:
    leader = engine.members["id-of-leader-1"]
    cluster.disconnect("leader-1")
    assert not leader.networks
    cluster.reconnect("leader-1")
    assert leader.networks == {NETWORK: ["alias-of-docker", "leader-1"]}
    cluster.reconnect("leader-1")  # nothing is left to be mended
    assert engine.asked == [f"disconnect {NETWORK}", f"connect {NETWORK}"]


def test_down_stops_brokers_first_and_copies_the_topic_s_logs_alone(
    cluster: ContainerCluster, engine: FakeEngine, tmp_path: Path
) -> None:
    leader = engine.members["id-of-leader-1"]
    leader.files = {
        "chaos-0/00000000000000000000.log": b"records",
        "chaos-x-0/00000000000000000000.log": b"another topic's",
        "meta.properties": b"of the broker",
        "../chaos-0/../../escaped.log": b"not from a broker",
    }
    cluster.disconnect("leader-1")
    cluster.pause("leader-1")
    engine.asked.clear()
    cluster.down()
    stopped = [words.split()[1] for words in engine.asked if words.startswith("stop ")]
    assert stopped == ["consumer-1", "leader-1", "controller-1"]
    assert engine.asked.index("unpause leader-1") < engine.asked.index(f"stop leader-1 t={containers.STOP_TIMEOUT_S}")
    assert leader.networks
    copied = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.relative_to(tmp_path).as_posix() for path in copied] == [
        "leader-1/data/chaos-0/00000000000000000000.log"
    ]
    assert copied[0].read_bytes() == b"records"


def test_destroy_leaves_everything_running(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.kill("controller-1")
    cluster.pause("leader-1")
    cluster.disconnect("consumer-1")
    for _ in range(2):
        cluster.destroy()
    mine = [one for one in engine.members.values() if one.project == "mesh"]
    assert all(one.running and not one.paused and one.networks for one in mine)


def test_a_cut_whose_end_was_refused_is_still_known(cluster: ContainerCluster, engine: FakeEngine) -> None:
    leader = engine.members["id-of-leader-1"]
    leader.networks["network-2"] = ["another-alias"]
    cluster.disconnect("leader-1")
    engine.refuses["connect network-2"] = "no"
    with pytest.raises(EngineError):
        cluster.reconnect("leader-1")
    assert list(leader.networks) == [NETWORK]
    engine.refuses.clear()
    engine.asked.clear()
    cluster.reconnect("leader-1")
    assert engine.asked == ["connect network-2"]  # Docker refuses the other one, which is there
    assert leader.networks["network-2"] == ["another-alias", "leader-1"]


def test_a_second_cut_forgets_nothing_of_the_first(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.disconnect("leader-1")
    cluster.disconnect("leader-1")
    cluster.reconnect("leader-1")
    assert engine.members["id-of-leader-1"].networks == {NETWORK: ["alias-of-docker", "leader-1"]}


def test_destroy_tries_everything_and_tells_what_is_left(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.disconnect("consumer-1")
    cluster.pause("leader-1")
    engine.refuses = {"inspect id-of-consumer-1": "broken", "inspect id-of-controller-1": "broken"}
    with pytest.raises(ChaosError) as caught:
        cluster.destroy()
    assert [told.partition(":")[0] for told in str(caught.value).split("; ")] == 2 * ["consumer-1"] + ["controller-1"]
    assert not engine.members["id-of-leader-1"].paused
    engine.refuses.clear()
    cluster.destroy()
    assert engine.members["id-of-consumer-1"].networks


# -- what is refused


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"kind": "kill"}, None),
        ({"kind": "restart"}, None),
        ({"kind": "pause"}, None),
        ({"kind": "cut", "direction": "both", "peers": "everybody"}, None),
        ({"kind": "cut", "direction": "in", "peers": "everybody"}, "containers support only cuts with peers everybody"),
        ({"kind": "cut", "peers": "nodes"}, "containers support only cuts with peers everybody and direction both"),
        ({"kind": "delay"}, "100 ms between leader:0 and nodes: containers support only kill"),
        ({"kind": "full-disk"}, "full-disk leader:0: containers support only kill"),
        ({"kind": "clock-jump"}, "the clock of leader:0 jumps by +3600 s: containers support only kill"),
    ],
)
async def test_a_run_asks_before_it_touches_anything(
    engine: FakeEngine, tmp_path: Path, fault: dict[str, Any], told: str | None
) -> None:
    document = {"name": "a", "hypothesis": "b", "duration_s": 1, "faults": [{"target": "leader:0", **fault}]}
    recorder = Recorder(tmp_path / "history.jsonl")
    run = _Run(Experiment.model_validate(document), tmp_path, 1, recorder, lambda *_: None)
    cluster = ContainerCluster(cast("Any", engine), "nothing", tmp_path, "chaos")
    try:
        if told is None:
            with pytest.raises(ChaosError, match="has no containers"):  # it goes on, and there is nobody
                await run.run(lambda *_: cluster)
        else:
            with pytest.raises(NotPossibleError, match=told.replace("+", r"\+")):
                await run.run(lambda *_: cluster)
    finally:
        recorder.close()
    assert not engine.asked


# -- the engine


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # docker leaves its socket open
def test_an_engine_that_is_not_there_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EngineError, match=r"^Docker: .*No such file.*\Z"):
        containers.connect()
    gc.collect()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ChaosError, match=r"install it with: pip install 'kipmesh\[chaos\]'"):
        containers.connect()


def test_a_refusal_is_told_with_the_engine_s_words(cluster: ContainerCluster, engine: FakeEngine) -> None:
    engine.refuses["kill"] = "it is\npaused"
    with pytest.raises(EngineError, match=r"^Docker: 500 Server Error for kill.*it is paused.*\Z"):
        cluster.kill("leader-1")
