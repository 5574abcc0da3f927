"""Metrics of fetch sessions, which a scrape reads on another thread."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from kipmesh.broker.observability.metrics import MetricsFunction
from kipmesh.broker.requests.fetch_sessions import fetch_session_metrics
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import AdoptedPolicy, Eviction, FetchSessionCache, Subscriptions


def test_scrape_tolerates_counters_that_change_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FetchSessionCache(Subscriptions(), AdoptedPolicy(), lambda: 1)
    metrics = cache.metrics
    metrics.evicted(Eviction.SIZE, "first")
    metrics.failed(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
    registry = CollectorRegistry()
    registry.register(MetricsFunction(partial(fetch_session_metrics, cache)))
    add_metric = CounterMetricFamily.add_metric

    def count_and_add(self: CounterMetricFamily, *args: Any, **kwargs: Any) -> None:
        metrics.evicted(Eviction.INACTIVE, f"client {metrics.evictions}")
        metrics.failed(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        add_metric(self, *args, **kwargs)

    monkeypatch.setattr(CounterMetricFamily, "add_metric", count_and_add)
    page = generate_latest(registry).decode()
    assert 'kipmesh_broker_fetch_session_evictions_by_evictor_total{client_id="first"} 1.0' in page
