"""Which sessions have a partition, and how they learn that it changed (227-10).

A partition's owner calls `changed(key, ...)`; that costs O(sessions of that partition). Sessions subscribe under the
key that they use themselves: topic id and partition, or topic name and partition. The two kinds are kept apart, so that
an id that happens to be the bytes of a name is not taken for it.

Keys are flat bytes and not tuples: with 100,000 partitions they are most of a session's memory, and no work for the
garbage collector.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

Key: TypeAlias = bytes
"""Topic id (or UTF-8 name) and partition, as `partition_key` makes it."""

_FEW = 4


def partition_key(topic: bytes, partition: int) -> Key:
    """The key of a partition of a topic id, or of an encoded name; any int32 is a partition here."""
    return topic + partition.to_bytes(4, "big", signed=True)


def name_bytes(topic: str) -> bytes:
    """A name as it stands in keys."""
    return topic.encode("utf-8", "surrogatepass")


def topic_of(key: Key) -> bytes:
    """The topic id, or the encoded name."""
    return key[:-4]


def name_of(key: Key) -> str:
    """The name, if the key has one."""
    return key[:-4].decode("utf-8", "surrogatepass")


def partition_of(key: Key) -> int:
    """The partition's number."""
    return int.from_bytes(key[-4:], "big", signed=True)


class Watcher(Protocol):
    """Who is told, by identity: a session."""

    def mark(self, key: Key, change: int) -> None:
        """The partition changed. Only remembers it: nothing is read, sent or unsubscribed in this call."""
        ...


_Watchers: TypeAlias = "Watcher | tuple[Watcher, ...] | dict[Watcher, None]"
"""One watcher, a few, or many: most partitions have as many as they have followers."""


def _subscribe(table: dict[Key, _Watchers], key: Key, watcher: Watcher) -> None:
    present = table.get(key)
    if present is None:
        table[key] = watcher
    elif isinstance(present, dict):
        present[watcher] = None
    elif isinstance(present, tuple):
        if watcher not in present:
            more = (*present, watcher)
            table[key] = dict.fromkeys(more) if len(more) > _FEW else more
    elif present is not watcher:
        table[key] = (present, watcher)


def _unsubscribe(table: dict[Key, _Watchers], key: Key, watcher: Watcher) -> None:
    present = table.get(key)
    if present is None:
        return
    if isinstance(present, dict):
        present.pop(watcher, None)
        if not present:
            del table[key]
    elif isinstance(present, tuple):
        left = tuple([one for one in present if one is not watcher])
        table[key] = left[0] if len(left) == 1 else left
    elif present is watcher:
        del table[key]


class Subscriptions:
    """Partitions to the sessions that have them. Invariant: no key without a watcher."""

    __slots__ = ("_by_id", "_by_name")

    def __init__(self) -> None:
        self._by_id: dict[Key, _Watchers] = {}
        self._by_name: dict[Key, _Watchers] = {}

    def __len__(self) -> int:
        return len(self._by_id) + len(self._by_name)

    def changed(self, key: Key, topic: str, change: int) -> None:
        """Something happened to a partition: `key` is that of its topic id, `topic` its topic's name.

        `change` are flags: LOG_END, HIGH_WATERMARK, LOG_START, LEADERSHIP.
        """
        watchers = self._by_id.get(key)
        if watchers is not None:
            _tell(watchers, key, change)
        if self._by_name:
            key = topic.encode() + key[-4:]
            watchers = self._by_name.get(key)
            if watchers is not None:
                _tell(watchers, key, change)

    def subscribe(self, key: Key, watcher: Watcher, by_id: bool) -> None:
        """Tell `watcher` of the partition from now on."""
        _subscribe(self._by_id if by_id else self._by_name, key, watcher)

    def unsubscribe(self, key: Key, watcher: Watcher, by_id: bool) -> None:
        """Tell it no more."""
        _unsubscribe(self._by_id if by_id else self._by_name, key, watcher)


def _tell(watchers: _Watchers, key: Key, change: int) -> None:
    if isinstance(watchers, tuple | dict):
        for watcher in watchers:
            watcher.mark(key, change)
    else:
        watchers.mark(key, change)
