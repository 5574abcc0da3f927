"""KIP-227: what incremental fetch sessions save, and whether their cache is large enough."""

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
        "In short",
        [
            number(
                "Fetch sessions",
                "Sessions that all brokers keep, followers' included.",
                Query(f"sum({now(sessions)})", "sessions"),
                width=6,
            ),
            number(
                "Incremental fetches",
                "Share of the fetches that named only what changed. Below half, sessions do not work.",
                Query(
                    f"{all_rate(FETCHES, INCREMENTAL)} / {all_rate(FETCHES)}",
                    "share",
                ),
                unit=parts.SHARE,
                width=6,
            ),
            number(
                "Bytes saved",
                "What full fetches would have had in addition, at least.",
                Query(all_rate(f"{OURS}saved_bytes_total"), "saved"),
                unit=parts.BYTES_A_SECOND,
                width=6,
            ),
            number(
                "Turnover of the worst cache",
                "Sessions evicted within 5 minutes, of those there are. From 50 % on clients take each other's slots.",
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
        "The brokers' caches",
        [
            graph(
                "Sessions",
                "NumIncrementalFetchSessions; at most max.incremental.fetch.session.cache.slots.",
                by_instance(now(f"{CACHE}numincrementalfetchsessions")),
            ),
            graph(
                "Sessions of followers and of consumers",
                "Privileged ones are followers': they may take the slots of consumers'.",
                Query(total("kipmesh_broker_fetch_sessions", "privileged"), "privileged: {{privileged}}"),
            ),
            graph(
                "Partitions in sessions",
                "NumIncrementalFetchPartitionsCached: what the memory of the cache grows with.",
                by_instance(now(f"{CACHE}numincrementalfetchpartitionscached")),
            ),
            graph(
                "Made and closed",
                "A client that closes ends its session; one that dies leaves it to be evicted.",
                Query(rate(f"{OURS}created_total", "instance"), "{{instance}} made"),
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
                "inactive: nobody used it; privilege: a follower took a consumer's; size: an old one was smaller.",
                Query(rate(f"{OURS}evictions_by_reason_total", "reason"), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Who gets the slots",
                "Client ids of the ten that evict most.",
                Query(f"topk(10, {rate(f'{OURS}evictions_by_evictor_total', 'client_id')})", "{{client_id}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Sessions refused",
                "full: no slot was to be had; quota: too many of one client id; off: there are no slots at all.",
                Query(rate(f"{OURS}refusals_total", "reason"), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Refused for the quota",
                "Client ids of the ten that are refused most.",
                Query(f"topk(10, {rate(f'{OURS}quota_refusals_total', 'client_id')})", "{{client_id}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Session errors",
                "FETCH_SESSION_ID_NOT_FOUND after an eviction or a restart; the client begins a new session at once.",
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
                "As brokers answered them.",
                Query(rate(FETCHES, "kind"), "{{kind}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Fetches of followers",
                "As followers saw the answers.",
                Query(rate("kipmesh_broker_fetcher_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Sessions that followers gave up",
                "By cause: an error of the leader, a connection that broke, an answer that makes no sense.",
                Query(
                    rate("kipmesh_broker_fetcher_session_resets_total", "instance", "cause"), "{{instance}} {{cause}}"
                ),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Saved bytes",
                "What full fetches would have had in addition, at least, by broker.",
                by_instance(rate(f"{OURS}saved_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Consumer services: fetches by kind",
                "aside: of a partition that is read out of turn, without a session.",
                Query(rate("kipmesh_consumer_fetches_total", "instance", "kind"), "{{instance}} {{kind}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Consumer services: sessions",
                "Open sessions, and those given up, by cause.",
                Query(now("kipmesh_consumer_fetch_sessions_open"), "{{instance}} open"),
                Query(
                    rate("kipmesh_consumer_fetch_session_resets_total", "instance", "cause"),
                    "{{instance}} {{cause}} /s",
                ),
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "Incremental fetch sessions: docs/fetch_sessions.md and docs/monitoring.md."
    return parts.make("kipmesh-kip-227", "kipmesh: fetch sessions (KIP-227)", text, [_summary(), _cache(), _fetches()])
