"""What goes wrong with clusters on this machine."""

from __future__ import annotations


class ClusterError(Exception):
    """A cluster cannot do what was asked; the first line of the text says why, further lines show a node's log."""
