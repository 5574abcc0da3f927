"""Standalone Spark: a master and two workers in two racks read from three brokers in three racks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kipmesh.cluster import LocalCluster, ports
from kipmesh.spark.java import find_java

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1500)]

RACKS = ("rack-a", "rack-b")
TOPIC = "numbers"
PARTITIONS = 12
RECORDS = 6000
VALUE_BYTES = 500
PATIENCE_S = 600
CONFIG = {
    "replica.selector.class": "RackAwareReplicaSelector",
    # Followers must stay in sync on a slow machine, because consumers read only from in-sync replicas.
    "replica.lag.time.max.ms": 300_000,
    "broker.session.timeout.ms": 60_000,
}


@contextmanager
def java(name: str, directory: Path, arguments: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of Spark; its executors end with it."""
    from kipmesh.spark.session import home_without_zip

    home = home_without_zip(directory.parent / "home")
    directory.mkdir()
    found = find_java()
    assert found is not None
    command = [str(found / "bin" / "java"), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    scala = next((home / "jars").glob("spark-core_*.jar")).name.split("_")[1].split("-")[0]
    variables = {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": scala, "SPARK_LOCAL_IP": "127.0.0.1"}
    variables |= {"JAVA_HOME": str(found), **environment}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-cp", f"{home}/jars/*", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *arguments],
            cwd=directory,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Spark master with both workers."""
    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer")
    directory = tmp_path_factory.mktemp("standalone")
    with ExitStack() as stack:
        port, page = stack.enter_context(closing(ports.PortReservation())).choose(2)
        address = f"spark://127.0.0.1:{port}"
        ports_of_master = ["--port", str(port), "--webui-port", str(page)]
        running = [stack.enter_context(java("master.Master", directory / "master", ports_of_master))]
        for rack in RACKS:
            home = directory / rack
            worker = [
                "--webui-port",
                "0",
                "--cores",
                "1",
                "--memory",
                "600m",
                "--work-dir",
                str(home / "work"),
                address,
            ]
            running.append(stack.enter_context(java("worker.Worker", home, worker, KIPMESH_CLIENT_RACK=rack)))
        deadline = time.monotonic() + PATIENCE_S
        while alive_workers(page) < len(RACKS):
            logs = [log.read_text()[-1500:] for log in sorted(directory.glob("*/log"))]
            assert all(process.poll() is None for process in running), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)
        yield address


def alive_workers(page: int) -> int:
    """Return the number of workers on the master's status page."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{page}/json", timeout=30) as response:
        return int(json.load(response)["aliveworkers"])
    return 0


@pytest.fixture(scope="module")
def racked(master: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Cluster with a topic whose records are on all brokers."""
    from kipmesh.client import NewTopic
    from kipmesh.client.sync import AdminClient, Producer

    directory = tmp_path_factory.mktemp("racked")
    with LocalCluster(mode="processes", controllers=1, leaders=1, followers=2, dir=directory, config=CONFIG) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3, {"min.insync.replicas": "3"})])
        with Producer(cluster.bootstrap, **{"acks": "all", "delivery.timeout.ms": 300_000}) as producer:
            sent = [
                producer.send(TOPIC, b"%0*d" % (VALUE_BYTES, number), partition=number % PARTITIONS)
                for number in range(RECORDS)
            ]
            producer.flush()
        for delivery in sent:
            delivery.result()
        yield cluster


def fetched_bytes(cluster: LocalCluster) -> dict[tuple[str, str], float]:
    """Return bytes read by consumers, by the broker's rack and its relation to the consumer's rack."""
    found: dict[tuple[str, str], float] = {}
    for node in cluster.nodes:
        if node.role.value not in ("leader", "follower"):
            continue
        with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=60) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "kipmesh_broker_consumer_fetched_bytes_total":
                    key = (str(node.rack), sample.labels["rack"])
                    found[key] = found.get(key, 0) + sample.value
    return found


def run_python(*arguments: str) -> str:
    """Run Python without a client rack and return its standard output; the process must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "KIPMESH_CLIENT_RACK"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_executors_read_within_their_racks(master: str, racked: LocalCluster, tmp_path: Path) -> None:
    before = fetched_bytes(racked)
    assert sum(before.values()) == 0
    reader = Path(__file__).parent / "rack_reader.py"
    outcome: dict[str, Any] = json.loads(run_python(str(reader), master, racked.bootstrap, TOPIC, str(tmp_path)))
    assert outcome["reads"] == [[RECORDS, RECORDS * VALUE_BYTES]] * 2
    assert outcome["racks"] == list(RACKS)
    after = fetched_bytes(racked)
    total = sum(after.values())
    same = sum(size for (_, relation), size in after.items() if relation == "same")
    assert total >= 2 * RECORDS * VALUE_BYTES
    assert same / total >= 0.99, after
    for rack in RACKS:  # each worker reads from the broker in its rack
        assert after[rack, "same"] > 0, after
    assert after["rack-c", "same"] == 0, after


def test_audit_job_runs_on_a_standalone_master(master: str, racked: LocalCluster, tmp_path: Path) -> None:
    settings = ("spark.cores.max=2", "spark.executor.memory=512m", "spark.sql.shuffle.partitions=2")
    confs = [text for setting in settings for text in ("--spark-conf", setting)]
    job = ["-m", "kipmesh.cli.main", "job", "audit", "--mesh", str(racked.dir), "--topic", TOPIC]
    out = tmp_path / "out"
    printed = run_python(*job, "--master", master, *confs, "--out", str(out), "--json")
    summary = json.loads(printed)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["passed"]
    assert (summary["logs"], summary["partitions"], summary["pairs"]) == (3 * PARTITIONS, PARTITIONS, 3 * PARTITIONS)
    assert summary["pairs_agreed"] == summary["pairs"]
    assert (out / "report.html").exists()
