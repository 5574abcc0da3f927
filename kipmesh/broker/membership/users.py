"""Users of a broker's SASL listeners: from the metadata log and from `sasl.users.file`.

SCRAM credentials come from the broker's metadata image (AlterUserScramCredentials). A change applies to the next
connection after the broker has applied the record. A user with any credential there is not looked up in the file. PLAIN
needs passwords, which only the file has. Without published metadata, authentication fails with UsersNotKnownError.

The file has one line `name=password` per user; empty lines and lines with `#` are comments. It is checked at each
authentication and read again when it changed. If it cannot be read, the error is logged and the users remain as they
were. SCRAM credentials are derived from the passwords at first use, off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from kipmesh.broker.membership.forwarder import WaitUntil
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.scram import HASHES, ITERATIONS_MIN, NUMBERS, ScramCredential, credential, salted_password
from kipmesh.transport.kafka.handshake import Users, UsersNotKnownError

log = structlog.get_logger(__name__)

FILE_BYTES_MAX = 1 << 20
METADATA_TIMEOUT_S = 10.0
"""How long an authentication waits for the broker's first metadata."""

PublishedImage = Callable[[], MetadataImage | None]
"""Returns the published metadata image, or None before the first."""


class UsersFileError(Exception):
    """The file of users cannot be read, is too large or has an invalid line."""


def parse_users(text: str) -> dict[str, str]:
    """Return passwords by user name from the text of a users file.

    Raises UsersFileError for an invalid line or a repeated user. The message never contains a password.
    """
    users: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, password = line.partition("=")
        name, password = name.strip(), password.strip()
        if not (name and equals and password) or "\0" in line:
            raise UsersFileError(f"line {number} is not name=password")
        if name in users:
            raise UsersFileError(f"line {number} repeats user {name!r}")
        users[name] = password
    return users


class FileUsers:
    """SASL users of a file. Implements `kipmesh.transport.kafka.handshake.Users`."""

    def __init__(self, path: str) -> None:
        """Read the file. Blocks. Raises UsersFileError if it is unreadable, too large or has an invalid line."""
        self._path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._users: dict[str, str] = {}
        self._credentials: dict[tuple[str, str], ScramCredential] = {}
        self._lock = asyncio.Lock()
        self._load()

    def _load(self) -> None:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen == self._seen:
                return
            if status.st_size > FILE_BYTES_MAX:
                raise UsersFileError(f"file must have at most {FILE_BYTES_MAX} bytes, got {status.st_size}")
            users = parse_users(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsersFileError(str(error)) from None
        if status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("users file is readable by others", path=str(self._path))
        self._seen, self._users, self._credentials = seen, users, {}
        log.info("users file read", path=str(self._path), users=len(users))

    async def _refresh(self) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(self._load)
            except UsersFileError as error:
                log.error("users file not read", path=str(self._path), error=str(error))

    async def password(self, user: str) -> str | None:
        """Return a user's password, or None for an unknown user."""
        await self._refresh()
        return self._users.get(user)

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """Return a SCRAM credential derived from the password; None for an unknown user or mechanism."""
        await self._refresh()
        users, credentials = self._users, self._credentials
        password = users.get(user)
        if password is None or mechanism not in HASHES:
            return None
        if (mechanism, user) not in credentials:
            salt = secrets.token_bytes(16)
            salted = await asyncio.to_thread(salted_password, mechanism, password, salt, ITERATIONS_MIN)
            credentials.setdefault((mechanism, user), credential(mechanism, salted, salt, ITERATIONS_MIN))
        return credentials[mechanism, user]


class LogUsers:
    """Users of the metadata log, then of a file if there is one. Implements `kipmesh.transport.kafka.handshake.Users`.

    Args: image: returns the published metadata; wait_until: waits for a condition on it; file: users to fall back to.
    """

    def __init__(self, image: PublishedImage, wait_until: WaitUntil, file: Users | None) -> None:
        self._image = image
        self._wait_until = wait_until
        self._file = file

    async def password(self, user: str) -> str | None:
        """Return the user's password from the file, or None. The metadata log has no passwords."""
        return None if self._file is None else await self._file.password(user)

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """Return the user's SCRAM credential, or None if there is none for this mechanism.

        The file is used only for users without any credential in the metadata log. Raises UsersNotKnownError if there
        is no metadata within `METADATA_TIMEOUT_S`.
        """
        await self._wait_until(lambda: self._image() is not None, METADATA_TIMEOUT_S)
        image = self._image()
        if image is None:
            raise UsersNotKnownError("this broker has no metadata yet")
        credentials = image.credentials_of(user)
        if credentials:
            return credentials.get(NUMBERS[mechanism])
        return None if self._file is None else await self._file.credential(mechanism, user)
