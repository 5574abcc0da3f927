"""Overview dashboard: health, traffic, partitions, processes, and lag of consumer groups."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, by_instance, graph, must_be_one, now, number, of_active, rate, total

TOPIC = "kafka_server_brokertopicmetrics_"
REPLICAS = "kafka_server_replicamanager_"
CONTROLLER = "kafka_controller_kafkacontroller_"
STATS = "kafka_controller_controllerstats_"
OURS = parts.KIPMESH_TARGETS
GROUPS = "kafka_coordinator_group_groupmetadatamanager_"
NODES = 'job=~"kipmesh-(controller|leader|follower|consumer)"'


def _health() -> Row:
    firing = f'ALERTS{{alertname=~"Kipmesh.*",alertstate="firing",{parts.CLUSTER}}}'
    return Row(
        "Health",
        [
            number(
                "Firing alerts",
                "Firing alerts of deploy/prometheus/rules. docs/monitoring.md explains what to do about each.",
                Query(f"count({firing}) or vector(0)", "alerts"),
                bad=1,
            ),
            number(
                "Unreachable nodes",
                "Controllers, brokers and consumer services whose /metrics cannot be scraped.",
                Query(f"count(up{{{NODES},{parts.CLUSTER}}}) - sum(up{{{NODES},{parts.CLUSTER}}})", "nodes"),
                bad=1,
            ),
            must_be_one(
                "Active controllers",
                "Must be one. It is none for a second or two during an election.",
                Query(total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            number(
                "Partitions without a leader",
                "Clients can neither write nor read them. Reported by the active controller.",
                Query(of_active(f"{CONTROLLER}offlinepartitionscount"), "{{cluster}}"),
                bad=1,
            ),
            number(
                "Partitions below min ISR",
                "Writes with acks=all fail (NOT_ENOUGH_REPLICAS).",
                Query(total(f"{REPLICAS}underminisrpartitioncount", "cluster"), "{{cluster}}"),
                bad=1,
            ),
            number(
                "Under-replicated partitions",
                "Partitions with replicas outside the ISR. One more failure may take them below min ISR.",
                Query(total(f"{REPLICAS}underreplicatedpartitions", "cluster"), "{{cluster}}"),
                warn=1,
            ),
        ],
    )


def _traffic() -> Row:
    return Row(
        "Traffic",
        [
            graph(
                "Bytes in",
                "Bytes that producers wrote, by leader.",
                by_instance(rate(f"{TOPIC}bytesin_total", "instance")),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes out",
                "Bytes that consumers read, by serving broker.",
                by_instance(rate(f"{TOPIC}bytesout_total", "instance")),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Replication",
                "Bytes that followers read from leaders, measured on both sides.",
                Query(rate(f"{TOPIC}replicationbytesin_total", "instance"), "{{instance}} reads"),
                Query(rate(f"{TOPIC}replicationbytesout_total", "instance"), "{{instance}} sends"),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Records in",
                "Records that producers wrote.",
                by_instance(rate(f"{TOPIC}messagesin_total", "instance")),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Requests",
                "Partitions in Produce requests, and Fetch requests by role of the client.",
                Query(rate(f"{TOPIC}totalproducerequests_total", "cluster"), "produced partitions"),
                Query(rate("kipmesh_broker_fetch_requests_total", "role"), "fetches of {{role}}s"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Refused and duplicate batches",
                "Batches refused with an error, and duplicates of idempotent producers, which are not appended again.",
                Query(rate("kipmesh_broker_produce_failures_total", "instance", "error"), "{{instance}} {{error}}"),
                Query(rate("kipmesh_broker_duplicate_batches_total", "instance"), "{{instance}} duplicates"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _partitions() -> Row:
    return Row(
        "Partitions",
        [
            graph(
                "Replicas and leaders",
                "Number of replicas and of leaders on each broker.",
                Query(now(f"{REPLICAS}partitioncount"), "{{instance}} replicas"),
                Query(now(f"{REPLICAS}leadercount"), "{{instance}} leaders"),
            ),
            graph(
                "ISR changes",
                "Shrinks without a failed broker indicate a follower that cannot keep up.",
                Query(rate(f"{REPLICAS}isrshrinks_total", "instance"), "{{instance}} shrinks"),
                Query(rate(f"{REPLICAS}isrexpands_total", "instance"), "{{instance}} expands"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Elections",
                "Elected leaders. Unclean elections, from outside the ISR, may have lost records.",
                Query(rate(f"{STATS}leaderelections_total", "cluster"), "elected"),
                Query(rate(f"{STATS}uncleanleaderelections_total", "cluster"), "unclean"),
                Query(of_active(f"{CONTROLLER}preferredreplicaimbalancecount"), "not led by the preferred replica"),
            ),
            graph(
                "Brokers by state",
                "State at the active controller. Fenced brokers lead no partitions and may be stopped.",
                Query(of_active(f"{CONTROLLER}activebrokercount"), "active"),
                Query(of_active(f"{CONTROLLER}fencedbrokercount"), "fenced"),
                Query(f"max({now('kipmesh_broker_isolated')})", "isolated (1: at least one)"),
            ),
            graph(
                "Fenced brokers by cause",
                "The session expired, or the connection broke.",
                Query(rate(f"{CONTROLLER}timedoutbrokerheartbeatcount_total", "cluster"), "session expired"),
                Query(rate("kipmesh_controller_lost_brokers_total", "cluster"), "connection lost"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Reassignments",
                "Partitions that are being reassigned, and bytes copied for that (docs/reassignment.md).",
                Query(total(f"{REPLICAS}reassigningpartitions", "cluster"), "partitions"),
                Query(rate(f"{TOPIC}reassignmentbytesin_total", "cluster"), "bytes/s"),
                Query(rate("kipmesh_broker_throttled_replication_bytes_total", "cluster"), "bytes/s throttled"),
            ),
        ],
    )


def _processes() -> Row:
    return Row(
        "Processes and disks",
        [
            graph(
                "Event loop lag",
                "99th percentile of the delay of timers, which also delays every request.",
                by_instance(parts.quantile(0.99, "kipmesh_runtime_event_loop_lag_seconds", "instance")),
                unit=parts.SECONDS,
            ),
            graph(
                "CPU",
                "Cores in use. An event loop uses at most one core.",
                by_instance(rate("process_cpu_seconds_total", "instance", where=OURS)),
            ),
            graph(
                "Memory",
                "Resident memory.",
                by_instance(now("process_resident_memory_bytes", OURS)),
                unit=parts.BYTES,
            ),
            graph(
                "Free disk space",
                "Free share of the disk of each log directory.",
                Query(
                    f"{now('kipmesh_disk_free_bytes')} / {now('kipmesh_disk_size_bytes')}",
                    "{{instance}} {{logdirectory}}",
                ),
                unit=parts.SHARE,
            ),
            graph(
                "Offline log directories",
                "Log directories with a failed disk. Replace the disk to restore their replicas (docs/failures.md).",
                by_instance(now("kafka_log_logmanager_offlinelogdirectorycount")),
            ),
            graph(
                "Open files",
                "Share of the files that the process may open.",
                by_instance(f"{now('process_open_fds', OURS)} / {now('process_max_fds', OURS)}"),
                unit=parts.SHARE,
            ),
            graph(
                "Compaction",
                "Highest dirty ratio of a log in percent, and logs that cannot be compacted.",
                Query(now("kafka_log_logcleanermanager_max_dirty_percent"), "{{instance}} % dirty"),
                Query(now("kafka_log_logcleanermanager_uncleanable_partitions_count"), "{{instance}} uncleanable"),
            ),
            graph(
                "Controller operations",
                "Requests and timers that the active controller processed, and those that wait for their commit.",
                Query(rate("kipmesh_controller_operations_total", "operation"), "{{operation}}"),
                Query(total("kipmesh_controller_waiting_operations", "cluster"), "waiting"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _requests() -> Row:
    times = "kafka_network_requestmetrics_totaltimems"
    return Row(
        "Requests and certificates",
        [
            graph(
                "Requests by API",
                "gRPC requests of clients and nodes, without requests of the Kafka protocol.",
                Query(rate(f"{times}_count", "request"), "{{request}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Request time",
                "99th percentile, including the wait of fetches for bytes and of acks=all for replicas.",
                Query(parts.quantile(0.99, times, "request"), "{{request}}"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Certificates expire in",
                "Certificate of each node with TLS, and the first of its authorities to expire.",
                Query(
                    f"{now('kipmesh_tls_certificate_expiry_timestamp_seconds')} - time()",
                    "{{instance}} {{certificate}}",
                ),
                unit=parts.SECONDS,
            ),
            graph(
                "Refused requests and certificate files",
                "Requests that only nodes may send, and changed certificate files that could not be loaded.",
                by_instance(rate("kipmesh_tls_requests_refused_total", "instance")),
                Query(now("kipmesh_tls_files_bad"), "{{instance}} bad files"),
            ),
        ],
    )


def _groups() -> Row:
    lag = "max by (cluster, group, topic, partition) (" + now("kafka_consumergroup_lag") + ")"
    return Row(
        "Consumer groups and the consumer service",
        [
            graph(
                "Lag of groups",
                "Records between a group's committed offset and the high watermark.",
                Query(f"sum by (group, topic) ({lag})", "{{group}} {{topic}}"),
            ),
            graph(
                "Groups by state",
                "A group that stays in PreparingRebalance waits for a member that does not rejoin.",
                Query(total(f"{GROUPS}numgroupsstable", "cluster"), "stable"),
                Query(total(f"{GROUPS}numgroupsempty", "cluster"), "empty"),
                Query(total(f"{GROUPS}numgroupspreparingrebalance", "cluster"), "preparing rebalance"),
                Query(total(f"{GROUPS}numgroupscompletingrebalance", "cluster"), "completing rebalance"),
                stacked=True,
            ),
            graph(
                "Committed offsets without a known lag",
                "The coordinator has no replica of the partition. `kipmesh group describe` queries the leader.",
                by_instance(now("kipmesh_consumergroup_unknown_lags")),
            ),
            graph(
                "Streams of consumer services",
                "Open streams, and partitions assigned by their groups.",
                Query(now("kipmesh_consumer_streams_open"), "{{instance}} streams"),
                Query(now("kipmesh_consumer_partitions_assigned"), "{{instance}} partitions"),
            ),
            graph(
                "Bytes delivered",
                "Bytes of response bodies.",
                by_instance(rate("kipmesh_consumer_delivered_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Delivered records and refused streams",
                "Streams are refused when streams.max are open.",
                Query(rate("kipmesh_consumer_records_delivered_total", "instance"), "{{instance}} records"),
                Query(rate("kipmesh_consumer_streams_refused_total", "instance"), "{{instance}} refused"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Metadata controllers, leaders, followers and consumer services: see docs/monitoring.md."
    rows = [_health(), _traffic(), _partitions(), _requests(), _processes(), _groups()]
    return parts.make("kipmesh-mesh", "kipmesh: overview", text, rows)
