"""Overview dashboard: health, traffic, partitions, processes, and lag of consumer groups."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

TOPIC = "kafka_server_brokertopicmetrics_"
REPLICAS = "kafka_server_replicamanager_"
CONTROLLER = "kafka_controller_kafkacontroller_"
STATS = "kafka_controller_controllerstats_"
OURS = p.KIPMESH_TARGETS
GROUPS = "kafka_coordinator_group_groupmetadatamanager_"
NODES = 'job=~"kipmesh-(controller|leader|follower|consumer)"'


def _health() -> p.Row:
    firing = f'ALERTS{{alertname=~"Kipmesh.*",alertstate="firing",{p.CLUSTER}}}'
    return p.Row(
        "Health",
        [
            p.number(
                "Firing alerts",
                "Firing alerts of deploy/prometheus/rules. docs/monitoring.md explains what to do about each.",
                p.Query(f"count({firing}) or vector(0)", "alerts"),
                bad=1,
            ),
            p.number(
                "Unreachable nodes",
                "Controllers, brokers and consumer services whose /metrics cannot be scraped.",
                p.Query(f"count(up{{{NODES},{p.CLUSTER}}}) - sum(up{{{NODES},{p.CLUSTER}}})", "nodes"),
                bad=1,
            ),
            p.must_be_one(
                "Active controllers",
                "Must be one. It is none for a second or two during an election.",
                p.Query(p.total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            p.number(
                "Partitions without a leader",
                "Clients can neither write nor read them. Reported by the active controller.",
                p.Query(p.of_active(f"{CONTROLLER}offlinepartitionscount"), "{{cluster}}"),
                bad=1,
            ),
            p.number(
                "Partitions below min ISR",
                "Writes with acks=all fail (NOT_ENOUGH_REPLICAS).",
                p.Query(p.total(f"{REPLICAS}underminisrpartitioncount", "cluster"), "{{cluster}}"),
                bad=1,
            ),
            p.number(
                "Under-replicated partitions",
                "Partitions with replicas outside the ISR. One more failure may take them below min ISR.",
                p.Query(p.total(f"{REPLICAS}underreplicatedpartitions", "cluster"), "{{cluster}}"),
                warn=1,
            ),
        ],
    )


def _traffic() -> p.Row:
    return p.Row(
        "Traffic",
        [
            p.bytes_per_second(
                "Bytes in",
                "Bytes that producers wrote, by leader.",
                p.by_instance(p.rate(f"{TOPIC}bytesin_total", "instance")),
                stacked=True,
            ),
            p.bytes_per_second(
                "Bytes out",
                "Bytes that consumers read, by serving broker.",
                p.by_instance(p.rate(f"{TOPIC}bytesout_total", "instance")),
                stacked=True,
            ),
            p.bytes_per_second(
                "Replication",
                "Bytes that followers read from leaders, measured on both sides.",
                p.Query(p.rate(f"{TOPIC}replicationbytesin_total", "instance"), "{{instance}} reads"),
                p.Query(p.rate(f"{TOPIC}replicationbytesout_total", "instance"), "{{instance}} sends"),
            ),
            p.per_second(
                "Records in",
                "Records that producers wrote.",
                p.by_instance(p.rate(f"{TOPIC}messagesin_total", "instance")),
                stacked=True,
            ),
            p.per_second(
                "Requests",
                "Partitions in Produce requests, and Fetch requests by role of the client.",
                p.Query(p.rate(f"{TOPIC}totalproducerequests_total", "cluster"), "produced partitions"),
                p.Query(p.rate("kipmesh_broker_fetch_requests_total", "role"), "fetches of {{role}}s"),
            ),
            p.per_second(
                "Refused and duplicate batches",
                "Batches refused with an error, and duplicates of idempotent producers, which are not appended again.",
                p.Query(p.rate("kipmesh_broker_produce_failures_total", "instance", "error"), "{{instance}} {{error}}"),
                p.Query(p.rate("kipmesh_broker_duplicate_batches_total", "instance"), "{{instance}} duplicates"),
            ),
        ],
    )


def _partitions() -> p.Row:
    return p.Row(
        "Partitions",
        [
            p.graph(
                "Replicas and leaders",
                "Number of replicas and of leaders on each broker.",
                p.Query(p.now(f"{REPLICAS}partitioncount"), "{{instance}} replicas"),
                p.Query(p.now(f"{REPLICAS}leadercount"), "{{instance}} leaders"),
            ),
            p.per_second(
                "ISR changes",
                "Shrinks without a failed broker indicate a follower that cannot keep up.",
                p.Query(p.rate(f"{REPLICAS}isrshrinks_total", "instance"), "{{instance}} shrinks"),
                p.Query(p.rate(f"{REPLICAS}isrexpands_total", "instance"), "{{instance}} expands"),
            ),
            p.graph(
                "Elections",
                "Elected leaders. Unclean elections, from outside the ISR, may have lost records.",
                p.Query(p.rate(f"{STATS}leaderelections_total", "cluster"), "elected"),
                p.Query(p.rate(f"{STATS}uncleanleaderelections_total", "cluster"), "unclean"),
                p.Query(p.of_active(f"{CONTROLLER}preferredreplicaimbalancecount"), "not led by the preferred replica"),
            ),
            p.graph(
                "Brokers by state",
                "State at the active controller. Fenced brokers lead no partitions and may be stopped.",
                p.Query(p.of_active(f"{CONTROLLER}activebrokercount"), "active"),
                p.Query(p.of_active(f"{CONTROLLER}fencedbrokercount"), "fenced"),
                p.Query(f"max({p.now('kipmesh_broker_isolated')})", "isolated (1: at least one)"),
            ),
            p.per_second(
                "Fenced brokers by cause",
                "The session expired, or the connection broke.",
                p.Query(p.rate(f"{CONTROLLER}timedoutbrokerheartbeatcount_total", "cluster"), "session expired"),
                p.Query(p.rate("kipmesh_controller_lost_brokers_total", "cluster"), "connection lost"),
            ),
            p.graph(
                "Reassignments",
                "Partitions that are being reassigned, and bytes copied for that (docs/reassignment.md).",
                p.Query(p.total(f"{REPLICAS}reassigningpartitions", "cluster"), "partitions"),
                p.Query(p.rate(f"{TOPIC}reassignmentbytesin_total", "cluster"), "bytes/s"),
                p.Query(p.rate("kipmesh_broker_throttled_replication_bytes_total", "cluster"), "bytes/s throttled"),
            ),
        ],
    )


def _processes() -> p.Row:
    return p.Row(
        "Processes and disks",
        [
            p.graph(
                "Event loop lag",
                "99th percentile of the delay of timers, which also delays every request.",
                p.by_instance(p.quantile(0.99, "kipmesh_runtime_event_loop_lag_seconds", "instance")),
                unit=p.SECONDS,
            ),
            p.graph(
                "CPU",
                "Cores in use. An event loop uses at most one core.",
                p.by_instance(p.rate("process_cpu_seconds_total", "instance", where=OURS)),
            ),
            p.graph(
                "Memory",
                "Resident memory.",
                p.by_instance(p.now("process_resident_memory_bytes", OURS)),
                unit=p.BYTES,
            ),
            p.graph(
                "Free disk space",
                "Free share of the disk of each log directory.",
                p.Query(
                    f"{p.now('kipmesh_disk_free_bytes')} / {p.now('kipmesh_disk_size_bytes')}",
                    "{{instance}} {{logdirectory}}",
                ),
                unit=p.SHARE,
            ),
            p.graph(
                "Offline log directories",
                "Log directories with a failed disk. Replace the disk to restore their replicas (docs/failures.md).",
                p.by_instance(p.now("kafka_log_logmanager_offlinelogdirectorycount")),
            ),
            p.graph(
                "Open files",
                "Share of the files that the process may open.",
                p.by_instance(f"{p.now('process_open_fds', OURS)} / {p.now('process_max_fds', OURS)}"),
                unit=p.SHARE,
            ),
            p.graph(
                "Compaction",
                "Highest dirty ratio of a log in percent, and logs that cannot be compacted.",
                p.Query(p.now("kafka_log_logcleanermanager_max_dirty_percent"), "{{instance}} % dirty"),
                p.Query(p.now("kafka_log_logcleanermanager_uncleanable_partitions_count"), "{{instance}} uncleanable"),
            ),
            p.per_second(
                "Controller operations",
                "Requests and timers that the active controller processed, and those that wait for their commit.",
                p.Query(p.rate("kipmesh_controller_operations_total", "operation"), "{{operation}}"),
                p.Query(p.total("kipmesh_controller_waiting_operations", "cluster"), "waiting"),
            ),
        ],
    )


def _requests() -> p.Row:
    times = "kafka_network_requestmetrics_totaltimems"
    return p.Row(
        "Requests and certificates",
        [
            p.per_second(
                "Requests by API",
                "gRPC requests of clients and nodes, without requests of the Kafka protocol.",
                p.Query(p.rate(f"{times}_count", "request"), "{{request}}"),
            ),
            p.graph(
                "Request time",
                "99th percentile, including the wait of fetches for bytes and of acks=all for replicas.",
                p.Query(p.quantile(0.99, times, "request"), "{{request}}"),
                unit=p.MILLISECONDS,
            ),
            p.graph(
                "Certificates expire in",
                "Certificate of each node with TLS, and the first of its authorities to expire.",
                p.Query(
                    f"{p.now('kipmesh_tls_certificate_expiry_timestamp_seconds')} - time()",
                    "{{instance}} {{certificate}}",
                ),
                unit=p.SECONDS,
            ),
            p.graph(
                "Refused requests and certificate files",
                "Requests that only nodes may send, and changed certificate files that could not be loaded.",
                p.by_instance(p.rate("kipmesh_tls_requests_refused_total", "instance")),
                p.Query(p.now("kipmesh_tls_files_bad"), "{{instance}} bad files"),
            ),
        ],
    )


def _groups() -> p.Row:
    lag = "max by (cluster, group, topic, partition) (" + p.now("kafka_consumergroup_lag") + ")"
    return p.Row(
        "Consumer groups and the consumer service",
        [
            p.graph(
                "Lag of groups",
                "Records between a group's committed offset and the high watermark.",
                p.Query(f"sum by (group, topic) ({lag})", "{{group}} {{topic}}"),
            ),
            p.graph(
                "Groups by state",
                "A group that stays in PreparingRebalance waits for a member that does not rejoin.",
                p.Query(p.total(f"{GROUPS}numgroupsstable", "cluster"), "stable"),
                p.Query(p.total(f"{GROUPS}numgroupsempty", "cluster"), "empty"),
                p.Query(p.total(f"{GROUPS}numgroupspreparingrebalance", "cluster"), "preparing rebalance"),
                p.Query(p.total(f"{GROUPS}numgroupscompletingrebalance", "cluster"), "completing rebalance"),
                stacked=True,
            ),
            p.graph(
                "Committed offsets without a known lag",
                "The coordinator has no replica of the partition. `kipmesh group describe` queries the leader.",
                p.by_instance(p.now("kipmesh_consumergroup_unknown_lags")),
            ),
            p.graph(
                "Streams of consumer services",
                "Open streams, and partitions assigned by their groups.",
                p.Query(p.now("kipmesh_consumer_streams_open"), "{{instance}} streams"),
                p.Query(p.now("kipmesh_consumer_partitions_assigned"), "{{instance}} partitions"),
            ),
            p.bytes_per_second(
                "Bytes delivered",
                "Bytes of response bodies.",
                p.by_instance(p.rate("kipmesh_consumer_delivered_bytes_total", "instance")),
            ),
            p.per_second(
                "Delivered records and refused streams",
                "Streams are refused when streams.max are open.",
                p.Query(p.rate("kipmesh_consumer_records_delivered_total", "instance"), "{{instance}} records"),
                p.Query(p.rate("kipmesh_consumer_streams_refused_total", "instance"), "{{instance}} refused"),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Metadata controllers, leaders, followers and consumer services: see docs/monitoring.md."
    rows = [_health(), _traffic(), _partitions(), _requests(), _processes(), _groups()]
    return p.make("kipmesh-mesh", "kipmesh: overview", text, rows)
