"""Configuration as frozen, validated values: a field `log_segment_bytes` is Kafka's key `log.segment.bytes`.

Unknown keys and bad values raise `InvalidConfigError` with one line that names the key. Where the values come from
(file, environment, command line) is the business of `kipmesh.node.settings`. The enums are the numbers that requests
about configurations carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


StrList = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Kafka's list type: values separated by commas."""


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """A validator that keeps a value for which `check` does not raise ValueError."""

    def keep(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(keep)


Positive = Annotated[int, Field(ge=1, le=MAX_INT64)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_INT64)]
MinusOneOrMore = Annotated[int, Field(ge=-1, le=MAX_INT64)]
"""What Kafka has as a LONG."""
PositiveInt32 = Annotated[int, Field(ge=1, le=MAX_INT32)]
NotNegativeInt32 = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""And as an INT."""


_WITH_UNDERSCORE = {"metadata_snapshot_min_changed_records_ratio": "metadata.snapshot.min.changed_records.ratio"}
"""Fields whose keys have an underscore at Kafka's."""


def dotted(name: str) -> str:
    """The key of a field."""
    return _WITH_UNDERSCORE.get(name) or name.replace("_", ".")


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


class Config(BaseModel):
    """Base of all configurations: immutable, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=dotted,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every key that this configuration knows, dotted."""
        return tuple(dotted(name) for name in cls.model_fields)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """From dotted keys to values (strings or typed); raises InvalidConfigError."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            errors = error.errors()
            first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
            key = ".".join(str(part) for part in first["loc"][:1])
            if first["type"] == "extra_forbidden":
                raise InvalidConfigError(f"unknown configuration key {key!r}{_suggestion(key, cls.keys())}") from None
            if first["type"] == "missing":
                raise InvalidConfigError(f"configuration key {key!r} is required") from None
            given = values.get(key)
            where = f"configuration key {key!r}: {given!r}: " if key else ""
            raise InvalidConfigError(where + first["msg"] + cls._range(key)) from None

    @classmethod
    def _range(cls, key: str) -> str:
        limits = cls.limits().get(key)
        return "" if limits is None else f" (a whole number from {limits[0]} to {limits[1]})"

    @classmethod
    @cache
    def limits(cls) -> Mapping[str, tuple[int, int]]:
        """The least and the largest number of each key that is a whole one between two."""
        found = {}
        for name, field in cls.model_fields.items():
            least = [each.ge for each in field.metadata if hasattr(each, "ge")]
            most = [each.le for each in field.metadata if hasattr(each, "le")]
            if field.annotation is int and least and most:
                found[dotted(name)] = (least[0], most[0])
        return found

    def as_dict(self) -> dict[str, Any]:
        """Dotted keys to typed values."""
        return self.model_dump(by_alias=True)


def _suggestion(key: str, known: tuple[str, ...]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
