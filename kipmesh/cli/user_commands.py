"""`kipmesh user`: who may come in by listeners with SASL, as SCRAM credentials in the metadata log.

A password is asked for on a terminal, or is the one line of standard input; it is never an argument, which others could
read. It does not leave this process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    CommandError,
    Dir,
    admin_client,
    bootstrap_of,
    examples,
    make_app,
    plain_text,
    print_json,
    print_table,
    run,
)
from kipmesh.core.scram import ITERATIONS_MAX, ITERATIONS_MIN

if TYPE_CHECKING:
    from kipmesh.client import ScramCredentialInfo

app = make_app(
    "Users of listeners with SASL: SCRAM credentials in the metadata.",
    """
    kipmesh user add alice
    kipmesh user add alice < password.txt
    kipmesh user list
    kipmesh user delete alice
    """,
)

PASSWORD_BYTES_MAX = 1024


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


@app.command(
    epilog=examples(
        """
        kipmesh user add alice
        kipmesh user add alice --mechanism SCRAM-SHA-512 --iterations 8192 < password.txt
        """
    )
)
def add(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: both.", show_default=False),
    ] = None,
    iterations: Iterations = ITERATIONS_MIN,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Give a user credentials. The password is asked for, or the line of standard input.

    Exit code 1 when the user has a credential of the mechanism: `alter` changes it.
    """
    address = bootstrap_of(bootstrap, folder)
    wanted = list(dict.fromkeys(mechanisms or Mechanism))
    had = [each for each in _mechanisms_of(address, name, timeout_s) if each in wanted]
    if had:
        raise CommandError(f"user {name!r} has {', '.join(had)} already: `kipmesh user alter` changes it")
    _set(address, name, wanted, iterations, timeout_s, as_json=as_json)


@app.command(
    epilog=examples(
        """
        kipmesh user alter alice
        kipmesh user alter alice --iterations 8192 < password.txt
        """
    )
)
def alter(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: those that the user has."),
    ] = None,
    iterations: Iterations = ITERATIONS_MIN,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Give a user another password. It is asked for, or the line of standard input.

    It holds for new connections; those that are open stay.
    """
    address = bootstrap_of(bootstrap, folder)
    had = _mechanisms_of(address, name, timeout_s)
    wanted = list(dict.fromkeys(mechanisms or had))
    lacking = [each for each in wanted if each not in had]
    if lacking or not had:
        what = ", ".join(lacking) if had else "credential"
        raise CommandError(f"user {name!r} has no {what}: `kipmesh user add` makes it")
    _set(address, name, wanted, iterations, timeout_s, as_json=as_json)


@app.command(name="list", epilog=examples("kipmesh user list\nkipmesh user list --json"))
def list_(
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """List all users in the metadata, with their mechanisms. Users of `sasl.users.file` are not among them."""
    _show(_described(bootstrap_of(bootstrap, folder), None, timeout_s), as_json=as_json)


@app.command(epilog=examples("kipmesh user describe alice\nkipmesh user describe alice --json"))
def describe(
    name: Name,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show a user's mechanisms and iterations. Nothing of the password can be shown."""
    _show(_described(bootstrap_of(bootstrap, folder), name, timeout_s), as_json=as_json)


@app.command(epilog=examples("kipmesh user delete alice\nkipmesh user delete alice --mechanism SCRAM-SHA-256"))
def delete(
    name: Name,
    mechanisms: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", help="Only this one; repeatable. Left out: all that the user has."),
    ] = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Take a user's credentials away. New connections are refused; those that are open stay."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[str]:
        from kipmesh.client import ScramMechanism

        async with admin_client(address, timeout_s) as admin:
            wanted = [ScramMechanism.of(each) for each in dict.fromkeys(mechanisms or ())]
            if not wanted:
                infos = (await admin.describe_user_scram_credentials([name]))[name]
                wanted = [ScramMechanism(info.mechanism) for info in infos if _has_name(info.mechanism)]
            for mechanism in wanted:
                await admin.delete_user_scram_credential(name, mechanism)
            return [mechanism.mechanism_name for mechanism in wanted]

    for each in run(work):
        if as_json:
            print_json({"user": name, "mechanism": each})
        else:
            sys.stdout.write(f"{_shown(name)}: {each} deleted\n")


def _described(address: str, name: str | None, timeout_s: float) -> Credentials:
    async def work() -> Credentials:
        async with admin_client(address, timeout_s) as admin:
            return await admin.describe_user_scram_credentials(None if name is None else [name])

    return run(work)


def _mechanisms_of(address: str, name: str, timeout_s: float) -> list[Mechanism]:
    """What the user has; nothing for one that there is not."""
    infos = _described(address, None, timeout_s).get(name, ())
    return [Mechanism(_mechanism_name(info.mechanism)) for info in infos if _has_name(info.mechanism)]


def _set(
    address: str, name: str, mechanisms: Sequence[str], iterations: int, timeout_s: float, *, as_json: bool
) -> None:
    password = read_password(name)

    async def work() -> None:
        from kipmesh.client import ScramMechanism

        async with admin_client(address, timeout_s) as admin:
            for each in mechanisms:
                await admin.set_user_scram_credential(name, ScramMechanism.of(each), password, iterations=iterations)

    run(work)
    for each in mechanisms:
        if as_json:
            print_json({"user": name, "mechanism": str(each), "iterations": iterations})
        else:
            sys.stdout.write(f"{_shown(name)}: {each} set\n")


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
        sys.stdout.write("no users\n")


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
