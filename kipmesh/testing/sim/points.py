"""Where a process may be made to crash: just after an effect of a kind, or at a step of what is done with snapshots."""

from __future__ import annotations

from collections.abc import Callable

from kipmesh.core.raft.types import (
    Answer,
    AppendAsFollower,
    AppendAsLeader,
    AppendLeaderChange,
    Committed,
    Effect,
    PersistElection,
    Send,
    TruncateLog,
)
from kipmesh.core.raft.wire import only_vote_answer
from kipmesh.messages import FetchRequest, VoteRequest, VoteResponse


def _grants(effect: Effect) -> bool:
    if not isinstance(effect, Answer) or not isinstance(effect.response, VoteResponse):
        return False
    answer = only_vote_answer(effect.response)
    return answer is not None and answer.vote_granted


_EFFECT_POINTS: dict[str, Callable[[Effect], bool]] = {
    "quorum-state written": lambda effect: isinstance(effect, PersistElection),
    "vote answered": _grants,
    "vote asked": lambda effect: isinstance(effect, Send) and isinstance(effect.request, VoteRequest),
    "leader change appended": lambda effect: isinstance(effect, AppendLeaderChange),
    "appended as leader": lambda effect: isinstance(effect, AppendAsLeader),
    "appended as follower": lambda effect: isinstance(effect, AppendAsFollower),
    "records sent": lambda effect: isinstance(effect, Answer) and effect.read is not None,
    "truncated": lambda effect: isinstance(effect, TruncateLog),
    "committed": lambda effect: isinstance(effect, Committed),
    "fetch sent": lambda effect: isinstance(effect, Send) and isinstance(effect.request, FetchRequest),
}
SNAPSHOT_POINTS = (
    "snapshot written in part",
    "snapshot made",
    "log start raised",
    "cleaned",
    "snapshot received in part",
    "snapshot received whole",
    "snapshot installed",
)
CRASH_POINTS = (*_EFFECT_POINTS, *SNAPSHOT_POINTS)
"""Points just after which a process may be made to crash."""


def is_passed(point: str, effect: Effect) -> bool:
    """Whether a process that did that effect has just passed that point."""
    passed = _EFFECT_POINTS.get(point)
    return passed is not None and passed(effect)
