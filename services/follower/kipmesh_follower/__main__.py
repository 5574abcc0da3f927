"""`python -m kipmesh_follower`: run a broker that is preferred as replica."""

from __future__ import annotations

import sys

from kipmesh.core.config import BrokerConfig
from kipmesh.node.runtime import Node, Service, main

_EXAMPLES = """\
examples:
  python -m kipmesh_follower --config-file follower.properties
  python -m kipmesh_follower --config node.id=1 --config cluster.id=demo \\
      --config controller.quorum.voters=1001@127.0.0.1:19093 \\
      --config listeners=MESH://127.0.0.1:19092 --config log.dirs=/var/lib/kipmesh/follower
  KIPMESH_CONFIG_LOG_LEVEL=debug python -m kipmesh_follower --config-file follower.properties
"""


def _make(config: BrokerConfig) -> Node:
    from kipmesh.broker import BrokerNode

    return BrokerNode(config, is_leader_role=False)


SERVICE = Service(
    module="kipmesh_follower",
    summary="Broker that is preferred as replica: follows leaders and is promoted when a leader fails.",
    examples=_EXAMPLES,
    config_type=lambda: BrokerConfig,
    make=_make,
)

if __name__ == "__main__":
    sys.exit(main(SERVICE))
