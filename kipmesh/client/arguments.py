"""Type checks at the public methods of the clients. Their errors name the argument, the expected form and the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, TypeVar

from kipmesh.client.types import TopicPartition

T = TypeVar("T")
TIMESTAMP = "an integer of milliseconds since 1970"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1: `1 record`, `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_text(argument: str, value: object) -> None:
    """Raise TypeError unless the value is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be str, got {value!r}")


def check_integer(argument: str, value: object, form: str = "int") -> None:
    """Raise TypeError unless the value is a Python or NumPy integer. `form` describes it in the message."""
    if not isinstance(value, int | SupportsIndex):
        raise TypeError(f"{argument} must be {form}, got {value!r}")


def listed(argument: str, values: Iterable[T], form: str) -> list[T]:
    """Return the values as a list. Raises TypeError for str, bytes and values that are not iterable.

    `form` describes the elements in the message.
    """
    if isinstance(values, str):
        raise TypeError(f"{argument} must be a list of {form}, got the string {values!r}")
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{argument} must be a list of {form}, got {values!r}")
    return list(values)


def names(argument: str, values: Iterable[str], form: str = "names") -> list[str]:
    """Return the names as a list. Raises TypeError unless all are str. `argument` is a plural, such as `topics`."""
    found = listed(argument, values, form)
    for name in found:
        check_text(argument.removesuffix("s"), name)
    return found


def instances(argument: str, values: Iterable[T], kind: type[T]) -> list[T]:
    """Return the values as a list. Raises TypeError unless all are instances of `kind`."""
    found = listed(argument, values, kind.__name__)
    for value in found:
        if not isinstance(value, kind):
            raise TypeError(f"{argument} must be a list of {kind.__name__}, got the element {value!r}")
    return found


def integers(argument: str, values: Iterable[int], form: str) -> tuple[int, ...]:
    """Return the integers as a tuple. Raises TypeError unless all are integers. `argument` is a plural."""
    found = listed(argument, values, form)
    for value in found:
        check_integer(argument.removesuffix("s"), value)
    return tuple(found)


def mapping(argument: str, value: Any, form: str) -> Mapping[Any, Any]:
    """Return `value` unchanged. Raises TypeError unless it is a mapping; `form` describes it in the message."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument} must be a dict of {form}, got {value!r}")
    return value


def topic_partition(value: Any, expected: str = "partition must be a (topic, partition) pair, got") -> TopicPartition:
    """Return a (topic, partition) pair as TopicPartition. Raises TypeError for any other value.

    `expected` begins the message for a value that is not a pair.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{expected} {value!r}")
    check_text("topic", value[0])
    check_integer("partition", value[1])
    return TopicPartition(*value)


def topic_partitions(values: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """Convert the argument `partitions`, (topic, partition) pairs, to a list of TopicPartition. Raises TypeError."""
    form = "(topic, partition) pairs"
    expected = f"partitions must be a list of {form}, got the element"
    return [topic_partition(value, expected) for value in listed("partitions", values, form)]


def by_partition(argument: str, values: Any, form: str = "int") -> dict[TopicPartition, int]:
    """Return a mapping of (topic, partition) to integers, with TopicPartition as keys. Raises TypeError.

    `argument` is a plural, such as `offsets`. `form` describes the integers in the message.
    """
    noun = argument.removesuffix("s")
    pairs = mapping(argument, values, f"(topic, partition) to {noun}")
    for value in pairs.values():
        check_integer(noun, value, form)
    expected = f"{argument} must be a dict of (topic, partition) to {noun}, got the key"
    return {topic_partition(key, expected): value for key, value in pairs.items()}
