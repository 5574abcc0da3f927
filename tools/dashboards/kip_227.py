"""Dashboard of KIP-227: savings of incremental fetch sessions, and whether the session cache is large enough."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, all_rate, by_instance, graph, now, number, rate, total

CACHE = "kafka_server_fetchsessioncache_"
OURS = "kipmesh_broker_fetch_session_"
FETCHES = "kipmesh_broker_fetches_total"
INCREMENTAL = 'kind="incremental"'


def _summary() -> Row:
    sessions, evictions = f"{CACHE}numincrementalfetchsessions", f"{CACHE}incrementalfetchsessionevictions_total"
    turnover = f"sum by (instance) (increase({now(evictions)}[5m])) / clamp_min({total(sessions, 'instance')}, 1)"
    return Row(
        "Summary",
        [
            number(
                "Fetch sessions",
                "Sessions in the caches of all brokers, including those of followers.",
                Query(f"sum({now(sessions)})", "sessions"),
                width=6,
            ),
            number(
                "Incremental fetches",
                "Share of fetches that were incremental. Below half, many sessions are evicted or refused.",
                Query(
                    f"{all_rate(FETCHES, INCREMENTAL)} / {all_rate(FETCHES)}",
                    "share",
                ),
                unit=parts.SHARE,
                width=6,
            ),
            number(
                "Bytes saved",
                "Minimum number of bytes that full fetches would have transferred in addition.",
                Query(all_rate(f"{OURS}saved_bytes_total"), "saved"),
                unit=parts.BYTES_A_SECOND,
                width=6,
            ),
            number(
                "Turnover of the worst cache",
                "Share of sessions evicted within 5 minutes. From 50 %, clients evict each other's sessions.",
                Query(f"max({turnover})", "turnover"),
                unit=parts.SHARE,
                warn=0.1,
                bad=0.5,
                width=6,
            ),
        ],
    )


def _cache() -> Row:
    return Row(
        "Session caches",
        [
            graph(
                "Sessions",
                "NumIncrementalFetchSessions; at most max.incremental.fetch.session.cache.slots.",
                by_instance(now(f"{CACHE}numincrementalfetchsessions")),
            ),
            graph(
                "Sessions of followers and of consumers",
                "Sessions of followers are privileged: they may evict sessions of consumers.",
                Query(total("kipmesh_broker_fetch_sessions", "privileged"), "privileged: {{privileged}}"),
            ),
            graph(
                "Partitions in sessions",
                "NumIncrementalFetchPartitionsCached, which determines the memory use of the cache.",
                by_instance(now(f"{CACHE}numincrementalfetchpartitionscached")),
            ),
            graph(
                "Sessions created and closed",
                "A client closes its session when it stops. The session of a client that died is evicted later.",
                Query(rate(f"{OURS}created_total", "instance"), "{{instance}} created"),
                Query(rate(f"{OURS}closed_total", "instance"), "{{instance}} closed"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Evictions",
                "IncrementalFetchSessionEvictionsPerSec.",
                by_instance(rate(f"{CACHE}incrementalfetchsessionevictions_total", "instance")),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Evictions by reason",
                "inactive: unused; privilege: replaced by a follower's session; size: replaced by a larger session.",
                Query(rate(f"{OURS}evictions_by_reason_total", "reason"), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Evictions by evicting client",
                "The ten client ids whose sessions evict the most others.",
                Query(f"topk(10, {rate(f'{OURS}evictions_by_evictor_total', 'client_id')})", "{{client_id}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Sessions refused",
                "full: no evictable slot; quota: too many sessions of one client id; off: the cache has no slots.",
                Query(rate(f"{OURS}refusals_total", "reason"), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Sessions refused by quota",
                "The ten client ids with the most refusals.",
                Query(f"topk(10, {rate(f'{OURS}quota_refusals_total', 'client_id')})", "{{client_id}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Session errors",
                "FETCH_SESSION_ID_NOT_FOUND follows an eviction or a restart; the client then starts a new session.",
                Query(rate(f"{OURS}errors_total", "instance", "error"), "{{instance}} {{error}}"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _fetches() -> Row:
    return Row(
        "Fetches",
        [
            graph(
                "Fetches by kind",
                "Fetches served by brokers.",
                Query(rate(FETCHES, "kind"), "{{kind}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Fetches of followers",
                "Responses that followers received.",
                Query(rate("kipmesh_broker_fetcher_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Sessions reset by followers",
                "By cause: an error of the leader, a broken connection, or an invalid response.",
                Query(
                    rate("kipmesh_broker_fetcher_session_resets_total", "instance", "cause"), "{{instance}} {{cause}}"
                ),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Saved bytes",
                "Minimum number of bytes that full fetches would have transferred in addition, by broker.",
                by_instance(rate(f"{OURS}saved_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Consumer services: fetches by kind",
                "aside: a separate fetch of one partition without a session.",
                Query(rate("kipmesh_consumer_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Consumer services: sessions",
                "Open sessions, and session resets by cause.",
                Query(now("kipmesh_consumer_fetch_sessions_open"), "{{instance}} open"),
                Query(
                    rate("kipmesh_consumer_fetch_session_resets_total", "instance", "cause"),
                    "{{instance}} {{cause}} /s",
                ),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Incremental fetch sessions: docs/fetch_sessions.md and docs/monitoring.md."
    return parts.make("kipmesh-kip-227", "kipmesh: fetch sessions (KIP-227)", text, [_summary(), _cache(), _fetches()])
