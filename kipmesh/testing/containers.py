"""`KipmeshContainer`: a mesh in a container for tests, by testcontainers (`pip install 'kipmesh[containers]'`).

    with KipmeshContainer() as kipmesh:
        producer = Producer(kipmesh.get_bootstrap_server())  # of kipmesh.client.sync
        kafka = kipmesh.get_kafka_bootstrap_server()  # for clients of Apache Kafka

All nodes are in one process of one container. Its ports on this machine are free ones, which the brokers tell their
clients: so it waits for a file with them, which `start` writes. The image is `kipmesh/single` of `make images`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Self

from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

MESH_PORT, KAFKA_PORT = 9200, 9300
ADVERTISED = "/var/lib/kipmesh/advertised.json"
"""Within the container: its volume."""
READY_LINE = "kipmesh: ready"
START_TIMEOUT_S = 60


class KipmeshContainer(DockerContainer):
    """One container; `brokers` of them have replicas of what is written."""

    def __init__(
        self,
        image: str | None = None,
        *,
        brokers: int = 1,
        controllers: int = 1,
        config: Mapping[str, str] | None = None,
        start_timeout_s: int = START_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        """`config` are keys of brokers and controllers; `kwargs` are testcontainers'."""
        super().__init__(image or f"kipmesh/single:{version('kipmesh')}", **kwargs)
        self._brokers = brokers
        self._start_timeout_s = start_timeout_s
        command = ["--brokers", str(brokers), "--controllers", str(controllers), "--advertise-file", ADVERTISED]
        for key, value in (config or {}).items():
            command += ["--config", f"{key}={value}"]
        self.with_command(command)
        self.with_exposed_ports(*(first + place for first in (MESH_PORT, KAFKA_PORT) for place in range(brokers)))

    def start(self) -> Self:
        """Start it, and return when it is ready."""
        super().start()
        try:
            said = {"mesh": self._addresses(MESH_PORT), "kafka": self._addresses(KAFKA_PORT)}
            # Written from within: the root file system may be read-only.
            script = f"import sys; open({ADVERTISED!r}, 'w').write(sys.argv[1])"
            result = self.exec(["python", "-c", script, json.dumps(said)])
            if result.exit_code:
                raise RuntimeError(f"the container's ports could not be told: {result.output.decode(errors='replace')}")
            waiting = LogMessageWaitStrategy(READY_LINE).with_startup_timeout(self._start_timeout_s)
            waiting.wait_until_ready(self)
        except BaseException:
            self.stop()
            raise
        return self

    def get_bootstrap_server(self) -> str:
        """`host:port` of the brokers for kipmesh's clients, separated by commas."""
        return ",".join(self._addresses(MESH_PORT))

    def get_kafka_bootstrap_server(self) -> str:
        """The same for clients of Apache Kafka."""
        return ",".join(self._addresses(KAFKA_PORT))

    def _addresses(self, first: int) -> list[str]:
        host = self.get_container_host_ip()
        return [f"{host}:{self.get_exposed_port(first + place)}" for place in range(self._brokers)]
