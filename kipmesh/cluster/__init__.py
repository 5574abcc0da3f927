"""Clusters on this machine, for people and for tests: `LocalCluster`.

Importing this package is cheap (no grpc, no pydantic): the pytest plugin is loaded by every test run that has
kipmesh installed.
"""

from kipmesh.cluster.layout import ClusterError, NodeInfo, Role
from kipmesh.cluster.local import LocalCluster

__all__ = ["ClusterError", "LocalCluster", "NodeInfo", "Role"]
