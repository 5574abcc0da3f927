"""A small cluster in memory that serves real gRPC: what clients are tested against, with faults on demand.

`FakeCluster` has topics, partitions and brokers; each broker is a gRPC server of its own. There is no replication: the
leader of a partition is whoever the test says (`move_leader`), and all brokers share the partition's log; a follower
(`FakeFollower`) serves as much of it as the test lets it have. Leaders redirect readers to followers in their rack.
Fetch sessions are those of the real broker's core (`kipmesh.testing.fake_sessions`); a broker that was stopped and
started has none. Faults are queued by method with `inject`, or made by `hook`. If you are about to test a server, use
the real broker instead.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import check_crc, parse_header
from kipmesh.rpc.server import RequestContext, Server
from kipmesh.testing.fake_admin import FakeAdmin
from kipmesh.testing.fake_partitions import FakeFollower, FakePartition, FakeTopic, epoch_end
from kipmesh.testing.fake_sessions import FakeReader, FakeSessions, Preference
from kipmesh.transport.pipeline import pipeline_of

Hook = Callable[[str, int, Any], Awaitable[Any]]


@dataclass(slots=True)
class Fault:
    """What happens to the next calls of a method; see FakeCluster.inject."""

    code: ErrorCode | None
    times: int
    after: bool
    hang: bool
    malformed: Any
    topic: str | None
    twice: bool
    delay_s: float


class FakeCluster:
    """Brokers 1 to `brokers`. Use `async with`."""

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
            broker.let_port_go()

    @property
    def bootstrap(self) -> str:
        """The brokers' addresses."""
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers.values())

    async def add_broker(self, node_id: int) -> FakeBroker:
        """One more broker."""
        broker = self.brokers[node_id] = FakeBroker(node_id, self)
        await broker.start()
        return broker

    def create_topic(self, name: str, partitions: int = 1, replicas: int = 1) -> FakeTopic:
        """A new topic with leaders in turn; an old one of that name is forgotten with its records."""
        self.topics[name] = FakeTopic(name, secrets.token_bytes(16), self.partitions(partitions, replicas))
        return self.topics[name]

    def partitions(self, count: int, replicas: int = 1) -> list[FakePartition]:
        """Empty partitions, led by the brokers in turn and followed by the next ones."""
        ids = sorted(self.brokers)
        found = [FakePartition(ids[index % len(ids)]) for index in range(count)]
        for index, partition in enumerate(found):
            others = [ids[(index + step) % len(ids)] for step in range(1, replicas)]
            partition.followers = {node: FakeFollower() for node in others}
        return found

    def move_leader(self, topic: str, partition: int, leader_id: int) -> None:
        """Another leader, in the next epoch; if it was a follower, the old one follows."""
        found = self.topics[topic].partitions[partition]
        if found.followers.pop(leader_id, None) is not None:
            found.followers[found.leader_id] = FakeFollower()
        found.leader_id = leader_id
        found.leader_epoch += 1

    def inject(
        self,
        method: str,
        code: ErrorCode | None = None,
        *,
        times: int = 1,
        after: bool = False,
        hang: bool = False,
        malformed: Any = None,
        topic: str | None = None,
        twice: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        """The next `times` calls of `method` (as `Produce`) fail.

        With `code` every partition (or those of `topic`) has that error; with `after` the request is done all the same.
        `hang` never answers, `malformed` is answered as it is, and none of the three breaks the call. Only of a fetch:
        `twice` does the request two times and gives the first answer, `delay_s` keeps the answer back for so long.
        """
        self._faults.setdefault(method, []).append(Fault(code, times, after, hang, malformed, topic, twice, delay_s))

    async def meet(self, method: str, node_id: int, request: Any) -> Fault | None:
        """The fault of this call."""
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


class FakeBroker:
    """One broker; offers the services `Broker` and `Admin`."""

    def __init__(self, node_id: int, cluster: FakeCluster) -> None:
        self.node_id = node_id
        self.port = 0
        self.sessions = FakeSessions(cluster.topics, cluster.session_slots)
        self._cluster = cluster
        self._server: Server | None = None
        self._kept_port: socket.socket | None = None
        self._stopping = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        """Serve, again on the same port after a stop."""
        self._stopping.clear()
        self.sessions = FakeSessions(self._cluster.topics, self._cluster.session_slots)
        self._server = Server(pipeline_of({"Broker": self, "Admin": FakeAdmin(self._cluster, self.node_id)}))
        self.port = await self._server.start("127.0.0.1", port or self.port)
        self.let_port_go()

    async def stop(self) -> None:
        """Answer no more; the port stays this broker's."""
        self._stopping.set()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)
            # Who is given a free port by the system gets none that is bound; a server that asks for it by number does.
            self._kept_port = socket.socket()
            self._kept_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):  # as before, if it is not free yet
                self._kept_port.bind(("127.0.0.1", self.port))

    def let_port_go(self) -> None:
        """Anybody may have it."""
        kept, self._kept_port = self._kept_port, None
        if kept is not None:
            kept.close()

    async def _answer(self, method: str, request: Any, do: Callable[[Any, Fault | None], Any]) -> Any:
        fault = await self._cluster.meet(method, self.node_id, request)
        if fault is None:
            return do(request, None)
        response = do(request, fault)
        if fault.hang:
            await self._stopping.wait()
        if fault.malformed is not None:
            return fault.malformed
        if fault.code is None:
            raise ConnectionAbortedError("injected")
        return response

    def _find(self, topic: str, topic_id: bytes, index: int) -> FakePartition | ErrorCode:
        found = self._cluster.topics.get(topic)
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

    async def produce(self, request: m.ProduceRequest, _context: RequestContext) -> m.ProduceResponse:
        """Produce."""
        response: m.ProduceResponse = await self._answer("Produce", request, self._produce)
        return response

    async def init_producer_id(
        self, request: m.InitProducerIdRequest, _context: RequestContext
    ) -> m.InitProducerIdResponse:
        """InitProducerId."""

        def answer(_request: m.InitProducerIdRequest, fault: Fault | None) -> m.InitProducerIdResponse:
            if fault is not None:
                return m.InitProducerIdResponse(error_code=fault.code or ErrorCode.UNKNOWN_SERVER_ERROR)
            return m.InitProducerIdResponse(producer_id=next(self._cluster.producer_ids), producer_epoch=0)

        response: m.InitProducerIdResponse = await self._answer("InitProducerId", request, answer)
        return response

    def _produce(self, request: m.ProduceRequest, fault: Fault | None) -> m.ProduceResponse:
        topics = []
        for topic in request.topic_data:
            parts = []
            for each in topic.partition_data:
                failing = fault is not None and fault.topic in (None, topic.name)
                code = fault.code if fault is not None and failing else None
                if failing and fault is not None and not fault.after:
                    parts.append(m.PartitionProduceResponse(each.index, code or ErrorCode.UNKNOWN_SERVER_ERROR))
                    continue
                answer = self._append(topic.name, topic.topic_id, each.index, each.records)
                parts.append(answer._replace(error_code=code, base_offset=-1) if code else answer)
            topics.append(m.TopicProduceResponse(topic.name, topic.topic_id, parts))
        return m.ProduceResponse(topics, node_endpoints=self._endpoints())

    def _append(self, topic: str, topic_id: bytes, index: int, records: bytes) -> m.PartitionProduceResponse:
        found = self._led(topic, topic_id, index)
        if isinstance(found, ErrorCode):
            return m.PartitionProduceResponse(index, found, current_leader=self._leader(topic, index))
        if len(records) > self._cluster.message_bytes_max:
            return m.PartitionProduceResponse(index, ErrorCode.MESSAGE_TOO_LARGE)
        header = parse_header(records)
        check_crc(records, 0, header)
        try:
            base = found.append(records)
        except KafkaError as error:
            return m.PartitionProduceResponse(index, error.code, error_message=error.message)
        self._cluster.appended.set()
        self._cluster.appended = asyncio.Event()
        return m.PartitionProduceResponse(index, 0, base, -1, found.log_start_offset)

    def _leader(self, topic: str, index: int) -> m.LeaderIdAndEpoch | None:
        found = self._find(topic, b"", index)
        return None if isinstance(found, ErrorCode) else m.LeaderIdAndEpoch(found.leader_id, found.leader_epoch)

    def _endpoints(self) -> list[m.NodeEndpoint]:
        return [
            m.NodeEndpoint(each.node_id, "127.0.0.1", each.port, self._cluster.racks.get(each.node_id))
            for each in self._cluster.brokers.values()
        ]

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        """Fetch, waiting for min_bytes at most max_wait_ms."""
        fault = await self._cluster.meet("Fetch", self.node_id, request)
        if fault is None:
            return await self._fetch(request, context, None)
        if fault.hang:
            await self._stopping.wait()
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
        def broken(topic: str) -> ErrorCode:
            if fault is None or fault.code is None or fault.topic not in (None, topic):
                return ErrorCode.NONE
            return fault.code

        if fault is not None and fault.code is not None:
            self.sessions.disturb()
            request = request._replace(max_wait_ms=0)
        prefers: Preference = lambda found: -1  # noqa: E731
        if request.replica_id == -1 and request.rack_id:
            prefers = lambda found: found.preferred(request.rack_id, self._cluster.racks)  # noqa: E731
        reader = FakeReader(self._cluster.topics, self.node_id, self._served, broken, prefers)
        response = await self.sessions.fetch(request, context.client_id, reader, self._wait)
        if fault is not None and fault.code is not None:
            self.sessions.disturb()
        return response._replace(node_endpoints=self._endpoints())

    async def list_fetch_sessions(
        self, request: m.ListFetchSessionsRequest, _context: RequestContext
    ) -> m.ListFetchSessionsResponse:
        """ListFetchSessions."""
        fault = await self._cluster.meet("ListFetchSessions", self.node_id, request)
        if fault is not None and fault.hang:
            await self._stopping.wait()
        if fault is not None and fault.code is not None:
            return m.ListFetchSessionsResponse(fault.code, "injected", self.node_id)
        return m.ListFetchSessionsResponse(node_id=self.node_id, sessions=self.sessions.list())

    async def _wait(self, woken: asyncio.Event, seconds: float) -> bool:
        events = (woken, self._cluster.appended, self._stopping)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return seconds > 0 and not self._stopping.is_set()

    async def list_offsets(self, request: m.ListOffsetsRequest, _context: RequestContext) -> m.ListOffsetsResponse:
        """ListOffsets; timestamps are those of whole batches."""
        response: m.ListOffsetsResponse = await self._answer("ListOffsets", request, self._list_offsets)
        return response

    def _list_offsets(self, request: m.ListOffsetsRequest, fault: Fault | None) -> m.ListOffsetsResponse:
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
        self, topic: str, topic_id: bytes, asked: m.ListOffsetsPartition, fault: Fault | None
    ) -> m.ListOffsetsPartitionResponse:
        index = asked.partition_index
        if fault is not None:
            return m.ListOffsetsPartitionResponse(index, fault.code or 0)
        found = self._led(topic, topic_id, index, asked.current_leader_epoch)
        if isinstance(found, ErrorCode):
            return m.ListOffsetsPartitionResponse(index, found)
        epoch = found.leader_epoch
        if asked.timestamp == -1:
            return m.ListOffsetsPartitionResponse(index, 0, -1, found.end_offset, epoch)
        if asked.timestamp == -2:
            return m.ListOffsetsPartitionResponse(index, 0, -1, found.log_start_offset, epoch)
        headers = [header for header, _ in found.batches]
        if asked.timestamp == -3:
            headers = sorted(headers, key=lambda header: -header.max_timestamp)
        for header in headers:
            if asked.timestamp == -3 or header.max_timestamp >= asked.timestamp:
                place = (header.max_timestamp, header.base_offset, header.partition_leader_epoch)
                return m.ListOffsetsPartitionResponse(index, 0, *place)
        return m.ListOffsetsPartitionResponse(index, 0)

    async def offsets_for_leader_epoch(
        self, request: m.OffsetsForLeaderEpochRequest, _context: RequestContext
    ) -> m.OffsetsForLeaderEpochResponse:
        """OffsetsForLeaderEpoch."""
        response: m.OffsetsForLeaderEpochResponse = await self._answer("OffsetsForLeaderEpoch", request, self._epochs)
        return response

    def _epochs(self, request: m.OffsetsForLeaderEpochRequest, fault: Fault | None) -> m.OffsetsForLeaderEpochResponse:
        topics = []
        for topic in request.topics:
            parts = []
            for each in topic.partitions:
                found = self._led(topic.topic, topic.topic_id, each.partition, each.current_leader_epoch)
                if fault is not None:
                    found = fault.code or ErrorCode.NONE
                if isinstance(found, ErrorCode):
                    parts.append(m.OffsetForLeaderPartitionResult(found, each.partition))
                    continue
                end = epoch_end(found, each.leader_epoch)
                parts.append(m.OffsetForLeaderPartitionResult(0, each.partition, end.epoch, end.end_offset))
            topics.append(m.OffsetForLeaderTopicResult(topic.topic, topic.topic_id, parts))
        return m.OffsetsForLeaderEpochResponse(topics=topics)

    async def delete_records(
        self, request: m.DeleteRecordsRequest, _context: RequestContext
    ) -> m.DeleteRecordsResponse:
        """DeleteRecords."""
        response: m.DeleteRecordsResponse = await self._answer("DeleteRecords", request, self._delete_records)
        return response

    def _delete_records(self, request: m.DeleteRecordsRequest, fault: Fault | None) -> m.DeleteRecordsResponse:
        topics = []
        for topic in request.topics:
            parts = []
            for each in topic.partitions:
                found = self._led(topic.name, b"", each.partition_index)
                if fault is not None:
                    found = fault.code or ErrorCode.NONE
                if isinstance(found, ErrorCode):
                    parts.append(m.DeleteRecordsPartitionResult(each.partition_index, -1, found))
                    continue
                offset = found.end_offset if each.offset == -1 else each.offset
                if offset > found.end_offset:
                    parts.append(
                        m.DeleteRecordsPartitionResult(each.partition_index, -1, ErrorCode.OFFSET_OUT_OF_RANGE)
                    )
                    continue
                found.log_start_offset = max(found.log_start_offset, offset)
                parts.append(m.DeleteRecordsPartitionResult(each.partition_index, found.log_start_offset))
            topics.append(m.DeleteRecordsTopicResult(topic.name, parts))
        return m.DeleteRecordsResponse(topics=topics)

    async def metadata(self, request: m.MetadataRequest, _context: RequestContext) -> m.MetadataResponse:
        """Metadata."""
        response: m.MetadataResponse = await self._answer("Metadata", request, self._metadata)
        return response

    def _metadata(self, request: m.MetadataRequest, fault: Fault | None) -> m.MetadataResponse:
        cluster = self._cluster
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
