"""`python tools/kafka_log_dir_cluster.py FILE`: run a cluster on the log directory of a Kafka `server.properties`.

For tests that create a log directory and start a broker on it, such as codecrafters-io/kafka-tester. A controller and a
broker in this process replace Apache Kafka's combined node:

- The broker uses the log directory with its `meta.properties`, logs and clean-shutdown marker.
- The metadata log moves to the controller's directory in `--home`, because two nodes cannot share it. If the log starts
  at offset 1, as hand-made ones do, the leader change record of offset 0 is added.
- A relay listens on the port in the file once the broker leads all partitions, and passes bytes on unchanged.

Stops on SIGTERM, SIGINT and the end of standard input, because the parent process may have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kipmesh.client import TIMESTAMP_LATEST, AdminClient
from kipmesh.cluster import ClusterError
from kipmesh.cluster.layout import LISTENER, Counts, NodeInfo, Role
from kipmesh.cluster.single import SingleCluster
from kipmesh.core.control_records import LeaderChange, leader_change_batch
from kipmesh.core.errors import InvalidConfigError, KafkaError
from kipmesh.core.record_batch import parse_header
from kipmesh.node.settings import read_properties

META_PROPERTIES = "meta.properties"
METADATA_LOG = "__cluster_metadata-0"
FIRST_SEGMENT = f"{0:020d}.log"
HOST = "127.0.0.1"
EXIT_OK, EXIT_FAILED = 0, 1
PIECE_BYTES = 64 << 10


class LogDirError(Exception):
    """The log directory, or the `server.properties` that names it, is not valid.

    It is not one of Apache Kafka, or belongs to a node with another id.
    """


class KafkaLogDir(NamedTuple):
    """Log directory of a node of Apache Kafka, with its cluster id, node id and port."""

    path: Path
    cluster_id: str
    node_id: int
    port: int
    """Port of the listener for clients."""


def read_log_dir(server_properties: Path) -> KafkaLogDir:
    """Read `server.properties` and the `meta.properties` of its log directory.

    Raises LogDirError if a key is missing or invalid, InvalidConfigError if a file is.
    """
    server = read_properties(server_properties)
    try:
        path = Path(server["log.dirs"])
        controllers = server.get("controller.listener.names", "").split(",")
        listeners = [listener.partition("://") for listener in server["listeners"].split(",")]
        port = next(int(address.rpartition(":")[2]) for name, _, address in listeners if name not in controllers)
    except (KeyError, ValueError, StopIteration) as error:
        raise LogDirError(
            f"{server_properties} must have log.dirs with one directory and listeners with one for clients: {error!r}"
        ) from None
    meta = read_properties(path / META_PROPERTIES)
    try:
        return KafkaLogDir(path, meta["cluster.id"], int(meta["node.id"]), port)
    except (KeyError, ValueError) as error:
        raise LogDirError(f"{path / META_PROPERTIES} must have cluster.id and node.id: {error!r}") from None


def completed(metadata_log: bytes, leader: int) -> bytes:
    """Return the metadata log with a leader change record at offset 0 if it begins at offset 1, else unchanged.

    `leader` is the id of the leader and only voter. Raises CorruptRecordError for an invalid first batch.
    """
    if not metadata_log:
        return metadata_log
    first = parse_header(metadata_log)
    if first.base_offset != 1:
        return metadata_log
    change = LeaderChange(leader, (leader,), (leader,))
    return leader_change_batch(change, first.partition_leader_epoch, first.max_timestamp) + metadata_log


def take_metadata_log(log_dir: Path, into: Path, leader: int) -> None:
    """Move the metadata log, if it exists, from a log directory to the new directory `into`, and complete it.

    Raises OSError if files cannot be moved or `into` exists, CorruptRecordError for an invalid log.
    """
    if not (log_dir / METADATA_LOG).exists():
        return
    into.mkdir(parents=True)
    shutil.move(log_dir / METADATA_LOG, into / METADATA_LOG)
    segment = into / METADATA_LOG / FIRST_SEGMENT
    segment.write_bytes(completed(segment.read_bytes(), leader))


def properties(node: NodeInfo, log_dir: KafkaLogDir, home: Path) -> Mapping[str, str]:
    """Return the properties of a node that differ from a local cluster's.

    Raises LogDirError if a broker's node id differs from the log directory's.
    """
    ours = {"cluster.id": log_dir.cluster_id}
    if node.role is Role.CONTROLLER:
        return ours | {"metadata.log.dir": str(home / "controller")}
    if node.node_id != log_dir.node_id:
        raise LogDirError(f"{log_dir.path} belongs to node {log_dir.node_id}; it must be {node.node_id}")
    advertised = f"{LISTENER}://{node.grpc},KAFKA://localhost:{log_dir.port}"
    return ours | {
        "log.dirs": str(log_dir.path),
        "metadata.log.dir": str(home / "broker"),
        "advertised.listeners": advertised,
    }


async def wait_for_leaders(bootstrap: str) -> None:
    """Wait until the leader of every partition responds to ListOffsets.

    Raises KafkaError if one does not within the client's `default.api.timeout.ms`, or for an error that is not
    retriable.
    """
    async with AdminClient(bootstrap) as admin:
        topics = await admin.list_topics()
        await admin.list_offsets(
            {(topic.name, index): TIMESTAMP_LATEST for topic in topics for index in topic.partitions}
        )


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from the reader to the writer until the reader ends or either fails. Does not close them."""
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


async def relay(port: int, target: str) -> asyncio.Server:
    """Start a server on the port that forwards each connection to `target` (host:port) in both directions.

    Raises OSError if it cannot listen.
    """
    host, _, target_port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(host, int(target_port))
        directions = [
            asyncio.create_task(forward(reader, target_writer)),
            asyncio.create_task(forward(target_reader, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            target_writer.close()
            writer.close()

    return await asyncio.start_server(connected, HOST, port)


async def serve(node: NodeInfo, port: int) -> None:
    """Relay `port` to the broker once all partitions have leaders, until SIGTERM, SIGINT or the end of standard input.

    Raises KafkaError if the broker does not respond, OSError if the port is in use.
    """
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    os.set_blocking(0, False)
    loop.add_reader(0, lambda: None if os.read(0, PIECE_BYTES) else ends.set())
    assert node.grpc is not None
    assert node.kafka is not None
    waiting = asyncio.create_task(ends.wait())
    starting = asyncio.create_task(wait_for_leaders(node.grpc))
    await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return
    await starting
    async with await relay(port, node.kafka):
        await waiting


def main(given: Sequence[str] | None = None) -> int:
    """Run until stopped. Return 0, or 1 after an error, which is printed as one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server_properties", type=Path)
    parser.add_argument("--home", type=Path, required=True, help="directory for all other data, which is emptied")
    options = parser.parse_args(given)
    home: Path = options.home
    try:
        log_dir = read_log_dir(options.server_properties)
        shutil.rmtree(home, ignore_errors=True)
        cluster = SingleCluster(home, properties=lambda node: properties(node, log_dir, home))
        take_metadata_log(log_dir.path, home / "controller", log_dir.node_id)
        cluster.up(Counts(1, 1, 0, 0), {})
        try:
            asyncio.run(serve(cluster.state().node("leader-1"), log_dir.port))
        finally:
            cluster.down()
    except (LogDirError, ClusterError, InvalidConfigError, KafkaError, OSError) as error:
        print(f"kafka_log_dir_cluster: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
