"""The service `Admin` of the cluster in memory; see `fake_broker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.rpc.server import RequestContext

if TYPE_CHECKING:
    from kipmesh.testing.fake_broker import FakeCluster


class FakeAdmin:
    """Topics and their configurations."""

    def __init__(self, cluster: FakeCluster, node_id: int) -> None:
        self._cluster = cluster
        self._node_id = node_id

    async def _fault(self, method: str, request: object) -> ErrorCode | None:
        fault = await self._cluster.meet(method, self._node_id, request)
        if fault is not None and fault.code is None:
            raise ConnectionAbortedError("injected")
        return fault.code if fault is not None else None

    async def create_topics(self, request: m.CreateTopicsRequest, _context: RequestContext) -> m.CreateTopicsResponse:
        """CreateTopics."""
        code = await self._fault("CreateTopics", request)
        results = []
        for topic in request.topics:
            error = code or (ErrorCode.TOPIC_ALREADY_EXISTS if topic.name in self._cluster.topics else None)
            count = 1 if topic.num_partitions < 0 else topic.num_partitions
            if error is not None:
                results.append(m.CreatableTopicResult(topic.name, error_code=error, error_message=f"{topic.name}: no"))
                continue
            topic_id = b"\0" * 16
            if not request.validate_only:
                created = self._cluster.create_topic(topic.name, count)
                created.configs.update({each.name: each.value or "" for each in topic.configs})
                topic_id = created.topic_id
            results.append(m.CreatableTopicResult(topic.name, topic_id, num_partitions=count, replication_factor=1))
        return m.CreateTopicsResponse(topics=results)

    async def delete_topics(self, request: m.DeleteTopicsRequest, _context: RequestContext) -> m.DeleteTopicsResponse:
        """DeleteTopics, by name."""
        code = await self._fault("DeleteTopics", request)
        results = []
        for topic in request.topics:
            found = None if code else self._cluster.topics.pop(topic.name or "", None)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            results.append(m.DeletableTopicResult(topic.name, found.topic_id if found else b"", error))
        return m.DeleteTopicsResponse(responses=results)

    async def create_partitions(
        self, request: m.CreatePartitionsRequest, _context: RequestContext
    ) -> m.CreatePartitionsResponse:
        """CreatePartitions."""
        code = await self._fault("CreatePartitions", request)
        results = []
        for asked in request.topics:
            found = self._cluster.topics.get(asked.name)
            if code or found is None or asked.count <= len(found.partitions):
                error = code or (ErrorCode.INVALID_PARTITIONS if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                results.append(m.CreatePartitionsTopicResult(asked.name, error))
                continue
            fresh = self._cluster.partitions(asked.count)
            found.partitions.extend(fresh[len(found.partitions) :])
            results.append(m.CreatePartitionsTopicResult(asked.name))
        return m.CreatePartitionsResponse(results=results)

    async def describe_configs(
        self, request: m.DescribeConfigsRequest, _context: RequestContext
    ) -> m.DescribeConfigsResponse:
        """DescribeConfigs of topics: what was set."""
        code = await self._fault("DescribeConfigs", request)
        results = []
        for asked in request.resources:
            found = self._cluster.topics.get(asked.resource_name)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            values = [
                m.DescribeConfigsResourceResult(name, value, False, 1)
                for name, value in (found.configs if found else {}).items()
                if not asked.configuration_keys or name in asked.configuration_keys
            ]
            results.append(m.DescribeConfigsResult(error, None, asked.resource_type, asked.resource_name, values))
        return m.DescribeConfigsResponse(results=results)

    async def incremental_alter_configs(
        self, request: m.IncrementalAlterConfigsRequest, _context: RequestContext
    ) -> m.IncrementalAlterConfigsResponse:
        """IncrementalAlterConfigs of topics: set and delete."""
        code = await self._fault("IncrementalAlterConfigs", request)
        responses = []
        for asked in request.resources:
            found = self._cluster.topics.get(asked.resource_name)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if found is not None and not error and not request.validate_only:
                for each in asked.configs:
                    if each.config_operation == 1:
                        found.configs.pop(each.name, None)
                    else:
                        found.configs[each.name] = each.value or ""
            responses.append(m.AlterConfigsResourceResponse(error, None, asked.resource_type, asked.resource_name))
        return m.IncrementalAlterConfigsResponse(responses=responses)

    async def elect_leaders(self, request: m.ElectLeadersRequest, _context: RequestContext) -> m.ElectLeadersResponse:
        """ElectLeaders; there is always a leader, so that an unclean election is never needed."""
        code = await self._fault("ElectLeaders", request)
        if code is not None:
            return m.ElectLeadersResponse(error_code=code)
        wanted = {each.topic: each.partitions for each in request.topic_partitions or ()}
        if request.topic_partitions is None:
            wanted = {name: range(len(topic.partitions)) for name, topic in self._cluster.topics.items()}
        results = []
        for name, numbers in wanted.items():
            found = [m.PartitionResult(number, *self._elect(request.election_type, name, number)) for number in numbers]
            if request.topic_partitions is None:
                found = [each for each in found if each.error_code != ErrorCode.ELECTION_NOT_NEEDED]
            results.append(m.ReplicaElectionResult(name, found))
        return m.ElectLeadersResponse(replica_election_results=results)

    def _elect(self, election_type: int, name: str, number: int) -> tuple[ErrorCode, str | None]:
        topic = self._cluster.topics.get(name)
        if topic is None or not 0 <= number < len(topic.partitions):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {name}-{number}"
        found = topic.partitions[number]
        preferred = found.preferred_leader
        if election_type == m.ElectionType.UNCLEAN or found.leader_id == preferred:
            return ErrorCode.ELECTION_NOT_NEEDED, f"broker {found.leader_id} leads"
        if preferred not in found.isr:
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, f"broker {preferred} is behind"
        self._cluster.move_leader(name, number, preferred)
        return ErrorCode.NONE, None

    async def list_partition_reassignments(
        self, request: m.ListPartitionReassignmentsRequest, _context: RequestContext
    ) -> m.ListPartitionReassignmentsResponse:
        """ListPartitionReassignments: what the test says (`FakeCluster.reassigning`)."""
        code = await self._fault("ListPartitionReassignments", request)
        if code is not None:
            return m.ListPartitionReassignmentsResponse(error_code=code)
        asked = {(topic.name, number) for topic in request.topics or () for number in topic.partition_indexes}
        found = [
            m.OngoingTopicReassignment(name, [one])
            for name, one in self._cluster.reassigning
            if request.topics is None or (name, one.partition_index) in asked
        ]
        return m.ListPartitionReassignmentsResponse(topics=found)
