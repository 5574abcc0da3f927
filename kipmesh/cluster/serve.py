"""`python -m kipmesh.cluster.serve`: run a cluster in this process, in the foreground (image `kipmesh/single`).

Each broker listens on two ports on all interfaces, one for kipmesh clients and one for Kafka clients, and advertises
the host of `--advertise`. If the host is known only when the container runs, `--advertise-file` names a file to wait
for. Prints READY_LINE when the cluster is ready. SIGTERM stops it with exit code 0.
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
"""Ports of the first broker; each further broker has the next port."""
BROKERS_MAX = 9
READY_LINE = "kipmesh: ready"
EXIT_OK, EXIT_FAILED = 0, 1
POLL_INTERVAL_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Return 0, or 1 after an error, which is printed as one line on stderr.

    Raises SystemExit for invalid arguments (exit code 2).
    """
    options = _parser().parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = dict(_pair(text) for text in options.config)
        advertised = _advertised(options, stop)
        if advertised is not None:
            _serve(options, config, advertised, stop)
    except (ClusterError, InvalidConfigError, OSError, ValueError) as error:
        print(f"kipmesh: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_OK


def _serve(
    options: argparse.Namespace,
    config: Mapping[str, str],
    advertised: Mapping[str, Sequence[str]],
    stop: threading.Event,
) -> None:
    with tempfile.TemporaryDirectory(prefix="mesh-", dir=options.dir) as directory:
        cluster = SingleCluster(Path(directory), properties=lambda node: listeners(node, advertised))
        cluster.up(Counts(options.controllers, 1, options.brokers - 1, 0), config)
        try:
            print(READY_LINE, flush=True)
            stop.wait()
        finally:
            cluster.down()


def listeners(node: NodeInfo, advertised: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """Return `listeners` and `advertised.listeners` of a broker; {} for a controller.

    `advertised` has the keys "mesh" and "kafka", each with one host:port per broker.
    """
    if not node.role.is_broker or node.node_id is None:
        return {}
    index = node.node_id - 1
    ports = {"MESH_HOST": MESH_PORT + index, "KAFKA_HOST": KAFKA_PORT + index}
    public = {"MESH_HOST": advertised["mesh"][index], "KAFKA_HOST": advertised["kafka"][index]}
    return {
        "listeners": ",".join([f"MESH://{node.grpc}", *(f"{name}://0.0.0.0:{port}" for name, port in ports.items())]),
        "advertised.listeners": ",".join(f"{name}://{address}" for name, address in public.items()),
    }


def _advertised(options: argparse.Namespace, stop: threading.Event) -> Mapping[str, Sequence[str]] | None:
    """Return `{"mesh": [HOST:PORT, ...], "kafka": [...]}`, one address per broker.

    Waits for `--advertise-file`; None if `stop` is set first. Raises ValueError if the file has a different number of
    addresses.
    """
    if options.advertise_file is None:
        host = options.advertise
        return {
            "mesh": [f"{host}:{MESH_PORT + index}" for index in range(options.brokers)],
            "kafka": [f"{host}:{KAFKA_PORT + index}" for index in range(options.brokers)],
        }
    while not stop.wait(POLL_INTERVAL_S):
        try:
            addresses: Mapping[str, Sequence[str]] = json.loads(options.advertise_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not written completely yet
            time.sleep(POLL_INTERVAL_S)
            continue
        counts = [len(addresses.get(key, ())) for key in ("mesh", "kafka")] if isinstance(addresses, dict) else []
        if counts != [options.brokers] * 2:
            raise ValueError(
                f"{options.advertise_file} must contain {options.brokers} addresses for mesh and for kafka"
            )
        return addresses
    return None


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--config must be key=value, got {text!r}")
    return key.strip(), value.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh.cluster.serve", description="Run a cluster in one process, for tests."
    )
    numbers = range(1, BROKERS_MAX + 1)
    parser.add_argument("--brokers", type=int, choices=numbers, default=1, metavar=f"1-{BROKERS_MAX}")
    parser.add_argument("--controllers", type=int, choices=(1, 3, 5), default=1)
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of all nodes that know the key; repeatable",
    )
    parser.add_argument("--dir", type=Path, default=None, help="directory of the temporary data")
    advertise = parser.add_mutually_exclusive_group()
    advertise.add_argument("--advertise", metavar="HOST", default="127.0.0.1", help="host to advertise (127.0.0.1)")
    advertise.add_argument(
        "--advertise-file", type=Path, metavar="FILE", help="JSON object with lists mesh and kafka of HOST:PORT"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
