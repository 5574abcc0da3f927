"""Dashboard of KIP-227: savings of incremental fetch sessions, and whether the session cache is large enough."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

CACHE = "kafka_server_fetchsessioncache_"
OURS = "kipmesh_broker_fetch_session_"
FETCHES = "kipmesh_broker_fetches_total"
INCREMENTAL = 'kind="incremental"'


def _summary() -> p.Row:
    sessions, evictions = f"{CACHE}numincrementalfetchsessions", f"{CACHE}incrementalfetchsessionevictions_total"
    turnover = f"sum by (instance) (increase({p.now(evictions)}[5m])) / clamp_min({p.total(sessions, 'instance')}, 1)"
    return p.Row(
        "Summary",
        [
            p.number(
                "Fetch sessions",
                "Sessions in the caches of all brokers, including those of followers.",
                p.Query(f"sum({p.now(sessions)})", "sessions"),
                width=6,
            ),
            p.number(
                "Incremental fetches",
                "Share of fetches that were incremental. Below half, many sessions are evicted or refused.",
                p.Query(
                    f"{p.all_rate(FETCHES, INCREMENTAL)} / {p.all_rate(FETCHES)}",
                    "share",
                ),
                unit=p.SHARE,
                width=6,
            ),
            p.number(
                "Bytes saved",
                "Minimum number of bytes that full fetches would have transferred in addition.",
                p.Query(p.all_rate(f"{OURS}saved_bytes_total"), "saved"),
                unit=p.BYTES_A_SECOND,
                width=6,
            ),
            p.number(
                "Turnover of the worst cache",
                "Share of sessions evicted within 5 minutes. From 50 %, clients evict each other's sessions.",
                p.Query(f"max({turnover})", "turnover"),
                unit=p.SHARE,
                warn=0.1,
                bad=0.5,
                width=6,
            ),
        ],
    )


def _cache() -> p.Row:
    return p.Row(
        "Session caches",
        [
            p.graph(
                "Sessions",
                "NumIncrementalFetchSessions; at most max.incremental.fetch.session.cache.slots.",
                p.by_instance(p.now(f"{CACHE}numincrementalfetchsessions")),
            ),
            p.graph(
                "Sessions of followers and of consumers",
                "Sessions of followers are privileged: they may evict sessions of consumers.",
                p.Query(p.total("kipmesh_broker_fetch_sessions", "privileged"), "privileged: {{privileged}}"),
            ),
            p.graph(
                "Partitions in sessions",
                "NumIncrementalFetchPartitionsCached, which determines the memory use of the cache.",
                p.by_instance(p.now(f"{CACHE}numincrementalfetchpartitionscached")),
            ),
            p.per_second(
                "Sessions created and closed",
                "A client closes its session when it stops. The session of a client that died is evicted later.",
                p.Query(p.rate(f"{OURS}created_total", "instance"), "{{instance}} created"),
                p.Query(p.rate(f"{OURS}closed_total", "instance"), "{{instance}} closed"),
            ),
            p.per_second(
                "Evictions",
                "IncrementalFetchSessionEvictionsPerSec.",
                p.by_instance(p.rate(f"{CACHE}incrementalfetchsessionevictions_total", "instance")),
            ),
            p.per_second(
                "Evictions by reason",
                "inactive: unused; privilege: replaced by a follower's session; size: replaced by a larger session.",
                p.Query(p.rate(f"{OURS}evictions_by_reason_total", "reason"), "{{reason}}"),
            ),
            p.per_second(
                "Evictions by evicting client",
                "The ten client ids whose sessions evict the most others.",
                p.Query(f"topk(10, {p.rate(f'{OURS}evictions_by_evictor_total', 'client_id')})", "{{client_id}}"),
            ),
            p.per_second(
                "Sessions refused",
                "full: no evictable slot; quota: too many sessions of one client id; off: the cache has no slots.",
                p.Query(p.rate(f"{OURS}refusals_total", "reason"), "{{reason}}"),
            ),
            p.per_second(
                "Sessions refused by quota",
                "The ten client ids with the most refusals.",
                p.Query(f"topk(10, {p.rate(f'{OURS}quota_refusals_total', 'client_id')})", "{{client_id}}"),
            ),
            p.per_second(
                "Session errors",
                "FETCH_SESSION_ID_NOT_FOUND follows an eviction or a restart; the client then starts a new session.",
                p.Query(p.rate(f"{OURS}errors_total", "instance", "error"), "{{instance}} {{error}}"),
            ),
        ],
    )


def _fetches() -> p.Row:
    return p.Row(
        "Fetches",
        [
            p.per_second(
                "Fetches by kind",
                "Fetches served by brokers.",
                p.Query(p.rate(FETCHES, "kind"), "{{kind}}"),
                stacked=True,
            ),
            p.per_second(
                "Fetches of followers",
                "Responses that followers received.",
                p.Query(p.rate("kipmesh_broker_fetcher_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
            ),
            p.per_second(
                "Sessions reset by followers",
                "By cause: an error of the leader, a broken connection, or an invalid response.",
                p.Query(
                    p.rate("kipmesh_broker_fetcher_session_resets_total", "instance", "cause"), "{{instance}} {{cause}}"
                ),
            ),
            p.bytes_per_second(
                "Saved bytes",
                "Minimum number of bytes that full fetches would have transferred in addition, by broker.",
                p.by_instance(p.rate(f"{OURS}saved_bytes_total", "instance")),
            ),
            p.per_second(
                "Consumer services: fetches by kind",
                "aside: a separate fetch of one partition without a session.",
                p.Query(p.rate("kipmesh_consumer_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
            ),
            p.graph(
                "Consumer services: sessions",
                "Open sessions, and session resets by cause.",
                p.Query(p.now("kipmesh_consumer_fetch_sessions_open"), "{{instance}} open"),
                p.Query(
                    p.rate("kipmesh_consumer_fetch_session_resets_total", "instance", "cause"),
                    "{{instance}} {{cause}} /s",
                ),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Incremental fetch sessions: docs/fetch_sessions.md and docs/monitoring.md."
    return p.make("kipmesh-kip-227", "kipmesh: fetch sessions (KIP-227)", text, [_summary(), _cache(), _fetches()])
