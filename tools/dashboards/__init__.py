"""The Grafana dashboards as code: one module per dashboard, with shared parts in `parts`."""
