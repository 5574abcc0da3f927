"""kipmesh: a Kafka-compatible replicated log made of small services."""
