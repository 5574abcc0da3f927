"""Limits of the message types."""

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
