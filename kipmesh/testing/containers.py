"""`KipmeshContainer`: a cluster in a container for tests, with testcontainers (`pip install 'kipmesh[containers]'`).

    with KipmeshContainer() as kipmesh:
        producer = Producer(kipmesh.get_bootstrap_server())  # of kipmesh.client.sync
        kafka = kipmesh.get_kafka_bootstrap_server()  # for Kafka clients

All nodes run in one process of one container, image `kipmesh/single` (`make images`). The brokers advertise the ports
that Docker maps on the host. These are known only after the start, so `start` writes them to a file for which the
process waits.
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
"""Path in the container, on its volume."""
READY_LINE = "kipmesh: ready"
START_TIMEOUT_S = 60


class KipmeshContainer(DockerContainer):
    """A DockerContainer that runs a whole cluster.

    Args:
        image: image to run, by default `kipmesh/single` of this version.
        brokers, controllers: numbers of nodes.
        config: settings, each for all nodes that know its key.
        start_timeout_s: limit in seconds until the cluster is ready.
        kwargs: arguments of DockerContainer.
    """

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
        super().__init__(image or f"kipmesh/single:{version('kipmesh')}", **kwargs)
        self._brokers = brokers
        self._start_timeout_s = start_timeout_s
        command = ["--brokers", str(brokers), "--controllers", str(controllers), "--advertise-file", ADVERTISED]
        for key, value in (config or {}).items():
            command += ["--config", f"{key}={value}"]
        self.with_command(command)
        self.with_exposed_ports(*(first + index for first in (MESH_PORT, KAFKA_PORT) for index in range(brokers)))

    def start(self) -> Self:
        """Start the container and return it when the cluster is ready. After an error the container is stopped.

        Raises RuntimeError if the advertised addresses cannot be written, TimeoutError if the cluster is not ready
        after `start_timeout_s`, or errors of testcontainers and Docker.
        """
        super().start()
        try:
            advertised = {"mesh": self._addresses(MESH_PORT), "kafka": self._addresses(KAFKA_PORT)}
            # Docker cannot copy files into a container with a read-only root file system.
            script = f"import sys; open({ADVERTISED!r}, 'w').write(sys.argv[1])"
            result = self.exec(["python", "-c", script, json.dumps(advertised)])
            if result.exit_code:
                raise RuntimeError(f"cannot write {ADVERTISED}: {result.output.decode(errors='replace')}")
            waiting = LogMessageWaitStrategy(READY_LINE).with_startup_timeout(self._start_timeout_s)
            waiting.wait_until_ready(self)
        except BaseException:
            self.stop()
            raise
        return self

    def get_bootstrap_server(self) -> str:
        """Return the bootstrap addresses for kipmesh clients: comma-separated host:port of all brokers."""
        return ",".join(self._addresses(MESH_PORT))

    def get_kafka_bootstrap_server(self) -> str:
        """Return the bootstrap addresses for Kafka clients: comma-separated host:port of all brokers."""
        return ",".join(self._addresses(KAFKA_PORT))

    def _addresses(self, first: int) -> list[str]:
        host = self.get_container_host_ip()
        return [f"{host}:{self.get_exposed_port(first + index)}" for index in range(self._brokers)]
