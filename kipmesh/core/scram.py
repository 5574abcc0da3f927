"""Server side of SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677), as in Apache Kafka.

Messages are arguments and results; nonce and credential are arguments. Proofs are compared in constant time. Failures
raise ScramError, whose text is for the log: the client only learns that authentication failed.

Not implemented: channel binding, authorization ids other than the user name, delegation tokens.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import b64decode, b64encode
from typing import NamedTuple

HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""Hash function by mechanism."""
NUMBERS = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
"""Kafka's number of each mechanism."""
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16_384
MESSAGE_BYTES_MAX = 4096


class ScramError(Exception):
    """Malformed SCRAM message or wrong proof. The message is for the log, not for the client."""


class ScramCredential(NamedTuple):
    """Stored credential of a user: verifies a client's proof but cannot be used to create one."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential({self.iterations} iterations)"  # keys must not appear in logs


class ClientFirst(NamedTuple):
    """Parsed client-first message."""

    user: str
    nonce: str
    bare: str
    gs2_header: str


def salted_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """Return the salted password (PBKDF2). This takes milliseconds by design: do not call it on the event loop."""
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def credential(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """Return the credential for a salted password."""
    name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramCredential(
        salt, hashlib.new(name, client_key).digest(), hmac.digest(salted, b"Server Key", name), iterations
    )


def parse_client_first(data: bytes) -> ClientFirst:
    """Parse the client-first message.

    Raises ScramError if it is malformed or requests channel binding, another authorization id or a delegation token.
    """
    text = _text(data)
    binding, comma, rest = text.partition(",")
    authzid, comma_too, bare = rest.partition(",")
    if binding not in ("n", "y") or not (comma and comma_too):
        raise ScramError("channel binding is not supported")
    parts = bare.split(",")
    if len(parts) < 2 or not parts[0].startswith("n=") or not parts[1].startswith("r=") or not parts[1][2:]:
        raise ScramError("client-first message has no user name or no nonce")
    if "tokenauth=true" in parts[2:]:
        raise ScramError("delegation tokens are not supported")
    user = _name(parts[0][2:])
    if authzid and (not authzid.startswith("a=") or _name(authzid[2:]) != user):
        raise ScramError("authorization id must be the user name")
    return ClientFirst(user, parts[1][2:], bare, f"{binding},{authzid},")


class ScramExchange:
    """One authentication, from the server-first message to the check of the client's proof.

    Args: stored: the user's credential; nonce: random server nonce. `server_first` is the message to send.
    """

    def __init__(self, mechanism: str, first: ClientFirst, stored: ScramCredential, nonce: str) -> None:
        self._hash = HASHES[mechanism]
        self._first = first
        self._credential = stored
        self._nonce = first.nonce + nonce
        salt = b64encode(stored.salt).decode()
        self.server_first = f"r={self._nonce},s={salt},i={stored.iterations}"

    def finish(self, data: bytes) -> bytes:
        """Verify the client-final message and return the server-final message.

        Raises ScramError if the message is malformed or the proof is wrong.
        """
        text = _text(data)
        without_proof, comma, proof = text.rpartition(",p=")
        parts = without_proof.split(",")
        if not comma or len(parts) < 2 or not parts[0].startswith("c=") or parts[1] != f"r={self._nonce}":
            raise ScramError("client-final message is malformed or has another nonce")
        if _bytes(parts[0][2:]) != self._first.gs2_header.encode():
            raise ScramError("client-final message has another GS2 header than the client-first message")
        signed = f"{self._first.bare},{self.server_first},{without_proof}".encode()
        signature = hmac.digest(self._credential.stored_key, signed, self._hash)
        proof_bytes = _bytes(proof)
        if len(proof_bytes) != len(signature):
            raise ScramError(f"proof must have {len(signature)} bytes, got {len(proof_bytes)}")
        client_key = bytes(left ^ right for left, right in zip(proof_bytes, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), self._credential.stored_key):
            raise ScramError("wrong proof")
        return b"v=" + b64encode(hmac.digest(self._credential.server_key, signed, self._hash))


def _text(data: bytes) -> str:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ScramError(f"SCRAM message must have at most {MESSAGE_BYTES_MAX} bytes, got {len(data)}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ScramError("SCRAM message is not UTF-8") from None


def _name(text: str) -> str:
    """Unescape a SCRAM user name. Raises ScramError if it is empty or has an invalid escape sequence."""
    name = text.replace("=2C", ",").replace("=3D", "\0")
    if not name or "=" in name:
        raise ScramError(f"user name {text!r} is empty or has an invalid escape sequence")
    return name.replace("\0", "=")


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ScramError("SCRAM value is not Base64") from None
