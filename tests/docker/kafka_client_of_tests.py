"""A Kafka client (confluent-kafka) on this machine and in a container of the cluster's network."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.docker.compose_of_tests import ComposedCluster
from tests.docker.docker_of_tests import docker

FIRST_KAFKA_PORT = 9095
RECORDS = 60
_SCRIPT = """
import json, sys, time
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

config, topic, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
admin = AdminClient(config)
admin.create_topics([NewTopic(topic, 3, 3)])[topic].result(60)
advertised = sorted(f"{broker.host}:{broker.port}" for broker in admin.list_topics(timeout=60).brokers.values())
producer, failed = Producer(config | {"acks": "all"}), []
for number in range(count):
    note = lambda error, _: error and failed.append(str(error))
    producer.produce(topic, b"%d" % number, partition=number % 3, on_delivery=note)
left = producer.flush(60)
consumer = Consumer(config | {"group.id": topic + "-readers", "auto.offset.reset": "earliest"})
consumer.subscribe([topic])
values, deadline = [], time.monotonic() + 90
while len(values) < count and time.monotonic() < deadline:
    record = consumer.poll(1)
    if record is not None and record.error() is None:
        values.append(int(record.value()))
consumer.close()
print(json.dumps({"advertised": advertised, "failed": failed, "left": left, "values": sorted(values)}))
"""


def _check(output: str, addresses: list[str]) -> None:
    found = json.loads(output.strip().splitlines()[-1])
    assert (found["failed"], found["left"]) == ([], 0)
    assert found["values"] == list(range(RECORDS))
    assert found["advertised"] == sorted(addresses)


def _config(bootstrap: str, certs: str | None) -> str:
    config = {"bootstrap.servers": bootstrap}
    if certs is not None:
        config |= {"security.protocol": "SSL", "ssl.ca.location": f"{certs}/ca.crt"}
        config |= {"ssl.certificate.location": f"{certs}/tls.crt", "ssl.key.location": f"{certs}/tls.key"}
    return json.dumps(config)


def check_outside(cluster: ComposedCluster) -> None:
    """Assert that a client on this machine receives addresses of this machine and writes and reads records."""
    certs = None if cluster.certs is None else str(cluster.certs / "client")
    words = [_config(cluster.kafka_bootstrap, certs), "from-outside", str(RECORDS)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _check(done.stdout, cluster.kafka_bootstrap.split(","))


def check_inside(cluster: ComposedCluster, image: str) -> None:
    """Assert the same for a client in a container. It uses this machine's packages: the image needs the same Python."""
    spec = find_spec("confluent_kafka")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    addresses = [f"{name}:{FIRST_KAFKA_PORT}" for name in ("leader-1", "follower-1", "follower-2")]
    mounts = [f"{packages / name}:/clients/{name}:ro" for name in ("confluent_kafka", "confluent_kafka.libs")]
    if cluster.certs is not None:
        mounts.append(f"{cluster.project}_tls-client:/etc/kipmesh-tls:ro")
    words = [_config(",".join(addresses), "/etc/kipmesh-tls" if cluster.certs else None), "from-inside", str(RECORDS)]
    output = docker(
        *("run", "--rm", "--network", cluster.network, "--env", "PYTHONPATH=/clients"),
        *(word for mount in mounts for word in ("--volume", mount)),
        *("--entrypoint", "/opt/kipmesh/bin/python", image, "-c", _SCRIPT, *words),
        timeout_s=300,
    )
    _check(output, addresses)
