"""Metadata (API key 3), as in `protos/kipmesh/v1/metadata.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MetadataRequestTopic(NamedTuple):
    topic_id: bytes = b""
    name: str | None = None


class MetadataRequest(NamedTuple):
    topics: Sequence[MetadataRequestTopic] = ()
    all_topics: bool = False
    allow_auto_topic_creation: bool = False
    include_topic_authorized_operations: bool = False
    rack_id: str = ""


class MetadataResponseBroker(NamedTuple):
    node_id: int = 0
    host: str = ""
    port: int = 0
    rack: str | None = None


class MetadataResponsePartition(NamedTuple):
    error_code: int = 0
    partition_index: int = 0
    leader_id: int = -1
    leader_epoch: int = -1
    replica_nodes: Sequence[int] = ()
    isr_nodes: Sequence[int] = ()
    offline_replicas: Sequence[int] = ()
    preferred_read_replica: int = -1
    last_known_elr: Sequence[int] = ()


class MetadataResponseTopic(NamedTuple):
    error_code: int = 0
    name: str | None = None
    topic_id: bytes = b""
    is_internal: bool = False
    partitions: Sequence[MetadataResponsePartition] = ()


class MetadataResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    brokers: Sequence[MetadataResponseBroker] = ()
    cluster_id: str | None = None
    controller_id: int = -1
    topics: Sequence[MetadataResponseTopic] = ()
