"""The ledger of `python -m bench.groups`: it reports violations and accepts permitted behaviour."""

from __future__ import annotations

import pytest

from bench import groups
from bench.group_ledger import End, Ledger, facts_of_log
from kipmesh.core.group.records import (
    Assignment,
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
    OffsetRecord,
    Record,
    by_topic,
    encode_assignment,
)


def test_ledger_reports_no_problems_for_ordered_run() -> None:
    ledger = Ledger(2)
    ledger.assigned(1, "a", [0, 1])
    ledger.assigned(2, "a", [0])
    ledger.assigned(2, "b", [1])
    ledger.read(1, 0, 0, b"0", 10.0)
    ledger.read(1, 1, 0, b"1", 10.0)
    ledger.ended(1, [1], End.COMMITTED)
    ledger.read(2, 1, 1, b"2", 14.0)
    ledger.read(1, 0, 1, b"3", 11.0)
    ledger.ended(1, [0], End.DIED)
    ledger.read(2, 0, 1, b"3", 15.0)
    assert ledger.verdicts([(0, 0), (0, 1), (1, 0), (1, 1)]) == []
    assert ledger.repeats() == {End.DIED: 1}
    assert ledger.pauses() == (4.0, 2.5, 1)
    assert ledger.reads == 5


def test_ledger_reports_two_owners_in_a_generation() -> None:
    ledger = Ledger(2)
    ledger.assigned(1, "a", [0])
    ledger.assigned(1, "a", [0])
    ledger.assigned(2, "b", [0])
    ledger.assigned(2, "a", [0, 1])
    assert ledger.verdicts([]) == ["partition 0, generation 2: owned by b and a"]


def test_ledger_reports_missing_duplicate_and_unexplained_repeated_reads() -> None:
    ledger = Ledger(1)
    ledger.read(1, 0, 0, b"0", 1.0)
    ledger.ended(1, [0], End.COMMITTED)
    ledger.read(2, 0, 0, b"0", 2.0)
    ledger.read(2, 0, 1, b"0", 2.0)
    doubled, missing, again = ledger.verdicts([(0, 0), (0, 1), (0, 2)])
    assert doubled == "b'0' is at (0, 0) and at (0, 1)"
    assert "1 acknowledged records were not read, e.g. [(0, 2)]" in missing
    assert again.startswith("1 records were read again")


@pytest.mark.parametrize("end", [End.LOST, End.UNCOMMITTED])
def test_ledger_accepts_repeated_reads_after_failed_commit(end: End) -> None:
    ledger = Ledger(1)
    ledger.read(1, 0, 0, b"0", 1.0)
    ledger.read(2, 0, 0, b"0", 2.0)
    ledger.ended(1, [0], end)  # The end is recorded after the repeated read.
    assert ledger.repeats() == {end: 1}


def test_ledger_accepts_reads_after_lost_membership() -> None:
    ledger = Ledger(1)
    ledger.read(2, 0, 0, b"0", 1.0)
    ledger.read(1, 0, 0, b"0", 2.0)
    ledger.ended(1, [0], End.LOST)
    assert ledger.repeats() == {End.LOST: 1}


def generation(number: int, **owned: list[int]) -> Record:
    members = [
        MemberMetadata(
            name, assignment=encode_assignment(Assignment(by_topic([("t", partition) for partition in partitions])))
        )
        for name, partitions in owned.items()
    ]
    return GroupRecord(GroupMetadataKey("g"), GroupMetadataValue("consumer", number, "range", "a", 0, members))


def offset(partition: int, value: int, topic: str = "t") -> Record:
    return OffsetRecord(OffsetCommitKey("g", topic, partition), OffsetCommitValue(value))


def test_facts_of_log_report_double_assignments_and_regressions() -> None:
    foreign = GroupRecord(GroupMetadataKey("other"), GroupMetadataValue(generation=99))
    fine = [generation(1, a=[0, 1]), offset(0, 5), foreign, generation(2, a=[0], b=[1]), offset(0, 5), generation(3)]
    assert facts_of_log("g", "t", fine) == (3, 2, 2, [])
    wrong = [generation(2, a=[0], b=[0, 1]), offset(0, 5), offset(0, 4), offset(0, 1, "u"), generation(2)]
    assert facts_of_log("g", "t", wrong).problems == [
        "generation 2 assigns partitions twice: [('t', 0)]",
        "the committed offset of partition 0 decreased from 5 to 4",
        "generation 2 follows 2 in the log",
    ]


def test_group_benchmark_arguments_are_checked() -> None:
    assert groups.arguments([]).members == 50
    assert groups.arguments(["--quick", "--members", "3"]).members == 3
    for wrong in (["--members", "0"], ["--seconds", "10", "--kills", "9"], ["--session", "1"]):
        with pytest.raises(SystemExit):
            groups.arguments(wrong)
