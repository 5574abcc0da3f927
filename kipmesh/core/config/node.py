"""Configuration of the services (controllers, brokers, the consumer service): Kafka's keys and defaults, and ours."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kipmesh.core.config.base import (
    Config,
    MinusOneOrMore,
    NotNegative,
    NotNegativeInt32,
    Positive,
    PositiveInt32,
    StrList,
    checked,
)
from kipmesh.core.config.client import GroupId, MemberConfig
from kipmesh.core.config.security import ClientSslConfig, ServerSslConfig
from kipmesh.core.config.topic import BROKER_DEFAULTS, CleanupPolicy, TopicConfig
from kipmesh.core.scram import HASHES
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

PORT_MAX = 65535
QUEUED_REQUEST_BYTES_MIN = 128 << 10
"""More than a listener reads at once, so that what it has read of one request never keeps out the rest of it."""


class Endpoint(Config):
    """One listener: NAME://host:port."""

    name: str
    host: str
    port: Annotated[int, Field(ge=0, le=65535)]

    @classmethod
    def from_text(cls, text: str) -> Endpoint:
        """From `NAME://host:port`; raises ValueError."""
        name, separator, address = text.partition("://")
        host, colon, port = address.rpartition(":")
        if not (separator and colon and name and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"{text!r} is not NAME://host:port")
        return cls.parse({"name": name, "host": host.strip("[]"), "port": int(port)})


def parse_http_listener(text: str) -> Endpoint:
    """From `host:port`, `http://host:port` or `https://host:port`, as a listener HTTP or HTTPS; raises ValueError."""
    scheme, separator, address = text.partition("://")
    if not separator:
        scheme, address = "http", text
    if scheme not in ("http", "https"):
        raise ValueError(f"{text!r} is not host:port, http://host:port or https://host:port")
    return Endpoint.from_text(f"{scheme.upper()}://{address}")


class ServiceConfig(Config):
    """What every service process has."""

    http_listener: Annotated[str, checked(parse_http_listener)] = "127.0.0.1:0"
    """host:port of /metrics, /healthz and /readyz, and of a consumer service's API; with TLS when it begins with
    `https://`. Port 0 takes a free one."""
    http_ssl_client_auth: Literal["none", "required"] = "none"
    """Whether `http.listener` requires clients' certificates, when it begins with `https://`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what is logged."""
    log_format: Literal["json", "console"] = "json"
    """Form of the log's lines."""
    shutdown_grace_ms: NotNegative = 5000
    """Time in ms that running requests are given on SIGTERM."""

    @property
    def http_endpoint(self) -> Endpoint:
        """The parsed `http.listener`; its name is HTTP or HTTPS."""
        return parse_http_listener(self.http_listener)


class Voter(Config):
    """A member of `controller.quorum.voters`: id@host:port."""

    id: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"


def parse_voters(text: str) -> tuple[Voter, ...]:
    """From `1@host:port,2@host:port`; raises ValueError. As in all lists, a comma too many is nothing."""
    voters: dict[int, Voter] = {}
    addresses: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        node, at, address = part.partition("@")
        host, colon, port = address.rpartition(":")
        if not (at and colon and node.isdecimal() and host and port.isdecimal()):
            raise ValueError(f"{part!r} is not id@host:port")
        if int(node) > MAX_INT32:
            raise ValueError(f"{part!r}: an id is at most {MAX_INT32}")
        if not 1 <= int(port) <= PORT_MAX:
            raise ValueError(f"{part!r}: a port is between 1 and {PORT_MAX}")
        voter = Voter.parse({"id": int(node), "host": host, "port": int(port)})
        if voter.id in voters:
            raise ValueError(f"voter {voter.id} is named twice")
        if addresses.setdefault(voter.address, voter.id) != voter.id:
            raise ValueError(f"voters {addresses[voter.address]} and {voter.id} have the same address {voter.address}")
        voters[voter.id] = voter
    return tuple(voters.values())


def _check_voters(value: str) -> None:
    if not parse_voters(value):
        raise ValueError("names no voter")


def _check_listeners(value: tuple[str, ...]) -> None:
    for text in value:
        Endpoint.from_text(text)


