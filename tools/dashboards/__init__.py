"""The Grafana dashboards of the mesh, as code: one module a dashboard, what they share in `parts`."""
