"""Which replica a partition is read from: the preferred one and its lease, and replicas that have failed (392-14).

A replica that failed is left alone for `retry.backoff.max.ms`, twice as long after each further failure, up to
`metadata.max.age.ms`; after that long without one, it counts from the beginning. So however often a replica comes and
goes, and however long the leader insists on it, the number of changes is bounded: that is what "no flip-flop" means.
A leader that insists is fetched from without the rack, for then it serves itself (392-17).

Invariants: the target is the leader, or an online replica that is not being left alone; a lease is not prolonged.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kipmesh.client.consumer.rules.values import PartitionNews, ReaderConfig, SelectionMode

NOBODY: Final = -1
_DOUBLINGS_MAX: Final = 30


class _Hold(NamedTuple):
    """Until when a replica is left alone, and after how many failures in a row."""

    until_ms: int
    failures: int


class PreferredReplica:
    """The choice for one partition: `target` is the node to fetch from. The methods never fail."""

    __slots__ = ("_config", "_holds", "_lease_until_ms", "_preferred", "news", "rackless_until_ms")

    def __init__(self, config: ReaderConfig) -> None:
        self.news = PartitionNews()
        self._config = config
        self._preferred = NOBODY
        self._lease_until_ms = 0
        self.rackless_until_ms = 0
        """Until when the leader is asked without the rack."""
        self._holds: dict[int, _Hold] = {}

    def target(self, now_ms: int) -> int:
        """The node to fetch from, -1 if that is the leader and it is not known."""
        if self._preferred != NOBODY and now_ms < self._lease_until_ms and self.is_usable(self._preferred, now_ms):
            return self._preferred
        config = self._config
        if config.mode is not SelectionMode.FETCH and config.prefers_replicas:
            wish = self.news.preferred_read_replica
            if wish != NOBODY and self.is_usable(wish, now_ms):
                return wish
        return self.news.leader_id

    def offers_rack(self, now_ms: int) -> bool:
        """Whether the leader may choose (392-13)."""
        config = self._config
        return config.has_rack and config.mode is SelectionMode.FETCH and now_ms >= self.rackless_until_ms

    def is_usable(self, node_id: int, now_ms: int) -> bool:
        """Whether it is an online replica that is not being left alone."""
        hold = self._holds.get(node_id)
        return self._is_online(node_id) and (hold is None or now_ms >= hold.until_ms)

    def _is_online(self, node_id: int) -> bool:
        return node_id in self.news.replicas and node_id not in self.news.offline_replicas

    def is_in_sync(self, node_id: int) -> bool:
        """Whether metadata has it in the ISR."""
        return node_id in self.news.isr

    def take(self, news: PartitionNews) -> int:
        """Metadata says so now; gives the replica that must be left for it, -1 if none (392-14: fenced)."""
        self.news = news
        for gone in self._holds.keys() - set(news.replicas):
            del self._holds[gone]
        fenced = self._preferred
        return fenced if fenced != NOBODY and not self._is_online(fenced) else NOBODY

    def redirect(self, node_id: int, now_ms: int) -> bool:
        """The leader names a replica: whether it is taken. If not, the leader is to serve without the rack.

        A replica that our metadata has offline is not: the metadata may be old, and is to be refreshed.
        """
        if self.is_usable(node_id, now_ms):
            self._preferred = node_id
            self._lease_until_ms = now_ms + self._config.metadata_max_age_ms
            return True
        hold = self._holds.get(node_id)
        held_until_ms = hold.until_ms if hold is not None else 0
        soon_ms = now_ms + self._config.retry_backoff_max_ms
        self.rackless_until_ms = held_until_ms if held_until_ms > now_ms else soon_ms
        return False

    def leave(self, node_id: int, now_ms: int) -> None:
        """The replica failed: back to the leader, and leave it alone for a while."""
        config = self._config
        hold = self._holds.get(node_id)
        failures = 1
        if hold is not None and now_ms < hold.until_ms + config.metadata_max_age_ms:
            failures = hold.failures + 1
        doubled_ms = config.retry_backoff_max_ms << min(failures - 1, _DOUBLINGS_MAX)
        self._holds[node_id] = _Hold(now_ms + min(doubled_ms, config.metadata_max_age_ms), failures)
        if self._preferred == node_id:
            self._preferred = NOBODY

    def asked_leader(self) -> None:
        """The leader is asked: a lease that was over is forgotten."""
        self._preferred = NOBODY

    def forget(self) -> None:
        """Another topic has this name now: nothing that was known is true."""
        self.news = PartitionNews()
        self._preferred = NOBODY
        self.rackless_until_ms = 0
        self._holds.clear()
