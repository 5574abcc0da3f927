"""What requests may put into the metadata log: the range and length of each value that a record takes over as it is.

Everything else that a record has comes from the image or from the controller itself. Invariant: a value that passes
can be encoded; a refusal names the field, and what it quotes is short.
"""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh.messages import BrokerRegistrationRequest

TEXT_LENGTH_MAX = 32_767
"""Characters of a configuration's value, the most that Kafka's older string form has room for."""
NAME_LENGTH_MAX = 255
"""Characters of names of listeners, hosts, features and racks."""
LISTENERS_MAX = 64
FEATURES_MAX = 256
LOG_DIRS_MAX = 1000
REFUSAL_LENGTH_MAX = 500
"""Characters of an error's text in an answer."""

_ID_BYTES = 16
_INT16_MAX = 2**15 - 1
_UINT16_MAX = 2**16 - 1
_INT32_MAX = 2**31 - 1


def refusal(message: str) -> str:
    """The text of an error as it is answered: it may quote the request, but not all of a large one."""
    return message if len(message) <= REFUSAL_LENGTH_MAX else message[:REFUSAL_LENGTH_MAX] + "..."


def registration_fault(request: BrokerRegistrationRequest) -> str | None:
    """What keeps a registration from being written down; None for nothing."""
    if not 0 <= request.broker_id <= _INT32_MAX or len(request.incarnation_id) != _ID_BYTES or not request.listeners:
        return "a registration has a broker id, an incarnation id and listeners"
    for what, values, count_max in (
        ("listeners", request.listeners, LISTENERS_MAX),
        ("features", request.features, FEATURES_MAX),
        ("log folders", request.log_dirs, LOG_DIRS_MAX),
    ):
        if len(values) > count_max:
            return f"a registration has at most {count_max} {what}"
    if any(len(directory) != _ID_BYTES for directory in request.log_dirs):
        return "a log folder's id has 16 bytes"
    if request.rack is not None and not _is_name(request.rack):
        return f"a rack has at most {NAME_LENGTH_MAX} characters, none of them null"
    return _listeners_fault(request) or _features_fault(request)


def _listeners_fault(request: BrokerRegistrationRequest) -> str | None:
    names = [listener.name for listener in request.listeners]
    if not _are_names(names) or not _are_names([listener.host for listener in request.listeners]):
        return f"a listener's name and host have at most {NAME_LENGTH_MAX} characters, none of them null"
    if len(set(names)) != len(names):
        return "two listeners have the same name"
    if any(not 0 <= listener.port <= _UINT16_MAX for listener in request.listeners):
        return "a listener's port is not between 0 and 65535"
    if any(not 0 <= listener.security_protocol <= _INT16_MAX for listener in request.listeners):
        return f"a listener's security protocol is not between 0 and {_INT16_MAX}"
    return None


def _features_fault(request: BrokerRegistrationRequest) -> str | None:
    if not _are_names([feature.name for feature in request.features]):
        return f"a feature's name has at most {NAME_LENGTH_MAX} characters, none of them null"
    for feature in request.features:
        if not 0 <= feature.min_supported_version <= feature.max_supported_version <= _INT16_MAX:
            return f"the versions of feature {feature.name!r} are not a range between 0 and {_INT16_MAX}"
    return None


def config_value_fault(value: str) -> str | None:
    """What keeps a configuration's value from being written down; None for nothing."""
    if len(value) > TEXT_LENGTH_MAX or "\0" in value:
        return f"a value has at most {TEXT_LENGTH_MAX} characters, none of them null"
    return None


def _is_name(text: str) -> bool:
    return len(text) <= NAME_LENGTH_MAX and "\0" not in text


def _are_names(texts: Sequence[str]) -> bool:
    return all(map(_is_name, texts))
