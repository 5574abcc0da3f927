"""Whom to ask instead: the leader, its epoch and its address in answers that send clients away (KIP-951).

A client that is told NOT_LEADER_OR_FOLLOWER or FENCED_LEADER_EPOCH need not ask for metadata before it goes on. What is
said is what this broker knows, which may be old: clients take it only when its epoch is newer than theirs. Nothing is
said where nobody leads, and by a leader that is cut off from the controllers.
"""

from __future__ import annotations

from collections.abc import Iterable

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.messages import LeaderIdAndEpoch, NodeEndpoint
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica

HINTED = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})


class LeaderHints:
    """Of one broker; `listener` names the addresses of those who came by the brokers' own listener."""

    def __init__(self, partitions: Partitions, listener: str) -> None:
        self._partitions = partitions
        self._listener = listener

    def leader(
        self, code: int, topic_id: bytes, name: str, partition: int, replica: Replica | None = None
    ) -> LeaderIdAndEpoch | None:
        """Who leads a partition, for an answer with this error; None where there is nothing to say."""
        if code not in HINTED:
            return None
        if replica is not None and replica.has_role:
            known = replica.current_leader
            return known if known.leader_id != NO_LEADER else None
        image = self._partitions.image
        topic = image.topics.get(topic_id) if topic_id else image.topic_by_name(name)
        state = topic.partitions.get(partition) if topic is not None else None
        if state is None or state.leader == NO_LEADER:
            return None
        return LeaderIdAndEpoch(state.leader, state.leader_epoch)

    def endpoints(
        self, leaders: Iterable[LeaderIdAndEpoch | None], others: Iterable[int] = (), *, listener: str = ""
    ) -> list[NodeEndpoint]:
        """Where these leaders, and other brokers, are for who came by `listener`: each once, fenced ones left out."""
        wanted = sorted({*(each.leader_id for each in leaders if each is not None), *others})
        if not wanted:
            return []
        known = self._partitions.endpoints(listener or self._listener)
        return [known[node_id] for node_id in wanted if node_id in known]
