"""Tests of rules, alerts and dashboards, with a real Prometheus if it is installed."""
