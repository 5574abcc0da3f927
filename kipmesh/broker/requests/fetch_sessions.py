"""The broker's fetch session cache as configured (227-13 to 227-15), and its metrics (227-20)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kipmesh.broker.observability.metrics import counter_family
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
    """Return the session cache of a broker. `on_event` is called for each created, closed or evicted session.

    The reserved policy has slots for each broker in the metadata image.
    """
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
    """Log at DEBUG a created, closed or evicted session, with its client id and whether it is a follower's (227-02)."""
    about = {name: value for name, value in event._asdict().items() if value is not None}
    log.debug("fetch session changed", **about)


def fetch_session_metrics(sessions: FetchSessionCache) -> Iterator[Metric]:
    """Yield the metrics of a session cache, under Kafka's names where Kafka has them."""
    counted, kafka, ours = sessions.metrics, "kafka_server_fetchsessioncache_", "kipmesh_broker_fetch_session_"
    yield GaugeMetricFamily(kafka + "numincrementalfetchsessions", "Fetch sessions.", len(sessions))
    text = "Partitions in fetch sessions."
    yield GaugeMetricFamily(kafka + "numincrementalfetchpartitionscached", text, sessions.partitions)
    text = "Fetch sessions that were evicted."
    yield CounterMetricFamily(kafka + "incrementalfetchsessionevictions", text, counted.evictions)
    text = "Fetch sessions, by whether a follower created them."
    by_privilege = GaugeMetricFamily("kipmesh_broker_fetch_sessions", text, labels=["privileged"])
    for privileged, count in dict(sessions.by_privilege).items():
        by_privilege.add_metric([str(privileged).lower()], count)
    yield by_privilege
    yield CounterMetricFamily(ours + "created", "Fetch sessions created.", counted.created)
    yield CounterMetricFamily(ours + "closed", "Fetch sessions closed, by or for their clients.", counted.closed)
    text = "Bytes that full fetches would have added, at least."
    yield CounterMetricFamily(ours + "saved_bytes", text, counted.bytes_saved)
    errors = {code.name: count for code, count in dict(counted.errors).items()}
    by_reason, by_client = _named(counted.evictions_by_reason), counted.evictions_by_client
    for name, text, label, counts in (
        ("evictions_by_reason", "Fetch sessions evicted, by reason.", "reason", by_reason),
        ("evictions_by_evictor", "Fetch sessions evicted, by client id that took the slot.", "client_id", by_client),
        ("refusals", "Fetch sessions not created, by reason.", "reason", _named(counted.refusals)),
        ("quota_refusals", "Fetch sessions over the quota.", "client_id", counted.quota_refusals_by_client),
        ("errors", "Fetches with a session error, by error.", "error", errors),
    ):
        yield counter_family(ours + name, text, label, counts)
    yield counter_family("kipmesh_broker_fetches", "Fetch responses, by kind.", "kind", _named(counted.fetches))


def _named(counts: Mapping[_Key, int]) -> dict[str, int]:
    return {str(key.value): count for key, count in dict(counts).items()}
