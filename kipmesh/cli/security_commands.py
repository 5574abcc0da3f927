"""`kipmesh user` (SCRAM credentials in the metadata log) and `kipmesh certs` (certificates for TLS).

Passwords come from a terminal prompt or standard input. They are never arguments, which other users could read, and
never leave this process: brokers receive salted hashes. Certificates use cert-manager's file names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    AdminConnection,
    AsJson,
    CommandError,
    check_utf8,
    command,
    make_app,
    option,
    print_json,
    print_one,
    print_table,
)
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, ScramCredentialInfo

AUTHORITY = "authority"
LOCAL_NAMES = ("localhost", "127.0.0.1")
PASSWORD_BYTES_MAX = 1024

user_app = make_app(
    "Manage users of SASL listeners: SCRAM credentials in the metadata.",
    """
    kipmesh user add alice
    kipmesh user add alice < password.txt
    kipmesh user list
    kipmesh user delete alice
    """,
)

certs_app = make_app(
    "Make certificates for a cluster with TLS.",
    """
    kipmesh certs make build/certs --node controller-1 leader-1 follower-1
    kipmesh certs make build/certs client
    kipmesh certs install build/certs /nodes --owner 10001
    """,
)


class Mechanism(StrEnum):
    """SASL mechanism of a credential."""

    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


Name = Annotated[str, typer.Argument(metavar="USER", callback=check_utf8)]
Iterations = Annotated[
    int, option("--iterations", "Iterations of the password hash.", min=ITERATIONS_MIN, max=ITERATIONS_MAX)
]
Credentials = Mapping[str, Sequence["ScramCredentialInfo"]]


def _mechanism_option(default: str) -> Any:
    return option("--mechanism", f"Only this mechanism; repeatable. Default: {default}.", show_default=False)


@command(user_app)
def add(
    name: Name,
    mechanisms: Annotated[list[Mechanism] | None, _mechanism_option("both")] = None,
    iterations: Iterations = ITERATIONS_MIN,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Add credentials for a user. Prompts for the password, or reads it from standard input.

    Fails if the user already has a credential for the mechanism; use `kipmesh user alter` to change it.

    Examples:
    kipmesh user add alice
    kipmesh user add alice --mechanism SCRAM-SHA-512 --iterations 8192 < password.txt
    """
    wanted = list(dict.fromkeys(mechanisms or Mechanism))
    had = [each for each in _mechanisms_of(connection, name) if each in wanted]
    if had:
        raise CommandError(f"user {name!r} already has {', '.join(had)}; change it with: kipmesh user alter {name}")
    _set(connection, name, wanted, iterations, as_json=as_json)


