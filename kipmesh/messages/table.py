"""The table of APIs: all properties of an API except its handler.

The gRPC services, the Kafka listener, forwarding to the active controller, request metrics, limits and fault injection
use this table. To add an API, add a row here, declare its messages and write a handler (docs/wire.md, "Add an API").
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
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
"""Time limit of a forwarded request without the field `timeout_ms`."""


class Role(Enum):
    """The node that handles a request."""

    CONNECTION = "connection"
    """The Kafka listener that received the request, which concerns the connection."""
    BROKER = "broker"
    """The broker that received the request."""
    FORWARDED = "forwarded"
    """The active controller. A broker that receives the request forwards it."""
    CONTROLLER = "controller"
    """The active controller. Only nodes send the request."""
    QUORUM = "quorum"
    """The voter of the metadata quorum that received the request. Only nodes send it."""


@dataclass(frozen=True)
class Service:
    """A gRPC service."""

    name: str
    comment: str


BROKER = Service("Broker", "Requests of clients and follower replicas to a broker.")
QUORUM = Service("Quorum", "A voter of the metadata quorum. `Fetch` here reads `__cluster_metadata`.")
CONTROLLER = Service("Controller", "Requests of brokers to the active controller.")
ADMIN = Service("Admin", "Administration, on controllers and on brokers. Brokers forward the requests.")
GROUPS = Service("Groups", "Consumer groups. The leader of a group's partition of `__consumer_offsets` coordinates it.")
FAULTS = Service("Faults", "Fault injection for tests, on brokers with fault.injection.enable.")
SERVICES = (BROKER, QUORUM, CONTROLLER, ADMIN, GROUPS, FAULTS)


@cache
def _codec(of: type[Message], version: int, flexible: bool) -> Codec:
    return Codec(of, version, flexible=flexible)


@dataclass(frozen=True, eq=False)
class Api:
    """One API. Instances are compared by identity, because brokers and the quorum have separate Fetch APIs."""

    key: int | None
    """Apache Kafka's API key; None for an API that only kipmesh has."""
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
    """The first version whose response header has tagged fields, if it is not `flexible_since`."""
    timeout_ms: int = FORWARD_TIMEOUT_MS
    """Time limit of a forwarded request, unless the request has a field `timeout_ms`."""
    is_mutation: bool = False
    """Whether a request changes records, metadata or committed offsets."""
    reconciles: bool = False
    """Whether a retried forwarded request is compared with the metadata, so that its own effect is no error."""
    is_pipelined: bool = False
    """Whether the Kafka listener starts the next request of this API before the response to the previous one."""
    has_stream: bool = False
    """Whether gRPC also has the method `<name>Stream` for consecutive requests."""
    has_records: bool = False
    """Whether requests contain records and may therefore be as large as `socket.request.max.bytes`."""
    request_bytes_max: int | None = None
    """Maximum size of a request (LIM-01). `kipmesh.transport.kafka.limits` adds the configured limits."""
    limitations: str = ""
    """Unsupported parts of Apache Kafka's API, for the documentation."""
    stream_comment: str = ""
    """Comment on the stream in `services.proto`."""

    @cached_property
    def method(self) -> str:
        """The name of the handler, for example `create_topics`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.rpc).lower()

    @cached_property
    def rpc(self) -> str:
        """The name of the gRPC method, for example `CreateTopics`."""
        return self.request.__name__.removesuffix("Request")

    @cached_property
    def is_for_nodes(self) -> bool:
        """Whether only nodes may send the request."""
        return self.role in (Role.CONTROLLER, Role.QUORUM)

    @cached_property
    def has_replica_id(self) -> bool:
        """Whether both nodes and clients send the request; its field `replica_id` tells them apart."""
        return self.role is Role.BROKER and "replica_id" in self.request._fields

    # --- Kafka's wire format

    def request_codec(self, version: int) -> Codec:
        """Return the codec of requests in `version`."""
        return _codec(self.request, version, version >= self.flexible_since)

    def response_codec(self, version: int) -> Codec:
        """Return the codec of responses in `version`."""
        return _codec(self.response, version, version >= self.flexible_since)

    def decode(self, view: memoryview, at: int, version: int, items_max: int = ITEMS_MAX) -> Any:
        """Return the request whose body starts at `at`, with at most `items_max` list items.

        Ignores trailing bytes, as Apache Kafka does. Raises MalformedError for invalid bytes or too many items.
        """
        return self.request_codec(version).read(view, at, items_max)[0]

    def encode(self, correlation_id: int, version: int, response: Any) -> Out:
        """Return the frame of a response in Kafka's format: length, header and body."""
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
        """Return the error codes of a response and its items as a list with repetitions, without 0."""
        codes: list[int] = []
        add_errors(self._error_places, response, codes)
        return codes

    def has_success(self, response: Any) -> bool:
        """Return whether a request succeeded at least in part.

        True if the response has no top-level error and at least one item without an error, or no lists of such items.
        """
        return not getattr(response, "error_code", 0) and has_success(self._error_places, response)

    def error_response(
        self, request: Any, code: int, message: str | None = None, version: int | None = None
    ) -> Any | None:
        """Return a response to `request` with the error `code`, at top level or for each item of the request.

        `version` is the API version in Kafka's format, or None for gRPC. Returns None if it has no field for the error.
        """
        return make_error_response(self.request, self.response, request, code, message, version)


