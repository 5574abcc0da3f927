"""An in-memory cluster with real gRPC servers, for tests of clients. Injects faults on request.

`FakeCluster` has topics, partitions and brokers; each broker is a gRPC server. There is no replication: the test
chooses leaders (`move_leader`), all brokers share the partition's log, and a follower (`FakeFollower`) serves the part
of the log that the test allows. Leaders redirect consumers to followers in their rack (KIP-392). Fetch sessions use the
real broker's core (`fake_sessions`); a restarted broker has none. `inject` queues faults per method, `hook` runs before
each request. To test a server, use the real broker.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from kipmesh import messages as m
from kipmesh.client.calls import api_of
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import check_crc, parse_header
from kipmesh.testing.fake_partitions import FakeFollower, FakePartition, FakeTopic, epoch_end
from kipmesh.testing.fake_sessions import FakeReader, FakeSessions, Preference
from kipmesh.transport.grpc.server import RequestContext, Server
from kipmesh.transport.pipeline import pipeline_of

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Hook = Callable[[str, int, Any], Awaitable[Any]]


@dataclass(slots=True)
class Fault:
    """A fault in the next `times` calls of a method. See FakeCluster.inject."""

    code: ErrorCode | None = None
    """Error of every partition, or of those of `topic`."""
    times: int = 1
    after: bool = False
    """Execute the request before failing. Only for Produce and Fetch."""
    hang: bool = False
    """Never respond."""
    malformed: Any = None
    """Response to return instead of the real one."""
    topic: str | None = None
    twice: bool = False
    """Execute a fetch twice and return the first response."""
    delay_s: float = 0.0
    """Delay of the response of a fetch."""


class FakeCluster:
    """An in-memory cluster, started and stopped by `async with`.

    Args: brokers: number of brokers, with ids from 1; session_slots: fetch session cache size of each broker.

    `calls` records each request as (method, broker id, request). `hook` is awaited with the same values and may raise.
    """

    def __init__(self, brokers: int = 1, session_slots: int = 1000) -> None:
        self.session_slots = session_slots
        self.topics: dict[str, FakeTopic] = {}
        self.brokers: dict[int, FakeBroker] = {}
        self.calls: list[tuple[str, int, Any]] = []
        self.racks: dict[int, str] = {}
        self.reassigning: list[tuple[str, m.OngoingPartitionReassignment]] = []
        self.message_bytes_max = 1 << 20
        self.hook: Hook | None = None
        self.appended = asyncio.Event()
        self.producer_ids = count(1000)
        self._faults: dict[str, list[Fault]] = {}
        self._count = brokers

    async def __aenter__(self) -> FakeCluster:
        for node_id in range(1, self._count + 1):
            await self.add_broker(node_id)
        return self

    async def __aexit__(self, *_: object) -> None:
        for broker in list(self.brokers.values()):
            await broker.stop()
            broker.release_port()

    @property
    def bootstrap(self) -> str:
        """Bootstrap addresses: comma-separated host:port."""
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers.values())

    async def add_broker(self, node_id: int) -> FakeBroker:
        """Start another broker on a free port and return it."""
        broker = self.brokers[node_id] = FakeBroker(node_id, self)
        await broker.start()
        return broker

    def create_topic(self, name: str, partitions: int = 1, replicas: int = 1) -> FakeTopic:
        """Create a topic with leaders assigned round-robin, and `replicas` replicas including the leader.

        Replaces a topic of that name and its records.
        """
        self.topics[name] = FakeTopic(name, secrets.token_bytes(16), self.partitions(partitions, replicas))
        return self.topics[name]

    def partitions(self, count: int, replicas: int = 1) -> list[FakePartition]:
        """Return `count` new partitions, which belong to no topic yet.

        Leaders are assigned round-robin; the next `replicas` - 1 brokers are their followers.
        """
        ids = sorted(self.brokers)
        found = [FakePartition(ids[index % len(ids)]) for index in range(count)]
        for index, partition in enumerate(found):
            others = [ids[(index + step) % len(ids)] for step in range(1, replicas)]
            partition.followers = {node: FakeFollower() for node in others}
        return found

    def move_leader(self, topic: str, partition: int, leader_id: int) -> None:
        """Make `leader_id` the leader in the next leader epoch (-1: no leader).

        If it was a follower, the old leader becomes a follower in its place. Raises KeyError or IndexError for an
        unknown partition.
        """
        found = self.topics[topic].partitions[partition]
        if found.followers.pop(leader_id, None) is not None:
            found.followers[found.leader_id] = FakeFollower()
        found.leader_id = leader_id
        found.leader_epoch += 1

    def inject(self, method: str, code: ErrorCode | None = None, **fault: Any) -> None:
        """Make the next calls of `method`, for example "Produce", fail. Faults of a method apply one after another.

        `fault` has the other fields of Fault. Without `code`, `hang` and `malformed`, the call is aborted, unless it is
        a fetch and `twice` or `delay_s` is set.
        """
        self._faults.setdefault(method, []).append(Fault(code, **fault))

    async def take_fault(self, method: str, node_id: int, request: Any) -> Fault | None:
        """Record a call, run the hook, and return the fault that applies to the call, or None.

        Counts the call in the fault's `times`. Raises the error of the hook.
        """
        self.calls.append((method, node_id, request))
        if self.hook is not None:
            await self.hook(method, node_id, request)
        queue = self._faults.get(method, [])
        if not queue:
            return None
        fault = queue[0]
        fault.times -= 1
        if fault.times <= 0:
            queue.pop(0)
        return fault


def with_faults(
    respond: Callable[[FakeBroker, RequestT, Fault | None], ResponseT],
) -> Callable[[FakeBroker, RequestT, RequestContext], Awaitable[ResponseT]]:
    """Return a handler of a fake broker's method that records the call, calls `respond` and applies the injected fault.

    With a fault, the handler hangs until the broker stops, replaces the response, or raises ConnectionAbortedError.
    `respond` receives the fault (None without one) to set error codes.
    """

    @functools.wraps(respond)
    async def handler(broker: FakeBroker, request: RequestT, _context: RequestContext) -> ResponseT:
        fault = await broker.cluster.take_fault(api_of(request).rpc, broker.node_id, request)
        response = respond(broker, request, fault)
        if fault is None:
            return response
        if fault.hang:
            await broker.stopping.wait()
        if fault.malformed is not None:
            response = fault.malformed
        elif fault.code is None:
            raise ConnectionAbortedError("injected")
        return response

    return handler


def with_error(
    respond: Callable[[FakeAdmin, RequestT, ErrorCode | None], ResponseT],
) -> Callable[[FakeAdmin, RequestT, RequestContext], Awaitable[ResponseT]]:
    """Return a handler of a FakeAdmin method that records the call and calls `respond` with the injected error code.

    The code is None without a fault. A fault without `code` raises ConnectionAbortedError; its other fields are
    ignored.
    """

    @functools.wraps(respond)
    async def handler(admin: FakeAdmin, request: RequestT, _context: RequestContext) -> ResponseT:
        fault = await admin.cluster.take_fault(api_of(request).rpc, admin.node_id, request)
        if fault is not None and fault.code is None:
            raise ConnectionAbortedError("injected")
        return respond(admin, request, fault.code if fault is not None else None)

    return handler


class FakeAdmin:
    """The `Admin` service of a fake broker: topics, configurations, elections and reassignments."""

    def __init__(self, cluster: FakeCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id

    @with_error
    def create_topics(self, request: m.CreateTopicsRequest, code: ErrorCode | None) -> m.CreateTopicsResponse:
        """Handle CreateTopics with replication factor 1. Returns TOPIC_ALREADY_EXISTS for an existing topic."""
        results = []
        for topic in request.topics:
            error = code or (ErrorCode.TOPIC_ALREADY_EXISTS if topic.name in self.cluster.topics else None)
            count = 1 if topic.num_partitions < 0 else topic.num_partitions
            if error is not None:
                results.append(m.CreatableTopicResult(topic.name, error_code=error, error_message=f"{topic.name}: no"))
                continue
            topic_id = b"\0" * 16
            if not request.validate_only:
                created = self.cluster.create_topic(topic.name, count)
                created.configs.update({each.name: each.value or "" for each in topic.configs})
                topic_id = created.topic_id
            results.append(m.CreatableTopicResult(topic.name, topic_id, num_partitions=count, replication_factor=1))
        return m.CreateTopicsResponse(topics=results)

    @with_error
    def delete_topics(self, request: m.DeleteTopicsRequest, code: ErrorCode | None) -> m.DeleteTopicsResponse:
        """Handle DeleteTopics by name; ignores ids. Returns UNKNOWN_TOPIC_OR_PARTITION for an unknown topic."""
        results = []
        for topic in request.topics:
            found = None if code else self.cluster.topics.pop(topic.name or "", None)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            results.append(m.DeletableTopicResult(topic.name, found.topic_id if found else b"", error))
        return m.DeleteTopicsResponse(responses=results)

    @with_error
    def create_partitions(
        self, request: m.CreatePartitionsRequest, code: ErrorCode | None
    ) -> m.CreatePartitionsResponse:
        """Handle CreatePartitions. New partitions have one replica. Ignores `validate_only`.

        Returns INVALID_PARTITIONS unless the number grows, UNKNOWN_TOPIC_OR_PARTITION for an unknown topic.
        """
        results = []
        for topic in request.topics:
            found = self.cluster.topics.get(topic.name)
            if code or found is None or topic.count <= len(found.partitions):
                error = code or (ErrorCode.INVALID_PARTITIONS if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                results.append(m.CreatePartitionsTopicResult(topic.name, error))
                continue
            fresh = self.cluster.partitions(topic.count)
            found.partitions.extend(fresh[len(found.partitions) :])
            results.append(m.CreatePartitionsTopicResult(topic.name))
        return m.CreatePartitionsResponse(results=results)

    @with_error
    def describe_configs(self, request: m.DescribeConfigsRequest, code: ErrorCode | None) -> m.DescribeConfigsResponse:
        """Handle DescribeConfigs of topics; returns only values that were set.

        Returns UNKNOWN_TOPIC_OR_PARTITION for an unknown topic or another resource type.
        """
        results = []
        for resource in request.resources:
            found = self.cluster.topics.get(resource.resource_name)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            values = [
                m.DescribeConfigsResourceResult(name, value, False, 1)
                for name, value in (found.configs if found else {}).items()
                if not resource.configuration_keys or name in resource.configuration_keys
            ]
            results.append(m.DescribeConfigsResult(error, None, resource.resource_type, resource.resource_name, values))
        return m.DescribeConfigsResponse(results=results)

    @with_error
    def incremental_alter_configs(
        self, request: m.IncrementalAlterConfigsRequest, code: ErrorCode | None
    ) -> m.IncrementalAlterConfigsResponse:
        """Handle IncrementalAlterConfigs of topics: DELETE removes a value, any other operation sets it.

        Returns UNKNOWN_TOPIC_OR_PARTITION for an unknown topic or another resource type.
        """
        responses = []
        for resource in request.resources:
            found = self.cluster.topics.get(resource.resource_name)
            error = code or (ErrorCode.NONE if found else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if found is not None and not error and not request.validate_only:
                for each in resource.configs:
                    if each.config_operation == 1:
                        found.configs.pop(each.name, None)
                    else:
                        found.configs[each.name] = each.value or ""
            responses.append(
                m.AlterConfigsResourceResponse(error, None, resource.resource_type, resource.resource_name)
            )
        return m.IncrementalAlterConfigsResponse(responses=responses)

    @with_error
    def elect_leaders(self, request: m.ElectLeadersRequest, code: ErrorCode | None) -> m.ElectLeadersResponse:
        """Handle ElectLeaders: the first leader of a partition is the preferred one.

        Returns ELECTION_NOT_NEEDED for an unclean election or if the preferred leader already leads,
        PREFERRED_LEADER_NOT_AVAILABLE if it is not in sync, UNKNOWN_TOPIC_OR_PARTITION for an unknown partition.
        """
        if code is not None:
            return m.ElectLeadersResponse(error_code=code)
        wanted = {each.topic: each.partitions for each in request.topic_partitions or ()}
        if request.topic_partitions is None:
            wanted = {name: range(len(topic.partitions)) for name, topic in self.cluster.topics.items()}
        results = []
        for name, numbers in wanted.items():
            found = [m.PartitionResult(number, *self._elect(request.election_type, name, number)) for number in numbers]
            if request.topic_partitions is None:
                found = [each for each in found if each.error_code != ErrorCode.ELECTION_NOT_NEEDED]
            results.append(m.ReplicaElectionResult(name, found))
        return m.ElectLeadersResponse(replica_election_results=results)

    def _elect(self, election_type: int, name: str, number: int) -> tuple[ErrorCode, str | None]:
        topic = self.cluster.topics.get(name)
        if topic is None or not 0 <= number < len(topic.partitions):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"partition {name}-{number} does not exist"
        found = topic.partitions[number]
        preferred = found.preferred_leader
        if election_type == m.ElectionType.UNCLEAN or found.leader_id == preferred:
            return ErrorCode.ELECTION_NOT_NEEDED, f"broker {found.leader_id} is the leader already"
        if preferred not in found.isr:
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, f"broker {preferred} is not in sync"
        self.cluster.move_leader(name, number, preferred)
        return ErrorCode.NONE, None

    @with_error
    def list_partition_reassignments(
        self, request: m.ListPartitionReassignmentsRequest, code: ErrorCode | None
    ) -> m.ListPartitionReassignmentsResponse:
        """Handle ListPartitionReassignments with the entries of `FakeCluster.reassigning`."""
        if code is not None:
            return m.ListPartitionReassignmentsResponse(error_code=code)
        requested = {(topic.name, number) for topic in request.topics or () for number in topic.partition_indexes}
        found = [
            m.OngoingTopicReassignment(name, [one])
            for name, one in self.cluster.reassigning
            if request.topics is None or (name, one.partition_index) in requested
        ]
        return m.ListPartitionReassignmentsResponse(topics=found)


class FakeBroker:
    """A fake broker: a gRPC server with the services `Broker` and `Admin`."""

    def __init__(self, node_id: int, cluster: FakeCluster) -> None:
        self.node_id = node_id
        self.port = 0
        self.sessions = FakeSessions(cluster.topics, cluster.session_slots)
        self.cluster = cluster
        self._server: Server | None = None
        self._kept_port: socket.socket | None = None
        self.stopping = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        """Start the server on `port`; 0 means its previous port, or a free one if it had none. Sessions start empty."""
        self.stopping.clear()
        self.sessions = FakeSessions(self.cluster.topics, self.cluster.session_slots)
        self._server = Server(pipeline_of({"Broker": self, "Admin": FakeAdmin(self.cluster, self.node_id)}))
        self.port = await self._server.start("127.0.0.1", port or self.port)
        self.release_port()

    async def stop(self) -> None:
        """Stop the server but keep its port reserved for the next start."""
        self.stopping.set()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)
            # The system never assigns a bound port. A server that requests it by number can still use it.
            self._kept_port = socket.socket()
            self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):  # the port may not be free yet
                self._kept_port.bind(("127.0.0.1", self.port))

    def release_port(self) -> None:
        """Release the port that `stop` reserved. Does nothing if none is reserved."""
        kept, self._kept_port = self._kept_port, None
        if kept is not None:
            kept.close()

    def _find(self, topic: str, topic_id: bytes, index: int) -> FakePartition | ErrorCode:
        found = self.cluster.topics.get(topic)
        if found is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if topic_id and topic_id != found.topic_id:
            return ErrorCode.UNKNOWN_TOPIC_ID
        if not 0 <= index < len(found.partitions):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return found.partitions[index]

    def _led(self, topic: str, topic_id: bytes, index: int, epoch: int = -1) -> FakePartition | ErrorCode:
        found = self._served(topic, topic_id, index, epoch)
        if not isinstance(found, ErrorCode) and found.leader_id != self.node_id:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return found

    def _led_or_fault(self, fault: Fault | None, *where: Any) -> FakePartition | ErrorCode:
        return self._led(*where) if fault is None else fault.code or ErrorCode.NONE

    def _served(self, topic: str, topic_id: bytes, index: int, epoch: int = -1) -> FakePartition | ErrorCode:
        found = self._find(topic, topic_id, index)
        if isinstance(found, ErrorCode):
            return found
        if self.node_id not in (found.leader_id, *found.followers):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if epoch >= 0 and epoch != found.leader_epoch:
            fenced = epoch < found.leader_epoch
            return ErrorCode.FENCED_LEADER_EPOCH if fenced else ErrorCode.UNKNOWN_LEADER_EPOCH
        return found

    # -- Broker

    @with_faults
    def init_producer_id(self, _request: m.InitProducerIdRequest, fault: Fault | None) -> m.InitProducerIdResponse:
        """Handle InitProducerId: return a new id with epoch 0 for every request."""
        if fault is not None:
            return m.InitProducerIdResponse(error_code=fault.code or ErrorCode.UNKNOWN_SERVER_ERROR)
        return m.InitProducerIdResponse(producer_id=next(self.cluster.producer_ids), producer_epoch=0)

    @with_faults
    def produce(self, request: m.ProduceRequest, fault: Fault | None) -> m.ProduceResponse:
        """Handle Produce for partitions that this broker leads.

        Returns MESSAGE_TOO_LARGE above `FakeCluster.message_bytes_max`; raises KafkaError for an invalid batch. A fault
        with `after` appends the records and responds with its code.
        """
        topics = []
        for topic in request.topic_data:
            parts = []
            for each in topic.partition_data:
                failing = fault is not None and fault.topic in (None, topic.name)
                code = fault.code if fault is not None and failing else None
                if failing and fault is not None and not fault.after:
                    parts.append(m.PartitionProduceResponse(each.index, code or ErrorCode.UNKNOWN_SERVER_ERROR))
                    continue
                response = self._append(topic.name, topic.topic_id, each.index, each.records)
                parts.append(response._replace(error_code=code, base_offset=-1) if code else response)
            topics.append(m.TopicProduceResponse(topic.name, topic.topic_id, parts))
        return m.ProduceResponse(topics, node_endpoints=self._endpoints())

    def _append(self, topic: str, topic_id: bytes, index: int, records: bytes) -> m.PartitionProduceResponse:
        found = self._led(topic, topic_id, index)
        if isinstance(found, ErrorCode):
            return m.PartitionProduceResponse(index, found, current_leader=self._leader(topic, index))
        if len(records) > self.cluster.message_bytes_max:
            return m.PartitionProduceResponse(index, ErrorCode.MESSAGE_TOO_LARGE)
        header = parse_header(records)
        check_crc(records, 0, header)
        try:
            base = found.append(records)
        except KafkaError as error:
            return m.PartitionProduceResponse(index, error.code, error_message=error.message)
        self.cluster.appended.set()
        self.cluster.appended = asyncio.Event()
        return m.PartitionProduceResponse(index, 0, base, -1, found.log_start_offset)

    def _leader(self, topic: str, index: int) -> m.LeaderIdAndEpoch | None:
        found = self._find(topic, b"", index)
        return None if isinstance(found, ErrorCode) else m.LeaderIdAndEpoch(found.leader_id, found.leader_epoch)

    def _endpoints(self) -> list[m.NodeEndpoint]:
        return [
            m.NodeEndpoint(each.node_id, "127.0.0.1", each.port, self.cluster.racks.get(each.node_id))
            for each in self.cluster.brokers.values()
        ]

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        """Handle Fetch with fetch sessions; waits for `min_bytes` for up to `max_wait_ms`, or until the broker stops.

        A fault without `code` and `malformed` raises ConnectionAbortedError before the fetch, or after it if `after` is
        set. `twice` and `delay_s` alone do not fail the fetch.
        """
        fault = await self.cluster.take_fault("Fetch", self.node_id, request)
        if fault is None:
            return await self._fetch(request, context, None)
        if fault.hang:
            await self.stopping.wait()
        if fault.malformed is not None:
            malformed: m.FetchResponse = fault.malformed
            return malformed
        if fault.code is None and not (fault.after or fault.twice or fault.delay_s):
            raise ConnectionAbortedError("injected")
        response = await self._fetch(request, context, fault)
        if fault.twice:
            await self._fetch(request._replace(max_wait_ms=0), context, None)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.after and fault.code is None:
            raise ConnectionAbortedError("injected")
        return response

    async def _fetch(self, request: m.FetchRequest, context: RequestContext, fault: Fault | None) -> m.FetchResponse:
        def error_of(topic: str) -> ErrorCode:
            if fault is None or fault.code is None or fault.topic not in (None, topic):
                return ErrorCode.NONE
            return fault.code

        if fault is not None and fault.code is not None:
            self.sessions.mark_all_changed()
            request = request._replace(max_wait_ms=0)
        prefers: Preference = lambda found: -1  # noqa: E731
        if request.replica_id == -1 and request.rack_id:
            prefers = lambda found: found.preferred(request.rack_id, self.cluster.racks)  # noqa: E731
        reader = FakeReader(self.cluster.topics, self.node_id, self._served, error_of, prefers)
        response = await self.sessions.fetch(request, context.client_id, reader, self._wait)
        if fault is not None and fault.code is not None:
            self.sessions.mark_all_changed()
        return response._replace(node_endpoints=self._endpoints())

    async def list_fetch_sessions(
        self, request: m.ListFetchSessionsRequest, _context: RequestContext
    ) -> m.ListFetchSessionsResponse:
        """Handle ListFetchSessions with the sessions of this broker. Of a fault, only `hang` and `code` apply."""
        fault = await self.cluster.take_fault("ListFetchSessions", self.node_id, request)
        if fault is not None and fault.hang:
            await self.stopping.wait()
        if fault is not None and fault.code is not None:
            return m.ListFetchSessionsResponse(fault.code, "injected", self.node_id)
        return m.ListFetchSessionsResponse(node_id=self.node_id, sessions=self.sessions.list())

    async def _wait(self, woken: asyncio.Event, seconds: float) -> bool:
        events = (woken, self.cluster.appended, self.stopping)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return seconds > 0 and not self.stopping.is_set()

    @with_faults
    def list_offsets(self, request: m.ListOffsetsRequest, fault: Fault | None) -> m.ListOffsetsResponse:
        """Handle ListOffsets for partitions that this broker leads.

        Timestamp -1 selects the end of the log, -2 its start, -3 the batch with the largest timestamp. For any other
        timestamp, returns the base offset of the first batch whose maximum timestamp is not older, or offset -1.
        """
        return m.ListOffsetsResponse(
            topics=[
                m.ListOffsetsTopicResponse(
                    topic.name,
                    topic.topic_id,
                    [self._offset(topic.name, topic.topic_id, each, fault) for each in topic.partitions],
                )
                for topic in request.topics
            ]
        )

    def _offset(
        self, topic: str, topic_id: bytes, requested: m.ListOffsetsPartition, fault: Fault | None
    ) -> m.ListOffsetsPartitionResponse:
        index = requested.partition_index
        if fault is not None:
            return m.ListOffsetsPartitionResponse(index, fault.code or 0)
        found = self._led(topic, topic_id, index, requested.current_leader_epoch)
        if isinstance(found, ErrorCode):
            return m.ListOffsetsPartitionResponse(index, found)
        epoch = found.leader_epoch
        if requested.timestamp == -1:
            return m.ListOffsetsPartitionResponse(index, 0, -1, found.end_offset, epoch)
        if requested.timestamp == -2:
            return m.ListOffsetsPartitionResponse(index, 0, -1, found.log_start_offset, epoch)
        headers = [header for header, _ in found.batches]
        if requested.timestamp == -3:
            headers = sorted(headers, key=lambda header: -header.max_timestamp)
        for header in headers:
            if requested.timestamp == -3 or header.max_timestamp >= requested.timestamp:
                found_at = (header.max_timestamp, header.base_offset, header.partition_leader_epoch)
                return m.ListOffsetsPartitionResponse(index, 0, *found_at)
        return m.ListOffsetsPartitionResponse(index, 0)

    @with_faults
    def offsets_for_leader_epoch(
        self, request: m.OffsetsForLeaderEpochRequest, fault: Fault | None
    ) -> m.OffsetsForLeaderEpochResponse:
        """Handle OffsetsForLeaderEpoch with `epoch_end`, for partitions that this broker leads."""

        def end_of(topic: m.OffsetForLeaderTopic, each: m.OffsetForLeaderPartition) -> m.OffsetForLeaderPartitionResult:
            found = self._led_or_fault(fault, topic.topic, topic.topic_id, each.partition, each.current_leader_epoch)
            if isinstance(found, ErrorCode):
                return m.OffsetForLeaderPartitionResult(found, each.partition)
            end = epoch_end(found, each.leader_epoch)
            return m.OffsetForLeaderPartitionResult(0, each.partition, end.epoch, end.end_offset)

        topics = [
            m.OffsetForLeaderTopicResult(
                topic.topic, topic.topic_id, [end_of(topic, each) for each in topic.partitions]
            )
            for topic in request.topics
        ]
        return m.OffsetsForLeaderEpochResponse(topics=topics)

    @with_faults
    def delete_records(self, request: m.DeleteRecordsRequest, fault: Fault | None) -> m.DeleteRecordsResponse:
        """Handle DeleteRecords: raise the log start offset; offset -1 deletes all records.

        Returns OFFSET_OUT_OF_RANGE for an offset above the end offset.
        """

        def delete(topic: str, each: m.DeleteRecordsPartition) -> m.DeleteRecordsPartitionResult:
            found = self._led_or_fault(fault, topic, b"", each.partition_index)
            if not isinstance(found, ErrorCode) and each.offset > found.end_offset:
                found = ErrorCode.OFFSET_OUT_OF_RANGE
            if isinstance(found, ErrorCode):
                return m.DeleteRecordsPartitionResult(each.partition_index, -1, found)
            offset = found.end_offset if each.offset == -1 else each.offset
            found.log_start_offset = max(found.log_start_offset, offset)
            return m.DeleteRecordsPartitionResult(each.partition_index, found.log_start_offset)

        topics = [
            m.DeleteRecordsTopicResult(topic.name, [delete(topic.name, each) for each in topic.partitions])
            for topic in request.topics
        ]
        return m.DeleteRecordsResponse(topics=topics)

    @with_faults
    def metadata(self, request: m.MetadataRequest, fault: Fault | None) -> m.MetadataResponse:
        """Handle Metadata; ignores topic ids. Returns UNKNOWN_TOPIC_OR_PARTITION for an unknown topic name."""
        cluster = self.cluster
        names = list(cluster.topics) if request.topics is None else [each.name or "" for each in request.topics]
        topics = []
        for name in names:
            topic = cluster.topics.get(name)
            if topic is None or (fault is not None and fault.topic in (None, name)):
                code = fault.code if fault is not None and fault.code else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                topics.append(m.MetadataResponseTopic(code, name))
                continue
            parts = [
                m.MetadataResponsePartition(
                    0,
                    index,
                    each.leader_id,
                    each.leader_epoch,
                    each.replicas,
                    each.isr,
                    each.offline,
                    preferred_read_replica=each.preferred(request.rack_id, cluster.racks) if request.rack_id else -1,
                )
                for index, each in enumerate(topic.partitions)
            ]
            topics.append(m.MetadataResponseTopic(0, name, topic.topic_id, partitions=parts))
        brokers = [
            m.MetadataResponseBroker(each.node_id, "127.0.0.1", each.port, cluster.racks.get(each.node_id))
            for each in cluster.brokers.values()
        ]
        return m.MetadataResponse(brokers=brokers, cluster_id="fake", controller_id=100, topics=topics)
