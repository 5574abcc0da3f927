"""SCRAM users in the metadata log: replication to all brokers, restarts, and precedence over the users file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiokafka
import pytest
from aiokafka.errors import KafkaError as AioKafkaError

from kipmesh import messages as m
from kipmesh.broker.membership.users import LogUsers
from kipmesh.controller import ControllerNode
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.states import MetadataDelta
from kipmesh.core.scram import NUMBERS, ScramCredential, credential, salted_password
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.transport.kafka.handshake import Sasl, SaslFailedError, SaslState, UsersNotKnownError
from tests.unit.broker.broker_cluster import BrokerCluster, eventually

pytestmark = pytest.mark.timeout(300)

SMALL_SNAPSHOTS = {
    "metadata.snapshot.min.changed_records.ratio": 0.01,
    "metadata.log.max.record.bytes.between.snapshots": 2000,
    "metadata.max.retention.bytes": 1,
    "metadata.log.segment.bytes": 1000,
}
"""Creates a snapshot after a few topics and deletes the metadata log before it immediately."""
SASL = {"listener.security.protocol.map": "MESH:PLAINTEXT,KAFKA:SASL_PLAINTEXT"}
PASSWORDS = {"SCRAM-SHA-256": "one, two", "SCRAM-SHA-512": "ü=three"}


class Brokers:
    """Three controllers and two brokers with a SASL listener each."""

    def __init__(self, directory: Path) -> None:
        self.cluster = BrokerCluster(directory, controllers=3, **SMALL_SNAPSHOTS, **SASL)
        self.cluster.controller_keys = dict(SMALL_SNAPSHOTS)

    async def start(self) -> None:
        await self.cluster.start_controllers()
        for broker_id in (1, 2):
            port = self.cluster.port_of(broker_id)
            await self.cluster.start_broker(broker_id, listeners=f"MESH://127.0.0.1:{port},KAFKA://127.0.0.1:0")
        await self.cluster.ready(1, 2)

    def address(self, broker_id: int) -> str:
        return f"127.0.0.1:{self.cluster.brokers[broker_id].listeners.ports['KAFKA']}"

    async def alter(self, *changes: m.ScramCredentialDeletion | m.ScramCredentialUpsertion, via: int = 1) -> ErrorCode:
        request = m.AlterUserScramCredentialsRequest(
            [change for change in changes if isinstance(change, m.ScramCredentialDeletion)],
            [change for change in changes if isinstance(change, m.ScramCredentialUpsertion)],
        )
        (result,) = (await self.cluster.call(via, "AlterUserScramCredentials", request, "Admin")).results
        return ErrorCode(result.error_code)

    async def wait_for_credentials(self) -> None:
        """Wait until all brokers have the credentials of the active controller."""
        for node in self.cluster.brokers.values():
            await eventually(
                lambda node=node: (
                    (active := self.cluster.active) is not None
                    and node.hosted_replicas.image.credentials == active.image.credentials
                ),
                "the credentials are replicated",
            )

    async def authenticates(self, broker_id: int, mechanism: str, password: str) -> bool:
        client = aiokafka.AIOKafkaProducer(
            bootstrap_servers=self.address(broker_id),
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism=mechanism,
            sasl_plain_username="alice",
            sasl_plain_password=password,
        )
        try:
            await client.start()
        except AioKafkaError:
            return False
        finally:
            await client.stop()
        return True


@pytest.fixture
async def brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Brokers]:
    monkeypatch.setattr("kipmesh.broker.membership.quorum.CLEAN_INTERVAL_S", 0.1)
    # Controllers use the default of this parameter.
    monkeypatch.setitem(MetadataLoader.__init__.__kwdefaults__, "clean_interval_s", 0.1)
    running = Brokers(tmp_path)
    await running.start()
    yield running
    await running.cluster.stop()


def upsertion(mechanism: str, password: str, iterations: int = 4096) -> m.ScramCredentialUpsertion:
    salted = salted_password(mechanism, password, b"salt", iterations)
    return m.ScramCredentialUpsertion("alice", NUMBERS[mechanism], iterations, b"salt", salted)


def log_start(node: ControllerNode) -> float:
    return node.registry.get_sample_value("kipmesh_metadata_log_start_offset") or 0.0


async def test_altered_scram_credentials_apply_on_all_brokers(brokers: Brokers) -> None:
    assert not await brokers.authenticates(1, "SCRAM-SHA-256", "one, two")
    for mechanism, password in PASSWORDS.items():
        assert await brokers.alter(upsertion(mechanism, password, 8192), via=2) == 0
    await brokers.wait_for_credentials()
    for broker_id in (1, 2):
        for mechanism, password in PASSWORDS.items():
            assert await brokers.authenticates(broker_id, mechanism, password)
            assert not await brokers.authenticates(broker_id, mechanism, password + "!")
    assert await brokers.alter(upsertion("SCRAM-SHA-256", "another")) == 0
    assert await brokers.alter(m.ScramCredentialDeletion("alice", NUMBERS["SCRAM-SHA-512"])) == 0
    assert await brokers.alter(m.ScramCredentialDeletion("alice", 2)) == ErrorCode.RESOURCE_NOT_FOUND
    await brokers.wait_for_credentials()
    for broker_id in (1, 2):
        assert await brokers.authenticates(broker_id, "SCRAM-SHA-256", "another")
        assert not await brokers.authenticates(broker_id, "SCRAM-SHA-256", PASSWORDS["SCRAM-SHA-256"])
        assert not await brokers.authenticates(broker_id, "SCRAM-SHA-512", PASSWORDS["SCRAM-SHA-512"])


async def test_scram_credentials_survive_restart_from_snapshots(brokers: Brokers) -> None:
    cluster = brokers.cluster
    for mechanism, password in PASSWORDS.items():
        assert await brokers.alter(upsertion(mechanism, password)) == 0
    end = (await eventually(lambda: cluster.active, "an active controller")).image.offset + 1
    for number in range(20):  # one record batch per topic: a snapshot ends at a batch
        request = m.CreateTopicsRequest([m.CreatableTopic(f"t-{number}", 2, 2)], 10_000)
        (created,) = (await cluster.call(1, "CreateTopics", request, "Admin")).topics
        assert created.error_code == 0
    for node in cluster.controllers.values():
        await eventually(lambda node=node: log_start(node) >= end, "the controllers have deleted the records")
    for broker in cluster.brokers.values():
        await eventually(
            lambda broker=broker: broker.quorum.replica.log.log_start_offset >= end,
            "the brokers have deleted the records",
        )
        await broker.stop()
    for node in cluster.controllers.values():
        await node.stop()
    await brokers.start()
    await brokers.wait_for_credentials()
    for broker_id in (1, 2):
        assert cluster.brokers[broker_id].quorum.replica.log.log_start_offset >= end
        for mechanism, password in PASSWORDS.items():
            assert await brokers.authenticates(broker_id, mechanism, password)
            assert not await brokers.authenticates(broker_id, mechanism, password + "!")


# -- precedence of the log and the users file


class FileUsers:
    """Users from a file; every user has the same password."""

    async def password(self, user: str) -> str | None:
        return "file password"

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        return make_credential(mechanism, "file password")


def make_credential(mechanism: str, password: str) -> ScramCredential:
    return credential(mechanism, salted_password(mechanism, password, b"s", 4096), b"s", 4096)


async def check_now(condition: Any, timeout_s: float) -> bool:
    return bool(condition())


async def test_credentials_in_log_override_file_per_user() -> None:
    image = MetadataImage()
    users = LogUsers(lambda: image, check_now, FileUsers())
    assert await users.credential("SCRAM-SHA-512", "alice") == make_credential("SCRAM-SHA-512", "file password")
    log_credential = make_credential("SCRAM-SHA-256", "log password")
    image.apply(r.UserScramCredentialRecord("alice", 1, *log_credential), MetadataDelta())
    assert await users.credential("SCRAM-SHA-256", "alice") == log_credential
    assert await users.credential("SCRAM-SHA-512", "alice") is None
    assert await users.credential("SCRAM-SHA-512", "bob") == make_credential("SCRAM-SHA-512", "file password")
    assert await users.password("alice") == "file password"
    image.apply(r.RemoveUserScramCredentialRecord("alice", 1), MetadataDelta())
    assert await users.credential("SCRAM-SHA-256", "alice") == make_credential("SCRAM-SHA-256", "file password")


async def test_users_come_only_from_log_without_file() -> None:
    users = LogUsers(MetadataImage, check_now, None)
    assert await users.credential("SCRAM-SHA-256", "alice") is None
    assert await users.password("alice") is None
    state = SaslState()
    sasl = Sasl(("PLAIN",), users)
    await state.handshake(sasl, "PLAIN")
    with pytest.raises(SaslFailedError):
        await state.authenticate(sasl, b"\0alice\0")


async def test_authentication_waits_for_metadata() -> None:
    images: list[MetadataImage] = []

    async def until(condition: Any, timeout_s: float) -> bool:
        assert not condition()
        if has_metadata_later:
            images.append(MetadataImage())
        return bool(condition())

    users = LogUsers(lambda: images[0] if images else None, until, FileUsers())
    has_metadata_later = False
    with pytest.raises(UsersNotKnownError):
        await users.credential("SCRAM-SHA-256", "alice")
    assert await users.password("alice") == "file password"
    has_metadata_later = True
    assert await users.credential("SCRAM-SHA-256", "alice") == make_credential("SCRAM-SHA-256", "file password")
