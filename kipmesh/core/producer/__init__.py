"""Producer state, sans-IO: metadata refresh by topic (KIP-526, see docs/producer_metadata.md) and sequence numbers."""

from kipmesh.core.producer.tracker import RefreshMode, RefreshRequest, TopicTracker, TrackerConfig, TrackerMetrics

__all__ = ["RefreshMode", "RefreshRequest", "TopicTracker", "TrackerConfig", "TrackerMetrics"]
