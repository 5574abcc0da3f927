"""What the options of reads and of writes have in common: names, booleans, numbers, times, the client's settings.

Every function names the option in its error (`InvalidOptionError`). Nothing here imports pyspark or the client.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kipmesh.core.config.base import Config
from kipmesh.core.errors import InvalidConfigError
from kipmesh.spark.offsets import InvalidOptionError

CLIENT_PREFIX: Final = "kafka."
BOOTSTRAP: Final = "kafka.bootstrap.servers"

# Spark's own units of a time with a unit; without one it is ms.
_UNITS_MS: Final[Mapping[str, float]] = {
    "us": 0.001,
    "ms": 1,
    "": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def canonical(raw: Mapping[str, str], known: Iterable[str], refused: Mapping[str, str]) -> dict[str, str]:
    """Names in their documented spelling, which errors then use; refused and unknown ones raise."""
    known = tuple(known)
    spelling = {name.lower(): name for name in (*known, *refused)}
    given: dict[str, str] = {}
    for name, value in raw.items():
        spelled = spelling.get(name.lower(), name)
        if spelled in refused:
            raise InvalidOptionError(spelled, f"is not supported by kipmesh: {refused[spelled]}")
        if spelled not in known:
            spelled = name.lower()
            if not spelled.startswith(CLIENT_PREFIX):
                raise InvalidOptionError(name, f"is unknown; known are {', '.join(known)} and {CLIENT_PREFIX}*")
        given[spelled] = str(value).strip()
    return given


def parse_bootstrap(given: Mapping[str, str]) -> str:
    """`kafka.bootstrap.servers`, which must be there: host:port,host:port."""
    servers = given.get(BOOTSTRAP, "")
    if not servers:
        raise InvalidOptionError(BOOTSTRAP, "must be given, as host:port,host:port")
    for server in servers.split(","):
        host, colon, port = server.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidOptionError(BOOTSTRAP, f"wants host:port,host:port and not {server.strip()!r}")
    return servers


def client_settings(
    given: Mapping[str, str], kind: type[Config], defaults: Mapping[str, str], *, but: Collection[str] = ()
) -> dict[str, str]:
    """The client's settings: the kafka.* options without the prefix, over `defaults`; checked as `kind` has them."""
    config = dict(defaults)
    for name, value in given.items():
        if name.startswith(CLIENT_PREFIX) and name != BOOTSTRAP and name not in but:
            config[name.removeprefix(CLIENT_PREFIX)] = value
    try:
        kind.parse(config)
    except InvalidConfigError as error:
        named = re.search(r"key '([^']+)'", str(error))
        key = named.group(1) if named else "*"  # of several keys: the text names them
        raise InvalidOptionError(f"{CLIENT_PREFIX}{key}", f"is refused by the client: {error}") from None
    return config


def parse_bool(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """true or false, in any case."""
    match given.get(name, str(default)).lower():
        case "true":
            return True
        case "false":
            return False
        case value:
            raise InvalidOptionError(name, f"wants true or false and not {value!r}")


def parse_positive(given: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0, or None when it is not given."""
    if name not in given:
        return None
    value = given[name]
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise InvalidOptionError(name, f"wants a positive whole number and not {value!r}")
    return int(value)


def parse_duration_ms(given: Mapping[str, str], name: str, *, default_ms: int) -> int:
    """A time as Spark writes it, 500ms, 30s, 15m, 1h or a number of ms; at least 0."""
    if name not in given:
        return default_ms
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", given[name].lower())
    if found is None or found.group(2) not in _UNITS_MS:
        raise InvalidOptionError(name, f"wants a time such as 500ms, 30s, 15m or 1h and not {given[name]!r}")
    return int(int(found.group(1)) * _UNITS_MS[found.group(2)])
