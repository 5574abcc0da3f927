"""`kipmesh snapshot`: what is in a snapshot of the metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kipmesh.cli.common import AsJson, CommandError, examples, make_app
from kipmesh.cli.log_commands import check_file, print_dump

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
    from kipmesh.storage.snapshot_file import SnapshotReader

    check_file(file)
    if not print_dump(file, print_records=not batches_only, is_metadata=True, as_json=as_json):
        raise typer.Exit(1)
    with file.open("rb") as stream:
        try:
            SnapshotReader(_ReadOnly(stream.fileno()), file.name).check()
        except CorruptRecordError as error:
            raise CommandError(error.message) from None


class _ReadOnly:
    """An open file that need not be ours to write: Apache Kafka makes its snapshots read-only."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_at(self, size: int, position: int) -> bytes:
        return os.pread(self._descriptor, size, position)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size
