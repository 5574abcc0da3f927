"""The controller node."""

from kipmesh.controller.node import ControllerNode

__all__ = ["ControllerNode"]