def _api(
    key: int | None,
    request: type[Message],
    versions: str = "",
    flexible_since: int = VERSION_MAX,
    *,
    name: str | None = None,
    **options: Any,
) -> Api:
    """Return the API for a request and the response from its module. `name`: the API's name in Kafka, if different."""
    rpc = request.__name__.removesuffix("Request")
    response = getattr(sys.modules[request.__module__], f"{rpc}Response")
    supported = parse_versions(versions)
    return Api(key, name or rpc, request, response, versions=supported, flexible_since=flexible_since, **options)


_MIB = 1 << 20
_CONNECTION: dict[str, Any] = {"role": Role.CONNECTION, "service": None}
_FORWARDED: dict[str, Any] = {"role": Role.FORWARDED, "service": ADMIN}
_MUTATION: dict[str, Any] = {**_FORWARDED, "is_mutation": True}
_GROUP: dict[str, Any] = {"service": GROUPS, "request_bytes_max": _MIB}
_CONTROLLER: dict[str, Any] = {"role": Role.CONTROLLER, "service": CONTROLLER}
_QUORUM: dict[str, Any] = {"role": Role.QUORUM, "service": QUORUM}

APIS: tuple[Api, ...] = (
    # --- the connection
    _api(17, m.SaslHandshakeRequest, "0-1", **_CONNECTION, limitations="reauthentication (KIP-368)"),
    _api(
        18,
        m.ApiVersionsRequest,
        "0-4",
        3,
        **_CONNECTION,
        response_header_flexible_since=VERSION_MAX,
        limitations="features; version 5, which checks cluster and node id",
    ),
    _api(
        36,
        m.SaslAuthenticateRequest,
        "0-2",
        2,
        **_CONNECTION,
        limitations="session lifetimes and reauthentication (KIP-368)",
    ),
    # --- records
    _api(
        0,
        m.ProduceRequest,
        "3-13",
        9,
        is_pipelined=True,
        is_mutation=True,
        has_records=True,
        limitations="transactions (INVALID_REQUEST), message formats before 2",
    ),
    _api(
        1,
        m.FetchRequest,
        "4-17",
        12,
        has_stream=True,
        limitations="followers, which fetch by gRPC (CLUSTER_AUTHORIZATION_FAILED); aborted transactions",
    ),
    _api(2, m.ListOffsetsRequest, "1-10", 6, limitations="the isolation level, the timeout (version 10)"),
    _api(
        23,
        m.OffsetsForLeaderEpochRequest,
        "2-4",
        4,
        name="OffsetForLeaderEpoch",
        limitations="followers, which use gRPC (CLUSTER_AUTHORIZATION_FAILED)",
    ),
    _api(21, m.DeleteRecordsRequest, "0-2", 2, is_mutation=True),
    _api(3, m.MetadataRequest, "0-13", 9, limitations="authorized operations"),
    _api(
        22,
        m.InitProducerIdRequest,
        "0-5",
        2,
        is_mutation=True,
        limitations="transactions (INVALID_REQUEST), version 6 (two-phase commit)",
    ),
    _api(None, m.ListFetchSessionsRequest),
    _api(
        35,
        m.DescribeLogDirsRequest,
        "1-4",
        2,
        limitations="version 5 (cordoned directories), moves between directories",
    ),
    _api(
        60,
        m.DescribeClusterRequest,
        "0-1",
        0,
        service=None,
        limitations="controllers' endpoints (UNSUPPORTED_ENDPOINT_TYPE), fenced brokers, authorized operations",
    ),
    _api(
        75,
        m.DescribeTopicPartitionsRequest,
        "0",
        0,
        service=None,
        limitations="eligible leader replicas, authorized operations",
    ),
    _api(61, describe_producers.DescribeProducersRequest, "0", 0, limitations="transactions"),
    _api(
        74,
        list_config_resources.ListConfigResourcesRequest,
        "0-1",
        0,
        limitations="groups and client metrics, which have no configuration",
    ),
    # --- the metadata quorum
    _api(52, m.VoteRequest, **_QUORUM),
    _api(53, m.BeginQuorumEpochRequest, **_QUORUM),
    _api(54, m.EndQuorumEpochRequest, **_QUORUM),
    _api(55, m.DescribeQuorumRequest, "0-2", 0, role=Role.FORWARDED, service=QUORUM),
    _api(1, m.FetchRequest, has_stream=True, **_QUORUM),
    _api(59, m.FetchSnapshotRequest, **_QUORUM),
    # --- brokers and the active controller
    _api(62, m.BrokerRegistrationRequest, **_CONTROLLER),
    _api(
        63,
        m.BrokerHeartbeatRequest,
        has_stream=True,
        stream_comment="A permanent stream, whose end shows the active controller that the broker's process died.",
        **_CONTROLLER,
    ),
    _api(56, m.AlterPartitionRequest, **_CONTROLLER),
    _api(73, m.AssignReplicasToDirsRequest, **_CONTROLLER),
    _api(67, m.AllocateProducerIdsRequest, **_CONTROLLER),
    # --- administration
    _api(
        19,
        m.CreateTopicsRequest,
        "2-7",
        5,
        reconciles=True,
        **_MUTATION,
        limitations="the full configuration of a topic that is only validated",
    ),
    _api(20, m.DeleteTopicsRequest, "1-6", 4, reconciles=True, **_MUTATION),
    _api(37, m.CreatePartitionsRequest, "0-3", 2, reconciles=True, **_MUTATION),
    _api(
        32,
        m.DescribeConfigsRequest,
        "1-4",
        4,
        request_bytes_max=_MIB,
        **_FORWARDED,
        limitations="synonyms other than the value itself",
    ),
    _api(
        44,
        m.IncrementalAlterConfigsRequest,
        "0-1",
        1,
        **_MUTATION,
        limitations="loggers, groups, client metrics (INVALID_REQUEST)",
    ),
    _api(
        33,
        alter_configs.AlterConfigsRequest,
        "0-2",
        2,
        **_MUTATION,
        limitations="groups, client metrics (INVALID_REQUEST)",
    ),
    _api(43, m.ElectLeadersRequest, "0-2", 2, **_MUTATION),
    _api(50, m.DescribeUserScramCredentialsRequest, "0", 0, request_bytes_max=_MIB, **_FORWARDED),
    _api(51, m.AlterUserScramCredentialsRequest, "0", 0, reconciles=True, request_bytes_max=4 * _MIB, **_MUTATION),
    _api(
        45,
        m.AlterPartitionReassignmentsRequest,
        "0",
        0,
        reconciles=True,
        **_MUTATION,
        limitations="version 1, in which a client can forbid a change of the replication factor",
    ),
    _api(46, m.ListPartitionReassignmentsRequest, "0", 0, **_FORWARDED),
    _api(None, m.PlanBrokerDrainRequest, **_FORWARDED),
    _api(
        64,
        m.UnregisterBrokerRequest,
        "0",
        0,
        reconciles=True,
        **_MUTATION,
        limitations="running brokers (INVALID_REQUEST), brokers with replicas (POLICY_VIOLATION)",
    ),
    # --- consumer groups
    _api(
        10,
        m.FindCoordinatorRequest,
        "0-6",
        3,
        **_GROUP,
        limitations="coordinators of transactions and share groups (INVALID_REQUEST)",
    ),
    _api(11, m.JoinGroupRequest, "0-9", 6, **_GROUP, limitations="the reason (version 8)"),
    _api(14, m.SyncGroupRequest, "0-5", 4, service=GROUPS),
    _api(12, m.HeartbeatRequest, "0-4", 4, **_GROUP),
    _api(13, m.LeaveGroupRequest, "0-5", 4, **_GROUP, limitations="the reason (version 5)"),
    _api(
        8,
        m.OffsetCommitRequest,
        "2-9",
        8,
        is_mutation=True,
        service=GROUPS,
        limitations="a retention of the commit (versions 2 to 4), topic ids (version 10)",
    ),
    _api(
        9,
        m.OffsetFetchRequest,
        "1-9",
        6,
        service=GROUPS,
        request_bytes_max=4 * _MIB,
        limitations="topic ids (version 10), member ids and epochs (version 9), unstable offsets",
    ),
    _api(47, m.OffsetDeleteRequest, "0", is_mutation=True, service=GROUPS),
    _api(16, m.ListGroupsRequest, "0-5", 3, service=GROUPS),
    _api(15, m.DescribeGroupsRequest, "0-6", 5, **_GROUP, limitations="authorized operations"),
    _api(42, m.DeleteGroupsRequest, "0-2", 2, is_mutation=True, **_GROUP),
    # --- faults for tests
    _api(None, m.InjectFaultRequest, service=FAULTS),
    _api(None, m.ListFaultsRequest, service=FAULTS),
    _api(None, m.ClearFaultsRequest, service=FAULTS),
)


