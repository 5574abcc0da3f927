"""`python tools/capture_wire.py`: record exchanges of third-party clients with Apache Kafka in `tests/golden/wire`.

Three brokers of Apache Kafka advertise the ports of recording proxies. Each client of `tests/clients` runs a few
operations. Keeps the first exchange of each API and version, but prefers responses with content, as frames without
length: `KEY-VERSION.request`, `KEY-VERSION.response`, and the client's id in `exchanges.json`. Run again for new
versions of the clients or of Apache Kafka. Needs Java, Maven, and the tools of the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import struct
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kafka import KafkaBroker, KafkaCluster  # noqa: E402
from kipmesh.cluster import ports  # noqa: E402

TARGET = ROOT / "tests" / "golden" / "wire"
FRAME_BYTES_MAX = 16 << 10
"""Larger exchanges are not kept."""
BROKERS = 3

Exchange = tuple[str, bytes, bytes]
"""Client id, request and response."""


class Recorder:
    """Recorded exchanges, at most one for each API key and version."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], Exchange] = {}

    def add(self, request: bytes, response: bytes) -> None:
        """Keep a request and its response, both complete frames without length, if they are new or better.

        Ignores frames above FRAME_BYTES_MAX. Replaces a response below 64 bytes by a larger one of the same API and
        version.
        """
        if max(len(request), len(response)) > FRAME_BYTES_MAX:
            return
        key, version, _, size = struct.unpack_from(">hhih", request)
        client = request[10 : 10 + size].decode(errors="replace") if size > 0 else ""
        old = self.found.get((key, version))
        # Small responses are empty ones, which show little of the format.
        if old is None or (len(old[2]) < 64 < len(response)):
            self.found[key, version] = (client, request, response)


class Proxy:
    """A TCP proxy of one broker that records the exchanges it forwards."""

    def __init__(self, port: int, broker_port: int, recorder: Recorder) -> None:
        self._port = port
        self._broker_port = broker_port
        self._recorder = recorder

    async def start(self) -> None:
        """Start to listen on the port, until the event loop ends. Raises OSError if it cannot."""
        await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending: dict[int, bytes] = {}
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._broker_port)
        except OSError:
            writer.close()
            return

        async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, is_request: bool) -> None:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    head = await source.readexactly(4)
                    frame = await source.readexactly(struct.unpack(">I", head)[0])
                    if is_request:
                        pending[struct.unpack_from(">i", frame, 4)[0]] = frame
                    else:
                        request = pending.pop(struct.unpack_from(">i", frame)[0], None)
                        if request is not None:
                            self._recorder.add(request, frame)
                    target.write(head + frame)
                    await target.drain()
            target.close()

        await asyncio.gather(forward(reader, broker_writer, True), forward(broker_reader, writer, False))


def run_clients(bootstrap: str, directory: Path) -> None:
    """Run the operations of all installed third-party clients, one after another, through `bootstrap`.

    Missing clients and failed operations are reported on stderr and skipped. `directory` receives the clients' logs.
    """
    drivers = importlib.import_module("tests.clients.drivers_of_tests")
    scenarios = importlib.import_module("tests.clients.scenarios_of_tests")

    for client in drivers.CLIENTS.values():
        try:
            client.command()
        except drivers.MissingError as error:
            sys.stderr.write(f"capture: without {client.name}: {error}\n")
            continue
        driver = drivers.Driver(client, bootstrap, directory / f"{client.name}.log", {"rack": "rack-b"})
        topic, group = f"topic-{client.name}", f"group-{client.name}"
        sent = scenarios.records(4, 2, size=20)
        steps: Sequence[tuple[str, Mapping[str, Any]]] = (
            ("create_topic", {"topic": topic, "partitions": 2, "replicas": 3}),
            ("create_topic", {"topic": topic, "partitions": 2, "replicas": 3}),
            ("describe_cluster", {}),
            ("list_topics", {}),
            ("produce", {"topic": topic, "records": sent}),
            ("produce", {"topic": topic, "records": sent, "idempotent": True, "compression": "gzip"}),
            ("describe_topic", {"topic": topic}),
            ("consume", {"topic": topic, "partitions": {"0": -2, "1": 0}, "count": 8, "timeout_s": 10}),
            ("offset_for_time", {"topic": topic, "partition": 0, "timestamp": scenarios.FIRST_MS}),
            ("watermarks", {"topic": topic, "partition": 0}),
            ("group_open", {"group": group, "topics": [topic]}),
            ("group_poll", {"count": 8, "timeout_s": 12}),
            ("group_commit", {}),
            ("group_poll", {"count": 1, "timeout_s": 3}),
            ("committed", {"group": group, "topic": topic, "partition": 0}),
            ("list_groups", {}),
            ("describe_group", {"group": group}),
            ("group_close", {}),
            ("delete_group", {"group": group}),
            ("create_partitions", {"topic": topic, "total": 3}),
            ("describe_configs", {"topic": topic}),
            ("alter_config", {"topic": topic, "name": "retention.ms", "value": "7200000"}),
            ("delete_records", {"topic": topic, "partition": 0, "before": 1}),
            ("delete_topic", {"topic": topic}),
        )
        for verb, given in steps:
            try:
                driver(verb, **given)
            except (drivers.ClientError, drivers.NoVerbError, AssertionError) as error:
                sys.stderr.write(f"capture: {client.name} {verb}: {str(error)[:120]}\n")
        driver.close()


def keep(recorder: Recorder) -> None:
    """Replace the files in TARGET by the recorded exchanges of APIs and versions that kipmesh supports."""
    from kipmesh.messages.table import KAFKA_APIS

    TARGET.mkdir(parents=True, exist_ok=True)
    for old in (*TARGET.glob("*.request"), *TARGET.glob("*.response")):
        old.unlink()
    known, kept = KAFKA_APIS, {}
    for (key, version), (client, request, response) in sorted(recorder.found.items()):
        if key not in known or version not in known[key].versions:
            continue
        name = f"{key:02}-{version:02}"
        (TARGET / f"{name}.request").write_bytes(request)
        (TARGET / f"{name}.response").write_bytes(response)
        kept[name] = {"api": known[key].name, "client": client}
    (TARGET / "exchanges.json").write_text(json.dumps(kept, indent=1) + "\n")
    sys.stdout.write(f"{len(kept)} exchanges of {len({name[:2] for name in kept})} APIs\n")


def main() -> int:
    """Record the exchanges of all clients. Return 0. Raises an error if Apache Kafka does not start."""
    recorder, loop = Recorder(), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    front = ports.choose(BROKERS)

    def properties(broker: KafkaBroker) -> Mapping[str, str]:
        number = broker.node_id - 1
        return {
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{front[number]}",
            "broker.rack": f"rack-{'abc'[number]}",
            "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
            "offsets.topic.num.partitions": "3",
            "group.initial.rebalance.delay.ms": "0",
        }

    with (
        KafkaCluster(BROKERS, ("-Xms256m", "-Xmx512m"), properties) as cluster,
        tempfile.TemporaryDirectory() as directory,
    ):
        for port, broker in zip(front, cluster.brokers, strict=True):
            asyncio.run_coroutine_threadsafe(Proxy(port, broker.port, recorder).start(), loop).result(10)
        run_clients(",".join(f"127.0.0.1:{port}" for port in front), Path(directory))
        keep(recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
