"""Administration of users' SCRAM credentials in the metadata log.

Passwords are never sent, only their PBKDF2 hashes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client import arguments
from kipmesh.client.admin.requests import AdminRequests
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN, NUMBERS, salted_password

SALT_BYTES = 16


class ScramMechanism(IntEnum):
    """A SCRAM mechanism. The value is its number in Kafka's protocol."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The SASL name, such as `SCRAM-SHA-256`."""
        return self.name.replace("_", "-")

    @classmethod
    def of(cls, name: str) -> ScramMechanism:
        """Return the mechanism with that SASL name, such as `SCRAM-SHA-256`. Raises ValueError for another name."""
        if name not in NUMBERS:
            raise ValueError(f"SCRAM mechanism must be one of {', '.join(NUMBERS)}, got {name!r}")
        return cls(NUMBERS[name])


class ScramCredentialInfo(NamedTuple):
    """The mechanism and the number of iterations of a user's SCRAM credential."""

    mechanism: int
    """A ScramMechanism, or an unknown number from a newer cluster."""
    iterations: int


class CredentialAdmin(AdminRequests):
    """The part of `AdminClient` that manages SCRAM credentials of users."""

    async def describe_user_scram_credentials(
        self, users: Iterable[str] | None = None
    ) -> dict[str, list[ScramCredentialInfo]]:
        """Return the SCRAM credentials of these users (None: all) by user name. Passwords are not included.

        Raises KafkaError: RESOURCE_NOT_FOUND for a named user without credentials, or an error of the cluster.
        """
        named = None if users is None else list(dict.fromkeys(arguments.names("users", users)))
        if named == []:  # the protocol uses an empty list for all users
            return {}
        request = m.DescribeUserScramCredentialsRequest([m.UserName(name) for name in named or ()])
        response: m.DescribeUserScramCredentialsResponse = await self._call(request)
        for each in response.results:
            if each.error_code:
                raise KafkaError(each.error_code, each.error_message or each.user)
        return {
            each.user: [ScramCredentialInfo(info.mechanism, info.iterations) for info in each.credential_infos]
            for each in response.results
        }

    async def set_user_scram_credential(
        self, user: str, mechanism: ScramMechanism, password: str, *, iterations: int = ITERATIONS_MIN
    ) -> None:
        """Create or replace a user's SCRAM credential. It applies to new connections. The password is not sent.

        Raises KafkaError: UNACCEPTABLE_CREDENTIAL for an empty password or an invalid number of iterations, or an error
        of the cluster.
        """
        if not password:
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "password must not be empty")
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
            text = f"iterations must be between {ITERATIONS_MIN} and {ITERATIONS_MAX}, got {iterations}"
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
        salt = secrets.token_bytes(SALT_BYTES)
        salted = await asyncio.to_thread(salted_password, mechanism.mechanism_name, password, salt, iterations)
        upsertion = m.ScramCredentialUpsertion(user, mechanism, iterations, salt, salted)
        await self._call(m.AlterUserScramCredentialsRequest((), [upsertion]), _by_user)

    async def delete_user_scram_credential(self, user: str, mechanism: ScramMechanism) -> None:
        """Delete a user's SCRAM credential.

        Raises KafkaError: RESOURCE_NOT_FOUND if the credential does not exist, or an error of the cluster.
        """
        deletion = m.ScramCredentialDeletion(user, mechanism)
        await self._call(m.AlterUserScramCredentialsRequest([deletion], ()), _by_user)


def _by_user(response: m.AlterUserScramCredentialsResponse) -> list[tuple[str, Any]]:
    return [(each.user, each) for each in response.results]
