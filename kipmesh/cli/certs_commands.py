"""`kipmesh certs`: certificates for meshes that have no other authority, as cert-manager would lay them out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kipmesh.cli.common import CommandError, examples, make_app, plain_text

AUTHORITY = "authority"
LOCAL_NAMES = ("localhost", "127.0.0.1")

app = make_app(
    "Make certificates for a mesh with TLS.",
    """
    kipmesh certs make build/certs --node controller-1 leader-1 follower-1
    kipmesh certs make build/certs client
    kipmesh certs install build/certs /nodes --owner 10001
    """,
)


@app.command(
    epilog=examples(
        """
        kipmesh certs make build/certs --node leader-1 follower-1
        kipmesh certs make build/certs leader-1 --node --san leader-1.mesh.svc --san 10.0.0.7
        kipmesh certs make build/certs client --days 30
        """
    )
)
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
    """
    from kipmesh.cluster.certificates import is_good
    from kipmesh.cluster.layout import NODE_NAME
    from kipmesh.tls.making import CERTIFICATE_FILE, Authority

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


@app.command(
    epilog=examples(
        """
        kipmesh certs install build/certs /nodes --owner 10001
        kipmesh certs install build/certs /nodes --owner 10001:10001 --owner prometheus=65534
        """
    )
)
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
    """
    from kipmesh.tls.files import TlsFiles, TlsPaths
    from kipmesh.tls.making import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE, replace_file

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
