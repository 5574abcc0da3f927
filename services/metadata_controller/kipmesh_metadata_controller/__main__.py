"""`python -m kipmesh_metadata_controller`: run a voter of the metadata quorum."""

from __future__ import annotations

import sys

from kipmesh.core.config import ControllerConfig
from kipmesh.node.runtime import Node, Service, main

_EXAMPLES = """\
examples:
  python -m kipmesh_metadata_controller --config-file controller.properties
  python -m kipmesh_metadata_controller --config node.id=1001 --config cluster.id=demo \\
      --config controller.quorum.voters=1001@127.0.0.1:19093 \\
      --config listeners=MESH://127.0.0.1:19093 --config metadata.log.dir=/var/lib/kipmesh/metadata
  KIPMESH_CONFIG_LOG_LEVEL=debug python -m kipmesh_metadata_controller --config-file controller.properties
"""


def _make(config: ControllerConfig) -> Node:
    from kipmesh.controller import ControllerNode

    return ControllerNode(config)


SERVICE = Service(
    module="kipmesh_metadata_controller",
    summary="Voter of the metadata quorum: manages topics, brokers, leaders and in-sync replicas.",
    examples=_EXAMPLES,
    config_type=lambda: ControllerConfig,
    make=_make,
)

if __name__ == "__main__":
    sys.exit(main(SERVICE))
