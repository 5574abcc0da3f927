"""`python -m bench.fencing`: what the design of KIP-630 saves, measured by the code that nodes use (630-18).

- One broker of 100 fails. What the active controller writes, what each replica writes and what is sent to 99 observers,
  by one event record and by a record for each partition; then what the leaders' proofs that follow cost.
- 100 MB of state that changes at 1 MB/s: what snapshots read and write, beside log compaction.

The network is counted, not driven: bytes of batches, and of the Fetch responses that carry them, once an observer.
Each part has a process of its own. Sizes of 1024 are MiB, as the seed's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.fencing_cost import measure_failure
from bench.images import BROKERS, PARTITIONS
from bench.state_change import LIMIT_BYTES, STATE_BYTES, compaction, measure_changes

MODULE = "bench.fencing"

KIB, MIB, MB = 1 << 10, 1 << 20, 1_000_000
QUICK = 50
"""By how much less `--quick` does."""
OBSERVERS = BROKERS - 1

Figures = dict[str, Any]


def size(value: float) -> str:
    """Bytes for people, with the units of the seed."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if value >= unit or (name == "KiB" and value >= KIB / 2):
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def seed_of(partitions: int, record_bytes: int) -> Figures:
    """The seed's sum: so many records of so many bytes, without anything around them."""
    return {
        "records": partitions,
        "record_bytes": record_bytes,
        "values_bytes": partitions * record_bytes,
        "values_sent_bytes": partitions * record_bytes * OBSERVERS,
    }


def _row(name: str, values: Sequence[object]) -> tuple[str, ...]:
    return (name, *["-" if value is None else value if isinstance(value, str) else f"{value:,}" for value in values])


def failure_rows(records: Figures, event: Figures) -> list[tuple[str, ...]]:
    """The first sum: the seed's figures and ours, of both ways."""
    columns = (seed_of(records["partitions"], 40), records, seed_of(1, 8), event)

    def sizes(key: str) -> list[str | None]:
        return [size(column[key]) if key in column else None for column in columns]

    def times(key: str) -> list[str | None]:
        return [f"{column[key]:,.1f} ms" if key in column else None for column in columns]

    proofs = [column.get("proofs") for column in columns]
    return [
        _row("records", [column["records"] for column in columns]),
        _row("bytes of a record", [f"{column['record_bytes']:.0f}" for column in columns]),
        _row("a replica writes, records alone", sizes("values_bytes")),
        _row("a replica writes, with batch framing", sizes("batch_bytes")),
        _row(f"sent to {OBSERVERS} observers, records alone", sizes("values_sent_bytes")),
        _row(f"sent to {OBSERVERS} observers, with batch framing", sizes("batch_sent_bytes")),
        _row(f"sent to {OBSERVERS} observers, as Fetch responses", sizes("responses_sent_bytes")),
        _row("leaders' proofs: records", [proof and proof["records"] for proof in proofs]),
        _row("leaders' proofs: with batch framing", [proof and size(proof["batch_bytes"]) for proof in proofs]),
        _row(
            f"leaders' proofs: sent to {OBSERVERS} observers",
            [proof and size(proof["responses_sent_bytes"]) for proof in proofs],
        ),
        _row("controller: deciding and encoding", times("decide_ms")),
        _row("each state machine: applying, in all", times("apply_ms")),
        _row("each state machine: longest step", times("longest_step_ms")),
    ]


def change_rows(changes: Figures) -> list[tuple[str, ...]]:
    """The second sum, as MB for each MB of change."""
    state, change = changes["snapshot_bytes"], changes["log_bytes"]
    measured = (
        changes["log_read_bytes"] / change,
        changes["snapshot_read_bytes"] / change,
        changes["log_written_bytes"] / change,
        changes["snapshot_written_bytes"] / change,
    )
    seed, ratio = compaction(STATE_BYTES, STATE_BYTES / 2), compaction(state, state)

    def rates(values: Sequence[float]) -> list[str]:
        return [f"{value:.2f} MB/s" for value in values]

    return [
        ("read from the head of the log, to apply", *rates([measured[0], 1, 1])),
        ("read to make a snapshot / map of offsets", *rates([measured[1], seed.map_read, ratio.map_read])),
        ("read to copy what lives", *rates([0, seed.copy_read, ratio.copy_read])),
        ("read, in all", *rates([measured[0] + measured[1], 1 + seed.read, 1 + ratio.read])),
        ("written to the log", *rates([measured[2], 1, 1])),
        ("written as snapshot / copied segments", *rates([measured[3], seed.written, ratio.written])),
    ]


FAILURE_HEAD = ("", "by partition: seed", "measured", "by event: seed", "measured")
CHANGE_HEAD = ("at 1 MB/s of change", "snapshots: measured", "compaction: seed's sum", "compaction: computed")


def as_tables(figures: Mapping[str, Figures], *, markdown: bool) -> str:
    """Both sums, with a sentence before each."""
    failure, changes = figures["by_event"], figures["changes"]
    return "\n\n".join(
        [
            f"{failure['all_partitions']:,} partitions x 3 on {BROKERS} brokers; a broker with "
            f"{failure['partitions']:,} of them fails",
            harness.table(FAILURE_HEAD, failure_rows(figures["by_partition"], failure), markdown=markdown),
            f"{changes['snapshot_bytes'] / MB:.1f} MB of state; {changes['log_bytes'] / MB:.1f} MB of changes in "
            f"{changes['records']:,} records, by which {changes['snapshots']} snapshots were due. Compaction of "
            f"{STATE_BYTES / MB:.0f} MB after {STATE_BYTES / MB / 2:.0f} MB of changes (the seed's sum), and when half "
            "of the log is changes (computed: what a minimum clean ratio of 50% says)",
            harness.table(CHANGE_HEAD, change_rows(changes), markdown=markdown),
        ]
    )


def run_step(step: str, options: argparse.Namespace) -> Figures:
    """One part, in this process."""
    if step == "changes":
        share = QUICK if options.quick else 1
        with tempfile.TemporaryDirectory() as folder:
            return measure_changes(Path(folder), STATE_BYTES // share, LIMIT_BYTES // share)
    return measure_failure(options.topics, by_event=step == "by_event")


def main(given: Sequence[str]) -> int:
    """Run all parts and print the figures."""
    parser = harness.parser(
        MODULE, __doc__, f"a {QUICK}th of it: seconds instead of a minute", "tables for docs/benchmarks.md"
    )
    parser.add_argument(
        "--topics", type=int, default=None, help="with 10 partitions each (100,000; 2,000 with --quick)"
    )
    parser.add_argument("--step", choices=("by_event", "by_partition", "changes"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    harness.fill(options, {"topics": 100_000 // QUICK}, {"topics": 100_000})
    if not 100 <= options.topics <= 1_000_000:
        parser.error("topics from 100 to 1,000,000")
    if options.step:
        sys.stdout.write(json.dumps(run_step(options.step, options)))
        return 0
    figures: dict[str, Figures] = {}

    def measure() -> None:
        for step in ("by_event", "by_partition", "changes"):
            harness.say(MODULE, f"{step.replace('_', ' ')} ...")
            figures[step] = harness.in_process(MODULE, *given, "--step", step)

    about = {"topics": options.topics, "observers": OBSERVERS, "partitions_of_a_topic": PARTITIONS}
    return harness.run(
        MODULE,
        options,
        measure,
        figures=lambda: {**about, **figures},
        text=lambda: as_tables(figures, markdown=options.markdown) if "changes" in figures else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