def _check_pairs(value: tuple[str, ...]) -> None:
    for text in value:
        if text.find("=") < 1:
            raise ValueError(f"{text!r} is not key=value")


def _check_mechanisms(value: tuple[str, ...]) -> None:
    if not value or set(value) - {"PLAIN", *HASHES}:
        raise ValueError(f"names some of PLAIN, {', '.join(HASHES)}")


ListenerList = Annotated[StrList, checked(_check_listeners)]


class NodeConfig(ServerSslConfig, ServiceConfig):
    """What controllers and brokers share."""

    node_id: NotNegativeInt32
    """This node's id, unique in the cluster."""
    cluster_id: Annotated[str, Field(min_length=1, max_length=64)]
    """The cluster's id; a data folder of another cluster is refused."""
    controller_quorum_voters: Annotated[str, checked(_check_voters)]
    """The metadata quorum: id@host:port, separated by commas."""
    listeners: ListenerList = ("MESH://127.0.0.1:0",)
    """Where this node listens: NAME://host:port. Names that begin with MESH are gRPC; on all others a broker speaks the
    Kafka protocol. Port 0 takes a free one."""
    advertised_listeners: ListenerList = ()
    """Where others reach this node's listeners, by their names; by default where they are. Who came by a listener is
    told the other brokers' addresses of the same name."""
    socket_request_max_bytes: PositiveInt32 = 100 << 20
    """Largest request in bytes that the node takes."""
    broker_session_timeout_ms: PositiveInt32 = 3000
    """Time in ms without a heartbeat after which the controller fences a broker."""
    broker_connection_loss_timeout_ms: NotNegative = 200
    """Time in ms after which the controller fences a broker whose connection broke and that did not come back; 0 for
    never, so that only `broker.session.timeout.ms` counts."""
    broker_heartbeat_interval_ms: PositiveInt32 = 500
    """Time in ms between two heartbeats of a broker."""
    controller_quorum_fetch_timeout_ms: PositiveInt32 = 1000
    """Time in ms without an answer of the metadata leader after which a voter stands for election; a leader that no
    majority fetches from resigns after one and a half times this."""
    controller_quorum_election_timeout_ms: PositiveInt32 = 500
    """Least time in ms that a voter without a leader waits before it stands, and that a candidate waits for votes."""
    controller_quorum_election_backoff_max_ms: PositiveInt32 = 1000
    """Longest time in ms that a candidate waits after an election that it did not win."""
    controller_quorum_request_timeout_ms: PositiveInt32 = 2000
    """Time in ms after which a request to another member of the metadata quorum has failed."""
    controller_quorum_retry_backoff_ms: PositiveInt32 = 20
    """Time in ms before a failed request to another member of the metadata quorum is sent again."""
    replica_fetch_response_max_bytes: PositiveInt32 = 10 << 20
    """Bytes of one response to a follower, also of parts of a metadata snapshot."""
    metadata_log_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Bytes of a segment of the metadata log."""
    metadata_snapshot_min_changed_records_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Records changed or deleted since the latest metadata snapshot, as a share of its records, that the next takes."""
    metadata_log_max_record_bytes_between_snapshots: Positive = 20 << 20
    """Bytes of metadata records after the latest snapshot that the next takes, beside the share of changed ones."""
    metadata_log_max_snapshot_interval_ms: NotNegative = 3_600_000
    """Time in ms after which a snapshot is made if there are newer records at all; 0 for never."""
    metadata_start_offset_lag_time_max_ms: Positive = 604_800_000
    """Time in ms that the leader of the metadata log keeps records for replicas that lag behind."""
    metadata_max_retention_bytes: Positive = 100 << 20
    """Bytes of the metadata log and its snapshots above which the oldest go."""

    @model_validator(mode="after")
    def _check_ssl(self) -> Self:
        self.check_protocol_map(tuple(each.name for each in self.endpoints), self.http_endpoint.name)
        self.check_mesh_listener(self.mesh_listener)
        return self

    @property
    def mesh_listener(self) -> str:
        """The name of the listener that nodes use among each other (gRPC)."""
        return self.endpoints[0].name if self.endpoints else ""

    @property
    def mesh_has_tls(self) -> bool:
        """Whether nodes speak TLS among each other."""
        return self.has_tls(self.mesh_listener)

    @property
    def voters(self) -> tuple[Voter, ...]:
        """The parsed `controller.quorum.voters`."""
        return parse_voters(self.controller_quorum_voters)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The parsed `listeners`."""
        return tuple(Endpoint.from_text(text) for text in self.listeners)


class ControllerConfig(NodeConfig):
    """A metadata controller."""

    metadata_log_dir: str
    """Folder of the metadata log."""
    num_partitions: PositiveInt32 = 1
    """Partitions of a topic that is created without a number."""
    default_replication_factor: PositiveInt32 = 3
    """Replicas of a topic that is created without a number; at most the brokers there are."""
    min_insync_replicas: PositiveInt32 = 2
    """Default of the topics' `min.insync.replicas`, lowered to the replicas that a topic has."""
    unclean_leader_election_enable: bool = False
    """Default of the topics' `unclean.leader.election.enable`."""
    auto_leader_rebalance_enable: bool = True
    """Whether partitions go back by themselves to their preferred leader, the leader service, when that is in sync."""
    leader_imbalance_check_interval_seconds: Positive = 30
    """Time in s between two looks for partitions that another broker leads than their preferred leader."""
    max_partitions_per_request: PositiveInt32 = 10_000
    """Most partitions that one CreateTopics or CreatePartitions request may make; no other is decided meanwhile."""

    @model_validator(mode="after")
    def _check_own_address(self) -> Self:
        """The others look for this voter where its own entry says, which must be where it listens."""
        mine = next((voter for voter in self.voters if voter.id == self.node_id), None)
        listener = next(iter(self.endpoints), None)
        advertised = {f"{one.host}:{one.port}" for one in map(Endpoint.from_text, self.advertised_listeners)}
        if mine is None or listener is None or listener.port in (0, mine.port) or mine.address in advertised:
            return self
        raise ValueError(
            f"configuration key 'listeners': {self.listeners[0]!r}, but controller.quorum.voters says "
            f"{mine.id}@{mine.address}; if something leads from there to here, "
            f"say advertised.listeners={listener.name}://{mine.address}"
        )


