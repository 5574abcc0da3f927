"""ApiVersions (18), SaslHandshake (17), SaslAuthenticate (36): requests that concern the connection."""

from collections.abc import Sequence

from kipmesh.messages.schema import Int16, Int32, Int64, Message, field


class ApiVersionsRequest(Message):
    client_software_name: str = field(versions="3+")
    client_software_version: str = field(versions="3+")


class ApiVersion(Message):
    api_key: Int16 = field()
    min_version: Int16 = field()
    max_version: Int16 = field()


class ApiVersionsResponse(Message):
    error_code: Int16 = field()
    api_keys: Sequence[ApiVersion] = field()
    throttle_time_ms: Int32 = field(versions="1+")


class SaslAuthenticateRequest(Message):
    auth_bytes: bytes = field()


class SaslAuthenticateResponse(Message):
    error_code: Int16 = field()
    error_message: str | None = field()
    auth_bytes: bytes = field()
    session_lifetime_ms: Int64 = field(versions="1+")


class SaslHandshakeRequest(Message):
    mechanism: str = field()


class SaslHandshakeResponse(Message):
    error_code: Int16 = field()
    mechanisms: Sequence[str] = field()
