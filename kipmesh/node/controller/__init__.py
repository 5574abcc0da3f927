"""The controller node."""

from kipmesh.node.controller.node import ControllerNode

__all__ = ["ControllerNode"]
