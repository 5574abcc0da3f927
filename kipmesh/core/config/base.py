"""Base of configuration models. The field `log_segment_bytes` is Kafka's key `log.segment.bytes`.

Models are frozen. Unknown keys and invalid values raise `InvalidConfigError` with one line that names the key.
`kipmesh.node.settings` reads values from files, environment and command line. The enums are the numbers in Kafka's
configuration requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kipmesh.core.config.validation import error_text
from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


StrList = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Kafka's LIST type: comma-separated values."""


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a pydantic validator that keeps the value, and fails if `check` raises ValueError."""

    def validate(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(validate)


Positive = Annotated[int, Field(ge=1, le=MAX_INT64)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_INT64)]
MinusOneOrMore = Annotated[int, Field(ge=-1, le=MAX_INT64)]
"""Ranges of Kafka's LONG."""
PositiveInt32 = Annotated[int, Field(ge=1, le=MAX_INT32)]
NotNegativeInt32 = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""Ranges of Kafka's INT."""


_WITH_UNDERSCORE = {"metadata_snapshot_min_changed_records_ratio": "metadata.snapshot.min.changed_records.ratio"}
"""Fields whose Kafka keys contain an underscore."""


def dotted(name: str) -> str:
    """Return Kafka's key for a field name, such as `log.segment.bytes` for `log_segment_bytes`."""
    return _WITH_UNDERSCORE.get(name) or name.replace("_", ".")


FOLLOWER_THROTTLED_RATE = "follower.replication.throttled.rate"
NO_THROTTLE = 2**63 - 1
"""Throttle rate without a limit, as in Kafka."""


class ResourceType(IntEnum):
    """Kafka's numbers for the resource types that have a configuration."""

    TOPIC = 2
    BROKER = 4


class ConfigSource(IntEnum):
    """Kafka's numbers for the sources of configuration values."""

    UNKNOWN = 0
    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5


class AlterOperation(IntEnum):
    """Kafka's numbers for the IncrementalAlterConfigs operations on a key."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Config(BaseModel):
    """Base of all configuration models: immutable; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=dotted,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return Kafka's keys of all fields, such as `log.segment.bytes`."""
        return tuple(dotted(name) for name in cls.model_fields)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the model for `values`: Kafka's key -> string or typed value. Other keys get their defaults.

        Raises InvalidConfigError (INVALID_CONFIG) for an unknown key, a missing required key or an invalid value.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            errors = error.errors()
            first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
            key = ".".join(str(part) for part in first["loc"][:1])
            if first["type"] == "extra_forbidden":
                text = f"unknown configuration key {key!r}{_suggestion(key, cls.keys())}"
            else:
                text = error_text(first, key, values.get(key))
            raise InvalidConfigError(text, key=key, value=values.get(key)) from None

    @classmethod
    @cache
    def limits(cls) -> Mapping[str, tuple[int, int]]:
        """Return Kafka's key -> (minimum, maximum), both inclusive, for integer keys with both limits."""
        limits = {}
        for name, field in cls.model_fields.items():
            minimum = [each.ge for each in field.metadata if hasattr(each, "ge")]
            maximum = [each.le for each in field.metadata if hasattr(each, "le")]
            if field.annotation is int and minimum and maximum:
                limits[dotted(name)] = (minimum[0], maximum[0])
        return limits

    def as_dict(self) -> dict[str, Any]:
        """Return Kafka's key -> typed value for all keys, including defaults."""
        return self.model_dump(by_alias=True)


def _suggestion(key: str, known: tuple[str, ...]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