class Method:
    """One gRPC method of an API: unary, or a stream of requests."""

    __slots__ = ("api", "name", "path", "streaming")

    def __init__(self, api: Api, *, streaming: bool = False) -> None:
        assert api.service is not None
        self.api = api
        self.streaming = streaming
        self.name = f"{api.rpc}Stream" if streaming else api.rpc
        self.path = f"/{PROTO_PACKAGE}.{api.service.name}/{self.name}"

    def decode_request(self, data: bytes) -> Any:
        """Decode a request. Raises MalformedError for invalid bytes."""
        return proto.decode(self.api.request, data)

    def decode_response(self, data: bytes) -> Any:
        """Decode a response. Raises MalformedError for invalid bytes."""
        return proto.decode(self.api.response, data)


def _methods() -> Iterator[tuple[str, dict[str, Method]]]:
    for service in SERVICES:
        apis = [api for api in APIS if api.service is service]
        methods = [Method(api, streaming=streaming) for api in apis for streaming in sorted({False, api.has_stream})]
        yield service.name, {method.name: method for method in methods}


METHODS: Mapping[str, Mapping[str, Method]] = MappingProxyType(dict(_methods()))
"""gRPC methods by service and name."""
KAFKA_APIS: Mapping[int, Api] = MappingProxyType(
    {api.key: api for api in APIS if api.key is not None and api.versions != NEVER}
)
"""The APIs of the Kafka listener, by API key."""


def find_api(name: str) -> Api:
    """Return the API with this Kafka name; for Fetch, the broker API. Raises StopIteration for an unknown name."""
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
