"""Partition changes and the sessions that they affect (227-10).

The owner of a partition calls `changed(key, ...)`, which costs O(sessions that contain the partition). Sessions
subscribe by topic id and partition, or by topic name and partition. The two kinds of key are kept apart, because an id
may equal the bytes of a name.

Keys are flat bytes instead of tuples: with 100,000 partitions they dominate a session's memory, and the garbage
collector does not traverse them.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

Key: TypeAlias = bytes
"""Topic id or UTF-8 topic name, followed by the partition. See `partition_key`."""

_TUPLE_MAX = 4


def partition_key(topic: bytes, partition: int) -> Key:
    """Return the key of a partition; `topic` is a topic id or encoded name, `partition` any int32."""
    return topic + partition.to_bytes(4, "big", signed=True)


def name_bytes(topic: str) -> bytes:
    """Return a topic name as it is encoded in keys."""
    return topic.encode("utf-8", "surrogatepass")


def topic_of(key: Key) -> bytes:
    """Return the topic id or encoded topic name of a key."""
    return key[:-4]


def name_of(key: Key) -> str:
    """Return the topic name of a key that was made from a name."""
    return key[:-4].decode("utf-8", "surrogatepass")


def partition_of(key: Key) -> int:
    """Return the partition number of a key."""
    return int.from_bytes(key[-4:], "big", signed=True)


class Subscriber(Protocol):
    """A session or fetch that is notified of partition changes. Compared by identity."""

    def mark(self, key: Key, change: int) -> None:
        """Record that the partition changed. Must not read, respond or unsubscribe during the call."""
        ...


_Subscribers: TypeAlias = "Subscriber | tuple[Subscriber, ...] | dict[Subscriber, None]"
"""One subscriber, a tuple of a few, or a dict of many: most partitions have as many as they have followers."""


def _subscribe(table: dict[Key, _Subscribers], key: Key, subscriber: Subscriber) -> None:
    current = table.get(key)
    if current is None:
        table[key] = subscriber
    elif isinstance(current, dict):
        current[subscriber] = None
    elif isinstance(current, tuple):
        if subscriber not in current:
            extended = (*current, subscriber)
            table[key] = dict.fromkeys(extended) if len(extended) > _TUPLE_MAX else extended
    elif current is not subscriber:
        table[key] = (current, subscriber)


def _unsubscribe(table: dict[Key, _Subscribers], key: Key, subscriber: Subscriber) -> None:
    current = table.get(key)
    if current is None:
        return
    if isinstance(current, dict):
        current.pop(subscriber, None)
        if not current:
            del table[key]
    elif isinstance(current, tuple):
        remaining = tuple([other for other in current if other is not subscriber])
        table[key] = remaining[0] if len(remaining) == 1 else remaining
    elif current is subscriber:
        del table[key]


class Subscriptions:
    """Partitions and the subscribers of each. Invariant: every key has at least one subscriber."""

    __slots__ = ("_by_id", "_by_name")

    def __init__(self) -> None:
        self._by_id: dict[Key, _Subscribers] = {}
        self._by_name: dict[Key, _Subscribers] = {}

    def __len__(self) -> int:
        return len(self._by_id) + len(self._by_name)

    def changed(self, key: Key, topic: str, change: int) -> None:
        """Notify all subscribers of a partition, given the key of its topic id and its topic name.

        `change` is a combination of LOG_END, HIGH_WATERMARK, LOG_START and LEADERSHIP.
        """
        subscribers = self._by_id.get(key)
        if subscribers is not None:
            _notify(subscribers, key, change)
        if self._by_name:
            key = topic.encode() + key[-4:]
            subscribers = self._by_name.get(key)
            if subscribers is not None:
                _notify(subscribers, key, change)

    def subscribe(self, key: Key, subscriber: Subscriber, by_id: bool) -> None:
        """Notify `subscriber` of changes of the partition; `by_id`: `key` has a topic id instead of a name."""
        _subscribe(self._by_id if by_id else self._by_name, key, subscriber)

    def unsubscribe(self, key: Key, subscriber: Subscriber, by_id: bool) -> None:
        """Stop notifying `subscriber`. Does nothing if it is not subscribed."""
        _unsubscribe(self._by_id if by_id else self._by_name, key, subscriber)


def _notify(subscribers: _Subscribers, key: Key, change: int) -> None:
    if isinstance(subscribers, tuple | dict):
        for subscriber in subscribers:
            subscriber.mark(key, change)
    else:
        subscribers.mark(key, change)
