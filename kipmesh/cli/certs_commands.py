"""`kipmesh certs`: certificates for meshes that have no other authority, as cert-manager would lay them out."""

from __future__ import annotations

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
