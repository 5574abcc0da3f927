"""AlterUserScramCredentials and DescribeUserScramCredentials: users' SCRAM credentials in the metadata log.

As in Apache Kafka, a request alters each user at most once, whatever the mechanism, and an error of one user does not
affect the others. The client sends the salted password. The log stores only keys derived from it, which verify a proof
but cannot create one.

Unlike Kafka, the length of names, salts and salted passwords and the alterations per request are limited.
"""

from __future__ import annotations

from collections import Counter

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import NAME_RULE, ControllerState, Decision, error_text, is_name
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import Record, RemoveUserScramCredentialRecord, UserScramCredentialRecord
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN, NUMBERS, credential

SECRET_BYTES_MAX = 1024
"""Maximum bytes of a salt, and of a salted password."""
ALTERATIONS_MAX = 1000
"""Maximum deletions and upsertions of one request."""

_MECHANISMS = {number: name for name, number in NUMBERS.items()}


def alter_user_scram_credentials(
    controller: ControllerState, request: m.AlterUserScramCredentialsRequest
) -> Decision[m.AlterUserScramCredentialsResponse]:
    """Decide AlterUserScramCredentials: set or delete credentials. The response has one result per user, deletions
    first.

    Error codes per user: DUPLICATE_RESOURCE, RESOURCE_NOT_FOUND, UNACCEPTABLE_CREDENTIAL, UNSUPPORTED_SASL_MECHANISM,
    POLICY_VIOLATION (too many alterations).
    """
    alterations: list[m.ScramCredentialDeletion | m.ScramCredentialUpsertion] = [
        *request.deletions,
        *request.upsertions,
    ]
    records: dict[str, Record] = {}
    errors: dict[str, KafkaError] = {}
    for requested in alterations:
        try:
            if len(alterations) > ALTERATIONS_MAX:
                text = f"a request may have at most {ALTERATIONS_MAX} alterations, got {len(alterations)}"
                raise KafkaError(ErrorCode.POLICY_VIOLATION, text)
            if requested.name in errors:
                continue
            if requested.name in records:
                text = f"the request alters user {requested.name!r} more than once"
                raise KafkaError(ErrorCode.DUPLICATE_RESOURCE, text)
            if isinstance(requested, m.ScramCredentialDeletion):
                records[requested.name] = _deletion(controller.image, requested)
            else:
                records[requested.name] = _upsertion(requested)
        except KafkaError as error:
            records.pop(requested.name, None)
            errors[requested.name] = error
    results = []
    for name in dict.fromkeys([requested.name for requested in alterations]):
        failed = errors.get(name)
        code, message = (ErrorCode.NONE, None) if failed is None else (failed.code, error_text(failed.message))
        results.append(m.AlterUserScramCredentialsResult(name, code, message))
    return Decision(tuple(records.values()), m.AlterUserScramCredentialsResponse(results=tuple(results)))


def _deletion(image: MetadataImage, requested: m.ScramCredentialDeletion) -> Record:
    _check_name_and_mechanism(requested.name, requested.mechanism)
    if requested.mechanism not in image.credentials_of(requested.name):
        text = f"user {requested.name!r} has no credential of {_MECHANISMS[requested.mechanism]} to delete"
        raise KafkaError(ErrorCode.RESOURCE_NOT_FOUND, text)
    return RemoveUserScramCredentialRecord(requested.name, requested.mechanism)


def _upsertion(requested: m.ScramCredentialUpsertion) -> Record:
    mechanism = _check_name_and_mechanism(requested.name, requested.mechanism)
    if not ITERATIONS_MIN <= requested.iterations <= ITERATIONS_MAX:
        text = f"iterations must be between {ITERATIONS_MIN} and {ITERATIONS_MAX}, got {requested.iterations}"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    for name, value in (("salt", requested.salt), ("salted password", requested.salted_password)):
        if not 1 <= len(value) <= SECRET_BYTES_MAX:
            text = f"the {name} must have between 1 and {SECRET_BYTES_MAX} bytes, got {len(value)}"
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    keys = credential(mechanism, requested.salted_password, requested.salt, requested.iterations)
    return UserScramCredentialRecord(requested.name, requested.mechanism, *keys)


def _check_name_and_mechanism(name: str, mechanism: int) -> str:
    """Return the mechanism's name. Raises KafkaError: UNACCEPTABLE_CREDENTIAL (invalid user name) or
    UNSUPPORTED_SASL_MECHANISM."""
    if not name or not is_name(name):
        text = f"a user name must not be empty, and must have {NAME_RULE}"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    if mechanism not in _MECHANISMS:
        raise KafkaError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"unknown SCRAM mechanism {mechanism}")
    return _MECHANISMS[mechanism]


def describe_user_scram_credentials(
    controller: ControllerState, request: m.DescribeUserScramCredentialsRequest
) -> Decision[m.DescribeUserScramCredentialsResponse]:
    """Decide DescribeUserScramCredentials: return the mechanisms and iterations, but not the secrets, of the named
    users, or of all users if none is named.

    Error codes per user: DUPLICATE_RESOURCE, RESOURCE_NOT_FOUND.
    """
    credentials = controller.image.credentials
    requested = Counter(user.name for user in request.users) or Counter(sorted(credentials))
    results = []
    for name, times in requested.items():
        if times > 1:
            code, text = ErrorCode.DUPLICATE_RESOURCE, f"the request names user {name!r} {times} times"
        elif name not in credentials:
            code, text = ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} has no SCRAM credential"
        else:
            infos = [m.CredentialInfo(kind, found.iterations) for kind, found in sorted(credentials[name].items())]
            results.append(m.DescribeUserScramCredentialsResult(name, credential_infos=tuple(infos)))
            continue
        results.append(m.DescribeUserScramCredentialsResult(name, code, error_text(text)))
    return Decision((), m.DescribeUserScramCredentialsResponse(results=tuple(results)))
