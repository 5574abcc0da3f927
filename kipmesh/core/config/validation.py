"""Texts of pydantic's validation errors for users: `log.segment.bytes must be an integer, got 'abc'`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

VALUE_CHARS_MAX = 100
"""Longest value that is quoted in full."""

_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a string",
    "is_instance_of": "a {class}",
    "string_pattern_mismatch": "a text that matches {pattern}",
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
}
"""Error type -> what the value must be."""
_RANGES = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}
_SHAPES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "keys with values"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
}
_LENGTHS = {
    "string_too_short": ("at least {min_length}", "character"),
    "string_too_long": ("at most {max_length}", "character"),
    "too_short": ("at least {min_length}", "item"),
    "too_long": ("at most {max_length}", "item"),
}
_FOUND = (
    (bool, "true or false"),
    (dict, "keys with values"),
    (list, "a list"),
    (str, "a string"),
    (type(None), "nothing"),
)


def error_text(error: Mapping[str, Any], name: str, value: Any) -> str:
    """Return the message for one of pydantic's errors. With an empty `name`, the message has no subject."""
    kind, message = error["type"], error["msg"].removeprefix("Value error, ").removesuffix(".")
    context = error.get("ctx", {})
    if kind == "value_error":
        if name and message.startswith("must "):
            return f"{name} {message}" + ("" if ", got " in message else f", got {shown(value)}")
        return f"{name}: {message}" if name else message
    describe = _TEXTS.get(kind)
    if describe is None:
        message = message[:1].lower() + message[1:]
        return f"{name}: {message}, got {shown(value)}" if name else message
    return f"{name} {describe(kind, context, value)}".lstrip()


def shown(value: Any) -> str:
    """Return the `repr` of a value for an error message, shortened if it is long."""
    text = repr(value[: VALUE_CHARS_MAX + 1] if isinstance(value, str) else value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."


def _expected(kind: str, context: Mapping[str, Any], value: Any) -> str:
    return f"must be {_EXPECTED[kind].format(**context)}, got {shown(value)}"


def _range(kind: str, context: Mapping[str, Any], value: Any) -> str:
    found = shown(value).strip("'")
    if found.strip().lower() == "nan":  # no limit accepts it
        return f"must be a number, got {found}"
    limits = {key: int(one) if isinstance(one, float) and one.is_integer() else one for key, one in context.items()}
    return f"must be {_RANGES[kind].format(**limits)}, got {found}"


def _shape(kind: str, _context: Mapping[str, Any], value: Any) -> str:
    found = next((name for of, name in _FOUND if isinstance(value, of)), "a number")
    return f"must be {_SHAPES[kind]}, got {found}"


def _length(kind: str, context: Mapping[str, Any], value: Any) -> str:
    limit, unit = _LENGTHS[kind]
    number = context.get("min_length", context.get("max_length"))
    if number == 1 and "min_length" in context:
        return "must not be empty"
    return f"must have {limit.format(**context)} {unit}{'' if number == 1 else 's'}, got {len(value)}"


_TEXTS: Mapping[str, Callable[[str, Mapping[str, Any], Any], str]] = {
    **dict.fromkeys(_EXPECTED, _expected),
    **dict.fromkeys(_RANGES, _range),
    **dict.fromkeys(_SHAPES, _shape),
    **dict.fromkeys(_LENGTHS, _length),
    **dict.fromkeys(("missing", "missing_argument", "missing_keyword_only_argument"), lambda *_: "is missing"),
    **dict.fromkeys(("extra_forbidden", "unexpected_keyword_argument"), lambda *_: "is not a known key"),
}
