"""Which topics a producer asks metadata for, and when (KIP-526): sans-IO, the clock comes from outside.

`docs/producer_metadata.md` explains it; `TopicTracker` is the door.
"""

from kipmesh.core.producer.tracker import (
    RefreshMode,
    RefreshRequest,
    TopicTracker,
    TrackerConfig,
    TrackerMetrics,
)

__all__ = ["RefreshMode", "RefreshRequest", "TopicTracker", "TrackerConfig", "TrackerMetrics"]
