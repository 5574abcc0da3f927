"""Clusters on this machine, for development and tests: `LocalCluster`.

Importing this package must stay cheap (no grpc, no pydantic), because pytest loads the plugin wherever kipmesh is
installed.
"""

from kipmesh.cluster.layout import ClusterError, NodeInfo, Role
from kipmesh.cluster.local import LocalCluster

__all__ = ["ClusterError", "LocalCluster", "NodeInfo", "Role"]
