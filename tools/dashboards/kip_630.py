"""Dashboard of KIP-630: the metadata quorum, its log, and its snapshots."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

RAFT = "kafka_server_raftmetrics_"
CONTROLLER = "kafka_controller_kafkacontroller_"
OURS = "kipmesh_metadata_"


def _summary() -> p.Row:
    committed = p.now(f"{RAFT}high_watermark")
    return p.Row(
        "Summary",
        [
            p.must_be_one(
                "Active controllers",
                "Must be one.",
                p.Query(p.total(f"{CONTROLLER}activecontrollercount", "cluster"), "{{cluster}}"),
            ),
            p.number(
                "Quorum epoch",
                "Increases with each election.",
                p.Query(f"max by (cluster) ({p.now(f'{RAFT}current_epoch')})", "{{cluster}}"),
            ),
            p.number(
                "Largest lag",
                "Committed metadata records that the slowest node has not received.",
                p.Query(
                    f"max by (cluster) ({committed}) - min by (cluster) ({committed})",
                    "{{cluster}}",
                ),
                warn=100,
                bad=1000,
            ),
            p.number(
                "Largest snapshot lag",
                "Largest number of records after a node's latest snapshot, which it would replay at its start.",
                p.Query(f"max({p.now(f'{CONTROLLER}snapshotlag')})", "records"),
                bad=1_000_000,
            ),
            p.number(
                "Largest snapshot",
                "Size of the largest latest snapshot.",
                p.Query(f"max({p.now(f'{CONTROLLER}snapshotsizebytes')})", "bytes"),
                unit=p.BYTES,
            ),
            p.number(
                "Failed snapshots",
                "Snapshots that could not be written or were damaged, since the nodes started.",
                p.Query(
                    f"sum({p.now(f'{OURS}snapshot_failures_total')}) + sum({p.now(f'{OURS}corrupt_snapshots_total')})",
                    "snapshots",
                ),
                bad=1,
            ),
        ],
    )


def _quorum() -> p.Row:
    return p.Row(
        "Quorum",
        [
            p.graph(
                "States",
                "Nodes in each state. Brokers are observers, or unattached if they do not know the leader.",
                p.Query(f"sum by (state) ({p.now(f'{RAFT}current_state')})", "{{state}}"),
                stacked=True,
            ),
            p.graph(
                "Leader",
                "Id of the leader that each node knows; -1: unknown.",
                p.by_instance(p.now(f"{RAFT}current_leader")),
                least=-1,
            ),
            p.graph("Epoch", "Epoch that each node knows.", p.by_instance(p.now(f"{RAFT}current_epoch"))),
            p.graph(
                "Lag of replicas",
                "Records by which each replica's log end is behind the leader's, by replica id.",
                p.Query(f"max by (replica_id) ({p.now(f'{RAFT}replica_lag')})", "{{replica_id}}"),
            ),
            p.graph(
                "Metadata log",
                "High watermark, log end offset, and log start offset, which advances with snapshots.",
                p.Query(f"max by (cluster) ({p.now(f'{RAFT}high_watermark')})", "high watermark"),
                p.Query(f"max by (cluster) ({p.now(f'{RAFT}log_end_offset')})", "log end"),
                p.Query(f"min by (cluster) ({p.now(f'{OURS}log_start_offset')})", "lowest log start"),
            ),
            p.graph(
                "Voters and observers",
                "Numbers that the leader knows.",
                p.Query(f"max by (cluster) ({p.now(f'{RAFT}number_of_voters')})", "voters"),
                p.Query(f"max by (cluster) ({p.now(f'{RAFT}number_of_observers')})", "observers"),
            ),
            p.per_second(
                "Records written",
                "Records that the active controller writes.",
                p.Query(p.rate("kipmesh_controller_records_total", "cluster"), "records"),
            ),
            p.graph(
                "Apply lag",
                "Records that are committed in a node's log but not yet applied to its image.",
                p.by_instance(p.now(f"{OURS}applied_lag")),
            ),
            p.graph(
                "Pending fetches",
                "Fetches at controllers that wait for new records.",
                p.by_instance(p.now("kipmesh_controller_waiting_fetches")),
            ),
        ],
    )


def _snapshots() -> p.Row:
    written, loaded = f"{CONTROLLER}gensnapshotlatencyms", f"{CONTROLLER}loadsnapshotlatencyms"
    return p.Row(
        "Snapshots",
        [
            p.graph(
                "Snapshot lag",
                "Records between the latest snapshot and the high watermark. It falls with each snapshot.",
                p.by_instance(p.now(f"{CONTROLLER}snapshotlag")),
            ),
            p.graph(
                "Snapshots written",
                "Snapshots written within five minutes.",
                p.by_instance(f"increase({p.now(f'{written}_count')}[5m])"),
            ),
            p.graph(
                "Age of the latest snapshot",
                "Time since the node wrote a snapshot, or since its start.",
                p.by_instance(p.now("kafka_server_snapshotemitter_latestsnapshotgeneratedagems")),
                unit=p.MILLISECONDS,
            ),
            p.per_second(
                "Requests for snapshots",
                "FetchSnapshot requests at controllers, from nodes whose next records are no longer in the log.",
                p.Query(p.rate(f"{OURS}fetch_snapshot_requests_total", "instance, error"), "{{instance}} {{error}}"),
            ),
            p.bytes_per_second(
                "Bytes of snapshots sent",
                "By controller.",
                p.by_instance(p.rate(f"{OURS}fetch_snapshot_bytes_total", "instance")),
            ),
            p.graph(
                "Size of the latest snapshot",
                "Depends on the number of topics, partitions and brokers, not on the number of changes.",
                p.by_instance(p.now(f"{CONTROLLER}snapshotsizebytes")),
                unit=p.BYTES,
            ),
            p.graph(
                "Time to write a snapshot",
                "GenSnapshotLatencyMs, mean since the node's start.",
                p.by_instance(f"{p.now(f'{written}_sum')} / ({p.now(f'{written}_count')} > 0)"),
                unit=p.MILLISECONDS,
            ),
            p.graph(
                "Time to load a snapshot",
                "LoadSnapshotLatencyMs, mean since the node's start.",
                p.by_instance(f"{p.now(f'{loaded}_sum')} / ({p.now(f'{loaded}_count')} > 0)"),
                unit=p.MILLISECONDS,
            ),
            p.graph(
                "Loading",
                "1 while a node loads its metadata, and the share of the snapshot that it has read.",
                p.Query(p.now(f"{OURS}loading"), "{{instance}} loads"),
                p.Query(p.now(f"{OURS}load_progress"), "{{instance}} progress"),
            ),
            p.graph(
                "Records loaded",
                "Records loaded from the latest snapshot.",
                p.by_instance(p.now(f"{OURS}loaded_records")),
            ),
            p.graph(
                "Failures",
                "Snapshots that could not be written, and damaged snapshots found, since the node's start.",
                p.Query(p.now(f"{OURS}snapshot_failures_total"), "{{instance}} not written"),
                p.Query(p.now(f"{OURS}corrupt_snapshots_total"), "{{instance}} damaged"),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "The metadata quorum and its snapshots: docs/raft.md, docs/snapshots.md and docs/monitoring.md."
    return p.make(
        "kipmesh-kip-630", "kipmesh: the metadata quorum (KIP-630)", text, [_summary(), _quorum(), _snapshots()]
    )
