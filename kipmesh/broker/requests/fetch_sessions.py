"""The broker's fetch session cache as configured (227-13 to 227-15), and its metrics (227-20)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.config import BrokerConfig
from kipmesh.core.fetch_session import (
    AdoptedPolicy,
    EvictionPolicy,
    FetchSessionCache,
    ReservedPolicy,
    SessionEvent,
    Subscriptions,
)

_Key = TypeVar("_Key", bound=Enum)

log = structlog.get_logger(__name__)


def make_session_cache(
    config: BrokerConfig,
    subscriptions: Subscriptions,
    hosted_replicas: HostedReplicas,
    on_event: Callable[[SessionEvent], None] | None = None,
) -> FetchSessionCache:
    """Create the session cache of a broker. Followers are recognized by the brokers in the metadata image."""
    policy: EvictionPolicy
    if config.fetch_session_cache_policy == "adopted":
        unused_ms_max = config.min_incremental_fetch_session_eviction_ms
        policy = AdoptedPolicy(config.max_incremental_fetch_session_cache_slots, unused_ms_max)
    else:
        unused_ms_max = config.min_incremental_fetch_session_eviction_time_ms
        policy = ReservedPolicy(
            lambda broker_id: broker_id in hosted_replicas.image.brokers,
            slots_per_broker=config.incremental_fetch_session_cache_slots_per_broker,
            consumer_slots=config.incremental_fetch_session_consumer_cache_slots,
            size_min=config.min_incremental_fetch_session_size,
            unused_ms_max=unused_ms_max,
        )
    return FetchSessionCache(
        subscriptions,
        policy,
        lambda: secrets.randbits(31),
        sessions_per_client_id=config.max_incremental_fetch_sessions_per_client_id,
        unused_ms_max=unused_ms_max,
        wakes_on_high_watermark=config.replica_fetch_high_watermark_wakeup,
        on_event=on_event,
    )


def log_session(event: SessionEvent) -> None:
    """Log a created, closed or evicted session with its client id and whether it is a follower's (227-02)."""
    about = {name: value for name, value in event._asdict().items() if value is not None}
    log.debug("fetch session changed", **about)


class FetchSessionCollector(Collector):
    """Exports the cache's counters. Scrapes run on another thread, so tables are copied before iteration."""

    def __init__(self, sessions: FetchSessionCache) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, under Kafka's names where Kafka has them."""
        prefix, counted = "kafka_server_fetchsessioncache_", self._sessions.metrics
        yield GaugeMetricFamily(prefix + "numincrementalfetchsessions", "Fetch sessions.", len(self._sessions))
        yield GaugeMetricFamily(
            prefix + "numincrementalfetchpartitionscached", "Partitions in fetch sessions.", self._sessions.partitions
        )
        yield CounterMetricFamily(
            prefix + "incrementalfetchsessionevictions", "Fetch sessions that were evicted.", counted.evictions
        )
        held = GaugeMetricFamily(
            "kipmesh_broker_fetch_sessions",
            "Fetch sessions, by whether a follower created them.",
            labels=["privileged"],
        )
        for privileged, count in dict(self._sessions.by_privilege).items():
            held.add_metric([str(privileged).lower()], count)
        yield held
        prefix = "kipmesh_broker_fetch_session_"
        yield CounterMetricFamily(prefix + "created", "Fetch sessions created.", counted.created)
        yield CounterMetricFamily(
            prefix + "closed", "Fetch sessions closed, by their clients or after a new full fetch.", counted.closed
        )
        yield _family(
            prefix + "evictions_by_reason",
            "Fetch sessions evicted, by reason.",
            "reason",
            _named(counted.evictions_by_reason),
        )
        yield _family(
            prefix + "evictions_by_evictor",
            "Fetch sessions evicted, by the client id that took the slot.",
            "client_id",
            counted.evictions_by_client,
        )
        yield _family(prefix + "refusals", "Fetch sessions not created, by reason.", "reason", _named(counted.refusals))
        yield _family(
            prefix + "quota_refusals",
            "Fetch sessions not created because of the quota, by client id.",
            "client_id",
            counted.quota_refusals_by_client,
        )
        errors = {code.name: count for code, count in dict(counted.errors).items()}
        yield _family(prefix + "errors", "Fetches with a session error, by error.", "error", errors)
        yield _family("kipmesh_broker_fetches", "Fetch responses, by kind.", "kind", _named(counted.fetches))
        yield CounterMetricFamily(
            prefix + "saved_bytes", "Bytes that full fetches would have added, at least.", counted.bytes_saved
        )


def _named(counts: Mapping[_Key, int]) -> dict[str, int]:
    return {str(key.value): count for key, count in dict(counts).items()}


def _family(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in dict(counts).items():
        family.add_metric([value], count)
    return family
