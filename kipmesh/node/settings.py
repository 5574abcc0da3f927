"""Where a process's configuration comes from: a properties file, then the environment, then `--config`.

A later source wins over an earlier one. Environment variables are `KIPMESH_CONFIG_` + the key in upper case with
dots as underscores. An unknown key or a bad value, in whichever source, is an `InvalidConfigError` with one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from kipmesh.core.config.base import Config
from kipmesh.core.errors import InvalidConfigError

ENVIRONMENT_PREFIX = "KIPMESH_CONFIG_"
FILE_BYTES_MAX = 1 << 20

C = TypeVar("C", bound=Config)


def load(
    config_type: type[C], *, file: Path | None, environment: Mapping[str, str], overrides: Sequence[str] = ()
) -> C:
    """The configuration of a process; raises InvalidConfigError."""
    values: dict[str, str] = {}
    if file is not None:
        values |= read_properties(file)
    values |= from_environment(environment, config_type.keys())
    values |= from_overrides(overrides)
    return config_type.parse(values)


def read_properties(file: Path) -> dict[str, str]:
    """Keys and values of a properties file; raises InvalidConfigError."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
        text = raw.decode()
    except OSError as error:
        raise InvalidConfigError(f"configuration file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfigError(f"configuration file {file}: not UTF-8") from None
    if len(raw) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"configuration file {file}: larger than {FILE_BYTES_MAX} bytes")
    values = {}
    for number, line in _logical_lines(text):
        key, separator, value = line.partition("=")
        if not separator:
            key, separator, value = line.partition(":")
        if not separator or not key.strip():
            raise InvalidConfigError(f"configuration file {file}, line {number}: {line!r} is not key=value")
        values[key.strip()] = value.strip()
    return values


def _logical_lines(text: str) -> Iterable[tuple[int, str]]:
    """Lines with their numbers, without comments; a backslash at the end joins the next line, as in Java."""
    joined = ""
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not joined:
            first = number
            if not stripped or stripped[0] in "#!":
                continue
        if stripped.endswith("\\"):
            joined += stripped[:-1]
            continue
        yield first, joined + stripped
        joined = ""
    if joined:
        yield first, joined


def write_properties(values: Mapping[str, str], *, title: str) -> str:
    """The text of a properties file that `read_properties` reads back."""
    lines = [f"# {title}"]
    for key, value in values.items():
        if "\n" in value or "\r" in value or value.endswith("\\"):
            raise InvalidConfigError(f"configuration key {key!r}: {value!r} cannot be written to a file")
        lines.append(f"{key}={value}")
    return "\n".join(lines) + "\n"


def variable(key: str) -> str:
    """The environment variable of a key."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def from_environment(environment: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """The keys that the environment sets; raises InvalidConfigError for a variable that is no key's."""
    by_variable = {variable(key): key for key in keys}
    values = {}
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in by_variable:
            _refuse_variable(name, tuple(by_variable))
        values[by_variable[name]] = value
    return values


def _refuse_variable(name: str, known: tuple[str, ...]) -> NoReturn:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InvalidConfigError(f"environment variable {name} is no configuration key of this service{hint}")


def from_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """From `key=value` texts; raises InvalidConfigError."""
    values = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidConfigError(f"--config {text!r} is not key=value")
        values[key.strip()] = value.strip()
    return values
