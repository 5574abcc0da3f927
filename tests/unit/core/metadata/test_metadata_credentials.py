"""SCRAM credentials in the metadata log, compared with an oracle that behaves like Apache Kafka's controller."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh import messages as m
from kipmesh.core.errors import CorruptRecordError, ErrorCode
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.credentials import ALTERATIONS_MAX, SECRET_BYTES_MAX
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_records, image_values
from kipmesh.core.scram import ScramCredential
from tests.unit.core.metadata.metadata_support import Controller

SHA_256, SHA_512 = 1, 2
HASHES = {SHA_256: hashlib.sha256, SHA_512: hashlib.sha512}


def alter(
    controller: Controller,
    *alterations: m.ScramCredentialDeletion | m.ScramCredentialUpsertion,
) -> dict[str, ErrorCode]:
    request = m.AlterUserScramCredentialsRequest(
        [alteration for alteration in alterations if isinstance(alteration, m.ScramCredentialDeletion)],
        [alteration for alteration in alterations if isinstance(alteration, m.ScramCredentialUpsertion)],
    )
    response = controller.run(controller.core.alter_user_scram_credentials(request))
    assert all((result.error_code == 0) == (result.error_message is None) for result in response.results)
    found = {result.user: ErrorCode(result.error_code) for result in response.results}
    assert len(found) == len(response.results)
    return found


def describe(controller: Controller, *users: str) -> dict[str, tuple[ErrorCode, list[tuple[int, int]]]]:
    request = m.DescribeUserScramCredentialsRequest([m.UserName(name) for name in users])
    response = controller.run(controller.core.describe_user_scram_credentials(request))
    assert response.error_code == 0
    return {
        result.user: (ErrorCode(result.error_code), [tuple(info) for info in result.credential_infos])
        for result in response.results
    }


def upsertion(name: str = "alice", mechanism: int = SHA_256, iterations: int = 4096) -> m.ScramCredentialUpsertion:
    return m.ScramCredentialUpsertion(name, mechanism, iterations, b"salt", b"salted password")


def keys(alteration: m.ScramCredentialUpsertion) -> ScramCredential:
    """Compute StoredKey and ServerKey (RFC 5802)."""
    hash_ = HASHES[alteration.mechanism]
    client_key = hmac.new(alteration.salted_password, b"Client Key", hash_).digest()
    server_key = hmac.new(alteration.salted_password, b"Server Key", hash_).digest()
    return ScramCredential(alteration.salt, hash_(client_key).digest(), server_key, alteration.iterations)


def restored(image: MetadataImage) -> MetadataImage:
    """Copy an image through snapshot records."""
    copy = MetadataImage(image.offset, image.epoch, image.timestamp_ms)
    for value in image_values(image.capture()):
        copy.apply(r.decode_record(value), MetadataDelta())
    return copy


NAMES = st.sampled_from(["alice", "bob", "carol", ""])
MECHANISMS = st.sampled_from([SHA_256, SHA_256, SHA_512, SHA_512, 0, 3, -1])
DELETIONS = st.builds(m.ScramCredentialDeletion, NAMES, MECHANISMS)
UPSERTIONS = st.builds(
    m.ScramCredentialUpsertion,
    NAMES,
    MECHANISMS,
    st.sampled_from([4096, 8192, 16_384, 4095, 16_385, -1]),
    st.binary(min_size=1, max_size=4),
    st.binary(min_size=1, max_size=4),
)


class Oracle:
    """Results and state of Apache Kafka's ScramControlManager."""

    def __init__(self) -> None:
        self.credentials: dict[tuple[str, int], m.ScramCredentialUpsertion] = {}

    def _error_of(self, alteration: m.ScramCredentialDeletion | m.ScramCredentialUpsertion) -> ErrorCode:
        if not alteration.name:
            return ErrorCode.UNACCEPTABLE_CREDENTIAL
        if alteration.mechanism not in HASHES:
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM
        if isinstance(alteration, m.ScramCredentialDeletion):
            is_there = (alteration.name, alteration.mechanism) in self.credentials
            return ErrorCode.NONE if is_there else ErrorCode.RESOURCE_NOT_FOUND
        return ErrorCode.NONE if 4096 <= alteration.iterations <= 16_384 else ErrorCode.UNACCEPTABLE_CREDENTIAL

    def alter(
        self, deletions: list[m.ScramCredentialDeletion], upsertions: list[m.ScramCredentialUpsertion]
    ) -> dict[str, ErrorCode]:
        alterations: list[m.ScramCredentialDeletion | m.ScramCredentialUpsertion] = [*deletions, *upsertions]
        results = {}
        for name in {alteration.name for alteration in alterations}:
            own = [alteration for alteration in alterations if alteration.name == name]
            first = self._error_of(own[0])
            results[name] = first if first or len(own) == 1 else ErrorCode.DUPLICATE_RESOURCE
            if results[name]:
                continue
            (alteration,) = own
            if isinstance(alteration, m.ScramCredentialDeletion):
                del self.credentials[alteration.name, alteration.mechanism]
            else:
                self.credentials[alteration.name, alteration.mechanism] = alteration
        return results


