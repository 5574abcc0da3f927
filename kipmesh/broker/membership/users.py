"""The users of a broker's listeners with SASL: those of the metadata log, and those of `sasl.users.file`.

The metadata log has SCRAM credentials (AlterUserScramCredentials), which are looked up in this broker's image each
time: what was set, changed or deleted holds for the next connection once the broker has applied the record. A user with
any credential there is the log's: for SCRAM the file is not asked for him. PLAIN needs passwords, which only the file
has.
As long as the broker has no metadata to act on it cannot say who there is (`UsersNotKnownError`).

The file has a line `name=password` a user; empty lines and those that begin with `#` say nothing. It is looked at again
when somebody authenticates, and read when it changed. One that cannot be read leaves the users as they were, and is in
the log. SCRAM credentials are made of the passwords when they are first needed, off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from kipmesh.broker.membership.forwarder import Until
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.scram import HASHES, ITERATIONS_MIN, NUMBERS, ScramCredential, credential, salted_password
from kipmesh.transport.kafka.handshake import Users, UsersNotKnownError

log = structlog.get_logger(__name__)

FILE_BYTES_MAX = 1 << 20
METADATA_TIMEOUT_S = 10.0
"""How long somebody who authenticates waits for the broker's first metadata."""

Known = Callable[[], MetadataImage | None]
"""The metadata that the broker acts on; None before the first."""


class UsersFileError(Exception):
    """The file cannot be read, or a line of it is none."""


def parse_users(text: str) -> dict[str, str]:
    """Name -> password; raises UsersFileError, whose text has no passwords."""
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
            raise UsersFileError(f"line {number}: user {name!r} is there twice")
        users[name] = password
    return users


class FileUsers:
    """Users of a file; `kipmesh.transport.kafka.handshake.Users`."""

    def __init__(self, path: str) -> None:
        """Read it; raises UsersFileError. Blocks."""
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
                raise UsersFileError(f"{status.st_size} bytes, at most {FILE_BYTES_MAX} are read")
            users = parse_users(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsersFileError(str(error)) from None
        if status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("others can read the file of users", path=str(self._path))
        self._seen, self._users, self._credentials = seen, users, {}
        log.info("users read", path=str(self._path), users=len(users))

    async def _refresh(self) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(self._load)
            except UsersFileError as error:
                log.error("the file of users is not used", path=str(self._path), error=str(error))

    async def password(self, user: str) -> str | None:
        """Of a user, None where there is none."""
        await self._refresh()
        return self._users.get(user)

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """Made of the password."""
        await self._refresh()
        users, made = self._users, self._credentials
        password = users.get(user)
        if password is None or mechanism not in HASHES:
            return None
        if (mechanism, user) not in made:
            salt = secrets.token_bytes(16)
            salted = await asyncio.to_thread(salted_password, mechanism, password, salt, ITERATIONS_MIN)
            made.setdefault((mechanism, user), credential(mechanism, salted, salt, ITERATIONS_MIN))
        return made[mechanism, user]


class LogUsers:
    """Users of the metadata log, and of the file behind it, if any; `kipmesh.transport.kafka.handshake.Users`."""

    def __init__(self, known: Known, until: Until, file: Users | None) -> None:
        self._known = known
        self._until = until
        self._file = file

    async def password(self, user: str) -> str | None:
        """Of a user of the file: the log has no passwords."""
        return None if self._file is None else await self._file.password(user)

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """The log's where it knows the user, by whichever mechanism; else the file's."""
        image = self._known()
        if image is None:
            await self._until(lambda: self._known() is not None, METADATA_TIMEOUT_S)
            image = self._known()
            if image is None:
                raise UsersNotKnownError("this broker has no metadata yet")
        own = image.credentials_of(user)
        if own:
            return own.get(NUMBERS[mechanism])
        return None if self._file is None else await self._file.credential(mechanism, user)
