"""The consumer service: streams records over HTTP."""
