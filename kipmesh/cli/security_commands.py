"""`kipmesh user`, SCRAM credentials in the metadata log, and `kipmesh certs`, certificates for TLS.

A password is asked for on a terminal, or is the one line of standard input; it is never an argument, which others could
read. It does not leave this process. Certificates are for clusters without another authority, laid
out as by cert-manager.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    AdminConnection,
    AsJson,
    CommandError,
    command,
    make_app,
    plain_text,
    print_json,
    print_table,
)
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, ScramCredentialInfo

AUTHORITY = "authority"
LOCAL_NAMES = ("localhost", "127.0.0.1")
PASSWORD_BYTES_MAX = 1024

user_app = make_app(
    "Users of listeners with SASL: SCRAM credentials in the metadata.",
    """
    kipmesh user add alice
    kipmesh user add alice < password.txt
    kipmesh user list
    kipmesh user delete alice
    """,
)

certs_app = make_app(
    "Make certificates for a mesh with TLS.",
    """
    kipmesh certs make build/certs --node controller-1 leader-1 follower-1
    kipmesh certs make build/certs client
    kipmesh certs install build/certs /nodes --owner 10001
    """,
)


class Mechanism(StrEnum):
    """How a user authenticates."""

    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


Name = Annotated[str, typer.Argument(metavar="USER", callback=plain_text)]
Iterations = Annotated[
    int,
    typer.Option(
        "--iterations", min=ITERATIONS_MIN, max=ITERATIONS_MAX, help="Of the hash: what a guess of the password costs."
    ),
]
Credentials = Mapping[str, Sequence["ScramCredentialInfo"]]


@command(user_app)
def add(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: both.", show_default=False),
    ] = None,
    iterations: Iterations = ITERATIONS_MIN,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Give a user credentials. The password is asked for, or the line of standard input.

    Exit code 1 when the user has a credential of the mechanism: `alter` changes it.

    Examples:
    kipmesh user add alice
    kipmesh user add alice --mechanism SCRAM-SHA-512 --iterations 8192 < password.txt
    """
    wanted = list(dict.fromkeys(mechanisms or Mechanism))
    had = [each for each in _mechanisms_of(connection, name) if each in wanted]
    if had:
        raise CommandError(f"user {name!r} has {', '.join(had)} already: `kipmesh user alter` changes it")
    _set(connection, name, wanted, iterations, as_json=as_json)


@command(user_app)
def alter(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: those that the user has."),
    ] = None,
    iterations: Iterations = ITERATIONS_MIN,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Give a user another password. It is asked for, or the line of standard input.

    It holds for new connections; those that are open stay.

    Examples:
    kipmesh user alter alice
    kipmesh user alter alice --iterations 8192 < password.txt
    """
    had = _mechanisms_of(connection, name)
    wanted = list(dict.fromkeys(mechanisms or had))
    lacking = [each for each in wanted if each not in had]
    if lacking or not had:
        what = ", ".join(lacking) if had else "credential"
        raise CommandError(f"user {name!r} has no {what}: `kipmesh user add` makes it")
    _set(connection, name, wanted, iterations, as_json=as_json)


@command(user_app, "list")
def list_(*, connection: AdminConnection, as_json: AsJson = False) -> None:
    """List all users in the metadata, with their mechanisms. Users of `sasl.users.file` are not among them.

    Examples:
    kipmesh user list
    kipmesh user list --json
    """
    _show(connection.run(lambda admin: admin.describe_user_scram_credentials(None)), as_json=as_json)


@command(user_app)
def describe(name: Name, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show a user's mechanisms and iterations. Nothing of the password can be shown.

    Examples:
    kipmesh user describe alice
    kipmesh user describe alice --json
    """
    _show(connection.run(lambda admin: admin.describe_user_scram_credentials([name])), as_json=as_json)


@command(user_app)
def delete(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: all that the user has."),
    ] = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Take a user's credentials away. New connections are refused; those that are open stay.

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
        if as_json:
            print_json({"user": name, "mechanism": each})
        else:
            print(f"{_shown(name)}: {each} deleted")


def _mechanisms_of(connection: AdminConnection, name: str) -> list[Mechanism]:
    """What the user has; nothing for one that there is not."""
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
        if as_json:
            print_json({"user": name, "mechanism": str(each), "iterations": iterations})
        else:
            print(f"{_shown(name)}: {each} set")


def read_password(name: str) -> str:
    """From the terminal, twice, or the line of standard input; raises CommandError for what is none."""
    if sys.stdin.isatty():
        password: str = typer.prompt(f"Password of {_shown(name)}", hide_input=True, confirmation_prompt=True, err=True)
        data = password.encode(errors="surrogateescape")
    else:
        data = sys.stdin.buffer.read(PASSWORD_BYTES_MAX + 3)
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    if not data or len(data) > PASSWORD_BYTES_MAX or b"\n" in data or b"\0" in data:
        raise CommandError(f"a password is one line of 1 to {PASSWORD_BYTES_MAX} bytes on standard input")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CommandError("the password is not UTF-8") from None


