"""Preferred read replicas of a broker: the selector plugin and the requests that use it (392-11, 392-13, 392-15).

`kipmesh.core.replica.selection_views` has the rules; this module supplies the broker's state. A broken plugin fails at
every fetch, so failures are counted always and logged at intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

import structlog

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.config import BrokerConfig
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.metadata.states import is_lost
from kipmesh.core.replica.leader import PartitionLeader
from kipmesh.core.replica.selection import ClientMetadata, GuardedSelector, SelectorFailure, TopicPartition
from kipmesh.core.replica.selection_views import (
    NO_REPLICA,
    may_redirect,
    preferred_read_replica,
    progress_of_leader,
    redirect_by_leader,
    view_of,
)
from kipmesh.core.replica.selector_loader import load_selector
from kipmesh.transport.grpc.server import RequestContext

log = structlog.get_logger(__name__)

LOG_INTERVAL_MS = 60_000
"""Minimum time between log lines about the same kind of failure."""


def peer_host(peer: str) -> str:
    """Return the host of a gRPC peer (`ipv4:host:port`, `ipv6:%5Bhost%5D:port`), or an empty string for other forms."""
    kind, _, address = peer.partition(":")
    return unquote(address.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else ""


class ReplicaSelection:
    """The replica selector of one broker, as configured.

    `now_ms` is a monotonic clock in ms, for the progress of followers. Raises InvalidConfigError if the plugin cannot
    be loaded.
    """

    def __init__(
        self, config: BrokerConfig, hosted_replicas: HostedReplicas, metrics: BrokerMetrics, now_ms: Callable[[], int]
    ) -> None:
        self._hosted_replicas = hosted_replicas
        self._metrics = metrics
        self._now_ms = now_ms
        self._listener = config.inter_broker_listener_name
        self._mode = config.replica_selection_mode
        self._logged_ms: dict[SelectorFailure, int] = {}
        configs = config.as_dict() | dict(config.replica_selector_configs)
        self._selector = GuardedSelector(load_selector(config.replica_selector_class, configs), self._failed)
        self.close = self._selector.close
        """Close the selector plugin."""
        if not config.replica_selector_class:
            for key, is_set in (
                ("replica.selection.mode", config.replica_selection_mode != "fetch"),
                ("replica.selector.config", bool(config.replica_selector_config)),
            ):
                if is_set:
                    log.warning("setting has no effect without replica.selector.class", key=key)

    def _failed(self, partition: TopicPartition, failure: SelectorFailure, cause: object) -> None:
        self._metrics.selector_failed.labels(failure.value).inc()
        now_ms, logged_ms = self._now_ms(), self._logged_ms.get(failure)
        if logged_ms is None or now_ms - logged_ms >= LOG_INTERVAL_MS:
            self._logged_ms[failure] = now_ms
            log.error(
                "replica selector failed",
                topic=partition.topic,
                partition=partition.partition,
                failure=failure.value,
                cause=f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else repr(cause)[:200],
                failures=self._selector.failures[failure],
            )

    def client(self, rack_id: str, context: RequestContext) -> ClientMetadata:
        """Return the client's metadata for the selector plugin. The host is empty if the client names no rack."""
        host = peer_host(context.peer) if rack_id else ""
        return ClientMetadata(rack_id, context.client_id, host, "", context.listener or self._listener)

    def redirects(self, replica_id: int, client: ClientMetadata) -> bool:
        """Whether leaders on this broker may redirect this client's fetches. Always False in mode `metadata`.

        `replica_id` is taken from the client's requests.
        """
        return self._mode == "fetch" and may_redirect(replica_id, client, self._selector)

    def by_leader(
        self, replica: Replica, leader: PartitionLeader, client: ClientMetadata, replica_id: int, fetch_offset: int
    ) -> int:
        """Return a fetch's preferred read replica in mode `fetch`, or -1 if this leader should serve it (392-13)."""
        topic_id, partition = replica.topic_id, replica.partition
        state = self._hosted_replicas.image.partition(topic_id, partition)
        return redirect_by_leader(
            self._selector,
            TopicPartition(replica.topic, partition),
            client,
            leader,
            replica_id=replica_id,
            replicas=state.replicas if state is not None else (leader.broker_id, *leader.followers),
            endpoints=lambda: self._hosted_replicas.endpoints(client.listener_name),
            log_start_offset=replica.log.log_start_offset,
            fetch_offset=fetch_offset,
            now_ms=self._now_ms(),
        )

    def advises(self, rack_id: str) -> bool:
        """Whether Metadata responses for clients in this rack name preferred replicas.

        False in mode `fetch`, for an empty rack, and if the selector always returns the leader.
        """
        return self._mode == "metadata" and bool(rack_id) and not self._selector.always_leader

    def by_metadata(
        self, topic: str, topic_id: bytes, partition: int, state: PartitionState, client: ClientMetadata
    ) -> int:
        """Return the preferred replica in a Metadata response in mode `metadata`, or -1 for the leader (392-15).

        Offsets and times are known, and passed to the selector, only where this broker leads.
        """
        replica = self._hosted_replicas.get(topic_id, partition)
        leader = replica.leader if replica is not None else None
        progress = {}
        if replica is not None and leader is not None:
            progress = progress_of_leader(leader, replica.log.log_start_offset, self._now_ms())
        view = view_of(
            leader_id=state.leader,
            replicas=[one for one in state.replicas if not is_lost(state, one)],
            isr=state.isr,
            endpoints=self._hosted_replicas.endpoints(client.listener_name),
            progress=progress,
            fetch_offset=None,
        )
        if view is None:
            return NO_REPLICA
        return preferred_read_replica(self._selector, TopicPartition(topic, partition), client, view)
