"""A broker: leads and follows partitions, and observes the metadata quorum."""

from kipmesh.node.broker.node import BrokerNode

__all__ = ["BrokerNode"]