@command(user_app)
def alter(
    name: Name,
    mechanisms: Annotated[list[Mechanism] | None, _mechanism_option("those that the user has")] = None,
    iterations: Iterations = ITERATIONS_MIN,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Change the password of a user. Prompts for it, or reads it from standard input.

    Open connections stay authenticated.

    Examples:
    kipmesh user alter alice
    kipmesh user alter alice --iterations 8192 < password.txt
    """
    had = _mechanisms_of(connection, name)
    wanted = list(dict.fromkeys(mechanisms or had))
    lacking = [each for each in wanted if each not in had]
    if lacking or not had:
        missing = ", ".join(lacking) if had else "credential"
        raise CommandError(f"user {name!r} has no {missing}; create it with: kipmesh user add {name}")
    _set(connection, name, wanted, iterations, as_json=as_json)


@command(user_app, "list")
def list_(*, connection: AdminConnection, as_json: AsJson = False) -> None:
    """List all users in the metadata and their mechanisms. Users of `sasl.users.file` are not included.

    Examples:
    kipmesh user list
    kipmesh user list --json
    """
    _print_users(connection.run(lambda admin: admin.describe_user_scram_credentials(None)), as_json=as_json)


@command(user_app)
def describe(name: Name, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show a user's mechanisms and iterations, but no password or hash.

    Examples:
    kipmesh user describe alice
    kipmesh user describe alice --json
    """
    _print_users(connection.run(lambda admin: admin.describe_user_scram_credentials([name])), as_json=as_json)


@command(user_app)
def delete(
    name: Name,
    mechanisms: Annotated[list[Mechanism] | None, _mechanism_option("those that the user has")] = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Delete the credentials of a user. New connections are refused; open connections stay.

    Examples:
    kipmesh user delete alice
    kipmesh user delete alice --mechanism SCRAM-SHA-256
    """

    async def work(admin: AdminClient) -> list[str]:
        from kipmesh.client import ScramMechanism

        wanted = [ScramMechanism.of(each) for each in dict.fromkeys(mechanisms or ())]
        if not wanted:
            infos = (await admin.describe_user_scram_credentials([name]))[name]
            wanted = [ScramMechanism(info.mechanism) for info in infos if _has_name(info.mechanism)]
        for mechanism in wanted:
            await admin.delete_user_scram_credential(name, mechanism)
        return [mechanism.mechanism_name for mechanism in wanted]

    for each in connection.run(work):
        print_one({"user": name, "mechanism": each}, f"{_printable(name)}: {each} deleted", as_json=as_json)


def _mechanisms_of(connection: AdminConnection, name: str) -> list[Mechanism]:
    """Return the mechanisms for which a user has a credential; none for an unknown user.

    Mechanisms that this version does not know are left out.
    """
    infos = connection.run(lambda admin: admin.describe_user_scram_credentials(None)).get(name, ())
    return [Mechanism(_mechanism_name(info.mechanism)) for info in infos if _has_name(info.mechanism)]


def _set(connection: AdminConnection, name: str, mechanisms: Sequence[str], iterations: int, *, as_json: bool) -> None:
    password = read_password(name)

    async def work(admin: AdminClient) -> None:
        from kipmesh.client import ScramMechanism

        for each in mechanisms:
            await admin.set_user_scram_credential(name, ScramMechanism.of(each), password, iterations=iterations)

    connection.run(work)
    for each in mechanisms:
        values = {"user": name, "mechanism": str(each), "iterations": iterations}
        print_one(values, f"{_printable(name)}: {each} set", as_json=as_json)


def read_password(name: str) -> str:
    """Prompt twice for the password of user `name`, or read one line of standard input if it is not a terminal.

    Raises CommandError unless the password is 1 to PASSWORD_BYTES_MAX bytes of UTF-8 on one line.
    """
    if sys.stdin.isatty():
        password: str = typer.prompt(
            f"Password of {_printable(name)}", hide_input=True, confirmation_prompt=True, err=True
        )
        data = password.encode(errors="surrogateescape")
    else:
        data = sys.stdin.buffer.read(PASSWORD_BYTES_MAX + 3)
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    if not data or len(data) > PASSWORD_BYTES_MAX or b"\n" in data or b"\0" in data:
        raise CommandError(f"the password must be one line of 1 to {PASSWORD_BYTES_MAX} bytes on standard input")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CommandError("the password must be UTF-8") from None


def _print_users(found: Credentials, *, as_json: bool) -> None:
    users = {
        user: [{"mechanism": _mechanism_name(info.mechanism), "iterations": info.iterations} for info in infos]
        for user, infos in found.items()
    }
    if as_json:
        for user, credentials in users.items():
            print_json({"user": user, "credentials": credentials})
        return
    rows = [(_printable(user), *one.values()) for user, credentials in users.items() for one in credentials]
    if rows:
        print_table(("USER", "MECHANISM", "ITERATIONS"), rows)
    else:
        print("no users")


def _has_name(mechanism: int) -> bool:
    from kipmesh.client import ScramMechanism

    return mechanism in list(ScramMechanism)


def _mechanism_name(mechanism: int) -> str:
    """Return the name of a mechanism, or its number if this version does not know it."""
    from kipmesh.client import ScramMechanism

    return ScramMechanism(mechanism).mechanism_name if _has_name(mechanism) else str(mechanism)


def _printable(name: str) -> str:
    """Return a user name as one line, escaped if it is not printable."""
    return name if name.isprintable() else repr(name)


# --- kipmesh certs


@command(certs_app)
def make(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Output: one directory per name, and one for the authority.")
    ],
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", callback=check_utf8, help="Names to make certificates for.")
    ],
    node: Annotated[
        bool, option("--node", "Certificates of brokers or controllers: adds the URI kipmesh://node.")
    ] = False,
    sans: Annotated[
        list[str] | None,
        option("--san", "An additional DNS name, address or URI; repeatable.", metavar="NAME", callback=check_utf8),
    ] = None,
    keep: Annotated[bool, option("--keep", "Keep complete certificates that are valid for 30 more days.")] = False,
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="Days of validity.")] = 365.0,
) -> None:
    """Make or renew a certificate for each name, valid for the name, localhost and 127.0.0.1.

    Writes tls.crt, tls.key and ca.crt to DIR/NAME. The first call creates the authority, DIR/authority; protect its
    key, which can sign a certificate for any node. Running processes load renewed files without a restart.

    Examples:
    kipmesh certs make build/certs --node leader-1 follower-1
    kipmesh certs make build/certs leader-1 --node --san leader-1.mesh.svc --san 10.0.0.7
    kipmesh certs make build/certs client --days 30
    """
    from kipmesh.cluster.certificates import is_good
    from kipmesh.cluster.layout import NODE_NAME
    from kipmesh.transport.tls.making import CERTIFICATE_FILE, Authority

    for name in names:
        if name == AUTHORITY or "/" in name or name.startswith("."):
            raise CommandError(
                f"{name!r} cannot name a certificate: it must not be {AUTHORITY!r}, contain a slash or begin with a dot"
            )
    home = directory / AUTHORITY
    if (home / CERTIFICATE_FILE).exists():
        authority = Authority.read(home)
    else:
        authority = Authority.make("kipmesh")
        authority.write(home)
    extra = [*LOCAL_NAMES, *(sans or ()), *([NODE_NAME] if node else [])]
    for name in names:
        if keep and is_good(directory / name):
            continue
        authority.issue(name, [name, *extra], days=days).write(directory / name)
        print(directory / name)


@command(certs_app)
def install(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Output of `kipmesh certs make`.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Has one directory for each name to install.")],
    owners: Annotated[
        list[str] | None,
        option("--owner", "Owner of the files of NAME, or of all other names; repeatable.", metavar="[NAME=]UID[:GID]"),
    ] = None,
) -> None:
    """Copy certificates to directories of processes that run as other users, such as volumes of containers.

    Copies the files of a name to the directory of that name in TARGET. Only the owner can read the directory and the
    key. Unchanged files stay; running processes load new files without a restart. Changing the owner needs CAP_CHOWN.

    Examples:
    kipmesh certs install build/certs /nodes --owner 10001
    kipmesh certs install build/certs /nodes --owner 10001:10001 --owner prometheus=65534
    """
    from kipmesh.transport.tls.files import TlsFiles, TlsPaths
    from kipmesh.transport.tls.making import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, replace_file

    owner_of = _owners(owners or [])
    directories = sorted(path for path in target.iterdir() if path.is_dir())
    if not directories:
        raise CommandError(f"{target} has no directories: create one for each name to install")
    for directory in directories:
        home = source / directory.name
        TlsFiles(TlsPaths(home / CERTIFICATE_FILE, home / KEY_FILE, home / AUTHORITIES_FILE)).close()
        owner = owner_of.get(directory.name, owner_of.get("", (os.geteuid(), os.getegid())))
        for name, mode in ((KEY_FILE, 0o400), (CERTIFICATE_FILE, 0o444), (AUTHORITIES_FILE, 0o444)):
            content = (home / name).read_bytes()
            if not _is_installed(directory / name, content, mode, owner):
                replace_file(directory / name, content, mode, owner)
        os.chown(directory, *owner)
        directory.chmod(0o700)
        print(directory)


def _is_installed(path: Path, content: bytes, mode: int, owner: tuple[int, int]) -> bool:
    if not path.is_file():
        return False
    status = path.stat()
    is_right = (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (*owner, mode)
    return is_right and path.read_bytes() == content


def _owners(texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Parse --owner to {name: (uid, gid)}; "" means all other names, and the gid defaults to the uid.

    Raises typer.BadParameter.
    """
    found = {}
    for text in texts:
        name, _, ids = text.rpartition("=")
        uid, colon, gid = ids.partition(":")
        gid = gid if colon else uid
        if not (uid.isdecimal() and gid.isdecimal()) or max(int(uid), int(gid)) >= 1 << 32:
            raise typer.BadParameter(f"{text!r} is not [NAME=]UID[:GID]", param_hint="--owner")
        found[name] = (int(uid), int(gid))
    return found
