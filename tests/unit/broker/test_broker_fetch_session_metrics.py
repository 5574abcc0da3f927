"""The metrics of fetch sessions: scrapes come in a thread of their own."""

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


def test_what_is_counted_during_a_scrape_does_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FetchSessionCache(Subscriptions(), AdoptedPolicy(), lambda: 1)
    counted = cache.metrics
    counted.evicted(Eviction.SIZE, "first")
    counted.failed(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
    registry = CollectorRegistry()
    registry.register(MetricsFunction(partial(fetch_session_metrics, cache)))
    add_metric = CounterMetricFamily.add_metric

    def count_meanwhile(self: CounterMetricFamily, *args: Any, **kwargs: Any) -> None:
        counted.evicted(Eviction.INACTIVE, f"client {counted.evictions}")
        counted.failed(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        add_metric(self, *args, **kwargs)

    monkeypatch.setattr(CounterMetricFamily, "add_metric", count_meanwhile)
    page = generate_latest(registry).decode()
    assert 'kipmesh_broker_fetch_session_evictions_by_evictor_total{client_id="first"} 1.0' in page
