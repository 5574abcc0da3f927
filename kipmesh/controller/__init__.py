"""The controller node: one voter of the metadata quorum."""

from kipmesh.controller.node import ControllerNode

__all__ = ["ControllerNode"]
