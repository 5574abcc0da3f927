"""Settings of librdkafka for SASL."""

from __future__ import annotations

from typing import Any

from kipmesh.cluster import LocalCluster


def settings(cluster: LocalCluster, user: str, password: str, mechanism: str) -> dict[str, Any]:
    """Return the client configuration for the cluster's Kafka listener, without TLS."""
    return {
        "bootstrap.servers": cluster.kafka_bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }
