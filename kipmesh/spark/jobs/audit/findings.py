"""What an audit finds: kinds, how grave each is, and one finding.

An error is what must not be, whatever happened to the nodes: damage within a log, and replicas that differ where they
must be equal. A warning is what a stop or a lag may leave, which the node mends by itself when it starts or catches up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

ERROR: Final = "error"
WARNING: Final = "warning"

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "divergence": (ERROR, "replicas differ where they must be equal"),
    "crc": (ERROR, "a batch has the wrong CRC"),
    "garbage": (ERROR, "bytes that are no batch"),
    "cut": (ERROR, "a segment that is not the last ends within a batch"),
    "gap": (ERROR, "offsets are missing: a segment, or part of one"),
    "overlap": (ERROR, "offsets come twice or go back"),
    "unreadable": (ERROR, "a file or folder cannot be read"),
    "snapshot_corrupt": (ERROR, "a snapshot has a wrong CRC, header or footer"),
    "snapshot_differs": (ERROR, "snapshots of one id have other records"),
    "snapshot_missing": (ERROR, "the log begins above 0 and no valid snapshot covers what is before it (630-06)"),
    "torn": (WARNING, "the log ends within a write; a start cuts it off"),
    "short_log": (WARNING, "the log ends below the replica's own checkpointed high watermark"),
    "missing_log": (WARNING, "a checkpoint names a log that has no folder"),
    "uncommitted": (WARNING, "replicas differ above what is committed; one of them truncates when it follows"),
    "other_topic": (WARNING, "logs of one name with other topic ids: the topic was made anew"),
    "bad_checkpoint": (WARNING, "a checkpoint cannot be read"),
    "snapshot_aside": (WARNING, "a snapshot that its replica has set aside"),
    "vanished": (WARNING, "a file went while the job ran"),
}
SCHEMA: Final = """severity string, kind string, replica string, other string, topic string, partition int,
 offset long, file string, position long, text string"""


class Finding(NamedTuple):
    """One finding, in the order of `SCHEMA`. `other` is the second replica of a difference."""

    kind: str
    replica: str
    topic: str | None
    partition: int | None
    offset: int | None
    file: str
    text: str
    position: int | None = None
    other: str | None = None

    @property
    def severity(self) -> str:
        """`ERROR` or `WARNING`."""
        return KINDS[self.kind][0]

    def row(self) -> dict[str, Any]:
        """For the Parquet and the summary."""
        return {"severity": self.severity, **self._asdict()}
