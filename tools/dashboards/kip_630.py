"""KIP-630: the metadata quorum, its log, and snapshots of it on every node."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, by_instance, graph, must_be_one, now, number, rate, total

RAFT = "kafka_server_raftmetrics_"
CONTROLLER = "kafka_controller_kafkacontroller_"
OURS = "kipmesh_metadata_"


def _summary() -> Row:
    committed = now(f"{RAFT}high_watermark")
    return Row(
        "In short",
        [
            must_be_one(
                "Active controllers",
                "One, always.",
                Query(total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            number(
                "Epoch of the quorum",
                "Grows with each election.",
                Query(f"max by (cluster) ({now(f'{RAFT}current_epoch')})", "{{cluster}}"),
            ),
            number(
                "Furthest behind",
                "Metadata records that the slowest node has not yet, of what is committed.",
                Query(
                    f"max by (cluster) ({committed}) - min by (cluster) ({committed})",
                    "{{cluster}}",
                ),
                warn=100,
                bad=1000,
            ),
            number(
                "Largest snapshot lag",
                "Records that a node would have to replay after its latest snapshot.",
                Query(f"max({now(f'{CONTROLLER}snapshotlag')})", "records"),
                bad=1_000_000,
            ),
            number(
                "Largest snapshot",
                "Size of the latest one.",
                Query(f"max({now(f'{CONTROLLER}snapshotsizebytes')})", "bytes"),
                unit=parts.BYTES,
            ),
            number(
                "Snapshots that failed",
                "Could not be made, or were damaged, since the nodes' starts.",
                Query(
                    f"sum({now(f'{OURS}snapshot_failures_total')}) + sum({now(f'{OURS}corrupt_snapshots_total')})",
                    "snapshots",
                ),
                bad=1,
            ),
        ],
    )


def _quorum() -> Row:
    return Row(
        "The quorum",
        [
            graph(
                "States",
                "Nodes in each state. Brokers are observers, or unattached while they know no leader.",
                Query(f"sum by (state) ({now(f'{RAFT}current_state')})", "{{state}}"),
                stacked=True,
            ),
            graph(
                "Leader",
                "Its id as each node knows it; -1 unknown.",
                by_instance(now(f"{RAFT}current_leader")),
                least=-1,
            ),
            graph("Epoch", "As each node knows it.", by_instance(now(f"{RAFT}current_epoch"))),
            graph(
                "Lag of replicas",
                "Records between the leader's log end and each replica's, by its id.",
                Query(f"max by (replica_id) ({now(f'{RAFT}replica_lag')})", "{{replica_id}}"),
            ),
            graph(
                "The log",
                "What is committed, where the log ends, and where it starts, after snapshots replaced its head.",
                Query(f"max by (cluster) ({now(f'{RAFT}high_watermark')})", "high watermark"),
                Query(f"max by (cluster) ({now(f'{RAFT}log_end_offset')})", "log end"),
                Query(f"min by (cluster) ({now(f'{OURS}log_start_offset')})", "least log start"),
            ),
            graph(
                "Voters and observers",
                "As the leader knows them.",
                Query(f"max by (cluster) ({now(f'{RAFT}number_of_voters')})", "voters"),
                Query(f"max by (cluster) ({now(f'{RAFT}number_of_observers')})", "observers"),
            ),
            graph(
                "Records written",
                "By the active controller.",
                Query(rate("kipmesh_controller_records_total", "cluster"), "records"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Committed and not applied",
                "How far each node's image is behind its own log.",
                by_instance(now(f"{OURS}applied_lag")),
            ),
            graph(
                "Fetches that wait",
                "At controllers, for new records.",
                by_instance(now("kipmesh_controller_waiting_fetches")),
            ),
        ],
    )


def _snapshots() -> Row:
    made, loaded = f"{CONTROLLER}gensnapshotlatencyms", f"{CONTROLLER}loadsnapshotlatencyms"
    return Row(
        "Snapshots",
        [
            graph(
                "Snapshot lag",
                "Records between the latest snapshot and the high watermark. It falls with each snapshot.",
                by_instance(now(f"{CONTROLLER}snapshotlag")),
            ),
            graph(
                "Snapshots made",
                "Within five minutes.",
                by_instance(f"increase({now(f'{made}_count')}[5m])"),
            ),
            graph(
                "Age of the latest",
                "Time since the node made one, or since it started.",
                by_instance(now("kafka_server_snapshotemitter_latestsnapshotgeneratedagems")),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Requests for snapshots",
                "FetchSnapshot, answered by controllers: brokers and controllers for which the log is no more.",
                Query(rate(f"{OURS}fetch_snapshot_requests_total", "instance, error"), "{{instance}} {{error}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Bytes of snapshots sent",
                "By the controller that sent them.",
                by_instance(rate(f"{OURS}fetch_snapshot_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Size of the latest",
                "Grows with what there is, not with what happened.",
                by_instance(now(f"{CONTROLLER}snapshotsizebytes")),
                unit=parts.BYTES,
            ),
            graph(
                "Time to make one",
                "GenSnapshotLatencyMs, the mean since the node's start.",
                by_instance(f"{now(f'{made}_sum')} / ({now(f'{made}_count')} > 0)"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Time to load one",
                "LoadSnapshotLatencyMs, the mean since the node's start.",
                by_instance(f"{now(f'{loaded}_sum')} / ({now(f'{loaded}_count')} > 0)"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Loading",
                "1 while a node loads its metadata, and how much of the snapshot is read.",
                Query(now(f"{OURS}loading"), "{{instance}} loads"),
                Query(now(f"{OURS}load_progress"), "{{instance}} has read"),
            ),
            graph(
                "Records loaded",
                "Of the snapshot that is or was loaded last.",
                by_instance(now(f"{OURS}loaded_records")),
            ),
            graph(
                "Failures",
                "Snapshots that could not be made, and damaged ones that were found, since the node's start.",
                Query(now(f"{OURS}snapshot_failures_total"), "{{instance}} not made"),
                Query(now(f"{OURS}corrupt_snapshots_total"), "{{instance}} damaged"),
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "The metadata quorum and its snapshots: docs/raft.md, docs/snapshots.md and docs/monitoring.md."
    return parts.make(
        "kipmesh-kip-630", "kipmesh: the metadata quorum (KIP-630)", text, [_summary(), _quorum(), _snapshots()]
    )
