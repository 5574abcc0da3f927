"""Users of the metadata log at listeners of the Kafka protocol: followed by every broker, and there after a restart."""

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
from tests.unit.broker.conftest_broker import Mesh, eventually

pytestmark = pytest.mark.timeout(300)

SMALL = {
    "metadata.snapshot.min.changed_records.ratio": 0.01,
    "metadata.log.max.record.bytes.between.snapshots": 2000,
    "metadata.max.retention.bytes": 1,
    "metadata.log.segment.bytes": 1000,
}
"""A snapshot after a few topics, and a log that goes at once."""
SASL = {"listener.security.protocol.map": "MESH:PLAINTEXT,KAFKA:SASL_PLAINTEXT"}
PASSWORDS = {"SCRAM-SHA-256": "one, two", "SCRAM-SHA-512": "ü=three"}


class Brokers:
    """Three controllers and two brokers with a listener each."""

    def __init__(self, folder: Path) -> None:
        self.mesh = Mesh(folder, controllers=3, **SMALL, **SASL)
        self.mesh.controller_keys = dict(SMALL)

    async def start(self) -> None:
        await self.mesh.start_controllers()
        for broker_id in (1, 2):
            port = self.mesh.port_of(broker_id)
            await self.mesh.start_broker(broker_id, listeners=f"MESH://127.0.0.1:{port},KAFKA://127.0.0.1:0")
        await self.mesh.ready(1, 2)

    def address(self, broker_id: int) -> str:
        return f"127.0.0.1:{self.mesh.brokers[broker_id].listeners.ports['KAFKA']}"

    async def alter(self, *changes: m.ScramCredentialDeletion | m.ScramCredentialUpsertion, via: int = 1) -> ErrorCode:
        request = m.AlterUserScramCredentialsRequest(
            [each for each in changes if isinstance(each, m.ScramCredentialDeletion)],
            [each for each in changes if isinstance(each, m.ScramCredentialUpsertion)],
        )
        (result,) = (await self.mesh.call(via, "AlterUserScramCredentials", request, "Admin")).results
        return ErrorCode(result.error_code)

    async def followed(self) -> None:
        """Every broker has what the active controller has."""
        for node in self.mesh.brokers.values():
            await eventually(
                lambda node=node: (
                    (active := self.mesh.active) is not None
                    and node.hosted_replicas.image.credentials == active.image.credentials
                ),
                "the credentials followed",
            )

    async def comes_in(self, broker_id: int, mechanism: str, password: str) -> bool:
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
    # The controllers' is a default.
    monkeypatch.setitem(MetadataLoader.__init__.__kwdefaults__, "clean_interval_s", 0.1)
    it = Brokers(tmp_path)
    await it.start()
    yield it
    await it.mesh.stop()


def upsertion(mechanism: str, password: str, iterations: int = 4096) -> m.ScramCredentialUpsertion:
    salted = salted_password(mechanism, password, b"salt", iterations)
    return m.ScramCredentialUpsertion("alice", NUMBERS[mechanism], iterations, b"salt", salted)


def log_start(node: ControllerNode) -> float:
    return node.registry.get_sample_value("kipmesh_metadata_log_start_offset") or 0.0


async def test_all_brokers_know_who_comes_in(brokers: Brokers) -> None:
    assert not await brokers.comes_in(1, "SCRAM-SHA-256", "one, two")
    for mechanism, password in PASSWORDS.items():
        assert await brokers.alter(upsertion(mechanism, password, 8192), via=2) == 0
    await brokers.followed()
    for broker_id in (1, 2):
        for mechanism, password in PASSWORDS.items():
            assert await brokers.comes_in(broker_id, mechanism, password)
            assert not await brokers.comes_in(broker_id, mechanism, password + "!")
    assert await brokers.alter(upsertion("SCRAM-SHA-256", "another")) == 0
    assert await brokers.alter(m.ScramCredentialDeletion("alice", NUMBERS["SCRAM-SHA-512"])) == 0
    assert await brokers.alter(m.ScramCredentialDeletion("alice", 2)) == ErrorCode.RESOURCE_NOT_FOUND
    await brokers.followed()
    for broker_id in (1, 2):
        assert await brokers.comes_in(broker_id, "SCRAM-SHA-256", "another")
        assert not await brokers.comes_in(broker_id, "SCRAM-SHA-256", PASSWORDS["SCRAM-SHA-256"])
        assert not await brokers.comes_in(broker_id, "SCRAM-SHA-512", PASSWORDS["SCRAM-SHA-512"])


