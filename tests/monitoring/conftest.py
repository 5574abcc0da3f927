"""Tests of what watches a mesh: rules, alerts and dashboards, with a real Prometheus where there is one."""
