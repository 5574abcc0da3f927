"""What a consumer decides, sans-IO: from which replica it reads a partition, and what it does when that fails (392-08,
392-10, 392-13 to 392-17).

docs/closest_replica.md says how it fits together and who has to call what.
"""

from kipmesh.core.consumer.reactions import Leave, Reaction, reaction_to
from kipmesh.core.consumer.reader import PartitionReader
from kipmesh.core.consumer.states import State
from kipmesh.core.consumer.types import (
    Abandon,
    Action,
    AwaitAnswer,
    AwaitMetadata,
    AwaitReader,
    BackOff,
    Effect,
    Effects,
    EndOfEpochAtLeader,
    EpochSpan,
    FetchFrom,
    LeaveCause,
    Left,
    ListOffsetsAtLeader,
    MoveTo,
    OffsetReset,
    PartitionNews,
    RaiseError,
    ReaderConfig,
    Redirected,
    RefreshMetadata,
    SelectionMode,
    TakeRecords,
    TruncationFound,
)

__all__ = [
    "Abandon",
    "Action",
    "AwaitAnswer",
    "AwaitMetadata",
    "AwaitReader",
    "BackOff",
    "Effect",
    "Effects",
    "EndOfEpochAtLeader",
    "EpochSpan",
    "FetchFrom",
    "Leave",
    "LeaveCause",
    "Left",
    "ListOffsetsAtLeader",
    "MoveTo",
    "OffsetReset",
    "PartitionNews",
    "PartitionReader",
    "RaiseError",
    "Reaction",
    "ReaderConfig",
    "Redirected",
    "RefreshMetadata",
    "SelectionMode",
    "State",
    "TakeRecords",
    "TruncationFound",
    "reaction_to",
]
