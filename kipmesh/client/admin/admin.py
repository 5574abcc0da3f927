"""The asynchronous admin client: topics, partitions, configurations, offsets and the metadata quorum.

Requests go to any broker. The subjects of the other modules of this package are mixed in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kipmesh import messages as m
from kipmesh.client import arguments
from kipmesh.client import offsets as leader_offsets
from kipmesh.client.admin.brokers import BrokerAdmin
from kipmesh.client.admin.credentials import CredentialAdmin
from kipmesh.client.admin.groups import GroupAdmin
from kipmesh.client.admin.quorum import DESCRIBE_QUORUM, quorum_description
from kipmesh.client.admin.reassignments import ReassignmentAdmin
from kipmesh.client.admin.requests import failure_of
from kipmesh.client.calls import call
from kipmesh.client.cluster import Client, Cluster, by_topic, parse_config
from kipmesh.client.metadata import topic_metadata
from kipmesh.client.types import (
    ConfigAlteration,
    ConfigResource,
    ConfigValue,
    CreatedTopic,
    NewTopic,
    OffsetAndTimestamp,
    QuorumDescription,
    TopicMetadata,
    TopicPartition,
)
from kipmesh.core.config import AdminConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

_POLL_S_MAX = 0.2
_ELECTION_SHARE = 0.8
"""Share of the request timeout that the controller may use for an election; the rest covers transport and a retry."""


class AdminClient(Client, GroupAdmin, ReassignmentAdmin, BrokerAdmin, CredentialAdmin):
    """Administers a cluster. Use `async with`, or `start` and `close`. Belongs to one event loop.

    `config` takes Kafka's admin settings with dots or underscores; the constructor raises InvalidConfigError for
    invalid ones. All requests raise KafkaError: retriable errors after retries for `default.api.timeout.ms`, others
    immediately. Requests about fetch sessions, log directories and faults go to single brokers and are not retried.
    Arguments of a wrong type raise TypeError.
    """

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        self.config = parse_config(AdminConfig, config)
        self._cluster = Cluster(bootstrap, self.config, "kipmesh-admin")
        self._metadata = self._cluster.metadata
        self._timeout_s = self.config.default_api_timeout_ms / 1000

    async def start(self) -> None:
        """Connect to the cluster. Raises KafkaError if no bootstrap server responds within `request.timeout.ms`."""
        await self._cluster.start(min(self.config.request_timeout_ms, self.config.default_api_timeout_ms) / 1000)

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._cluster.close()

    # -- topics

    async def create_topics(
        self, topics: Iterable[NewTopic], *, wait: bool = True, validate_only: bool = False
    ) -> list[CreatedTopic]:
        """Create topics, or with `validate_only` only validate them, and return them with their ids.

        With `wait`, also wait until all reachable brokers know the partitions' leaders. Raises KafkaError:
        TOPIC_ALREADY_EXISTS, INVALID_CONFIG or another error of the first topic that could not be created, while the
        others are still created; REQUEST_TIMED_OUT if waiting exceeds `default.api.timeout.ms`.
        """
        wanted = [_creatable(topic) for topic in arguments.instances("topics", topics, NewTopic)]
        request = m.CreateTopicsRequest(wanted, self._request_timeout_ms, validate_only)
        response: m.CreateTopicsResponse = await self._call(
            request, lambda found: [(each.name, each) for each in found.topics]
        )
        created = [
            CreatedTopic(each.name, each.topic_id, each.num_partitions, each.replication_factor)
            for each in response.topics
        ]
        if wait and not validate_only:
            ids = {each.name: each.topic_id for each in created}
            await self._wait_for(list(ids), lambda found: all(_has_leaders(found.get(name), ids[name]) for name in ids))
        return created

    async def delete_topics(self, names: Iterable[str], *, wait: bool = True) -> None:
        """Delete topics. With `wait`, also wait until no reachable broker lists them.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION or another error of the first topic that could not be deleted,
        while the others are still deleted; REQUEST_TIMED_OUT if waiting exceeds `default.api.timeout.ms`.
        """
        listed = arguments.names("topics", names)
        request = m.DeleteTopicsRequest(
            [m.DeleteTopicState(name) for name in listed], timeout_ms=self._request_timeout_ms
        )
        old = {name: topic.topic_id for name, topic in (await self._describe(listed)).items()} if wait else {}
        await self._call(request, lambda found: [(each.name or "", each) for each in found.responses])
        if wait:
            await self._wait_for(
                listed,
                lambda found: all(name not in found or found[name].topic_id != old.get(name) for name in listed),
            )

    async def create_partitions(self, totals: Mapping[str, int], *, wait: bool = True) -> None:
        """Increase the numbers of partitions. `totals` has the new total number of partitions by topic.

        With `wait`, also wait until all partitions have leaders. Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION,
        INVALID_PARTITIONS (not above the current number) or another error of the first topic that could not be changed,
        while the others are still changed; REQUEST_TIMED_OUT if waiting exceeds `default.api.timeout.ms`.
        """
        for name, count in arguments.mapping("totals", totals, "topic to number of partitions").items():
            arguments.check_text("topic", name)
            arguments.check_integer("number of partitions", count)
        parts = [m.CreatePartitionsTopic(name, count) for name, count in totals.items()]
        request = m.CreatePartitionsRequest(parts, self._request_timeout_ms)
        await self._call(request, lambda found: [(each.name, each) for each in found.results])
        if wait:
            await self._wait_for(
                list(totals),
                lambda found: all(
                    name in found and len(found[name].partitions) >= count and _has_leaders(found[name])
                    for name, count in totals.items()
                ),
            )

    async def list_topics(self) -> list[TopicMetadata]:
        """Return the metadata of all topics, internal ones included, sorted by name."""
        response = await self._fetch_metadata(m.MetadataRequest(topics=None))
        return sorted(_topics_of(response).values(), key=lambda topic: topic.name)

    async def describe_topics(self, names: Iterable[str]) -> list[TopicMetadata]:
        """Return the metadata of these topics in the given order.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION for a missing topic, INVALID_TOPIC_EXCEPTION for an invalid name.
        """
        listed = arguments.names("topics", names)
        found = await self._describe(listed)
        for name in listed:
            if name not in found:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")
        return [found[name] for name in listed]

    async def elect_leaders(
        self,
        election_type: m.ElectionType = m.ElectionType.PREFERRED,
        partitions: Iterable[tuple[str, int]] | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Elect leaders for these partitions, or for all partitions that need an election.

        PREFERRED elects the first replica if it is in sync. UNCLEAN elects, for a partition without a leader, the
        replica with the longest log; records that it lacks are lost. Returns the error of each partition, or None if a
        leader was elected. A named partition that needs no election has the error ELECTION_NOT_NEEDED.
        """
        topics = None
        if partitions is not None:
            listed = by_topic(arguments.topic_partitions(partitions))
            topics = [m.TopicPartitions(topic, numbers) for topic, numbers in listed.items()]
        timeout_ms = int(self._request_timeout_ms * _ELECTION_SHARE)
        response: m.ElectLeadersResponse = await self._call(
            m.ElectLeadersRequest(election_type, topics, timeout_ms), lambda found: [("leader election failed", found)]
        )
        return {
            TopicPartition(result.topic, each.partition_id): failure_of(each, "")
            for result in response.replica_election_results
            for each in result.partition_result
        }

    # -- configurations

    async def describe_configs(
        self, resources: Iterable[ConfigResource], *, keys: Iterable[str] = (), with_documentation: bool = False
    ) -> dict[ConfigResource, dict[str, ConfigValue]]:
        """Return the configurations of topics and brokers by resource and key, with all keys if `keys` is empty.

        Raises KafkaError for the first resource that cannot be described, such as UNKNOWN_TOPIC_OR_PARTITION.
        """
        listed, wanted = arguments.instances("resources", resources, ConfigResource), arguments.names("keys", keys)
        described = [m.DescribeConfigsResource(each.resource_type, each.name, wanted) for each in listed]
        request = m.DescribeConfigsRequest(described, include_documentation=with_documentation)
        response: m.DescribeConfigsResponse = await self._call(
            request, lambda found: [(each.resource_name, each) for each in found.results]
        )
        return {
            ConfigResource(result.resource_type, result.resource_name): {
                each.name: ConfigValue(each.name, each.value, each.read_only, each.config_source, each.documentation)
                for each in result.configs
            }
            for result in response.results
        }

    async def alter_configs(
        self, changes: Mapping[ConfigResource, Iterable[ConfigAlteration]], *, validate_only: bool = False
    ) -> None:
        """Change single configuration keys (IncrementalAlterConfigs), or only validate the changes.

        Raises KafkaError for the first resource that could not be changed (INVALID_CONFIG, UNKNOWN_TOPIC_OR_PARTITION);
        the others are still changed.
        """
        resources = [
            m.AlterConfigsResource(
                resource.resource_type,
                resource.name,
                [
                    m.AlterableConfig(each.name, each.operation, each.value)
                    for each in arguments.instances("changes", alterations, ConfigAlteration)
                ],
            )
            for resource, alterations in arguments.mapping(
                "changes", changes, "ConfigResource to a list of ConfigAlteration"
            ).items()
        ]
        request = m.IncrementalAlterConfigsRequest(resources, validate_only)
        await self._call(request, lambda found: [(each.resource_name, each) for each in found.responses])

    # -- offsets and the cluster

    async def list_offsets(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the offset and timestamp of each partition's first record at or after a timestamp, or None.

        Timestamps are ms since 1970, or TIMESTAMP_EARLIEST (log start), TIMESTAMP_LATEST (high watermark) or
        TIMESTAMP_MAX (the record with the largest timestamp).
        """
        wanted = arguments.by_partition("timestamps", timestamps, arguments.TIMESTAMP)
        return await leader_offsets.list_offsets(self._cluster, wanted, self._timeout_s)

    async def delete_records(self, offsets: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: the high watermark) and return the new log start offsets.

        Raises KafkaError for the first failed partition (OFFSET_OUT_OF_RANGE above the high watermark); records of the
        others may be deleted nevertheless.
        """
        wanted = arguments.by_partition("offsets", offsets)
        return await leader_offsets.delete_records(self._cluster, wanted, self._timeout_s)

    async def describe_quorum(self) -> QuorumDescription:
        """Return the state of the metadata quorum as known to its leader."""

        def results(response: m.DescribeQuorumResponse) -> list[tuple[str, Any]]:
            inner = [each for topic in response.topics for each in topic.partitions]
            return [("cannot describe the quorum", each) for each in (response, *inner)]

        return quorum_description(await self._call(DESCRIBE_QUORUM, results))

    # -- internals

    async def _describe(self, names: Sequence[str]) -> dict[str, TopicMetadata]:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names])
        response = await self._fetch_metadata(request)
        for each in response.topics:
            if each.error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                raise KafkaError(each.error_code, f"cannot describe topic {each.name!r}")
        return _topics_of(response)

    async def _wait_for(self, names: Sequence[str], condition: Callable[[Mapping[str, TopicMetadata]], bool]) -> None:
        """Wait until the metadata of every reachable broker fulfils the condition.

        Raises KafkaError(REQUEST_TIMED_OUT) after `default.api.timeout.ms`.
        """
        deadline = time.monotonic() + self._timeout_s
        delay = 0.005
        while not await self._is_everywhere(names, condition):
            if time.monotonic() + delay >= deadline:
                text = f"brokers did not apply the change of {', '.join(names)} within {self._timeout_s:g} s"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
            await asyncio.sleep(delay)
            delay = min(delay * 2, _POLL_S_MAX)

    async def _is_everywhere(
        self, names: Sequence[str], condition: Callable[[Mapping[str, TopicMetadata]], bool]
    ) -> bool:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names])
        has_response = False
        for address in self._cluster.metadata.candidates():
            try:
                response: m.MetadataResponse = await call(
                    self._cluster.pool, address, request, self.config.request_timeout_ms / 1000
                )
            except TransportError:
                continue
            has_response = True
            if not condition(_topics_of(response)):
                return False
        return has_response


def _topics_of(response: m.MetadataResponse) -> dict[str, TopicMetadata]:
    return {each.name or "": topic_metadata(each.name or "", each) for each in response.topics if not each.error_code}


def _creatable(topic: NewTopic) -> m.CreatableTopic:
    arguments.check_text("topic", topic.name)
    arguments.check_integer("num_partitions", topic.num_partitions)
    arguments.check_integer("replication_factor", topic.replication_factor)
    configs = arguments.mapping("configs", topic.configs, "name to value")
    assignments = arguments.mapping("assignments", topic.assignments, "partition to a list of broker ids")
    return m.CreatableTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [
            m.CreatableReplicaAssignment(index, arguments.integers("replicas", ids, "broker ids"))
            for index, ids in assignments.items()
        ],
        [m.ConfigEntry(name, str(value)) for name, value in configs.items()],
    )


def _has_leaders(topic: TopicMetadata | None, topic_id: bytes = b"") -> bool:
    if topic is None or not topic.partitions or (topic_id and topic.topic_id != topic_id):
        return False
    return all(each.leader_id >= 0 for each in topic.partitions.values())
