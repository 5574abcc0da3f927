"""Write docs/protocol.md and the table of docs/wire.md from the table of APIs and the messages. `--check` compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kipmesh.messages.kafka import is_message, item_type
from kipmesh.messages.schema import Array, Field, Message
from kipmesh.messages.table import KAFKA_APIS, Api

TARGET = Path(__file__).resolve().parent.parent / "docs" / "wire.md"
BEGIN, END = "<!-- APIs: made by `make docs` -->\n", "<!-- end of APIs -->\n"
REFERENCE = TARGET.with_name("protocol.md")
INTRODUCTION = """# Protocol reference

The requests and responses of the Kafka listener, field by field. This page is generated from the declarations in
`kipmesh/messages` (`make docs`). [The Kafka listener](wire.md) describes its behaviour; `protos/` has the gRPC form.

"Versions" are Kafka's versions that have the field. `T?` is a type that may be null, `[]T` a list, and `#n` a tagged
field. "gRPC" is the number of the field in protobuf, empty if gRPC does not carry it.
"""


def table() -> str:
    """Return the Markdown table of APIs in the order of their keys."""
    rows = ["| key | API | versions | responds | changes data | not supported |\n", "|---|---|---|---|---|---|\n"]
    for key, api in sorted(KAFKA_APIS.items()):
        first, last = api.versions
        versions = str(first) if first == last else f"{first} to {last}"
        rows.append(
            f"| {key} | [{api.name}](protocol.md#{api.name.lower()}-{key}) | {versions} | {_ROLES[api.role.value]} "
            f"| {'yes' if api.is_mutation else ''} | {api.limitations} |\n"
        )
    return "".join(rows)


_ROLES = {"connection": "listener", "broker": "broker", "forwarded": "active controller"}


def _type(each: Field) -> str:
    kind = item_type(each)
    name = kind.__name__ if is_message(kind) else kind
    text = f"[]{name}" if isinstance(each.type, Array) else name
    return f"{text}?" if each.nullable.last >= each.nullable.first else text


def _fields(of: type[Message], api: Api) -> Iterator[str]:
    yield "| field | type | versions | default | gRPC |\n|---|---|---|---|---:|\n"
    for each in of.message_fields:
        if each.versions.last < each.versions.first:
            continue
        tag = "" if each.tag is None else f" #{each.tag}"
        default = "" if each.default in (0, "", b"", ()) or is_message(each.type) else f"`{each.default}`"
        number = "" if each.number is None or api.service is None else str(each.number)
        yield f"| `{each.name}` | `{_type(each)}`{tag} | {each.versions} | {default} | {number} |\n"
    yield "\n"


def _structs(of: type[Message]) -> Iterator[type[Message]]:
    for each in of.message_fields:
        kind = item_type(each)
        if is_message(kind) and each.versions.last >= each.versions.first:
            yield kind
            yield from _structs(kind)


def reference() -> str:
    """Return the text of docs/protocol.md."""
    parts = [INTRODUCTION]
    for key, api in sorted(KAFKA_APIS.items()):
        parts.append(f"\n## {api.name} ({key})\n\nVersions {api.versions}, ")
        flexible = api.flexible_since <= api.versions.last
        parts.append(f"tagged fields from version {api.flexible_since} on.\n" if flexible else "no tagged fields.\n")
        for of in (api.request, api.response):
            parts.append(f"\n**{of.__name__}**\n\n")
            parts += _fields(of, api)
            for struct in dict.fromkeys(_structs(of)):
                parts.append(f"{struct.__name__}:\n\n")
                parts += _fields(struct, api)
    return "".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def render(text: str) -> str:
    """Return the text of docs/wire.md with the current table. Raises ValueError without the markers of the table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{TARGET.name} must have markers for the table: {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write both pages, or with `--check` only compare them. Return 1 if `--check` finds a difference, else 0."""
    text = TARGET.read_text(encoding="utf-8")
    pages = {TARGET: render(text), REFERENCE: reference()}
    if "--check" in arguments:
        stale = [path.name for path, page in pages.items() if not path.exists() or path.read_text() != page]
        for name in stale:
            sys.stderr.write(f"docs/{name} differs from kipmesh.messages: make docs\n")
        return int(bool(stale))
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
