"""What `python -m bench.groups` writes down: it finds what must not be, and takes what may be."""

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


def test_a_run_in_order_has_no_problems() -> None:
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


def test_two_owners_in_a_generation_are_found() -> None:
    ledger = Ledger(2)
    ledger.assigned(1, "a", [0])
    ledger.assigned(1, "a", [0])
    ledger.assigned(2, "b", [0])
    ledger.assigned(2, "a", [0, 1])
    assert ledger.verdicts([]) == ["partition 0, generation 2: b and a own it"]


def test_what_is_missing_doubled_or_read_again_without_a_reason_is_found() -> None:
    ledger = Ledger(1)
    ledger.read(1, 0, 0, b"0", 1.0)
    ledger.ended(1, [0], End.COMMITTED)
    ledger.read(2, 0, 0, b"0", 2.0)
    ledger.read(2, 0, 1, b"0", 2.0)
    doubled, missing, again = ledger.verdicts([(0, 0), (0, 1), (0, 2)])
    assert doubled == "b'0' is at (0, 0) and at (0, 1)"
    assert "1 acknowledged records were not read, for example [(0, 2)]" in missing
    assert again.startswith("1 records were read again")


@pytest.mark.parametrize("end", [End.LOST, End.UNCOMMITTED])
def test_who_could_not_commit_is_a_reason(end: End) -> None:
    ledger = Ledger(1)
    ledger.read(1, 0, 0, b"0", 1.0)
    ledger.read(2, 0, 0, b"0", 2.0)
    ledger.ended(1, [0], end)  # it heard of that later
    assert ledger.repeats() == {end: 1}


def test_who_reads_on_after_its_loss_is_a_reason_too() -> None:
    ledger = Ledger(1)
    ledger.read(2, 0, 0, b"0", 1.0)
    ledger.read(1, 0, 0, b"0", 2.0)
    ledger.ended(1, [0], End.LOST)
    assert ledger.repeats() == {End.LOST: 1}


def generation(number: int, **owned: list[int]) -> Record:
    members = [
        MemberMetadata(name, assignment=encode_assignment(Assignment(by_topic([("t", one) for one in partitions]))))
        for name, partitions in owned.items()
    ]
    return GroupRecord(GroupMetadataKey("g"), GroupMetadataValue("consumer", number, "range", "a", 0, members))


def offset(partition: int, value: int, topic: str = "t") -> Record:
    return OffsetRecord(OffsetCommitKey("g", topic, partition), OffsetCommitValue(value))


def test_the_log_of_a_group() -> None:
    foreign = GroupRecord(GroupMetadataKey("other"), GroupMetadataValue(generation=99))
    fine = [generation(1, a=[0, 1]), offset(0, 5), foreign, generation(2, a=[0], b=[1]), offset(0, 5), generation(3)]
    assert facts_of_log("g", "t", fine) == (3, 2, 2, [])
    wrong = [generation(2, a=[0], b=[0, 1]), offset(0, 5), offset(0, 4), offset(0, 1, "u"), generation(2)]
    assert facts_of_log("g", "t", wrong).problems == [
        "generation 2 assigns twice: [('t', 0)]",
        "the offset of partition 0 went back: 5 to 4",
        "generation 2 is in the log after 2",
    ]


def test_the_command_line() -> None:
    assert groups.arguments([]).members == 50
    assert groups.arguments(["--quick", "--members", "3"]).members == 3
    for wrong in (["--members", "0"], ["--seconds", "10", "--kills", "9"], ["--session", "1"]):
        with pytest.raises(SystemExit):
            groups.arguments(wrong)
