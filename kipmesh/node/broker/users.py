"""The users of a broker's listeners with SASL: those of `sasl.users.file`.

The file has a line `name=password` a user; empty lines and those that begin with `#` say nothing. It is looked at again
when somebody authenticates, and read when it changed. One that cannot be read leaves the users as they were, and is in
the log. SCRAM credentials are made of the passwords when they are first needed, off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
from pathlib import Path

import structlog

from kipmesh.core.scram import HASHES, ITERATIONS_MIN, ScramCredential, credential, salted_password

log = structlog.get_logger(__name__)

FILE_BYTES_MAX = 1 << 20


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
    """Users of a file; `kipmesh.wire.sasl.Users`."""

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