def _show(found: Credentials, *, as_json: bool) -> None:
    if as_json:
        for user, infos in found.items():
            credentials = [
                {"mechanism": _mechanism_name(info.mechanism), "iterations": info.iterations} for info in infos
            ]
            print_json({"user": user, "credentials": credentials})
        return
    rows = [
        (_shown(user), _mechanism_name(info.mechanism), info.iterations)
        for user, infos in found.items()
        for info in infos
    ]
    if rows:
        print_table(("USER", "MECHANISM", "ITERATIONS"), rows)
    else:
        print("no users")


def _has_name(mechanism: int) -> bool:
    from kipmesh.client import ScramMechanism

    return mechanism in list(ScramMechanism)


def _mechanism_name(mechanism: int) -> str:
    """The mechanism's name, or its number where only the cluster knows it."""
    from kipmesh.client import ScramMechanism

    return ScramMechanism(mechanism).mechanism_name if _has_name(mechanism) else str(mechanism)


def _shown(name: str) -> str:
    """A name on one line of text."""
    return name if name.isprintable() else repr(name)


# --- kipmesh certs


@command(certs_app)
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets a folder for each name, and the authority's.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", callback=plain_text, help="Whose certificates.")],
    node: Annotated[
        bool, typer.Option("--node", help="They are brokers or controllers: with the name kipmesh://node as well.")
    ] = False,
    sans: Annotated[
        list[str] | None,
        typer.Option("--san", metavar="NAME", callback=plain_text, help="A further DNS name, address or URI."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave what is whole and good for 30 days more.")] = False,
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="How long they are good.")] = 365.0,
) -> None:
    """Make (or renew) a certificate for each name, good for the name itself, localhost and 127.0.0.1.

    DIR/NAME gets tls.crt, tls.key and ca.crt. The authority is DIR/authority, made at the first call: whoever has its
    key can be any node. Running processes take renewed files without a restart.

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
            raise CommandError(f"{name!r} cannot be the name of a folder for a certificate")
    home = folder / AUTHORITY
    if (home / CERTIFICATE_FILE).exists():
        authority = Authority.read(home)
    else:
        authority = Authority.make("kipmesh")
        authority.write(home)
    extra = [*LOCAL_NAMES, *(sans or ()), *([NODE_NAME] if node else [])]
    for name in names:
        if keep and is_good(folder / name):
            continue
        authority.issue(name, [name, *extra], days=days).write(folder / name)
        print(folder / name)


@command(certs_app)
def install(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="What `kipmesh certs make` has made.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="With a folder for each name to be installed.")],
    owners: Annotated[
        list[str] | None,
        typer.Option(
            "--owner", metavar="[NAME=]UID[:GID]", help="Whom the files are for; of one name, or of all others."
        ),
    ] = None,
) -> None:
    """Copy certificates to where processes of other users read them, such as volumes of containers.

    Each folder of TARGET gets the files of that name. Folder and key are for their owner alone. What is the same is
    left as it is; running processes take what is new without a restart. Giving files away needs root's capabilities.

    Examples:
    kipmesh certs install build/certs /nodes --owner 10001
    kipmesh certs install build/certs /nodes --owner 10001:10001 --owner prometheus=65534
    """
    from kipmesh.transport.tls.files import TlsFiles, TlsPaths
    from kipmesh.transport.tls.making import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, replace_file

    who = _owners(owners or [])
    folders = sorted(path for path in target.iterdir() if path.is_dir())
    if not folders:
        raise CommandError(f"{target} has no folder: make one for each name to be installed")
    for folder in folders:
        home = source / folder.name
        TlsFiles(TlsPaths(home / CERTIFICATE_FILE, home / KEY_FILE, home / AUTHORITIES_FILE)).close()
        owner = who.get(folder.name, who.get("", (os.geteuid(), os.getegid())))
        for name, mode in ((KEY_FILE, 0o400), (CERTIFICATE_FILE, 0o444), (AUTHORITIES_FILE, 0o444)):
            content = (home / name).read_bytes()
            if not _is_installed(folder / name, content, mode, owner):
                replace_file(folder / name, content, mode, owner)
        os.chown(folder, *owner)
        folder.chmod(0o700)
        print(folder)


def _is_installed(path: Path, content: bytes, mode: int, owner: tuple[int, int]) -> bool:
    if not path.is_file():
        return False
    status = path.stat()
    is_right = (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (*owner, mode)
    return is_right and path.read_bytes() == content


def _owners(texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By name, that of all others by the empty one; a user without a group has the group of the same number."""
    found = {}
    for text in texts:
        name, _, ids = text.rpartition("=")
        uid, colon, gid = ids.partition(":")
        gid = gid if colon else uid
        if not (uid.isdecimal() and gid.isdecimal()) or max(int(uid), int(gid)) >= 1 << 32:
            raise typer.BadParameter(f"{text!r} is not [NAME=]UID[:GID]", param_hint="--owner")
        found[name] = (int(uid), int(gid))
    return found
