"""AlterUserScramCredentials and DescribeUserScramCredentials: users' SCRAM credentials in the metadata log.

As Apache Kafka's controller does it: a request alters each user at most once, whatever the mechanism; one user's error
keeps no other from being altered; a client sends the salted password, and the log keeps what follows from it, by which
a proof can be checked and not be made.

Beyond Kafka, what is written down has a limit of its own: the length of names, salts and salted passwords, and how many
users one request alters.
"""

from __future__ import annotations

from collections import Counter

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import NAME_LENGTH_MAX, ControllerState, Decision, is_name, refusal
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import Record, RemoveUserScramCredentialRecord, UserScramCredentialRecord
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN, NUMBERS, credential

SECRET_BYTES_MAX = 1024
"""Bytes of a salt, and of a salted password."""
ALTERATIONS_MAX = 1000
"""Deletions and upsertions of one request."""

_MECHANISMS = {number: name for name, number in NUMBERS.items()}


def alter_user_scram_credentials(
    controller: ControllerState, request: m.AlterUserScramCredentialsRequest
) -> Decision[m.AlterUserScramCredentialsResponse]:
    """AlterUserScramCredentials: one result a user, in the order of the request, the deletions first."""
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
                records[asked.name] = _deletion(controller.image, asked)
            else:
                records[asked.name] = _upsertion(asked)
        except KafkaError as error:
            records.pop(asked.name, None)
            errors[asked.name] = error
    results = []
    for name in dict.fromkeys([asked.name for asked in alterations]):
        failed = errors.get(name)
        code, message = (ErrorCode.NONE, None) if failed is None else (failed.code, refusal(failed.message))
        results.append(m.AlterUserScramCredentialsResult(name, code, message))
    return Decision(tuple(records.values()), m.AlterUserScramCredentialsResponse(results=tuple(results)))


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
    if not name or not is_name(name):
        text = f"a user's name has between 1 and {NAME_LENGTH_MAX} characters, none of them null"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    if mechanism not in _MECHANISMS:
        raise KafkaError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"unknown SCRAM mechanism {mechanism}")
    return _MECHANISMS[mechanism]


def describe_user_scram_credentials(
    controller: ControllerState, request: m.DescribeUserScramCredentialsRequest
) -> Decision[m.DescribeUserScramCredentialsResponse]:
    """DescribeUserScramCredentials: mechanisms and iterations of the named users, or of all; nothing of a password."""
    credentials = controller.image.credentials
    asked = Counter(user.name for user in request.users) or Counter(sorted(credentials))
    results = []
    for name, times in asked.items():
        if times > 1:
            code, text = ErrorCode.DUPLICATE_RESOURCE, f"user {name!r} is named {times} times in one request"
        elif name not in credentials:
            code, text = ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} has no credential in the metadata"
        else:
            infos = [m.CredentialInfo(kind, found.iterations) for kind, found in sorted(credentials[name].items())]
            results.append(m.DescribeUserScramCredentialsResult(name, credential_infos=tuple(infos)))
            continue
        results.append(m.DescribeUserScramCredentialsResult(name, code, refusal(text)))
    return Decision((), m.DescribeUserScramCredentialsResponse(results=tuple(results)))
