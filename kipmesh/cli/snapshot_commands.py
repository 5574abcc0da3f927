"""`kipmesh snapshot`: what is in a snapshot of the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kipmesh.cli.common import AsJson, CommandError, examples, make_app
from kipmesh.cli.log_commands import print_dump

app = make_app(
    "Look into snapshots of the metadata.",
    "kipmesh snapshot dump mesh/controller-1/data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint",
)


@app.command(
    epilog=examples(
        """
        kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint
        kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint --json
        kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint --batches
        """
    )
)
def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="<end offset>-<epoch>.checkpoint, or a .part of one")],
    batches_only: Annotated[bool, typer.Option("--batches", help="Only the batches, not every record.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the batches and decoded records of a snapshot, a line each, and check that it is whole and valid.

    What is wrong with the file is printed; the exit code is then 1.
    """
    from kipmesh.core.errors import CorruptRecordError
    from kipmesh.storage.fs import RealFileSystem
    from kipmesh.storage.snapshot_file import SnapshotReader

    if not file.is_file():
        raise CommandError(f"{file}: no such file")
    is_readable = print_dump(file, print_records=not batches_only, is_metadata=True, as_json=as_json)
    if is_readable:
        try:
            SnapshotReader(RealFileSystem().open(str(file)), file.name).check()
        except CorruptRecordError as error:
            raise CommandError(error.message) from None
    else:
        raise typer.Exit(1)
