"""How long the quorum waits. `jitter` is a random number in [0, 1) that the caller draws; nothing here draws one."""

from __future__ import annotations

from kipmesh.core.raft.types import RaftConfig

_BACKOFF_BASE_MS = 50
_BACKOFF_DOUBLINGS_MAX = 20
_IMPATIENT_EPOCHS = 2
_PATIENCE_DOUBLINGS_MAX = 3


def election_timeout_ms(config: RaftConfig, epochs_failed: int, jitter: float) -> int:
    """Until one who knows no leader stands for election; once to twice the configured time.

    After some epochs in a row that led to no leader it doubles with each: votes have to become durable on disks that
    may be slower than the configured time allows for.
    """
    doublings = min(max(epochs_failed - _IMPATIENT_EPOCHS, 0), _PATIENCE_DOUBLINGS_MAX)
    timeout_ms = config.election_timeout_ms << doublings
    return timeout_ms + int(jitter * timeout_ms)


def fetch_timeout_ms(config: RaftConfig, jitter: float) -> int:
    """Until a follower whose fetches fail gives its leader up; the configured time and up to a quarter more."""
    return config.fetch_timeout_ms + int(jitter * config.fetch_timeout_ms / 4)


def election_backoff_ms(config: RaftConfig, elections_lost: int, jitter: float) -> int:
    """Until a candidate that did not win stands again: doubles with each loss, at random, up to a limit."""
    doublings = min(max(elections_lost, 1), _BACKOFF_DOUBLINGS_MAX)
    return min(int(_BACKOFF_BASE_MS * (jitter * (1 << doublings))), config.election_backoff_max_ms)


def successor_backoff_ms(config: RaftConfig, position: int, successors: int) -> int:
    """Until a follower stands after its leader resigned: the preferred one at once, each next one twice as late."""
    if position == 0:
        return 0
    if position >= successors:
        return config.election_backoff_max_ms
    return min(config.election_backoff_max_ms, (config.election_backoff_max_ms >> (successors - 1)) << (position - 1))


def probe_ms(config: RaftConfig) -> int:
    """How long an observer that looks for a leader waits for one voter before it asks the next one, too."""
    return max(config.retry_backoff_ms, config.election_timeout_ms // 5)
