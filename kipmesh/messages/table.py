"""The table of APIs: everything that the servers know of an API apart from its handler.

The gRPC services, the Kafka listener, forwarding to the active controller, request metrics, limits and fault injection
are driven by this table. An API is added by a row here, the declaration of its messages, and a handler
(docs/wire.md, "Add an API").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kipmesh import messages as m
from kipmesh.messages import proto
from kipmesh.messages.apis import describe_producers
from kipmesh.messages.apis.admin import alter_configs, list_config_resources
from kipmesh.messages.kafka import ITEMS_MAX, Codec, Out
from kipmesh.messages.responses import Place, add_errors, error_places, has_success, make_error_response
from kipmesh.messages.schema import NEVER, VERSION_MAX, Message, Versions, parse_versions

PROTO_PACKAGE = "kipmesh.v1"
FORWARD_TIMEOUT_MS = 10_000
"""Time for a forwarded request without the field `timeout_ms`."""


class Role(Enum):
    """Which node responds to a request."""

    CONNECTION = "connection"
    """The Kafka listener: the request is about the connection."""
    BROKER = "broker"
    """The broker that received it."""
    FORWARDED = "forwarded"
    """The active controller; a broker that receives it forwards it."""
    CONTROLLER = "controller"
    """The active controller; sent by nodes."""
    QUORUM = "quorum"
    """The voter of the metadata quorum that received it; sent by nodes."""


@dataclass(frozen=True)
class Service:
    """A gRPC service."""

    name: str
    comment: str


BROKER = Service("Broker", "What a broker does for clients and for the replicas that follow it.")
QUORUM = Service("Quorum", "A voter of the metadata quorum. `Fetch` here reads `__cluster_metadata`.")
CONTROLLER = Service("Controller", "The active controller, for brokers.")
ADMIN = Service("Admin", "Administration, on controllers and on brokers, which forward it.")
GROUPS = Service("Groups", "Consumer groups. The leader of a group's partition of `__consumer_offsets` coordinates it.")
FAULTS = Service("Faults", "Faults for tests, on brokers that allow them (fault.injection.enable).")
SERVICES = (BROKER, QUORUM, CONTROLLER, ADMIN, GROUPS, FAULTS)


@dataclass(frozen=True, eq=False)
class Api:
    """One API. Instances are compared by identity: Fetch of a broker and Fetch of the quorum are two APIs."""

    key: int | None
    """Apache Kafka's API key; None for an API of kipmesh alone."""
    name: str
    """Apache Kafka's name, without `Request`."""
    request: type[Message]
    response: type[Message]
    role: Role = Role.BROKER
    service: Service | None = BROKER
    """The gRPC service; None if only the Kafka listener has the API."""
    versions: Versions = NEVER
    """The versions that the Kafka listener supports; NEVER if only gRPC has the API."""
    flexible_since: int = VERSION_MAX
    """The first version with tagged fields."""
    response_header_flexible_since: int | None = None
    """The first version whose response header has tagged fields, if it is another one."""
    timeout_ms: int = FORWARD_TIMEOUT_MS
    """Time for a forwarded request, unless the request has a field `timeout_ms`."""
    is_mutation: bool = False
    reconciles: bool = False
    """A forwarded request that was repeated is compared with the metadata, so that its own work is a success."""
    is_pipelined: bool = False
    """The Kafka listener starts the next request of this API while one waits. Responses stay in order."""
    has_stream: bool = False
    """gRPC has a method for many requests in a row, `<name>Stream`, too."""
    has_records: bool = False
    """A request has records: it may be as large as `socket.request.max.bytes`."""
    request_bytes_max: int | None = None
    """Largest request (LIM-01), if the configured limits are not lower."""
    limitations: str = ""
    """Parts of Apache Kafka's API that are not supported, for the documentation."""
    stream_comment: str = ""
    """About the stream, for `services.proto`."""
    _request_codecs: dict[int, Codec] = field(default_factory=dict, repr=False)
    _response_codecs: dict[int, Codec] = field(default_factory=dict, repr=False)

    @cached_property
    def method(self) -> str:
        """The name of the handler."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.rpc).lower()

    @cached_property
    def rpc(self) -> str:
        """The name of the gRPC method."""
        return self.request.__name__.removesuffix("Request")

    @cached_property
    def is_for_nodes(self) -> bool:
        """Whether only nodes may send it."""
        return self.role in (Role.CONTROLLER, Role.QUORUM)

    @cached_property
    def has_replica_id(self) -> bool:
        """Whether nodes and clients send it, and the field `replica_id` of the request tells which."""
        return self.role is Role.BROKER and "replica_id" in self.request._fields

    # --- Kafka's wire format

    def request_codec(self, version: int) -> Codec:
        """The codec of requests of a version."""
        codec = self._request_codecs.get(version)
        if codec is None:
            codec = self._request_codecs[version] = Codec(self.request, version, flexible=self._is_flexible(version))
        return codec

    def response_codec(self, version: int) -> Codec:
        """The codec of responses of a version."""
        codec = self._response_codecs.get(version)
        if codec is None:
            codec = self._response_codecs[version] = Codec(self.response, version, flexible=self._is_flexible(version))
        return codec

    def _is_flexible(self, version: int) -> bool:
        return version >= self.flexible_since

    def decode(self, view: memoryview, at: int, version: int, items_max: int = ITEMS_MAX) -> Any:
        """Return the request whose body begins at `at`. Ignores trailing bytes, as Apache Kafka does.

        Raises MalformedError.
        """
        return self.request_codec(version).read(view, at, items_max)[0]

    def encode(self, correlation_id: int, version: int, response: Any) -> Out:
        """Return the whole frame of a response, its length included."""
        out = Out()
        out += bytes(4)
        out += correlation_id.to_bytes(4, "big", signed=True)
        since = self.response_header_flexible_since
        if version >= (self.flexible_since if since is None else since):
            out.append(0)
        self.response_codec(version).write(out, response)
        size = sum(map(len, out.parts)) + len(out) - 4
        if out.parts:
            out.parts[0] = size.to_bytes(4, "big") + bytes(out.parts[0])[4:]
        else:
            out[:4] = size.to_bytes(4, "big")
        return out

    # --- errors

    @cached_property
    def _error_places(self) -> Place:
        return error_places(self.response)

    def errors(self, response: Any) -> list[int]:
        """Return the error codes of a response other than 0, those of its items included."""
        found: list[int] = []
        add_errors(self._error_places, response, found)
        return found

    def has_success(self, response: Any) -> bool:
        """Whether an item of a response has no error; False if the response itself has one."""
        return not getattr(response, "error_code", 0) and has_success(self._error_places, response)

    def error_response(
        self, request: Any, code: int, message: str | None = None, version: int | None = None
    ) -> Any | None:
        """Return the response that refuses a request.

        The error is the response's own, or that of each item that the request names. `version` is Kafka's; None
        means that every field can be sent. Returns None if the version has no field for the error.
        """
        return make_error_response(self.request, self.response, request, code, message, version)


def _kafka(versions: str, flexible: int = VERSION_MAX) -> dict[str, Any]:
    return {"versions": parse_versions(versions), "flexible_since": flexible}


_MIB = 1 << 20
_CONNECTION: dict[str, Any] = {"role": Role.CONNECTION, "service": None}
_FORWARDED: dict[str, Any] = {"role": Role.FORWARDED, "service": ADMIN}
_MUTATION: dict[str, Any] = {**_FORWARDED, "is_mutation": True}
_GROUP: dict[str, Any] = {"service": GROUPS, "request_bytes_max": _MIB}
_CONTROLLER: dict[str, Any] = {"role": Role.CONTROLLER, "service": CONTROLLER}
_QUORUM: dict[str, Any] = {"role": Role.QUORUM, "service": QUORUM}

APIS: tuple[Api, ...] = (
    # --- the connection
    Api(
        17,
        "SaslHandshake",
        m.SaslHandshakeRequest,
        m.SaslHandshakeResponse,
        **_CONNECTION,
        limitations="reauthentication (KIP-368)",
        **_kafka("0-1"),
    ),
    Api(
        18,
        "ApiVersions",
        m.ApiVersionsRequest,
        m.ApiVersionsResponse,
        **_CONNECTION,
        response_header_flexible_since=VERSION_MAX,
        limitations="features; version 5, which checks cluster and node id",
        **_kafka("0-4", 3),
    ),
    Api(
        36,
        "SaslAuthenticate",
        m.SaslAuthenticateRequest,
        m.SaslAuthenticateResponse,
        **_CONNECTION,
        limitations="session lifetimes and reauthentication (KIP-368)",
        **_kafka("0-2", 2),
    ),
    # --- records
    Api(
        0,
        "Produce",
        m.ProduceRequest,
        m.ProduceResponse,
        is_pipelined=True,
        is_mutation=True,
        has_records=True,
        limitations="transactions (INVALID_REQUEST), message formats before 2",
        **_kafka("3-13", 9),
    ),
    Api(
        1,
        "Fetch",
        m.FetchRequest,
        m.FetchResponse,
        has_stream=True,
        limitations="followers, which fetch by gRPC (CLUSTER_AUTHORIZATION_FAILED); aborted transactions",
        **_kafka("4-17", 12),
    ),
    Api(
        2,
        "ListOffsets",
        m.ListOffsetsRequest,
        m.ListOffsetsResponse,
        limitations="the isolation level, the timeout (version 10)",
        **_kafka("1-10", 6),
    ),
    Api(
        23,
        "OffsetForLeaderEpoch",
        m.OffsetsForLeaderEpochRequest,
        m.OffsetsForLeaderEpochResponse,
        limitations="followers, which use gRPC (CLUSTER_AUTHORIZATION_FAILED)",
        **_kafka("2-4", 4),
    ),
    Api(21, "DeleteRecords", m.DeleteRecordsRequest, m.DeleteRecordsResponse, is_mutation=True, **_kafka("0-2", 2)),
    Api(3, "Metadata", m.MetadataRequest, m.MetadataResponse, limitations="authorized operations", **_kafka("0-13", 9)),
    Api(
        22,
        "InitProducerId",
        m.InitProducerIdRequest,
        m.InitProducerIdResponse,
        is_mutation=True,
        limitations="transactions (INVALID_REQUEST), version 6 (two-phase commit)",
        **_kafka("0-5", 2),
    ),
    Api(None, "ListFetchSessions", m.ListFetchSessionsRequest, m.ListFetchSessionsResponse),
    Api(
        35,
        "DescribeLogDirs",
        m.DescribeLogDirsRequest,
        m.DescribeLogDirsResponse,
        limitations="version 5 (cordoned directories), moves between directories",
        **_kafka("1-4", 2),
    ),
    Api(
        60,
        "DescribeCluster",
        m.DescribeClusterRequest,
        m.DescribeClusterResponse,
        service=None,
        limitations="controllers' endpoints (UNSUPPORTED_ENDPOINT_TYPE), fenced brokers, authorized operations",
        **_kafka("0-1", 0),
    ),
    Api(
        75,
        "DescribeTopicPartitions",
        m.DescribeTopicPartitionsRequest,
        m.DescribeTopicPartitionsResponse,
        service=None,
        limitations="eligible leader replicas, authorized operations",
        **_kafka("0", 0),
    ),
    Api(
        61,
        "DescribeProducers",
        describe_producers.DescribeProducersRequest,
        describe_producers.DescribeProducersResponse,
        limitations="transactions",
        **_kafka("0", 0),
    ),
    Api(
        74,
        "ListConfigResources",
        list_config_resources.ListConfigResourcesRequest,
        list_config_resources.ListConfigResourcesResponse,
        limitations="groups and client metrics, which have no configuration",
        **_kafka("0-1", 0),
    ),
    # --- the metadata quorum
    Api(52, "Vote", m.VoteRequest, m.VoteResponse, **_QUORUM),
    Api(53, "BeginQuorumEpoch", m.BeginQuorumEpochRequest, m.BeginQuorumEpochResponse, **_QUORUM),
    Api(54, "EndQuorumEpoch", m.EndQuorumEpochRequest, m.EndQuorumEpochResponse, **_QUORUM),
    Api(
        55,
        "DescribeQuorum",
        m.DescribeQuorumRequest,
        m.DescribeQuorumResponse,
        Role.FORWARDED,
        QUORUM,
        **_kafka("0-2", 0),
    ),
    Api(1, "Fetch", m.FetchRequest, m.FetchResponse, has_stream=True, **_QUORUM),
    Api(59, "FetchSnapshot", m.FetchSnapshotRequest, m.FetchSnapshotResponse, **_QUORUM),
    # --- brokers and the active controller
    Api(62, "BrokerRegistration", m.BrokerRegistrationRequest, m.BrokerRegistrationResponse, **_CONTROLLER),
    Api(
        63,
        "BrokerHeartbeat",
        m.BrokerHeartbeatRequest,
        m.BrokerHeartbeatResponse,
        has_stream=True,
        stream_comment="A stream that lasts: the active controller notices when a broker's process dies.",
        **_CONTROLLER,
    ),
    Api(56, "AlterPartition", m.AlterPartitionRequest, m.AlterPartitionResponse, **_CONTROLLER),
    Api(73, "AssignReplicasToDirs", m.AssignReplicasToDirsRequest, m.AssignReplicasToDirsResponse, **_CONTROLLER),
    Api(67, "AllocateProducerIds", m.AllocateProducerIdsRequest, m.AllocateProducerIdsResponse, **_CONTROLLER),
    # --- administration
    Api(
        19,
        "CreateTopics",
        m.CreateTopicsRequest,
        m.CreateTopicsResponse,
        reconciles=True,
        **_MUTATION,
        limitations="the full configuration of a topic that is only validated",
        **_kafka("2-7", 5),
    ),
    Api(
        20,
        "DeleteTopics",
        m.DeleteTopicsRequest,
        m.DeleteTopicsResponse,
        reconciles=True,
        **_MUTATION,
        **_kafka("1-6", 4),
    ),
    Api(
        37,
        "CreatePartitions",
        m.CreatePartitionsRequest,
        m.CreatePartitionsResponse,
        reconciles=True,
        **_MUTATION,
        **_kafka("0-3", 2),
    ),
    Api(
        32,
        "DescribeConfigs",
        m.DescribeConfigsRequest,
        m.DescribeConfigsResponse,
        request_bytes_max=_MIB,
        **_FORWARDED,
        limitations="synonyms other than the value itself",
        **_kafka("1-4", 4),
    ),
    Api(
        44,
        "IncrementalAlterConfigs",
        m.IncrementalAlterConfigsRequest,
        m.IncrementalAlterConfigsResponse,
        **_MUTATION,
        limitations="loggers, groups, client metrics (INVALID_REQUEST)",
        **_kafka("0-1", 1),
    ),
    Api(
        33,
        "AlterConfigs",
        alter_configs.AlterConfigsRequest,
        alter_configs.AlterConfigsResponse,
        **_MUTATION,
        limitations="groups, client metrics (INVALID_REQUEST)",
        **_kafka("0-2", 2),
    ),
    Api(43, "ElectLeaders", m.ElectLeadersRequest, m.ElectLeadersResponse, **_MUTATION, **_kafka("0-2", 2)),
    Api(
        50,
        "DescribeUserScramCredentials",
        m.DescribeUserScramCredentialsRequest,
        m.DescribeUserScramCredentialsResponse,
        request_bytes_max=_MIB,
        **_FORWARDED,
        **_kafka("0", 0),
    ),
    Api(
        51,
        "AlterUserScramCredentials",
        m.AlterUserScramCredentialsRequest,
        m.AlterUserScramCredentialsResponse,
        reconciles=True,
        request_bytes_max=4 * _MIB,
        **_MUTATION,
        **_kafka("0", 0),
    ),
    Api(
        45,
        "AlterPartitionReassignments",
        m.AlterPartitionReassignmentsRequest,
        m.AlterPartitionReassignmentsResponse,
        reconciles=True,
        **_MUTATION,
        limitations="version 1, in which a client can forbid a change of the replication factor",
        **_kafka("0", 0),
    ),
    Api(
        46,
        "ListPartitionReassignments",
        m.ListPartitionReassignmentsRequest,
        m.ListPartitionReassignmentsResponse,
        **_FORWARDED,
        **_kafka("0", 0),
    ),
    Api(None, "PlanBrokerDrain", m.PlanBrokerDrainRequest, m.PlanBrokerDrainResponse, **_FORWARDED),
    Api(
        64,
        "UnregisterBroker",
        m.UnregisterBrokerRequest,
        m.UnregisterBrokerResponse,
        reconciles=True,
        **_MUTATION,
        limitations="brokers that run (INVALID_REQUEST) or have replicas (POLICY_VIOLATION)",
        **_kafka("0", 0),
    ),
    # --- consumer groups
    Api(
        10,
        "FindCoordinator",
        m.FindCoordinatorRequest,
        m.FindCoordinatorResponse,
        **_GROUP,
        limitations="coordinators of transactions and share groups (INVALID_REQUEST)",
        **_kafka("0-6", 3),
    ),
    Api(
        11,
        "JoinGroup",
        m.JoinGroupRequest,
        m.JoinGroupResponse,
        **_GROUP,
        limitations="the reason (version 8)",
        **_kafka("0-9", 6),
    ),
    Api(14, "SyncGroup", m.SyncGroupRequest, m.SyncGroupResponse, service=GROUPS, **_kafka("0-5", 4)),
    Api(12, "Heartbeat", m.HeartbeatRequest, m.HeartbeatResponse, **_GROUP, **_kafka("0-4", 4)),
    Api(
        13,
        "LeaveGroup",
        m.LeaveGroupRequest,
        m.LeaveGroupResponse,
        **_GROUP,
        limitations="the reason (version 5)",
        **_kafka("0-5", 4),
    ),
    Api(
        8,
        "OffsetCommit",
        m.OffsetCommitRequest,
        m.OffsetCommitResponse,
        service=GROUPS,
        limitations="a retention of the commit (versions 2 to 4), topic ids (version 10)",
        **_kafka("2-9", 8),
    ),
    Api(
        9,
        "OffsetFetch",
        m.OffsetFetchRequest,
        m.OffsetFetchResponse,
        service=GROUPS,
        request_bytes_max=4 * _MIB,
        limitations="topic ids (version 10), member ids and epochs (version 9), unstable offsets",
        **_kafka("1-9", 6),
    ),
    Api(47, "OffsetDelete", m.OffsetDeleteRequest, m.OffsetDeleteResponse, service=GROUPS, **_kafka("0")),
    Api(16, "ListGroups", m.ListGroupsRequest, m.ListGroupsResponse, service=GROUPS, **_kafka("0-5", 3)),
    Api(
        15,
        "DescribeGroups",
        m.DescribeGroupsRequest,
        m.DescribeGroupsResponse,
        **_GROUP,
        limitations="authorized operations",
        **_kafka("0-6", 5),
    ),
    Api(42, "DeleteGroups", m.DeleteGroupsRequest, m.DeleteGroupsResponse, **_GROUP, **_kafka("0-2", 2)),
    # --- faults for tests
    Api(None, "InjectFault", m.InjectFaultRequest, m.InjectFaultResponse, service=FAULTS),
    Api(None, "ListFaults", m.ListFaultsRequest, m.ListFaultsResponse, service=FAULTS),
    Api(None, "ClearFaults", m.ClearFaultsRequest, m.ClearFaultsResponse, service=FAULTS),
)


class Method:
    """One gRPC method: an API of a service, one request at a time or as a stream of them."""

    __slots__ = ("api", "name", "path", "streaming")

    def __init__(self, api: Api, *, streaming: bool = False) -> None:
        assert api.service is not None
        self.api = api
        self.streaming = streaming
        self.name = f"{api.rpc}Stream" if streaming else api.rpc
        self.path = f"/{PROTO_PACKAGE}.{api.service.name}/{self.name}"

    def decode_request(self, data: bytes) -> Any:
        """Return the request that the bytes state; raises MalformedError."""
        return proto.decode(self.api.request, data)

    def decode_response(self, data: bytes) -> Any:
        """Return the response that the bytes state; raises MalformedError."""
        return proto.decode(self.api.response, data)


def _methods() -> Iterator[tuple[str, dict[str, Method]]]:
    for service in SERVICES:
        found = {}
        for api in APIS:
            if api.service is service:
                for streaming in (False, True)[: 1 + api.has_stream]:
                    method = Method(api, streaming=streaming)
                    found[method.name] = method
        yield service.name, found


METHODS: Mapping[str, Mapping[str, Method]] = MappingProxyType(dict(_methods()))
"""gRPC methods by service and name."""
KAFKA_APIS: Mapping[int, Api] = MappingProxyType(
    {api.key: api for api in APIS if api.key is not None and api.versions != NEVER}
)
"""The APIs of the Kafka listener, by API key."""


def find_api(name: str) -> Api:
    """Return the API of that name; for Fetch, the broker's."""
    return next(api for api in APIS if api.name == name)


API_VERSIONS = find_api("ApiVersions")
SASL_HANDSHAKE = find_api("SaslHandshake")
SASL_AUTHENTICATE = find_api("SaslAuthenticate")
PRODUCE = find_api("Produce")
CREATE_TOPICS = find_api("CreateTopics")
BROKER_REGISTRATION = find_api("BrokerRegistration")
BROKER_HEARTBEAT = find_api("BrokerHeartbeat")
ALTER_PARTITION = find_api("AlterPartition")
ASSIGN_REPLICAS_TO_DIRS = find_api("AssignReplicasToDirs")
ALLOCATE_PRODUCER_IDS = find_api("AllocateProducerIds")
