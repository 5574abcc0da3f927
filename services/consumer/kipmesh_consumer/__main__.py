"""`python -m kipmesh_consumer`: run the consumer service."""

from __future__ import annotations

import sys

from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.node.runtime import Node, Service, main

_EXAMPLES = """\
examples:
  python -m kipmesh_consumer --config-file consumer.properties
  python -m kipmesh_consumer --config bootstrap.servers=127.0.0.1:19092 --config http.listener=127.0.0.1:8080
  python -m kipmesh_consumer --config bootstrap.servers=127.0.0.1:19092 --config group.id=readers
  curl 'http://127.0.0.1:8080/v1/topics/flights/records?from=earliest&limit=10'
  curl -H 'Accept: text/event-stream' 'http://127.0.0.1:8080/v1/topics/flights/records?from=latest&follow=true'
"""


def _make(config: ConsumerServiceConfig) -> Node:
    from kipmesh_consumer.node import ConsumerNode

    return ConsumerNode(config)


SERVICE = Service(
    module="kipmesh_consumer",
    summary="Consumer service: streams records over HTTP as NDJSON or server-sent events, and reports lag.",
    examples=_EXAMPLES,
    config_type=lambda: ConsumerServiceConfig,
    make=_make,
    has_own_http=True,
)

if __name__ == "__main__":
    sys.exit(main(SERVICE))