@given(st.lists(st.tuples(st.lists(DELETIONS, max_size=3), st.lists(UPSERTIONS, max_size=3)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_scram_credentials_match_oracle(
    requests: list[tuple[list[m.ScramCredentialDeletion], list[m.ScramCredentialUpsertion]]],
) -> None:
    controller, oracle = Controller(), Oracle()
    for number, (deletions, upsertions) in enumerate(requests):
        assert alter(controller, *deletions, *upsertions) == oracle.alter(deletions, upsertions)
        if number % 4 == 3:
            controller.restart()
        kept = {
            (user, mechanism): found
            for user, own in controller.image.credentials.items()
            for mechanism, found in own.items()
        }
        assert kept == {key: keys(alteration) for key, alteration in oracle.credentials.items()}
        described = {(user, info[0]): info[1] for user, (_, infos) in describe(controller).items() for info in infos}
        assert described == {key: alteration.iterations for key, alteration in oracle.credentials.items()}
    assert controller.replayed() == controller.image
    assert restored(controller.image) == controller.image


def test_credential_is_created_altered_and_deleted() -> None:
    controller = Controller()
    assert alter(controller, upsertion(), upsertion("bob", SHA_512)) == {"alice": 0, "bob": 0}
    assert alter(controller, upsertion(mechanism=SHA_512, iterations=8192)) == {"alice": 0}
    assert describe(controller) == {
        "alice": (0, [(SHA_256, 4096), (SHA_512, 8192)]),
        "bob": (0, [(SHA_512, 4096)]),
    }
    assert alter(controller, upsertion(iterations=5000)) == {"alice": 0}
    assert describe(controller, "alice") == {"alice": (0, [(SHA_256, 5000), (SHA_512, 8192)])}
    deletion = m.ScramCredentialDeletion("alice", SHA_256)
    assert alter(controller, deletion, upsertion("carol")) == {"alice": 0, "carol": 0}
    assert alter(controller, deletion) == {"alice": ErrorCode.RESOURCE_NOT_FOUND}
    assert alter(controller, m.ScramCredentialDeletion("alice", SHA_512)) == {"alice": 0}
    assert "alice" not in controller.image.credentials
    assert describe(controller, "alice", "bob", "bob") == {
        "alice": (ErrorCode.RESOURCE_NOT_FOUND, []),
        "bob": (ErrorCode.DUPLICATE_RESOURCE, []),
    }


def test_refused_credential_alterations_write_no_records() -> None:
    controller = Controller()
    for alteration in (
        upsertion(""),
        upsertion("x" * 256),
        upsertion("a\0b"),
        upsertion()._replace(salt=b""),
        upsertion()._replace(salt=b"s" * (SECRET_BYTES_MAX + 1)),
        upsertion()._replace(salted_password=b""),
        upsertion()._replace(salted_password=b"s" * (SECRET_BYTES_MAX + 1)),
    ):
        assert set(alter(controller, alteration).values()) == {ErrorCode.UNACCEPTABLE_CREDENTIAL}
        assert not controller.last_records
    many = [upsertion(f"user-{number}") for number in range(ALTERATIONS_MAX + 1)]
    assert set(alter(controller, *many).values()) == {ErrorCode.POLICY_VIOLATION}
    assert not controller.image.credentials
    assert set(alter(controller, *many[:-1]).values()) == {ErrorCode.NONE}
    assert len(controller.image.credentials) == ALTERATIONS_MAX


def test_log_contains_scram_records_without_password() -> None:
    controller = Controller()
    alteration = upsertion()._replace(salted_password=b"secret of alice")
    alter(controller, alteration)
    (record,) = controller.last_records
    credential = keys(alteration)
    assert record == r.UserScramCredentialRecord("alice", SHA_256, *credential)
    assert not any(b"secret" in batch for batch in controller.batches)
    assert "secret" not in repr(alteration)
    assert repr(credential.stored_key) not in repr(controller.image.credentials)
    assert [record for record in image_records(controller.image.capture()) if "Scram" in type(record).__name__] == [
        record
    ]
    alter(controller, m.ScramCredentialDeletion("alice", SHA_256))
    assert controller.last_records == (r.RemoveUserScramCredentialRecord("alice", SHA_256),)


def test_removal_record_of_missing_credential_is_corrupt() -> None:
    image = MetadataImage()
    image.apply(r.UserScramCredentialRecord("alice", SHA_256, b"s", b"k", b"v", 4096), MetadataDelta())
    with pytest.raises(CorruptRecordError, match="no credential"):
        image.apply(r.RemoveUserScramCredentialRecord("alice", SHA_512), MetadataDelta())
    assert image.failed


def test_unknown_scram_mechanism_is_kept_and_described() -> None:
    controller = Controller()
    image = controller.image
    record = r.UserScramCredentialRecord("alice", 7, b"s", b"k", b"v", 4096)
    image.apply(record, MetadataDelta())
    assert describe(controller) == {"alice": (0, [(7, 4096)])}
    assert restored(image) == image
    assert alter(controller, m.ScramCredentialDeletion("alice", 7)) == {"alice": ErrorCode.UNSUPPORTED_SASL_MECHANISM}


def test_capture_is_isolated_from_credential_changes() -> None:
    controller = Controller()
    alter(controller, upsertion(), upsertion("bob"))
    captured = controller.image.capture()
    before = list(image_records(captured))
    alter(controller, upsertion(iterations=8192), m.ScramCredentialDeletion("bob", SHA_256))
    assert list(image_records(captured)) == before
