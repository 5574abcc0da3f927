"""Requests and responses: one module for the APIs of one subject, each of which becomes one file of `protos/`."""
