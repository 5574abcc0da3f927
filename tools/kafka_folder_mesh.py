"""`python tools/kafka_folder_mesh.py FILE`: a mesh on the folder that the `server.properties` of an Apache Kafka names.

For tests that make such a folder and start "a broker" on it, as codecrafters-io/kafka-tester does. What stands in the
place of Apache Kafka's combined broker and controller is a real controller and a real broker, in this one process:

- The broker has the folder as its own, with its `meta.properties`, logs and clean-shutdown marker as they are.
- The metadata log moves to the controller's folder, `--home`: two nodes do not share one. Such a log begins with the
  record of its first leader at offset 0, which those who make one by hand leave out: it is put there.
- The broker is to be found where the file says that Apache Kafka would listen, and only once it leads its partitions:
  until then nothing listens there, as a service of Kubernetes has no pods that are not ready. Behind that port bytes
  are handed on, and not looked at.

It ends, cleanly, with SIGTERM, SIGINT or its standard input: whoever started it may be gone.
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


class FolderError(Exception):
    """The folder, or the file that names it, is not what Apache Kafka has."""


class KafkaFolder(NamedTuple):
    """What the files of a broker of Apache Kafka say."""

    path: Path
    cluster_id: str
    node_id: int
    port: int
    """Where clients find it."""


def read_folder(server_properties: Path) -> KafkaFolder:
    """From `server.properties` and the folder's `meta.properties`; FolderError, InvalidConfigError."""
    server = read_properties(server_properties)
    try:
        path = Path(server["log.dirs"])
        controllers = server.get("controller.listener.names", "").split(",")
        listeners = [listener.partition("://") for listener in server["listeners"].split(",")]
        port = next(int(where.rpartition(":")[2]) for name, _, where in listeners if name not in controllers)
    except (KeyError, ValueError, StopIteration) as error:
        raise FolderError(f"{server_properties} names no one folder and listener for clients: {error!r}") from None
    meta = read_properties(path / META_PROPERTIES)
    try:
        return KafkaFolder(path, meta["cluster.id"], int(meta["node.id"]), port)
    except (KeyError, ValueError) as error:
        raise FolderError(f"{path / META_PROPERTIES} does not say whose the folder is: {error!r}") from None


def completed(metadata_log: bytes, leader: int) -> bytes:
    """The log from offset 0 on: with the record of its first leader, if it begins at offset 1. CorruptRecordError."""
    if not metadata_log:
        return metadata_log
    first = parse_header(metadata_log)
    if first.base_offset != 1:
        return metadata_log
    change = LeaderChange(leader, (leader,), (leader,))
    return leader_change_batch(change, first.partition_leader_epoch, first.max_timestamp) + metadata_log


def take_metadata_log(folder: Path, into: Path, leader: int) -> None:
    """Move the metadata log out of a folder, if there is one, and complete it."""
    if not (folder / METADATA_LOG).exists():
        return
    into.mkdir(parents=True)
    shutil.move(folder / METADATA_LOG, into / METADATA_LOG)
    segment = into / METADATA_LOG / FIRST_SEGMENT
    segment.write_bytes(completed(segment.read_bytes(), leader))


def properties(node: NodeInfo, folder: KafkaFolder, home: Path) -> Mapping[str, str]:
    """What differs from a local cluster's: whose the folders are, and where."""
    ours = {"cluster.id": folder.cluster_id}
    if node.role is Role.CONTROLLER:
        return ours | {"metadata.log.dir": str(home / "controller")}
    if node.node_id != folder.node_id:
        raise FolderError(f"{folder.path} is of node {folder.node_id}, and this mesh has but {node.node_id}")
    advertised = f"{LISTENER}://{node.grpc},KAFKA://localhost:{folder.port}"
    return ours | {
        "log.dirs": str(folder.path),
        "metadata.log.dir": str(home / "broker"),
        "advertised.listeners": advertised,
    }


async def until_led(bootstrap: str) -> None:
    """Until every partition has a leader that answers for it. KafkaError."""
    async with AdminClient(bootstrap) as admin:
        topics = await admin.list_topics()
        await admin.list_offsets(
            {(topic.name, index): TIMESTAMP_LATEST for topic in topics for index in topic.partitions}
        )


async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes, up to the end of one side."""
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


async def relay(port: int, target: str) -> asyncio.Server:
    """Listen, and hand on what comes, both ways."""
    host, _, target_port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(target_port))
        ways = [
            asyncio.create_task(hand_on(reader, there_writer)),
            asyncio.create_task(hand_on(there_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            there_writer.close()
            writer.close()

    return await asyncio.start_server(connected, HOST, port)


async def serve(node: NodeInfo, port: int) -> None:
    """Open the port once the broker leads, until this process is to end."""
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    os.set_blocking(0, False)
    loop.add_reader(0, lambda: None if os.read(0, PIECE_BYTES) else ends.set())
    assert node.grpc is not None
    assert node.kafka is not None
    waiting = asyncio.create_task(ends.wait())
    starting = asyncio.create_task(until_led(node.grpc))
    await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return
    await starting
    async with await relay(port, node.kafka):
        await waiting


def main(given: Sequence[str] | None = None) -> int:
    """Run until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server_properties", type=Path)
    parser.add_argument("--home", type=Path, required=True, help="a folder for the rest; emptied first")
    options = parser.parse_args(given)
    home: Path = options.home
    try:
        folder = read_folder(options.server_properties)
        shutil.rmtree(home, ignore_errors=True)
        cluster = SingleCluster(home, properties=lambda node: properties(node, folder, home))
        take_metadata_log(folder.path, home / "controller", folder.node_id)
        cluster.up(Counts(1, 1, 0, 0), {})
        try:
            asyncio.run(serve(cluster.state().node("leader-1"), folder.port))
        finally:
            cluster.down()
    except (FolderError, ClusterError, InvalidConfigError, KafkaError, OSError) as error:
        print(f"kafka_folder_mesh: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
