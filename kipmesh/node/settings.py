"""Sources of a process's configuration: a properties file, the environment and `--config`, in increasing precedence.

An environment variable is `KIPMESH_CONFIG_` plus the key in upper case with underscores for dots. An unknown key or an
invalid value in any source raises InvalidConfigError with a message of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return the configuration of a process from all sources.

    Raises InvalidConfigError if a source cannot be read, or has an unknown key or an invalid value.
    """
    sources: list[tuple[Callable[[str], str], Mapping[str, str]]] = []
    if file is not None:
        sources.append((lambda _key: f"configuration file {file}: ", read_properties(file)))
    sources.append(
        (lambda key: f"environment variable {variable(key)}: ", from_environment(environment, config_type.keys()))
    )
    sources.append((lambda _key: "", from_overrides(overrides)))
    try:
        return config_type.parse({key: value for _, values in sources for key, value in values.items()})
    except InvalidConfigError as error:
        prefix = next((name(error.key) for name, values in reversed(sources) if error.key in values), "")
        raise InvalidConfigError(prefix + error.message, key=error.key, value=error.value) from None


def read_properties(file: Path) -> dict[str, str]:
    """Return the keys and values of a properties file.

    Raises InvalidConfigError if the file cannot be read, is not UTF-8, exceeds FILE_BYTES_MAX or has an invalid line.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
        text = raw.decode()
    except OSError as error:
        raise InvalidConfigError(f"configuration file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfigError(f"configuration file {file}: must be UTF-8") from None
    if len(raw) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"configuration file {file}: must have at most {FILE_BYTES_MAX} bytes")
    values = {}
    for number, line in _logical_lines(text):
        key, separator, value = line.partition("=")
        if not separator:
            key, separator, value = line.partition(":")
        if not separator or not key.strip():
            raise InvalidConfigError(f"configuration file {file}, line {number}: expected key=value, got {line!r}")
        values[key.strip()] = value.strip()
    return values


def _logical_lines(text: str) -> Iterable[tuple[int, str]]:
    """Yield all lines but comments, with their numbers. A trailing backslash joins the next line, as in Java."""
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
    """Return the text of a properties file for `read_properties`, with `title` as a comment.

    Raises InvalidConfigError for a value with a line break or a trailing backslash.
    """
    lines = [f"# {title}"]
    for key, value in values.items():
        if "\n" in value or "\r" in value or value.endswith("\\"):
            raise InvalidConfigError(f"configuration key {key!r}: a properties file cannot contain {value!r}")
        lines.append(f"{key}={value}")
    return "\n".join(lines) + "\n"


def variable(key: str) -> str:
    """Return the name of the environment variable for a configuration key."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def from_environment(environment: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """Return the values of `keys` that are set in the environment. Raises InvalidConfigError for an unknown key."""
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

    similar = get_close_matches(name, known, n=1)
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    raise InvalidConfigError(f"environment variable {name} is not a configuration key of this service{hint}")


def from_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys and values of `--config key=value` options. Raises InvalidConfigError for a malformed option."""
    values = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidConfigError(f"--config must be key=value, got {text!r}")
        values[key.strip()] = value.strip()
    return values
