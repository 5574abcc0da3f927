"""Dashboard of KIP-630: the metadata quorum, its log, and its snapshots."""

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
        "Summary",
        [
            must_be_one(
                "Active controllers",
                "Must be one.",
                Query(total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            number(
                "Quorum epoch",
                "Increases with each election.",
                Query(f"max by (cluster) ({now(f'{RAFT}current_epoch')})", "{{cluster}}"),
            ),
            number(
                "Largest lag",
                "Committed metadata records that the slowest node has not received.",
                Query(
                    f"max by (cluster) ({committed}) - min by (cluster) ({committed})",
                    "{{cluster}}",
                ),
                warn=100,
                bad=1000,
            ),
            number(
                "Largest snapshot lag",
                "Largest number of records after a node's latest snapshot, which it would replay at its start.",
                Query(f"max({now(f'{CONTROLLER}snapshotlag')})", "records"),
                bad=1_000_000,
            ),
            number(
                "Largest snapshot",
                "Size of the largest latest snapshot.",
                Query(f"max({now(f'{CONTROLLER}snapshotsizebytes')})", "bytes"),
                unit=parts.BYTES,
            ),
            number(
                "Failed snapshots",
                "Snapshots that could not be written or were damaged, since the nodes started.",
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
        "Quorum",
        [
            graph(
                "States",
                "Nodes in each state. Brokers are observers, or unattached if they do not know the leader.",
                Query(f"sum by (state) ({now(f'{RAFT}current_state')})", "{{state}}"),
                stacked=True,
            ),
            graph(
                "Leader",
                "Id of the leader that each node knows; -1: unknown.",
                by_instance(now(f"{RAFT}current_leader")),
                least=-1,
            ),
            graph("Epoch", "Epoch that each node knows.", by_instance(now(f"{RAFT}current_epoch"))),
            graph(
                "Lag of replicas",
                "Records by which each replica's log end is behind the leader's, by replica id.",
                Query(f"max by (replica_id) ({now(f'{RAFT}replica_lag')})", "{{replica_id}}"),
            ),
            graph(
                "Metadata log",
                "High watermark, log end offset, and log start offset, which advances with snapshots.",
                Query(f"max by (cluster) ({now(f'{RAFT}high_watermark')})", "high watermark"),
                Query(f"max by (cluster) ({now(f'{RAFT}log_end_offset')})", "log end"),
                Query(f"min by (cluster) ({now(f'{OURS}log_start_offset')})", "lowest log start"),
            ),
            graph(
                "Voters and observers",
                "Numbers that the leader knows.",
                Query(f"max by (cluster) ({now(f'{RAFT}number_of_voters')})", "voters"),
                Query(f"max by (cluster) ({now(f'{RAFT}number_of_observers')})", "observers"),
            ),
            graph(
                "Records written",
                "Records that the active controller writes.",
                Query(rate("kipmesh_controller_records_total", "cluster"), "records"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Apply lag",
                "Records that are committed in a node's log but not yet applied to its image.",
                by_instance(now(f"{OURS}applied_lag")),
            ),
            graph(
                "Pending fetches",
                "Fetches at controllers that wait for new records.",
                by_instance(now("kipmesh_controller_waiting_fetches")),
            ),
        ],
    )


def _snapshots() -> Row:
    written, loaded = f"{CONTROLLER}gensnapshotlatencyms", f"{CONTROLLER}loadsnapshotlatencyms"
    return Row(
        "Snapshots",
        [
            graph(
                "Snapshot lag",
                "Records between the latest snapshot and the high watermark. It falls with each snapshot.",
                by_instance(now(f"{CONTROLLER}snapshotlag")),
            ),
            graph(
                "Snapshots written",
                "Snapshots written within five minutes.",
                by_instance(f"increase({now(f'{written}_count')}[5m])"),
            ),
            graph(
                "Age of the latest snapshot",
                "Time since the node wrote a snapshot, or since its start.",
                by_instance(now("kafka_server_snapshotemitter_latestsnapshotgeneratedagems")),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Requests for snapshots",
                "FetchSnapshot requests at controllers, from nodes whose next records are no longer in the log.",
                Query(rate(f"{OURS}fetch_snapshot_requests_total", "instance, error"), "{{instance}} {{error}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Bytes of snapshots sent",
                "By controller.",
                by_instance(rate(f"{OURS}fetch_snapshot_bytes_total", "instance")),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Size of the latest snapshot",
                "Depends on the number of topics, partitions and brokers, not on the number of changes.",
                by_instance(now(f"{CONTROLLER}snapshotsizebytes")),
                unit=parts.BYTES,
            ),
            graph(
                "Time to write a snapshot",
                "GenSnapshotLatencyMs, mean since the node's start.",
                by_instance(f"{now(f'{written}_sum')} / ({now(f'{written}_count')} > 0)"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Time to load a snapshot",
                "LoadSnapshotLatencyMs, mean since the node's start.",
                by_instance(f"{now(f'{loaded}_sum')} / ({now(f'{loaded}_count')} > 0)"),
                unit=parts.MILLISECONDS,
            ),
            graph(
                "Loading",
                "1 while a node loads its metadata, and the share of the snapshot that it has read.",
                Query(now(f"{OURS}loading"), "{{instance}} loads"),
                Query(now(f"{OURS}load_progress"), "{{instance}} progress"),
            ),
            graph(
                "Records loaded",
                "Records loaded from the latest snapshot.",
                by_instance(now(f"{OURS}loaded_records")),
            ),
            graph(
                "Failures",
                "Snapshots that could not be written, and damaged snapshots found, since the node's start.",
                Query(now(f"{OURS}snapshot_failures_total"), "{{instance}} not written"),
                Query(now(f"{OURS}corrupt_snapshots_total"), "{{instance}} damaged"),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "The metadata quorum and its snapshots: docs/raft.md, docs/snapshots.md and docs/monitoring.md."
    return parts.make(
        "kipmesh-kip-630", "kipmesh: the metadata quorum (KIP-630)", text, [_summary(), _quorum(), _snapshots()]
    )
