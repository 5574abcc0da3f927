"""Experiments on containers, with a fake Docker engine."""

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
    engine = FakeEngine()
    engine.add(FakeContainer("controller-1", environment={"KIPMESH_CONFIG_NODE_ID": "1001"}))
    engine.members["id-of-controller-1"].ports = {"9093/tcp": [{"HostIp": "127.0.0.1", "HostPort": "19101"}]}
    engine.add(
        FakeContainer(
            "leader-1",
            environment={"KIPMESH_CONFIG_NODE_ID": "1", "KIPMESH_CONFIG_BROKER_RACK": "rack-a"},
            ports={"9094/tcp": [{"HostIp": "", "HostPort": "19092"}]},
        )
    )
    engine.add(FakeContainer("consumer-1"))
    engine.add(FakeContainer("prometheus"))
    engine.add(FakeContainer("leader-2", project="another"))
    return engine


def make_cluster(engine: FakeEngine, directory: Path, *, inside: bool = False) -> ContainerCluster:
    return ContainerCluster(cast("Any", engine), "mesh", directory, "chaos", inside=inside)


@pytest.fixture
def cluster(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerCluster:
    """A started cluster without a topic of an earlier run."""
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    cluster = make_cluster(engine, tmp_path)
    cluster.up()
    engine.calls.clear()
    return cluster


# -- discovery


def test_nodes_are_containers_of_the_services_of_the_project(cluster: ContainerCluster) -> None:
    nodes = {node.name: node for node in cluster.nodes()}
    assert list(nodes) == ["consumer-1", "controller-1", "leader-1"]
    leader, controller, consumer = nodes["leader-1"], nodes["controller-1"], nodes["consumer-1"]
    assert (leader.node_id, leader.rack, leader.grpc, leader.pid) == (1, "rack-a", "127.0.0.1:19092", 4000)
    assert (controller.node_id, controller.grpc) == (1001, "127.0.0.1:19101")
    assert (consumer.node_id, consumer.grpc) == (None, None)
    assert is_broker(leader)
    assert is_controller(controller)
    assert not is_broker(consumer)


def test_node_addresses_inside_the_network_are_service_names(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    cluster = make_cluster(engine, tmp_path, inside=True)
    cluster.up()
    assert {node.grpc for node in cluster.nodes()} == {"leader-1:9092", "controller-1:9093", None}


def test_project_without_containers_raises_error(engine: FakeEngine, tmp_path: Path) -> None:
    empty = ContainerCluster(cast("Any", engine), "nothing", tmp_path, "chaos")
    with pytest.raises(ChaosError, match="project 'nothing' has no containers"):
        empty.up()


def test_up_waits_until_all_containers_are_healthy(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerCluster, "_delete_topic", lambda _: None)
    monkeypatch.setattr(containers, "HEALTH_INTERVAL_S", 0.001)
    leader = engine.members["id-of-leader-1"]
    leader.health = ["starting", "starting", "unhealthy", "healthy"]
    engine.members["id-of-consumer-1"].health = ["none"]  # an image without a health check
    make_cluster(engine, tmp_path).up()
    assert leader.health == ["healthy"]


def test_up_names_container_that_stays_unhealthy(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "HEALTH_INTERVAL_S", 0.001)
    monkeypatch.setattr(containers, "HEALTHY_TIMEOUT_S", 0.01)
    engine.members["id-of-leader-1"].health = ["unhealthy"]
    with pytest.raises(ChaosError, match=r"leader-1 must be healthy within 0\.01 s, got running, unhealthy"):
        make_cluster(engine, tmp_path).up()


@pytest.fixture
def brokers() -> Iterator[FakeCluster]:
    loop = asyncio.new_event_loop()
    # grpc.aio wakes all event loops of the process. Loops without data to read report an error.
    loop.set_exception_handler(lambda _loop, _context: None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    brokers = FakeCluster()
    asyncio.run_coroutine_threadsafe(brokers.__aenter__(), loop).result()
    yield brokers
    asyncio.run_coroutine_threadsafe(brokers.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_up_deletes_topic_of_earlier_run(engine: FakeEngine, brokers: FakeCluster, tmp_path: Path) -> None:
    engine.members["id-of-leader-1"].ports["9094/tcp"][0]["HostPort"] = brokers.bootstrap.rpartition(":")[2]
    brokers.create_topic("chaos")
    for _ in range(2):  # the second call finds no topic
        make_cluster(engine, tmp_path).up()
        assert not brokers.topics


# -- actions


def test_killed_container_can_be_started(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.kill("leader-1")
    assert not cluster.is_running("leader-1")
    assert next(node for node in cluster.nodes() if node.name == "leader-1").pid is None
    cluster.start("leader-1")
    assert cluster.is_running("leader-1")
    assert next(node for node in cluster.nodes() if node.name == "leader-1").pid == 4000
    assert engine.calls == ["kill leader-1", "start leader-1"]


def test_stop_sets_timeout_and_checks_exit_code(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.stop("leader-1")
    assert engine.calls == [f"stop leader-1 t={containers.STOP_TIMEOUT_S}"]
    cluster.start("leader-1")
    engine.members["id-of-leader-1"].exit_code_on_stop = 137
    with pytest.raises(ChaosError, match="leader-1 must exit with 0 on SIGTERM, got 137"):
        cluster.stop("leader-1")


def test_paused_container_is_running_and_can_be_resumed(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.pause("leader-1")
    assert engine.members["id-of-leader-1"].paused
    assert cluster.is_running("leader-1")
    cluster.resume("leader-1")
    assert engine.calls == ["pause leader-1", "unpause leader-1"]


def test_reconnect_restores_network_aliases(cluster: ContainerCluster, engine: FakeEngine) -> None:
    leader = engine.members["id-of-leader-1"]
    cluster.disconnect("leader-1")
    assert not leader.networks
    cluster.reconnect("leader-1")
    assert leader.networks == {NETWORK: ["alias-of-docker", "leader-1"]}
    cluster.reconnect("leader-1")  # no network is left to reconnect
    assert engine.calls == [f"disconnect {NETWORK}", f"connect {NETWORK}"]


def test_down_stops_brokers_first_and_copies_only_logs_of_the_topic(
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
    engine.calls.clear()
    cluster.down()
    stopped = [call.split()[1] for call in engine.calls if call.startswith("stop ")]
    assert stopped == ["consumer-1", "leader-1", "controller-1"]
    assert engine.calls.index("unpause leader-1") < engine.calls.index(f"stop leader-1 t={containers.STOP_TIMEOUT_S}")
    assert leader.networks
    copied = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.relative_to(tmp_path).as_posix() for path in copied] == [
        "leader-1/data/chaos-0/00000000000000000000.log"
    ]
    assert copied[0].read_bytes() == b"records"


def test_destroy_starts_resumes_and_reconnects_containers(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.kill("controller-1")
    cluster.pause("leader-1")
    cluster.disconnect("consumer-1")
    for _ in range(2):
        cluster.destroy()
    own = [container for container in engine.members.values() if container.project == "mesh"]
    assert all(container.running and not container.paused and container.networks for container in own)


def test_failed_reconnect_can_be_retried(cluster: ContainerCluster, engine: FakeEngine) -> None:
    leader = engine.members["id-of-leader-1"]
    leader.networks["network-2"] = ["another-alias"]
    cluster.disconnect("leader-1")
    engine.errors["connect network-2"] = "no"
    with pytest.raises(EngineError):
        cluster.reconnect("leader-1")
    assert list(leader.networks) == [NETWORK]
    engine.errors.clear()
    engine.calls.clear()
    cluster.reconnect("leader-1")
    assert engine.calls == ["connect network-2"]  # Docker rejects a second connection to the other network
    assert leader.networks["network-2"] == ["another-alias", "leader-1"]


def test_second_disconnect_keeps_networks_of_the_first(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.disconnect("leader-1")
    cluster.disconnect("leader-1")
    cluster.reconnect("leader-1")
    assert engine.members["id-of-leader-1"].networks == {NETWORK: ["alias-of-docker", "leader-1"]}


def test_destroy_reverts_all_it_can_and_reports_failures(cluster: ContainerCluster, engine: FakeEngine) -> None:
    cluster.disconnect("consumer-1")
    cluster.pause("leader-1")
    engine.errors = {"inspect id-of-consumer-1": "broken", "inspect id-of-controller-1": "broken"}
    with pytest.raises(ChaosError) as caught:
        cluster.destroy()
    assert [failure.partition(":")[0] for failure in str(caught.value).split("; ")] == 2 * ["consumer-1"] + [
        "controller-1"
    ]
    assert not engine.members["id-of-leader-1"].paused
    engine.errors.clear()
    cluster.destroy()
    assert engine.members["id-of-consumer-1"].networks


# -- unsupported faults


@pytest.mark.parametrize(
    ("fault", "error"),
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
async def test_run_rejects_unsupported_faults_before_it_calls_the_engine(
    engine: FakeEngine, tmp_path: Path, fault: dict[str, Any], error: str | None
) -> None:
    document = {"name": "a", "hypothesis": "b", "duration_s": 1, "faults": [{"target": "leader:0", **fault}]}
    recorder = Recorder(tmp_path / "history.jsonl")
    run = _Run(Experiment.model_validate(document), tmp_path, 1, recorder, lambda *_: None)
    cluster = ContainerCluster(cast("Any", engine), "nothing", tmp_path, "chaos")
    try:
        if error is None:
            # The fault is supported, but the project is empty.
            with pytest.raises(ChaosError, match="has no containers"):
                await run.run(lambda *_: cluster)
        else:
            with pytest.raises(NotPossibleError, match=error.replace("+", r"\+")):
                await run.run(lambda *_: cluster)
    finally:
        recorder.close()
    assert not engine.calls


# -- errors of the engine


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # docker does not close its socket
def test_unreachable_engine_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EngineError, match=r"^Docker: .*No such file.*\Z"):
        containers.connect()
    gc.collect()


def test_missing_docker_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ChaosError, match=r"install it with: pip install 'kipmesh\[chaos\]'"):
        containers.connect()


def test_engine_error_is_reported_in_one_line(cluster: ContainerCluster, engine: FakeEngine) -> None:
    engine.errors["kill"] = "it is\npaused"
    with pytest.raises(EngineError, match=r"^Docker: 500 Server Error for kill.*it is paused.*\Z"):
        cluster.kill("leader-1")
