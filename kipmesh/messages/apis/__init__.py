"""Requests and responses: one module per subject, from which one file in `protos/` is generated."""
