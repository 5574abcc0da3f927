"""The metadata quorum as a sans-IO state machine: see `kipmesh.core.raft.machine` for its contract."""

from kipmesh.core.raft.machine import Machine
from kipmesh.core.raft.transitions import TRANSITIONS, Cause, IllegalTransitionError, State
from kipmesh.core.raft.types import (
    ElectionState,
    QuorumError,
    RaftConfig,
)

__all__ = [
    "TRANSITIONS",
    "Cause",
    "ElectionState",
    "IllegalTransitionError",
    "Machine",
    "QuorumError",
    "RaftConfig",
    "State",
]
