"""AlterUserScramCredentials and DescribeUserScramCredentials: users' SCRAM credentials in the metadata log.

As Apache Kafka's controller does it: a request alters each user at most once, whatever the mechanism; one user's error
keeps no other from being altered; a client sends the salted password, and the log keeps what follows from it, by which
a proof can be checked and not be made.

Beyond Kafka, what is written down has a limit of its own: the length of names, salts and salted passwords, and how many
users one request alters.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import Record, RemoveUserScramCredentialRecord, UserScramCredentialRecord
from kipmesh.core.metadata.request_limits import NAME_LENGTH_MAX, refusal
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN, NUMBERS, credential

SECRET_BYTES_MAX = 1024
"""Bytes of a salt, and of a salted password."""
ALTERATIONS_MAX = 1000
"""Deletions and upsertions of one request."""

_MECHANISMS = {number: name for name, number in NUMBERS.items()}


def alter_credentials(
    image: MetadataImage, request: m.AlterUserScramCredentialsRequest
) -> Decision[m.AlterUserScramCredentialsResponse]:
    """One result a user, in the order in which the request names them: the deletions first."""
    alterations: list[m.ScramCredentialDeletion | m.ScramCredentialUpsertion] = [
        *request.deletions,
        *request.upsertions,
    ]
    records: dict[str, Record] = {}
    errors: dict[str, KafkaError] = {}
    for asked in alterations:
        try:
            if len(alterations) > ALTERATIONS_MAX:
                text = f"a request of {len(alterations)} alterations, at most {ALTERATIONS_MAX} are done at once"
                raise KafkaError(ErrorCode.POLICY_VIOLATION, text)
            if asked.name in errors:
                continue
            if asked.name in records:
                text = "a user credential cannot be altered twice in the same request"
                raise KafkaError(ErrorCode.DUPLICATE_RESOURCE, text)
            if isinstance(asked, m.ScramCredentialDeletion):
                records[asked.name] = _deletion(image, asked)
            else:
                records[asked.name] = _upsertion(asked)
        except KafkaError as error:
            records.pop(asked.name, None)
            errors[asked.name] = error
    results = [_result(name, errors.get(name)) for name in dict.fromkeys([asked.name for asked in alterations])]
    return Decision(tuple(records.values()), m.AlterUserScramCredentialsResponse(results=tuple(results)))


def _result(name: str, error: KafkaError | None) -> m.AlterUserScramCredentialsResult:
    if error is None:
        return m.AlterUserScramCredentialsResult(name)
    return m.AlterUserScramCredentialsResult(name, error.code, refusal(error.message))


def _deletion(image: MetadataImage, asked: m.ScramCredentialDeletion) -> Record:
    _check_name_and_mechanism(asked.name, asked.mechanism)
    if asked.mechanism not in image.credentials_of(asked.name):
        text = f"user {asked.name!r} has no credential of {_MECHANISMS[asked.mechanism]} to delete"
        raise KafkaError(ErrorCode.RESOURCE_NOT_FOUND, text)
    return RemoveUserScramCredentialRecord(asked.name, asked.mechanism)


def _upsertion(asked: m.ScramCredentialUpsertion) -> Record:
    mechanism = _check_name_and_mechanism(asked.name, asked.mechanism)
    if not ITERATIONS_MIN <= asked.iterations <= ITERATIONS_MAX:
        text = f"{asked.iterations} iterations, between {ITERATIONS_MIN} and {ITERATIONS_MAX} are allowed"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    for what, value in (("salt", asked.salt), ("salted password", asked.salted_password)):
        if not 1 <= len(value) <= SECRET_BYTES_MAX:
            text = f"a {what} of {len(value)} bytes, it has between 1 and {SECRET_BYTES_MAX}"
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    made = credential(mechanism, asked.salted_password, asked.salt, asked.iterations)
    return UserScramCredentialRecord(asked.name, asked.mechanism, *made)


def _check_name_and_mechanism(name: str, mechanism: int) -> str:
    """The mechanism's name."""
    if not name or len(name) > NAME_LENGTH_MAX or "\0" in name:
        text = f"a user's name has between 1 and {NAME_LENGTH_MAX} characters, none of them null"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    if mechanism not in _MECHANISMS:
        raise KafkaError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"unknown SCRAM mechanism {mechanism}")
    return _MECHANISMS[mechanism]


def describe_credentials(
    image: MetadataImage, request: m.DescribeUserScramCredentialsRequest
) -> m.DescribeUserScramCredentialsResponse:
    """Mechanisms and iterations of the users that are named, or of all; nothing of a password is told."""
    asked: dict[str, int] = {}
    for user in request.users:
        asked[user.name] = asked.get(user.name, 0) + 1
    if not asked:
        asked = dict.fromkeys(sorted(image.credentials), 1)
    return m.DescribeUserScramCredentialsResponse(
        results=tuple([_described(image, name, times) for name, times in asked.items()])
    )


def _described(image: MetadataImage, name: str, times: int) -> m.DescribeUserScramCredentialsResult:
    if times > 1:
        text = refusal(f"user {name!r} is named {times} times in one request")
        return m.DescribeUserScramCredentialsResult(name, ErrorCode.DUPLICATE_RESOURCE, text)
    own = image.credentials_of(name)
    if not own:
        text = refusal(f"user {name!r} has no credential in the metadata")
        return m.DescribeUserScramCredentialsResult(name, ErrorCode.RESOURCE_NOT_FOUND, text)
    infos = [m.CredentialInfo(mechanism, found.iterations) for mechanism, found in sorted(own.items())]
    return m.DescribeUserScramCredentialsResult(name, credential_infos=tuple(infos))
