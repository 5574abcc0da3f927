"""`kipmesh cluster describe` and `kipmesh quorum describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh.cli.common import (
    DEFAULT_DIR,
    AsJson,
    Bootstrap,
    Dir,
    admin_client,
    bootstrap_of,
    examples,
    make_app,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client.types import ClusterDescription, QuorumDescription

cluster_app = make_app("Show the cluster.", "kipmesh cluster describe")
quorum_app = make_app("Show the metadata quorum.", "kipmesh quorum describe")


@cluster_app.callback()
def _cluster_group() -> None:
    pass


@quorum_app.callback()
def _quorum_group() -> None:
    pass


@cluster_app.command("describe", epilog=examples("kipmesh cluster describe\nkipmesh cluster describe --json"))
def describe_cluster(bootstrap: Bootstrap = None, folder: Dir = DEFAULT_DIR, as_json: AsJson = False) -> None:
    """Show the cluster's id, its active controller and its brokers."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> ClusterDescription:
        async with admin_client(address) as admin:
            return await admin.describe_cluster()

    found = run(work)
    if as_json:
        brokers = [broker._asdict() for broker in found.brokers]
        print_json({"cluster_id": found.cluster_id, "controller_id": found.controller_id, "brokers": brokers})
        return
    print(f"cluster {found.cluster_id}  controller {found.controller_id}")
    rows = [(broker.node_id, broker.address, broker.rack or "-") for broker in sorted(found.brokers)]
    print_table(("BROKER", "ADDRESS", "RACK"), rows)


@quorum_app.command("describe", epilog=examples("kipmesh quorum describe\nkipmesh quorum describe --json"))
def describe_quorum(bootstrap: Bootstrap = None, folder: Dir = DEFAULT_DIR, as_json: AsJson = False) -> None:
    """Show the quorum's leader, epoch and high watermark, and how far each voter and observer is."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> QuorumDescription:
        async with admin_client(address) as admin:
            return await admin.describe_quorum()

    found = run(work)
    if as_json:
        print_json(
            {
                "leader_id": found.leader_id,
                "leader_epoch": found.leader_epoch,
                "high_watermark": found.high_watermark,
                "current_voters": [replica._asdict() for replica in found.voters],
                "observers": [replica._asdict() for replica in found.observers],
                "nodes": [node._asdict() for node in found.nodes],
            }
        )
        return
    print(f"leader {found.leader_id}  epoch {found.leader_epoch}  high watermark {found.high_watermark}")
    leader_end = max((one.log_end_offset for one in found.voters if one.replica_id == found.leader_id), default=-1)
    rows = [
        (one.replica_id, status, one.log_end_offset, max(0, leader_end - one.log_end_offset))
        for status, group in (("voter", found.voters), ("observer", found.observers))
        for one in group
    ]
    print_table(("NODE", "STATUS", "LOG END", "LAG"), rows)
