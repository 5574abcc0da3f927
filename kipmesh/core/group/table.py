"""Groups and committed offsets of one partition of `__consumer_offsets`.

Invariants: the table is a function of the records in their order; a group is in it while it has a generation or an
offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kipmesh.core.group.records import GroupMetadataValue, OffsetCommitKey, OffsetCommitValue, OffsetRecord, Record

TopicPartition = tuple[str, int]
_NO_OFFSETS: Mapping[TopicPartition, OffsetCommitValue] = {}


@dataclass(slots=True, repr=False)
class GroupTable:
    """Groups and committed offsets of one partition of `__consumer_offsets`, replayed from its records."""

    groups: dict[str, GroupMetadataValue] = field(default_factory=dict, init=False)
    """Group id -> last generation."""
    offset_count: int = field(default=0, init=False)
    _offsets: dict[str, dict[TopicPartition, OffsetCommitValue]] = field(default_factory=dict, init=False)

    def replay(self, record: Record) -> None:
        """Apply the next record of the log. A tombstone removes its group or offset, if any."""
        if isinstance(record, OffsetRecord):
            self._replay_offset(record.key, record.value)
        elif record.value is None:
            self.groups.pop(record.key.group, None)
        else:
            self.groups[record.key.group] = record.value

    def _replay_offset(self, key: OffsetCommitKey, value: OffsetCommitValue | None) -> None:
        place = (key.topic, key.partition)
        if value is not None:
            offsets = self._offsets.setdefault(key.group, {})
            self.offset_count += place not in offsets
            offsets[place] = value
            return
        offsets = self._offsets.get(key.group, {})
        if offsets.pop(place, None) is not None:
            self.offset_count -= 1
            if not offsets:
                del self._offsets[key.group]

    def __contains__(self, group_id: str) -> bool:
        return group_id in self.groups or group_id in self._offsets

    def group_ids(self) -> list[str]:
        """Return the ids of all groups, including those with offsets only."""
        return [*self.groups, *(group for group in self._offsets if group not in self.groups)]

    def offsets(self, group_id: str) -> Mapping[TopicPartition, OffsetCommitValue]:
        """Return the group's committed offsets by (topic, partition); empty for an unknown group."""
        return self._offsets.get(group_id, _NO_OFFSETS)

    def committed(self) -> Iterator[tuple[str, TopicPartition, int]]:
        """Yield (group id, (topic, partition), offset) of all committed offsets. Safe while another thread calls
        `replay`."""
        for group_id, offsets in list(self._offsets.items()):
            for place, value in list(offsets.items()):
                yield group_id, place, value.offset
