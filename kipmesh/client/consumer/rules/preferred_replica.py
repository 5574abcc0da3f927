"""Selects the replica that a partition is fetched from, with leases and exclusion of failed replicas (392-14).

A failed replica is excluded for `retry.backoff.max.ms`, doubled after each further failure up to `metadata.max.age.ms`.
The count restarts after `metadata.max.age.ms` without a failure. This bounds the number of switches, even if a replica
keeps failing and the leader keeps selecting it. If the leader selects an excluded replica, fetches to the leader omit
the rack, so that the leader serves them itself (392-17).

Invariants: the target is the leader or an online replica that is not excluded; a lease is never extended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kipmesh.client.consumer.rules.values import PartitionView, ReaderConfig, SelectionMode

NO_NODE: Final = -1
_DOUBLINGS_MAX: Final = 30
_NO_VIEW: Final = PartitionView()


class _Exclusion(NamedTuple):
    """Exclusion of a replica until `until_ms`, after `failures` consecutive failures."""

    until_ms: int
    failures: int


@dataclass(slots=True, eq=False)
class PreferredReplica:
    """Selects the replica that one partition is fetched from. The methods never raise."""

    config: ReaderConfig
    view: PartitionView = _NO_VIEW
    rackless_until_ms: int = 0
    """Fetches to the leader omit the rack until this time."""
    _preferred: int = NO_NODE
    _lease_until_ms: int = 0
    _exclusions: dict[int, _Exclusion] = field(default_factory=dict)

    def target(self, now_ms: int) -> int:
        """Return the node to fetch from: the preferred replica while it is usable, else the leader (-1: unknown)."""
        if self._preferred != NO_NODE and now_ms < self._lease_until_ms and self.is_usable(self._preferred, now_ms):
            return self._preferred
        config = self.config
        if config.mode is not SelectionMode.FETCH and config.prefers_replicas:
            preferred = self.view.preferred_read_replica
            if preferred != NO_NODE and self.is_usable(preferred, now_ms):
                return preferred
        return self.view.leader_id

    def offers_rack(self, now_ms: int) -> bool:
        """Whether fetches to the leader carry `client.rack`, so that the leader may select a replica (392-13)."""
        config = self.config
        return config.has_rack and config.mode is SelectionMode.FETCH and now_ms >= self.rackless_until_ms

    def is_usable(self, node_id: int, now_ms: int) -> bool:
        """Whether the node is an online replica that is not excluded."""
        exclusion = self._exclusions.get(node_id)
        return self._is_online(node_id) and (exclusion is None or now_ms >= exclusion.until_ms)

    def _is_online(self, node_id: int) -> bool:
        return node_id in self.view.replicas and node_id not in self.view.offline_replicas

    def is_in_sync(self, node_id: int) -> bool:
        """Whether the node is in the partition's ISR according to cached metadata."""
        return node_id in self.view.isr

    def update(self, view: PartitionView) -> int:
        """Apply new metadata. Return the leased replica if it is now offline (392-14: fenced), otherwise -1."""
        self.view = view
        for removed in self._exclusions.keys() - set(view.replicas):
            del self._exclusions[removed]
        preferred = self._preferred
        return preferred if preferred != NO_NODE and not self._is_online(preferred) else NO_NODE

    def redirect(self, node_id: int, now_ms: int) -> bool:
        """Lease the replica that the leader selected, for `metadata.max.age.ms`, and return True.

        Returns False if the replica is excluded or offline. Fetches to the leader then omit the rack until the
        exclusion ends, or for `retry.backoff.max.ms`. Metadata may be stale, so the caller should refresh it.
        """
        if self.is_usable(node_id, now_ms):
            self._preferred = node_id
            self._lease_until_ms = now_ms + self.config.metadata_max_age_ms
            return True
        exclusion = self._exclusions.get(node_id)
        held_until_ms = exclusion.until_ms if exclusion is not None else 0
        soon_ms = now_ms + self.config.retry_backoff_max_ms
        self.rackless_until_ms = held_until_ms if held_until_ms > now_ms else soon_ms
        return False

    def exclude(self, node_id: int, now_ms: int) -> None:
        """Exclude a failed replica and end its lease, so that the leader is used.

        The exclusion lasts `retry.backoff.max.ms`, doubled after each further failure up to `metadata.max.age.ms`.
        """
        config = self.config
        exclusion = self._exclusions.get(node_id)
        failures = 1
        if exclusion is not None and now_ms < exclusion.until_ms + config.metadata_max_age_ms:
            failures = exclusion.failures + 1
        doubled_ms = config.retry_backoff_max_ms << min(failures - 1, _DOUBLINGS_MAX)
        self._exclusions[node_id] = _Exclusion(now_ms + min(doubled_ms, config.metadata_max_age_ms), failures)
        if self._preferred == node_id:
            self._preferred = NO_NODE

    def end_lease(self) -> None:
        """End the lease of the preferred replica. Called when a fetch is sent to the leader."""
        self._preferred = NO_NODE

    def forget(self) -> None:
        """Forget metadata, lease and exclusions, because the topic was recreated."""
        self.view = _NO_VIEW
        self._preferred = NO_NODE
        self.rackless_until_ms = 0
        self._exclusions.clear()
