"""SCRAM (RFC 5802, RFC 7677) from the server's side, as Apache Kafka has it: SCRAM-SHA-256 and SCRAM-SHA-512.

Messages in, messages out; the nonce and the user's credential are arguments. A proof is compared in constant time.
What does not hold raises ScramError, whose text is for the log: the peer is told only that it failed.

Not implemented: channel binding, names to act for other than the user's own, delegation tokens.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import b64decode, b64encode
from typing import NamedTuple

HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""Mechanism -> hash."""
NUMBERS = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
"""Kafka's numbers of the mechanisms."""
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16_384
MESSAGE_BYTES_MAX = 4096


class ScramError(Exception):
    """A message that is none, or a proof that does not hold."""


class ScramCredential(NamedTuple):
    """What a server keeps of a password: with it a proof can be checked, and not be made."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential({self.iterations} iterations)"  # the keys are for no log


class ClientFirst(NamedTuple):
    """The client's first message."""

    user: str
    nonce: str
    bare: str
    gs2_header: str


def salted_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """The password as clients and credentials have it; takes milliseconds, on purpose."""
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def credential(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """From a salted password."""
    name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramCredential(
        salt, hashlib.new(name, client_key).digest(), hmac.digest(salted, b"Server Key", name), iterations
    )


def parse_client_first(data: bytes) -> ClientFirst:
    """The user and its nonce; raises ScramError."""
    text = _text(data)
    binding, comma, rest = text.partition(",")
    authzid, comma_too, bare = rest.partition(",")
    if binding not in ("n", "y") or not (comma and comma_too):
        raise ScramError("channel binding is not known")
    parts = bare.split(",")
    if len(parts) < 2 or not parts[0].startswith("n=") or not parts[1].startswith("r=") or not parts[1][2:]:
        raise ScramError("the first message has no name or no nonce")
    if "tokenauth=true" in parts[2:]:
        raise ScramError("delegation tokens are not known")
    user = _name(parts[0][2:])
    if authzid and (not authzid.startswith("a=") or _name(authzid[2:]) != user):
        raise ScramError("the user wants to act for another one")
    return ClientFirst(user, parts[1][2:], bare, f"{binding},{authzid},")


class ScramExchange:
    """One authentication, between the two messages of the client."""

    def __init__(self, mechanism: str, first: ClientFirst, found: ScramCredential, nonce: str) -> None:
        self._hash = HASHES[mechanism]
        self._first = first
        self._credential = found
        self._nonce = first.nonce + nonce
        salt = b64encode(found.salt).decode()
        self.server_first = f"r={self._nonce},s={salt},i={found.iterations}"

    def finish(self, data: bytes) -> bytes:
        """The server's last message, where the client's proof holds; raises ScramError."""
        text = _text(data)
        without_proof, comma, proof = text.rpartition(",p=")
        parts = without_proof.split(",")
        if not comma or len(parts) < 2 or not parts[0].startswith("c=") or parts[1] != f"r={self._nonce}":
            raise ScramError("the last message is not of this exchange")
        if _bytes(parts[0][2:]) != self._first.gs2_header.encode():
            raise ScramError("the last message has another header than the first")
        signed = f"{self._first.bare},{self.server_first},{without_proof}".encode()
        signature = hmac.digest(self._credential.stored_key, signed, self._hash)
        given = _bytes(proof)
        if len(given) != len(signature):
            raise ScramError("the proof has the wrong length")
        client_key = bytes(one ^ other for one, other in zip(given, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), self._credential.stored_key):
            raise ScramError("the proof does not hold")
        return b"v=" + b64encode(hmac.digest(self._credential.server_key, signed, self._hash))


def _text(data: bytes) -> str:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ScramError(f"a message of {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are read")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ScramError("a message that is no text") from None


def _name(text: str) -> str:
    """A name whose commas and equals signs are escaped."""
    name = text.replace("=2C", ",").replace("=3D", "\0")
    if not name or "=" in name:
        raise ScramError("a name that is not escaped as it should be")
    return name.replace("\0", "=")


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ScramError("a value that is no Base64") from None
