"""SCRAM credentials of users (API keys 50 and 51), as in `protos/kipmesh/v1/credentials.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class UserName(NamedTuple):
    name: str = ""


class DescribeUserScramCredentialsRequest(NamedTuple):
    users: Sequence[UserName] = ()


class CredentialInfo(NamedTuple):
    mechanism: int = 0
    iterations: int = 0


class DescribeUserScramCredentialsResult(NamedTuple):
    user: str = ""
    error_code: int = 0
    error_message: str | None = None
    credential_infos: Sequence[CredentialInfo] = ()


class DescribeUserScramCredentialsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
    results: Sequence[DescribeUserScramCredentialsResult] = ()


class ScramCredentialDeletion(NamedTuple):
    name: str = ""
    mechanism: int = 0


class ScramCredentialUpsertion(NamedTuple):
    name: str = ""
    mechanism: int = 0
    iterations: int = 0
    salt: bytes = b""
    salted_password: bytes = b""

    def __repr__(self) -> str:
        return f"ScramCredentialUpsertion({self.name!r}, {self.mechanism}, {self.iterations})"  # no secret in a log


class AlterUserScramCredentialsRequest(NamedTuple):
    deletions: Sequence[ScramCredentialDeletion] = ()
    upsertions: Sequence[ScramCredentialUpsertion] = ()


class AlterUserScramCredentialsResult(NamedTuple):
    user: str = ""
    error_code: int = 0
    error_message: str | None = None


class AlterUserScramCredentialsResponse(NamedTuple):
    throttle_time_ms: int = 0
    results: Sequence[AlterUserScramCredentialsResult] = ()


def refused(request: AlterUserScramCredentialsRequest, code: int, message: str) -> AlterUserScramCredentialsResponse:
    """The answer in which every user that the request names has this error."""
    names = dict.fromkeys([*(one.name for one in request.deletions), *(one.name for one in request.upsertions)])
    return AlterUserScramCredentialsResponse(
        results=[AlterUserScramCredentialsResult(name, code, message) for name in names]
    )
