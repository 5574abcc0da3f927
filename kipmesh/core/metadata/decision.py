"""What a step of the controller returns: the records to append, and the answer once they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kipmesh.core.metadata.records import Record

Response = TypeVar("Response")


class Decision(NamedTuple, Generic[Response]):
    """Records that hold together (one batch), and the response that may be sent when they are durable."""

    records: Sequence[Record]
    response: Response
