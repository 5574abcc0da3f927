"""What configurations belong to, where values come from, and how they are altered: the numbers that requests carry."""

from __future__ import annotations

from enum import IntEnum

FOLLOWER_THROTTLED_RATE = "follower.replication.throttled.rate"
NO_THROTTLE = 2**63 - 1
"""Kafka's rate for no limit."""


class ResourceType(IntEnum):
    """What a configuration belongs to."""

    TOPIC = 2
    BROKER = 4


class ConfigSource(IntEnum):
    """Where a configuration value is from."""

    UNKNOWN = 0
    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5


class AlterOperation(IntEnum):
    """What an alteration does with a key."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3
