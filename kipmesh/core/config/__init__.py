"""Configuration models of clients, nodes, services and topics; see `base`."""

from kipmesh.core.config.base import Config
from kipmesh.core.config.client import AdminConfig, ClientConfig, ConsumerConfig, ProducerConfig
from kipmesh.core.config.node import BrokerConfig, ControllerConfig, Endpoint, NodeConfig, Voter
from kipmesh.core.config.topic import BROKER_DEFAULTS, TopicConfig

__all__ = [
    "BROKER_DEFAULTS",
    "AdminConfig",
    "BrokerConfig",
    "ClientConfig",
    "Config",
    "ConsumerConfig",
    "ControllerConfig",
    "Endpoint",
    "NodeConfig",
    "ProducerConfig",
    "TopicConfig",
    "Voter",
]
