"""The leader service."""
