"""The mesh: is it well, what goes through it, who leads what, how the processes are, and how far behind groups are."""

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
        "Is it well?",
        [
            number(
                "Firing alerts",
                "Alerts of deploy/prometheus/rules that fire now. docs/monitoring.md says what to do about each.",
                Query(f"count({firing}) or vector(0)", "alerts"),
                bad=1,
            ),
            number(
                "Nodes that do not answer",
                "Controllers, brokers and consumer services whose /metrics cannot be scraped.",
                Query(f"count(up{{{NODES},{parts.CLUSTER}}}) - sum(up{{{NODES},{parts.CLUSTER}}})", "nodes"),
                bad=1,
            ),
            must_be_one(
                "Active controllers",
                "One, always; none for a second or two while the quorum elects another.",
                Query(total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            number(
                "Partitions without a leader",
                "Nobody can write or read them. As the active controller sees it.",
                Query(of_active(f"{CONTROLLER}offlinepartitionscount"), "{{cluster}}"),
                bad=1,
            ),
            number(
                "Partitions below min ISR",
                "acks=all is refused there (NOT_ENOUGH_REPLICAS).",
                Query(total(f"{REPLICAS}underminisrpartitioncount", "cluster"), "{{cluster}}"),
                bad=1,
            ),
            number(
                "Under-replicated partitions",
                "A replica is not in the ISR: one more failure may take the partition below min ISR.",
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
                "Batches that producers wrote, by the broker that leads.",
                by_instance(rate(f"{TOPIC}bytesin_total", "instance")),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes out",
                "Batches that consumers read, by the broker that served them.",
                by_instance(rate(f"{TOPIC}bytesout_total", "instance")),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Replication",
                "Bytes that followers read from leaders, seen from both sides.",
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
                "Partitions written, and fetches by who asked.",
                Query(rate(f"{TOPIC}totalproducerequests_total", "cluster"), "produced partitions"),
                Query(rate("kipmesh_broker_fetch_requests_total", "role"), "fetches of {{role}}s"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Batches refused, and sent again",
                "Refused with an error; and sent again by idempotent producers, which are not appended again.",
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
                "How many partitions each broker has, and leads.",
                Query(now(f"{REPLICAS}partitioncount"), "{{instance}} has"),
                Query(now(f"{REPLICAS}leadercount"), "{{instance}} leads"),
            ),
            graph(
                "ISR changes",
                "Shrinks without a failed broker are a follower that cannot keep up.",
                Query(rate(f"{REPLICAS}isrshrinks_total", "instance"), "{{instance}} shrinks"),
                Query(rate(f"{REPLICAS}isrexpands_total", "instance"), "{{instance}} expands"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Elections",
                "Partitions that got a leader; those from outside of the ISR may have lost records.",
                Query(rate(f"{STATS}leaderelections_total", "cluster"), "elected"),
                Query(rate(f"{STATS}uncleanleaderelections_total", "cluster"), "unclean"),
                Query(of_active(f"{CONTROLLER}preferredreplicaimbalancecount"), "not led by the first replica"),
            ),
            graph(
                "Brokers, as the active controller sees them",
                "Fenced ones are alive or dead, and lead nothing.",
                Query(of_active(f"{CONTROLLER}activebrokercount"), "active"),
                Query(of_active(f"{CONTROLLER}fencedbrokercount"), "fenced"),
                Query(f"max({now('kipmesh_broker_isolated')})", "isolated (1: at least one)"),
            ),
            graph(
                "Why brokers were fenced",
                "Their session ended in silence, or their connection broke.",
                Query(rate(f"{CONTROLLER}timedoutbrokerheartbeatcount_total", "cluster"), "silent"),
                Query(rate("kipmesh_controller_lost_brokers_total", "cluster"), "connection lost"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Moving replicas",
                "Partitions that are being moved, and bytes copied for that (docs/reassignment.md).",
                Query(total(f"{REPLICAS}reassigningpartitions", "cluster"), "partitions"),
                Query(rate(f"{TOPIC}reassignmentbytesin_total", "cluster"), "bytes/s"),
                Query(
                    rate("kipmesh_broker_throttled_replication_bytes_total", "cluster"), "bytes/s under the throttle"
                ),
            ),
        ],
    )


def _processes() -> Row:
    return Row(
        "Processes and disks",
        [
            graph(
                "Lateness of event loops",
                "99 % of timers fire within this; every request waits as long on top.",
                by_instance(parts.quantile(0.99, "kipmesh_runtime_event_loop_lag_seconds", "instance")),
                unit=parts.SECONDS,
            ),
            graph(
                "CPU",
                "Cores in use. One event loop uses one core at most.",
                by_instance(rate("process_cpu_seconds_total", "instance", where=OURS)),
            ),
            graph(
                "Memory",
                "Resident memory.",
                by_instance(now("process_resident_memory_bytes", OURS)),
                unit=parts.BYTES,
            ),
            graph(
                "Disk, free",
                "Free share of the disk of each data folder.",
                Query(
                    f"{now('kipmesh_disk_free_bytes')} / {now('kipmesh_disk_size_bytes')}",
                    "{{instance}} {{logdirectory}}",
                ),
                unit=parts.SHARE,
            ),
            graph(
                "Data folders that are offline",
                "Their disk has failed; the replicas there are lost until it is replaced (docs/failures.md).",
                by_instance(now("kafka_log_logmanager_offlinelogdirectorycount")),
            ),
            graph(
                "Open files",
                "Of those that the process may open.",
                by_instance(f"{now('process_open_fds', OURS)} / {now('process_max_fds', OURS)}"),
                unit=parts.SHARE,
            ),
            graph(
                "Compaction",
                "The dirtiest log's dirty part in percent, and logs that cannot be compacted.",
                Query(now("kafka_log_logcleanermanager_max_dirty_percent"), "{{instance}} % dirty"),
                Query(now("kafka_log_logcleanermanager_uncleanable_partitions_count"), "{{instance}} uncleanable"),
            ),
            graph(
                "Decisions of controllers",
                "Requests and timers that the active controller decided, and those that wait to be committed.",
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
                "Requests by kind",
                "Answered by gRPC, of clients and of nodes; those of Kafka's own protocol are not in it.",
                Query(rate(f"{times}_count", "request"), "{{request}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Time of requests",
                "99 % are answered within this, with the time that a fetch waits for bytes, or acks=all for replicas.",
                Query(parts.quantile(0.99, times, "request"), "{{request}}"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Certificates expire in",
                "Of nodes with TLS, the own one and the first of the authorities.",
                Query(
                    f"{now('kipmesh_tls_certificate_expiry_timestamp_seconds')} - time()",
                    "{{instance}} {{certificate}}",
                ),
                unit=parts.SECONDS,
            ),
            graph(
                "Refused",
                "Requests for nodes that came from others, and changed certificate files that could not be used.",
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
                "Records between what a group has committed and the high watermark.",
                Query(f"sum by (group, topic) ({lag})", "{{group}} {{topic}}"),
            ),
            graph(
                "Groups by state",
                "A group that stays in PreparingRebalance waits for a member that does not come back.",
                Query(total(f"{GROUPS}numgroupsstable", "cluster"), "stable"),
                Query(total(f"{GROUPS}numgroupsempty", "cluster"), "empty"),
                Query(total(f"{GROUPS}numgroupspreparingrebalance", "cluster"), "preparing rebalance"),
                Query(total(f"{GROUPS}numgroupscompletingrebalance", "cluster"), "completing rebalance"),
                stacked=True,
            ),
            graph(
                "Committed offsets without a known lag",
                "Their coordinator has no replica of the partition; `kipmesh group describe` asks its leader.",
                by_instance(now("kipmesh_consumergroup_unknown_lags")),
            ),
            graph(
                "Streams of consumer services",
                "Open streams, and partitions that they have by their group.",
                Query(now("kipmesh_consumer_streams_open"), "{{instance}} streams"),
                Query(now("kipmesh_consumer_partitions_assigned"), "{{instance}} partitions"),
            ),
            graph(
                "Delivered to readers",
                "Bytes of bodies.",
                by_instance(rate("kipmesh_consumer_delivered_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Records delivered, readers refused",
                "Refused ones found streams.max open.",
                Query(rate("kipmesh_consumer_records_delivered_total", "instance"), "{{instance}} records"),
                Query(rate("kipmesh_consumer_streams_refused_total", "instance"), "{{instance}} refused"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "A mesh of metadata controllers, leaders, followers and consumer services. docs/monitoring.md explains it."
    rows = [_health(), _traffic(), _partitions(), _requests(), _processes(), _groups()]
    return parts.make("kipmesh-mesh", "kipmesh: the mesh", text, rows)
