"""A replica selector that brokers load by its class name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kipmesh.core.replica.selection import ClientMetadata, PartitionView, ReplicaSelector, ReplicaView, TopicPartition
from kipmesh.messages import NodeEndpoint


class ConfiguredSelector(ReplicaSelector):
    """Selects the replica with the id `target`; "unknown" selects a replica outside the view, "raise" raises."""

    seen: ClassVar[list[tuple[TopicPartition, ClientMetadata, PartitionView]]] = []
    closed: ClassVar[list[int]] = []

    def configure(self, configs: Mapping[str, Any]) -> None:
        self.node_id = int(configs["node.id"])
        self.target = str(configs.get("target", ""))

    def select(
        self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView
    ) -> ReplicaView | None:
        self.seen.append((topic_partition, client, view))
        if self.target == "raise":
            raise ValueError("broken")
        if self.target == "unknown":
            return ReplicaView(NodeEndpoint(99, "h", 1))
        return next((replica for replica in view.replicas if str(replica.node_id) == self.target), None)

    def close(self) -> None:
        self.closed.append(self.node_id)