class WireConfig(Config):
    """Limits of a broker's listeners of the Kafka protocol; docs/wire.md says how the limits work together."""

    queued_max_request_bytes: Annotated[int, Field(ge=QUEUED_REQUEST_BYTES_MIN, le=MAX_INT64)] = 256 << 20
    """Bytes of requests that wait for their answers at a time. Listeners of the Kafka protocol read no more until there
    is room; by gRPC, produce requests beyond it are refused."""
    queued_max_response_bytes: Positive = 256 << 20
    """Bytes of responses that clients by the Kafka protocol do not take. Fetches get the fewer bytes the less of it is
    left, and one batch at least."""
    queued_max_response_bytes_per_connection: Positive = 256 << 10
    """Bytes of responses that a client by the Kafka protocol does not take above which none of its requests begins."""
    socket_request_other_max_bytes: PositiveInt32 = 16 << 20
    """Largest request in bytes by the Kafka protocol, of all APIs but Produce."""
    socket_request_max_items: PositiveInt32 = 100_000
    """Most items of a request by the Kafka protocol: topics, partitions, members and all else that is in lists."""
    socket_listen_backlog_size: PositiveInt32 = 1024
    """Connections by the Kafka protocol that wait to be accepted; the system may have a lower limit."""
    max_in_flight_requests_per_connection: PositiveInt32 = 16
    """Requests of a connection by the Kafka protocol that wait for their answers; no more are read then."""
    max_connections: PositiveInt32 = MAX_INT32
    """Most connections by the Kafka protocol, of all listeners together; one more is closed at once."""
    max_connections_per_ip: PositiveInt32 = MAX_INT32
    """Most connections by the Kafka protocol from one address."""
    connections_max_idle_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 600_000
    """Time in ms after which a connection by the Kafka protocol is closed when nothing came by it and nothing is to be
    answered."""
    connections_max_stall_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 30_000
    """Time in ms after which a connection by the Kafka protocol is closed when nothing came in the middle of a request,
    or no byte of a response was taken. While others wait for memory it is the time for the whole of either."""
    connections_max_handshake_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 10_000
    """Time in ms that a TLS handshake of a connection by the Kafka protocol may take."""
    sasl_server_max_receive_size: PositiveInt32 = 64 << 10
    """Largest request in bytes of a client that has not authenticated yet, at listeners with SASL."""


