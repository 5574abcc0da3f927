"""Every API that the listener speaks. ApiVersions is made from this list."""

from __future__ import annotations

from kipmesh.wire.api import Api
from kipmesh.wire.apis import (
    alter_partition_reassignments,
    alter_user_scram_credentials,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_quorum,
    describe_topic_partitions,
    describe_user_scram_credentials,
    elect_leaders,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    list_partition_reassignments,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sasl_authenticate,
    sasl_handshake,
    sync_group,
)

_MODULES = (
    sasl_handshake,
    sasl_authenticate,
    produce,
    fetch,
    list_offsets,
    metadata,
    find_coordinator,
    init_producer_id,
    offset_for_leader_epoch,
    describe_cluster,
    describe_topic_partitions,
    join_group,
    sync_group,
    heartbeat,
    leave_group,
    offset_commit,
    offset_fetch,
    offset_delete,
    list_groups,
    describe_groups,
    delete_groups,
    create_topics,
    delete_topics,
    create_partitions,
    delete_records,
    alter_partition_reassignments,
    list_partition_reassignments,
    describe_configs,
    incremental_alter_configs,
    elect_leaders,
    describe_user_scram_credentials,
    alter_user_scram_credentials,
    describe_quorum,
    describe_log_dirs,
)


def make_registry() -> dict[int, Api]:
    """The APIs by their keys."""
    apis = [module.API for module in _MODULES]
    registry = {api.key: api for api in (*apis, api_versions.make(apis))}
    if len(registry) != len(apis) + 1:
        raise ValueError("two APIs have the same key")
    return registry
