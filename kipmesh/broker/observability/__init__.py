"""Metrics and traces of a broker."""
