"""SASL at Kafka listeners with third-party clients."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import struct
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import pytest
from aiokafka.errors import KafkaError as AioKafkaError

from kipmesh.cluster import LocalCluster
from tests.e2e.sasl_of_tests import settings

with warnings.catch_warnings():  # the package uses deprecated functions of Python
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka.*")

MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
PASSWORD = "s3cret,=ü"


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sasl") / "users"
    path.touch(0o600)
    path.write_text(f"# users\nalice={PASSWORD}\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cluster(users: Path) -> Iterator[LocalCluster]:
    config = {
        "listener.security.protocol.map": "MESH:PLAINTEXT,KAFKA:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "sasl.users.file": str(users),
    }
    with LocalCluster(mode="single", followers=0, config=config) as running:
        yield running


@pytest.fixture(scope="module")
def secured(users: Path) -> Iterator[LocalCluster]:
    """A cluster whose Kafka listener uses SASL_SSL."""
    config = {
        "listener.security.protocol.map": "MESH:SSL,KAFKA:SASL_SSL",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
        "sasl.users.file": str(users),
    }
    with LocalCluster(mode="single", followers=0, tls=True, config=config) as running:
        yield running


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_clients_authenticate_with_each_mechanism(cluster: LocalCluster, mechanism: str) -> None:
    topic = f"topic-{secrets.token_hex(4)}"
    config = settings(cluster, "alice", PASSWORD, mechanism)
    admin = confluent_kafka.admin.AdminClient(config)
    admin.create_topics([confluent_kafka.admin.NewTopic(topic, 1, 1)])[topic].result()
    producer = confluent_kafka.Producer(config)
    producer.produce(topic, b"one")
    assert producer.flush(60) == 0
    security = {
        "bootstrap_servers": str(cluster.kafka_bootstrap),
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    async with aiokafka.AIOKafkaConsumer(topic, auto_offset_reset="earliest", **security) as consumer:
        record = await asyncio.wait_for(consumer.getone(), 60)
        assert record.value == b"one"
    other = await asyncio.to_thread(kafka.KafkaConsumer, topic, auto_offset_reset="earliest", **security)
    found = await asyncio.to_thread(lambda: next(iter(other)))
    assert found.value == b"one"
    await asyncio.to_thread(other.close)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("nobody", PASSWORD)])
async def test_wrong_users_and_passwords_fail_to_authenticate(
    cluster: LocalCluster, mechanism: str, user: str, password: str
) -> None:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=cluster.kafka_bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,
        sasl_plain_username=user,
        sasl_plain_password=password,
    )
    with pytest.raises(AioKafkaError):
        await producer.start()
    await producer.stop()
    errors: list[Any] = []
    config = settings(cluster, user, password, mechanism)
    client = confluent_kafka.Producer({**config, "error_cb": errors.append})
    while not errors:
        await asyncio.to_thread(client.poll, 0.1)
    assert errors[0].code() == confluent_kafka.KafkaError._AUTHENTICATION


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_authenticate_with_handshake_version_0(cluster: LocalCluster, mechanism: str) -> None:
    """The configured api_version makes the client send SaslHandshake version 0."""
    client = kafka.KafkaConsumer(
        bootstrap_servers=cluster.kafka_bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,
        sasl_plain_username="alice",
        sasl_plain_password=PASSWORD,
        api_version=(0, 10, 0),
    )
    assert isinstance(client.topics(), set)
    client.close()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_kcat_authenticates_with_plain(protocol: str, request: pytest.FixtureRequest) -> None:
    """PLAIN only: SCRAM is wrong in librdkafka before 2.6.1, which Debian 12 has (docs/clients.md)."""
    has_tls = protocol == "SASL_SSL"
    cluster: LocalCluster = request.getfixturevalue("secured" if has_tls else "cluster")
    config = {**settings(cluster, "alice", PASSWORD, "PLAIN"), "security.protocol": protocol}
    if has_tls:
        config["ssl.ca.location"] = str(_ca_file(cluster))
    options = [f"-X{key}={value}" for key, value in config.items()]
    done = subprocess.run(["kcat", *options, "-L", "-m60"], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert " 1 brokers:" in done.stdout


def _ca_file(cluster: LocalCluster) -> Path:
    return next(Path(cluster.dir).rglob("ca.crt"))


def _replace(users: Path, text: str) -> None:
    """Replace the file atomically: retries of earlier tests' clients cause reads at any time."""
    new = users.with_name("users.new")
    new.touch(0o600)
    new.write_text(text, encoding="utf-8")
    new.replace(users)


