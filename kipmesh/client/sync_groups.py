"""The blocking form of `admin_groups`."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from kipmesh.client import admin_groups as _groups
from kipmesh.client.admin_groups import CommittedOffset, GroupDescription, GroupListing, NewOffsets, ResetTo
from kipmesh.client.types import TopicPartition

T = TypeVar("T")


class _Portal(Protocol):
    """What a blocking client has."""

    @property
    def _client(self) -> _groups.GroupAdmin: ...

    def _call(self, work: Coroutine[Any, Any, T]) -> T: ...


class GroupAdmin:
    """The part of the blocking `AdminClient` that is about groups; see `kipmesh.client.AdminClient`."""

    def list_groups(self: _Portal, *, states: Collection[str] = (), types: Collection[str] = ()) -> list[GroupListing]:
        """The groups in one of these states and of one of these types, by id."""
        return self._call(self._client.list_groups(states=states, types=types))

    def describe_groups(self: _Portal, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        """State, coordinator and members of each group; one that there is not is Dead."""
        return self._call(self._client.describe_groups(group_ids))

    def list_group_offsets(
        self: _Portal, group_id: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """What the group has committed, of all partitions or of these."""
        return self._call(self._client.list_group_offsets(group_id, partitions))

    def alter_group_offsets(self: _Portal, group_id: str, offsets: NewOffsets) -> None:
        """Commit these offsets for a group that is empty."""
        self._call(self._client.alter_group_offsets(group_id, offsets))

    def reset_group_offsets(
        self: _Portal,
        group_id: str,
        partitions: Iterable[tuple[str, int]],
        to: ResetTo,
        value: int = 0,
        *,
        dry_run: bool = False,
    ) -> dict[TopicPartition, int]:
        """Put an empty group somewhere else in these partitions: the new offsets."""
        return self._call(self._client.reset_group_offsets(group_id, partitions, to, value, dry_run=dry_run))

    def delete_group_offsets(self: _Portal, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Forget what is committed for these partitions."""
        self._call(self._client.delete_group_offsets(group_id, partitions))

    def delete_groups(self: _Portal, group_ids: Iterable[str]) -> None:
        """Delete empty groups and their offsets."""
        self._call(self._client.delete_groups(group_ids))
