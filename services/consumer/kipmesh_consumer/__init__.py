"""The consumer service."""
