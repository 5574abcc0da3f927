"""Requests and responses of administration."""
