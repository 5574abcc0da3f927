"""A broker: leads and follows partitions, and observes the metadata quorum."""

from kipmesh.broker.node import BrokerNode

__all__ = ["BrokerNode"]
