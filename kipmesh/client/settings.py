"""Configuration as keyword arguments: dotted keys (`**{"linger.ms": 5}`) or with underscores (`linger_ms=5`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kipmesh.core.config import Config

ConfigT = TypeVar("ConfigT", bound=Config)


def parse_config(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """The configuration that `values` say; raises InvalidConfigError."""
    return kind.parse({key.replace("_", "."): value for key, value in values.items()})