class BrokerConfig(NodeConfig, WireConfig):
    """A leader or follower service."""

    log_dirs: StrList
    """Folders of the partitions' logs, separated by commas, none inside another. A new log goes to the one with the
    fewest; one whose disk fails is taken offline while there are others."""
    metadata_log_dir: str = ""
    """Folder of the metadata log, by default the first of log.dirs; without it the broker cannot go on."""
    broker_rack: str | None = None
    """Where this broker is."""
    replica_selector_class: str = ""
    """Which replica consumers are sent to: `LeaderSelector` (by default), `RackAwareReplicaSelector`, an entry point of
    the group `kipmesh.replica_selectors`, or a dotted path; Kafka's own names of the first two are taken as well."""
    replica_selection_mode: Literal["fetch", "metadata"] = "fetch"
    """Where clients learn it: `fetch` is from the leader, in its answer to a fetch; `metadata` is from any broker."""
    replica_selector_config: Annotated[StrList, checked(_check_pairs)] = ()
    """What the selector is configured with beside this service's own keys: key=value, separated by commas."""
    inter_broker_listener_name: str = "MESH"
    """The listener that brokers use among each other; it speaks gRPC, as do those whose names begin with MESH."""
    log_retention_check_interval_ms: Positive = 300_000
    """Time in ms between two looks for segments to delete."""
    log_cleaner_backoff_ms: Positive = 15_000
    """Time in ms between two looks for logs to compact, when there was none."""
    log_cleaner_dedupe_buffer_size: Annotated[int, Field(ge=1 << 16, le=MAX_INT64)] = 128 << 20
    """Bytes of memory for the keys of one compaction; a log with more of them takes several."""
    log_cleaner_delete_retention_ms: NotNegative = 86_400_000
    """Default of the topics' `delete.retention.ms`."""
    log_cleaner_enable: bool = True
    """Whether logs with `cleanup.policy=compact` are compacted."""
    log_cleaner_io_max_bytes_per_second: Annotated[float, Field(gt=0)] = float(MAX_INT64)
    """Bytes a second that compaction reads and writes together at most."""
    log_cleaner_max_compaction_lag_ms: Positive = MAX_INT64
    """Default of the topics' `max.compaction.lag.ms`."""
    log_cleaner_min_cleanable_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Default of the topics' `min.cleanable.dirty.ratio`."""
    log_cleaner_min_compaction_lag_ms: NotNegative = 0
    """Default of the topics' `min.compaction.lag.ms`."""
    log_cleanup_policy: CleanupPolicy = "delete"
    """Default of the topics' `cleanup.policy`."""
    log_flush_interval_messages: Positive = MAX_INT64
    """Default of the topics' `flush.messages`."""
    log_flush_interval_ms: NotNegative = MAX_INT64
    """Default of the topics' `flush.ms`."""
    log_flush_scheduler_interval_ms: Positive = 3000
    """Time in ms between two looks for logs to fsync."""
    log_flush_offset_checkpoint_interval_ms: PositiveInt32 = 60_000
    """Time in ms between two writes of the recovery points."""
    log_index_interval_bytes: NotNegativeInt32 = 4096
    """Default of the topics' `index.interval.bytes`."""
    log_index_size_max_bytes: Annotated[int, Field(ge=4, le=MAX_INT32)] = 10 << 20
    """Default of the topics' `segment.index.bytes`."""
    log_message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Default of the topics' `message.timestamp.type`."""
    log_retention_bytes: MinusOneOrMore = -1
    """Default of the topics' `retention.bytes`."""
    log_retention_ms: MinusOneOrMore = 604_800_000
    """Default of the topics' `retention.ms`."""
    log_roll_ms: Positive = 604_800_000
    """Default of the topics' `segment.ms`."""
    log_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Default of the topics' `segment.bytes`."""
    log_segment_delete_delay_ms: NotNegative = 60_000
    """Default of the topics' `file.delete.delay.ms`."""
    log_open_files_max: Annotated[int, Field(ge=64, le=MAX_INT64)] = 4000
    """Most files of logs that are open at a time."""
    message_max_bytes: Annotated[int, Field(ge=0, le=MAX_INT32)] = 1048588
    """Default of the topics' `max.message.bytes`."""
    min_insync_replicas: PositiveInt32 = 2
    """Default of the topics' `min.insync.replicas`, lowered to the replicas that a topic has."""
    unclean_leader_election_enable: bool = False
    """Default of the topics' `unclean.leader.election.enable`."""
    replica_fetch_wait_max_ms: NotNegativeInt32 = 500
    """Longest time in ms that a follower's fetch waits at the leader."""
    replica_fetch_min_bytes: NotNegativeInt32 = 1
    """Bytes that a follower's fetch waits for."""
    replica_fetch_max_bytes: PositiveInt32 = 1 << 20
    """Bytes of a partition in a follower's fetch."""
    follower_replication_throttled_rate: Annotated[int, Field(ge=1, le=2**63 - 1)] = 2**63 - 1
    """Bytes a second that replicas which a reassignment adds to this broker fetch at most; can be changed while it
    runs, for one broker or for all."""
    replica_fetch_backoff_ms: NotNegativeInt32 = 200
    """Time in ms that a follower waits after a failed fetch."""
    replica_socket_timeout_ms: PositiveInt32 = 30_000
    """Time in ms without an answer after which a follower drops the connection."""
    replica_lag_time_max_ms: Positive = 30_000
    """Time in ms behind the leader's log end after which a replica leaves the ISR."""
    replica_high_watermark_checkpoint_interval_ms: Positive = 5000
    """Time in ms between two writes of the high watermarks."""
    replica_fetch_high_watermark_wakeup: bool = True
    """Whether a leader answers a waiting follower as soon as its high watermark moved (392-02)."""
    fetch_max_bytes: PositiveInt32 = 55 << 20
    """Bytes of one response to a consumer."""
    enable_incremental_fetch: bool = True
    """Whether this broker asks leaders for fetch sessions."""
    fetch_session_cache_policy: Literal["adopted", "reserved"] = "adopted"
    """Who gets a fetch session at this broker, and whose slot is taken for it."""
    max_incremental_fetch_session_cache_slots: NotNegativeInt32 = 10_000
    """Fetch sessions at this broker; 0 for none. Policy `adopted`."""
    min_incremental_fetch_session_eviction_ms: NotNegative = 120_000
    """Time in ms for which a session is neither old nor unused. Policy `adopted`."""
    min_incremental_fetch_session_size: NotNegative = 1
    """Least partitions of a session. Policy `reserved`."""
    incremental_fetch_session_cache_slots_per_broker: NotNegative = 10
    """Sessions that each follower may have. Policy `reserved`."""
    incremental_fetch_session_consumer_cache_slots: NotNegative = 10_000
    """Sessions that all clients together may have. Policy `reserved`."""
    min_incremental_fetch_session_eviction_time_ms: NotNegative = 120_000
    """Time in ms after which an unused session may lose its slot. Policy `reserved`."""
    max_incremental_fetch_sessions_per_client_id: NotNegative = 0
    """Sessions that clients with the same id may have at this broker; 0 for no limit. Followers are not counted."""
    producer_id_expiration_ms: PositiveInt32 = 86_400_000
    """Time in ms after which a partition forgets an idempotent producer that writes nothing to it."""
    producer_id_expiration_check_interval_ms: PositiveInt32 = 600_000
    """Time in ms between two looks for such producers."""
    auto_create_topics_enable: bool = True
    """Whether a topic that there is not is made when a client asks for its metadata and wants that; clients by gRPC
    never do."""
    sasl_enabled_mechanisms: Annotated[StrList, checked(_check_mechanisms)] = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    """How clients authenticate at listeners with SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512."""
    sasl_users_file: str = ""
    """File with a line `name=password` for each user of those listeners; read again when it changes. PLAIN needs it;
    for SCRAM it is for users that have no credential in the metadata log (`kipmesh user`)."""
    fault_injection_enable: bool = False
    """Whether faults may be injected at this broker's listeners of the Kafka protocol, for tests (`kipmesh faults`)."""
    group_initial_rebalance_delay_ms: NotNegativeInt32 = 3000
    """Time in ms that the first rebalance of an empty group waits for more members, each time one came."""
    group_min_session_timeout_ms: PositiveInt32 = 6000
    """Shortest session timeout in ms that a member may ask for."""
    group_max_session_timeout_ms: PositiveInt32 = 1_800_000
    """Longest session timeout in ms that a member may ask for."""
    group_max_size: PositiveInt32 = MAX_INT32
    """Most members of a consumer group."""
    offset_metadata_max_bytes: NotNegativeInt32 = 4096
    """Largest text in bytes that goes with a committed offset."""
    offsets_commit_timeout_ms: PositiveInt32 = 5000
    """Time in ms after which a change of a group that is not replicated yet is answered with an error."""
    offsets_retention_minutes: PositiveInt32 = 7 * 24 * 60
    """Time in minutes that offsets are kept after their group lost its last member or its subscription."""
    offsets_retention_check_interval_ms: Positive = 600_000
    """Time in ms between two looks for offsets that expired."""
    offsets_topic_num_partitions: PositiveInt32 = 8
    """Partitions of `__consumer_offsets` when it is made; never changed after that."""
    offsets_topic_replication_factor: Annotated[int, Field(ge=1, le=32767)] = 3
    """Replicas of `__consumer_offsets` when it is made; lowered to the brokers there are."""
    offsets_topic_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 100 << 20
    """Bytes of a segment of `__consumer_offsets` when it is made."""
    mesh_trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of fetches, produce requests and metadata requests that this broker writes to `__mesh_trace`, from 0 (off,
    snapshots are not written either) to 1."""
    mesh_trace_rate_max: Positive = 1000
    """Most entries of the trace in a second; what is more is counted and dropped."""
    mesh_trace_queue_max: Positive = 10_000
    """Most entries of the trace that wait to be written; what is more is counted and dropped."""
    mesh_trace_flush_interval_ms: Annotated[int, Field(ge=10, le=MAX_INT64)] = 1000
    """Time in ms between two writes of the trace."""
    mesh_trace_topic_num_partitions: PositiveInt32 = 3
    """Partitions of `__mesh_trace` when it is made."""
    mesh_trace_topic_replication_factor: Annotated[int, Field(ge=1, le=32767)] = 3
    """Replicas of `__mesh_trace` when it is made; lowered to the brokers there are."""
    mesh_trace_topic_retention_ms: MinusOneOrMore = 86_400_000
    """The `retention.ms` of `__mesh_trace` when it is made."""
    mesh_trace_topic_retention_bytes: MinusOneOrMore = 256 << 20
    """The `retention.bytes` of `__mesh_trace`, of each partition, when it is made."""

    @property
    def mesh_listener(self) -> str:
        """The name of the listener that nodes use among each other (gRPC)."""
        return self.inter_broker_listener_name

    @model_validator(mode="after")
    def _check_advertised(self) -> Self:
        """As Apache Kafka does: nobody can be told of a name that nothing listens by, or to go to every address."""
        advertised = tuple(map(Endpoint.from_text, self.advertised_listeners))
        for key, endpoints in (("listeners", self.endpoints), ("advertised.listeners", advertised)):
            names = [endpoint.name for endpoint in endpoints]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"configuration key {key!r} names {twice} twice")
        for endpoint in advertised:
            if endpoint.name not in {one.name for one in self.endpoints}:
                raise ValueError(f"configuration key 'advertised.listeners': listeners has no {endpoint.name}")
        for endpoint in self.advertised_endpoints:
            if endpoint.host in ("", "0.0.0.0", "::"):  # noqa: S104
                raise ValueError(
                    f"nobody can reach {endpoint.name}://{endpoint.host}:{endpoint.port}: "
                    f"say advertised.listeners={endpoint.name}://HOST:PORT"
                )
        return self

    @model_validator(mode="after")
    def _check_sasl(self) -> Self:
        for endpoint in self.mesh_endpoints:
            if self.has_sasl(endpoint.name):
                raise ValueError(f"listener {endpoint.name} speaks gRPC, which has no SASL")
        has_sasl = any(self.has_sasl(endpoint.name) for endpoint in self.kafka_endpoints)
        if has_sasl and "PLAIN" in self.sasl_enabled_mechanisms and not self.sasl_users_file:
            raise ValueError("a listener with PLAIN (sasl.enabled.mechanisms) needs sasl.users.file")
        return self

    @model_validator(mode="after")
    def _check_client_auth(self) -> Self:
        others = [one.name for one in self.mesh_endpoints if one.name != self.mesh_listener]
        asked = [name for name in others if self.has_tls(name)]
        if asked and self.ssl_client_auth == "requested":
            raise ValueError(f"listener {asked[0]} is gRPC: ssl.client.auth is none or required there")
        return self

    @property
    def mesh_endpoints(self) -> tuple[Endpoint, ...]:
        """The listeners that speak gRPC."""
        own = self.inter_broker_listener_name
        return tuple(one for one in self.endpoints if one.name == own or one.name.startswith("MESH"))

    @property
    def kafka_endpoints(self) -> tuple[Endpoint, ...]:
        """The listeners that speak the Kafka protocol: all the others."""
        mesh = self.mesh_endpoints
        return tuple(one for one in self.endpoints if one not in mesh)

    @property
    def advertised_endpoints(self) -> tuple[Endpoint, ...]:
        """What is told of each listener; port 0 for the one that it got."""
        said = {one.name: one for one in map(Endpoint.from_text, self.advertised_listeners)}
        return tuple(said.get(one.name, one) for one in self.endpoints)

    @property
    def replica_selector_configs(self) -> dict[str, str]:
        """The parsed `replica.selector.config`."""
        pairs = [text.partition("=") for text in self.replica_selector_config]
        return {key.strip(): value.strip() for key, _, value in pairs}

    def topic_defaults(self) -> TopicConfig:
        """What a topic without configuration of its own has."""
        mine = self.as_dict()
        return TopicConfig.parse({topic: mine[broker] for topic, broker in BROKER_DEFAULTS.items()})


def _check_bootstrap(value: str) -> None:
    for address in value.split(","):
        Endpoint.from_text(f"MESH://{address.strip()}")


class ConsumerServiceConfig(ClientSslConfig, ServiceConfig, MemberConfig):
    """The consumer service."""

    bootstrap_servers: Annotated[str, Field(min_length=1), checked(_check_bootstrap)]
    """Brokers to begin with: host:port, separated by commas."""
    client_id: str = "kipmesh-consumer"
    """The name that brokers see."""
    group_id: GroupId | None = None
    """The group that the service's streams of `from=committed` are members of; none for a service without them."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """Where the group begins in a partition without a committed offset; `none` ends the stream with an error."""
    fetch_max_bytes: PositiveInt32 = 128 << 10
    """Bytes that one fetch of a stream asks for; a stalled reader holds several times as much (see http-api.md)."""
    request_timeout_ms: PositiveInt32 = 30_000
    """Time in ms after which a request to a broker has failed."""
    max_poll_records: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Records that one step of a stream takes at most."""
    streams_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Streams at a time; one more is answered with 503."""
    stream_write_timeout_ms: Positive = 300_000
    """Time in ms after which a reader that takes nothing is dropped."""
    stream_heartbeat_interval_ms: Positive = 15_000
    """Time in ms between the comments that keep an idle SSE stream open."""
    lag_partitions_max: Positive = 10_000
    """Partitions whose delivered position is remembered; the one used longest ago is forgotten first."""

    @model_validator(mode="after")
    def _check_https(self) -> Self:
        if self.http_endpoint.name == "HTTPS":
            self.check_ssl_files("http.listener with https", needs_certificate=True)
        return self
