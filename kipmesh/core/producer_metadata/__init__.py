"""Which topics a producer asks metadata for, and when (KIP-526): sans-IO, the clock comes from outside.

`docs/producer_metadata.md` explains it; `TopicTracker` is the door.
"""

from kipmesh.core.producer_metadata.tracker import TopicTracker
from kipmesh.core.producer_metadata.values import RefreshMode, RefreshRequest, Step, TrackerConfig, TrackerMetrics

__all__ = ["RefreshMode", "RefreshRequest", "Step", "TopicTracker", "TrackerConfig", "TrackerMetrics"]
