"""A process with a fake node, started by the tests of the runtime.

Usage: python node_of_tests.py BEHAVIOUR [options of every service]
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

from prometheus_client import CollectorRegistry, Counter
from pydantic import Field

from kipmesh.core.config.base import Config
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.node import http
from kipmesh.node.runtime import Service, main


class NodeOfTestsConfig(Config):
    """The keys that the runtime needs, and one more."""

    http_listener: str = "127.0.0.1:0"
    log_level: str = "info"
    log_format: str = "json"
    shutdown_grace_ms: int = 1000
    some_number: Annotated[int, Field(ge=0)] = 1


class NodeOfTests:
    def __init__(self, config: NodeOfTestsConfig, behaviour: str) -> None:
        self.registry = CollectorRegistry()
        Counter("tests_started", "Starts", registry=self.registry).inc()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready = False
        self._behaviour = behaviour

    async def start(self) -> None:
        match self._behaviour:
            case "foreign":
                self.failed.cancel()  # as a node that stops itself for cleanup
                await asyncio.sleep(0.05)
                raise KafkaError(ErrorCode.INCONSISTENT_CLUSTER_ID, "the directory belongs to\nanother cluster")
            case "bug":
                raise ZeroDivisionError("a bug")
            case "slow-start":
                await asyncio.sleep(60)
            case "fails":
                asyncio.get_running_loop().call_later(0.2, self.failed.set_exception, OSError(28, "No space left"))
            case "blocks":
                asyncio.get_running_loop().call_later(0.2, time.sleep, 600)
        self.ready = self._behaviour != "not-ready"

    async def stop(self) -> None:
        if self._behaviour == "slow-stop":
            await asyncio.sleep(60)
        print("stopped cleanly", flush=True)


if __name__ == "__main__":
    behaviour = sys.argv.pop(1)
    if behaviour != "blocks":
        http.LOOP_RESPONSE_TIMEOUT_S = 60.0  # a slow machine does not count as a blocked loop
    service = Service(
        module="node_of_tests",
        summary="A node for tests.",
        examples="examples:\n  node_of_tests ok",
        config_type=lambda: NodeOfTestsConfig,
        make=lambda config: NodeOfTests(config, behaviour),
    )
    sys.exit(main(service))
