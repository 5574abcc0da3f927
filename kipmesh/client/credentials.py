"""SCRAM credentials of users in the metadata log, by any broker, which forwards to the active controller.

A password never leaves this process: what is sent is PBKDF2 of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN, NUMBERS, salted_password

SALT_BYTES = 16


class ScramMechanism(IntEnum):
    """How a user authenticates; the numbers are Kafka's."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """As clients configure it: `SCRAM-SHA-256`."""
        return self.name.replace("_", "-")

    @classmethod
    def of(cls, name: str) -> ScramMechanism:
        """The mechanism of that name; raises ValueError."""
        if name not in NUMBERS:
            raise ValueError(f"{name!r} is none of {', '.join(NUMBERS)}")
        return cls(NUMBERS[name])


class ScramCredentialInfo(NamedTuple):
    """What can be told of a credential."""

    mechanism: int
    """A ScramMechanism, or another number that a newer cluster has."""
    iterations: int


async def describe_credentials(
    cluster: Cluster, users: Iterable[str] | None, timeout_s: float
) -> dict[str, list[ScramCredentialInfo]]:
    """The credentials by user, of these or of all; raises KafkaError, for the first user that there is not too."""
    named = None if users is None else list(dict.fromkeys(users))
    if named == []:  # to the cluster an empty list is all
        return {}
    request = m.DescribeUserScramCredentialsRequest([m.UserName(name) for name in named or ()])

    def retry(response: m.DescribeUserScramCredentialsResponse) -> ErrorCode | None:
        code = ErrorCode.of(response.error_code)
        return code if code.retriable else None

    response: m.DescribeUserScramCredentialsResponse = await cluster.call_any(
        "Admin", "DescribeUserScramCredentials", request, timeout_s, retry
    )
    if response.error_code:
        raise KafkaError(response.error_code, response.error_message or "")
    for each in response.results:
        if each.error_code:
            raise KafkaError(each.error_code, each.error_message or each.user)
    return {
        each.user: [ScramCredentialInfo(info.mechanism, info.iterations) for info in each.credential_infos]
        for each in response.results
    }


async def set_credential(
    cluster: Cluster, user: str, mechanism: ScramMechanism, password: str, iterations: int, timeout_s: float
) -> None:
    """Set a user's credential; raises KafkaError."""
    if not password:
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "a password is not empty")
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:  # before it is worked on
        text = f"{iterations} iterations, between {ITERATIONS_MIN} and {ITERATIONS_MAX} are allowed"
        raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
    salt = secrets.token_bytes(SALT_BYTES)
    salted = await asyncio.to_thread(salted_password, mechanism.mechanism_name, password, salt, iterations)
    await _alter(cluster, (), [m.ScramCredentialUpsertion(user, mechanism, iterations, salt, salted)], timeout_s)


async def delete_credential(cluster: Cluster, user: str, mechanism: ScramMechanism, timeout_s: float) -> None:
    """Delete a user's credential; raises KafkaError, RESOURCE_NOT_FOUND where there is none."""
    await _alter(cluster, [m.ScramCredentialDeletion(user, mechanism)], (), timeout_s)


async def _alter(
    cluster: Cluster,
    deletions: Sequence[m.ScramCredentialDeletion],
    upsertions: Sequence[m.ScramCredentialUpsertion],
    timeout_s: float,
) -> None:
    said: str | None = None

    def retry(response: m.AlterUserScramCredentialsResponse) -> ErrorCode | None:
        nonlocal said
        for each in response.results:
            if ErrorCode.of(each.error_code).retriable:
                said = each.error_message or said
                return ErrorCode.of(each.error_code)
        return None

    request = m.AlterUserScramCredentialsRequest(deletions, upsertions)
    try:
        response: m.AlterUserScramCredentialsResponse = await cluster.call_any(
            "Admin", "AlterUserScramCredentials", request, timeout_s, retry
        )
    except KafkaError as error:
        if said is None:
            raise
        raise KafkaError(error.code, said) from None
    for each in response.results:
        if each.error_code:
            raise KafkaError(each.error_code, each.error_message or each.user)
