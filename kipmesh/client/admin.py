"""Administration: topics, partitions, configurations, offsets, groups and the metadata quorum, by any broker.

Every call retries what can be retried within `default.api.timeout.ms` and raises `KafkaError` otherwise. A retry after
an answer that was lost may find its own work: `create_topics` then raises TOPIC_ALREADY_EXISTS, as in Kafka.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kipmesh import messages as m
from kipmesh.client.admin_groups import GroupAdmin
from kipmesh.client.cluster import Cluster
from kipmesh.client.credentials import (
    ScramCredentialInfo,
    ScramMechanism,
    delete_credential,
    describe_credentials,
    set_credential,
)
from kipmesh.client.elections import elect_leaders
from kipmesh.client.faults import clear_faults, inject_fault, list_faults
from kipmesh.client.log_dirs import LogDirDescription, describe_log_dirs
from kipmesh.client.metadata import topic_metadata
from kipmesh.client.offsets import delete_records, list_offsets
from kipmesh.client.quorum import DESCRIBE_QUORUM, quorum_description
from kipmesh.client.reassignments import (
    DrainProgress,
    NewReplicas,
    OnDrain,
    OnMoved,
    PartitionReassignment,
    alter_reassignments,
    drain_broker,
    list_reassignments,
    unregister_broker,
    wait_reassigned,
)
from kipmesh.client.sessions import list_fetch_sessions
from kipmesh.client.settings import parse_config
from kipmesh.client.types import (
    BrokerSessions,
    ClusterDescription,
    ConfigAlteration,
    ConfigResource,
    ConfigValue,
    CreatedTopic,
    NewTopic,
    Node,
    OffsetAndTimestamp,
    QuorumDescription,
    TopicMetadata,
    TopicPartition,
)
from kipmesh.core.config import AdminConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.scram import ITERATIONS_MIN
from kipmesh.rpc.client import TransportError

_POLL_S_MAX = 0.2


class AdminClient(GroupAdmin):
    """Administers a cluster. Use `async with`, or `start` and `close`; one event loop."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        self.config = parse_config(AdminConfig, config)
        self._cluster = Cluster(bootstrap, self.config, "kipmesh-admin")
        self._timeout_s = self.config.default_api_timeout_ms / 1000

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def last_failure(self) -> Exception | None:
        """Why no broker answered the last request for metadata; None when one did."""
        return self._cluster.metadata.last_failure

    async def start(self) -> None:
        """Connect; raises KafkaError when no bootstrap address answers."""
        await self._cluster.start(min(self.config.request_timeout_ms, self.config.default_api_timeout_ms) / 1000)

    async def close(self) -> None:
        """Disconnect; may be called again."""
        await self._cluster.close()

    # -- topics

    async def create_topics(
        self, topics: Iterable[NewTopic], *, wait: bool = True, validate_only: bool = False
    ) -> list[CreatedTopic]:
        """Create topics; with `wait` returns when a broker knows a leader for each of their partitions.

        Raises KafkaError for the first topic that could not be created; the others are created all the same.
        """
        wanted = [_creatable(topic) for topic in topics]
        request = m.CreateTopicsRequest(wanted, self._request_timeout_ms, validate_only)

        def errors(response: m.CreateTopicsResponse) -> list[tuple[str, int, str | None]]:
            return [(each.name, each.error_code, each.error_message) for each in response.topics]

        response: m.CreateTopicsResponse = await self._call("CreateTopics", request, errors)
        created = [
            CreatedTopic(each.name, each.topic_id, each.num_partitions, each.replication_factor)
            for each in response.topics
        ]
        if wait and not validate_only:
            ids = {each.name: each.topic_id for each in created}
            await self._wait_for(list(ids), lambda found: all(_led(found.get(name), ids[name]) for name in ids))
        return created

    async def delete_topics(self, names: Iterable[str], *, wait: bool = True) -> None:
        """Delete topics by name; with `wait` returns when a broker does not know them any more."""
        listed = list(names)
        request = m.DeleteTopicsRequest(
            [m.DeleteTopicState(name) for name in listed], timeout_ms=self._request_timeout_ms
        )

        def errors(response: m.DeleteTopicsResponse) -> list[tuple[str, int, str | None]]:
            return [(each.name or "", each.error_code, each.error_message) for each in response.responses]

        old = {topic.name: topic.topic_id for topic in await self._describe(listed)} if wait else {}
        await self._call("DeleteTopics", request, errors)
        if wait:

            def gone(found: Mapping[str, TopicMetadata]) -> bool:
                return all(name not in found or found[name].topic_id != old.get(name) for name in listed)

            await self._wait_for(listed, gone)

    async def create_partitions(self, totals: Mapping[str, int], *, wait: bool = True) -> None:
        """Raise the number of partitions of topics to these totals."""
        parts = [m.CreatePartitionsTopic(name, count) for name, count in totals.items()]

        def errors(response: m.CreatePartitionsResponse) -> list[tuple[str, int, str | None]]:
            return [(each.name, each.error_code, each.error_message) for each in response.results]

        await self._call("CreatePartitions", m.CreatePartitionsRequest(parts, self._request_timeout_ms), errors)
        if wait:

            def grown(found: Mapping[str, TopicMetadata]) -> bool:
                return all(
                    name in found and len(found[name].partitions) >= count and _led(found[name])
                    for name, count in totals.items()
                )

            await self._wait_for(list(totals), grown)

    async def list_topics(self) -> list[TopicMetadata]:
        """All topics, by name."""
        response = await self._metadata_of(m.MetadataRequest(topics=None))
        found = [topic_metadata(each.name or "", each) for each in response.topics if not each.error_code]
        return sorted(found, key=lambda topic: topic.name)

    async def describe_topics(self, names: Iterable[str]) -> list[TopicMetadata]:
        """These topics, in this order; raises KafkaError for one that does not exist."""
        listed = list(names)
        found = {topic.name: topic for topic in await self._describe(listed)}
        for name in listed:
            if name not in found:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")
        return [found[name] for name in listed]

    async def elect_leaders(
        self,
        election_type: m.ElectionType = m.ElectionType.PREFERRED,
        partitions: Iterable[tuple[str, int]] | None = None,
    ) -> dict[TopicPartition, KafkaError | None]:
        """Elect leaders of these partitions, or of all that need it: for each why there was no election, or None.

        PREFERRED: back to the first replica, the leader service. UNCLEAN: a partition without a leader gets the one
        that has the most of its log; what that lacks is lost.
        """
        wanted = None if partitions is None else [TopicPartition(*each) for each in partitions]
        return await elect_leaders(self._cluster, election_type, wanted, self._timeout_s)

    # -- replicas move, and brokers leave

    async def alter_partition_reassignments(self, targets: NewReplicas) -> dict[TopicPartition, KafkaError | None]:
        """Give partitions other replicas, the preferred leader first; None cancels a reassignment that is running.

        For each partition why that was refused, or None. The replicas move after that: see `wait_reassigned`.
        """
        wanted = {TopicPartition(*where): replicas for where, replicas in targets.items()}
        return await alter_reassignments(self._cluster, wanted, self._timeout_s)

    async def list_partition_reassignments(
        self, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """The reassignments that are running: all, or those of these partitions."""
        wanted = None if partitions is None else [TopicPartition(*each) for each in partitions]
        return await list_reassignments(self._cluster, wanted, self._timeout_s)

    async def wait_reassigned(self, partitions: Iterable[tuple[str, int]], on_progress: OnMoved | None = None) -> None:
        """Until no reassignment of these partitions is running, for as long as it takes."""
        wanted = [TopicPartition(*each) for each in partitions]
        await wait_reassigned(self._cluster, wanted, self._timeout_s, on_progress)

    async def drain_broker(
        self, broker_id: int, *, wait: bool = True, on_progress: OnDrain | None = None
    ) -> DrainProgress:
        """Move every replica of a broker to the others; with `wait` returns when it has none.

        Raises INVALID_REPLICATION_FACTOR, before anything is moved, when there are too few other brokers.
        """
        return await drain_broker(self._cluster, broker_id, self._timeout_s, wait=wait, on_progress=on_progress)

    async def unregister_broker(self, broker_id: int) -> None:
        """Let the cluster forget a broker that is stopped and has no replica."""
        await unregister_broker(self._cluster, broker_id, self._timeout_s)

    # -- configurations

    async def describe_configs(
        self, resources: Iterable[ConfigResource], *, keys: Iterable[str] = (), with_documentation: bool = False
    ) -> dict[ConfigResource, dict[str, ConfigValue]]:
        """The configurations of topics and brokers by key."""
        asked = [m.DescribeConfigsResource(each.resource_type, each.name, tuple(keys)) for each in resources]

        def errors(response: m.DescribeConfigsResponse) -> list[tuple[str, int, str | None]]:
            return [(each.resource_name, each.error_code, each.error_message) for each in response.results]

        request = m.DescribeConfigsRequest(asked, include_documentation=with_documentation)
        response: m.DescribeConfigsResponse = await self._call("DescribeConfigs", request, errors)
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
        """Change single configuration keys (Kafka's IncrementalAlterConfigs)."""
        resources = [
            m.AlterConfigsResource(
                resource.resource_type,
                resource.name,
                [m.AlterableConfig(each.name, each.operation, each.value) for each in alterations],
            )
            for resource, alterations in changes.items()
        ]

        def errors(response: m.IncrementalAlterConfigsResponse) -> list[tuple[str, int, str | None]]:
            return [(each.resource_name, each.error_code, each.error_message) for each in response.responses]

        request = m.IncrementalAlterConfigsRequest(resources, validate_only)
        await self._call("IncrementalAlterConfigs", request, errors)

    # -- users

    async def describe_user_scram_credentials(
        self, users: Iterable[str] | None = None
    ) -> dict[str, list[ScramCredentialInfo]]:
        """The SCRAM credentials in the metadata log, of these users or of all; RESOURCE_NOT_FOUND for no user."""
        return await describe_credentials(self._cluster, users, self._timeout_s)

    async def set_user_scram_credential(
        self, user: str, mechanism: ScramMechanism, password: str, *, iterations: int = ITERATIONS_MIN
    ) -> None:
        """Give a user a SCRAM credential, or another one; holds for new connections. The password is not sent."""
        await set_credential(self._cluster, user, mechanism, password, iterations, self._timeout_s)

    async def delete_user_scram_credential(self, user: str, mechanism: ScramMechanism) -> None:
        """Take a user's SCRAM credential away; RESOURCE_NOT_FOUND where there is none."""
        await delete_credential(self._cluster, user, mechanism, self._timeout_s)

    # -- offsets and the cluster

    async def list_offsets(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after a timestamp in ms, or TIMESTAMP_EARLIEST, _LATEST, _MAX."""
        wanted = {TopicPartition(*where): timestamp for where, timestamp in timestamps.items()}
        return await list_offsets(self._cluster, wanted, self._timeout_s)

    async def delete_records(self, offsets: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: all up to the high watermark); the new first offsets."""
        wanted = {TopicPartition(*where): offset for where, offset in offsets.items()}
        return await delete_records(self._cluster, wanted, self._timeout_s)

    async def describe_cluster(self) -> ClusterDescription:
        """The brokers, as one of them sees them now."""
        response = await self._metadata_of(m.MetadataRequest())
        brokers = sorted(Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers)
        return ClusterDescription(response.cluster_id, response.controller_id, brokers)

    async def describe_quorum(self) -> QuorumDescription:
        """The metadata quorum, as its leader sees it."""

        def errors(response: m.DescribeQuorumResponse) -> list[tuple[str, int, str | None]]:
            inner = [each for topic in response.topics for each in topic.partitions]
            return [
                ("the quorum", response.error_code, response.error_message),
                *(("the quorum", each.error_code, each.error_message) for each in inner),
            ]

        return quorum_description(await self._call("DescribeQuorum", DESCRIBE_QUORUM, errors, service="Quorum"))

    async def list_fetch_sessions(self, broker_id: int | None = None) -> list[BrokerSessions]:
        """The fetch sessions at one broker, or at all of them; what a broker did not say has its `error`."""
        found = await self.describe_cluster()
        return await list_fetch_sessions(self._cluster, list(found.brokers), broker_id)

    async def describe_log_dirs(self, broker_id: int) -> list[LogDirDescription]:
        """A broker's data folders, what is in them, and which are offline."""
        return await describe_log_dirs(self._cluster, (await self.describe_cluster()).brokers, broker_id)

    async def inject_fault(self, fault: m.InjectedFault, broker_id: int | None = None) -> dict[int, int]:
        """A fault for tests, at one broker or at each of them: its numbers by the brokers' ids (`kipmesh faults`)."""
        return await inject_fault(self._cluster, (await self.describe_cluster()).brokers, broker_id, fault)

    async def list_faults(self, broker_id: int | None = None) -> dict[int, list[m.InjectedFault]]:
        """The faults that are still to act, by the brokers' ids."""
        return await list_faults(self._cluster, (await self.describe_cluster()).brokers, broker_id)

    async def clear_faults(self, broker_id: int | None = None) -> dict[int, int]:
        """Take all faults away: how many there were, by the brokers' ids."""
        return await clear_faults(self._cluster, (await self.describe_cluster()).brokers, broker_id)

    # -- inside

    @property
    def _request_timeout_ms(self) -> int:
        return self.config.request_timeout_ms

    async def _call(
        self,
        method: str,
        request: Any,
        errors: Callable[[Any], list[tuple[str, int, str | None]]],
        service: str = "Admin",
    ) -> Any:
        said: str | None = None

        def retry(response: Any) -> ErrorCode | None:
            nonlocal said
            said = next((message for _, code, message in errors(response) if code and message), said)
            codes = [KafkaError(code).code for _, code, _ in errors(response) if code]
            # What a second attempt cannot have changed for all of them is not asked again.
            again = [code for code in codes if code.retriable and code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
            return again[0] if again and len(again) == len(errors(response)) else None

        try:
            response = await self._cluster.call_any(service, method, request, self._timeout_s, retry)
        except KafkaError as error:
            if said is None:
                raise
            raise KafkaError(error.code, said) from None  # what a broker said tells more than how the last try ended
        for name, code, message in errors(response):
            if code:
                raise KafkaError(code, message or name)
        return response

    async def _metadata_of(self, request: m.MetadataRequest) -> m.MetadataResponse:
        def retry(response: m.MetadataResponse) -> ErrorCode | None:
            return None if response.brokers else ErrorCode.BROKER_NOT_AVAILABLE

        response: m.MetadataResponse = await self._cluster.call_any(
            "Broker", "Metadata", request, self._timeout_s, retry
        )
        return response

    async def _describe(self, names: Sequence[str]) -> list[TopicMetadata]:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names])
        response = await self._metadata_of(request)
        for each in response.topics:
            if each.error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                raise KafkaError(each.error_code, f"topic {each.name!r}")
        return [topic_metadata(each.name or "", each) for each in response.topics if not each.error_code]

    async def _wait_for(self, names: Sequence[str], condition: Callable[[Mapping[str, TopicMetadata]], bool]) -> None:
        """Until every broker that answers sees these topics as wanted; they follow the controller after a moment."""
        deadline = time.monotonic() + self._timeout_s
        delay = 0.005
        while not await self._everywhere(names, condition):
            if time.monotonic() + delay >= deadline:
                text = f"the metadata of {', '.join(names)} did not become complete"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
            await asyncio.sleep(delay)
            delay = min(delay * 2, _POLL_S_MAX)

    async def _everywhere(self, names: Sequence[str], condition: Callable[[Mapping[str, TopicMetadata]], bool]) -> bool:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names])
        answered = False
        for address in self._cluster.metadata.candidates():
            try:
                response: m.MetadataResponse = await self._cluster.pool.get(address).call(
                    "Broker", "Metadata", request, self.config.request_timeout_ms / 1000
                )
            except TransportError:
                continue
            answered = True
            found = [topic_metadata(each.name or "", each) for each in response.topics if not each.error_code]
            if not condition({topic.name: topic for topic in found}):
                return False
        return answered


def _creatable(topic: NewTopic) -> m.CreatableTopic:
    return m.CreatableTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [m.CreatableReplicaAssignment(index, tuple(ids)) for index, ids in topic.assignments.items()],
        [m.ConfigEntry(name, str(value)) for name, value in topic.configs.items()],
    )


def _led(topic: TopicMetadata | None, topic_id: bytes = b"") -> bool:
    if topic is None or not topic.partitions or (topic_id and topic.topic_id != topic_id):
        return False
    return all(each.leader_id >= 0 for each in topic.partitions.values())
