"""SCRAM credentials of users in the metadata log, by any broker, which forwards to the active controller.

A password never leaves this process: what is sent is PBKDF2 of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.admin.requests import AdminRequests
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


class CredentialAdmin(AdminRequests):
    """The part of `AdminClient` that is about users."""

    async def describe_user_scram_credentials(
        self, users: Iterable[str] | None = None
    ) -> dict[str, list[ScramCredentialInfo]]:
        """The SCRAM credentials in the metadata log, of these users or of all; RESOURCE_NOT_FOUND for no user."""
        named = None if users is None else list(dict.fromkeys(users))
        if named == []:  # to the cluster an empty list is all
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
        """Give a user a SCRAM credential, or another one; holds for new connections. The password is not sent."""
        if not password:
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, "a password is not empty")
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:  # before it is worked on
            text = f"{iterations} iterations, between {ITERATIONS_MIN} and {ITERATIONS_MAX} are allowed"
            raise KafkaError(ErrorCode.UNACCEPTABLE_CREDENTIAL, text)
        salt = secrets.token_bytes(SALT_BYTES)
        salted = await asyncio.to_thread(salted_password, mechanism.mechanism_name, password, salt, iterations)
        upsertion = m.ScramCredentialUpsertion(user, mechanism, iterations, salt, salted)
        await self._call(m.AlterUserScramCredentialsRequest((), [upsertion]), _by_user)

    async def delete_user_scram_credential(self, user: str, mechanism: ScramMechanism) -> None:
        """Take a user's SCRAM credential away; RESOURCE_NOT_FOUND where there is none."""
        deletion = m.ScramCredentialDeletion(user, mechanism)
        await self._call(m.AlterUserScramCredentialsRequest([deletion], ()), _by_user)


def _by_user(response: m.AlterUserScramCredentialsResponse) -> list[tuple[str, Any]]:
    return [(each.user, each) for each in response.results]
