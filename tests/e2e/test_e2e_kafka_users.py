"""SCRAM users in the metadata log, managed by `kipmesh user` and by third-party clients."""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from kipmesh.cluster import LocalCluster
from tests.command import run_command
from tests.e2e.sasl_of_tests import settings

with warnings.catch_warnings():  # the package uses deprecated functions of Python
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka.*"), pytest.mark.timeout(300)]

MECHANISMS = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
PASSWORD = "s3cret,=ü"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {"listener.security.protocol.map": "MESH:PLAINTEXT,KAFKA:SASL_PLAINTEXT"}
    with LocalCluster(mode="single", followers=1, config=config) as running:
        assert user_command(running, "add", "admin", password="adminpass").returncode == 0
        yield running


def user_command(
    cluster: LocalCluster, command: str, *arguments: str, password: str = ""
) -> subprocess.CompletedProcess[str]:
    return run_command(
        "user", command, *arguments, "--bootstrap", cluster.bootstrap, stdin=password and f"{password}\n"
    )


def authenticates(cluster: LocalCluster, user: str, password: str, mechanism: str, broker: str | None = None) -> bool:
    """Return whether authentication succeeds at this broker, or at any broker without one. Retries other errors."""
    errors: list[int] = []
    config = settings(cluster, user, password, mechanism)
    config |= {"error_cb": lambda error: errors.append(error.code())}
    client = AdminClient(config | ({"bootstrap.servers": broker} if broker else {}))
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            client.list_topics(timeout=1)
        except KafkaException:
            client.poll(0)
            if confluent_kafka.KafkaError._AUTHENTICATION in errors:
                return False
        else:
            return True
    raise AssertionError(f"authentication neither succeeded nor failed: {errors}")


def wait_authenticates(cluster: LocalCluster, user: str, password: str, mechanism: str, *, wanted: bool = True) -> None:
    """Wait until authentication succeeds, or fails, at each broker: brokers replay the change at different times."""
    deadline = time.monotonic() + TIMEOUT_S
    for broker in str(cluster.kafka_bootstrap).split(","):
        while authenticates(cluster, user, password, mechanism, broker) != wanted:
            assert time.monotonic() < deadline, f"authentication of {user} by {mechanism} at {broker} is not {wanted}"


def admin_of(cluster: LocalCluster) -> AdminClient:
    wait_authenticates(cluster, "admin", "adminpass", "SCRAM-SHA-512")
    return AdminClient(settings(cluster, "admin", "adminpass", "SCRAM-SHA-512"))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_user_added_by_command_authenticates_until_deleted(cluster: LocalCluster, mechanism: str) -> None:
    user = f"command-{mechanism[-3:]}"
    done = user_command(
        cluster, "add", user, "--mechanism", mechanism, "--iterations", "8192", "--json", password=PASSWORD
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"user": user, "mechanism": mechanism, "iterations": 8192}
    wait_authenticates(cluster, user, PASSWORD, mechanism)
    assert not authenticates(cluster, user, "wrong", mechanism)
    (other,) = set(MECHANISMS) - {mechanism}
    assert not authenticates(cluster, user, PASSWORD, other)
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=str(cluster.kafka_bootstrap).split(","),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,
        sasl_plain_username=user,
        sasl_plain_password=PASSWORD,
    )
    consumer.topics()
    consumer.close()
    assert user_command(cluster, "alter", user, password="another").returncode == 0
    wait_authenticates(cluster, user, "another", mechanism)
    wait_authenticates(cluster, user, PASSWORD, mechanism, wanted=False)
    assert user_command(cluster, "delete", user).returncode == 0
    wait_authenticates(cluster, user, "another", mechanism, wanted=False)


def describe_user(admin: AdminClient, user: str) -> Future[Any]:
    described = admin.describe_user_scram_credentials([user])
    assert isinstance(described, dict)
    return described[user]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_user_added_by_librdkafka_authenticates_until_deleted(cluster: LocalCluster, mechanism: str) -> None:
    user = f"librdkafka-{mechanism[-3:]}"
    kind = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}[mechanism]
    admin = admin_of(cluster)
    upsertion = UserScramCredentialUpsertion(user, ScramCredentialInfo(kind, 5000), PASSWORD.encode())
    admin.alter_user_scram_credentials([upsertion])[user].result(TIMEOUT_S)
    described = describe_user(admin, user).result(TIMEOUT_S)
    assert [(info.mechanism, info.iterations) for info in described.scram_credential_infos] == [(kind, 5000)]
    all_users = admin.describe_user_scram_credentials()
    assert isinstance(all_users, Future)
    assert {user, "admin"} <= all_users.result(TIMEOUT_S).keys()
    wait_authenticates(cluster, user, PASSWORD, mechanism)
    assert not authenticates(cluster, user, "wrong", mechanism)
    done = user_command(cluster, "describe", user)
    assert done.stdout.split() == ["USER", "MECHANISM", "ITERATIONS", user, mechanism, "5000"]
    topic = f"of-{user}"
    user_admin = AdminClient(settings(cluster, user, PASSWORD, mechanism))
    user_admin.create_topics([confluent_kafka.admin.NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    deletion = UserScramCredentialDeletion(user, kind)
    admin.alter_user_scram_credentials([deletion])[user].result(TIMEOUT_S)
    wait_authenticates(cluster, user, PASSWORD, mechanism, wanted=False)
    for refused in (deletion, UserScramCredentialUpsertion(user, ScramCredentialInfo(kind, 100), b"p")):
        with pytest.raises(KafkaException) as caught:
            admin.alter_user_scram_credentials([refused])[user].result(TIMEOUT_S)
        assert caught.value.args[0].name() == (
            "RESOURCE_NOT_FOUND" if refused is deletion else "UNACCEPTABLE_CREDENTIAL"
        )
    with pytest.raises(KafkaException) as caught:
        describe_user(admin, user).result(TIMEOUT_S)
    assert caught.value.args[0].name() == "RESOURCE_NOT_FOUND"