async def test_users_are_there_after_a_restart_from_snapshots(brokers: Brokers) -> None:
    mesh = brokers.mesh
    for mechanism, password in PASSWORDS.items():
        assert await brokers.alter(upsertion(mechanism, password)) == 0
    end = (await eventually(lambda: mesh.active, "an active controller")).image.offset + 1
    for number in range(20):  # one record batch each: a snapshot ends on one
        request = m.CreateTopicsRequest([m.CreatableTopic(f"t-{number}", 2, 2)], 10_000)
        (made,) = (await mesh.call(1, "CreateTopics", request, "Admin")).topics
        assert made.error_code == 0
    for node in mesh.controllers.values():
        await eventually(lambda node=node: log_start(node) >= end, "the records are in no log any more")
    for broker in mesh.brokers.values():
        await eventually(lambda broker=broker: broker.quorum.replica.log.log_start_offset >= end, "nor here")
        await broker.stop()
    for node in mesh.controllers.values():
        await node.stop()
    await brokers.start()
    await brokers.followed()
    for broker_id in (1, 2):
        assert mesh.brokers[broker_id].quorum.replica.log.log_start_offset >= end
        for mechanism, password in PASSWORDS.items():
            assert await brokers.comes_in(broker_id, mechanism, password)
            assert not await brokers.comes_in(broker_id, mechanism, password + "!")


# -- who wins


class File:
    """Users of a file."""

    async def password(self, user: str) -> str | None:
        return "of the file"

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        return made(mechanism, "of the file")


def made(mechanism: str, password: str) -> ScramCredential:
    return credential(mechanism, salted_password(mechanism, password, b"s", 4096), b"s", 4096)


async def never(condition: Any, timeout_s: float) -> bool:
    return bool(condition())


async def test_the_log_wins_user_by_user() -> None:
    image = MetadataImage()
    users = LogUsers(lambda: image, never, File())
    assert await users.credential("SCRAM-SHA-512", "alice") == made("SCRAM-SHA-512", "of the file")
    own = made("SCRAM-SHA-256", "of the log")
    image.apply(r.UserScramCredentialRecord("alice", 1, *own), MetadataDelta())
    assert await users.credential("SCRAM-SHA-256", "alice") == own
    assert await users.credential("SCRAM-SHA-512", "alice") is None
    assert await users.credential("SCRAM-SHA-512", "bob") == made("SCRAM-SHA-512", "of the file")
    assert await users.password("alice") == "of the file"
    image.apply(r.RemoveUserScramCredentialRecord("alice", 1), MetadataDelta())
    assert await users.credential("SCRAM-SHA-256", "alice") == made("SCRAM-SHA-256", "of the file")


async def test_without_a_file_only_the_log_counts() -> None:
    users = LogUsers(MetadataImage, never, None)
    assert await users.credential("SCRAM-SHA-256", "alice") is None
    assert await users.password("alice") is None
    state = SaslState()
    sasl = Sasl(("PLAIN",), users)
    await state.handshake(sasl, "PLAIN")
    with pytest.raises(SaslFailedError):
        await state.authenticate(sasl, b"\0alice\0")


async def test_nobody_is_refused_before_there_is_metadata() -> None:
    images: list[MetadataImage] = []

    async def until(condition: Any, timeout_s: float) -> bool:
        assert not condition()
        if will_come:
            images.append(MetadataImage())
        return bool(condition())

    users = LogUsers(lambda: images[0] if images else None, until, File())
    will_come = False
    with pytest.raises(UsersNotKnownError):
        await users.credential("SCRAM-SHA-256", "alice")
    assert await users.password("alice") == "of the file"
    will_come = True
    assert await users.credential("SCRAM-SHA-256", "alice") == made("SCRAM-SHA-256", "of the file")