def test_changed_users_file_is_reloaded(cluster: LocalCluster, users: Path) -> None:
    before = users.read_text(encoding="utf-8")
    _replace(users, before + "bob=other\n")
    for mechanism in MECHANISMS:
        admin = confluent_kafka.admin.AdminClient(settings(cluster, "bob", "other", mechanism))
        assert admin.list_topics(timeout=60)
    _replace(users, "an invalid line\n")
    admin = confluent_kafka.admin.AdminClient(settings(cluster, "bob", "other", "PLAIN"))
    assert admin.list_topics(timeout=60)  # previous users stay valid
    _replace(users, before)


def _frame(key: int, version: int, body: bytes) -> bytes:
    header = struct.pack(">hhih", key, version, 1, -1)
    return struct.pack(">i", len(header) + len(body)) + header + body


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _exchange(cluster: LocalCluster, *frames: bytes) -> list[bytes]:
    """Send frames and return the responses up to the last one or until the broker closes the connection."""
    host, _, port = str(cluster.kafka_bootstrap).partition(",")[0].rpartition(":")
    responses = []
    with socket.create_connection((host, int(port)), 60) as connection, connection.makefile("rb") as stream:
        with contextlib.suppress(ConnectionError):  # closed before all frames were sent; responses can be read
            connection.sendall(b"".join(frames))
        for _ in frames:
            try:
                head = stream.read(4)
            except ConnectionResetError:  # closed with unread frames
                break
            if len(head) < 4:
                break
            responses.append(stream.read(struct.unpack(">i", head)[0]))
    return responses


def test_requests_before_authentication_are_refused(cluster: LocalCluster) -> None:
    versions = _frame(18, 0, b"")
    metadata = _frame(3, 1, struct.pack(">i", -1))
    assert len(_exchange(cluster, versions, versions)) == 2
    assert len(_exchange(cluster, versions, metadata, versions)) == 1  # the connection is closed, the last frame unread
    token = b"\0alice\0" + PASSWORD.encode()
    login = _frame(36, 0, struct.pack(">i", len(token)) + token)
    early = _exchange(cluster, login, metadata)
    assert [response[4:6] for response in early] == [struct.pack(">h", 34)]  # ILLEGAL_SASL_STATE
    handshake = _frame(17, 1, _text("PLAIN"))
    assert len(_exchange(cluster, handshake, login, metadata)) == 3
    assert len(_exchange(cluster, handshake, login, login, metadata)) == 3  # second login
    assert len(_exchange(cluster, handshake, handshake, login)) == 2
    unknown = _exchange(cluster, _frame(17, 1, _text("GSSAPI")), login)
    assert [response[4:6] for response in unknown] == [struct.pack(">h", 33)]  # UNSUPPORTED_SASL_MECHANISM
    wrong = b"\0alice\0wrong"
    refused = _exchange(cluster, handshake, _frame(36, 0, struct.pack(">i", len(wrong)) + wrong), login)
    assert [response[4:6] for response in refused] == [struct.pack(">h", 0), struct.pack(">h", 58)]
    large = _frame(36, 0, struct.pack(">i", 100_000) + bytes(100_000))
    assert len(_exchange(cluster, handshake, large)) == 1


def test_clients_authenticate_over_tls(secured: LocalCluster) -> None:
    client = {
        **settings(secured, "alice", PASSWORD, "SCRAM-SHA-512"),
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(_ca_file(secured)),
    }
    admin = confluent_kafka.admin.AdminClient(client)
    admin.create_topics([confluent_kafka.admin.NewTopic("encrypted", 1, 1)])["encrypted"].result()
    other = confluent_kafka.admin.AdminClient({**client, "sasl.mechanism": "SCRAM-SHA-256"})  # not enabled
    with pytest.raises(confluent_kafka.KafkaException):
        other.list_topics(timeout=3)
