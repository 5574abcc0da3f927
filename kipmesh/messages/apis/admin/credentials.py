"""DescribeUserScramCredentials (50) and AlterUserScramCredentials (51)."""

from collections.abc import Sequence

from kipmesh.messages.schema import Int8, Int16, Int32, Message, field


class UserName(Message):
    name: str = field(1)


class DescribeUserScramCredentialsRequest(Message):
    # Empty: all users.
    users: Sequence[UserName] = field(1, nullable="0+", null=())


class CredentialInfo(Message):
    # 1 SCRAM-SHA-256, 2 SCRAM-SHA-512.
    mechanism: Int8 = field(1)
    iterations: Int32 = field(2)


class DescribeUserScramCredentialsResult(Message):
    user: str = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
    credential_infos: Sequence[CredentialInfo] = field(4)


class DescribeUserScramCredentialsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
    results: Sequence[DescribeUserScramCredentialsResult] = field(4)


class ScramCredentialDeletion(Message):
    name: str = field(1)
    mechanism: Int8 = field(2)


class ScramCredentialUpsertion(Message):
    name: str = field(1)
    mechanism: Int8 = field(2)
    iterations: Int32 = field(3)
    salt: bytes = field(4)
    # PBKDF2 of the password, with the salt and the iterations.
    salted_password: bytes = field(5)

    def __repr__(self) -> str:
        return f"ScramCredentialUpsertion({self.name!r}, {self.mechanism}, {self.iterations})"  # omits the secrets


class AlterUserScramCredentialsRequest(Message):
    deletions: Sequence[ScramCredentialDeletion] = field(1)
    upsertions: Sequence[ScramCredentialUpsertion] = field(2)


class AlterUserScramCredentialsResult(Message):
    user: str = field(1, mirrors="name")
    error_code: Int16 = field(2)
    error_message: str | None = field(3)


class AlterUserScramCredentialsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    results: Sequence[AlterUserScramCredentialsResult] = field(2, mirrors=("deletions", "upsertions"))
