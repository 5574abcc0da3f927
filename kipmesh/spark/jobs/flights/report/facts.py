"""What a run of the demo knows about itself, for the page and for `summary.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kipmesh.spark.jobs.report import Check, Stage


class NodeFacts(NamedTuple):
    """One process of the mesh."""

    name: str
    role: str
    rack: str


class PartitionFacts(NamedTuple):
    """One partition at the end of the run; the digest is that of the log's bytes on every replica."""

    partition: int
    records: int
    size_bytes: int
    high_watermark: int
    replicas: tuple[str, ...]
    identical: bool
    sha256: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run. Rates are per second of the stage that they belong to; bytes are those of keys and values."""

    topic: str
    replication_factor: int
    records: int
    payload_bytes: int
    produce_seconds: float
    stream_seconds: float
    stream_batches: int
    total_seconds: float
    read_records_per_second: float
    stages: tuple[Stage, ...]
    nodes: tuple[NodeFacts, ...]
    partitions: tuple[PartitionFacts, ...]
    checks: tuple[Check, ...]
    sample_url: str
    sample_lines: tuple[str, ...] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether every proof holds."""
        return all(check.passed for check in self.checks)

    @property
    def produce_records_per_second(self) -> float:
        """Records acknowledged by all replicas, a second."""
        return self.records / self.produce_seconds if self.produce_seconds else 0.0

    @property
    def produce_mb_per_second(self) -> float:
        """Megabytes (10^6) of keys and values, a second."""
        return self.payload_bytes / self.produce_seconds / 1e6 if self.produce_seconds else 0.0

    @property
    def stream_records_per_second(self) -> float:
        """Records read, parsed, joined and written by the structured stream, a second."""
        return self.records / self.stream_seconds if self.stream_seconds else 0.0
