"""Metrics and request traces of a broker."""
