"""The metadata quorum as a sans-IO state machine.

`machine` is the entry point and states the contract with the driver. `elections`, `replication` and `snapshots` are
functions on the state in `context`. `leadership` is a leader's state. `types` has events and effects, `wire` the
messages.
"""

from kipmesh.core.raft.elections import TRANSITIONS, Cause, IllegalTransitionError
from kipmesh.core.raft.machine import Machine
from kipmesh.core.raft.types import ElectionState, QuorumError, RaftConfig, State

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
