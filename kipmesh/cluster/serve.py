"""`python -m kipmesh.cluster.serve`: a whole mesh in this one process, in the foreground; the image `kipmesh/single`.

Each broker listens on two ports of all addresses, for kipmesh's clients and for Apache Kafka's, and tells both the
addresses of `--advertise`. Where these are known only when the container runs, they come from a file that somebody
writes: `--advertise-file`. One line says when the mesh is ready; SIGTERM ends it cleanly, with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kipmesh.cluster.layout import ClusterError, Counts, NodeInfo
from kipmesh.cluster.single import SingleCluster
from kipmesh.core.errors import InvalidConfigError

MESH_PORT, KAFKA_PORT = 9200, 9300
"""Of the first broker; the others have the next ones."""
BROKERS_MAX = 9
READY_LINE = "kipmesh: ready"
EXIT_OK, EXIT_FAILED = 0, 1
WAIT_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    options = _parser().parse_args(arguments)
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    try:
        config = dict(_pair(text) for text in options.config)
        advertised = _advertised(options, ends)
        if advertised is not None:
            _serve(options, config, advertised, ends)
    except (ClusterError, InvalidConfigError, OSError, ValueError) as error:
        print(f"kipmesh: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_OK


def _serve(
    options: argparse.Namespace,
    config: Mapping[str, str],
    advertised: Mapping[str, Sequence[str]],
    ends: threading.Event,
) -> None:
    def properties(node: NodeInfo) -> Mapping[str, str]:
        return listeners(node, advertised)

    with tempfile.TemporaryDirectory(prefix="mesh-", dir=options.dir) as folder:
        cluster = SingleCluster(Path(folder), properties=properties)
        cluster.up(Counts(options.controllers, 1, options.brokers - 1, 0), config)
        try:
            print(READY_LINE, flush=True)
            ends.wait()
        finally:
            cluster.down()


def listeners(node: NodeInfo, advertised: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """What a broker has to say of its listeners: among each other brokers use the loopback."""
    if not node.role.is_broker or node.node_id is None:
        return {}
    place = node.node_id - 1
    mine = {"MESH_HOST": MESH_PORT + place, "KAFKA_HOST": KAFKA_PORT + place}
    told = {"MESH_HOST": advertised["mesh"][place], "KAFKA_HOST": advertised["kafka"][place]}
    return {
        "listeners": ",".join([f"MESH://{node.grpc}", *(f"{name}://0.0.0.0:{port}" for name, port in mine.items())]),
        "advertised.listeners": ",".join(f"{name}://{address}" for name, address in told.items()),
    }


def _advertised(options: argparse.Namespace, ends: threading.Event) -> Mapping[str, Sequence[str]] | None:
    """`{"mesh": [HOST:PORT, ...], "kafka": [...]}`, an address for each broker; None when it is to end before."""
    if options.advertise_file is None:
        host = options.advertise
        return {
            "mesh": [f"{host}:{MESH_PORT + place}" for place in range(options.brokers)],
            "kafka": [f"{host}:{KAFKA_PORT + place}" for place in range(options.brokers)],
        }
    while not ends.wait(WAIT_S):
        try:
            said = json.loads(options.advertise_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or not whole yet
            time.sleep(WAIT_S)
            continue
        if not isinstance(said, dict) or any(len(said.get(key, ())) != options.brokers for key in ("mesh", "kafka")):
            raise ValueError(f"{options.advertise_file} has to name {options.brokers} addresses for mesh and for kafka")
        return said
    return None


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--config {text!r} is not key=value")
    return key.strip(), value.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh.cluster.serve", description="A whole mesh in one process, for tests."
    )
    numbers = range(1, BROKERS_MAX + 1)
    parser.add_argument("--brokers", type=int, choices=numbers, default=1, metavar=f"1-{BROKERS_MAX}")
    parser.add_argument("--controllers", type=int, choices=(1, 3, 5), default=1)
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="of every node that knows it"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where data are while it runs")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--advertise", metavar="HOST", default="127.0.0.1", help="of the ports as they are (127.0.0.1)")
    where.add_argument(
        "--advertise-file", type=Path, metavar="FILE", help="JSON with lists mesh and kafka of HOST:PORT"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
